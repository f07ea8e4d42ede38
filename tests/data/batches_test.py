"""What a batch holds follows from the seed and the position, and from nothing else."""

import contextlib
import itertools
import math
import subprocess
import sys
import threading

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.core.state.train_state import Batch
from manualpar.data.batches import (
    abstract_batch,
    evaluation_batches,
    place,
    rows_of_this_process,
    train_batch,
    train_batches,
)
from manualpar.data.dataset import ArraySplit
from manualpar.data.sources import load_dataset, load_digits


def _numbered(num_examples: int) -> ArraySplit:
    """Examples that are their own index, none of them 0."""
    numbers = np.arange(1, num_examples + 1)
    return ArraySplit(numbers[:, None].astype(np.float32), numbers.astype(np.int32))


def _sharding(devices, **axis_sizes) -> NamedSharding:
    sizes = tuple(axis_sizes.values())
    mesh = jax.sharding.Mesh(np.array(devices[: np.prod(sizes)]).reshape(sizes), tuple(axis_sizes))
    return NamedSharding(mesh, PartitionSpec("data"))


@pytest.fixture
def one_device(devices8):
    return _sharding(devices8, data=1)


def _take(count: int, split, **options) -> list[np.ndarray]:
    with contextlib.closing(train_batches(split, **options)) as batches:
        return [np.asarray(batch.labels) for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize(("num_examples", "batch_size"), [(10, 4), (10, 5), (7, 16), (5, 13)])
def test_an_epoch_holds_every_example_once_whatever_the_batch_size(
    one_device, num_examples, batch_size
):
    num_epochs = 6
    num_batches = -(-num_examples * num_epochs // batch_size)
    options = {"seed": 0, "batch_size": batch_size, "sharding": one_device}
    order = np.concatenate(_take(num_batches, _numbered(num_examples), **options))
    epochs = order[: num_epochs * num_examples].reshape(num_epochs, num_examples)
    np.testing.assert_array_equal(
        np.sort(epochs), np.tile(np.arange(1, num_examples + 1), (num_epochs, 1))
    )
    assert len({tuple(epoch) for epoch in epochs}) > 1, "epochs in the same order"


def test_epochs_and_seeds_give_orders_that_have_nothing_in_common():
    split = _numbered(100)

    def epoch(number: int, seed: int) -> tuple[int, ...]:
        return tuple(train_batch(split, 100 * number, batch_size=100, seed=seed).labels)

    orders = {epoch(number, seed) for number in range(5) for seed in range(5)}
    assert len(orders) == 25
    assert len({epoch(0, seed) for seed in (0, 2**32 - 1, 2**32, 2**40)}) == 4
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(100))[0, 1]) < 0.4


def test_batches_read_one_by_one_make_the_order_of_an_epoch_once(monkeypatch):
    made = []

    def default_rng(seed):
        made.append(seed)
        return np.random.Generator(np.random.PCG64(seed))

    monkeypatch.setattr(np.random, "default_rng", default_rng)
    for step in range(5):
        train_batch(_numbered(100), 10 * step, batch_size=10, seed=12345)
    assert made == [(12345, 0)]


@pytest.mark.parametrize(
    "axis_sizes",
    [{"data": 1}, {"data": 4}, {"data": 8}, {"data": 2, "model": 4}, {"model": 4, "data": 2}],
    ids=str,
)
def test_every_mesh_sees_the_same_batches(devices8, axis_sizes):
    sharding, split = _sharding(devices8, **axis_sizes), _numbered(30)
    with contextlib.closing(
        train_batches(split, seed=1, batch_size=8, sharding=sharding)
    ) as batches:
        for step in range(9):
            batch = next(batches)
            expected = train_batch(split, 8 * step, batch_size=8, seed=1)
            assert {leaf.sharding for leaf in jax.tree.leaves(batch)} == {sharding}
            chex.assert_trees_all_equal(batch, expected)
            chex.assert_trees_all_equal_shapes_and_dtypes(batch, abstract_batch(split, 8))


@hypothesis.given(
    start=st.one_of(st.integers(0, 200), st.integers(10**9, 10**9 + 200)),
    batch_size=st.integers(1, 20),
    prefetch=st.integers(1, 5),
)
def test_reading_can_start_anywhere_and_read_ahead_by_any_length(start, batch_size, prefetch):
    split = _numbered(37)
    found = _take(
        4,
        split,
        seed=2,
        batch_size=batch_size,
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        start_position=start,
        prefetch=prefetch,
    )
    expected = [
        train_batch(split, start + step * batch_size, batch_size=batch_size, seed=2).labels
        for step in range(4)
    ]
    np.testing.assert_array_equal(found, expected)


