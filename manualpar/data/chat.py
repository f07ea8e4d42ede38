"""The source `chat`: rows with questions and answers. A model is trained only on the answers.

A row of JSON or Parquet has one of these forms, see `standard_form`:

- A chat, `{"messages": [{"role": ..., "content": ...}, ...]}`. A template turns it into one text.
- ShareGPT's form of a chat, `{"conversations": [{"from": "human", "value": ...}, ...]}`.
- A pair of texts, `{"prompt": ..., "completion": ...}`. The completion directly follows the prompt.
- A pair of lists of messages with the same names, as in TRL. Only the completion is learned.
- Alpaca's form, `{"instruction": ..., "input": ..., "output": ...}`. It is a chat if the tokenizer
  has a template, and otherwise a pair with Alpaca's prompt.

The content of a message may be a list of parts of text. A message with `"weight": 0` or
`"train": false` is not learned.

The labels in the loss are the tokens of the assistant's messages or of the completion, and the
token that ends an answer. All other tokens are only inputs. White space that the template writes
after the end token is an input too, except in families for which `manualpar.data.chat_template`
says otherwise.

A chat may have `"tools"`, `"documents"`, and `"chat_template_kwargs"` with other variables of the
template, as in TRL. There `"chat_template"` names one of the tokenizer's templates. A message of
the assistant may have `"tool_calls"`.

A chat is refused if a message contains the text of a special token, so that no message can insert
special tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from manualpar.data.chat_renderer import Span
from manualpar.data.chat_template import (
    BEGIN,
    END,
    ChatTemplate,
    has_templates,
    load_templates,
)
from manualpar.data.document_files import BadRows, DocumentRange, Rows, attempt
from manualpar.data.packing import LEARNED
from manualpar.data.token_parts import Encoded, TextPart, batches, split_of_content
from manualpar.data.tokenizer import FileTokenizer, Notes, Tokenizer, guarded
from manualpar.errors import require
from manualpar.system.storage.untrusted import parse_object, read_model_file

# The variables of a template that `chat_template_kwargs` may not set.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})


# The names of the roles in the turns of ShareGPT, and in other names of the same roles.
ROLES = {
    **{name: name for name in ("user", "assistant", "system", "developer", "tool")},
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "bard", "bing"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    "human": "user",
}
# The fields of a message that say whether it is learned: OpenAI's and Axolotl's.
WEIGHTS = ("weight", "train")
ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately "
ALPACA += "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
ALPACA_INPUT = ", paired with an input that provides further context"


def standard_form(line: Mapping[str, Any], *, has_template: bool) -> Mapping[str, Any]:
    """Returns a row as a chat with `messages`, or as a `prompt` and a `completion` that are texts.

    Args:
      line: A row in one of the forms of this module. A row with `messages` is returned as it is.
      has_template: Whether chats can become texts.
    """
    if "messages" in line:
        return line
    if "conversations" in line:
        messages = standard_messages(line["conversations"], "conversations")
        system = line.get("system")
        if system and not any(message.get("role") == "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return {**line, "messages": messages}
    if isinstance(line.get("prompt"), list) and isinstance(line.get("completion"), list):
        asked = standard_messages(line["prompt"], "prompt")
        # Only the completion is learned.
        asked = [x | {"weight": 0} if x.get("role") == "assistant" else x for x in asked]
        return {**line, "messages": asked + standard_messages(line["completion"], "completion")}
    if "instruction" in line and "output" in line:
        return _of_alpaca(line, has_template=has_template)
    return line


def standard_messages(turns: Any, name: str) -> list[dict[str, Any]]:
    """Returns a list of messages whose turns may have `from` and `value` as names of fields."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"has {name} {_kind(turns)}, expected a list of messages")
    messages = []
    for number, turn in enumerate(turns, 1):
        if "from" in turn:
            others = {key: x for key, x in turn.items() if key not in ("from", "value")}
            role = turn["from"] if isinstance(turn["from"], str) else ""
            if role not in ROLES:
                raise ValueError(
                    f"has a turn {number} from {turn['from']!r:.80}, expected one of "
                    f"{', '.join(map(repr, ROLES))}; write other turns as messages with role and "
                    "content"
                )
            turn = {"role": ROLES[role], "content": turn.get("value"), **others}
        messages.append(turn)
    return messages


