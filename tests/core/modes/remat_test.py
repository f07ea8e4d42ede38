"""Weights are gathered again for the backward pass, and nothing else is computed again."""

import collections
import functools
import math
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, ShardedParameter, fsdp, gather_examples, make_mesh
from manualpar.core.modes.remat import regather_for_backward
from manualpar.core.tracing.jaxprs import scan_sizes
from manualpar.inspect import count_by_kind, trace_collectives
from tests.core.modes.traced_equations import equations
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.tiny import square_loss

WIDTH = 16
POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


class Block(nn.Module):
    dtype: jnp.dtype = jnp.float32
    width: int = WIDTH
    product: Any = None

    @nn.compact
    def __call__(self, x):
        kinds = {"dtype": self.dtype, "use_bias": False, "dot_general": self.product}
        h = jnp.sin(nn.Dense(4 * self.width, **kinds)(x))
        return x + nn.Dense(self.width, **kinds)(h)


class Stack(nn.Module):
    remat: str = "none"
    scan: bool = False
    depth: int = 3
    dtype: jnp.dtype = jnp.float32
    width: int = WIDTH
    product: Any = None

    @nn.compact
    def __call__(self, x):
        policy = POLICIES[self.remat]
        block = nn.remat(Block, policy=policy) if self.remat != "none" else Block
        if not self.scan:
            for _ in range(self.depth):
                x = block(self.dtype, self.width, self.product)(x)
            return x

        class Body(nn.Module):
            dtype: jnp.dtype
            width: int
            product: Any

            @nn.compact
            def __call__(self, x, _):
                return block(self.dtype, self.width, self.product, name="block")(x), None

        stack = nn.scan(
            Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
        )
        return stack(self.dtype, self.width, self.product)(x, None)[0]


class Tied(nn.Module):
    """A table read before and after rematerialised blocks, and a loop inside of a function."""

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.lecun_normal(), (WIDTH, 4 * WIDTH))
        x = jnp.tanh(x @ table) @ table.T
        x = nn.remat(Block)()(x)
        x = nn.jit(Stack)(scan=True, name="stack")(x)
        return jnp.tanh(x @ table) @ table.T


def make_batch(size=16, width=WIDTH):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, width)).astype(np.float32)
    return Batch(inputs=x, labels=np.roll(x, 1, axis=1))


def build(model, devices, *, batch=None, **kwargs):
    batch = make_batch() if batch is None else batch
    mesh = make_mesh({"data": -1}, devices)
    return fsdp(
        model, optax.sgd(0.1), square_loss, mesh=mesh, batch=batch, min_weight_size=1, **kwargs
    )


def count_primitives(program):
    """How often each primitive is written in the step; once for all iterations of a loop."""
    return collections.Counter(eqn.primitive.name for eqn in equations(program))


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_gathered_again_and_no_more_than_the_user_says(devices8, remat, scan, dtype):
    model = Stack(remat, scan, dtype=dtype)
    keep = count_primitives(build(model, devices8, reshard_after_forward=False))
    again = count_primitives(build(model, devices8))
    kernels = 2 if scan else 6
    # A full remat needs the whole forward pass again, the last product excepted. Otherwise weights
    # are needed for the gradient with respect to x, which nobody takes in the first layer.
    regathered = kernels if scan or remat == "full" else kernels - 1
    assert keep["all_gather"] == kernels + (regathered if remat != "none" else 0)
    assert again["all_gather"] == kernels + regathered
    assert again["reduce_scatter"] == keep["reduce_scatter"] == kernels
    for primitive in ("sin", "cos", "dot_general"):
        assert again[primitive] == keep[primitive], primitive


def residual_shapes(function, params, x):
    """The shapes and dtypes that the backward pass of a function is handed."""
    _, vjp = jax.vjp(function, params, x)
    return collections.Counter(f"{v.dtype}{list(v.shape)}" for v in jax.tree.leaves(vjp))


