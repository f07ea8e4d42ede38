"""Makes token files of text, for the source `tokens`.

python -m manualpar.data.tokenize --input=TEXT --output=DIRECTORY [--tokenizer=tokenizer.json]

TEXT is a directory, a glob or "" for Python's standard library, as `config.data.path` of the source
`text`, and the splits are the same ones. Without a tokenizer, tokens are bytes. Then train with
`--config.data.source=tokens --config.data.path=DIRECTORY`.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

from manualpar.data.text import TextFile, encode_files, find_files, split_files
from manualpar.data.tokenizer import Tokenizer, load_tokenizer
from manualpar.data.tokens import DESCRIPTION, DTYPES, TOKENIZER, VERSION, TokenFile, TokenFiles
from manualpar.usage import OneSentenceParser


def write_token_files(text: str, output: str, *, tokenizer: str = "") -> TokenFiles:
    """Makes a directory of token files, and says what it holds.

    Args:
      text: The files; see `manualpar.data.text.find_files`.
      output: The directory to make. One that an interrupted call left behind is made again.
      tokenizer: A `tokenizer.json`, or "" for bytes.

    Raises:
      ValueError: There is no text or no tokenizer, or the directory holds something already.
    """
    directory = pathlib.Path(output).expanduser()
    if (directory / DESCRIPTION).exists() or (directory.exists() and not directory.is_dir()):
        raise ValueError(
            f"output is {output!r}, where there is something already; expected a directory to make."
        )
    encoder = load_tokenizer(tokenizer)
    parts = split_files(find_files(text), text)
    dtype = DTYPES[0] if encoder.vocab_size <= 2**16 else DTYPES[1]
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        shutil.copyfile(pathlib.Path(tokenizer).expanduser(), directory / TOKENIZER)
    written = TokenFiles(
        version=VERSION,
        dtype=dtype,
        vocab_size=encoder.vocab_size,
        bos_token=encoder.bos_token,
        tokenizer=TOKENIZER if tokenizer else "",
        splits={
            split: _write_file(directory / f"{split}.bin", files, encoder, dtype)
            for split, files in parts.items()
        },
    )
    # The description appears at once and last, so it never describes files that are missing.
    unfinished = directory / f"{DESCRIPTION}.unfinished"
    unfinished.write_text(json.dumps(dataclasses.asdict(written), indent=2) + "\n")
    os.replace(unfinished, directory / DESCRIPTION)
    return written


def _write_file(
    path: pathlib.Path, files: Sequence[TextFile], tokenizer: Tokenizer, dtype: str
) -> TokenFile:
    num_tokens, digest = 0, hashlib.blake2b(digest_size=8)
    with open(path, "wb") as opened:
        for tokens in encode_files(files, tokenizer):
            data = tokens.astype(dtype).tobytes()
            num_tokens += len(tokens)
            digest.update(data)
            opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    num_bytes = sum(file.size for file in files)
    return TokenFile(num_tokens, num_bytes, len(files), digest.hexdigest())


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes token files and prints what they hold."""
    parser = OneSentenceParser(
        prog="python -m manualpar.data.tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", required=True, help='a directory, a glob, or ""')
    parser.add_argument("--output", required=True, help="the directory to make")
    parser.add_argument("--tokenizer", default="", help="a tokenizer.json; without one, bytes")
    args = parser.parse_args(arguments)
    try:
        written = write_token_files(args.input, args.output, tokenizer=args.tokenizer)
    except (OSError, ValueError) as error:
        named = f"--output={args.output}: " if "config." not in str(error) else ""
        parser.error(f"{named}{error}")
    for split, part in written.splits.items():
        print(
            f"{split}: {part.documents} documents, {part.bytes} bytes, {part.tokens} tokens, "
            f"{part.tokens / part.bytes:.3f} tokens a byte"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
