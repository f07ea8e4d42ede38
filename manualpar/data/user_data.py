"""Makes a dataset of a user's data: examples by number, or batches in order.

Data has one of two forms.

- *Examples by number*: an object with `len(data)` and `data[i]`, such as a Hugging Face dataset
  whose format is NumPy. Then a run shuffles the examples, each process reads only its own rows, and
  a run that resumes goes on at the same example. Any tree of arrays may be an example. A `Batch` of
  arrays without a leading dimension, with a mask, can be padded; see `evaluation_batches`.
- *Batches in order*: an iterable, such as a Grain pipeline, a PyTorch `DataLoader`, a list of
  batches or a generator. Any tree whose leaves have the examples along their leading dimension may
  be a batch. With several processes a batch has the examples of all processes, or only the rows of
  the process that reads it.

Symbol: `B` examples in a batch.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from manualpar.data.dataset import (
    SPLITS,
    ArraySplit,
    Dataset,
    Split,
    TokenSplit,
    make_fingerprint,
)
from manualpar.data.mixture import MixedSplit
from manualpar.data.packing import PackedSplit
from manualpar.errors import nearest

OURS = (ArraySplit, TokenSplit, PackedSplit, MixedSplit)
NAMES = {"validation": "eval", "valid": "eval", "val": "eval"}


class DataEndedError(ValueError):
    """An iterator of batches ended before the training did; the message is one sentence."""


class ExampleSplit:
    """A split of a user's examples, which all have the form of the first example."""

    def __init__(self, examples: Any, name: str) -> None:
        """Reads the first example.

        Args:
          examples: An object with `len(examples)` and `examples[i]`.
          name: The split's name in messages, such as `train`.

        Raises:
          ValueError: There are no examples.
          TypeError: An example has a leaf that is no array of numbers.
        """
        self._examples, self._name = examples, name
        if not len(examples):
            raise ValueError(f"data: {name!r} has no examples, expected at least one.")
        self._first: Any = None
        self._first = self[0]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        """Returns example `index`, with NumPy arrays for its leaves."""
        place = f"{self._name}[{index}]"
        example = _arrays(self._examples[index], place)
        if self._first is not None:
            _check_same_form(self._first, example, place, f"{self._name}[0]")
        return example


