"""What a traced loss is cut into, and which losses are refused."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.layers.pipeline.cut import Cut, find_stacked, run_retyped

X, W = jnp.ones((2, 8)), jnp.ones((4, 8, 8))
PARAMS = {"bias": jnp.ones((4, 8)), "kernel": W, "out": jnp.ones((8, 8))}


def layer(x: Any, weights: Any) -> Any:
    return jnp.tanh(x @ weights["kernel"] + weights["bias"][None]), None


def stack(params: Any, x: jax.Array = X, **options: Any) -> jax.Array:
    """The layers, whose scan runs over `bias` and `kernel`."""
    layers = {name: params[name] for name in ("bias", "kernel")}
    y: jax.Array = jax.lax.scan(layer, x, layers, **options)[0]
    return y


def trace(loss: Callable[..., Any], params: Any) -> tuple[jax.extend.core.ClosedJaxpr, list[str]]:
    leaves, structure = jax.tree.flatten(params)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    return jax.make_jaxpr(lambda *args: loss(jax.tree.unflatten(structure, args)))(*leaves), paths


def stacked(loss: Callable[..., Any], params: Any = PARAMS) -> frozenset[str]:
    return find_stacked(*trace(loss, params))


@pytest.mark.parametrize(
    "loss",
    [
        stack,
        jax.jit(stack),
        lambda params: jax.jit(jax.jit(stack))(params) @ params["out"],
        lambda params: stack(
            jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), params)
        ),
        lambda params: stack(jax.tree.map(lambda w: jnp.float32(2) * w / 3, params)),
        lambda params: stack(params | {"kernel": params["kernel"].swapaxes(1, 2)[:, ::-1]}),
        lambda params: stack(params | {"kernel": params["kernel"].reshape(4, 64).reshape(4, 8, 8)}),
        lambda params: stack(params | {"kernel": params["kernel"] + params["bias"][:, None]}),
        lambda params: (params["out"][0].sum() * stack(params), params["kernel"].mean())[0],
    ],
)
def test_parameters_that_the_scan_runs_over(loss: Callable[..., Any]) -> None:
    assert stacked(loss) == {"bias", "kernel"}


def test_a_parameter_that_is_mixed_over_layers_stays_whole() -> None:
    assert stacked(lambda p: stack(p | {"kernel": jax.lax.cumsum(p["kernel"])})) == {"bias"}


def twice(params: Any) -> jax.Array:
    return stack(params, stack(params))


@jax.custom_jvp
def with_own_gradient(kernel: jax.Array) -> jax.Array:
    return stack(PARAMS | {"kernel": kernel})


with_own_gradient.defjvp(lambda primals, tangents: (with_own_gradient(*primals), 0 * X))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda params: X @ params["kernel"][0], "no scan runs over parameters"),
        (lambda params: layer(X, {"kernel": params["out"], "bias": jnp.ones(8)})[0], "no scan"),
        (twice, "2 scans run over parameters, of 4 layers ('bias', 'kernel') and 4 layers"),
        (lambda params: stack(params, reverse=True), "runs backwards, expected reverse=False"),
        (
            lambda params: jax.lax.map(lambda w: w.sum(), params["kernel"]).sum(),
            "passes nothing from layer to layer",
        ),
        (
            lambda params: stack(params).sum() + jnp.square(params["bias"]).sum(),
            "parameter 'bias' has a layer in each entry of dim 0, and is read by reduce_sum",
        ),
        (lambda params: (stack(params), params["kernel"]), "as a result of the loss"),
        (lambda params: jax.checkpoint(stack)(params), "4 layers is inside of a remat2"),
        (
            lambda params: jax.lax.fori_loop(0, 3, lambda _, x: stack(params, x), X),
            "inside of a scan",
        ),
        (
            lambda params: jax.lax.cond(params["out"][0, 0] > 0, stack, lambda _: X, params),
            "inside of a cond",
        ),
        (lambda params: with_own_gradient(params["kernel"]), "inside of a custom_jvp_call"),
    ],
)
def test_losses_that_cannot_be_cut(loss: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^pipeline: ") as error:
        stacked(loss)
    assert words in str(error.value)


def test_pieces_in_chunks_make_the_whole_again() -> None:
    """Tied parameters, a value from before the layers, values of all layers, literals, a print."""
    seen: list[tuple[int, ...]] = []

    def loss(params: Any) -> Any:
        x = jnp.sin(params["out"][:2])

        def with_aside(x: Any, weights: Any) -> Any:
            y = layer(x, weights[0])[0]
            return y, (y * weights[1] + x[0, 0]).sum(0)

        kernel = params["kernel"].reshape(4, 64)[:, ::-1].reshape(4, 8, 8)
        layers = {"bias": 2 * params["bias"], "kernel": kernel + params["bias"][:, None]}
        y, asides = jax.jit(lambda xs: jax.lax.scan(with_aside, x, xs))((layers, jnp.arange(4)))
        jax.debug.callback(lambda x, y: seen.append(x.shape + y.shape), x, y)
        return (y @ params["out"] + x).sum() + asides[1:].sum(), 3.0

    closed, paths = trace(loss, PARAMS)
    cut = Cut(closed, paths)
    assert (cut.length, cut.stacked) == (4, (0, 1))
    assert (cut.prefix.reads, cut.sides.reads, cut.suffix.reads) == ((2,), (), (2,))
    inputs = dict(enumerate(jax.tree.leaves(PARAMS))) | cut.constants
    x, asides = cut.prefix(inputs), []
    for first, last in ((0, 1), (1, 4)):
        mine = inputs | {i: inputs[i][first:last] for i in cut.stacked}
        x, more = cut.run_layers(mine, x, first)
        asides += more
    assert not seen
    results = cut.suffix(inputs, [*x, jnp.concatenate(asides)])
    jax.effects_barrier()
    assert seen == [(2, 8, 2, 8)]
    chex.assert_trees_all_close(tuple(results), loss(PARAMS), rtol=1e-6)


def test_a_result_that_is_a_number_in_the_program_is_an_array() -> None:
    closed, paths = trace(lambda params: (stack(params).sum(), 16), PARAMS)
    cut = Cut(closed, paths)
    inputs = dict(enumerate([*jax.tree.leaves(PARAMS), *closed.consts]))
    loss, count = cut.suffix(inputs, [X])
    chex.assert_trees_all_equal((loss, count), (X.sum(), jnp.int32(16)), strict=True)


# -------------------------------------------------------------------------------------------------
# Programs that were traced for values that are the same on all stages, run on other ones.


REPLAYED = jnp.arange(1.0, 4.0)


def program(number: Any, x: jax.Array) -> Any:
    """A branch, a scan and a search in which some values depend on a number and others do not."""
    chosen = jax.lax.cond(x[0] > 0, lambda: number, lambda: 3.0)

    def step(carry: Any, x: jax.Array) -> Any:
        total, last, steps = carry
        return (total + x * chosen, jnp.float32(7), steps + 1), (last, steps)

    return jax.lax.scan(step, (0.0, number, 0), x), jnp.searchsorted(x, number)


@pytest.mark.usefixtures("devices8")
def test_values_may_vary_over_an_axis_that_the_program_does_not_know() -> None:
    closed = jax.make_jaxpr(program)(jnp.float32(0), REPLAYED)
    structure = jax.tree.structure(jax.eval_shape(program, jnp.float32(0), REPLAYED))

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
    expected = [program(jnp.float32(stage), REPLAYED) for stage in range(2)]
    chex.assert_trees_all_close(
        jax.jit(on_mesh)(REPLAYED), jax.tree.map(lambda *x: jnp.stack(x), *expected)
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
