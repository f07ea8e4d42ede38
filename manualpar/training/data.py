"""Data in memory, as batches whose content is a function of the seed and the step.

Training sees every example once an epoch, in an order drawn from (seed, epoch). Batches are cut
from the epochs laid end to end, so that all are full and none of the examples is dropped: a batch
may hold the end of one epoch and the start of the next. Evaluation pads its last batch and masks
the padding, so that each example counts once.

B is the batch size, D the length of an input.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from manualpar.train_state import Batch

SOURCES = ("digits", "synthetic")

# The split is part of the data: it stays when the seed of a run changes.
DIGITS_SPLIT_SEED = 0
DIGITS_TEST_EXAMPLES = 360
DIGITS_EVAL_EXAMPLES = 144


class Split(NamedTuple):
    """Examples: inputs `float32[N, D]` and labels `int32[N]`."""

    inputs: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """What is trained on, what is looked at meanwhile, and what is touched once at the end."""

    train: Split
    eval: Split
    test: Split
    num_classes: int


def load_dataset(source: str, *, seed: int) -> Dataset:
    """Loads one of `SOURCES`; `seed` makes the synthetic one and leaves the digits as they are."""
    if source == "digits":
        return load_digits()
    if source == "synthetic":
        return make_synthetic(seed)
    raise ValueError(f"load_dataset: source is {source!r}, expected one of {', '.join(SOURCES)}.")


def load_digits() -> Dataset:
    """The 1,797 handwritten digits in scikit-learn: 8x8 scans as vectors of 64 values in [0, 1].

    Of these 1,293 are for training, 144 for evaluation and 360 for the test. The split is always
    the same one, and in each part the ten digits have the share they have in the whole.
    """
    # scikit-learn takes a second to import.
    import sklearn.datasets
    from sklearn.model_selection import train_test_split

    images, digits = sklearn.datasets.load_digits(return_X_y=True)
    inputs, labels = (images / 16).astype(np.float32), digits.astype(np.int32)

    def split_off(examples: Split, num_examples: int) -> tuple[Split, Split]:
        rest, part = train_test_split(
            np.arange(len(examples.labels)),
            test_size=num_examples,
            stratify=examples.labels,
            random_state=DIGITS_SPLIT_SEED,
        )
        return _take(examples, rest), _take(examples, part)

    rest, test = split_off(Split(inputs, labels), DIGITS_TEST_EXAMPLES)
    train, evaluation = split_off(rest, DIGITS_EVAL_EXAMPLES)
    return Dataset(train, evaluation, test, num_classes=10)


def make_synthetic(seed: int) -> Dataset:
    """Normal noise of MNIST's shape in ten classes: 4,096 examples to train, 512 each for the rest.

    It can be learned: the label is the largest of ten random projections of the input, the same for
    all splits.

    Args:
      seed: What inputs and projections are drawn from.
    """
    rng = np.random.default_rng(seed)
    projections = rng.standard_normal((784, 10), dtype=np.float32)

    def draw(num_examples: int) -> Split:
        inputs = rng.standard_normal((num_examples, 784), dtype=np.float32)
        return Split(inputs, (inputs @ projections).argmax(axis=-1).astype(np.int32))

    return Dataset(draw(4096), draw(512), draw(512), num_classes=10)


def _take(split: Split, indices: np.ndarray) -> Split:
    return Split(split.inputs[indices], split.labels[indices])


def abstract_batch(split: Split, batch_size: int) -> Batch:
    """The shapes and dtypes of all batches made of `split` here, as `jax.ShapeDtypeStruct`s."""

    def leaf(array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), array.dtype)

    return Batch(
        leaf(split.inputs), leaf(split.labels), jax.ShapeDtypeStruct((batch_size,), np.float32)
    )


def train_batch(split: Split, step: int, *, batch_size: int, seed: int) -> Batch:
    """The batch of one training step.

    Args:
      split: What to draw from; it may be smaller than a batch.
      step: Which step, from 0.
      batch_size: Examples in a batch.
      seed: What the epochs' orders are drawn from, not negative.

    Returns:
      A full batch, its mask all ones.
    """
    num_examples = len(split.labels)
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // num_examples
    orders = [
        np.random.default_rng((seed, epoch)).permutation(num_examples)
        for epoch in range(epochs[0], epochs[-1] + 1)
    ]
    indices = np.stack(orders)[epochs - epochs[0], positions % num_examples]
    return Batch(*_take(split, indices), np.ones(batch_size, np.float32))


def evaluation_batches(split: Split, batch_size: int) -> Iterator[Batch]:
    """Batches that together hold each example once, in the order they are stored.

    The last one is padded with zeros, and only there the mask is 0.
    """
    num_examples = len(split.labels)
    for start in range(0, num_examples, batch_size):
        inputs, labels = _take(split, np.arange(start, min(start + batch_size, num_examples)))
        padding = batch_size - len(labels)
        yield Batch(
            np.pad(inputs, ((0, padding), (0, 0))),
            np.pad(labels, (0, padding)),
            np.pad(np.ones(len(labels), np.float32), (0, padding)),
        )


def prefetch_to_device(
    batches: Iterable[Batch], sharding: jax.sharding.Sharding
) -> Iterator[Batch]:
    """Places batches as `sharding` says, each while the one before it is being used."""
    waiting: Batch | None = None
    for batch in batches:
        placed = jax.device_put(batch, sharding)
        if waiting is not None:
            yield waiting
        waiting = placed
    if waiting is not None:
        yield waiting