class BatchStream:
    """A stream of a user's batches, which is read in order.

    If the iterable ends, it begins again. The state of a Grain iterator is saved in checkpoints.
    For any other iterable a checkpoint has the number of batches read, and a run that resumes reads
    past them.
    """

    def __init__(self, batches: Iterable[Any], name: str) -> None:
        """Begins to read.

        Args:
          batches: The batches.
          name: The split's name in messages, such as `train`.
        """
        self._source, self._name = batches, name
        self._iterator = iter(batches)
        self._number = 0  # Of the next batch.
        self._waiting: list[Any] = []
        self._first: Any = None

    @property
    def begins_again(self) -> bool:
        """Whether the batches can be read several times; false for a generator."""
        return not isinstance(self._source, Iterator)

    @property
    def first(self) -> Any:
        """The first batch, which the training reads too."""
        if self._first is None:
            self._waiting.append(self._next())
            self._number -= 1
        return self._first

    def read_from(self, number: int) -> Iterator[Any]:
        """Yields the batches from `number` on, counted from 0, without an end.

        Raises:
          DataEndedError: A generator ended, or there are no batches.
          ValueError: A batch before the ones that were read is asked of a generator.
        """
        if number < self._number:
            if not self.begins_again:
                raise ValueError(
                    f"data: {self._name!r} is a {type(self._source).__name__}, which cannot be "
                    f"read again from batch {number}; expected an iterable that iter() begins "
                    "anew, such as a Grain dataset or an object whose __iter__ is a generator."
                )
            self._iterator, self._number, self._waiting = iter(self._source), 0, []
        while self._number < number:
            self._next()
        while True:
            yield self._next()

    def read_once(self) -> Iterator[Any]:
        """Yields each batch once, from the first."""
        for number, batch in enumerate(iter(self._source)):
            yield self._checked(batch, number)

    def state(self) -> dict[str, Any]:
        """Returns the position for `restore`, as values for JSON."""
        get_state = getattr(self._iterator, "get_state", None)
        return {"number": self._number, "iterator": _encode(get_state()) if get_state else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to the position that `state()` returned, perhaps in another process."""
        saved, set_state = state["iterator"], getattr(self._iterator, "set_state", None)
        if saved is None or set_state is None:
            return  # `read_from` reads past the earlier batches.
        set_state(_decode(saved))
        self._number, self._waiting = state["number"], []

    def _next(self) -> Any:
        if self._waiting:
            batch = self._waiting.pop()
        else:
            batch = self._checked(self._next_of_source(), self._number)
        self._number += 1
        return batch

    def _next_of_source(self) -> Any:
        for is_last_try in (not self.begins_again, True):
            try:
                return next(self._iterator)
            except StopIteration:
                if is_last_try:
                    break
            self._iterator = iter(self._source)
        number = f"after {self._number} batches" if self._number else "before the first batch"
        raise DataEndedError(
            f"data: {self._name!r} ended {number}, and the training needs more; expected an "
            "iterable that iter() begins anew, an endless iterator, or fewer training.num_steps."
        )

    def _checked(self, batch: Any, number: int) -> Any:
        place = f"batch {number} of {self._name!r}"
        batch = _arrays(batch, place)
        if self._first is None:
            self._first = batch
        rows = {len(x) for x in jax.tree.leaves(batch) if x.ndim}
        if len(rows) != 1:
            raise ValueError(
                f"data: the leaves of {place} have {sorted(rows)} rows, expected the same number "
                "of examples along the leading dimension of each."
            )
        first = jax.tree.map(lambda x: x[:1] if x.ndim else x, self._first)
        some = jax.tree.map(lambda x: x[:1] if x.ndim else x, batch)
        _check_same_form(first, some, place, "the first")
        return batch


def as_dataset(data: Any) -> Dataset:
    """Makes a dataset of a user's data.

    Args:
      data: A `Dataset`; or a mapping from `train`, and perhaps `eval` (or `validation`) and `test`,
        to examples or batches; or only those for the training. See the module for their forms.

    Raises:
      TypeError: The data has none of these forms.
      ValueError: A split is unknown or empty, or cannot be read as often as needed.
    """
    if isinstance(data, Dataset):
        return data
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    splits = {NAMES.get(name, name): split for name, split in splits.items()}
    if unknown := [name for name in splits if name not in SPLITS]:
        raise ValueError(
            f"data has {unknown[0]!r}, expected the splits 'train', 'eval' and 'test'; the nearest "
            f"one is {nearest(str(unknown[0]), SPLITS)!r}. A single batch is data={{'train': "
            "[batch]}."
        )
    if splits.get("train") is None:
        raise ValueError(f"data has {list(splits)}, expected 'train' among them.")
    made = {name: _split(name, split) for name, split in splits.items() if split is not None}
    for name, split in made.items():
        if name != "train" and isinstance(split, BatchStream) and not split.begins_again:
            raise ValueError(
                f"data: {name!r} is an iterator, which can be read only once, expected an iterable "
                "that each evaluation reads from its beginning, such as a list or a Grain dataset."
            )
    return Dataset(**made, fingerprint=make_fingerprint(*map(_described, made.items())))


def _split(name: str, split: Any) -> Split | BatchStream:
    """Makes a split or a stream; a list and a Grain pipeline are streams of batches."""
    if isinstance(split, OURS):
        return split
    if hasattr(split, "to_iter_dataset"):  # Grain's `MapDataset`.
        return BatchStream(split.to_iter_dataset(), name)
    has_numbers = hasattr(split, "__getitem__") and hasattr(split, "__len__")
    if has_numbers and not isinstance(split, list | tuple | str | bytes | Mapping):
        return ExampleSplit(split, name)
    if isinstance(split, Iterable) and not isinstance(split, Mapping | str | bytes):
        return BatchStream(split, name)
    raise TypeError(
        f"data: {name!r} is a {type(split).__name__}, expected examples by number (an object with "
        "__len__ and __getitem__) or an iterable of batches."
    )


def _described(item: tuple[str, Split | BatchStream]) -> list[Any]:
    """Describes a split for the fingerprint, by its number of examples and three of them."""
    name, split = item
    if isinstance(split, BatchStream):
        return [name, "batches"]
    chosen = sorted({0, len(split) // 2, len(split) - 1})
    leaves = [leaf for index in chosen for leaf in jax.tree.leaves(split[index])]
    return [name, len(split), make_fingerprint(*map(np.asarray, leaves))]


def _arrays(tree: Any, place: str) -> Any:
    """Converts the leaves to arrays with the dtypes that JAX has for them."""

    def convert(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        array = np.asarray(leaf)
        if array.dtype.kind in "OSUMm":
            at = jax.tree_util.keystr(path)
            raise TypeError(
                f"data: {place}{at} is {leaf!r:.40}, expected numbers; leave this field out, or "
                "convert it."
            )
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)

    return jax.tree.map_with_path(convert, tree, is_leaf=_is_list_of_numbers)


def _is_list_of_numbers(x: Any) -> bool:
    """Returns whether `x` is a list that stands for an array, as in Hugging Face datasets."""
    return isinstance(x, list) and not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))


def _check_same_form(first: Any, other: Any, place: str, of_first: str) -> None:
    expected, found = str(jax.tree.structure(first)), str(jax.tree.structure(other))
    if expected != found:
        raise ValueError(f"data: {place} is a {found}, expected {expected}, as {of_first} has.")
    leaves = jax.tree_util.tree_leaves_with_path(first)
    for (path, a), b in zip(leaves, jax.tree.leaves(other), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"data: {place}{jax.tree_util.keystr(path)} is {b.dtype}{list(b.shape)}, expected "
                f"{a.dtype}{list(a.shape)}, as {of_first} has; pad or crop it."
            )


def _encode(state: Any) -> Any:
    """Encodes the state of an iterator for JSON."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode("ascii")}
    try:
        return {"json": json.loads(json.dumps(state))}
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"data: the iterator's get_state() returned a {type(state).__name__} that is no JSON "
            f"({error}), expected bytes or JSON, so that a checkpoint can hold it."
        ) from error


def _decode(saved: Mapping[str, Any]) -> Any:
    return base64.b64decode(saved["bytes"]) if "bytes" in saved else saved["json"]