@pytest.mark.parametrize("where", ["outside", "in a branch", "behind a barrier"])
def test_residuals_are_those_of_autodiff_without_the_gathered_weights(devices8, where):
    mesh = make_mesh({"data": -1}, devices8)
    found = {}

    def part(kernel, x):
        def loss(kernel, x):
            weight = ShardedParameter(kernel, (None, "data"), gather_axes=("data",)).unbox()

            def product(weight):
                weight = weight.astype(jnp.bfloat16).astype(jnp.float32)
                return jnp.sin(jnp.sin(x) @ weight.T.T).sum()

            if where == "behind a barrier":
                copy, more = jax.lax.optimization_barrier((weight, jnp.sin(jnp.cos(x))))
                return product(weight) + product(copy) + more.sum()
            if where == "outside":
                return product(weight)
            return jax.lax.cond(x[0, 0] > 0, product, lambda _: jnp.cos(x).sum(), weight)

        found["plain"] = residual_shapes(loss, kernel, x)
        found["again"] = residual_shapes(regather_for_backward(loss), kernel, x)
        return x

    run = jax.shard_map(
        part, mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P("data"), check_vma=True
    )
    jax.eval_shape(run, jnp.ones((16, 64)), jnp.ones((32, 16)))
    dropped = found["plain"] - found["again"]
    weights = {"float32[16, 64]", "bfloat16[16, 64]", "float32[64, 16]"}
    assert dropped
    assert set(dropped) <= weights
    assert weights.isdisjoint(found["again"])
    assert set(found["again"] - found["plain"]) == {"float32[16, 8]"}  # The shard, to gather.


def test_stablehlo_gathers_in_the_backward_loop(devices8):
    loops = {}
    for again, count in ((False, 2), (True, 4)):
        program = build(Stack(scan=True), devices8, reshard_after_forward=again)
        text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
        assert text.count('"stablehlo.all_gather"') == count
        loops[again] = text.count("stablehlo.while")
    assert loops[True] == loops[False]  # None that gathers all the layers first.


def int8_of_channels(weight):
    """Codes with one scale for each column; the derivative of the scale is not stopped."""
    scale = jnp.max(jnp.abs(weight), axis=0, keepdims=True) / 127.5
    scale = jnp.where(scale < 1e-19, jnp.ones_like(scale), scale)
    return jnp.round(weight / scale).astype(jnp.int8), scale


def float8_of_tensor(weight):
    """Codes with one scale, which is spread over all elements and clips, as in flax."""
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(weight))).reshape(1) / 448
    spread = jnp.broadcast_to(scale, weight.shape)
    return jnp.clip(weight / spread, -448, 448).astype(jnp.float8_e4m3fn), spread


def float8_of_tiles(weight):
    """Codes with one power of two for each 16 rows of a column."""
    tiles = weight.reshape(-1, 16, weight.shape[1])
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(tiles), axis=1, keepdims=True) / 448)))
    codes = (tiles / scale).astype(jnp.float8_e4m3fn)
    return codes.reshape(weight.shape), jnp.repeat(scale, 16, axis=1).reshape(weight.shape)


@functools.cache
def quantized_product(quantize):
    """Multiplies with the codes; the backward pass gets the codes, like that of a library."""

    @jax.custom_vjp
    def product(x, weight):
        return forward(x, weight)[0]

    def forward(x, weight):
        codes, scale = quantize(weight)
        return x @ (codes.astype(x.dtype) * scale), (x, codes, scale)

    def backward(residuals, g):
        x, codes, scale = residuals
        return g @ (codes.astype(x.dtype) * scale).T, x.T @ g

    product.defvjp(forward, backward)
    return lambda x, weight, dims, **kwargs: product(x, weight)


@pytest.mark.parametrize("quantize", [int8_of_channels, float8_of_tensor, float8_of_tiles])
def test_a_quantized_weight_is_quantized_again_from_saved_scales(devices8, quantize):
    saved, counts = {}, {}
    for product in (None, quantized_product(quantize)):
        model = Stack(scan=True, width=64, product=product)
        program = build(model, devices8, batch=make_batch(width=64))
        found = list(equations(program))
        forward = next(eqn for eqn in found if eqn.primitive.name == "scan")
        kept = forward.outvars[scan_sizes(forward.params)[1] :]
        saved[product] = collections.Counter((v.aval.dtype, v.aval.shape) for v in kept)
        counts[product] = collections.Counter(eqn.primitive.name for eqn in found)
    exact, quantized = saved
    assert counts[quantized]["all_gather"] == counts[exact]["all_gather"] == 4
    assert counts[quantized]["reduce_max"] == 2  # No pass over a gathered weight to find a scale.
    assert saved[exact] <= saved[quantized]
    more = saved[quantized] - saved[exact]
    assert more.total() > 0
    assert all(math.prod(shape[1:]) * 16 <= 64 * 4 * 64 for _, shape in more)


