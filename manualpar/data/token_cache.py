"""Tokenizes files of documents once, and keeps the tokens in a cache for later runs.

The first run with some files makes a directory of token files. The directory's name is a hash of
the files' paths, sizes and modification times, of the field and of the tokenizer. So if a file
changes, a run makes another directory. Later runs map the token files into memory, so loading needs
no memory, and any sequence is read in microseconds. One process of a machine makes the directory,
and the machine's other processes wait. A directory may be deleted when no run uses it.

The dataset's fingerprint is a hash of the tokens and does not depend on the paths.
"""

import fcntl
import pathlib
import shutil
from typing import Any

from manualpar.data.dataset import LanguageDataset
from manualpar.data.packing import LongExamples
from manualpar.data.token_job import Job, run_job, token_bar
from manualpar.data.tokens import DESCRIPTION, TokenFilesError, load_tokens
from manualpar.system.storage import BucketError, local_path, user_cache

# The most bytes of text: one process tokenizes them in minutes. For more text, use
# `manualpar.data.tokenize`.
MOST_BYTES = 2**31


def load_cached(
    job: Job,
    path: str,
    *,
    sequence_length: int,
    cache: str,
    long_examples: LongExamples = "error",
) -> LanguageDataset:
    """Opens a job's tokens from the cache; if the tokens are not in the cache, makes them first.

    Args:
      job: The job that makes the tokens.
      path: The path of the documents, for messages.
      sequence_length: The number of tokens in a sequence.
      cache: The folder of the cache; "" for the default in the user's cache folder.
      long_examples: See `manualpar.data.packing.pack`.

    Raises:
      ValueError: There is too much text, or the cache cannot be written to.
      DamagedDataError: A file is damaged.
    """
    if job.size > MOST_BYTES:
        raise ValueError(
            f"`path` is {path!r}, which has {job.size / 2**30:.1f} GiB of documents, "
            f"expected at most {MOST_BYTES / 2**30:.0f} GiB, because a run makes tokens in one "
            "process; make token files once with `python -m manualpar.data.tokenize`, and use the "
            "source 'tokens'."
        )
    folder = cache_folder(cache) / "tokens"
    directory = folder / job.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{job.key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / DESCRIPTION).exists():
                _make(job, directory)
            options: dict[str, Any] = {"sequence_length": sequence_length}
            options["long_examples"] = long_examples
            try:
                return load_tokens(str(directory), **options)
            # Deletes damaged files. A run that has mapped them can still read them.
            except TokenFilesError:
                shutil.rmtree(directory)
                _make(job, directory)
                return load_tokens(str(directory), **options)
    except BucketError:
        raise
    except OSError as error:
        raise ValueError(
            f"`cache` is {cache!r}, and {folder} cannot be written to "
            f"({error.strerror or error}); name a folder there with room for 2 to 4 bytes a token."
        ) from error


def _make(job: Job, directory: pathlib.Path) -> None:
    with token_bar(job) as report:
        run_job(job, directory, report=report)


def cache_folder(cache: str) -> pathlib.Path:
    """Returns the cache folder that a config names; "" for the default in the user's folder."""
    if cache:
        return local_path(cache, "`cache`")
    return user_cache()
