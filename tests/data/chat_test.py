"""Of chats the assistant's words are learned, of completions the completion, and nothing else."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from manualpar.data import load_tokenizer
from manualpar.data.chat import ChatEncoder
from manualpar.data.document_files import divide, find_document_files
from manualpar.data.packing import PackedSplit, learned_of, tokens_of
from manualpar.data.sources import load_dataset
from manualpar.data.tokenize import write_token_files
from manualpar.data.tokenizer import ByteTokenizer
from tests.data.chats import CHAT, CHATML, MARKED, write_chat_tokenizer
from tests.data.documents import write_documents


def _learned(tokenizer, example) -> list[str]:
    """The texts that are learned, of consecutive tokens."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))
    learned, tokens = learned_of(example) > 0, tokens_of(example)
    edges = np.flatnonzero(np.diff(learned.astype(int), prepend=0, append=0))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [raw.decode(tokens[a:b].tolist(), skip_special_tokens=False) for a, b in pairs]


# As ChatML, with the tokens of no family.
OTHER = CHATML.replace("<|im_start|>", "<|endoftext|>")


@pytest.mark.parametrize("template", [CHATML, MARKED, OTHER], ids=["plain", "marked", "other"])
def test_the_assistants_words_and_their_end_are_learned(tmp_path, template):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", template))
    example = ChatEncoder(tokenizer, 0.1).example({"messages": CHAT, "other": 1})
    after = "\n" if template == CHATML else ""
    assert _learned(tokenizer, example) == [
        f"It is 2, \u00e9\u4e2d.<|im_end|>{after}",
        f"You are welcome<|im_end|>{after}",
    ]
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))
    text = raw.decode(tokens_of(example).tolist(), skip_special_tokens=False)
    begin = "<|endoftext|>" if template == OTHER else "<|im_start|>"
    turns = [f"{begin}{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT]
    assert text == "".join(turns)
    assert tokens_of(example)[0] == raw.token_to_id(begin)
    assert tokenizer.end_token == raw.token_to_id("<|im_end|>")


def test_a_name_chooses_a_template_of_several(tmp_path):
    named = {"default": CHATML, "tool_use": "{# tools #}called " + CHATML, "rag": "read " + CHATML}
    listed = [{"name": name, "template": source} for name, source in named.items()]
    directory = write_chat_tokenizer(tmp_path / "t", listed)
    raw = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")

    def begin(template="", **fields):
        line = {"messages": CHAT, **fields}
        example = ChatEncoder(load_tokenizer(directory), 0.1, template).example(line)
        text = raw.decode(tokens_of(example).tolist(), skip_special_tokens=False)
        return text.split("<|im_start|>")[0]

    tools, named_rag = [{"name": "look"}], {"chat_template": "rag"}
    assert begin() == begin(tools=[]) == begin("default") == ""
    assert begin(tools=tools) == begin("tool_use") == "called"
    assert begin("rag") == begin(chat_template_kwargs=named_rag) == "read"
    assert begin(tools=tools, chat_template_kwargs={"chat_template": "tool_use"}) == "called"
    file = _write_text(tmp_path / "file.jinja", "file " + CHATML)
    assert begin(file) == "file"
    path = _write(tmp_path / "chats.jsonl", _chats())
    made = [
        write_token_files(
            path, str(tmp_path / f"made{name}"), source="chat", tokenizer=directory, template=name
        )
        for name in ("", "rag")
    ]
    assert made[0].splits["train"].blake2b != made[1].splits["train"].blake2b
    for template, line, said in (
        ("none", {}, "is 'none', which cannot be read .* templates are 'default', 'tool_use', "),
        ("", {"chat_template_kwargs": {"chat_template": "none"}}, "names the chat template 'none'"),
        ("rag", {"tools": tools}, "has tools, which the chat's template leaves out"),
    ):
        with pytest.raises(ValueError, match=said):
            begin(template, **line)


def test_a_template_that_leaves_out_the_answers_is_refused(tmp_path):
    source = CHATML.replace("message['content']", "message['content'][0].text | default('')")
    directory = write_chat_tokenizer(tmp_path / "t", source)
    with pytest.raises(ValueError, match="has answers that the chat's template leaves out"):
        ChatEncoder(load_tokenizer(directory), 0.1, "").example({"messages": CHAT})


def test_templates_in_files_go_with_the_tokens(tmp_path):
    directory = tmp_path / "t"
    write_chat_tokenizer(directory, "")
    others = directory / "additional_chat_templates"
    others.mkdir()
    (others / "rag.jinja").write_text("read " + CHATML)
    options = {"source": "chat", "tokenizer": str(directory), "template": "rag"}
    write_token_files(_write(tmp_path / "c.jsonl", _chats()), str(tmp_path / "tokens"), **options)
    copied = load_tokenizer(str(tmp_path / "tokens"))
    line = {"messages": CHAT}
    first, second = (
        ChatEncoder(tokenizer, 0.1, "rag").example(line)
        for tokenizer in (load_tokenizer(str(directory)), copied)
    )
    np.testing.assert_array_equal(first, second)


def test_a_completion_and_the_token_that_ends_it_are_learned(tmp_path):
    line = {"prompt": "What <|im_end|>?", "completion": "It is"}
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", ""))
    example = ChatEncoder(tokenizer, 0.1).example(line)
    assert _learned(tokenizer, example) == ["It is<|im_end|>"]
    # Texts are not special tokens; and this tokenizer has no token that begins prompts.
    assert tokenizer.decode(tokens_of(example)[: -1 - len(tokenizer.encode("It is"))]) == (
        "What <|im_end|>?"
    )
    assert (tokens_of(example) == tokenizer.end_token).sum() == 1
    of_bytes = ChatEncoder(ByteTokenizer(), 0.1).example(line)
    assert tokens_of(of_bytes).tolist() == [256, *b"What <|im_end|>?It is", 256]
    assert learned_of(of_bytes).tolist() == [0] * 17 + [1] * 6


def _write(path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _chats(count: int = 60):
    for number in range(count):
        answer = {"role": "assistant", "content": f"It is {number}. " * (1 + number % 5)}
        yield {"messages": [{"role": "user", "content": f"What is {number}?"}, answer]}
    for number in range(count):
        yield {"prompt": f"What is {number}?", "completion": f" It is {number}."}


def test_chats_are_a_dataset_of_packed_sequences(tmp_path):
    path = _write(tmp_path / "chats.jsonl", _chats())
    options = {"tokenizer": write_chat_tokenizer(tmp_path / "t"), "held_out": 0.1}
    load = {"seed": 0, "sequence_length": 100, "cache": str(tmp_path / "cache")}
    dataset = load_dataset("chat", path=path, **load, **options)
    assert isinstance(dataset.train, PackedSplit)
    assert sum(len(s.order) for s in (dataset.train, dataset.eval, dataset.test)) == 120
    assert dataset.train.tokens_per_byte is None
    written = write_token_files(path, str(tmp_path / "tokens"), source="chat", **options)
    made = load_dataset("tokens", path=str(tmp_path / "tokens"), **load)
    assert written.examples == 1
    assert made.fingerprint == dataset.fingerprint
    np.testing.assert_array_equal(made.train[1].labels, dataset.train[1].labels)
    # Another template is other data.
    other = _write_text(tmp_path / "other.jinja", CHATML.replace("\\n", " "))
    again = load_dataset("chat", path=path, template=other, **load, **options)
    assert again.fingerprint != dataset.fingerprint
    with pytest.raises(ValueError, match=r"`sequence_length` is 8, and \d+ of \d+ exam"):
        load_dataset("chat", path=path, **(load | {"sequence_length": 8}), **options)
    (tmp_path / "tokens" / "eval.lengths").write_bytes(b"\2\0\0\0")
    with pytest.raises(ValueError, match=r"whose eval\.lengths does not fit its eval\.bin"):
        load_dataset("tokens", path=str(tmp_path / "tokens"), **load)


def _write_text(path, text) -> str:
    path.write_text(text)
    return str(path)


def test_chats_and_documents_are_mixed(tmp_path):
    chats = _write(tmp_path / "chats.jsonl", _chats())
    (tmp_path / "p").mkdir()
    documents = write_documents(tmp_path / "p", "parquet", [f"{i} abc" * 9 for i in range(90)])
    dataset = load_dataset(
        "mixture",
        seed=0,
        mixture=(f"1 chat {chats}", f"3 parquet {documents}"),
        tokenizer=write_chat_tokenizer(tmp_path / "t"),
        sequence_length=100,
        held_out=0.1,
        cache=str(tmp_path / "cache"),
    )
    packed, stream = dataset.train.parts
    for split in (packed, stream):
        batch = split[0]
        assert {name: x.shape for name, x in batch.inputs.items()} == {
            "tokens": (100,),
            "documents": (100,),
        }
    begins = stream[0].inputs["tokens"] == dataset.tokenizer.bos_token
    assert begins.sum() > 1
    np.testing.assert_array_equal(stream[0].inputs["documents"], np.cumsum(begins))


TURNS = [("user", "1 + 1?"), ("assistant", "It is 2"), ("user", "And 3?"), ("assistant", "No 4")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS
]
PARTS = [
    {
        "role": role,
        "content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}],
    }
    for role, text in TURNS
]
FORMS = {
    "sharegpt": ({"conversations": SHAREGPT}, {"messages": MESSAGES}),
    "sharegpt with a system": (
        {"conversations": SHAREGPT, "system": "Short."},
        {"messages": [{"role": "system", "content": "Short."}, *MESSAGES]},
    ),
    "conversations of messages": ({"conversations": MESSAGES}, {"messages": MESSAGES}),
    "parts": ({"messages": PARTS}, {"messages": MESSAGES}),
    "alpaca": (
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
        {
            "messages": [
                {"role": "user", "content": "Add.\n\n1, 1"},
                {"role": "assistant", "content": "2"},
            ]
        },
    ),
    "alpaca without input": (
        {"instruction": "Add.", "input": "", "output": "2"},
        {"messages": [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "2"}]},
    ),
    "prompt and completion": (
        {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]},
        {"messages": [MESSAGES[0], MESSAGES[1] | {"weight": 0}, *MESSAGES[2:]]},
    ),
}


