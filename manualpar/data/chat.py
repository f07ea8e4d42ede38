"""The source `chat`: questions and answers in JSON lines, of which the answers are learned.

A line is either a chat, `{"messages": [{"role": ..., "content": ...}, ...]}`, whose text is what a
template makes of it, or `{"prompt": ..., "completion": ...}`, two texts end to end. What is learned
are the tokens of the assistant's messages, or of the completion, with the token that ends them; all
others are there to be read. White space that a template writes behind that last token is not
learned.

The text of a message cannot become a special token: a chat whose
messages spell one out is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from manualpar.data.chat_renderer import Span
from manualpar.data.chat_template import BEGIN, END, ChatTemplate, load_template
from manualpar.data.document_files import DocumentRange, line_error, lines_of
from manualpar.data.packing import LEARNED
from manualpar.data.token_parts import Encoded, TextPart, batches, split_of_content
from manualpar.data.tokenizer import FileTokenizer, Tokenizer
from manualpar.data.tokenizer_check import guarded
from manualpar.errors import require
from manualpar.system.storage.untrusted import parse_object

T = TypeVar("T")


class ChatEncoder:
    """Makes examples of lines; an `Encoder`."""

    dtype = "<u4"
    makes_examples = True

    def __init__(self, tokenizer: Tokenizer, held_out: float, template: str = "") -> None:
        """Takes the share of examples that eval and test get each, and a template's file or ""."""
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
                    if str(tokens).startswith("config."):
                        raise tokens
                    raise line_error(part, place, tokens) from tokens
                batch.append((split_of_content(tokens.tobytes(), self._held_out), tokens, None))
            yield batch

    def example(self, fields: Mapping[str, Any]) -> np.ndarray:
        """Makes the example `uint32[N]` of a line.

        Raises:
          ValueError: The line is no example; the message completes a sentence about it.
        """
        (made,) = self._examples([fields])
        if isinstance(made, ValueError):
            raise made
        return made

    def _examples(
        self, lines: Sequence[Mapping[str, Any] | ValueError]
    ) -> list[np.ndarray | ValueError]:
        """Makes the examples of lines; a line that is refused gives its error instead."""
        made: dict[int, np.ndarray | ValueError] = {}
        chats: dict[int, Any] = {}
        for number, line in enumerate(lines):
            if isinstance(line, ValueError):
                made[number] = line
            elif "messages" in line:
                chats[number] = line["messages"]
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
    """Makes examples and prompts of messages."""

    def __init__(self, tokenizer: Tokenizer, template: str = "") -> None:
        """Takes a template's file, or "" for the tokenizer's.

        Raises:
          ValueError: There is no template.
        """
        if not isinstance(tokenizer, FileTokenizer):
            raise ValueError(
                "config.data.tokenizer is '', expected the directory of a tokenizer with a "
                "template for chats, whose special tokens bytes do not have."
            )
        require("config.data.tokenizer", "tokenizers")
        import tokenizers

        self._template: ChatTemplate = load_template(template, tokenizer.files)
        # This encoding recognizes the special tokens that the template spells out.
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    def prompt(self, messages: Any) -> list[int]:
        """Encodes a chat up to the place where the assistant writes.

        Raises:
          ValueError: They are no messages; the message completes a sentence about a line.
        """
        self._check(messages)
        text = self._template.prompt(messages)
        tokens: list[int] = self._encode(text).ids
        return tokens

    def example(self, messages: Any) -> np.ndarray:
        """Makes the example `uint32[N]` of messages; raises as `prompt`, and without an answer."""
        (made,) = self.examples([messages])
        if isinstance(made, ValueError):
            raise made
        return made

    def examples(self, chats: Sequence[Any]) -> list[np.ndarray | ValueError]:
        """Makes the example of each chat, or the reason why there is none; see `example`."""
        made: list[Any] = [_attempt(self._check, messages) for messages in chats]
        good = [number for number, error in enumerate(made) if error is None]
        rendered = self._template.render_all([chats[number] for number in good])
        for number, answer in zip(good, rendered, strict=True):
            if isinstance(answer, ValueError):
                made[number] = answer
            else:
                made[number] = _attempt(self._example, *answer)
        return made

    def _example(self, text: str, spans: Sequence[Span]) -> np.ndarray:
        encoding = self._encode(text)
        tokens = np.array(encoding.ids, np.uint32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, stop in spans:
            inside = (offsets[:, 0] < stop) & (offsets[:, 1] > start)
            if not inside.any():
                continue
            first, last = np.flatnonzero(inside)[[0, -1]]
            special = [i for i in range(first, last + 1) if encoding.ids[i] in self._special]
            if special and not text[offsets[special[-1], 1] : stop].strip():
                last = special[-1]
            tokens[first : last + 1] |= LEARNED
        if not (tokens[1:] & LEARNED).any():
            raise ValueError("has no answer to learn; expected a message of the assistant with one")
        return tokens

    def _encode(self, text: str) -> Any:
        _utf8(text)
        try:
            return guarded(lambda: self._tokenizer.encode(text, add_special_tokens=False))
        except ValueError as error:
            raise ValueError(f"has a text that the tokenizer cannot encode ({error})") from error

    def _check(self, messages: Any) -> None:
        if not isinstance(messages, list) or not messages:
            raise ValueError("has no messages, expected a list of them")
        for number, message in enumerate(messages, 1):
            texts = message if isinstance(message, dict) else {}
            for field in ("role", "content"):
                value = texts.get(field)
                if not isinstance(value, str):
                    raise ValueError(
                        f"has a message {number} whose {field} is {_kind(value)}, expected a text"
                    )
                _utf8(value)
                for token in (*self._special.values(), BEGIN, END):
                    if token in value:
                        raise ValueError(
                            f"has a message {number} whose {field} spells out the special token "
                            f"{token!r}, which only a template may write"
                        )


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
            f"has half of a surrogate pair, character {error.start}, which is no text"
        ) from None
