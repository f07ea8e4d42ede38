"""Families whose templates have no marks: turns are learned as transformers does with marks."""

import numpy as np
import pytest
import tokenizers

from manualpar.data import load_tokenizer
from manualpar.data.chat import ChatEncoder, Chats
from manualpar.data.packing import learned_of, tokens_of
from tests.data.chat_families import CHATML_TOKENS, FAMILIES, NEMOTRON, QWEN, without_marks
from tests.data.chats import CHAT, write_chat_tokenizer

REASONED = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nOne more.\n</think>\n\n2"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo more.\n</think>\n\n4 \u00e9!"},
]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <\u4e2d>.", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
CALLED = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "It is a sum."},
    {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]
CHATS = (CHAT, CHAT[1:3], [*CHAT, CHAT[1]], REASONED, REASONED[:2])
# The learned texts of two turns, as TRL's templates for these families mark them.
LEARNED = {
    "Qwen 3": ["2<|im_end|>\n", "<think>\n\n</think>\n\n4<|im_end|>\n"],
    "Qwen 2.5": ["\n2<|im_end|>\n", "\n4<|im_end|>\n"],
    "Phi-3": ["2<|end|>\n", "4<|end|>\n<|endoftext|>"],
    "DeepSeek R1": [
        f"<\uff5cAssistant\uff5c>{answer}<\uff5cend\u2581of\u2581sentence\uff5c>" for answer in "24"
    ],
    "Nemotron 3": ["<think></think>2<|im_end|>\n", "<think></think>4<|im_end|>\n"],
    "gpt-oss": [
        "<|start|>assistant<|channel|>final<|message|>2<|end|>",
        "<|start|>assistant<|channel|>final<|message|>4<|return|>",
    ],
    "GLM-4": ["\n<think></think>\n2<|user|>", "\n<think></think>\n4"],
    "Tiny Aya": [f"{answer}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for answer in "24"],
    "Gemma 4": ["2<turn|>\n", "4<turn|>\n"],
}


def _tokenizers(tmp_path, name):
    """Tokenizers of the same family, with a template without and with marks."""
    template, special, end = FAMILIES[name]
    config = {"eos_token": end, "bos_token": special[0]}
    for folder, source in (("plain", without_marks(template)), ("marked", template)):
        yield write_chat_tokenizer(tmp_path / folder, source, special, **config)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_without_marks_is_learned_as_transformers_learns_it_with_marks(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
    plain, marked = _tokenizers(tmp_path, name)
    theirs = transformers.AutoTokenizer.from_pretrained(marked)
    encoders = [ChatEncoder(load_tokenizer(directory), 0.1) for directory in (plain, marked)]
    lines = [{"messages": chat} for chat in CHATS]
    lines.append({"messages": [*CHAT[:2], CHAT[2] | {"thinking": "Hm."}]})
    if name in ("Qwen 3", "Gemma 4"):
        lines += [{"messages": CALLED, "tools": [TOOL]}]
    for line in lines:
        made = theirs.apply_chat_template(
            line["messages"],
            tools=line.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for encoder in encoders:
            example = encoder.example(line)
            assert tokens_of(example).tolist() == made["input_ids"]
            np.testing.assert_array_equal(learned_of(example), made["assistant_masks"])
        assert 0 < sum(made["assistant_masks"]) < len(made["input_ids"])


def _learned(tokenizer, line):
    """The learned texts of a chat, of consecutive tokens."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))
    example = ChatEncoder(tokenizer, 0.1).example(line)
    edges = np.flatnonzero(np.diff(learned_of(example) > 0, prepend=False, append=False))
    pieces = (tokens_of(example)[a:b] for a, b in edges.reshape(-1, 2))
    return [raw.decode(piece, skip_special_tokens=False) for piece in pieces]


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_begin_and_end_where_the_templates_of_trl_have_marks(tmp_path, name):
    said = ("\n1 + 1?", "2", "\n2 + 2?", "4")
    chat = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, said, strict=True)
    ]
    for directory in _tokenizers(tmp_path, name):
        assert _learned(load_tokenizer(directory), {"messages": chat}) == LEARNED[name]


def test_results_of_tools_within_a_turn_and_line_breaks_of_others_are_not_learned(tmp_path):
    plain, _ = _tokenizers(tmp_path, "Gemma 4")
    learned = _learned(load_tokenizer(plain), {"messages": CALLED, "tools": [TOOL]})
    assert learned == ["call:add", "It is 2.<turn|>\n", "Welcome<turn|>\n"]
    # The text of a user follows the end of a turn, and begins with a line break.
    bare = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant"
        "{{ m.content }}<|im_end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "bare", bare))
    chat = [CHAT[1], CHAT[4], {"role": "user", "content": "\nYes"}, CHAT[4]]
    assert _learned(tokenizer, {"messages": chat}) == [f"{CHAT[4]['content']}<|im_end|>"] * 2


def test_of_several_turns_all_are_learned_though_the_last_is_written_otherwise(tmp_path):
    directory = write_chat_tokenizer(tmp_path / "t", without_marks(QWEN))
    tokenizer = load_tokenizer(directory)
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))

    assert _learned(tokenizer, {"messages": REASONED}) == [
        "2<|im_end|>\n",
        "<think>\nTwo more.\n</think>\n\n4 \u00e9!<|im_end|>\n",
    ]
    call = '{"name": "add", "arguments": {"a": 1, "b": 1}}'
    assert _learned(tokenizer, {"messages": CALLED[:2], "tools": [TOOL]}) == [
        f"<think>\nIt is a sum.\n</think>\n\n\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
    ]
    for line, said in (
        ({"messages": CALLED, "tools": TOOL}, "has tools that are no list of objects"),
        ({"messages": CALLED, "tools": "["}, "has tools whose text is not JSON"),
        ({"messages": CALLED, "documents": [{}]}, "has documents, which .* leaves out"),
        (
            {"messages": CALLED, "tools": [{"x": {"<|im_end|>": 1}}]},
            r"a variable 'tools' that spells out the special token '<\|im_end\|>'",
        ),
        (
            {"messages": CALLED, "chat_template_kwargs": {"tools": []}},
            "has chat_template_kwargs with 'tools', which is a field of its own",
        ),
        ({"messages": [{"role": "user"}]}, "message 1 whose content is missing, expected"),
    ):
        with pytest.raises(ValueError, match=said):
            ChatEncoder(tokenizer, 0.1).example(line)
    prompt = Chats(tokenizer).prompt({"messages": CALLED[:1], "tools": f"[{call}]"})
    assert call in raw.decode(prompt, skip_special_tokens=False)


def test_a_family_is_chosen_only_where_probes_agree(tmp_path):
    def turns(template, special=CHATML_TOKENS):
        directory = write_chat_tokenizer(tmp_path / "t", template, special)
        return Chats(load_tokenizer(directory))._choose({}).turns

    found = turns(without_marks(NEMOTRON))
    assert found.begins == ("<|im_start|>assistant\n", "<|im_start|>assistant")
    assert turns(NEMOTRON) is None
    # A user's words inside of an assistant's turn.
    assert (
        turns("{% for m in messages %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{% endfor %}")
        is None
    )
    # The tokens that would begin a turn are ordinary text of this tokenizer.
    assert turns(without_marks(NEMOTRON), ("<|endoftext|>", "<|im_end|>")) is None
