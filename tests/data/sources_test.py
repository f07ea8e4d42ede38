"""Sources by name: the digits are split once and for all, the synthetic data follow their seed."""

import chex
import numpy as np
import pytest
import sklearn.datasets

from manualpar.data.dataset import ArraySplit
from manualpar.data.sources import SOURCES, load_dataset, load_digits, make_synthetic


@pytest.mark.parametrize("source", ["digits", "synthetic", "text"])
def test_every_source_gives_three_splits_of_examples(source):
    dataset = load_dataset(source, seed=0, sequence_length=32)
    assert source in SOURCES
    for split in (dataset.train, dataset.eval, dataset.test):
        assert len(split) > 0
        assert split[len(split) - 1].labels.dtype == "int32"


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def _rows(split: ArraySplit) -> list[bytes]:
    return [x.tobytes() + bytes([y]) for x, y in zip(split.inputs, split.labels, strict=True)]


def test_the_digits_are_all_there_once_and_scaled(digits):
    splits = (digits.train, digits.eval, digits.test)
    assert [split.inputs.shape for split in splits] == [(1293, 64), (144, 64), (360, 64)]
    inputs, labels = sklearn.datasets.load_digits(return_X_y=True)
    whole = ArraySplit((inputs / 16).astype(np.float32), labels.astype(np.int32))
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
    again = load_dataset("digits", seed=1)
    assert again.fingerprint == digits.fingerprint
    assert (again.num_classes, digits.num_classes) == (10, 10)
    np.testing.assert_array_equal(again.train.inputs, digits.train.inputs)


def test_the_synthetic_source_has_the_shapes_of_mnist_and_follows_its_seed():
    data = make_synthetic(3)
    assert data.train.inputs.shape == (4096, 784)
    assert set(np.unique(data.test.labels)) == set(range(10))
    assert data.train.inputs.std() == pytest.approx(1, abs=0.01)
    again, other = load_dataset("synthetic", seed=3), make_synthetic(4)
    np.testing.assert_array_equal(data.train.inputs, again.train.inputs)
    assert not np.array_equal(data.train.inputs, other.train.inputs)
    assert data.fingerprint == again.fingerprint != other.fingerprint


def test_the_synthetic_source_can_be_learned():
    data = make_synthetic(0)
    x, one_hot = data.train.inputs, np.eye(10, dtype=np.float32)[data.train.labels]
    weights = np.linalg.solve(x.T @ x, x.T @ one_hot)
    assert ((data.test.inputs @ weights).argmax(axis=1) == data.test.labels).mean() > 0.5


def test_an_example_has_no_leading_dimension_and_counts(digits):
    example = digits.eval[5]
    np.testing.assert_array_equal(example.inputs, digits.eval.inputs[5])
    assert example.labels == digits.eval.labels[5]
    assert (example.mask, np.shape(example.mask)) == (1, ())
    assert len(digits.eval) == 144
