"""Templates of chats that do not end, or are too large, are refused; others are rendered."""

import datetime
import gc
import signal
import time

import pytest

from benchmarks.malformed_programs import TEMPLATES
from manualpar.data import chat_renderer
from manualpar.data.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def impatient(monkeypatch):
    """Limits that a test can wait for."""
    monkeypatch.setattr(chat_renderer, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(chat_renderer, "MEMORY_BYTES", 1 << 28)


QUICK = ("loops in loops", "times a message", "blocks in blocks")
SLOW = (pytest.mark.slow, pytest.mark.every_case)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in TEMPLATES]
)
def test_a_template_that_does_not_end_is_refused(impatient, name):
    said = r"does not end within|MiB of memory|nests too deep|makes a text of|too many statically"
    with pytest.raises(ValueError, match=said) as refused:
        ChatTemplate(TEMPLATES[name], {}, "model/tokenizer_config.json").render(CHAT)
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 500
    assert text.endswith("is in model/tokenizer_config.json") or text.startswith("is no Jinja")


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        ("{{ 'a' * 10**10 }}", "MiB of memory"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "0.2 s of",
        ),
    ],
)
def test_one_chat_of_many_is_refused_at_once(impatient, hostile, said):
    template = ChatTemplate(f"{{% if messages|length == 1 %}}{hostile}{{% endif %}}{PLAIN}", {})
    three, text = CHAT[:1] * 3, "user: a\n" * 3
    answers = template.render_all([three, three, *[CHAT[:1]] * 999])
    assert answers[:2] == [(text, [])] * 2
    assert len(answers) == 1001
    (error,) = set(answers[2:])
    assert said in str(error)
    assert template.render(three) == (text, [])


def test_the_text_may_grow_with_the_chat(monkeypatch):
    monkeypatch.setattr(chat_renderer, "CPU_SECONDS", 20.0)
    long = [{"role": "user", "content": "a" * (chat_renderer.MAX_CHARACTERS + 1)}]
    assert len(ChatTemplate(PLAIN, {}).prompt(long)) > chat_renderer.MAX_CHARACTERS


def test_the_process_ends_with_the_template_and_nothing_reaches_another(monkeypatch):
    template = ChatTemplate(PLAIN, {})
    assert template.prompt(CHAT) == "user: a\nassistant: b\n"
    process = template._process
    with monkeypatch.context() as patch:  # As in a fork, which gets a process of its own.
        patch.setattr("os.getpid", lambda: -1)
        assert template.prompt(CHAT[:1]) == "user: a\n"
        with template._process as others:
            others.kill()
    assert process.poll() is None
    assert template.prompt(CHAT[:1]) == "user: a\n"
    process = template._process
    process.send_signal(signal.SIGKILL)  # As a system without memory does.
    with pytest.raises(ValueError, match=r"ends the process that renders it, with code -9"):
        template.prompt(CHAT)
    assert template.prompt(CHAT[:1]) == "user: a\n"
    process = template._process
    del template
    gc.collect()
    assert process.returncode is not None


def test_an_interrupted_request_does_not_answer_the_next(monkeypatch):
    template = ChatTemplate(PLAIN, {})

    def interrupted(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("manualpar.data.chat_template.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.prompt(CHAT)
    assert template.prompt(CHAT[:1]) == "user: a\n"


def test_a_chat_has_one_time_and_no_tools():
    source = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%H:%M:%S.%f') }}|{{ tools is none }}"
    source += "|{{ documents is none }}|{{ x is defined }}"
    template = ChatTemplate(source + PLAIN, {})
    before = datetime.date.today()
    found = template.prompt(CHAT).splitlines()[0].split("|")
    # Otherwise earlier texts of a chat would not be the beginning of later ones.
    text, spans = template.render([*CHAT, *CHAT])
    assert [text[start:stop] for start, stop in spans] == ["assistant: b\n"] * 2
    days = {day.strftime("%d %b %Y") for day in (before, datetime.date.today())}
    assert found[0] in days
    assert found[2:] == ["True", "True", "Falseuser: a"]


def test_a_first_turn_of_the_assistant_begins_after_its_prompt():
    chat = [CHAT[1], *CHAT]
    source = f"Be short.\n{PLAIN}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
    text, spans = ChatTemplate(source, {}).render(chat)
    assert [text[start:stop] for start, stop in spans] == ["b\n"] * 2
    with pytest.raises(ValueError, match="begins with the assistant, and the chat's template cann"):
        ChatTemplate("{{ messages[0].role }}" + source, {}).render(chat)


def test_rendering_is_quick():
    template = ChatTemplate(PLAIN, {})
    template.render(CHAT)
    started = time.process_time()
    template.render_all([CHAT] * 64)
    # In this process, which another one's work does not slow down.
    assert time.process_time() - started < 0.05
