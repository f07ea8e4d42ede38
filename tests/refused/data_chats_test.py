"""Mistakes in tokenizers, chats and chat templates."""

import json
import re
from pathlib import Path

import pytest

from manualpar.data import load_tokenizer
from manualpar.data.chat import ChatEncoder, Chats
from manualpar.data.chat_template import ChatTemplate, load_templates
from manualpar.data.dataset import DamagedDataError
from manualpar.data.sources import load_dataset
from tests.data.chats import CHAT, CHATML, write_chat_tokenizer
from tests.data.trained_tokenizer import write_tokenizer
from tests.refused.sentences import cases
from tests.refused.table import check_refused, rows

HERE = Path()
SHORT = {"sequence_length": 64, "held_out": 0.1, "cache": "cache"}


def load_written_tokenizer(content):
    (HERE / "tokenizer.json").write_text(content)
    load_tokenizer("tokenizer.json")


def load_trained_tokenizer(special):
    load_tokenizer(write_tokenizer(HERE / "tokenizer.json", special=special))


def encode(line, template=CHATML):
    ChatEncoder(load_tokenizer(write_chat_tokenizer(HERE / "t", template)), 0.1).example(line)


def encode_chat(template):
    encode({"messages": CHAT}, template)


def answer(content):
    return {"messages": [*CHAT[:2], {"role": "assistant", "content": content}]}


def load_chats(options, lines=()):
    chats = [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(119)]
    lines = (*chats, {"messages": CHAT}, *lines)
    (HERE / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    load_dataset("chat", seed=0, path="chats.jsonl", **SHORT, **options)


def load_chats_with(tokenizer):
    template, config = tokenizer
    load_chats({"tokenizer": write_chat_tokenizer(HERE / "t", template, **config)})


def load_chats_of_template(template):
    load_chats({"tokenizer": write_chat_tokenizer(HERE / "t"), "template": template})


def load_chats_and(line):
    load_chats({"tokenizer": write_chat_tokenizer(HERE / "t")}, [line])


def ask_template_of_a_file(source):
    (HERE / "t.jinja").write_text(source)
    load_templates(str(HERE / "t.jinja"), []).choose(None, has_tools=False).prompt(CHAT)


def ask_template_of_a_tokenizer(source):
    chats = Chats(load_tokenizer(write_chat_tokenizer(HERE / "t", source)))
    chats.prompt({"messages": [{"role": "user", "content": "a"}]})


def ask_of(content):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    ChatTemplate(plain, {}).prompt([{"role": "user", "content": content}])


THINKING = """{%- for message in messages %}
{%- if message.role == 'assistant' and not loop.last %}{{- 'A:' + message.content[:2] + ';' }}
{%- else %}{{- message.role + ':' + message.content + ';' }}{% endif %}
{%- endfor %}"""

REFUSED = [
    *rows(
        "tokenizer",
        load_tokenizer,
        ("/no/such", r"`tokenizer` is '/no/such', which is no file"),
    ),
    *rows(
        "tokenizer",
        load_written_tokenizer,
        ("{}", r"cannot be read \(.*\); expected the tokenizer\.json"),
    ),
    *rows(
        "tokenizer",
        load_trained_tokenizer,
        (("<unk>",), r"no token to begin documents with; expected one of .*<s>"),
    ),
    *rows(
        "line",
        encode,
        ({"text": "a"}, r"has 'text', expected 'messages', or 'prompt' and 'completion'"),
        ({"messages": "a"}, r"has no messages, expected a list of them"),
        ({"messages": []}, r"has no messages, expected a list of them"),
        ({"messages": ["a"]}, r"has a message 1 whose role is missing, expected a text"),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            r"has a message 1 whose content has a part of type .str., expected parts",
        ),
        ({"messages": CHAT[:2]}, r"has no answer to train on"),
        (
            answer("a <|im_end|>"),
            r"has a message 3 whose content spells out the special token '<\|im_end\|>'",
        ),
        (answer("\ud800"), r"has half of a surrogate pair at character 0"),
        (answer("\ufdd0"), r"whose content spells out the special token '\\ufdd0'"),
        ({"prompt": "a", "completion": 3}, r"has a completion of type int, expected a te"),
        ({"prompt": "", "completion": "a"}, r"has an empty prompt, expected at least one"),
    ),
    *rows(
        "template",
        encode_chat,
        *cases(
            ("{{ raise_exception('only users') }}", r"only users\)"),
            ("{{ messages.append(1) }}", r"access to attribute 'append' .* is unsafe"),
            ("{{ ''.__class__.__mro__ }}", r"access to attribute '__class__' .* is unsafe"),
            ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
            begins=r"is refused by the chat's template \(",
        ),
        (THINKING, r"has a message 3 of the assistant, which .* differently in the middle"),
    ),
    *rows(
        "a tokenizer of chats",
        load_chats_with,
        (
            ("", {}),
            r"`template` is '', and `tokenizer` has no chat_template; ",
        ),
        (("{% if %}", {}), r"the chat_template is no Jinja template \(line 1: "),
        (
            (CHATML, {"eos_token": 3}),
            r"has a tokenizer_config\.json that has eos_token=3, expected a",
        ),
        (
            (CHATML, {"bos_token": "\ud800"}),
            r"has a tokenizer_config\.json that has bos_token='\\ud800', expected text in Unicode",
        ),
        (
            (CHATML, {"pad_token": {"content": "\ud800"}}),
            r"has a tokenizer_config\.json that has pad_token\.content='\\ud800', expected text",
        ),
        (
            (CHATML, {"unk_token": [3]}),
            r"`tokenizer`: t/tokenizer_config\.json has unk_token=\[3\], expected a text\.",
        ),
        (
            (CHATML, {"eos_token": "<x>"}),
            r"has no token '<x>', the eos_token of its tokenizer_config",
        ),
    ),
    *rows(
        "a line of chats",
        load_chats_and,
        (
            {"messages": CHAT[:2]},
            DamagedDataError,
            r"^chats\.jsonl, line 121: has no answer to train on",
        ),
    ),
    *rows("chats", load_chats, ({}, r"`tokenizer` is '', expected the directory")),
    *rows(
        "chats",
        load_chats_of_template,
        ("/no/such", r"`template` is '/no/such', which cannot be"),
    ),
    *rows(
        "a template's file",
        ask_template_of_a_file,
        ("{{ raise_exception('no') }}", re.escape("(no); the template is in t.jinja")),
    ),
    *rows(
        "a tokenizer's template",
        ask_template_of_a_tokenizer,
        (r"{{ '\ud800' }}", "has half of a surrogate pair"),
    ),
    *rows("a message", ask_of, (object(), "unmarshallable")),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(call, error, words)
