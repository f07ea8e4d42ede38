"""Split dense layers against flax's on one device: initial bits, values and all gradients."""

import collections
import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.parameters.annotations import SplitParameter
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE, TENSOR_SCOPE, purpose_of
from manualpar.inspect import trace_collectives
from manualpar.layers import SplitDense, enter, enter_ring

B, S, D, N, H = 2, 8, 6, 8, 3
FORMS = [(None, "none"), (1, "none"), (1, "ring")]
random_bias = nn.initializers.normal(0.5)


class Block(nn.Module):
    """Products as in attention and in an MLP, each added to the residual stream."""

    sequence_dim: int | None = None
    overlap: str = "none"
    dtype: str | None = None

    @nn.compact
    def __call__(self, x_BSD: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        dense = functools.partial(SplitDense, bias_init=random_bias, dtype=self.dtype)
        column = functools.partial(dense, (D, N, H), (None, "model", None))
        y_BSD = nn.LayerNorm(scale_init=random_bias, bias_init=random_bias)(x_BSD)
        if self.overlap == "ring":
            y_BSD = enter_ring(y_BSD, "model", self.sequence_dim)
        else:
            y_BSD = enter(y_BSD, "model", self.sequence_dim)
        query_BSNH, key_BSNH = column(name="query")(y_BSD), column(name="key")(y_BSD)
        mixed_BSNH = jax.tree.map(lambda q, k: jnp.tanh(q) * k, query_BSNH, key_BSNH)
        row = functools.partial(dense, (N, H, D), ("model", None, None), 2, name="out")
        out = row(sequence_dim=self.sequence_dim, overlap=self.overlap)
        return x_BSD + out(mixed_BSNH), None


def flax_block(params: Any, x_BSD: jax.Array) -> jax.Array:
    """`Block` of flax's own layers."""

    def dense(name: str, features: Any, dims: Any, x: jax.Array) -> jax.Array:
        layer = nn.DenseGeneral(features, axis=dims, bias_init=random_bias)
        return layer.apply({"params": params[name]}, x)

    y_BSD = nn.LayerNorm().apply({"params": params["LayerNorm_0"]}, x_BSD)
    mixed_BSNH = jnp.tanh(dense("query", (N, H), -1, y_BSD)) * dense("key", (N, H), -1, y_BSD)
    return x_BSD + dense("out", D, (-2, -1), mixed_BSNH)


def specs_of(boxed: Any) -> Any:
    """For each leaf the dims that are split over `model`."""

    def spec(leaf: Any) -> P:
        return P(*leaf.names) if isinstance(leaf, SplitParameter) else P()

    return jax.tree.map(spec, boxed, is_leaf=lambda leaf: isinstance(leaf, SplitParameter))


def make_step(model: nn.Module, boxed: Any, size: int, sequence_dim: int | None) -> Any:
    """The loss and all gradients with `size` devices along `model`."""

    def local(params: Any, x: jax.Array, weights: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            y = model.apply({"params": params}, x)[0]
            value = (weights * jnp.sin(y)).sum().astype(jnp.float32)
            return jax.lax.psum(value, ("data",) if sequence_dim is None else ("data", "model"))

        return jax.value_and_grad(loss, (0, 1))(params, x)

    x = P("data", "model") if sequence_dim == 1 else P("data")
    specs = specs_of(boxed)
    # Types are forgotten in a loop; that activations vary over another axis tells that they were.
    mesh = make_mesh({"data": 1, "model": size})
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, x, x),
            out_specs=(P(), (specs, x)),
            check_vma=True,
        )
    )


def make_inputs() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    x_BSD, weights_BSD = (jax.random.normal(key, (B, S, D)) for key in keys)
    return x_BSD, weights_BSD


def check_block(size: int, sequence_dim: int | None, overlap: str) -> None:
    model = Block(sequence_dim, overlap)
    x_BSD, weights_BSD = make_inputs()
    boxed = jax.jit(Block().init)(jax.random.key(0), x_BSD)["params"]
    params = nn.meta.unbox(boxed)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (weights_BSD * jnp.sin(flax_block(params, x))).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x_BSD)
    step = make_step(model, boxed, size, sequence_dim)
    chex.assert_trees_all_close(step(params, x_BSD, weights_BSD), expected, rtol=1e-5, atol=1e-5)
    sent = trace_collectives(step.trace(params, x_BSD, weights_BSD))
    purposes = [(one.kind, purpose_of(one.scope)) for one in sent if one.axes == ("model",)]
    if sequence_dim is None:
        # Forward and backward one for the layer.
        assert purposes == [("all_reduce", TENSOR_SCOPE)] * 2
        return
    ours = collections.Counter(purpose for purpose in purposes if purpose[1])
    # Of the gradient of the bias of `out`.
    assert ours.pop(("all_reduce", TENSOR_SCOPE)) == 1
    if overlap == "ring":
        assert set(ours) <= {("permute", SEQUENCE_SCOPE)}
    else:
        assert ours == {("all_gather", SEQUENCE_SCOPE): 2, ("reduce_scatter", SEQUENCE_SCOPE): 2}


