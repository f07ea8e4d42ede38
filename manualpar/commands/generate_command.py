"""Generates answers to prompts: streams one answer to the terminal, or writes many as JSONL."""

import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.commands.command_flags import (
    MODEL_FLAGS,
    check_lines,
    check_model,
    is_main,
    output_line,
    read_lines,
    run_with_model,
    show,
    warn_of_special,
    write_output,
)
from manualpar.data.chat import Chats
from manualpar.errors import UsageError
from manualpar.models.generation.answers import Answer
from manualpar.models.generation.generator import Generator, Prompt
from manualpar.models.pretrained.export import GENERATION_CONFIG
from manualpar.system.reports.flags import Flag, check_one_of, parse_flags
from manualpar.training.load_run import Trained

# The fields that an output line adds to the fields of the prompt's line.
ADDED = ("text", "ending", "tokens")
# The flags that are options of `Generator.stream`.
OPTIONS = (
    "max_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "samples",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)


USAGE = """Answers prompts with a run's newest checkpoint, or with a Hugging Face model.

{program} --workdir=<folder> --prompt="Once upon a time"
    [--temperature=0.8] [--top-k=<number>] [--top-p=<probability>]
    [--max-tokens=<number>] [--stop=<text> ...] [--seed=<number>] [--chat]
    [--mesh=data=4,model=2] [--devices=<number>]
{program} --hf=<directory> [--adapter=<directory of peft>] --prompts=<lines, .jsonl or ->
    [--output=<.jsonl>]

The answer to one prompt is streamed to the terminal. Several prompts are answered in batches, as
JSONL.
"""


_ENDS, _DRAWS, _CHANGES = "The end of an answer", "Draws", "Changed probabilities"
_OWN = f" [default {{}}, or that of the model's {GENERATION_CONFIG}]"
FLAGS: Mapping[str, Flag] = {
    "prompt": Flag("The text to continue."),
    "prompts": Flag('A file of lines, or JSONL with "prompt" or "messages"; - for stdin.'),
    **MODEL_FLAGS,
    "chat": Flag("Treats each prompt as a chat message.", bool, False),
    "output": Flag("The JSONL file of answers to --prompts.", Path, in_buckets=True),
    "log_probabilities": Flag(
        "Adds the log-probability of each token to the lines of --prompts.", bool, False
    ),
    "max_tokens": Flag("The most tokens of an answer.", int, 128, heading=_ENDS),
    "stop": Flag(
        "A text that ends an answer; repeatable.", default=[], repeats=True, heading=_ENDS
    ),
    "temperature": Flag(
        "The divisor of the logits; 0 always chooses the likeliest." + _OWN.format(0),
        float,
        heading=_DRAWS,
    ),
    "top_k": Flag(
        "Draws from this number of likeliest tokens; 0 for all." + _OWN.format(0),
        int,
        heading=_DRAWS,
    ),
    "top_p": Flag(
        "Draws from the likeliest tokens with this probability together; 1 for all."
        + _OWN.format(1),
        float,
        heading=_DRAWS,
    ),
    "min_p": Flag(
        "Draws from tokens with this fraction of the likeliest token's probability; 0 for all."
        + _OWN.format(0),
        float,
        heading=_DRAWS,
    ),
    "samples": Flag("The answers that are drawn for each prompt.", int, 1, heading=_DRAWS),
    "seed": Flag("The seed of the answers.", int, 0, heading=_DRAWS),
    "repetition_penalty": Flag(
        "Makes tokens of the prompt and the answer less likely if above 1." + _OWN.format(1),
        float,
        heading=_CHANGES,
    ),
    "frequency_penalty": Flag(
        "Subtracted from a token's logit for each time the answer has it.",
        float,
        0.0,
        heading=_CHANGES,
    ),
    "presence_penalty": Flag(
        "Subtracted from the logits of tokens that the answer has.", float, 0.0, heading=_CHANGES
    ),
    "logit_bias": Flag(
        "Numbers to add to the logits of tokens, such as 50256:-100.",
        default="",
        value="TOKEN:NUMBER,...",
        heading=_CHANGES,
    ),
}


def _check(flags: types.SimpleNamespace) -> None:
    """Checks flags that depend on each other, and parses `--logit-bias`."""
    check_model(flags)
    check_one_of(flags, "prompt", "prompts", is_required=True)
    flags.logit_bias = _biases(flags.logit_bias)


def main(argv: Sequence[str]) -> int:
    """Generates answers to the prompts of the command line `argv`; returns the exit code."""
    flags = parse_flags(argv, USAGE, FLAGS, check=_check)

    def work(trained: Trained, generator: Generator) -> None:
        given = {name: getattr(flags, name) for name in OPTIONS}
        options = {**trained.own.drawing, **{k: x for k, x in given.items() if x is not None}}
        if trained.own.described and is_main():
            said = f"{GENERATION_CONFIG}: {trained.own.described}; flags replace it, as"
            print(f"{said} --temperature=0 does", file=sys.stderr)
        if flags.prompt is not None and flags.samples > 1:
            raise UsageError(
                f"--samples={flags.samples} draws several answers at once, expected --prompts, "
                "which writes each as a line."
            )
        if flags.prompt is None:
            _answer_all(trained, generator, flags, options)
            return
        prompts = _prompts(trained, generator, flags, [{"prompt": flags.prompt}])
        begin = "" if flags.chat else flags.prompt
        for piece in generator.stream(trained.state, prompts, **options):
            show(begin + piece.text)
            begin = ""
        show("\n")

    return run_with_model(flags, work)


def _answer_all(
    trained: Trained, generator: Generator, flags: types.SimpleNamespace, options: dict[str, Any]
) -> None:
    lines = read_lines(flags.prompts)
    added = (*ADDED, "log_probabilities") if flags.log_probabilities else ADDED
    check_lines(f"--prompts={flags.prompts}", lines, texts=(), added=added)
    prompts = _prompts(trained, generator, flags, lines)
    answers = generator.generate(trained.state, prompts, **options)
    asked = [line for line in lines for _ in range(flags.samples)]
    text = "".join(_line(line, answer, added) for line, answer in zip(asked, answers, strict=True))
    if flags.output:
        write_output(flags.output, text)
    else:
        show(text)


def _prompts(
    trained: Trained,
    generator: Generator,
    flags: types.SimpleNamespace,
    lines: Sequence[dict[str, Any]],
) -> list[Prompt]:
    """Makes a prompt from each line; converts a chat to tokens with the chat template.

    The generator then stops at the token with which the template ends a turn.
    """
    prompts: list[Prompt] = []
    chats = None
    plain = [line.get("prompt") for line in lines if not flags.chat]
    warn_of_special(trained.tokenizer, plain, "--prompts" if flags.prompts else "--prompt")
    for number, line in enumerate(lines, 1):
        where = f"--prompts={flags.prompts}, line {number}: " if flags.prompts else "--prompt: "
        if not {"prompt", "messages"} & line.keys():
            raise UsageError(f"{where}expected a field 'prompt' or 'messages'.")
        chat = line if line.get("messages") is not None else None
        if chat is None and flags.chat:
            chat = {**line, "messages": [{"role": "user", "content": line["prompt"]}]}
        if chat is None:
            prompts.append(_prompt(line["prompt"], where))
            continue
        chats = chats or Chats(trained.tokenizer, trained.template)
        try:
            prompts.append(chats.prompt(chat))
        except ValueError as error:
            raise UsageError(f"{where}it {error}.") from error
    if chats:
        generator.stop_tokens |= chats.end_tokens
    return prompts


def _prompt(value: Any, where: str) -> Prompt:
    is_number = [type(token) is int for token in value] if isinstance(value, list) else [False]
    if isinstance(value, str) or all(is_number):
        return value
    raise UsageError(
        f"{where}'prompt' is of type {type(value).__name__}, expected a text, or a list of tokens."
    )


def _line(asked: dict[str, Any], answer: Answer, added: Sequence[str]) -> str:
    return output_line({**asked, **{name: getattr(answer, name) for name in added}})


def _biases(text: str) -> dict[int, float]:
    if not text:
        return {}
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(number) for token, number in pairs}
    except ValueError:
        raise UsageError(
            f"--logit-bias={text}: expected tokens with numbers, such as 50256:-100,13:2.5."
        ) from None
