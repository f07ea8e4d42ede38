"""Loads a dataset by the name of its source, which is one of `SOURCES`."""

import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, Literal, get_args, overload

import numpy as np

from manualpar.data.dataset import (
    ArraySplit,
    ClassificationDataset,
    Dataset,
    LanguageDataset,
    make_fingerprint,
)
from manualpar.data.document_files import BAD_ROWS, BadRows
from manualpar.data.mixture import mix, parse_mixture
from manualpar.data.packing import LONG_EXAMPLES, LongExamples
from manualpar.data.preferences import load_preferences
from manualpar.data.text import load_text
from manualpar.data.token_job import HELD_OUT, Job, make_job, run_job, token_bar
from manualpar.data.tokenizer import load_tokenizer
from manualpar.data.tokens import DESCRIPTION, TokenFilesError, load_tokens
from manualpar.errors import require
from manualpar.system.storage import BucketError, local_path, user_cache, waiting_for

ClassificationSource = Literal["digits", "synthetic"]
TextSource = Literal["text", "tokens", "jsonl", "parquet", "arrayrecord", "chat"]
LanguageSource = Literal[TextSource, "mixture", "preferences"]
TEXT_SOURCES = get_args(TextSource)
SOURCES = (*get_args(ClassificationSource), *get_args(LanguageSource))
# The seed for dividing `digits` into splits. It is fixed, so that the splits do not depend on the
# seed of a run.
DIGITS_SPLIT_SEED = 0
DIGITS_TEST_EXAMPLES = 360
DIGITS_EVAL_EXAMPLES = 144


@overload
def load_dataset(source: ClassificationSource, *, seed: int) -> ClassificationDataset: ...
@overload
def load_dataset(
    source: LanguageSource,
    *,
    seed: int,
    path: str = "",
    sequence_length: int = 0,
    tokenizer: str = "",
    field: str = "text",
    held_out: float = HELD_OUT,
    cache: str = "",
    mixture: Sequence[str] = (),
    template: str = "",
    long_examples: LongExamples = "error",
    parse_special: bool = False,
    bad_rows: BadRows = "error",
) -> LanguageDataset: ...
@overload
def load_dataset(
    source: str,
    *,
    seed: int,
    path: str = "",
    sequence_length: int = 0,
    tokenizer: str = "",
    field: str = "text",
    held_out: float = HELD_OUT,
    cache: str = "",
    mixture: Sequence[str] = (),
    template: str = "",
    long_examples: LongExamples = "error",
    parse_special: bool = False,
    bad_rows: BadRows = "error",
) -> Dataset: ...
def load_dataset(
    source: str,
    *,
    seed: int,
    path: str = "",
    sequence_length: int = 0,
    tokenizer: str = "",
    field: str = "text",
    held_out: float = HELD_OUT,
    cache: str = "",
    mixture: Sequence[str] = (),
    template: str = "",
    long_examples: LongExamples = "error",
    parse_special: bool = False,
    bad_rows: BadRows = "error",
) -> Dataset:
    """Loads the dataset of a source.

    Args:
      source: The kind of data. It is one of `SOURCES`; `digits` and `synthetic` give a
        `ClassificationDataset`, the other sources a `LanguageDataset`.
      seed: The seed of `synthetic`. The other sources do not use it.
      path: A file, a directory or a glob; "" with `text` for Python's standard library. For
        `tokens` it is a directory. See `find_files` for `text`, and `find_document_files` for
        `jsonl`, `parquet`, `arrayrecord`, `chat` and `preferences`.
      sequence_length: The number of tokens in a sequence, at least 1.
      tokenizer: A `tokenizer.json`, a directory with one, or "" for bytes.
      field: For `jsonl` and `parquet`, the field or column with the text. For `arrayrecord`,
        "text", or the type of the tokens in its records.
      held_out: For `jsonl`, `parquet`, `arrayrecord` and `chat`, the fraction of the documents in
        eval; test has the same fraction.
      cache: The folder of the token cache; "" for one in the user's cache folder. These four
        sources use it, see `manualpar.data.sources`. For `tokens` in a bucket, it is the folder
        to which the files are copied.
      mixture: The entries of the source `mixture`, each a string `WEIGHT SOURCE PATH`; see
        `manualpar.data.mixture`.
      template: For `chat`, the file with the template, or the name of one of the tokenizer's
        templates; "" for the tokenizer's template.
      long_examples: The treatment of examples of `chat` that are longer than a sequence: `"error"`
        refuses them, `"cut"` cuts them, and `"drop"` leaves them out; see
        `manualpar.data.packing.pack`.
      parse_special: Whether the text of a special token in a document, such as `</s>`, is read as
        this token and not as letters. The source `tokens` has what its directory was made with.
      bad_rows: The treatment of rows of `jsonl`, `parquet`, `arrayrecord` and `chat` that cannot be
        read: `"error"` refuses the first, and `"skip"` leaves them out, with a warning that has
        their number.

    Raises:
      ValueError: An argument is not allowed, or a file that an argument names is missing or
        damaged. The message has the name of the argument in backticks.
    """
    if source == "digits":
        return load_digits()
    if source == "synthetic":
        return make_synthetic(seed)
    if source not in SOURCES:
        raise ValueError(f"`source` is {source!r}, expected one of {', '.join(SOURCES)}.")
    if sequence_length < 1:
        raise ValueError(
            f"`sequence_length` is {sequence_length}, expected at least 1 for the source "
            f"{source!r}."
        )
    choices = ("long_examples", long_examples, LONG_EXAMPLES), ("bad_rows", bad_rows, BAD_ROWS)
    for name, value, known in choices:
        if value not in known:
            raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(known)}.")
    if mixture and source != "mixture":
        raise ValueError(
            f"`source` is {source!r}, expected 'mixture', because `mixture` "
            "has entries; or set `mixture=()`."
        )

    def load(source: str, path: str, field: str) -> LanguageDataset:
        if source == "text":
            encoder = load_tokenizer(tokenizer, parse_special=parse_special)
            return load_text(path, sequence_length=sequence_length, tokenizer=encoder)
        if source == "tokens":
            return load_tokens(
                path, sequence_length=sequence_length, cache=cache, long_examples=long_examples
            )
        job = make_job(
            source,
            path,
            tokenizer=tokenizer,
            field=field,
            held_out=held_out,
            template=template,
            parse_special=parse_special,
            bad_rows=bad_rows,
        )
        return load_cached(
            job, path, sequence_length=sequence_length, cache=cache, long_examples=long_examples
        )

    if source == "preferences":
        return load_preferences(
            path,
            sequence_length=sequence_length,
            tokenizer=tokenizer,
            template=template,
            held_out=held_out,
            long_examples=long_examples,
            parse_special=parse_special,
            bad_rows=bad_rows,
        )
    if source == "mixture":
        entries = parse_mixture(mixture, TEXT_SOURCES)
        return mix(entries, lambda e: load(e.source, e.path, e.field or field))
    if source == "tokens" and tokenizer:
        raise ValueError(
            f"`tokenizer` is {tokenizer!r}, expected '' for the source 'tokens', because "
            "a directory of token files holds its own tokenizer."
        )
    return load(source, path, field)


