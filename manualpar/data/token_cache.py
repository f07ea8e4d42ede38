"""Files of documents as a dataset: their tokens are made once, kept in a cache, and mapped.

The first run that asks for files makes a directory of token files of them, in a folder whose name
says what it was made of: the files' places, sizes and times of change, the field, the tokenizer.
Later runs map it. So loading costs no memory, any sequence is read in microseconds,
and a changed file is another dataset. Of the processes of a machine one makes it, and the others
wait. The folder may be deleted whenever no run is using it.

The fingerprint is a hash of the tokens and does not depend on the paths of files and cache.
"""

import fcntl
import pathlib
import shutil
from typing import Any

from manualpar.data.dataset import LanguageDataset
from manualpar.data.packing import LongExamples
from manualpar.data.token_job import Job, run_job
from manualpar.data.tokens import DESCRIPTION, TokenFilesError, load_tokens
from manualpar.system.storage import BucketError, local_path, user_cache

# One process makes the tokens of so much text in minutes. For more there is a command.
MOST_BYTES = 2**31


def load_cached(
    job: Job,
    path: str,
    *,
    sequence_length: int,
    cache: str,
    long_examples: LongExamples = "error",
) -> LanguageDataset:
    """Opens the tokens of a job, which are made first if the cache lacks them.

    Args:
      job: The job that makes the tokens.
      path: The path of the files, for messages.
      sequence_length: Tokens in a sequence.
      cache: The folder of the cache; "" for `manualpar` in the user's folder for caches.
      long_examples: See `manualpar.data.packing.pack`.

    Raises:
      ValueError: There is too much text, or the cache cannot be written to.
      DamagedDataError: A file is damaged.
    """
    if job.size > MOST_BYTES:
        raise ValueError(
            f"config.data.path is {path!r}, which has {job.size / 2**30:.1f} GiB of documents, "
            f"expected at most {MOST_BYTES / 2**30:.0f} GiB for a run that makes their tokens by "
            "itself; make them once with `python -m manualpar.data.tokenize`, and use the source "
            "'tokens'."
        )
    folder = cache_folder(cache) / "tokens"
    directory = folder / job.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{job.key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / DESCRIPTION).exists():
                run_job(job, directory)
            options: dict[str, Any] = {"sequence_length": sequence_length}
            options["long_examples"] = long_examples
            try:
                return load_tokens(str(directory), **options)
            except TokenFilesError:  # Runs that use the damaged files keep what they mapped.
                shutil.rmtree(directory)
                run_job(job, directory)
                return load_tokens(str(directory), **options)
    except BucketError:
        raise
    except OSError as error:
        raise ValueError(
            f"config.data.cache is {cache!r}, where {folder} cannot be written to "
            f"({error.strerror}); expected a folder with room for 2 to 4 bytes a token."
        ) from error


def cache_folder(cache: str) -> pathlib.Path:
    """Returns the folder that a config names, or the user's."""
    if cache:
        return local_path(cache, "config.data.cache")
    return user_cache()
