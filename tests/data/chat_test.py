"""Of chats the assistant's words are learned, of completions the completion, and nothing else."""

import json

import numpy as np
import pytest
import tokenizers

from manualpar.data import load_tokenizer
from manualpar.data.chat import ChatEncoder
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