def load_digits() -> ClassificationDataset:
    """Loads scikit-learn's 1,797 handwritten digits: 8x8 scans as 64 values in [0, 1].

    1,293 digits are for training, 144 for evaluation and 360 for the test. The splits are the same
    in every run. Each split has the ten digits in the same proportions as the full data.
    """
    require("`source='digits'`", "sklearn")
    # Imported here, because the import of scikit-learn takes a second.
    import sklearn.datasets
    from sklearn.model_selection import train_test_split

    images, digits = sklearn.datasets.load_digits(return_X_y=True)
    inputs, labels = (images / 16).astype(np.float32), digits.astype(np.int32)
    draw: dict[str, Any] = {"random_state": DIGITS_SPLIT_SEED}
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=DIGITS_TEST_EXAMPLES, stratify=labels, **draw
    )
    train, evaluation = train_test_split(
        np.arange(len(rest)), test_size=DIGITS_EVAL_EXAMPLES, stratify=labels[rest], **draw
    )
    parts = (rest[train], rest[evaluation], test)
    return _ten_classes(*(ArraySplit(inputs[part], labels[part]) for part in parts))


def make_synthetic(seed: int) -> ClassificationDataset:
    """Draws inputs of MNIST's size as normal noise: 4,096 for training, 512 for each other split.

    The labels can be learned: a label is the index of the largest of ten random projections of the
    input. The projections are the same in all splits. `seed` determines inputs and labels.
    """
    rng = np.random.default_rng(seed)
    projections = rng.standard_normal((784, 10), dtype=np.float32)

    def draw(num_examples: int) -> ArraySplit:
        inputs = rng.standard_normal((num_examples, 784), dtype=np.float32)
        return ArraySplit(inputs, (inputs @ projections).argmax(axis=-1).astype(np.int32))

    return _ten_classes(draw(4096), draw(512), draw(512))


def _ten_classes(
    train: ArraySplit, evaluation: ArraySplit, test: ArraySplit
) -> ClassificationDataset:
    arrays = [array for part in (train, evaluation, test) for array in (part.inputs, part.labels)]
    return ClassificationDataset(
        train=train,
        eval=evaluation,
        test=test,
        num_classes=10,
        fingerprint=make_fingerprint(*arrays),
    )


# -------------------------------------------------------------------------------------------------
# Tokenizes files of documents once, and keeps the tokens in a cache for later runs.
#
# The first run with some files makes a directory of token files. The directory's name is a hash of
# the files' paths, sizes and modification times, of the field and of the tokenizer. So if a file
# changes, a run makes another directory. Later runs map the token files into memory, so loading
# needs no memory, and any sequence is read in microseconds. One process of a machine makes the
# directory, and the machine's other processes wait. A directory may be deleted when no run uses
# it.
#
# The dataset's fingerprint is a hash of the tokens and does not depend on the paths.


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
      cache: The folder of the cache; "" for the default in the user's cache folder.
      long_examples: See `manualpar.data.packing.pack`.

    Raises:
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
        with waiting_for(folder / f"{job.key}.lock"):
            if not (directory / DESCRIPTION).exists():
                _make(job, directory)
            options: dict[str, Any] = {"sequence_length": sequence_length}
            options |= {"long_examples": long_examples, "made_from": path}
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