@pytest.mark.parametrize("template", [CHATML, MARKED, OTHER], ids=["plain", "marked", "other"])
def test_a_turn_without_weight_is_read_and_not_learned(tmp_path, template):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", template))
    encoder = ChatEncoder(tokenizer, 0.1)
    whole = encoder.example({"messages": MESSAGES})
    for name in ("weight", "train"):
        for kept in ((0, 1), (1, 0)):
            values = iter(kept)
            turns = [m | {name: next(values)} if m["role"] == "assistant" else m for m in MESSAGES]
            example = encoder.example({"messages": turns})
            np.testing.assert_array_equal(tokens_of(example), tokens_of(whole))
            both = _learned(tokenizer, whole)
            assert _learned(tokenizer, example) == [x for x, k in zip(both, kept, strict=True) if k]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_other_programs_become_the_same_tokens(tmp_path, form):
    """In JSON, and in Parquet, whose structs have all fields of a column."""
    row, standard = FORMS[form]
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t"))
    encoder = ChatEncoder(tokenizer, 0.1)
    expected = encoder.example(standard)
    np.testing.assert_array_equal(encoder.example(row), expected)
    other = {"conversations": SHAREGPT[:2]} if "messages" in row else {"messages": MESSAGES[:2]}
    path = tmp_path / "rows.parquet"
    names = dict.fromkeys((*row, *other))
    table = pyarrow.table({name: [row.get(name), other.get(name)] for name in names})
    pyarrow.parquet.write_table(table, path)
    (part,) = divide("chat", find_document_files(str(path), "chat"), "text")
    (((_, read, _), (_, short, _)),) = encoder.encode(part)
    np.testing.assert_array_equal(read, expected)
    np.testing.assert_array_equal(short, encoder.example({"messages": MESSAGES[:2]}))


