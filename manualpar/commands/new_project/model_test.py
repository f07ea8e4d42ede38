"""On any mesh, a step is the step of plain flax on one device: python -m pytest."""

import jax
import numpy as np
import optax
import pytest
from data import Spiral
from model import SPLIT, Model, loss_fn

from manualpar import (
    Batch,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    make_mesh,
    simulate_devices,
    tensor_parallel,
)

simulate_devices(8)


def make_batch(size: int) -> Batch:
    """Stacks the first examples."""
    spiral = Spiral(size, seed=0)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(spiral[i] for i in range(size)))


@pytest.mark.parametrize("builder", [data_parallel, fsdp])
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "model": 4}])
def test_a_step_is_the_same_as_on_one_device(builder, axes):
    """Compares the loss, each metric, and the gradient of each parameter."""
    model, batch = tensor_parallel(Model(width=16, depth=1), SPLIT), make_batch(32)
    options = {"min_weight_size": 64} if builder is fsdp else {}
    program = builder(model, optax.sgd(0.1), loss_fn, mesh=make_mesh(axes), batch=batch, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))