def _of_alpaca(line: Mapping[str, Any], *, has_template: bool) -> dict[str, Any]:
    texts = {name: line.get(name) or "" for name in ("instruction", "input", "output", "system")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"has {name} {_kind(value)}, expected a text")
    history = line.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError(f"has history {_kind(history)}, expected pairs of texts")
    instruction, given, output, system = texts.values()
    if not has_template:
        if system or history:
            raise ValueError(
                "has a system or a history, expected a tokenizer with a chat template for these"
            )
        also = (ALPACA_INPUT, f"### Input:\n{given}\n\n") if given else ("", "")
        prompt = ALPACA.format(also[0], instruction, also[1])
        return {"prompt": prompt, "completion": output}
    turns = [("system", system)] if system else []
    turns += [turn for a, b in history for turn in (("user", a), ("assistant", b))]
    asked = f"{instruction}\n\n{given}" if given else instruction
    turns += [("user", asked), ("assistant", output)]
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages}


class ChatEncoder:
    """Encodes rows as examples of the source `chat`; implements `Encoder`."""

    dtype = "<u4"
    makes_examples = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        held_out: float,
        template: str = "",
        *,
        bad_rows: BadRows = "error",
    ) -> None:
        """Makes an encoder.

        Args:
          tokenizer: Encodes the texts.
          held_out: The fraction of the examples in eval; test has the same fraction.
          template: See `load_templates`.
          bad_rows: See `Rows`.
        """
        self._tokenizer, self._held_out, self._bad_rows = tokenizer, held_out, bad_rows
        self.notes = Notes()
        self._template_path = template
        self._has_template = bool(template) or has_templates(tokenizer.files)
        self._chats = Chats(tokenizer, template) if template else None

    def encode(self, part: DocumentRange | TextPart) -> Iterator[list[Encoded]]:
        """Implements `Encoder`."""
        assert isinstance(part, DocumentRange)
        rows = Rows(part, self._bad_rows, self.notes)
        for raw in batches(rows.objects()):
            batch: list[Encoded] = []
            lines = [attempt(parse_object, x) if isinstance(x, bytes) else x for _, x in raw]
            made = self._examples(lines)
            for (place, _), line, tokens in zip(raw, lines, made, strict=True):
                if isinstance(tokens, ValueError) and self._bad_rows == "skip":
                    # A template renders no chats after the first that it refuses.
                    (tokens,) = self._examples([line])
                if isinstance(tokens, ValueError):
                    if str(tokens).startswith("`"):
                        raise tokens
                    rows.refuse(place, tokens)
                    continue
                rows.accept()
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
        for number, given in enumerate(lines):
            line = given
            if not isinstance(line, ValueError):
                line = attempt(standard_form, line, has_template=self._has_template)
            if isinstance(line, ValueError):
                made[number] = line
            elif "messages" in line:
                chats[number] = line
            else:
                made[number] = attempt(self._of_texts, line)
        if chats:
            if self._chats is None:
                self._chats = Chats(self._tokenizer, self._template_path)
            made |= zip(chats, self._chats.examples(list(chats.values())), strict=True)
        return [made[number] for number in range(len(lines))]

    def _of_texts(self, fields: Mapping[str, Any]) -> np.ndarray:
        if "prompt" in fields and "completion" in fields:
            return self._completion(fields["prompt"], fields["completion"])
        there = ", ".join(map(repr, list(fields)[:8])) or "no field"
        raise ValueError(
            f"has {there}, expected 'messages', or 'prompt' and 'completion', or 'conversations', "
            "or 'instruction' and 'output'"
        )

    def _completion(self, prompt: Any, completion: Any) -> np.ndarray:
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise ValueError(f"has a {name} of type {type(value).__name__}, expected a text")
        texts = [_utf8(text) for text in (prompt, completion)]
        tokenizer = self._tokenizer
        self.notes.spelt.update(tokenizer.count_special(texts))
        if not prompt and not tokenizer.begins_with_bos:
            raise ValueError("has an empty prompt, expected at least one token before the answer")
        joined, border = tokenizer.encode_joined(prompt, completion)
        begin = [tokenizer.bos_token] if tokenizer.begins_with_bos else []
        if begin and joined[:1].tolist() == begin:  # With `parse_special` the prompt may have it.
            joined, border = joined[1:], max(border - 1, 0)
        end = [] if joined[-1:].tolist() == [tokenizer.end_token] else [tokenizer.end_token]
        tokens = np.concatenate([begin, joined, end]).astype(np.uint32)
        tokens[len(begin) + border :] |= LEARNED
        return tokens


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
        self.chosen = self._templates.chosen  # The text of the template for chats that name none.
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
        checked = self._checked(chat)
        template = checked.template
        text = template.prompt(checked.messages, checked.given)
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
        made: list[Any] = [attempt(self._checked, chat) for chat in chats]
        of_template: dict[ChatTemplate, list[int]] = {}
        for number, found in enumerate(made):
            if not isinstance(found, ValueError):
                of_template.setdefault(found.template, []).append(number)
        for template, numbers in of_template.items():
            checked: list[_Checked] = [made[number] for number in numbers]
            answers = template.render_all([x.messages for x in checked], [x.given for x in checked])
            for number, chat, answer in zip(numbers, checked, answers, strict=True):
                made[number] = answer
                if not isinstance(answer, ValueError):
                    made[number] = attempt(self._example, chat, *answer)
        return made

    def _example(self, chat: "_Checked", text: str, spans: Sequence[Span]) -> np.ndarray:
        messages, template = chat.messages, chat.template
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
        if not all(chat.are_learned):
            spans = _learned_spans(chat, text, spans)
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

    def _checked(self, chat: Mapping[str, Any]) -> "_Checked":
        """Returns a line's messages, the values of other variables, and the line's template."""
        given = _variables(chat)
        template = self._choose(given)
        for name in ("tools", "documents"):
            if name in given and not template.mentions(name):
                raise ValueError(f"has {name}, which the chat's template leaves out")
        refused = self._refused[template]
        if not isinstance(chat["messages"], list) or not chat["messages"]:
            raise ValueError("has no messages, expected a list of them")
        messages, are_learned = [], []
        for number, message in enumerate(chat["messages"], 1):
            fields = dict(message) if isinstance(message, dict) else {}
            is_learned = _is_learned(fields, number)
            if fields.get("role") == "assistant":
                are_learned.append(is_learned)
            if isinstance(fields.get("content"), list):
                fields["content"] = _text_of_parts(fields["content"], number)
            messages.append(fields)
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
        return _Checked(messages, given, template, are_learned)