def test_a_weight_that_is_quantized_again_has_the_same_codes(devices8):
    product = quantized_product(float8_of_tensor)

    def part(kernel, x):
        def loss(kernel, x):
            weight = ShardedParameter(kernel, (None, "data"), gather_axes=("data",)).unbox()
            return jnp.sin(product(jnp.sin(x), weight, None)).sum()

        return [jax.grad(f, (0, 1))(kernel, x) for f in (loss, regather_for_backward(loss))]

    run = jax.shard_map(
        part,
        mesh=make_mesh({"data": -1}, devices8),
        in_specs=(P(None, "data"), P("data")),
        out_specs=[(P(None, "data"), P("data"))] * 2,
        check_vma=True,
    )
    plain, again = jax.jit(run)(make_batch(width=64).inputs, make_batch(32).inputs)
    chex.assert_trees_all_close(again, plain, rtol=1e-6)


@pytest.mark.optimized
def test_a_scanned_model_holds_no_more_than_a_layer_gathered(devices8):
    depth, width = 8, 128
    temporaries = {}
    for again in (False, True):
        program = build(
            Stack(scan=True, depth=depth, width=width),
            devices8,
            batch=make_batch(width=width),
            reshard_after_forward=again,
        )
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        temporaries[again] = lowered.compile().memory_analysis().temp_size_in_bytes
    layer = 2 * width * 4 * width * 4
    assert temporaries[False] > depth * layer
    assert temporaries[False] - temporaries[True] > (depth - 2) * layer


@pytest.mark.parametrize(
    ("model", "use_scan"),
    [
        pytest.param(Tied(), False, marks=pytest.mark.slow),
        (Stack("everything", scan=True), True),
        pytest.param(Stack("dots", depth=2), True, marks=pytest.mark.slow),
        pytest.param(Stack("full", scan=True), False, marks=pytest.mark.slow),
    ],
    ids=["tied", "everything", "dots", "full"],
)
def test_training_is_the_same(devices8, model, use_scan):
    batches = [make_batch()] * 3
    expected = train_on_one_device(model, optax.sgd(0.1), batches, square_loss)
    program = build(model, devices8, num_minibatches=2, use_scan=use_scan)
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), expected.params, rtol=1e-4, atol=1e-6)