def test_reading_goes_on_after_the_batches_that_were_used(one_device):
    split = _numbered(30)
    options = {"seed": 3, "sharding": one_device, "prefetch": 4}
    whole = np.concatenate(_take(12, split, batch_size=4, **options))
    found = []
    found += _take(5, split, batch_size=4, **options)
    # Batches of another size go on just there.
    found += _take(4, split, batch_size=7, start_position=5 * 4, **options)
    np.testing.assert_array_equal(np.concatenate(found), whole)


class _Counted(ArraySplit):
    """Notes which examples are read."""

    def __getitem__(self, index):
        READ.append(index)
        return super().__getitem__(index)


READ: list[int] = []


def _wait_until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("nothing happened for ten seconds")


def test_threads_read_ahead_as_far_as_they_may_and_no_further(one_device):
    READ.clear()
    numbered = _numbered(1000)
    split = _Counted(numbered.inputs, numbered.labels)
    options = {"seed": 0, "batch_size": 2, "sharding": one_device, "prefetch": 3}
    with contextlib.closing(train_batches(split, **options)) as batches:
        next(batches)
        # One handed out, one on the device, three more.
        _wait_until(lambda: len(READ) == 10)
        next(batches)
        _wait_until(lambda: len(READ) == 12)


def test_the_first_batch_is_there_while_the_second_is_being_placed(one_device, monkeypatch):
    placed = []

    def place(batch, rows, sharding, num_rows):
        placed.append(batch.labels[0])
        return batch

    monkeypatch.setattr("manualpar.data.batches.place", place)
    options = {"seed": 0, "batch_size": 2, "sharding": one_device}
    with contextlib.closing(train_batches(_numbered(20), **options)) as batches:
        for step in range(1, 5):
            batch = next(batches)
            assert len(placed) == step + 1
            assert batch.labels[0] == placed[step - 1]


@pytest.mark.parametrize("batch_size", [8, 64, 120, 128, 360, 512])
def test_evaluation_counts_every_example_exactly_once(devices8, batch_size):
    sharding, test = _sharding(devices8, data=8), load_digits().test
    batches = list(evaluation_batches(test, batch_size, sharding))
    assert len(batches) == math.ceil(360 / batch_size)
    assert sum(np.asarray(batch.mask).sum() for batch in batches) == 360
    for batch in batches:
        chex.assert_trees_all_equal_shapes_and_dtypes(batch, abstract_batch(test, batch_size))
        assert {leaf.sharding for leaf in jax.tree.leaves(batch)} == {sharding}
    inputs, labels, mask = (
        np.concatenate([getattr(batch, leaf) for batch in batches])
        for leaf in ("inputs", "labels", "mask")
    )
    np.testing.assert_array_equal(inputs[:360], test.inputs)
    np.testing.assert_array_equal(labels[:360], test.labels)
    assert not inputs[360:].any()
    assert not mask[360:].any()


def test_evaluation_may_stop_early_and_can_be_left(one_device):
    split = _numbered(30)
    for limit, expected in ((0, 8), (8, 8), (99, 8)):
        assert len(list(evaluation_batches(split, 4, one_device, max_batches=limit))) == expected
    batches = list(evaluation_batches(split, 4, one_device, max_batches=3))
    np.testing.assert_array_equal(
        np.concatenate([batch.labels for batch in batches]), np.arange(1, 13)
    )
    batches = evaluation_batches(split, 4, one_device)
    next(batches)
    batches.close()
    assert next(batches, None) is None


def test_sequences_are_batches_as_well(devices8):
    split = load_dataset("text", seed=0, sequence_length=16).eval
    sharding = _sharding(devices8, data=8)
    with contextlib.closing(
        train_batches(split, seed=0, batch_size=8, sharding=sharding)
    ) as batches:
        batch = next(batches)
    chex.assert_trees_all_equal(batch, train_batch(split, 0, batch_size=8, seed=0))
    chex.assert_trees_all_equal_shapes_and_dtypes(batch, abstract_batch(split, 8))
    assert batch.inputs.shape == batch.mask.shape == (8, 16)
    evaluated = list(evaluation_batches(split, 512, sharding))
    assert sum(np.asarray(batch.mask).sum() for batch in evaluated) == split.num_labels


class _Broken(ArraySplit):
    """Has an example that cannot be read."""

    def __getitem__(self, index):
        raise ValueError("config.data.path: the file is gone")


def test_what_goes_wrong_in_a_thread_reaches_the_loop(one_device):
    split = _Broken(np.zeros((5, 1), np.float32), np.zeros(5, np.int32))
    batches = train_batches(split, seed=0, batch_size=2, sharding=one_device)
    with pytest.raises(ValueError, match=r"config\.data\.path: the file is gone"):
        next(batches)


def test_closing_ends_the_threads(one_device):
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("grain")]

    _wait_until(lambda: not threads())
    batches = train_batches(_numbered(30), seed=0, batch_size=2, sharding=one_device)
    next(batches)
    assert threads()
    batches.close()
    batches.close()
    _wait_until(lambda: not threads())
    assert next(batches, None) is None


