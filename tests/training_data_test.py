"""Every example is used, counted once in evaluation, and where the seed and the step say."""

import chex
import jax
import numpy as np
import pytest
import sklearn.datasets
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.train_state import Batch
from manualpar.training.data import (
    Split,
    abstract_batch,
    evaluation_batches,
    load_dataset,
    load_digits,
    make_synthetic,
    prefetch_to_device,
    train_batch,
)


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def _numbered(num_examples: int) -> Split:
    """Examples that are their own index."""
    indices = np.arange(num_examples)
    return Split(indices[:, None].astype(np.float32), indices.astype(np.int32))


def _rows(split: Split) -> list[bytes]:
    return [x.tobytes() + bytes([y]) for x, y in zip(split.inputs, split.labels, strict=True)]


def test_the_digits_are_all_there_once_and_scaled(digits):
    splits = (digits.train, digits.eval, digits.test)
    assert [split.inputs.shape for split in splits] == [(1293, 64), (144, 64), (360, 64)]
    inputs, labels = sklearn.datasets.load_digits(return_X_y=True)
    whole = Split((inputs / 16).astype(np.float32), labels.astype(np.int32))
    rows = [row for split in splits for row in _rows(split)]
    assert sorted(rows) == sorted(_rows(whole))
    for split in splits:
        chex.assert_type([split.inputs, split.labels], [np.float32, np.int32])
        assert split.inputs.min() == 0
        assert split.inputs.max() == 1


def test_the_digits_are_split_by_class_and_always_alike(digits):
    whole = np.bincount(sklearn.datasets.load_digits().target)
    for split in (digits.train, digits.eval, digits.test):
        share = whole * len(split.labels) / whole.sum()
        assert np.abs(np.bincount(split.labels) - share).max() < 1
    chex.assert_trees_all_equal(load_dataset("digits", seed=1), load_dataset("digits", seed=2))


def test_the_synthetic_source_has_the_shapes_of_mnist_and_follows_its_seed():
    data = make_synthetic(3)
    assert data.train.inputs.shape == (4096, 784)
    assert set(np.unique(data.test.labels)) == set(range(10))
    assert data.train.inputs.std() == pytest.approx(1, abs=0.01)
    chex.assert_trees_all_equal(data, load_dataset("synthetic", seed=3))
    assert not np.array_equal(data.train.inputs, make_synthetic(4).train.inputs)


def test_the_synthetic_source_can_be_learned():
    data = make_synthetic(0)
    x, one_hot = data.train.inputs, np.eye(10, dtype=np.float32)[data.train.labels]
    weights = np.linalg.solve(x.T @ x, x.T @ one_hot)
    assert ((data.test.inputs @ weights).argmax(axis=1) == data.test.labels).mean() > 0.5


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="source is 'mnist', expected one of digits, synthetic"):
        load_dataset("mnist", seed=0)


@pytest.mark.parametrize(("num_examples", "batch_size"), [(10, 4), (10, 5), (7, 16), (5, 13)])
def test_an_epoch_holds_every_example_once_whatever_the_batch_size(num_examples, batch_size):
    split, num_epochs = _numbered(num_examples), 4
    num_steps = -(-num_examples * num_epochs // batch_size)
    batches = [train_batch(split, s, batch_size=batch_size, seed=0) for s in range(num_steps)]
    for batch in batches:
        chex.assert_tree_shape_prefix(batch, (batch_size,))
        np.testing.assert_array_equal(batch.mask, 1)
        np.testing.assert_array_equal(batch.inputs[:, 0], batch.labels)
    order = np.concatenate([batch.labels for batch in batches])
    epochs = order[: num_epochs * num_examples].reshape(num_epochs, num_examples)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(num_examples), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == num_epochs, "epochs in the same order"


def test_a_batch_depends_on_the_seed_and_the_step_alone():
    split = _numbered(50)

    def labels(step: int, seed: int):
        return tuple(train_batch(split, step, batch_size=8, seed=seed).labels)

    later = labels(9, 1)
    assert labels(0, 1) != later
    assert labels(9, 1) == later
    assert labels(9, 2) != later


@pytest.mark.parametrize("batch_size", [8, 64, 120, 128, 360, 512])
def test_evaluation_counts_every_test_image_exactly_once(digits, batch_size):
    batches = list(evaluation_batches(digits.test, batch_size))
    assert sum(batch.mask.sum() for batch in batches) == 360
    template = abstract_batch(digits.test, batch_size)
    for batch in batches:
        chex.assert_trees_all_equal_shapes_and_dtypes(batch, template)
        assert not batch.inputs[batch.mask == 0].any()
    kept = [batch.mask == 1 for batch in batches]
    seen = Split(
        np.concatenate([b.inputs[keep] for b, keep in zip(batches, kept, strict=True)]),
        np.concatenate([b.labels[keep] for b, keep in zip(batches, kept, strict=True)]),
    )
    chex.assert_trees_all_equal(seen, digits.test)


def test_batches_reach_the_devices_one_ahead(devices8):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices8)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    made = []

    def batches():
        for step in range(4):
            made.append(step)
            yield train_batch(_numbered(32), step, batch_size=8, seed=0)

    placed = prefetch_to_device(batches(), sharding)
    for step in range(4):
        batch: Batch = next(placed)
        assert made == list(range(min(step + 2, 4)))
        assert {x.sharding for x in jax.tree.leaves(batch)} == {sharding}
        expected = train_batch(_numbered(32), step, batch_size=8, seed=0)
        chex.assert_trees_all_equal(batch, expected)
    assert next(placed, None) is None
    assert list(prefetch_to_device([], sharding)) == []
