"""Renders chats with a template, and finds the spans of the text that the assistant writes.

A template is a Jinja program that comes with a model. It runs in a separate process, in Jinja's
immutable sandbox. It can read only the messages, the special tokens and the date. Rendering a chat
may take at most `chat_renderer.CPU_SECONDS` of computing and `chat_renderer.MEMORY_BYTES` of
memory. Templates are written for the library `transformers`, and work here in the same way: a line
with only a block tag writes no line; loops have `break` and `continue`; `raise_exception` refuses
messages; `strftime_now` writes the date; `tools` and `documents` are None if a chat has none. The
assistant's text is the text between `{% generation %}` and `{% endgeneration %}`.

If a template has no such marks, the tokens that begin and end a turn show the assistant's text, for
the families of `manualpar.data.chat_template`.

For other templates each turn of the assistant is found by two renderings. The first contains the
messages up to the turn. The second contains the messages before the turn, and the prompt for the
assistant. The assistant's text is the part of the first rendering that follows the text of the
second. This fails if a message changes the rendering of earlier messages; then the chat is refused.

A tokenizer may have several templates with names. Each chat gets one of them, by the rule of
`transformers`, see `ChatTemplates.choose`.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from manualpar.data import chat_renderer
from manualpar.data.chat_renderer import (
    BEGIN,
    END,
    Chat,
    Messages,
    Rendered,
    Span,
    has_marks,
    receive,
    send_message,
)
from manualpar.data.tokenizer import TEMPLATE, TEMPLATES, TOKENIZER_CONFIG, special_tokens
from manualpar.errors import require
from manualpar.system.storage import AnyPath, BucketPath, user_path
from manualpar.system.storage.untrusted import read_file, read_model_file, read_model_object

# The names of the special tokens that templates can use, as in `tokenizer_config.json`.
TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# The names of the templates that chats get by default, without and with tools.
DEFAULT, TOOL_USE = "default", "tool_use"

__all__ = ["BEGIN", "END", "ChatTemplate", "ChatTemplates", "load_templates"]


class ChatTemplate:
    """Renders chats in another process, which ends when this object is deleted.

    Attributes:
      has_marks: Whether the template marks the assistant's text.
      turns: The texts that begin and end the assistant's turns; `None` if the template has marks,
        or is of no known family.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], name: str = "") -> None:
        """Compiles a template.

        The caller puts the template's name before an error's message.

        Args:
          tokens: Maps the names of special tokens, such as `bos_token`, to their texts.
          name: The template's file, for error messages about chats.
        """
        require("`source='chat'`", "jinja2")
        self._source, self._tokens, self._name = source, dict(tokens), name
        self.has_marks = has_marks(source)
        self.turns: Turns | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        with self._lock:
            self._start()

    def choose_turns(self, added_tokens: Collection[str]) -> None:
        """Sets `turns` to the family of a template without marks."""
        if self.has_marks:
            return

        def render(kind: str, messages: Messages, given: dict[str, Any]) -> str | None:
            (answer,) = self._answers(kind, [(messages, given)])
            return None if isinstance(answer, ValueError) else answer[0]

        has_tools = self.mentions("tool_calls")
        self.turns = choose_turns(render, added_tokens, self._end_token, has_tools=has_tools)

    @property
    def _end_token(self) -> str:
        return self._tokens.get("eos_token", "")

    def mentions(self, name: str) -> bool:
        """Returns whether the template's text contains a name."""
        return name in self._source

    def text(self, messages: Messages) -> str | None:
        """Renders a chat to a text; returns `None` if the template refuses the chat."""
        (answer,) = self._answers("text", [(messages, {})])
        return None if isinstance(answer, ValueError) else answer[0]

    def render(self, messages: Messages) -> tuple[str, list[Span]]:
        """Renders a chat; returns its text and the spans that the assistant wrote, in order."""
        return _unwrapped(self.render_all([messages])[0])

    def render_all(
        self, chats: Sequence[Messages], given: Sequence[Mapping[str, Any]] = ()
    ) -> list[Rendered | ValueError]:
        """Renders chats; the error of a refused chat is also the result for all later chats.

        Args:
          chats: The messages of each chat.
          given: The values of other variables for each chat; by default there are none.
        """
        pairs = list(zip(chats, map(dict, given or [{}] * len(chats)), strict=True))
        if self.turns is None:
            return self._answers("render", pairs)
        turns, end_token = self.turns, self._end_token
        return [
            answer
            if isinstance(answer, ValueError)
            else (answer[0], spans_of(answer[0], turns, end_token))
            for answer in self._answers("text", pairs)
        ]

    def prompt(self, messages: Messages, given: Mapping[str, Any] | None = None) -> str:
        """Renders a chat followed by the assistant's prompt; raises the errors of `render`."""
        return _unwrapped(self._answers("prompt", [(messages, dict(given or {}))])[0])[0]

    def _answers(self, kind: str, chats: Sequence[Chat]) -> list[Rendered | ValueError]:
        answers: list[Rendered | ValueError] = []
        count = len(chats)  # The number of chats in the next request.
        with self._lock:
            while left := chats[len(answers) :]:
                # A fork of this process must not use the same pipe as its parent.
                if self._process is None or self._owner != os.getpid():
                    self._start()
                why = ""
                try:
                    self._send(
                        [kind, [(list(messages), given) for messages, given in left[:count]]]
                    )
                    for _ in left[:count]:
                        is_fine, answer = self._receive()
                        if not is_fine:
                            why = answer
                            break
                        answers.append(answer)
                except _EndedError as error:
                    if count == 1:
                        why = f"is refused by the chat's template ({error})"
                    # The answers for earlier chats of the request are lost. The loop requests them
                    # again, one by one.
                    count = 1
                if why:
                    where = f"; the template is in {self._name}" if self._name else ""
                    refusal = ValueError(f"{why}{where}")
                    answers += [refusal] * (len(chats) - len(answers))
        return answers

    def _start(self) -> None:
        found = [importlib.util.find_spec(module) for module in ("jinja2", "markupsafe")]
        folders = [str(pathlib.Path(str(spec.origin)).parent.parent) for spec in found if spec]
        limits = [str(chat_renderer.CPU_SECONDS), str(chat_renderer.MEMORY_BYTES)]
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", chat_renderer.__file__, *limits, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=chat_renderer.BUFFER_BYTES,
        )
        weakref.finalize(self, _end, self._process, self._owner)
        try:
            self._send([self._source, self._tokens])
            is_fine, answer = self._receive()
        except _EndedError as error:
            raise ValueError(f"is no Jinja template that can be compiled ({error})") from None
        if not is_fine:
            raise ValueError(answer)

    def _send(self, message: Any) -> None:
        with self._connected() as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_receive` finds why the process ended.
                send_message(process.stdin, message)
                process.stdin.flush()

    def _receive(self) -> Any:
        with self._connected() as process:
            assert process.stdout is not None
            try:
                return receive(process.stdout)
            except EOFError:
                process.wait()
                raise _EndedError(process.returncode) from None

    @contextlib.contextmanager
    def _connected(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Yields the process, and ends it after any error or interrupt."""
        process = self._process
        assert process is not None
        try:
            yield process
        except BaseException:
            self._process = None
            _end(process, self._owner)
            raise


def _unwrapped(answer: Rendered | ValueError) -> Rendered:
    if isinstance(answer, ValueError):
        raise answer
    return answer


class _EndedError(Exception):
    """The process of a template has ended."""

    def __init__(self, code: int) -> None:
        super().__init__(
            f"it does not end within {chat_renderer.CPU_SECONDS:g} s of computing"
            if -code == signal.SIGPROF
            else f"it ends the process that renders it, with code {code}"
        )


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:  # A fork of this process must not end its parent's renderer.
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


class ChatTemplates:
    """The templates of a tokenizer, or one template of a file, for all chats.

    Attributes:
      chosen: The text of the template for chats that name none; "" if their tools decide.
    """

    def __init__(
        self,
        named: Mapping[str, tuple[str, str]],
        tokens: Mapping[str, str],
        chosen: tuple[str, str] | None = None,
    ) -> None:
        """Compiles the template that most chats need; the others when a chat needs them.

        Args:
          named: Maps names to templates; a template is its text, and its place for messages.
          tokens: See `ChatTemplate`.
          chosen: The template for chats that name none. By default their tools decide.
        """
        self._named, self._tokens = dict(named), dict(tokens)
        self._compiled: dict[tuple[str, str], ChatTemplate] = {}
        self._chosen = chosen
        self.chosen = chosen[0] if chosen else ""
        if most := chosen or self._named.get(DEFAULT):
            self._compile(most)

    def choose(self, name: str | None, *, has_tools: bool) -> ChatTemplate:
        """Chooses a chat's template as `get_chat_template` of transformers does.

        It is the template that the chat names; or the one that the user chose; or `tool_use` for a
        chat with tools, if there is such a template; or `default`.
        """
        names = ", ".join(map(repr, sorted(self._named))) or "none has a name"
        if name is not None:
            if name not in self._named:
                raise ValueError(
                    f"names the chat template {name!r}, expected one of the tokenizer's templates: "
                    f"{names}"
                )
            return self._compile(self._named[name])
        if self._chosen:
            return self._compile(self._chosen)
        for by_default in [TOOL_USE] * has_tools + [DEFAULT]:
            if by_default in self._named:
                return self._compile(self._named[by_default])
        raise ValueError(
            f"names no chat template, and none of the tokenizer's templates is called {DEFAULT!r}; "
            f"expected `template` to be one of {names}"
        )

    def _compile(self, template: tuple[str, str]) -> ChatTemplate:
        if template not in self._compiled:
            source, place = template
            try:
                self._compiled[template] = ChatTemplate(source, self._tokens, place)
            except ValueError as error:
                raise ValueError(f"{place}: the chat_template {error}") from error
        return self._compiled[template]


def has_templates(tokenizer: Sequence[pathlib.Path]) -> bool:
    """Returns whether the files of a tokenizer have a template for chats."""
    configs = [file for file in tokenizer if file.name == TOKENIZER_CONFIG]
    return any(file.name == TEMPLATE or file.parent.name == TEMPLATES for file in tokenizer) or any(
        read_model_object(file, tokenizer[0].parent).get("chat_template") for file in configs
    )


def load_templates(template: str, tokenizer: Sequence[pathlib.Path]) -> ChatTemplates:
    """Loads a template from a file, or the templates from the tokenizer's directory.

    Args:
      template: The name of one of the tokenizer's templates; or a file with a template; or "" for
        the tokenizer's templates.
    """
    tokens: dict[str, str] = {}
    config: Any = None
    place, files = "", {}
    for file in tokenizer:
        if file.name == TOKENIZER_CONFIG:
            try:
                fields = read_model_object(file, tokenizer[0].parent)
                tokens = special_tokens(fields, TOKENS)
            except (OSError, ValueError) as error:
                raise ValueError(f"`tokenizer`: {file} {error}.") from error
            config, place = fields.get("chat_template"), str(file)
        elif file.name == TEMPLATE or file.parent.name == TEMPLATES:
            name = DEFAULT if file.name == TEMPLATE else file.stem
            files[name] = (
                _read(file, f"`tokenizer`: {file}", folder=tokenizer[0].parent),
                str(file),
            )
    named, chosen = files or _named(config, place), None
    # The template of a tokenizer with only one has no name, as in transformers.
    if list(files) == [DEFAULT]:
        named, chosen = {}, files[DEFAULT]
    elif not files and isinstance(config, str) and config:
        chosen = config, place
    if template in named:
        chosen = named[template]
    elif template:
        names = ", ".join(map(repr, named))
        also = f" (and the tokenizer's templates are {names})" if named else ""
        chosen = _read(user_path(template), f"`template` is {template!r}, which", also), template
    if not chosen and not named:
        raise ValueError(
            "`template` is '', and `tokenizer` has no chat_template; expected "
            "a file with a Jinja template, or the directory of a model whose tokenizer_config.json "
            "has a chat_template."
        )
    try:
        return ChatTemplates(named, tokens, chosen)
    except ValueError as error:
        said = str(error).removeprefix(f"{template}: the chat_template ")
        raise ValueError(
            f"{error}." if said == str(error) else f"`template` is {template!r}, which {said}."
        ) from error


def _named(config: Any, place: str) -> dict[str, tuple[str, str]]:
    """Returns the templates with names in the field `chat_template` of a tokenizer's config."""
    if isinstance(config, list):
        each = [one for one in config if isinstance(one, dict)]
        config = {one.get("name"): one.get("template") for one in each}
    if not isinstance(config, dict):
        return {}
    return {
        name: (source, place)
        for name, source in config.items()
        if isinstance(name, str) and isinstance(source, str)
    }


def _read(path: AnyPath, named: str, also: str = "", *, folder: pathlib.Path | None = None) -> str:
    """Reads a template that is in the folder of a model, or that a user has named."""
    try:
        if isinstance(path, BucketPath):
            return path.read_bytes().decode()
        if folder is not None:
            return read_model_file(path, folder).decode()
        return read_file(path, follow_links=True).decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{named} cannot be read ({error}); expected a Jinja template{also}."
        ) from error


# -------------------------------------------------------------------------------------------------
# Finds the assistant's turns in a chat's text by the tokens that begin and end them.
#
# Many templates write an earlier turn in another way than the last one. For example, they leave
# out the reasoning of earlier turns, or write a token after the last turn. Such templates need
# marks around the assistant's text, and most have none. `FAMILIES` lists the texts that begin and
# end a turn in widely used families of models, so that the text needs no other template. Both
# texts contain tokens that no message may spell out, so a message cannot begin or end a turn.
#
# The learned text is that of `assistant_only_loss` in TRL 1.16, for every family that TRL has a
# template with marks for. These templates differ: some mark the line break after a turn, or the
# tokens that begin it.
#
# A family is chosen for a template by its tokens, and by probing chats: every probe's answer must
# be inside of a turn, and every other message outside of all turns.


Message = dict[str, Any]


class Turns(NamedTuple):
    """The texts that begin an assistant's turn, and those that end it.

    Attributes:
      begins: The texts that begin a turn.
      ends: The texts that end a turn; they are learned.
      after: Text that is learned after an end, if the template writes it after every turn.
      others: Texts that end a turn too, but are not learned, because others write them.
      learned_from: Where the learned text begins: with `begins`, with the `space` after them, or
        with the `text` that follows the white space of the prompt.
      prompt: Text of the prompt for the assistant, if other families have the same tokens.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    after: str = ""
    others: tuple[str, ...] = ()
    learned_from: Literal["begin", "space", "text"] = "text"
    prompt: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that no message may contain."""
        return self.begins + self.ends + self.others

    def pattern(self) -> re.Pattern[str]:
        """Returns a pattern whose group 1 is the learned text of a turn."""
        begins, ends, others = map(_any_of, (self.begins, self.ends, self.others))
        after = f"(?:{re.escape(self.after)})?"
        text = f".*?(?:{ends}{after}|(?={others})|\\Z)"
        # A prompt at the end of the text is no turn.
        whole = f"({begins}(?!\\Z){text})" if self.learned_from == "begin" else f"{begins}+({text})"
        return re.compile(whole, re.DOTALL)


def _any_of(texts: tuple[str, ...]) -> str:
    """Returns a pattern of any of the texts; of no text if there are none."""
    return f"(?:{'|'.join(map(re.escape, texts))})" if texts else "(?!)"


# If the texts of two families begin alike, the family with the longer text comes first.
FAMILIES: Mapping[str, Turns] = {
    "Phi-4": Turns(("<|im_start|>assistant<|im_sep|>",), ("<|im_end|>",)),
    "Qwen 2.5": Turns(
        ("<|im_start|>assistant",),
        ("<|im_end|>",),
        after="\n",
        learned_from="space",
        prompt="You are Qwen, created by Alibaba Cloud.",
    ),
    "ChatML (Qwen, Nemotron 3, SmolLM3, OLMo 3, LFM2)": Turns(
        ("<|im_start|>assistant",), ("<|im_end|>",), after="\n"
    ),
    "Phi-3, Phi-3.5, Phi-4-mini": Turns(("<|assistant|>",), ("<|end|>",), after="\n"),
    "Llama 3, Nemotron Super": Turns(
        ("<|start_header_id|>assistant<|end_header_id|>",), ("<|eot_id|>", "<|eom_id|>")
    ),
    "Llama 4": Turns(("<|header_start|>assistant<|header_end|>",), ("<|eot|>", "<|eom|>")),
    "Gemma 1 to 3": Turns(("<start_of_turn>model",), ("<end_of_turn>",), after="\n"),
    "Gemma 4, DiffusionGemma": Turns(
        ("<|turn>model", "<tool_response|>"),
        ("<turn|>",),
        after="\n",
        others=("<|tool_response>", "<|turn>"),
    ),
    # Before an answer to results of tools, and before later calls, these templates write no token
    # for the assistant.
    "DeepSeek V3, R1": Turns(
        (
            "<\uff5cAssistant\uff5c>",
            "<\uff5ctool\u2581outputs\u2581end\uff5c>",
            "<\uff5ctool\u2581call\u2581begin\uff5c>",
        ),
        ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
        learned_from="begin",
    ),
    "gpt-oss": Turns(
        ("<|start|>assistant",), ("<|end|>", "<|return|>", "<|call|>"), learned_from="begin"
    ),
    "Muse Glimmer": Turns(("<|start|>assistant",), ("<|eot|>", "<|eom|>"), learned_from="begin"),
    "Nemotron Nano 2": Turns(("<SPECIAL_11>Assistant",), ("<SPECIAL_12>",)),
    "Granite 3, 4": Turns(("<|start_of_role|>assistant<|end_of_role|>",), ("<|end_of_text|>",)),
    "Command A, Tiny Aya": Turns(
        (
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        ("<|END_OF_TURN_TOKEN|>",),
        prompt="<|CHATBOT_TOKEN|><|START_RESPONSE|>",
    ),
    "Command R": Turns(("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",)),
    "Kimi K2": Turns(("<|im_assistant|>assistant<|im_middle|>",), ("<|im_end|>",)),
    "MiniMax M2": Turns(("]~b]ai",), ("[e~[",)),
    "Seed-OSS": Turns(("<seed:bos>assistant",), ("<seed:eos>",)),
    "Mistral": Turns(("[/INST]", "[/TOOL_RESULTS]"), ("</s>",)),
    # The next role's token ends a turn: the model writes it.
    "GLM-4": Turns(("<|assistant|>",), ("<|user|>", "<|observation|>", "<|system|>")),
}


def spans_of(text: str, turns: Turns, end_token: str) -> list[Span]:
    """Returns the spans of a chat's text that the assistant writes, in order.

    If only `end_token` follows the last span, it belongs to the span, because the model writes it.
    """
    spans = [found.span(1) for found in turns.pattern().finditer(text)]
    if spans and end_token:
        start, stop = spans[-1]
        rest = text[stop:]
        if end_token in rest and not rest.replace(end_token, "").strip():
            spans[-1] = start, stop + rest.rfind(end_token) + len(end_token)
    return spans


def choose_turns(
    render: Callable[[str, list[Message], dict[str, Any]], str | None],
    tokens: Collection[str],
    end_token: str,
    *,
    has_tools: bool,
) -> Turns | None:
    """Returns the family of a template; `None` if no family fits.

    Args:
      render: Renders messages with other variables, to a "text" or to a "prompt" for the
        assistant; returns `None` if the template refuses them.
      end_token: See `spans_of`.
      has_tools: Whether the template writes calls of tools.
    """
    possible = [turns for turns in FAMILIES.values() if _has_tokens(turns, tokens)]
    if not possible:
        return None
    probes = [(chat, render("text", chat, given)) for chat, given in _probes(has_tools=has_tools)]
    rendered = [(chat, text) for chat, text in probes if text is not None]
    prompt = render("prompt", [{"role": "user", "content": "asked"}], {}) or ""
    for family in possible:
        turns = _with_white_space(family, prompt, [text for _, text in rendered])
        fits = rendered and all(_fits(*probe, turns, end_token) for probe in rendered)
        if fits and family.prompt in prompt:
            return turns
    return None


def _has_tokens(turns: Turns, tokens: Collection[str]) -> bool:
    begin = turns.begins[0]
    return any(token in begin for token in tokens) and turns.ends[0] in tokens


def _with_white_space(turns: Turns, prompt: str, texts: Sequence[str]) -> Turns:
    """Adds the prompt's white space to the first of `begins`; drops `after` if a turn lacks it."""
    _, begin, rest = prompt.rpartition(turns.begins[0])
    space = rest[: len(rest) - len(rest.lstrip())]
    if space and turns.learned_from == "text":
        turns = turns._replace(begins=(begin + space, *turns.begins))
    found = (each[1] for text in texts for each in turns.pattern().finditer(text))
    return turns._replace(after="") if any(each.endswith(turns.ends) for each in found) else turns


def _probes(*, has_tools: bool) -> Iterator[tuple[list[Message], dict[str, Any]]]:
    """Yields chats, each with other variables of the template."""

    def chat(*roles: str) -> list[Message]:
        return [
            {"role": role, "content": f"{role}{number}said"} for number, role in enumerate(roles)
        ]

    two = ("user", "assistant") * 2
    for roles in (two[:2], two, ("system", *two), (*two, "user")):
        yield chat(*roles), {}
    reasoned = chat(*two)
    for message in reasoned[1::2]:
        message["content"] = f"<think>\nreason\n</think>\n\n{message['content']}"
    yield reasoned, {}
    if not has_tools:
        return
    called = {"name": "look", "arguments": {"place": "here"}}
    tool = {"type": "function", "function": {"name": "look", "description": "Looks."}}
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool["function"]["parameters"] = parameters  # type: ignore[index]
    asked = chat("user", "assistant", "tool", "assistant")
    call = {"type": "function", "id": "call00000", "function": called}
    asked[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked[2] |= {"name": "look", "tool_call_id": "call00000"}
    yield asked, {"tools": [tool]}


def _fits(messages: list[Message], text: str, turns: Turns, end_token: str) -> bool:
    spans = spans_of(text, turns, end_token)
    for message in messages:
        word = message["content"].split("\n")[-1]
        places = [found.start() for found in re.finditer(re.escape(word), text)] if word else []
        inside = [any(start <= place < stop for start, stop in spans) for place in places]
        if word and message["role"] == "assistant" and not (inside and all(inside)):
            return False
        if message["role"] != "assistant" and any(inside):
            return False
    return True