class _Checked(NamedTuple):
    """A chat that may be rendered.

    Attributes:
      messages: The messages.
      given: The values of other variables of the template.
      template: The template.
      are_learned: For each message of the assistant, whether it is learned.
    """

    messages: list[dict[str, Any]]
    given: dict[str, Any]
    template: ChatTemplate
    are_learned: list[bool]


def _is_learned(message: dict[str, Any], number: int) -> bool:
    """Takes the weight out of a message; returns whether the message is learned."""
    found = {name: message.pop(name) for name in WEIGHTS if name in message}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"has a message {number} whose {name} is {value!r:.80}, expected 0 or 1, because "
                "every learned token has the same weight"
            )
        if value and message.get("role") != "assistant":
            raise ValueError(
                f"has a message {number} of {message.get('role')!r:.80} with {name}={value!r}, "
                "expected 0, because only messages of the assistant are learned"
            )
    return all(found.values())


def _text_of_parts(parts: list[Any], number: int) -> str:
    """Joins the parts of a message's content, as templates of transformers do."""
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f"has a message {number} whose content has a part of type {kind!r:.80}, expected "
                'parts {"type": "text", "text": ...}, because only texts are learned'
            )
        texts.append(text)
    return "".join(texts)


def _learned_spans(chat: _Checked, text: str, spans: Sequence[Span]) -> list[Span]:
    """Returns the spans of the messages that are learned."""
    answers = [x.get("content") or "" for x in chat.messages if x["role"] == "assistant"]
    if len(spans) != len(answers) or not all(
        answer.strip() in text[start:stop]
        for answer, (start, stop) in zip(answers, spans, strict=True)
    ):
        raise ValueError(
            f"has a message that is not learned, but the chat's template writes {len(spans)} turns "
            f"of the assistant for {len(answers)} messages; expected a turn for each, such as with "
            "a template that has {% generation %} marks"
        )
    return [span for span, learned in zip(spans, chat.are_learned, strict=True) if learned]


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


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half of a surrogate pair at character {error.start}, which is no text"
        ) from None
