"""The template of a tokenizer's chats: messages become one text, and what is learned is marked.

A template is a Jinja program that came with somebody's model. It runs in Jinja's immutable sandbox:
it sees the messages and the names of a few tokens, and reaches nothing else, the date neither. Its
dialect is that of `transformers`: blocks take their line with them, loops may be left,
`raise_exception` refuses messages, and what stands between `{% generation %}` and
`{% endgeneration %}` is what the model is to write.

A template without these marks is rendered several times for a chat, up to each turn of the
assistant: once with the turn, and once with the prompt to write in its place. The assistant writes
what the first text has behind the second. A template whose earlier text changes with later messages
cannot be taken apart like this, and is refused.
"""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from manualpar.data.tokenizer import TEMPLATE, TOKENIZER_CONFIG, special_tokens
from manualpar.extras import require
from manualpar.storage import AnyPath, BucketPath, user_path
from manualpar.untrusted import read_file, read_object

# Noncharacters of Unicode, which no text has: where what is learned begins and ends.
BEGIN, END = "\ufdd0", "\ufdd1"
Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class ChatTemplate:
    """Renders chats."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compiles a template.

        Args:
          source: Its text.
          tokens: The texts of special tokens by name, such as `bos_token`.

        Raises:
          ValueError: It is no template; the message completes a sentence about the template.
        """
        require("config.data.source='chat'", "jinja2")
        import jinja2

        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"is no Jinja template (line {error.lineno}: {error})") from error
        self._tokens = dict(tokens)
        self.has_marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    def render(self, messages: Messages) -> tuple[str, list[Span]]:
        """The text of a chat, and the parts of it that the assistant wrote, ascending.

        Raises:
          ValueError: The template refuses the messages, or does not say what the assistant wrote.
        """
        if self.has_marks:
            return _without_marks(self._render(messages))
        text, spans = self._render(messages), []
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render(messages[:index], prompt=True) if index else ""
                after = self._render(messages[: index + 1])
                if not (after.startswith(before) and text.startswith(after)):
                    raise ValueError(
                        f"has a message {index + 1} of the assistant that the chat's template "
                        "renders otherwise in the midst of a chat than at its end; expected a "
                        "template with {% generation %} marks for such chats"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def prompt(self, messages: Messages) -> str:
        """The text of a chat up to where the assistant is to write; raises as `render`."""
        return _without_marks(self._render(messages, prompt=True))[0]

    def _render(self, messages: Messages, *, prompt: bool = False) -> str:
        values = {"messages": list(messages), "add_generation_prompt": prompt, **self._tokens}
        try:
            return self._template.render(**values)
        except RecursionError as error:
            raise ValueError("is refused by the chat's template (it does not end)") from error
        except Exception as error:  # Whatever the template's program raises.
            said = " ".join(str(error).split())
            raise ValueError(f"is refused by the chat's template ({said})") from error


def load_template(path: str, tokenizer: Sequence[pathlib.Path]) -> ChatTemplate:
    """Loads the template of a tokenizer's directory, or another one.

    Args:
      path: A file with a template; "" for the tokenizer's.
      tokenizer: The tokenizer's files.

    Raises:
      ValueError: There is none, or it is no template.
    """
    source, tokens = "", {}
    for file in tokenizer:
        if file.name == TOKENIZER_CONFIG:
            fields = read_object(file, follow_links=True)
            source, tokens = _template_of(fields), special_tokens(fields)
        elif file.name == TEMPLATE:
            source = _read(file, f"config.data.tokenizer: {file}")
    if path:
        source = _read(user_path(path), f"config.data.template is {path!r}, which")
    if not source:
        raise ValueError(
            "config.data.template is '', and config.data.tokenizer has no chat_template; expected "
            "the directory of a model with one in its tokenizer_config.json, or a file with a "
            "Jinja template."
        )
    try:
        return ChatTemplate(source, tokens)
    except ValueError as error:
        named = f"config.data.template is {path!r}, which" if path else "the chat_template"
        raise ValueError(f"{named} {error}.") from error


def _template_of(fields: Mapping[str, Any]) -> str:
    """The template in a `tokenizer_config.json`; of several, the one that is called default."""
    found = fields.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each for each in found if isinstance(each, dict)}
        found = named.get("default", {}).get("template")
    return found if isinstance(found, str) else ""


def _read(path: AnyPath, named: str) -> str:
    try:
        if isinstance(path, BucketPath):
            return path.read_bytes().decode()
        return read_file(path, follow_links=True).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{named} cannot be read ({error}); expected a Jinja template.") from error


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """The text without `BEGIN` and `END`, and where these were."""
    plain, spans = "", []
    for piece in re.split(f"({BEGIN}[^{BEGIN}{END}]*{END})", text):
        if piece.startswith(BEGIN):
            spans.append((len(plain), len(plain) + len(piece) - 2))
        plain += piece.strip(BEGIN + END)
    return plain, spans


def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The block `generation`, whose text comes out between marks."""

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

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment
