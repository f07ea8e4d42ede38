"""Makes a dataset of a user's data: examples by number, or batches in order.

Data has one of two forms.

- *Examples by number*: an object with `len(data)` and `data[i]`, such as a Hugging Face dataset; or
  arrays that hold all examples, as a tuple `(X, Y)`, a dict or a `Batch`; or a list of examples.
  Then a run shuffles the examples, each process reads only its own rows, and a run that resumes
  goes on at the same example. Any tree of arrays may be an example. A `Batch` of arrays without a
  leading dimension, with a mask, can be padded; see `evaluation_batches`.
- *Batches in order*: an iterable, such as a Grain pipeline, a PyTorch `DataLoader`, a list of
  batches, a generator, or a function that returns one. Any tree whose leaves have the examples
  along their leading dimension may be a batch. With several processes a batch has the examples of
  all processes, or only the rows of the process that reads it.

Some data could have both forms. `ExampleSplit.reading` and `BatchStream.reading` then say in one
sentence how it is read, and `fit` prints this.

Symbol: `B` examples in a batch.
"""

import base64
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from manualpar.checks.guarded_step import check_integers
from manualpar.core.state.train_state import Batch
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
from manualpar.errors import suggest

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

    @property
    def reading(self) -> str:
        """A sentence on how the data is read, if it could be read in another way; else ""."""
        number, form = len(self), _show_form(self._first)
        if isinstance(self._examples, list | tuple):
            return (
                f"data: {self._name!r} is a list of {number} examples, the first is {form}; for "
                "batches pass an iterable, such as a generator function."
            )
        if isinstance(self._examples, _Arrays) or _rows_of(self._first) is None:
            return ""
        return (
            f"data: {self._name!r} has len() and [i], so it is read as {number} examples, the "
            f"first is {form}; for batches pass an iterable, such as a generator function."
        )

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
        if isinstance(batches, list | tuple):
            _check_rows_of_list(batches, name)
        self._iterator = iter(batches)
        self._number = 0  # Of the next batch.
        self._waiting: list[Any] = []
        self._first: Any = None

    @property
    def reading(self) -> str:
        """A sentence on how the data is read, if it could be read in another way; else ""."""
        if not isinstance(self._source, list | tuple) or not self._source:
            return ""
        rows = _rows_of(_plain(self._source[0]), scalars=True)
        return (
            f"data: {self._name!r} is a list of {len(self._source)} batches of {rows} examples; "
            "for examples pass arrays of all examples, such as (X, Y) or a dict, or an object with "
            "__len__ and __getitem__."
        )

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
        if not rows:
            raise ValueError(
                f"data: {place} is {_show_form(batch)}, expected arrays with the examples along "
                "their leading dimension. If it is one example, batch the examples first, such as "
                "with .batch(n), or pass an object with __len__ and __getitem__."
            )
        if len(rows) != 1:
            raise ValueError(
                f"data: the leaves of {place} have {sorted(rows)} rows, expected the same number "
                "of examples along the leading dimension of each. If it is one example, batch the "
                "examples first, such as with .batch(n)."
            )
        first = jax.tree.map(lambda x: x[:1] if x.ndim else x, self._first)
        some = jax.tree.map(lambda x: x[:1] if x.ndim else x, batch)
        _check_same_form(first, some, place, "the first")
        return batch


