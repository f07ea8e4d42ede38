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
    if name == "Qwen 3":
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


def test_of_several_turns_all_are_learned_though_the_last_is_written_otherwise(tmp_path):
    directory = write_chat_tokenizer(tmp_path / "t", without_marks(QWEN))
    tokenizer = load_tokenizer(directory)
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))

    def learned(line):
        example = ChatEncoder(tokenizer, 0.1).example(line)
        return raw.decode(tokens_of(example)[learned_of(example) > 0], skip_special_tokens=False)

    assert learned({"messages": REASONED}) == (
        "2<|im_end|><think>\nTwo more.\n</think>\n\n4 \u00e9!<|im_end|>"
    )
    call = '{"name": "add", "arguments": {"a": 1, "b": 1}}'
    assert learned({"messages": CALLED[:2], "tools": [TOOL]}) == (
        f"<think>\nIt is a sum.\n</think>\n\n\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    )
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
