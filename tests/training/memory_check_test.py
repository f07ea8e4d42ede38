"""What cannot fit into memory is refused before anything is allocated, and names its fields."""

import jax
import numpy as np
import pytest

from configs import fsdp, fsdp_lm
from manualpar.training import memory_check
from manualpar.training.experiment import prepare
from manualpar.training.memory_check import check_fits, least_bytes

HOST = 2**35


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    monkeypatch.setattr(memory_check, "host_memory", lambda: HOST)


def _experiment(module=fsdp, **fields):
    config = module.get_config()
    config.update_from_flattened_dict({"optimizer.num_minibatches": 1, **fields})
    return prepare(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "message"),
    [
        # The batch would fit. The scores of attention, the square of the length, would not.
        (2**20, r"data\.sequence_length is 1048576.* a vocabulary of 257 tokens.*activations"),
        pytest.param(10**9, r"the batches that are read ahead take", marks=pytest.mark.long),
    ],
)
def test_a_sequence_that_cannot_fit_is_refused_and_not_read(length, message):
    with pytest.raises(ValueError, match=message):
        check_fits(_experiment(fsdp_lm, **{"data.sequence_length": length}))


def test_no_less_than_state_and_batch_is_counted():
    experiment = _experiment()
    parts = least_bytes(experiment.program)
    leaves = (experiment.program.abstract_state, experiment.program.abstract_batch)

    held = [
        sum(
            np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )
        for tree in leaves
    ]
    assert [parts["state"], parts["batch"]] == held
    assert parts["activations"] > 0
    check_fits(experiment)


def test_the_limit_is_just_where_the_memory_ends(monkeypatch):
    experiment = _experiment()
    needed = 8 * sum(least_bytes(experiment.program).values())
    monkeypatch.setattr(memory_check, "host_memory", lambda: needed)
    check_fits(experiment)
    monkeypatch.setattr(memory_check, "host_memory", lambda: needed - 8)
    with pytest.raises(ValueError, match="its part of this machine's memory is"):
        check_fits(experiment)
