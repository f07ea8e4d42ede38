"""Programs that were traced for values that are the same on all stages, run on other ones."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.layers.pipeline.cut import run_retyped

X = jnp.arange(1.0, 4.0)


def program(number: Any, x: jax.Array) -> Any:
    """A branch, a scan and a search in which some values depend on a number and others do not."""
    chosen = jax.lax.cond(x[0] > 0, lambda: number, lambda: 3.0)

    def step(carry: Any, x: jax.Array) -> Any:
        total, last, steps = carry
        return (total + x * chosen, jnp.float32(7), steps + 1), (last, steps)

    return jax.lax.scan(step, (0.0, number, 0), x), jnp.searchsorted(x, number)


@pytest.mark.usefixtures("devices8")
def test_values_may_vary_over_an_axis_that_the_program_does_not_know() -> None:
    closed = jax.make_jaxpr(program)(jnp.float32(0), X)
    structure = jax.tree.structure(jax.eval_shape(program, jnp.float32(0), X))

    def device(x: jax.Array) -> Any:
        number = jax.lax.axis_index("stage").astype(jnp.float32)
        results = jax.tree.unflatten(structure, run_retyped(closed.jaxpr, [number, x]))
        return jax.tree.map(lambda x: x[None], results)

    on_mesh = jax.shard_map(
        device,
        mesh=make_mesh({"data": 4, "stage": 2}),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("stage"),
        check_vma=True,
    )
    expected = [program(jnp.float32(stage), X) for stage in range(2)]
    chex.assert_trees_all_close(
        jax.jit(on_mesh)(X), jax.tree.map(lambda *x: jnp.stack(x), *expected)
    )


@pytest.mark.usefixtures("devices8")
def test_a_loop_of_unknown_length_is_refused() -> None:
    closed = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 1, x))(0)

    def device() -> Any:
        return run_retyped(closed.jaxpr, [jax.lax.axis_index("stage")])

    on_mesh = jax.shard_map(
        device,
        mesh=make_mesh({"data": 4, "stage": 2}),
        in_specs=(),
        out_specs=PartitionSpec("stage"),
        check_vma=True,
    )
    with pytest.raises(ValueError, match=r"differs between layers.* goes into a while .*expected"):
        jax.eval_shape(on_mesh)
