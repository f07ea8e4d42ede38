"""Renders chats with a template, in a separate process with limits on time and memory.

A template is a program that somebody else wrote. Jinja's sandbox keeps it from using files and
other objects, but not from running forever or using all memory. A single operation is enough, such
as `'a' * 10**10`, and a list of all such operations would never be complete. So templates are
compiled and rendered in a separate process. The operating system ends this process after
`CPU_SECONDS` of computing, and limits its memory to `MEMORY_BYTES`. The process imports no library
except Jinja.

The process reads requests from standard input, and writes answers to standard output. The first
request is a template. Each later request is a list of chats. The process answers the chats of a
list in order, and stops at the first chat that it refuses. `manualpar.data.chat_template` starts
this process.
"""

import contextlib
import datetime
import functools
import json
import marshal
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar, NoReturn

CPU_SECONDS = 2.0
MEMORY_BYTES = 3 << 28
# A rendered text may have MAX_CHARACTERS characters, plus MAX_GROWTH for each byte of its chat.
MAX_CHARACTERS, MAX_GROWTH = 1 << 22, 8
SAID_CHARACTERS = 300  # The longest error message from a template; the rest is cut off.
# These mark the beginning and end of the assistant's text. They are noncharacters of Unicode, which
# no text contains.
BEGIN, END = "\ufdd0", "\ufdd1"
Messages = list[dict[str, Any]]
# A chat's messages, and the values of other variables of the template, such as `tools`.
Chat = tuple[Messages, dict[str, Any]]
# A message's reasoning has one of these names. Templates get it by the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
Span = tuple[int, int]
Rendered = tuple[str, list[Span]]
LENGTH_BYTES = 8
BUFFER_BYTES = 1 << 18


