"""The command that answers prompts: one on the terminal as it comes, or many as JSONL."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manualpar.generation.command_flags import model_flags, read_lines, run_command
from manualpar.generation.generator import Answer, Generator
from manualpar.generation.stored_run import Trained
from manualpar.usage import UsageError


def generate_command(argv: Sequence[str], description: str) -> int:
    """Answers what a command line asks; returns the exit code."""
    parser = model_flags(description)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="The text to go on with.")
    prompts.add_argument("--prompts", help='Lines, or JSONL with "prompt"; - for stdin.')
    parser.add_argument("--output", type=Path, help="The JSONL file of answers to --prompts.")
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token.")
    parser.add_argument("--top_k", type=int, default=0, help="0: all tokens.")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="May be given several times.")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)

    def work(trained: Trained, generator: Generator) -> None:
        names = ("max_tokens", "temperature", "top_k", "top_p", "stop", "seed")
        options = {name: getattr(flags, name) for name in names}
        if flags.prompt is None:
            _answer_all(trained, generator, flags, options)
            return
        sys.stdout.write(flags.prompt)
        for piece in generator.stream(trained.state, [flags.prompt], **options):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        print()

    return run_command(flags, work)


def _answer_all(
    trained: Trained, generator: Generator, flags: argparse.Namespace, options: dict[str, Any]
) -> None:
    lines = read_lines(flags.prompts)
    if missing := [index for index, line in enumerate(lines, 1) if "prompt" not in line]:
        raise UsageError(f"--prompts={flags.prompts}, line {missing[0]}: there is no 'prompt'.")
    answers = generator.generate(trained.state, [line["prompt"] for line in lines], **options)
    text = "".join(map(_line, lines, answers))
    if not flags.output:
        sys.stdout.write(text)
        return
    try:
        flags.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output={flags.output} cannot be written: {error}.") from error


def _line(asked: dict[str, Any], answer: Answer) -> str:
    found = {"text": answer.text, "ending": answer.ending, "tokens": answer.tokens}
    return json.dumps({**asked, **found}, ensure_ascii=False) + "\n"
