"""Whatever the mesh and however its devices are shared out, each process reads its own rows."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.data.placement import place, rows_of_this_process, rows_to_read
from manualpar.train_state import Batch

NUM_ROWS = 16


def _sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in mesh.axis_names if a != "model")))


def _rows_of_processes(sharding, num_processes: int, share_out) -> tuple[list, list]:
    """(rows that each process reads, rows that its devices hold) if processes share the devices."""
    slices = {process: [] for process in range(num_processes)}
    indices = sharding.devices_indices_map((NUM_ROWS,))
    for number, device in enumerate(sorted(indices, key=lambda device: device.id)):
        slices[share_out(number)].append(indices[device][0])
    held = [
        sorted({row for part in parts for row in range(NUM_ROWS)[part]})
        for parts in slices.values()
    ]
    read = [rows_to_read(slices, process, NUM_ROWS).tolist() for process in slices]
    return read, held


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("neighbours", [True, False])
def test_a_process_reads_the_rows_of_its_devices_once_each(mesh8, num_processes, neighbours):
    def share_out(device: int) -> int:
        return device * num_processes // 8 if neighbours else device % num_processes

    read, held = _rows_of_processes(_sharding(mesh8), num_processes, share_out)
    assert read == held
    assert set().union(*read) == set(range(NUM_ROWS))


def test_rows_that_only_overlap_are_all_read_by_all(devices8):
    # Two processes of three devices; the rows in the middle lie on devices of both.
    mesh = jax.sharding.Mesh(np.array(devices8[:6]).reshape(3, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    indices = list(sharding.devices_indices_map((6,)).values())
    slices = {process: [i[0] for i in indices[3 * process : 3 * process + 3]] for process in (0, 1)}
    for process in slices:
        assert rows_to_read(slices, process, 6).tolist() == list(range(6))


def test_unequal_shares_are_all_read_by_all():
    slices = {0: [slice(0, 2), slice(2, 4)], 1: [slice(4, 6)]}
    assert rows_to_read(slices, 1, 6).tolist() == list(range(6))


def test_replicated_batches_are_read_whole(devices8):
    mesh = jax.sharding.Mesh(np.array(devices8), ("data",))
    slices = {0: [slice(None)] * 4, 1: [slice(None)] * 4}
    assert rows_to_read(slices, 1, 6).tolist() == list(range(6))
    assert len(rows_of_this_process(NamedSharding(mesh, PartitionSpec()), 6)) == 6


def test_rows_land_where_the_sharding_says(mesh8):
    sharding = _sharding(mesh8)
    rows = rows_of_this_process(sharding, NUM_ROWS)
    local = Batch(rows[:, None] * np.ones(3), rows, np.ones(len(rows)))
    batch = place(local, sharding, NUM_ROWS)
    assert batch.inputs.shape == (NUM_ROWS, 3)
    assert {leaf.sharding for leaf in jax.tree.leaves(batch)} == {sharding}
    for shard in batch.labels.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(NUM_ROWS)[shard.index])
