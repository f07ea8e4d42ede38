"""Evaluates a model on texts: perplexity, bits per byte, and log-likelihoods of completions."""

import json
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.commands.command_flags import (
    MODEL_FLAGS,
    check_lines,
    check_model,
    output_line,
    read_lines,
    run_with_model,
    show,
    warn_of_special,
    write_output,
)
from manualpar.data import TokenSplit
from manualpar.errors import UsageError
from manualpar.models.generation.generator import Generator
from manualpar.models.generation.scoring import Score, score_completions, score_documents
from manualpar.system.reports.flags import Flag, check_one_of, parse_flags
from manualpar.system.storage import AnyPath
from manualpar.training.load_run import Trained

# The longest sequence if the model's sequence length in training is not known.
MAX_LENGTH = 2048


USAGE = """Evaluates a run's newest checkpoint, or a Hugging Face model, on texts.

{program} --workdir=<folder>    # the run's own test split
{program} --workdir=<folder> --text=<.txt or .jsonl with "text">
{program} --hf=<directory>
    --completions=<.jsonl with "context" and "completion">
    [--max-length=<tokens seen at once>] [--output=<file>]
    [--mesh=data=4,model=2] [--devices=<number>] [--batch-size=<rows>]
"""


FLAGS: Mapping[str, Flag] = {
    **MODEL_FLAGS,
    "text": Flag('A text, or JSONL with "text"; shows the perplexity.', Path, in_buckets=True),
    "completions": Flag(
        'JSONL with "context" and "completion"; shows log-likelihoods.', Path, in_buckets=True
    ),
    "max_length": Flag(
        "The longest sequence in tokens; by default the run's sequence length, or "
        f"{MAX_LENGTH} if it is not known.",
        int,
        0,
    ),
    "output": Flag("The file for the results.", Path, in_buckets=True),
}


def _check(flags: types.SimpleNamespace) -> None:
    check_model(flags)
    check_one_of(flags, "text", "completions")


def main(argv: Sequence[str]) -> int:
    """Evaluates a model on the texts that the command line `argv` names; returns the exit code."""
    flags = parse_flags(argv, USAGE, FLAGS, check=_check)

    def work(trained: Trained, generator: Generator) -> None:
        length = flags.max_length or trained.max_length or MAX_LENGTH
        if length < 1:
            raise UsageError(f"--max-length={length}: expected at least 1.")
        if flags.completions:
            _completions(trained, generator, flags, length)
        elif flags.text:
            _show(flags, _text(trained, generator, flags.text, length))
        else:
            _show(flags, _test_split(trained, generator))

    return run_with_model(flags, work)


def summary(scores: Sequence[Score], num_bytes: int) -> dict[str, Any]:
    """Computes metrics of all texts together, such as the loss per token and the perplexity.

    `num_bytes` is the number of bytes of all texts; 0 if unknown, then bits per byte are left out.
    """
    nats = -sum(score.log_likelihood for score in scores)
    tokens = sum(score.num_tokens for score in scores)
    found: dict[str, Any] = {"tokens": tokens, "loss": nats / tokens}
    found["perplexity"] = math.exp(min(nats / tokens, 700.0))
    if num_bytes:
        found |= {"bytes": num_bytes, "bits_per_byte": nats / math.log(2) / num_bytes}
    return found


def _text(trained: Trained, generator: Generator, path: AnyPath, length: int) -> dict[str, Any]:
    if path.name.endswith(".jsonl"):
        lines = read_lines(str(path))
        if missing := [index for index, line in enumerate(lines, 1) if "text" not in line]:
            raise UsageError(f"--text={path}, line {missing[0]}: expected a field 'text'.")
        check_lines(f"--text={path}", lines, texts=("text",), added=())
        texts = [line["text"] for line in lines]
    else:
        try:
            texts = [path.read_bytes().decode()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text={path} cannot be read: {error}.") from error
    tokenizer = trained.tokenizer
    warn_of_special(tokenizer, texts, "--text")
    documents = [tokenizer.encode(text).tolist() for text in texts]
    if not any(documents):
        raise UsageError(f"--text={path} is empty, expected some text.")
    scores = score_documents(
        generator, trained.state, documents, first_token=tokenizer.bos_token, max_length=length
    )
    return summary(scores, sum(len(text.encode()) for text in texts))


def _test_split(trained: Trained, generator: Generator) -> dict[str, Any]:
    """Evaluates the test split as the run does: each packed sequence is scored by itself."""
    if trained.dataset is None:
        raise UsageError("--hf has no test split, expected --text or --completions.")
    split = trained.dataset.test
    if not isinstance(split, TokenSplit):
        raise UsageError(
            f"{trained.described} has a test split with several documents in a sequence, which "
            "cannot be evaluated here; expected --text or --completions."
        )
    pairs = []
    for index in range(len(split)):
        batch = split[index]
        real = int(batch.mask.sum())
        pairs.append(([int(batch.inputs[0])], batch.labels[:real].tolist()))
    scores = score_completions(generator, trained.state, pairs, packed=True)
    return {"split": "test", **summary(scores, split.num_bytes)}


def _completions(
    trained: Trained, generator: Generator, flags: types.SimpleNamespace, length: int
) -> None:
    lines = read_lines(str(flags.completions))
    check_lines(
        f"--completions={flags.completions}",
        lines,
        texts=("context", "completion"),
        added=Score._fields,
    )
    pairs = []
    texts = [line.get(name) for line in lines for name in ("context", "completion")]
    warn_of_special(trained.tokenizer, texts, "--completions")
    for number, line in enumerate(lines, 1):
        if not {"context", "completion"} <= line.keys():
            raise UsageError(
                f"--completions={flags.completions}, line {number}: expected 'context' and "
                f"'completion', got {sorted(line)}."
            )
        pairs.append(generator.encode_pair(line["context"], line["completion"]))
    scores = score_completions(generator, trained.state, pairs, max_length=length)
    text = "".join(
        output_line({**line, **score._asdict()}) for line, score in zip(lines, scores, strict=True)
    )
    if flags.output:
        write_output(flags.output, text)
    else:
        show(text)


def _show(flags: types.SimpleNamespace, found: dict[str, Any]) -> None:
    for name, value in found.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        show(f"{name.replace('_', ' ')}: {shown}\n")
    if flags.output:
        write_output(flags.output, json.dumps(found, indent=2, allow_nan=False) + "\n")