def test_alpaca_without_a_chat_template_has_alpacas_prompt():
    row, _ = FORMS["alpaca"]
    text = bytes(tokens_of(ChatEncoder(ByteTokenizer(), 0.1).example(row))[1:-1].tolist()).decode()
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "Add.\n\n### Input:\n1, 1\n\n### Response:\n2"
    )


def test_a_completion_is_encoded_with_its_prompt(tmp_path):
    """As transformers encodes the joined text, also if the tokenizer puts a space before texts."""
    transformers = pytest.importorskip("transformers")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    raw.train_from_iterator(["say yes or no please (or not)", "the sea: 9 = 4 + 5"] * 9, trainer)
    (tmp_path / "t").mkdir()
    raw.save(str(tmp_path / "t" / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    for prompt, completion in (
        ("say (", "yes"),
        ("4 + 5 =", " 9"),
        ("sa", "y no"),
        ("the ", "sea"),
    ):
        example = ChatEncoder(tokenizer, 0.1).example({"prompt": prompt, "completion": completion})
        whole = theirs(prompt + completion, return_offsets_mapping=True)
        assert tokens_of(example).tolist() == [*whole.input_ids, theirs.eos_token_id]
        ends = [stop > len(prompt) for _, stop in whole.offset_mapping]
        assert (learned_of(example) > 0).tolist() == [*ends, True]


def test_bad_chats_are_skipped_and_the_others_of_their_template_are_not(tmp_path):
    refusing = "{%- if messages|length > 3 %}{{ raise_exception('long') }}{%- endif %}" + CHATML
    rows = [{"messages": MESSAGES[:2]}] * 5 + [{"messages": MESSAGES}] + [{"x": 1}]
    rows += [{"messages": MESSAGES[:2]}] * 5
    _write(tmp_path / "chats.jsonl", rows)
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", refusing))
    (part,) = divide("chat", find_document_files(f"{tmp_path}/*.jsonl", "chat"), "text")
    encoder = ChatEncoder(tokenizer, 0.1, bad_rows="skip")
    (made,) = encoder.encode(part)
    assert (len(made), encoder.notes.skipped) == (10, 2)
    assert "line 6: is refused by the chat's template (long)" in encoder.notes.first[0]