@pytest.mark.parametrize(("sequence_dim", "overlap"), FORMS)
def test_split_layers_are_those_of_one_device(
    devices8: list[jax.Device], sequence_dim: int | None, overlap: str
) -> None:
    del devices8
    check_block(4, sequence_dim, overlap)


@pytest.mark.slow
@pytest.mark.parametrize(("sequence_dim", "overlap"), FORMS)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_split_layers_on_every_size(
    devices8: list[jax.Device], size: int, sequence_dim: int | None, overlap: str
) -> None:
    del devices8
    check_block(size, sequence_dim, overlap)


def in_a_loop(*fields: Any) -> nn.Module:
    """`Block` three times, scanned and rematerialised."""
    layers = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return layers(*fields)


@pytest.mark.parametrize(("sequence_dim", "overlap"), FORMS)
def test_a_loop_may_forget_types(
    devices8: list[jax.Device], sequence_dim: int | None, overlap: str
) -> None:
    del devices8
    x_BSD, weights_BSD = make_inputs()
    boxed = jax.eval_shape(in_a_loop().init, jax.random.key(0), x_BSD)["params"]
    step = make_step(in_a_loop(sequence_dim, overlap), boxed, 4, sequence_dim)
    step.trace(nn.meta.unbox(boxed), x_BSD, weights_BSD)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("sequence_dim", "overlap"), FORMS)
def test_in_a_scanned_and_rematerialised_loop(
    devices8: list[jax.Device], sequence_dim: int | None, overlap: str, dtype: str | None
) -> None:
    del devices8
    x_BSD, weights_BSD = make_inputs()
    boxed = in_a_loop().init(jax.random.key(0), x_BSD)["params"]
    params = nn.meta.unbox(boxed)

    model = in_a_loop(None, "none", dtype)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (weights_BSD * jnp.sin(model.apply({"params": params}, x)[0])).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x_BSD)
    step = make_step(in_a_loop(sequence_dim, overlap, dtype), boxed, 4, sequence_dim)
    tolerance = 1e-5 if dtype is None else 0.1
    got = step(params, x_BSD, weights_BSD)
    chex.assert_trees_all_close(got, expected, rtol=tolerance, atol=tolerance)


def test_initial_bits_are_those_of_flax() -> None:
    x_BSD, _ = make_inputs()
    for names in ((None, "model", None), (None, None, None)):
        split = SplitDense((D, N, H), names).init(jax.random.key(0), x_BSD)["params"]
        assert isinstance(split["kernel"], SplitParameter) == any(names)
        dense = nn.DenseGeneral((N, H)).init(jax.random.key(0), x_BSD)["params"]
        chex.assert_trees_all_equal(nn.meta.unbox(split), dense)


def test_a_kernel_that_is_not_split_may_have_logical_names() -> None:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    layer = SplitDense((4, 2), (None, None), use_bias=False, kernel_init=init)
    params = layer.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    assert params["kernel"].names == ("embed", "mlp")
    assert list(params) == ["kernel"]


COLUMN = SplitDense((4, 8), (None, "model"))
ROW = SplitDense((8, 4), ("model", None))


def test_devices_share_key_heads_that_are_fewer_than_they(devices8: list[jax.Device]) -> None:
    # Of two heads on four devices the first two have the first.
    layer = SplitDense((D, 2, H), (None, "model", None), bias_init=random_bias, shared=True)
    mesh = make_mesh({"model": 4}, devices=devices8[:4])
    x_BSD, _ = make_inputs()
    whole = nn.meta.unbox(layer.init(jax.random.key(0), x_BSD)["params"])

    def init_and_apply(x: jax.Array) -> jax.Array:
        x = enter(x, "model")
        return layer.apply(layer.init(jax.random.key(0), x), x)

    specs = {"in_specs": P(), "out_specs": P(None, None, "model")}
    heads = jax.jit(jax.shard_map(init_and_apply, mesh=mesh, check_vma=True, **specs))(x_BSD)
    expected = layer.apply({"params": whole}, x_BSD)
    chex.assert_trees_all_close(heads, jnp.repeat(expected, 2, axis=2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("contracted", [1, 2])
def test_gradients_of_kernels_are_sums_over_one_dim(contracted: int) -> None:
    # A sum over several, examples and positions, is slow on CPUs.
    layer = SplitDense((D, N, H), (None, None, None), contracted)
    x = jnp.ones((B, S, D, N)[: contracted + 2])
    params = layer.init(jax.random.key(0), x)["params"]
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: layer.apply({"params": p}, x).sum()))(params)
    products = [e for e in all_equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    summed = [
        [e.invars[0].aval.shape[dim] for dim in e.params["dimension_numbers"][0][0]]
        for e in products
    ]
    assert [B * S] in summed
    assert [B, S] not in summed


def test_it_is_hashable() -> None:
    assert hash(COLUMN.clone(name="query", kernel_init=random_bias)) != hash(ROW)
