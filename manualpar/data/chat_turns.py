"""Finds the assistant's turns in a chat's text by the tokens that begin and end them.

Many templates write an earlier turn in another way than the last one. For example, they leave out
the reasoning of earlier turns, or write a token after the last turn. Such templates need marks
around the assistant's text, and most have none. `FAMILIES` lists the texts that begin and end a
turn in widely used families of models, so that the text needs no other template. Both texts
contain tokens that no message may spell out, so a message cannot begin or end a turn.

The learned text is that of `assistant_only_loss` in TRL 1.16, for every family that TRL has a
template with marks for. These templates differ: some mark the line break after a turn, or the
tokens that begin it.

A family is chosen for a template by its tokens, and by probing chats: every probe's answer must be
inside of a turn, and every other message outside of all turns.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from manualpar.data.chat_renderer import Span

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
      tokens: The texts of the tokenizer's added tokens.
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
