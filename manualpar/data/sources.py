"""Datasets by name, as a config asks for them."""

from manualpar.data.classification import load_digits, make_synthetic
from manualpar.data.dataset import Dataset
from manualpar.data.text import load_text
from manualpar.data.tokenizer import load_tokenizer
from manualpar.data.tokens import load_tokens

SOURCES = ("digits", "synthetic", "text", "tokens")


def load_dataset(
    source: str, *, seed: int, path: str = "", sequence_length: int = 0, tokenizer: str = ""
) -> Dataset:
    """Loads one of `SOURCES`.

    Args:
      source: `digits` and `synthetic` are a `ClassificationDataset`, `text` and `tokens` a
        `LanguageDataset`.
      seed: What `synthetic` is drawn from; the others are always the same.
      path: For `text` where the files are, see `find_files`; for `tokens` the directory.
      sequence_length: Tokens in a sequence, for `text` and `tokens`, at least 1.
      tokenizer: For `text` a `tokenizer.json`, or "" for bytes.

    Returns:
      The dataset.

    Raises:
      ValueError: An argument does not fit, or what it names; the message calls it
        `config.data.<argument>`.
    """
    if source == "digits":
        return load_digits()
    if source == "synthetic":
        return make_synthetic(seed)
    if source not in SOURCES:
        raise ValueError(f"config.data.source is {source!r}, expected one of {', '.join(SOURCES)}.")
    if sequence_length < 1:
        raise ValueError(
            f"config.data.sequence_length is {sequence_length}, expected at least 1 for the source "
            f"{source!r}."
        )
    if source == "text":
        return load_text(path, sequence_length=sequence_length, tokenizer=load_tokenizer(tokenizer))
    if tokenizer:
        raise ValueError(
            f"config.data.tokenizer is {tokenizer!r}, expected '' for the source 'tokens', whose "
            "directory holds the tokenizer that it was made with."
        )
    return load_tokens(path, sequence_length=sequence_length)
