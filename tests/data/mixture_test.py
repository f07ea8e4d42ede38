"""A mixture keeps its weights everywhere, and what stands at a position depends on that alone."""

import contextlib
import itertools
import json
from collections import Counter
from fractions import Fraction

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.data.batches import (
    abstract_batch,
    evaluation_batches,
    mixed_order,
    order_of,
    rows_of_this_process,
    train_batch,
    train_batches,
)
from manualpar.data.dataset import ArrayStream, TokenSplit
from manualpar.data.mixture import SLOTS, MixedSplit, parse_mixture, shares_of
from manualpar.data.sources import TEXT_SOURCES, load_dataset
from manualpar.data.tokenize import write_token_files
from manualpar.data.tokenizer import load_tokenizer
from tests.data.documents import write_documents
from tests.data.trained_tokenizer import write_tokenizer


@hypothesis.given(weights=st.lists(st.fractions(Fraction(1, 100), 100), min_size=1, max_size=6))
def test_shares_are_the_nearest_numbers_that_add_up(weights):
    shares = shares_of(weights)
    assert sum(shares) == SLOTS
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight * SLOTS / sum(weights)) < 1


WEIGHTS = ([1], [1, 1], [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)], [1, 1000, 30, 5, 5, 2])


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_after_any_number_of_positions_each_source_has_its_share(weights):
    shares = shares_of(weights)
    sources = mixed_order([10**6] * len(shares), shares, 3)(np.arange(3 * SLOTS)) // 10**6
    for source, share in enumerate(shares):
        taken = np.cumsum(sources == source)
        ideal = np.arange(1, 3 * SLOTS + 1) * (share / SLOTS)
        assert np.abs(taken - ideal).max() <= len(shares) + 1


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_each_source_has_its_own_epochs(weights):
    shares = shares_of(weights)
    sizes = [300, 250, 400, 1, 100_000, 7][: len(shares)]
    order = mixed_order(sizes, shares, 7)
    every = order(np.arange(2 * SLOTS))
    # The same from any position, in pieces of any length.
    for start, stop in ((0, 1), (17, 200), (SLOTS - 5, SLOTS + 9), (2 * SLOTS - 1, 2 * SLOTS)):
        np.testing.assert_array_equal(order(np.arange(start, stop)), every[start:stop])
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        mine = every[(every >= first) & (every < first + size)] - first
        assert len(mine) == 2 * share
        epochs = np.sort(mine[: len(mine) // size * size].reshape(-1, size))
        np.testing.assert_array_equal(epochs, np.tile(np.arange(size), (len(epochs), 1)))
        first += size


def test_seeds_give_other_orders_and_sources_are_not_in_step():
    shares = shares_of([Fraction(1)] * 2)
    orders = [mixed_order([100, 100], shares, seed)(np.arange(1000)) for seed in (0, 1)]
    assert np.count_nonzero(orders[0] == orders[1]) < 50
    # Every other position would be the same source, and so would every row of a device.
    sources = orders[0] // 100
    assert 100 < np.count_nonzero(sources[::2] == 0) < 400
    first, second = (orders[0][sources == source] % 100 for source in (0, 1))
    assert np.count_nonzero(first[:100] == second[:100]) < 10


def _split(first: int, count: int, num_bytes: int = 1) -> TokenSplit:
    """A split whose example `i` begins with the token `first + i`."""
    tokens = np.repeat(np.arange(first, first + count), 4)[: 4 * count]
    stream = ArrayStream(np.append(tokens, 0), "", 10**6)
    return TokenSplit(stream, 4, 0, num_bytes, 1)


def _mixed() -> MixedSplit:
    return MixedSplit((_split(100, 7), _split(200, 50)), (SLOTS // 4, 3 * SLOTS // 4))


def _sharding(devices, **axes):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    return NamedSharding(mesh, PartitionSpec("data"))


@pytest.mark.parametrize("start", [0, 24, SLOTS - 16])
def test_it_goes_on_anywhere_with_other_devices_and_read_ahead_by_any_length(devices8, start):
    split = _mixed()
    expected = [train_batch(split, start + 8 * i, batch_size=8, seed=3) for i in range(6)]
    for devices, prefetch in ((1, 1), (4, 2), (8, 9)):
        options = {
            "seed": 3,
            "batch_size": 8,
            "sharding": _sharding(devices8[:devices], data=devices),
            "start_position": start,
            "prefetch": prefetch,
        }
        with contextlib.closing(train_batches(split, **options)) as batches:
            for batch, same in zip(itertools.islice(batches, 6), expected, strict=True):
                chex.assert_trees_all_equal(batch, same)
                chex.assert_trees_all_equal_shapes_and_dtypes(batch, abstract_batch(split, 8))
    firsts = Counter(x // 100 for batch in expected for x in batch.inputs[:, 0].tolist())
    assert abs(firsts[1] - 12) <= 3


def test_a_process_reads_its_own_rows_only(devices8, monkeypatch):
    split, read = _mixed(), []
    get = MixedSplit.__getitem__
    monkeypatch.setattr(MixedSplit, "__getitem__", lambda s, i: read.append(i) or get(s, i))
    sharding = _sharding(devices8, data=4, model=2)
    order = order_of(split, 0)
    rows = rows_of_this_process(sharding, 8)[2:4]  # As those of a second process of four.
    monkeypatch.setattr("manualpar.data.batches.rows_of_this_process", lambda *_: rows)
    monkeypatch.setattr("manualpar.data.batches.place", lambda batch, *_: batch)
    with contextlib.closing(
        train_batches(split, seed=0, batch_size=8, sharding=sharding, prefetch=1)
    ) as batches:
        first = next(batches)
    assert read[:2] == order(rows).tolist()
    whole = train_batch(split, 0, batch_size=8, seed=0)
    np.testing.assert_array_equal(first.inputs, whole.inputs[rows])


def test_an_evaluation_takes_every_example_of_every_source_once(devices8):
    split = MixedSplit((_split(100, 7, 14), _split(200, 50, 50)), (28, 200))
    found = []
    for batch in evaluation_batches(split, 8, _sharding(devices8, data=8)):
        rows = np.asarray(batch.mask)[:, 0] > 0
        found += np.asarray(batch.inputs)[rows, 0].tolist()
    assert found == [*range(100, 107), *range(200, 250)]
    assert split.tokens_per_byte == pytest.approx(228 / 64)
    assert MixedSplit((_split(1, 2, 0), _split(1, 2)), (8, 8)).tokens_per_byte is None
    with pytest.raises(IndexError, match="example 57 of 57"):
        split[57]


@pytest.fixture
def files(tmp_path):
    documents = [f"{i} " + "a b\n" * (i % 9) for i in range(150)]
    (tmp_path / "two words").mkdir()
    for number in range(20):
        (tmp_path / "two words" / f"{number}.txt").write_text(f"{number} words\n")
    return {
        "jsonl": write_documents(tmp_path, "jsonl", documents, "body"),
        "parquet": write_documents(tmp_path, "parquet", documents[:90]),
        "text": str(tmp_path / "two words"),
    }


def _load(tmp_path, entries, **options):
    shared = {"sequence_length": 8, "held_out": 0.1, "cache": str(tmp_path / "cache")}
    return load_dataset("mixture", seed=0, mixture=entries, **shared, **options)


def test_a_mixture_is_of_any_sources(tmp_path, files):
    tokenizer = write_tokenizer(tmp_path / "t.json")
    entries = (
        f"0.5 jsonl:body {files['jsonl']}",
        f"1/4 parquet {files['parquet']}",
        f".25 text {files['text']}",
    )
    dataset = _load(tmp_path, entries, tokenizer=tokenizer)
    assert dataset.train.shares == (SLOTS // 2, SLOTS // 4, SLOTS // 4)
    for split in (dataset.train, dataset.eval, dataset.test):
        assert split.tokens_per_byte > 0
        assert len(split) == sum(map(len, split.parts))
    assert dataset.tokenizer.vocab_size == load_tokenizer(tokenizer).vocab_size
    again = _load(tmp_path, entries, tokenizer=tokenizer)
    assert again.fingerprint == dataset.fingerprint
    for other in (
        (*entries[:2], entries[2].replace(".25", ".3")),
        (entries[1], entries[0], entries[2]),
        entries[:2],
    ):
        assert _load(tmp_path, other, tokenizer=tokenizer).fingerprint != dataset.fingerprint


def test_its_entries_are_plain_values():
    entries = ("0.7 jsonl ~/a b/*.jsonl", "3e-1 parquet:content /c", "2 text")
    parsed = parse_mixture(json.loads(json.dumps(entries)), TEXT_SOURCES)
    assert [tuple(entry)[1:] for entry in parsed] == [
        ("jsonl", "", "~/a b/*.jsonl"),
        ("parquet", "content", "/c"),
        ("text", "", ""),
    ]
    assert [entry.weight for entry in parsed] == [Fraction(7, 10), Fraction(3, 10), 2]


def test_a_source_that_does_not_fit_is_named(tmp_path, files):
    with pytest.raises(ValueError, match=r"`path` is '/no/such'") as raised:
        _load(tmp_path, ("1 jsonl /no/such",))
    assert raised.value.__notes__ == ["in the entry 'jsonl /no/such' of `mixture`"]
    write_token_files(files["text"], str(tmp_path / "tokens"))
    entries = (f"1 text {files['text']}", f"1 tokens {tmp_path / 'tokens'}")
    assert len(_load(tmp_path, entries).train.parts) == 2
    with pytest.raises(
        ValueError, match=r"'tokens .*', whose tokenizer is not the tokenizer of 'text .*'; expe"
    ):
        _load(tmp_path, entries, tokenizer=write_tokenizer(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"`source` is 'text', expected 'mixture'"):
        load_dataset("text", seed=0, mixture=entries, sequence_length=8)
