"""Generates answers to prompts: streams one answer to the terminal, or writes many as JSONL."""

import argparse
from collections.abc import Sequence
from typing import Any

from manualpar.commands.command_flags import (
    check_lines,
    model_flags,
    output_line,
    read_lines,
    run_with_model,
    show,
    write_output,
)
from manualpar.data.chat import Chats
from manualpar.errors import UsageError
from manualpar.models.generation.generator import Answer, Generator, Prompt
from manualpar.system.storage import path_flag
from manualpar.training.load_run import Trained

# The fields that an output line adds to the fields of the prompt's line.
ADDED = ("text", "ending", "tokens")


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


def main(argv: Sequence[str]) -> int:
    """Generates answers to the prompts of the command line `argv`; returns the exit code."""
    parser = model_flags(argv[0], USAGE)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="The text to continue.")
    prompts.add_argument(
        "--prompts", help='A file of lines, or JSONL with "prompt" or "messages"; - for stdin.'
    )
    parser.add_argument("--chat", action="store_true", help="Treats each prompt as a chat message.")
    parser.add_argument("--output", type=path_flag, help="The JSONL file of answers to --prompts.")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        help="The most tokens of an answer. [default %(default)s]",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="The divisor of the logits; 0 always chooses the likeliest token. [default 0]",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="Draws from this number of likeliest tokens; 0 for all. [default %(default)s]",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="Draws from the likeliest tokens with this probability together; 1 for all. "
        "[default 1]",
    )
    parser.add_argument(
        "--stop", action="append", default=[], help="A text that ends an answer; repeatable."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="The seed of the answers. [default %(default)s]"
    )
    flags = parser.parse_args(argv[1:])

    def work(trained: Trained, generator: Generator) -> None:
        names = ("max_tokens", "temperature", "top_k", "top_p", "stop", "seed")
        options = {name: getattr(flags, name) for name in names}
        if flags.prompt is None:
            _answer_all(trained, generator, flags, options)
            return
        prompts = _prompts(trained, flags, [{"prompt": flags.prompt}])
        begin = "" if flags.chat else flags.prompt
        for piece in generator.stream(trained.state, prompts, **options):
            show(begin + piece.text)
            begin = ""
        show("\n")

    return run_with_model(flags, work)


def _answer_all(
    trained: Trained, generator: Generator, flags: argparse.Namespace, options: dict[str, Any]
) -> None:
    lines = read_lines(flags.prompts)
    check_lines(f"--prompts={flags.prompts}", lines, texts=(), added=ADDED)
    answers = generator.generate(trained.state, _prompts(trained, flags, lines), **options)
    text = "".join(map(_line, lines, answers))
    if flags.output:
        write_output(flags.output, text)
    else:
        show(text)


def _prompts(
    trained: Trained, flags: argparse.Namespace, lines: Sequence[dict[str, Any]]
) -> list[Prompt]:
    """Makes a prompt from each line; converts a chat to tokens with the chat template."""
    prompts: list[Prompt] = []
    chats = None
    for number, line in enumerate(lines, 1):
        where = f"--prompts={flags.prompts}, line {number}: " if flags.prompts else "--prompt: "
        if not {"prompt", "messages"} & line.keys():
            raise UsageError(f"{where}expected a field 'prompt' or 'messages'.")
        messages = line.get("messages")
        if messages is None and flags.chat:
            messages = [{"role": "user", "content": line["prompt"]}]
        if messages is None:
            prompts.append(_prompt(line["prompt"], where))
            continue
        chats = chats or Chats(trained.tokenizer, trained.template)
        try:
            prompts.append(chats.prompt(messages))
        except ValueError as error:
            raise UsageError(f"{where}it {error}.") from error
    return prompts


def _prompt(value: Any, where: str) -> Prompt:
    is_number = [type(token) is int for token in value] if isinstance(value, list) else [False]
    if isinstance(value, str) or all(is_number):
        return value
    raise UsageError(
        f"{where}'prompt' is of type {type(value).__name__}, expected a text, or a list of tokens."
    )


def _line(asked: dict[str, Any], answer: Answer) -> str:
    return output_line({**asked, **{name: getattr(answer, name) for name in ADDED}})