def has_marks(source: str) -> bool:
    """Returns whether a template marks the assistant's text."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


class Refused(Exception):  # noqa: N818  # A refusal is not an error of this program.
    """A refused template or chat; the caller puts the template's or chat's name first."""


class Renderer:
    """Renders chats with one template."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compiles a template; `tokens` maps the names of special tokens to their texts."""
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise Refused(f"is no Jinja template (line {error.lineno}: {error})") from None
        except Exception as error:
            raise Refused(f"is no Jinja template ({_said(error)})") from None
        self._tokens = dict(tokens)
        self._has_marks = has_marks(source)

    def render(self, chat: Chat) -> Rendered:
        """Renders a chat; returns its text and the spans that the assistant wrote, in order."""
        messages, given = chat
        now = datetime.datetime.now()  # The same time in all renderings of the chat.
        if self._has_marks:
            return _without_marks(self._render(messages, given, now))
        text, spans = self._render(messages, given, now), []
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render_before(messages[:index], given, now)
                is_last = index + 1 == len(messages)
                after = text if is_last else self._render(messages[: index + 1], given, now)
                if not (after.startswith(before) and text.startswith(after)):
                    raise Refused(
                        f"has a message {index + 1} of the assistant, which the chat's template "
                        "renders differently in the middle of a chat and at its end; expected a "
                        "template with {% generation %} marks for such chats"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def _render_before(
        self, messages: Messages, given: dict[str, Any], now: datetime.datetime
    ) -> str:
        """Renders the messages before a turn of the assistant, and the prompt for the turn."""
        try:
            return self._render(messages, given, now, prompt=True)
        except Refused:
            if messages:
                raise
            raise Refused(
                "begins with the assistant, and the chat's template cannot render the prompt of an "
                "empty chat; expected another message first, or a template with {% generation %} "
                "marks"
            ) from None

    def text(self, chat: Chat) -> Rendered:
        """Renders a chat; returns its text and no spans."""
        text, _ = _without_marks(self._render(*chat, datetime.datetime.now()))
        return text, []

    def prompt(self, chat: Chat) -> Rendered:
        """Renders a chat followed by the prompt for the assistant."""
        return _without_marks(self._render(*chat, datetime.datetime.now(), prompt=True))

    def _render(
        self,
        messages: Messages,
        given: dict[str, Any],
        now: datetime.datetime,
        *,
        prompt: bool = False,
    ) -> str:
        def strftime_now(form: str) -> str:
            return now.strftime(form)

        try:
            text: str = self._template.render(
                **{"tools": None, "documents": None, **self._tokens, **given},
                messages=[_with_reasoning(message) for message in messages],
                add_generation_prompt=prompt,
                strftime_now=strftime_now,
            )
        except Exception as error:  # The program of a template may raise any exception.
            raise Refused(f"is refused by the chat's template ({_said(error)})") from None
        if len(text) > MAX_CHARACTERS:
            most = MAX_CHARACTERS + MAX_GROWTH * len(marshal.dumps((messages, given)))
            if len(text) > most:
                raise Refused(
                    "is refused by the chat's template (it makes a text of "
                    f"{len(text):,} characters, expected at most {most:,})"
                )
        return text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Gives a message's reasoning the names that templates read, as transformers does.

    Leaves out fields without a value, such as `"tool_calls": null`, as transformers does.
    """
    message = {name: value for name, value in message.items() if value is not None}
    found = [message[name] for name in REASONING if name in message]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deep, or calls itself without end"
    if isinstance(error, MemoryError):
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        return f"it needs more than {memory >> 20} MiB of memory"
    said = " ".join(str(error)[: 4 * SAID_CHARACTERS].split()) or type(error).__name__
    return said if len(said) <= SAID_CHARACTERS else f"{said[:SAID_CHARACTERS]} ..."


def _without_marks(text: str) -> Rendered:
    """Removes `BEGIN` and `END` from a text; returns the text and the spans between them."""
    pieces, spans, length = [], [], 0
    for piece in re.split(f"({BEGIN}[^{BEGIN}{END}]*{END})", text):
        if piece.startswith(BEGIN):
            spans.append((length, length + len(piece) - 2))
        pieces.append(piece.strip(BEGIN + END))
        length += len(pieces[-1])
    return "".join(pieces), spans


def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The block `generation`, which writes its text between `BEGIN` and `END`."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    # The arguments of the filter in transformers.
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment


def send_message(file: IO[bytes], message: Any) -> None:
    """Writes a value of lists, dicts, strings and numbers to the file's buffer."""
    data = marshal.dumps(message)
    file.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    file.write(data)


def receive(file: IO[bytes]) -> Any:
    """Reads a value that `send_message` has written.

    Raises:
      EOFError: The file ends before the end of the value.
    """
    length = int.from_bytes(file.read(LENGTH_BYTES), "big")
    data = file.read(length)
    if not length or len(data) < length:
        raise EOFError
    return marshal.loads(data)


def answer_within(action: Callable[[], Any], seconds: float) -> tuple[bool, Any]:
    """Returns (True, the result of `action`), or (False, the reason of the refusal).

    If `action` computes for longer than `seconds`, the process ends.
    """
    # The signal of this timer ends the process, even in the middle of an operation.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return True, action()
    except Refused as error:
        return False, str(error)
    except Exception as error:
        return False, f"is refused by the chat's template ({_said(error)})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answers requests from standard input until the input ends."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    sys.path += sys.argv[3:]  # The folders of Jinja.
    import jinja2.sandbox  # noqa: F401  # Imported before the limits are set.

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # On Ctrl-C the parent ends this process.
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, os.fdopen(sys.stdout.fileno(), "wb", BUFFER_BYTES)
    with contextlib.suppress(EOFError, BrokenPipeError):
        source, tokens = receive(requests)
        renderers: list[Renderer] = []
        send_message(
            answers, answer_within(lambda: renderers.append(Renderer(source, tokens)), seconds)
        )
        answers.flush()
        while renderers:
            kind, chats = receive(requests)
            render = getattr(renderers[0], kind)
            for chat in chats:
                is_fine, rendered = answer_within(functools.partial(render, chat), seconds)
                send_message(answers, (is_fine, rendered))
                if not is_fine:
                    break  # Does not try later chats, which may need as much time.
            answers.flush()


if __name__ == "__main__":
    main()
