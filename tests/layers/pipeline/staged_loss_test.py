"""Branches that give a value of one type on all stages."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.layers.pipeline.staged_loss import Activations, KeptInputs, KeptResiduals, branch


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


# -------------------------------------------------------------------------------------------------
# What is kept of a chunk between its forward and its backward pass.


K, B, D = 3, 4, 8  # Layers of the chunk, examples, features.


def chunk(params: Any, inexact: list[Any], fixed: Any) -> Activations:
    """Layers in bfloat16 with a scale that all share, noise and a mask."""
    exact, (mask, key), factor = fixed

    def layer(x: Any, xs: Any) -> Any:
        kernel, key = xs
        y = jnp.tanh(x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)
        y = y * jnp.cos(params["scale"])[None] * jnp.exp(mask)[:, None]
        return x + factor * y * jax.random.uniform(key, (D,))[None], None

    end = jax.lax.scan(layer, inexact[0], (params["kernel"], jax.random.split(key, K)))[0]
    return Activations([end], [exact[0] + 1])


def make_arguments() -> tuple[Any, list[Any], Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"kernel": jax.random.normal(keys[0], (K, D, D)), "scale": jnp.ones(D)}
    mask = jax.random.normal(keys[1], (B,))
    return params, [jax.random.normal(keys[2], (B, D))], ([jnp.int32(3)], [mask, keys[3]], 2.0)


def test_residuals_depend_on_the_input_and_give_the_gradients() -> None:
    args = make_arguments()
    inputs, residuals = KeptInputs(chunk), KeptResiduals(chunk, *args)
    gradient = [jnp.sin(jnp.arange(B * D, dtype=jnp.float32)).reshape(B, D)]
    results = []
    for policy in (inputs, residuals):

        @jax.jit
        def run(args: Any, policy: Any = policy) -> Any:
            y, kept = policy.forward(*args)
            chex.assert_trees_all_equal_shapes_and_dtypes(kept, policy.types)
            return y, policy.backward(*args, kept, gradient)

        results.append(run(args))
    # Sums of numbers as large as 1: where they cancel, what is left differs by their rounding.
    chex.assert_trees_all_close(*results, rtol=1e-6, atol=1e-6)
    assert (inputs.types, inputs.keeps_input) == ([], True)
    # What all examples share is made again: weights and their casts, the scale, noise, the mask.
    assert residuals.types
    assert {t.shape[:2] for t in residuals.types} == {(K, B)}


@pytest.mark.slow
def test_the_backward_pass_reads_no_input_that_residuals_stand_for() -> None:
    params, inexact, fixed = make_arguments()
    policy = KeptResiduals(chunk, params, inexact, fixed)
    kept = policy.forward(params, inexact, fixed)[1]
    assert not policy.keeps_input

    @jax.jit
    def backward(x: jax.Array) -> Any:
        return policy.backward(params, [x], fixed, kept, inexact)

    chex.assert_trees_all_equal(backward(inexact[0]), backward(inexact[0] * jnp.nan))