class AsLarge(nn.Module):
    """An activation with as many elements as the weight, gathered and cast like one."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, use_bias=False)(jnp.sin(x))  # 16 examples of 16 features.
        x = gather_examples(x).astype(jnp.bfloat16).T  # Needed for the gradient of the product.
        return (x * x).astype(jnp.float32).T


def test_an_activation_of_a_weights_size_is_not_gathered_again(devices8):
    def coupled(params, apply_fn, batch, rng):
        loss = jnp.square(apply_fn({"params": params}, batch.inputs)).mean(-1)
        return loss.mean(), {"loss": (loss.sum(), loss.size)}

    counts = []
    for again in (False, True):
        program = fsdp(
            AsLarge(),
            optax.sgd(0.1),
            coupled,
            mesh=make_mesh({"data": 8}, devices8),
            batch=make_batch(WIDTH),
            min_weight_size=1,
            reshard_after_forward=again,
        )
        counts.append(count_primitives(program))
    primitives = "all_gather", "convert_element_type", "transpose", "sin", "cos"
    # One kernel, whose value no gradient needs: nothing is computed or sent a second time.
    assert [counts[0][p] for p in primitives] == [counts[1][p] for p in primitives]


def test_a_loop_inside_of_a_branch_is_protected_too(devices8):
    """As `nn.cond` makes them: the same weights are read in a loop and in a `jax.checkpoint`."""
    mesh = make_mesh({"data": -1}, devices8)
    counts = {}

    def part(kernels, x, pick):
        def layer(x, kernel):
            weight = ShardedParameter(kernel, (None, "data"), gather_axes=("data",)).unbox()
            return jnp.sin(x @ weight), None

        def loss(kernels, x):
            def loop(x):
                return jax.lax.scan(layer, x, kernels)[0]

            def checkpoint(x):
                return jax.checkpoint(lambda x: layer(x, kernels[0])[0])(x)

            return jax.lax.cond(pick, loop, checkpoint, x).sum()

        grads = {}
        for name, function in (("plain", loss), ("again", regather_for_backward(loss))):
            grads[name] = jax.grad(function)(kernels, x)
            text = str(jax.make_jaxpr(jax.grad(function))(kernels, x))
            counts[name] = text.count("= all_gather["), text.count("= sin ")
        return grads

    run = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(P(None, None, "data"), P("data"), P()),
            out_specs=P(None, None, "data"),
            check_vma=True,
        )
    )
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(3, 16, 16)).astype(np.float32)
    x = rng.normal(size=(16, 16)).astype(np.float32)
    for pick in (True, False):
        grads = run(kernels, x, pick)
        chex.assert_trees_all_close(grads["again"], grads["plain"], rtol=1e-5)
    # Of the two branches' gathers the loop's is written once more; the checkpoint's was already.
    assert counts["again"][0] == counts["plain"][0] + 1
    assert counts["again"][1] == counts["plain"][1]


class Turned(nn.Module):
    """Layers in a loop that all use the same constants, and one by one."""

    scan: bool

    @nn.compact
    def __call__(self, x):
        def layer(module, x, angles):
            return Block(parent=module)(x * jnp.cos(angles)), None

        angles = jnp.linspace(0, 1, WIDTH)[None]
        if not self.scan:
            for index in range(3):
                x = Block(name=f"layer_{index}")(x * jnp.cos(angles))
            return x
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(layer, in_axes=nn.broadcast, **options)(self, x, angles)[0]


class WithHead(nn.Module):
    """Those layers, and a weight that is gathered outside of the loop."""

    scan: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, use_bias=False)(Turned(self.scan)(x))


@pytest.mark.parametrize(
    "mode", [slow_unless({("manual",)}, mode) for mode in ("manual", "auto", "explicit")]
)
def test_a_loop_keeps_what_it_needs_and_copies_nothing(devices8, mode):
    batch = make_batch()
    program = build(WithHead(scan=True), devices8, batch=batch, mode=mode)
    loops = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    assert len(loops) == 2  # Forward and backward.
    assert all(eqn.params["jaxpr"].jaxpr.eqns for eqn in loops)
    expected = train_on_one_device(WithHead(scan=True), optax.sgd(0.1), [batch] * 3, square_loss)
    _, losses = train_program(program, [batch] * 3)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)


def test_a_loop_over_one_device_keeps_no_copy_of_its_weights(devices8):
    program = build(WithHead(scan=True), devices8[:1], batch=make_batch(8))
    forward = next(eqn for eqn in equations(program) if eqn.primitive.name == "scan")
    kept = [x.aval.shape for x in forward.outvars[scan_sizes(forward.params)[1] :]]
    assert kept  # Activations.
    assert {(3, WIDTH, 4 * WIDTH), (3, 4 * WIDTH, WIDTH)}.isdisjoint(kept)


def test_nobody_is_sent_the_gradient_of_a_constant(devices8):
    def sent(scan):
        program = build(WithHead(scan=scan), devices8)
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        return count_by_kind(trace_collectives(traced))

    in_a_loop, one_by_one = sent(True), sent(False)
    # Of the very first kernel the value is needed for no gradient; in a loop none is the first.
    one_by_one["all_gather"] += 1
    assert in_a_loop == one_by_one


class Watching(nn.Module):
    """Keeps a number whose derivative is infinite."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        root = self.variable("stats", "root", jnp.zeros, ())
        if not self.is_initializing():
            root.value = jnp.sqrt(jnp.square(x - x).sum())
        return nn.Dense(WIDTH)(x)


@pytest.mark.parametrize("watches", ["a variable", "a metric"])
def test_what_is_only_watched_has_no_part_in_gradients(devices8, watches):
    """Its derivative may be infinite, and times a gradient of zero that is NaN."""

    def watching_loss(params, apply_fn, batch, rng):
        loss, metrics = square_loss(params, apply_fn, batch, rng)
        if watches == "a metric":
            metrics["root"] = jnp.sqrt(jnp.square(loss - loss)), 1
        return loss, metrics

    program = fsdp(
        Watching() if watches == "a variable" else nn.Dense(WIDTH),
        optax.sgd(0.1),
        watching_loss,
        mesh=make_mesh({"data": 2}, devices8[:2]),
        batch=make_batch(),
        min_weight_size=1,
        sync_collections={"stats": "max"} if watches == "a variable" else {},
    )
    state, _ = program.train_step(program.init(jax.random.key(0)), make_batch())
    chex.assert_tree_all_finite(state.params)
