"""Parses flags, loads the model, and reads and writes files for `generate` and `evaluate`."""

import io
import json
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

from manualpar.commands.command_line import MESH_HELP, parse_mesh
from manualpar.commands.results import choose_devices, quiet_absl, users_mistakes
from manualpar.core.mesh.mesh import describe_mesh
from manualpar.data import load_tokenizer
from manualpar.data.tokenizer import Tokenizer, path_of_tokenizer, spelt_words
from manualpar.errors import (
    INTERRUPTED_EXIT_CODE,
    USAGE_EXIT_CODE,
    UsageError,
    print_error,
)
from manualpar.models.generation.generator import Generator
from manualpar.system.cluster import LOST_PROCESS_EXIT_CODE, NotMetError, initialize
from manualpar.system.cluster.agreement import from_first
from manualpar.system.reports.flags import Flag, check_one_of
from manualpar.system.storage import AnyPath, open_for_reading, user_path
from manualpar.system.storage.untrusted import parse_object, write_named_file
from manualpar.training.exit_codes import ending_all
from manualpar.training.load_run import Trained, load_directory, load_run

MODEL_FLAGS: Mapping[str, Flag] = {
    "workdir": Flag("The folder of a run with a checkpoint.", Path, in_buckets=True),
    "hf": Flag("A directory with a Hugging Face model.", Path, in_buckets=True),
    "adapter": Flag("A directory of peft with LoRA adapters, with --hf.", Path, in_buckets=True),
    "parse_special": Flag(
        "Reads the texts of special tokens, such as </s>, as these tokens.", bool, False
    ),
    "mesh": Flag(MESH_HELP, default="data=-1"),
    "devices": Flag("The number of CPU devices to simulate.", int),
    "batch_size": Flag("Sequences per batch.", int, 32),
}


def check_model(flags: types.SimpleNamespace) -> None:
    """Checks that the flags name one model."""
    check_one_of(flags, "workdir", "hf", is_required=True)


def run_with_model(flags: types.SimpleNamespace, work: Callable[[Trained, Generator], None]) -> int:
    """Loads the model that the flags name, and calls `work(trained, generator)` with it.

    In a cluster each process must call this function. Returns the exit code.
    """
    quiet_absl()
    try:
        with users_mistakes():
            check_output_file(flags.output)
            if flags.adapter and not flags.hf:
                raise UsageError(
                    f"--adapter={flags.adapter} without --hf, expected the base model in --hf; a "
                    "run in --workdir has its own adapters."
                )
            choose_devices(flags.devices)
            mesh = _mesh_of_data(flags.mesh)
            cluster = initialize()
        with cluster, ending_all(cluster, agreed=()), users_mistakes():
            if flags.workdir:
                trained = load_run(flags.workdir, mesh=mesh)
            else:
                trained = load_directory(flags.hf, mesh=mesh, adapter=flags.adapter)
            if flags.parse_special:
                named = path_of_tokenizer(trained.tokenizer)
                trained = trained._replace(tokenizer=load_tokenizer(named, parse_special=True))
            if is_main():
                described = f"{trained.described} on {describe_mesh(trained.program.mesh)}"
                print(described, file=sys.stderr)
            generator = Generator(trained.program, trained.tokenizer, batch_size=flags.batch_size)
            generator.stop_tokens |= trained.own.stop_tokens
            work(trained, generator)
    except (UsageError, ConnectionError) as error:
        print_error(error)
        return LOST_PROCESS_EXIT_CODE if isinstance(error, NotMetError) else USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED_EXIT_CODE
    return 0


def is_main() -> bool:
    """Returns whether this is process 0, the only process that reads and writes files."""
    return jax.process_index() == 0


def show(text: str) -> None:
    """Prints a part of the results; in a cluster only process 0 prints it."""
    if is_main():
        sys.stdout.write(text)
        sys.stdout.flush()


def check_output_file(path: AnyPath | None) -> None:
    """Checks, before any work, that the file of `--output` can be written."""
    if not isinstance(path, Path):  # Nothing is tried in a bucket.
        return
    if path.is_dir():
        raise UsageError(f"--output={path} is a folder, expected the name of a file.")
    if not os.path.isdir(path.parent):
        raise UsageError(
            f"--output={path}: {path.parent} is not a folder, expected a folder that exists."
        )
    there = path if os.path.exists(path) else path.parent
    if not os.access(there, os.W_OK):
        raise UsageError(f"--output={path}: {there} may not be written to; name another file.")


def write_output(path: AnyPath, text: str) -> None:
    """Writes the file of `--output`; in a cluster only process 0 writes it."""
    if not is_main():
        return
    try:
        write_named_file(path, text)
    except OSError as error:
        raise UsageError(
            f"--output={path} cannot be written: {error.strerror or error}; name another file."
        ) from error


def read_lines(path: str) -> list[dict[str, Any]]:
    """Reads the objects of a JSONL file, or of stdin if `path` is `-`.

    If `path` does not end in `.jsonl`, a line that does not begin with `{` becomes
    `{"prompt": line}`.

    Communication:
      Process 0 reads the file. The other processes get the content by two small all-gathers.
    """
    return from_first(_read_lines(path) if is_main() else [])


def _read_lines(path: str) -> list[dict[str, Any]]:
    try:
        if path == "-":
            return list(_objects(sys.stdin, path))
        # The encoding leaves out a byte order mark.
        with io.TextIOWrapper(open_for_reading(user_path(path)), encoding="utf-8-sig") as file:
            return list(_objects(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error


def _objects(file: TextIO, path: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        text = line.rstrip("\n")
        if not text:
            continue
        if not (path.endswith(".jsonl") or text.startswith("{")):
            yield {"prompt": text}
            continue
        try:
            yield parse_object(text, allow_nan=True)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: it {error}.") from error


def warn_of_special(tokenizer: Tokenizer, texts: Iterable[Any], where: str) -> None:
    """Says on standard error how often texts spell special tokens that are read as letters."""
    encoded = [text.encode(errors="replace") for text in texts if isinstance(text, str)]
    found = tokenizer.count_special(encoded)
    if found and is_main():
        print(
            f"{where} spells special tokens ({spelt_words(found)}), which are read as letters; "
            "--parse-special reads them as tokens",
            file=sys.stderr,
        )


def check_lines(
    where: str,
    lines: Sequence[Mapping[str, Any]],
    *,
    texts: Collection[str],
    added: Collection[str],
) -> None:
    """Checks the fields of a JSONL file's lines, to which the output will add fields.

    Args:
      lines: The object of each line.
      texts: Names of fields that must be strings if a line has them.
      added: Names of fields that the output adds to each line, so a line must not have them.
    """
    for number, line in enumerate(lines, 1):
        for name in texts:
            if not isinstance(line.get(name, ""), str):
                raise UsageError(
                    f"{where}, line {number}: {name!r} is of type {type(line[name]).__name__}, "
                    "expected a text."
                )
        if taken := sorted(line.keys() & set(added)):
            raise UsageError(
                f"{where}, line {number}: the line has a field {taken[0]!r}, which the output "
                "would overwrite; rename the field."
            )


def output_line(fields: Mapping[str, Any]) -> str:
    """Formats an object as one line of JSON."""
    line = json.dumps(fields, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:  # UTF-8 cannot encode half a surrogate pair, but JSON can escape it.
        return json.dumps(fields) + "\n"
    return line


def _mesh_of_data(text: str) -> dict[str, int]:
    mesh = parse_mesh(text)
    if "data" not in mesh:
        raise UsageError(f"--mesh={text}: expected an axis 'data', such as data=1,{text}.")
    return mesh
