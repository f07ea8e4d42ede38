"""Tokens and masks of chats are those of `transformers`."""

import numpy as np
import pytest

from manualpar.data import load_tokenizer
from manualpar.data.chat import ChatEncoder
from manualpar.data.packing import learned_of, tokens_of
from tests.data.chats import CHAT, CHATML, MARKED, write_chat_tokenizer

# As Llama 3 has it, with a date that is not asked for, loops and filters.
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n" + system_message + "<|im_end|>" }}
{%- for message in messages %}
    {%- if not message.content %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""
# What templates ask for besides messages.
ASKING = (
    "{%- if strftime_now is defined %}{{ strftime_now('%d %B %Y, %j') }}{% else %}26 Jul 2024"
    "{% endif %}{% if tools is none %} no tools{% endif %}{% if tools is defined %} defined"
    "{% endif %}{% if not documents %} no documents{% endif %}{% if documents is not none %} some"
    "{% endif %}{% if builtin_tools is defined %} builtin{% endif %} {{ unk_token }}{{ pad_token }}"
    "{% if sep_token is defined %} sep{% endif %}\n" + CHATML
)
# Marks that end with a character of several tokens, and with white space.
SHORT = MARKED.replace("{{ message.content + '<|im_end|>' }}", "{{ message.content }}")
SHORT = SHORT.replace("{% endgeneration %}", "{% endgeneration %}{{- '<|im_end|>' }}")
SPACED = MARKED.replace("<|im_end|>' }}{% end", "<|im_end|>\\n' }}{% end")
TEMPLATES = {
    "marked, short": SHORT,
    "marked, spaced": SPACED,
    "asking": ASKING,
    "plain": CHATML,
    "marked": MARKED,
    "llama": LLAMA,
}
CHATS = (
    CHAT,
    CHAT[1:3],
    [{"role": "user", "content": "  a\n\n b "}, {"role": "assistant", "content": "\u4e2d \u00e9!"}],
    [*CHAT, {"role": "user", "content": "not answered"}],
    [*CHAT[:2], {"role": "assistant", "content": "\u4e2d\U0001f388"}, CHAT[1], CHAT[2]],
)


def _expected(tokenizer, chat, *, marked):
    """The tokens and the mask as `transformers` makes them."""
    options = {"tokenize": True, "return_dict": True}
    if marked:
        made = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, **options)
        return made["input_ids"], made["assistant_masks"]
    tokens = tokenizer.apply_chat_template(chat, **options)["input_ids"]
    mask = np.zeros(len(tokens), int)
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(
                chat[:index], add_generation_prompt=True, **options
            )["input_ids"]
            after = tokenizer.apply_chat_template(chat[: index + 1], **options)["input_ids"]
            assert tokens[: len(before)] == before
            assert tokens[: len(after)] == after
            # White space behind the token that ends a turn is the template's.
            while after[-1] != tokenizer.eos_token_id:
                after.pop()
            mask[len(before) : len(after)] = 1
    return tokens, mask


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
    config = {"bos_token": "<|endoftext|>"} if name == "llama" else {}
    if name == "asking":
        config = {"unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}
    directory = write_chat_tokenizer(tmp_path / "t", TEMPLATES[name], **config)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    encoder = ChatEncoder(ours, 0.1)
    for chat in CHATS:
        tokens, mask = _expected(theirs, chat, marked=name.startswith("marked"))
        example = encoder.example({"messages": chat})
        assert tokens_of(example).tolist() == list(tokens)
        np.testing.assert_array_equal(learned_of(example), mask)
        assert 0 < sum(mask) < len(mask)
    assert ours.end_token == theirs.eos_token_id
    if name == "llama":
        assert ours.bos_token == theirs.bos_token_id


@pytest.mark.slow
def test_a_saved_tokenizer_of_transformers_is_read_as_it_is(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
    theirs = transformers.AutoTokenizer.from_pretrained(write_chat_tokenizer(tmp_path / "t"))
    theirs.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").exists()
    first, second = (load_tokenizer(str(tmp_path / name)) for name in ("t", "saved"))
    assert first.end_token == second.end_token
    line = {"messages": CHAT}
    examples = [ChatEncoder(tokenizer, 0.1).example(line) for tokenizer in (first, second)]
    np.testing.assert_array_equal(*examples)
