"""Makes token files from text, for the source `tokens`.

    manualpar tokenize --input=TEXT --output=DIRECTORY [--source=jsonl]
        [--tokenizer=tokenizer.json] [--processes=2]

TEXT is a file, a directory or a glob, like `config.data.path`. The source is `text` (each file is a
document), `jsonl`, `parquet`, `arrayrecord` or `chat`. The splits are the same as in a training
with this source. The command creates DIRECTORY. TEXT and DIRECTORY may be in a bucket. Without a
tokenizer, tokens are bytes. The token files have the same bytes with any number of processes. After
an interruption, run the same command again to continue. To train with the token files, set
`--data.source=tokens --data.path=DIRECTORY`.
"""

import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from manualpar.data.dataset import DamagedDataError
from manualpar.data.document_files import BAD_ROWS, SUFFIXES, BadRows
from manualpar.data.token_job import HELD_OUT, make_job, run_job, token_bar
from manualpar.data.tokens import TokenFiles
from manualpar.errors import (
    FILES_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    USAGE_EXIT_CODE,
    UsageError,
    naming_arguments,
    print_error,
)
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.system.storage import user_path
from manualpar.system.storage.durable_files import check_writable

# The flag for each argument of `make_job`.
FLAGS = {"path": "--input", "source": "--source", "tokenizer": "--tokenizer", "field": "--field"}
FLAGS |= {"held_out": "--held-out", "template": "--template", "bad_rows": "--bad-rows"}

OPTIONS: Mapping[str, Flag] = {
    "input": Flag('A file, a directory, a glob, or "" for the standard library.', is_required=True),
    "output": Flag("The directory to create.", Path, in_buckets=True, is_required=True),
    "source": Flag("The format of the files.", default="text", choices=("text", *SUFFIXES, "chat")),
    "tokenizer": Flag(
        "A tokenizer.json, or a directory with one; by default, tokens are bytes.", default=""
    ),
    "field": Flag("The field or column with the text.", default="text"),
    "held_out": Flag(
        "The fraction of the documents in eval, and the same fraction in test.", float, HELD_OUT
    ),
    "template": Flag(
        "For chat, a file with the template, or the name of one of the tokenizer's templates; by "
        "default, the tokenizer's template.",
        default="",
    ),
    "parse_special": Flag(
        "Reads the texts of special tokens, such as </s>, as these tokens.", bool, False
    ),
    "bad_rows": Flag(
        "Whether a row that cannot be read is an error, or left out.",
        default="error",
        choices=BAD_ROWS,
    ),
    "processes": Flag("The number of processes that make tokens.", int, 1),
}


def _check(flags: types.SimpleNamespace) -> None:
    if flags.processes < 1:
        raise UsageError(f"--processes={flags.processes}: expected at least 1.")
    if not 0 < flags.held_out < 0.5:
        raise UsageError(f"--held-out={flags.held_out}: expected a share between 0 and 0.5.")


def write_token_files(
    text: str,
    output: str,
    *,
    source: str = "text",
    tokenizer: str = "",
    field: str = "text",
    held_out: float = HELD_OUT,
    template: str = "",
    parse_special: bool = False,
    bad_rows: BadRows = "error",
    processes: int = 1,
) -> TokenFiles:
    """Makes a directory of token files, and returns the description of the directory.

    Args:
      text: The files; for the source `text`, "" means Python's standard library.
      output: The directory to create. If an earlier call with the same arguments was interrupted,
        this call completes its directory.
      source: The format of the files: `text`, `jsonl`, `parquet`, `arrayrecord` or `chat`.
      tokenizer: A `tokenizer.json`, a directory with one, or "" for bytes.
      field: The field with the text; see `manualpar.data.document_files.DocumentRange`.
      held_out: The fraction of the documents in eval; test has the same fraction. For `text` these
        fractions are fixed.
      template: The name of one of the tokenizer's chat templates, or a file with a template; "" for
        the tokenizer's template.
      parse_special: See `manualpar.data.load_dataset`.
      bad_rows: See `manualpar.data.load_dataset`.
    """
    with naming_arguments({"path": "`text`"}):
        job = make_job(
            source,
            text,
            tokenizer=tokenizer,
            field=field,
            held_out=held_out,
            template=template,
            parse_special=parse_special,
            bad_rows=bad_rows,
        )
        return run_job(job, user_path(output), processes=processes)


def main(argv: Sequence[str]) -> int:
    """Makes token files and prints the size of each split; returns the exit code.

    `argv` is the command line, the program's name first.
    """
    args = parse_flags(
        argv, (__doc__ or "").replace("manualpar tokenize", "{program}"), OPTIONS, check=_check
    )
    try:
        if isinstance(args.output, Path):
            check_writable(args.output, "--output")
        with naming_arguments(FLAGS):
            job = make_job(
                args.source,
                args.input,
                tokenizer=args.tokenizer,
                field=args.field,
                held_out=args.held_out,
                template=args.template,
                parse_special=args.parse_special,
                bad_rows=args.bad_rows,
            )
            with token_bar(job) as report:
                written = run_job(job, args.output, processes=args.processes, report=report)
    except DamagedDataError as error:
        print_error(error)
        return FILES_EXIT_CODE
    except ValueError as error:
        is_named = any(flag in str(error) for flag in (*FLAGS.values(), "--output"))
        print_error(error if is_named else f"--output={args.output}: {error}")
        return USAGE_EXIT_CODE
    except OSError as error:
        where = f"{error.filename or args.output}: {error.strerror or error}"
        print_error(f"--output={args.output}: {where}; name another directory.")
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to continue")
        return INTERRUPTED_EXIT_CODE
    for remark in written.remarks:
        print(f"{args.input}: {remark}.", file=sys.stderr)
    for split, part in written.splits.items():
        in_bytes = f", {part.tokens / part.bytes:.3f} tokens a byte" if part.bytes else ""
        print(
            f"{split}: {part.documents} documents, {part.bytes} bytes, {part.tokens} tokens"
            f"{in_bytes}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(["python -m manualpar.data.tokenize", *sys.argv[1:]]))