def as_dataset(data: Any) -> Dataset:
    """Makes a dataset of a user's data.

    Args:
      data: A `Dataset`; or a mapping from `train`, and perhaps `eval` (or `validation`) and `test`,
        to examples or batches; or only those for the training. See the module for their forms. A
        mapping of arrays to other names holds the examples of the training.

    Raises:
      TypeError: The data has none of these forms.
      ValueError: A split is unknown or empty, or cannot be read as often as needed.
    """
    if isinstance(data, Dataset):
        return data
    splits = {"train": data}
    if isinstance(data, Mapping):
        names = {NAMES.get(name, name) for name in data}
        if names & set(SPLITS) or not _is_arrays(dict(data)):
            splits = dict(data)
    splits = {NAMES.get(name, name): split for name, split in splits.items()}
    if unknown := [name for name in splits if name not in SPLITS]:
        raise ValueError(
            f"data has {unknown[0]!r}, expected the splits 'train', 'eval' and 'test'"
            f"{suggest(str(unknown[0]), SPLITS)}. A single batch is data={{'train': [batch]}}; "
            "arrays of all examples have the same length."
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


class _Arrays:
    """Examples by number that lie in arrays, along their leading dimension."""

    def __init__(self, arrays: Any, name: str) -> None:
        self._arrays = jax.tree.map(_host_array, arrays, is_leaf=_is_list_of_numbers)
        lengths = sorted({len(x) for x in jax.tree.leaves(self._arrays)})
        if len(lengths) != 1:
            raise ValueError(
                f"data: the arrays of {name!r} have lengths {lengths}, expected one number of "
                "examples. A list of batches is [batch, ...], with brackets."
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(lambda x: x[index], self._arrays)


class _Called:
    """The batches of a function, which each `iter` calls anew."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function, self._name = function, name

    def __iter__(self) -> Iterator[Any]:
        made = self._function()
        if not isinstance(made, Iterable) or isinstance(made, Mapping | str | bytes):
            raise TypeError(
                f"data: the function of {self._name!r} returned a {type(made).__name__}, expected "
                "an iterable of batches; or use `yield` in it."
            )
        return iter(made)


def _split(name: str, split: Any) -> Split | BatchStream:
    """Makes a split or a stream; `_list_of` decides on lists, and a Grain pipeline is a stream."""
    if isinstance(split, OURS):
        return split
    if hasattr(split, "to_iter_dataset"):  # Grain's `MapDataset`.
        return BatchStream(split.to_iter_dataset(), name)
    if isinstance(split, Batch | Mapping) or (isinstance(split, tuple) and _is_pair(split)):
        split = dict(split) if isinstance(split, Mapping) else split
        if _is_arrays(split):
            return ExampleSplit(_Arrays(split, name), name)
    elif isinstance(split, list | tuple):
        return _list_of(name, split)
    elif not isinstance(split, str | bytes):
        if hasattr(split, "__getitem__") and hasattr(split, "__len__"):
            return ExampleSplit(split, name)
        if isinstance(split, Iterable):
            return BatchStream(split, name)
        if callable(split):
            return BatchStream(_Called(_without_arguments(name, split), name), name)
    raise TypeError(
        f"data: {name!r} is a {type(split).__name__}, expected examples by number (arrays of all "
        "examples such as (X, Y) or a dict, or an object with __len__ and __getitem__), or batches "
        "(an iterable, or a function that returns one)."
    )


def _list_of(name: str, items: Any) -> Split | BatchStream:
    """Reads a list as batches if each item can be one, and else as examples."""
    forms = {_show_form(_plain(item)) for item in items[:2]}
    if len(forms) > 1 and all(hasattr(item, "shape") for item in items):
        raise ValueError(
            f"data: {name!r} is a list of the arrays {' and '.join(sorted(forms))}, expected items "
            "of one form. If these are all examples, pass the tuple (X, Y)."
        )
    if items and any(_rows_of(_plain(item)) is None for item in items[:2]):
        return ExampleSplit(items, name)
    return BatchStream(items, name)


def _is_pair(items: tuple[Any, ...]) -> bool:
    """Returns whether a tuple is `(X, Y)`, and not several batches of one form."""
    if hasattr(items, "_fields") or all(hasattr(item, "shape") for item in items):
        return bool(items)
    return len({_show_form(_plain(item), rows=False) for item in items}) > 1 and _is_arrays(items)


def _is_arrays(tree: Any) -> bool:
    """Returns whether all leaves are arrays with at least one dimension."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_list_of_numbers)
    return bool(leaves) and all(
        (hasattr(x, "shape") and len(x.shape) > 0) or (isinstance(x, list) and len(x) > 0)
        for x in leaves
    )


def _without_arguments(name: str, function: Callable[..., Any]) -> Callable[[], Any]:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TypeError(
            f"data: the function of {name!r} takes {inspect.signature(function)}, expected one "
            "without arguments, such as functools.partial(function, ...)."
        ) from error
    return function


def _check_rows_of_list(batches: Any, name: str) -> None:
    """Refuses a list whose items differ in length, because those are no batches."""
    rows = [_rows_of(_plain(batch), scalars=True) for batch in batches]
    if (others := set(rows[:-1])) and (len(others) > 1 or (rows[-1] or 0) > (rows[0] or 0)):
        number = next(i for i, count in enumerate(rows) if count != rows[0])
        raise ValueError(
            f"data: {name!r} is a list whose item 0 has {rows[0]} rows and item {number} has "
            f"{rows[number]}, expected batches with one number of examples, of which only the last "
            "may be smaller. If the items are examples, pad them to one length and pass arrays of "
            "all examples, such as (X, Y) or a dict."
        )


def _rows_of(tree: Any, *, scalars: bool = False) -> int | None:
    """Returns the number of rows if the tree can be a batch; with `scalars`, it may have some."""
    shapes = [np.shape(x) for x in jax.tree.leaves(tree, is_leaf=_is_list_of_numbers)]
    rows = {shape[0] for shape in shapes if shape}
    return rows.pop() if len(rows) == 1 and (scalars or all(shapes)) else None


def _show_form(tree: Any, *, rows: bool = True) -> str:
    """Formats the dtypes and shapes of a tree; without `rows`, not the leading dimension."""

    def show(path: Any, x: Any) -> str:
        shape = np.shape(x)
        dtype = getattr(x, "dtype", type(x).__name__)
        return f"{jax.tree_util.keystr(path)} {dtype}{list(shape if rows else shape[1:])}".strip()

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_list_of_numbers)
    return ", ".join(show(path, x) for path, x in leaves)


def _plain(tree: Any) -> Any:
    """Returns a batch with dicts for mappings that JAX does not know, such as `BatchEncoding`."""
    if isinstance(tree, Mapping) and type(tree) is not dict:
        return {key: _plain(value) for key, value in tree.items()}
    return tree


def _host_array(leaf: Any) -> Any:
    """Copies a leaf to the host as a NumPy array; of PyTorch tensors also bfloat16."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":
            return leaf.float().numpy().astype(jax.numpy.bfloat16)
    return np.asarray(leaf)


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
        array = _host_array(leaf)
        if isinstance(array, jax.Array):
            return array
        if array.dtype.kind in "OSUMm":
            at = jax.tree_util.keystr(path)
            raise TypeError(
                f"data: {place}{at} is {leaf!r:.40}, expected numbers; leave this field out, or "
                "convert it."
            )
        check_integers(f"data: {place}{jax.tree_util.keystr(path)}", array)
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)

    return jax.tree.map_with_path(convert, _plain(tree), is_leaf=_is_list_of_numbers)


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
