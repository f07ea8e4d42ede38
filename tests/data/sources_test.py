"""Sources by name: the digits are split once and for all, the synthetic data follow their seed."""

import os
import pathlib

import chex
import numpy as np
import pytest
import sklearn.datasets

from manualpar.data import sources as token_cache
from manualpar.data import token_job
from manualpar.data.dataset import ArraySplit
from manualpar.data.sources import SOURCES, cache_folder, load_dataset, load_digits, make_synthetic
from manualpar.data.tokenize import write_token_files
from tests.data.documents import write_documents
from tests.data.trained_tokenizer import write_tokenizer
from tests.shown_bars import record_bars


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


# -------------------------------------------------------------------------------------------------
# Files of documents are made into tokens once, and what the cache holds is never stale.


DOCUMENTS = [f"{i} " + "a b\n" * (i % 9) for i in range(100)]


def _load(path, cache, source="jsonl", **options):
    options = {"held_out": 0.1, "sequence_length": 16, "cache": str(cache), **options}
    return load_dataset(source, seed=0, path=path, **options)


@pytest.mark.parametrize("source", ["jsonl", "parquet", "arrayrecord"])
def test_a_source_has_the_sequences_of_its_token_files(tmp_path, source):
    path = write_documents(tmp_path, source, DOCUMENTS)
    tokenizer = write_tokenizer(tmp_path / "t.json")
    dataset = _load(path, tmp_path / "cache", source, tokenizer=tokenizer)
    options = {"source": source, "tokenizer": tokenizer, "held_out": 0.1}
    write_token_files(path, str(tmp_path / "tokens"), **options)
    made = load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=16)
    assert made.fingerprint == dataset.fingerprint
    for index in range(len(made.train)):
        chex.assert_trees_all_equal(dataset.train[index], made.train[index])
    assert dataset.eval.tokens_per_byte == made.eval.tokens_per_byte > 0


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    path, cache, calls = write_documents(tmp_path, "jsonl", DOCUMENTS), tmp_path / "cache", []
    run_job = token_cache.run_job

    def counted(*arguments, **options):
        calls.append(arguments)
        return run_job(*arguments, **options)

    monkeypatch.setattr(token_cache, "run_job", counted)
    bars = record_bars(monkeypatch, token_job)
    first = _load(path, cache)
    ((work, total, shown),) = bars
    assert (work, total) == ("tokenizing", os.path.getsize(path))
    assert shown[-1] == total
    assert _load(path, cache, sequence_length=8).fingerprint != first.fingerprint
    assert len(calls) == 1
    content = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(content.replace(b"a b", b"b a", 1))
    os.utime(path, ns=(1, 1))
    assert _load(path, cache).fingerprint != first.fingerprint
    pathlib.Path(path).write_bytes(content)
    moved = tmp_path / "moved"
    moved.mkdir()
    os.rename(path, there := moved / "documents.jsonl")
    assert _load(str(there), cache).fingerprint == first.fingerprint
    assert _load(str(there), cache, held_out=0.2).fingerprint != first.fingerprint
    assert len(calls) == 4


def test_a_damaged_cache_is_made_again(tmp_path):
    path, cache = write_documents(tmp_path, "jsonl", DOCUMENTS), tmp_path / "cache"
    first = _load(path, cache)
    (train,) = (cache / "tokens").glob("*/train.bin")
    train.write_bytes(train.read_bytes()[:-2])
    again = _load(path, cache)
    assert again.fingerprint == first.fingerprint
    chex.assert_trees_all_equal(again.train[0], first.train[0])


def test_a_lock_that_is_a_link_is_refused_and_not_followed(tmp_path):
    path, cache = write_documents(tmp_path, "jsonl", DOCUMENTS), tmp_path / "cache"
    precious = tmp_path / "precious"
    precious.write_text("keep")
    _load(path, cache)
    (lock,) = (cache / "tokens").glob("*.lock")
    lock.unlink()
    for make, kind in (
        (lambda: lock.symlink_to(precious), "link"),
        (lambda: os.mkfifo(lock), "FIFO"),
    ):
        make()
        words = rf"{lock} is a {kind}, expected a file to lock; delete it\."
        with pytest.raises(ValueError, match=words):
            _load(path, cache)
        assert precious.read_text() == "keep"
        lock.unlink()


def test_the_cache_is_in_the_users_folder_unless_the_config_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "manualpar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("") == pathlib.Path.home() / ".cache" / "manualpar"
    assert cache_folder("~/x") == pathlib.Path.home() / "x"


def test_what_cannot_be_kept_is_a_mistake_in_the_config(tmp_path, monkeypatch):
    path = write_documents(tmp_path, "jsonl", DOCUMENTS)
    monkeypatch.setattr(token_cache, "MOST_BYTES", 100)
    with pytest.raises(
        ValueError, match=r"make token files once with `python -m manualpar\.data\.tokeni"
    ):
        _load(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
