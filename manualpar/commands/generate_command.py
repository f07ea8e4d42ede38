"""Generates answers to prompts: streams one answer to the terminal, or writes many as JSONL."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from manualpar.commands.command_flags import (
    check_lines,
    is_main,
    model_flags,
    output_line,
    read_lines,
    run_with_model,
    show,
    write_output,
)
from manualpar.commands.command_line import parse_mesh
from manualpar.data.chat import Chats
from manualpar.errors import UsageError
from manualpar.models.generation.answers import Answer
from manualpar.models.generation.generator import Generator, Prompt
from manualpar.models.generation.speculative import Draft
from manualpar.models.pretrained.tensor_files import CONFIG_FILE
from manualpar.system.storage import AnyPath, path_flag
from manualpar.training.load_run import Trained, load_directory, load_run
from manualpar.training.workdir import FOLDER

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
    [--draft=<folder>] [--mesh=data=4,model=2] [--devices=<number>]
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
        "--log-probabilities",
        action="store_true",
        help="Adds the log-probability of each token to the lines of --prompts.",
    )
    _length_flags(parser.add_argument_group("the end of an answer"))
    _draw_flags(parser.add_argument_group("draws"))
    _penalty_flags(parser.add_argument_group("changed probabilities"))
    _draft_flags(parser.add_argument_group("speculative decoding"))
    flags = parser.parse_args(argv[1:])

    def work(trained: Trained, generator: Generator) -> None:
        if flags.draft:
            generator = _with_draft(trained, flags)
        options = {name: getattr(flags, name) for name in OPTIONS}
        if flags.prompt is not None and flags.samples > 1:
            raise UsageError(
                f"--samples={flags.samples} draws several answers at once, expected --prompts, "
                "which writes each as a line."
            )
        if flags.prompt is None:
            _answer_all(trained, generator, flags, options)
            return
        prompts = _prompts(trained, flags, [{"prompt": flags.prompt}])
        begin, pieces = "" if flags.chat else flags.prompt, []
        for piece in generator.stream(trained.state, prompts, **options):
            pieces.append(piece)
            show(begin + piece.text)
            begin = ""
        show("\n")
        if flags.draft:
            tokens = sum(piece.token is not None for piece in pieces)
            drafted = sum(piece.is_drafted for piece in pieces)
            _say_drafted([(tokens, drafted, pieces[-1].forward_passes)])

    return run_with_model(flags, work)


def _answer_all(
    trained: Trained, generator: Generator, flags: argparse.Namespace, options: dict[str, Any]
) -> None:
    lines = read_lines(flags.prompts)
    added = (*ADDED, "log_probabilities") if flags.log_probabilities else ADDED
    check_lines(f"--prompts={flags.prompts}", lines, texts=(), added=added)
    answers = generator.generate(trained.state, _prompts(trained, flags, lines), **options)
    asked = [line for line in lines for _ in range(flags.samples)]
    text = "".join(_line(line, answer, added) for line, answer in zip(asked, answers, strict=True))
    if flags.output:
        write_output(flags.output, text)
    else:
        show(text)
    if flags.draft:
        counts = [(len(each.tokens), each.drafted, each.forward_passes) for each in answers]
        _say_drafted(counts)


def _with_draft(trained: Trained, flags: argparse.Namespace) -> Generator:
    """Loads the model of `--draft` onto the mesh, and makes a generator that it drafts for."""
    folder, mesh = flags.draft, parse_mesh(flags.mesh)
    try:
        # A run has a `config.json` of its own.
        load: Any = load_run if (folder / FOLDER).is_dir() else load_directory
        draft = load(folder, mesh=mesh)
    except ValueError as error:
        raise UsageError(f"--draft={folder}: {error}") from error
    own, others = draft.tokenizer, trained.tokenizer
    if own.fingerprint != others.fingerprint:
        sizes = own.vocab_size, others.vocab_size
        if sizes[0] != sizes[1] or any(
            own.decode([token]) != others.decode([token]) for token in range(sizes[0])
        ):
            raise UsageError(
                f"--draft={folder} has another tokenizer than the model, expected a draft model "
                "with the same tokens."
            )
    if is_main():
        print(f"drafts by {draft.described}", file=sys.stderr)
    return Generator(
        trained.program,
        trained.tokenizer,
        batch_size=flags.batch_size,
        draft=Draft(draft.program, draft.state, flags.draft_tokens),
    )


def _say_drafted(counts: Iterable[tuple[int, int, int]]) -> None:
    """Prints how many tokens were drafted, from (tokens, drafted, forward passes) of answers."""
    tokens, drafted, passes = (sum(each) for each in zip((0, 0, 0), *counts, strict=True))
    if is_main():
        print(
            f"{drafted} of {tokens} tokens were drafted; a forward pass gave "
            f"{tokens / max(passes, 1):.2f} tokens of an answer",
            file=sys.stderr,
        )


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


def _length_flags(group: argparse._ArgumentGroup) -> None:
    _number_flags(group, ("--max-tokens", int, 128, "The most tokens of an answer."))
    group.add_argument(
        "--stop", action="append", default=[], help="A text that ends an answer; repeatable."
    )


def _number_flags(
    group: argparse._ArgumentGroup, *flags: tuple[str, type[int] | type[float], float, str]
) -> None:
    """Adds flags for numbers; each has a name, a type, a default and a meaning."""
    for flag, kind, default, meaning in flags:
        text = f"{meaning} [default {default:g}]"
        group.add_argument(flag, type=kind, default=default, help=text)


def _draw_flags(group: argparse._ArgumentGroup) -> None:
    likeliest = "Draws from the likeliest tokens with this probability together; 1 for all."
    fraction = (
        "Draws from tokens with this fraction of the likeliest token's probability; 0 for all."
    )
    _number_flags(
        group,
        ("--temperature", float, 0.0, "The divisor of the logits; 0 always chooses the likeliest."),
        ("--top-k", int, 0, "Draws from this number of likeliest tokens; 0 for all."),
        ("--top-p", float, 1.0, likeliest),
        ("--min-p", float, 0.0, fraction),
        ("--samples", int, 1, "The answers that are drawn for each prompt."),
        ("--seed", int, 0, "The seed of the answers."),
    )


def _penalty_flags(group: argparse._ArgumentGroup) -> None:
    repeated = "Makes tokens of the prompt and the answer less likely if above 1."
    counted = "Subtracted from a token's logit for each time the answer has it."
    present = "Subtracted from the logits of tokens that the answer has."
    _number_flags(
        group,
        ("--repetition-penalty", float, 1.0, repeated),
        ("--frequency-penalty", float, 0.0, counted),
        ("--presence-penalty", float, 0.0, present),
    )
    group.add_argument(
        "--logit-bias",
        type=_biases,
        default={},
        metavar="TOKEN:NUMBER,...",
        help="Numbers to add to the logits of tokens, such as 50256:-100. [default none]",
    )


def _draft_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--draft",
        type=_model_folder,
        help="The folder of a small model, a run's or a Hugging Face model's, which drafts tokens. "
        "Answers stay the same.",
    )
    _number_flags(
        group, ("--draft-tokens", int, 4, "The tokens that are drafted for each forward pass.")
    )


def _model_folder(text: str) -> AnyPath:
    folder = path_flag(text)
    # Nothing is tried in a bucket.
    if isinstance(folder, Path) and not (
        (folder / CONFIG_FILE).is_file() or (folder / FOLDER).is_dir()
    ):
        raise argparse.ArgumentTypeError(
            f"{folder} has neither {CONFIG_FILE} nor {FOLDER}/, expected the directory of a "
            "Hugging Face model, or the folder of a run"
        )
    return folder


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(number) for token, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected tokens with numbers, such as 50256:-100,13:2.5"
        ) from None
