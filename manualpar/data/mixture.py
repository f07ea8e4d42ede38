"""The source `mixture`: a mixture of other sources of text, each with a weight.

The weights are the shares of the sources in the training sequences. Each source has its own epochs,
see `manualpar.data.batches`. Evaluation and test read each held-out example of every source once.

An entry is one string, `WEIGHT SOURCE PATH`, which can be written in a flag and in JSON. The path
may have any characters:

    config.data.mixture = ("0.7 jsonl ~/web", "0.2 parquet:content ~/code", "0.1 tokens ~/t")

A colon and a field may follow a source; this field is used instead of `config.data.field`. A weight
may be a fraction such as `1/3`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from manualpar.core.state.train_state import Batch
from manualpar.core.summary import Summarized
from manualpar.data.dataset import (
    SPLITS,
    LanguageDataset,
    LanguageSplit,
    TokenSplit,
    make_fingerprint,
)
from manualpar.data.packing import PackedSplit

# The number of slots in the table of `manualpar.data.batches`. So the share of a source is rounded
# to
# a multiple of 1 / SLOTS.
SLOTS = 2**16


class Entry(NamedTuple):
    """An entry of a mixture."""

    weight: Fraction
    source: str
    field: str  # The field with the text; "" for the argument `field`.
    path: str


@dataclasses.dataclass(frozen=True, repr=False)
class MixedSplit(Summarized):
    """The splits of several sources as one split; training mixes them by their shares.

    The examples are numbered split by split.

    Attributes:
      parts: The splits of the sources.
      shares: The share of each part. In training it is the part's number of slots, out of `SLOTS`.
        In evaluation and test it is the part's number of labels, or 0 for a packed split.
    """

    parts: tuple[LanguageSplit, ...]
    shares: tuple[int, ...]

    @property
    def tokens_per_byte(self) -> float | None:
        """The labels per byte of text if the parts are mixed by their shares; `None` if unknown."""
        rates = [part.tokens_per_byte for part in self.parts]
        bytes_of = [share / rate for share, rate in zip(self.shares, rates, strict=True) if rate]
        return sum(self.shares) / sum(bytes_of) if all(rates) else None

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of any example, as `jax.ShapeDtypeStruct`s."""
        return self.parts[0].abstract_example

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Batch:
        """Returns example `index` of the mixture."""
        place = index
        for part in self.parts:
            if 0 <= place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(f"example {index} of {len(self)}")


def parse_mixture(entries: Sequence[str], sources: Sequence[str]) -> list[Entry]:
    """Parses the entries of `config.data.mixture`."""
    if not entries:
        raise ValueError(
            "`mixture` is (), expected an entry 'WEIGHT SOURCE PATH' for each source, "
            "such as ('0.7 jsonl ~/web/*.jsonl', '0.3 text ~/books')."
        )
    return [_parse(entry, sources) for entry in entries]


def mix(entries: Sequence[Entry], load: Callable[[Entry], LanguageDataset]) -> LanguageDataset:
    """Loads the sources of a mixture and mixes them.

    Args:
      load: Loads the source of an entry.
    """
    shares = shares_of([entry.weight for entry in entries])
    for entry, share in zip(entries, shares, strict=True):
        if not share:
            why = f"whose weight is less than 1/{SLOTS} of all weights; expected a larger weight"
            raise _refused(entry, why)
    datasets = []
    for entry in entries:
        try:
            datasets.append(load(entry))
        except ValueError as error:
            error.add_note(f"in the entry {_shown(entry)} of `mixture`")
            raise
    first = datasets[0].tokenizer
    for entry, dataset in zip(entries, datasets, strict=True):
        if dataset.tokenizer.fingerprint != first.fingerprint:
            raise _refused(
                entry,
                f"whose tokenizer is not the tokenizer of {_shown(entries[0])}; expected the "
                "same tokenizer in `tokenizer` and in all directories of the source "
                "'tokens'",
            )
    made = make_fingerprint("mixture", shares, [dataset.fingerprint for dataset in datasets])
    splits: dict[str, Any] = {}
    for split in SPLITS:
        parts = tuple(getattr(dataset, split) for dataset in datasets)
        if any(isinstance(part, PackedSplit) for part in parts):
            parts = tuple(
                dataclasses.replace(part, has_documents=True)
                if isinstance(part, TokenSplit)
                else part
                for part in parts
            )
        labels = [part.num_labels if isinstance(part, TokenSplit) else 0 for part in parts]
        splits[split] = MixedSplit(parts, tuple(shares if split == "train" else labels))
    return LanguageDataset(tokenizer=first, fingerprint=made, **splits)


def shares_of(weights: Sequence[Fraction]) -> list[int]:
    """Divides `SLOTS` slots in proportion to weights, rounded so that the sum is `SLOTS`."""
    total = sum(weights)
    exact = [weight * SLOTS / total for weight in weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_rest[: SLOTS - sum(shares)]:
        shares[index] += 1
    return shares


def _parse(text: str, sources: Sequence[str]) -> Entry:
    weight, source, path = (*text.split(None, 2), "", "", "")[:3]
    source, _, field = source.partition(":")

    def refused(why: str) -> ValueError:
        return ValueError(
            f"`mixture` has the entry {text!r}, {why}; expected 'WEIGHT SOURCE PATH' "
            "such as '0.7 jsonl ~/web/*.jsonl'."
        )

    if source not in sources:
        raise refused(f"whose source is {source!r}, none of {', '.join(sources)}")
    try:
        parsed = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        raise refused(f"whose weight {weight!r} is no number") from None
    if parsed <= 0:
        raise refused(f"whose weight {weight} is not above 0")
    return Entry(parsed, source, field, path)


def _shown(entry: Entry) -> str:
    source = f"{entry.source}:{entry.field}" if entry.field else entry.source
    return repr(f"{source} {entry.path}".strip())


def _refused(entry: Entry, why: str) -> ValueError:
    return ValueError(f"`mixture` has the entry {_shown(entry)}, {why}.")