@pytest.mark.slow
def test_nothing_keeps_a_process_that_has_not_closed_anything():
    code = (
        "import jax\n"
        "from manualpar.data import load_dataset, train_batches\n"
        "split = load_dataset('text', seed=0, sequence_length=64).train\n"
        "sharding = jax.sharding.SingleDeviceSharding(jax.devices('cpu')[0])\n"
        "batches = train_batches(split, seed=0, batch_size=64, sharding=sharding, prefetch=8)\n"
        "next(batches)\n"
        "raise SystemExit(7)\n"
    )
    arguments = [sys.executable, "-W", "error", "-c", code]
    ended = subprocess.run(arguments, timeout=100, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")


NUM_ROWS = 16


def _over_data(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in mesh.axis_names if a != "model")))


class _ShardingInAProcess:
    """A sharding as a process sees it that has some of the devices."""

    def __init__(self, sharding, numbers):
        self._sharding, self._numbers = sharding, numbers

    def addressable_devices_indices_map(self, shape):
        indices = self._sharding.devices_indices_map(shape)
        return {device: indices[device] for device in indices if device.id in self._numbers}


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("neighbours", [True, False])
def test_a_process_reads_the_rows_of_its_devices_once_each(mesh8, num_processes, neighbours):
    sharding, everything = _over_data(mesh8), set()
    for process in range(num_processes):
        per_process = 8 // num_processes
        first, step = (process * per_process, 1) if neighbours else (process, num_processes)
        numbers = {mesh8.devices.flat[first + step * i].id for i in range(per_process)}
        read = rows_of_this_process(_ShardingInAProcess(sharding, numbers), NUM_ROWS).tolist()
        indices = sharding.devices_indices_map((NUM_ROWS,))
        held = {row for d, i in indices.items() if d.id in numbers for row in range(NUM_ROWS)[i[0]]}
        assert read == sorted(held)
        everything |= held
    assert everything == set(range(NUM_ROWS))


def test_rows_that_overlap_are_read_by_each_process_that_holds_them(devices8):
    # Two processes of three devices; the rows in the middle lie on devices of both.
    mesh = jax.sharding.Mesh(np.array(devices8[:6]).reshape(3, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    ids = [device.id for device in devices8]
    for numbers, rows in ((ids[:3], [0, 1, 2, 3]), (ids[3:6], [2, 3, 4, 5])):
        assert rows_of_this_process(_ShardingInAProcess(sharding, numbers), 6).tolist() == rows


def test_replicated_batches_are_read_whole(devices8):
    mesh = jax.sharding.Mesh(np.array(devices8), ("data",))
    assert len(rows_of_this_process(NamedSharding(mesh, PartitionSpec()), 6)) == 6


def test_rows_land_where_the_sharding_says(mesh8):
    sharding = _over_data(mesh8)
    rows = rows_of_this_process(sharding, NUM_ROWS)
    local = Batch(rows[:, None] * np.ones(3), rows, np.ones(len(rows)))
    batch = place(local, rows, sharding, NUM_ROWS)
    assert batch.inputs.shape == (NUM_ROWS, 3)
    assert {leaf.sharding for leaf in jax.tree.leaves(batch)} == {sharding}
    for shard in batch.labels.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(NUM_ROWS)[shard.index])


def test_sequences_that_are_split_are_read_whole_and_land_in_parts(devices8):
    mesh = jax.sharding.Mesh(np.array(devices8).reshape(2, 2, 2), ("context", "data", "stage"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "context"))
    rows = rows_of_this_process(sharding, 4)
    assert rows.tolist() == [0, 1, 2, 3]
    tokens = np.arange(24).reshape(4, 6)
    batch = place(Batch(tokens, tokens + 1), rows, sharding, 4)
    np.testing.assert_array_equal(batch.labels, tokens + 1)
    for shard in batch.inputs.addressable_shards:
        assert shard.data.shape == (2, 3)
        np.testing.assert_array_equal(shard.data, tokens[shard.index])


def test_rows_of_a_process_land_where_its_devices_hold_them(devices8, monkeypatch):
    """The devices of a process may hold rows that are not next to each other."""
    sharding = _sharding(devices8, data=4, model=2)
    asked = []
    monkeypatch.setattr(
        "jax.make_array_from_callback", lambda shape, sharding, part: asked.append((shape, part))
    )
    rows = np.array([4, 5, 6, 7, 12, 13, 14, 15])
    place(Batch(rows[:, None] * 10, rows), rows, sharding, NUM_ROWS)
    for (shape, part), value in zip(asked, (rows[:, None] * 10, rows), strict=True):
        assert shape == (NUM_ROWS, *value.shape[1:])
        np.testing.assert_array_equal(part((slice(4, 8),)), value[:4])
        np.testing.assert_array_equal(part((slice(12, 16),)), value[4:])
