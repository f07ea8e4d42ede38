"""Tokens and masks of chats are those of `transformers`."""

import numpy as np
import pytest

from manualpar.data import load_tokenizer
from manualpar.data.chat import ChatEncoder, Chats
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


def _write_named(folder, names, form):
    """Writes a tokenizer with templates that begin with their names, in a form of transformers."""
    sources = {name: f"{name} {{{{ tools | tojson }}}}" + CHATML for name in names}
    listed = [{"name": name, "template": source} for name, source in sources.items()]
    if form == "list":
        return write_chat_tokenizer(folder, listed)
    if form == "object":
        return write_chat_tokenizer(folder, sources)
    # Files hide the templates of the config.
    directory = write_chat_tokenizer(folder, [{"name": "rag", "template": "hidden"}])
    for name, source in sources.items():
        file = folder / "additional_chat_templates" / f"{name}.jinja"
        if name == "default":
            file = folder / "chat_template.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("form", ["list", "object", "files"])
@pytest.mark.parametrize(
    "names", [("default", "tool_use", "rag"), ("rag", "tool_use"), ("rag", "default"), ("default",)]
)
def test_of_several_templates_a_chat_gets_the_one_that_transformers_chooses(tmp_path, form, names):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
    directory = _write_named(tmp_path / "t", names, form)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    plain, tools = {"messages": CHAT}, {"messages": CHAT, "tools": [{"name": "look"}]}
    begins = set()
    for name in (None, *names):
        if name and isinstance(theirs.chat_template, str):
            continue  # To transformers a name is the text of a template then.
        of_all = Chats(load_tokenizer(directory), name or "")
        of_line = Chats(load_tokenizer(directory))
        for line in (plain, tools):
            given = {"chat_template_kwargs": {"chat_template": name}} if name else {}
            made = [(of_all, line), (of_line, line | given)]
            options = {"tools": line.get("tools"), "chat_template": name, "return_dict": False}
            if not name and "default" not in names and line is plain:
                with pytest.raises(ValueError, match="multiple chat templates with no default"):
                    theirs.apply_chat_template(CHAT, **options)
                for chats, of_this in made:
                    with pytest.raises(ValueError, match=f"to be one of '{min(names)}'"):
                        chats.prompt(of_this)
                continue
            expected = theirs.apply_chat_template(CHAT, **options)
            begins.add(theirs.decode(expected).split()[0])
            for chats, of_this in made:
                (example,) = chats.examples([of_this])
                assert tokens_of(example).tolist() == expected
    assert begins >= set(names)


@pytest.mark.slow
def test_fields_without_a_value_are_left_out_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
    source = "{% for m in messages %}{{ m.keys() | list }}{{ m.tool_calls }}{% endfor %}" + CHATML
    directory = write_chat_tokenizer(tmp_path / "t", source)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [CHAT[1] | {"name": None}, CHAT[2] | {"tool_calls": None, "thinking": None}]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert Chats(load_tokenizer(directory)).prompt({"messages": chat}) == expected
