"""The source `chat`: JSON lines with questions and answers. A model is trained only on the answers.

A line is a chat, `{"messages": [{"role": ..., "content": ...}, ...]}`, or a pair of texts,
`{"prompt": ..., "completion": ...}`. A template turns a chat into one text. In a pair, the
completion directly follows the prompt.

The labels in the loss are the tokens of the assistant's messages or of the completion, and the
token that ends an answer. All other tokens are only inputs. White space that the template writes
after the end token is an input too, except in families for which `manualpar.data.chat_template`
says
otherwise.

A chat may have `"tools"`, `"documents"`, and `"chat_template_kwargs"` with other variables of the
template, as in TRL. There `"chat_template"` names one of the tokenizer's templates. A message of
the assistant may have `"tool_calls"`.

A chat is refused if a message contains the text of a special token, so that no message can insert
special tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from manualpar.data.chat_renderer import Span
from manualpar.data.chat_template import BEGIN, END, ChatTemplate, load_templates
from manualpar.data.document_files import DocumentRange, line_error, lines_of
from manualpar.data.packing import LEARNED
from manualpar.data.token_parts import Encoded, TextPart, batches, split_of_content
from manualpar.data.tokenizer import FileTokenizer, Tokenizer, guarded
from manualpar.errors import require
from manualpar.system.storage.untrusted import parse_object, read_model_file

T = TypeVar("T")
# The variables of a template that `chat_template_kwargs` may not set.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})


class ChatEncoder:
    """Encodes JSON lines as examples of the source `chat`; implements `Encoder`."""

    dtype = "<u4"
    makes_examples = True

    def __init__(self, tokenizer: Tokenizer, held_out: float, template: str = "") -> None:
        """Makes an encoder.

        Args:
          tokenizer: Encodes the texts.
          held_out: The fraction of the examples in eval; test has the same fraction.
          template: See `load_templates`.
        """
        self._tokenizer, self._held_out = tokenizer, held_out
        self._template_path = template
        self._chats: Chats | None = None
        if template:
            self._chats = Chats(tokenizer, template)

    def encode(self, part: DocumentRange | TextPart) -> Iterator[list[Encoded]]:
        """Implements `Encoder`."""
        assert isinstance(part, DocumentRange)
        for lines in batches(lines_of(part)):
            batch: list[Encoded] = []
            made = self._examples([_parsed(line) for _, line in lines])
            for (place, _), tokens in zip(lines, made, strict=True):
                if isinstance(tokens, ValueError):
                    if str(tokens).startswith("`"):
                        raise tokens
                    raise line_error(part, place, tokens) from tokens
                batch.append((split_of_content(tokens.tobytes(), self._held_out), tokens, None))
            yield batch

    def example(self, fields: Mapping[str, Any]) -> np.ndarray:
        """Encodes a line as an example, `uint32[N]`.

        If the line is not an example, the caller puts the line's number before the error's message.
        """
        (made,) = self._examples([fields])
        if isinstance(made, ValueError):
            raise made
        return made

    def _examples(
        self, lines: Sequence[Mapping[str, Any] | ValueError]
    ) -> list[np.ndarray | ValueError]:
        """Encodes each line as an example; the result for a refused line is its error."""
        made: dict[int, np.ndarray | ValueError] = {}
        chats: dict[int, Mapping[str, Any]] = {}
        for number, line in enumerate(lines):
            if isinstance(line, ValueError):
                made[number] = line
            elif "messages" in line:
                chats[number] = line
            else:
                made[number] = _attempt(self._of_texts, line)
        if chats:
            if self._chats is None:
                self._chats = Chats(self._tokenizer, self._template_path)
            made |= zip(chats, self._chats.examples(list(chats.values())), strict=True)
        return [made[number] for number in range(len(lines))]

    def _of_texts(self, fields: Mapping[str, Any]) -> np.ndarray:
        if "prompt" in fields and "completion" in fields:
            return self._completion(fields["prompt"], fields["completion"])
        there = ", ".join(map(repr, list(fields)[:8])) or "no field"
        raise ValueError(f"has {there}, expected 'messages', or 'prompt' and 'completion'")

    def _completion(self, prompt: Any, completion: Any) -> np.ndarray:
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise ValueError(f"has a {name} of type {type(value).__name__}, expected a text")
        texts = [_utf8(text) for text in (prompt, completion)]
        asked, answered = self._tokenizer.encode_documents(texts)
        begin = [self._tokenizer.bos_token] if self._tokenizer.begins_with_bos else []
        read = np.concatenate([np.array(begin, np.uint32), asked.astype(np.uint32)])
        learned = np.append(answered, self._tokenizer.end_token).astype(np.uint32)
        if not len(read):
            raise ValueError("has an empty prompt, expected at least one token before the answer")
        return np.concatenate([read, learned | LEARNED])


class Chats:
    """Encodes the messages of chats, as examples for training or as prompts."""

    def __init__(self, tokenizer: Tokenizer, template: str = "") -> None:
        """Loads a template, see `load_templates`."""
        if not isinstance(tokenizer, FileTokenizer):
            raise ValueError(
                "`tokenizer` is '', expected the directory of a tokenizer with a "
                "template for chats, because the tokenizer of bytes has no special tokens."
            )
        require("`tokenizer`", "tokenizers")
        import tokenizers

        self._templates = load_templates(template, tokenizer.files)
        # Unlike a `FileTokenizer`, this tokenizer encodes the texts of special tokens, which the
        # template writes, as special tokens.
        file = tokenizer.files[0]
        data = read_model_file(file, file.parent)
        self._tokenizer = guarded(lambda: tokenizers.Tokenizer.from_buffer(data))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._added = {token.content for token in added.values()}
        self._added_ids = frozenset(added)
        # For each template that chats have used, the texts that no message may contain.
        self._refused: dict[ChatTemplate, tuple[str, ...]] = {}
        # For each template that prompts have used, the token that it writes after an answer.
        self._ends: dict[ChatTemplate, frozenset[int]] = {}

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the templates of all prompts so far end a turn of the assistant."""
        return frozenset().union(*self._ends.values())

    def prompt(self, chat: Mapping[str, Any]) -> list[int]:
        """Encodes a chat as a prompt, which ends where the assistant begins to write.

        The caller puts the line's number before an error's message.

        Args:
          chat: The fields of a line: `messages`, and optionally `tools`, `documents` and
            `chat_template_kwargs`.
        """
        messages, given, template = self._checked(chat)
        text = template.prompt(messages, given)
        if template not in self._ends:
            self._ends[template] = self._end_of_turn(template)
        tokens: list[int] = self._encode(text).ids
        return tokens

    def _end_of_turn(self, template: ChatTemplate) -> frozenset[int]:
        asked, answered = "asked", "answered"
        chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        _, found, rest = (template.text(chat) or "").rpartition(answered)
        first = self._encode(rest.lstrip()).ids[:1] if found else []
        return frozenset(token for token in first if token in self._added_ids)

    def examples(self, chats: Sequence[Mapping[str, Any]]) -> list[np.ndarray | ValueError]:
        """Encodes each chat, see `prompt`, as an example, `uint32[N]`.

        The result for a refused chat, which may have no answer to train on, is its error.
        """
        made: list[Any] = [_attempt(self._checked, chat) for chat in chats]
        of_template: dict[ChatTemplate, list[int]] = {}
        for number, found in enumerate(made):
            if not isinstance(found, ValueError):
                of_template.setdefault(found[2], []).append(number)
        for template, numbers in of_template.items():
            messages, given = ([made[number][part] for number in numbers] for part in (0, 1))
            answers = template.render_all(messages, given)
            for number, chat, answer in zip(numbers, messages, answers, strict=True):
                made[number] = answer
                if not isinstance(answer, ValueError):
                    made[number] = _attempt(self._example, template, chat, *answer)
        return made

    def _example(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        spans: Sequence[Span],
    ) -> np.ndarray:
        answers = [x.get("content") or "" for x in messages if x["role"] == "assistant"]
        learned = "".join(text[start:stop] for start, stop in spans)
        words = list(filter(None, map(str.strip, answers)))
        # There may be thousands of added tokens, so they are only looked for if no answer is found.
        if spans and words and not any(word in learned for word in words):
            for token in self._added:
                learned = learned.replace(token, "")
            if not learned.strip():
                raise ValueError(
                    "has answers that the chat's template leaves out, as templates of models of "
                    "images do that expect a list as content; use another template"
                )
        encoding = self._encode(text)
        tokens = np.array(encoding.ids, np.uint32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, stop in spans:
            inside = (offsets[:, 0] < stop) & (offsets[:, 1] > start)
            if template.has_marks:
                # As transformers: up to the first token of the last character.
                ends = (offsets[:, 0] < stop) & (offsets[:, 1] >= stop)
                inside &= np.cumsum(ends) - ends < 1
            if not inside.any():
                continue
            first, last = np.flatnonzero(inside)[[0, -1]]
            if not (template.has_marks or template.turns):
                special = [i for i in range(first, last + 1) if encoding.ids[i] in self._special]
                if special and not text[offsets[special[-1], 1] : stop].strip():
                    last = special[-1]
            tokens[first : last + 1] |= LEARNED
        if not (tokens[1:] & LEARNED).any():
            raise ValueError("has no answer to train on; expected a message of the assistant")
        return tokens

    def _encode(self, text: str) -> Any:
        _utf8(text)
        try:
            return guarded(lambda: self._tokenizer.encode(text, add_special_tokens=False))
        except ValueError as error:
            raise ValueError(f"has a text that the tokenizer cannot encode ({error})") from error

    def _choose(self, given: dict[str, Any]) -> ChatTemplate:
        """Chooses the template of a chat; takes its name out of the variables."""
        name = given.pop("chat_template", None)
        template = self._templates.choose(name, has_tools="tools" in given)
        if template not in self._refused:
            template.choose_turns(self._added)
            turns = template.turns.texts if template.turns else ()
            self._refused[template] = (*self._special.values(), *turns, BEGIN, END)
        return template

    def _checked(
        self, chat: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], ChatTemplate]:
        """Returns a line's messages, the values of other variables, and the line's template."""
        given = _variables(chat)
        template = self._choose(given)
        for name in ("tools", "documents"):
            if name in given and not template.mentions(name):
                raise ValueError(f"has {name}, which the chat's template leaves out")
        refused = self._refused[template]
        messages = chat["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("has no messages, expected a list of them")
        for number, message in enumerate(messages, 1):
            fields = message if isinstance(message, dict) else {}
            calls = fields.get("tool_calls")
            if calls is not None:
                _check_objects(f"a message {number} whose tool_calls", calls)
            for field in ("role", "content"):
                value = fields.get(field)
                if not isinstance(value, str) and not (field == "content" and calls and not value):
                    raise ValueError(
                        f"has a message {number} whose {field} is {_kind(value)}, expected a text"
                    )
            if calls and not template.mentions("tool_calls"):
                raise ValueError(
                    f"has a message {number} with tool_calls, which the chat's template leaves out"
                )
            for field, value in fields.items():
                _check_texts(f"a message {number} whose {field}", value, refused)
        for name, value in given.items():
            _check_texts(f"a variable {name!r} that", value, refused)
        return messages, given, template


def _variables(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a template's variables in a line; empty tools count as none."""
    given = chat.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise ValueError(f"has chat_template_kwargs {_kind(given)}, expected an object")
    for name in RESERVED & given.keys():
        raise ValueError(f"has chat_template_kwargs with {name!r}, which is a field of its own")
    if not isinstance(given.get("chat_template", ""), str | None):
        raise ValueError("has a chat_template that is no text, expected a template's name")
    given = dict(given)
    for name in ("tools", "documents"):
        value = chat.get(name)
        if isinstance(value, str):  # As TRL writes tools in columns of texts.
            try:
                value = parse_object(f'{{"{name}": {value}}}')[name]
            except ValueError as error:
                raise ValueError(f"has {name} whose text {error}") from error
        if value:
            _check_objects(name, value)
            given[name] = value
    return given


def _check_objects(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"has {name} that are no list of objects")


def _check_texts(name: str, value: Any, refused: Sequence[str]) -> None:
    """Refuses texts anywhere in a JSON value that spell out a special token."""
    if isinstance(value, str):
        _utf8(value)
        for token in refused:
            if token in value:
                raise ValueError(
                    f"has {name} spells out the special token {token!r}, which only a template "
                    "may write"
                )
    elif isinstance(value, dict):
        _check_texts(name, list(value), refused)
        _check_texts(name, list(value.values()), refused)
    elif isinstance(value, list):
        for each in value:
            _check_texts(name, each, refused)


def _parsed(line: bytes) -> dict[str, Any] | ValueError:
    return _attempt(parse_object, line)


def _attempt(action: Callable[..., T], *arguments: Any) -> T | ValueError:
    """Returns what `action` returns, or the error that it raises."""
    try:
        return action(*arguments)
    except ValueError as error:
        return error


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half of a surrogate pair at character {error.start}, which is no text"
        ) from None
