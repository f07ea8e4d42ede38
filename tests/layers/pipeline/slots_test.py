"""Branches that give a value of one type on all stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.layers.pipeline.staged_loss import branch


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize("together", [False, True])
def test_branches_may_vary_over_fewer_axes_than_their_type(together: bool) -> None:
    def device() -> jax.Array:
        stage = jax.lax.axis_index("stage")
        y: jax.Array = branch(
            jnp.bool_(False) if together else stage > 0,
            lambda: jnp.int32(5),
            jax.eval_shape(lambda: stage),
            scope="ticks",
            otherwise=lambda: stage * 2,
            anywhere=jnp.bool_(True) if together else None,
        )
        return y[None]

    on_mesh = jax.shard_map(
        device,
        mesh=make_mesh({"data": 4, "stage": 2}),
        in_specs=(),
        out_specs=PartitionSpec("stage"),
        check_vma=True,
    )
    np.testing.assert_array_equal(jax.jit(on_mesh)(), [0, 2] if together else [0, 5])
