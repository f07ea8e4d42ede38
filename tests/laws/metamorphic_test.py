"""However a batch is spread over devices and minibatches, its gradient is that of one device.

Hypothesis draws small models, masks, dtypes, meshes, strategies and modes. The optimizer keeps the
gradient in its state and moves nothing, so that what is compared is the gradient itself, and
parameters must come out of the step as they went in.
"""

import functools
import math
import zlib
from typing import Any, NamedTuple

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.modes.strategy import MODES
from tests.one_device import slow_unless
from tests.tiny import keep_gradients

STRATEGIES = {
    "data_parallel": data_parallel,
    "zero1": functools.partial(zero, stage=1),
    "zero2": functools.partial(zero, stage=2),
    "fsdp": fsdp,
    "hsdp": hsdp,
}
DEVICES = (1, 2, 4, 8)
MASKS = ("random", "none", "fractional", "half of the devices", "some minibatches", "one", "empty")
WIDTHS = (5, 8, 3, 16, 24)
BATCH_SIZE, SEQUENCE, OUTPUTS = 32, 4, 3

# By how many roundings, in the coarsest dtype that something is computed or sent in, a gradient may
# be off, as parts of the largest entry of its leaf: in 200 examples 24 and 1.6 were most.
ROUNDINGS = {"float32": 64, "bfloat16": 8}


class Layer(NamedTuple):
    """A dense layer, or a stack of equal ones in an `nn.scan`, as wide as what they are given."""

    width: int = 8
    bias: bool = True
    norm: bool = False
    remat: bool = False
    stack: int = 0
    stack_dim: int = 0


class Example(NamedTuple):
    """All that is drawn; printed where a test fails, it can be pasted into one."""

    strategy: str
    mode: str
    mesh: dict[str, int]
    options: dict[str, Any]
    layers: tuple[Layer, ...] = (Layer(),)
    features: int = 8
    vocabulary: int = 0
    dtype: str = "float32"
    param_dtype: str = "float32"
    mask: str = "none"


class Block(nn.Module):
    layer: Layer
    dtypes: Any

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1] if self.layer.stack else self.layer.width
        y = jnp.tanh(nn.Dense(width, use_bias=self.layer.bias, **self.dtypes)(x))
        y = nn.LayerNorm(**self.dtypes)(y) if self.layer.norm else y
        return x + y if self.layer.stack else y


class Net(nn.Module):
    layers: tuple[Layer, ...]
    vocabulary: int
    dtypes: Any

    @nn.compact
    def __call__(self, x):
        if self.vocabulary:
            x = nn.Embed(self.vocabulary, self.layers[0].width, **self.dtypes)(x).mean(1)
        x = x.astype(self.dtypes["dtype"])
        for layer in self.layers:
            block = (nn.remat(Block) if layer.remat else Block)(layer, self.dtypes)
            if layer.stack:
                scan = nn.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes={"params": layer.stack_dim},
                    split_rngs={"params": True},
                    length=layer.stack,
                )
                x, _ = scan(block, x, None)
            else:
                x = block(x)
        return nn.Dense(OUTPUTS, **self.dtypes)(x).astype(jnp.float32)


def loss_fn(params, apply_fn, batch, rng):
    loss = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).sum(-1)
    if batch.mask is None:
        return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}
    total, count = (loss * batch.mask).sum(), batch.mask.sum()
    # Fractional weights may add up to less than 1, so that jnp.maximum(count, 1) would be wrong.
    return total / jnp.where(count == 0, 1, count), {"loss": (total, count)}


def make_model(example):
    return Net(
        example.layers,
        example.vocabulary,
        nn.FrozenDict(dtype=example.dtype, param_dtype=example.param_dtype),
    )


def make_batch(example):
    rng = np.random.default_rng(0)
    shape = (BATCH_SIZE, SEQUENCE if example.vocabulary else example.features)
    inputs = rng.normal(size=shape).astype(np.float32)
    if example.vocabulary:
        inputs = rng.integers(0, example.vocabulary, shape, dtype=np.int32)
    # Labels far from 0 and different from one example to the next: every weight matters.
    labels = rng.uniform(1, 3, (BATCH_SIZE, OUTPUTS)).astype(np.float32)
    return Batch(inputs=inputs, labels=labels, mask=make_mask(example))


def make_mask(example):
    rng, index = np.random.default_rng(1), np.arange(BATCH_SIZE)
    if example.mask == "some minibatches":  # All examples of every other one, on every device.
        parts = math.prod(example.mesh.values()) * example.options.get("num_minibatches", 1)
        return (index * parts // BATCH_SIZE % 2).astype(np.float32)
    masks = {
        "none": None,
        "random": rng.random(BATCH_SIZE) < 0.6,
        "fractional": rng.uniform(0.01, 1, BATCH_SIZE),
        "half of the devices": index >= BATCH_SIZE // 2,
        "one": index == 5,
        "empty": index < 0,
    }
    mask = masks[example.mask]
    return None if mask is None else mask.astype(np.float32)


def make_params(model, batch):
    """Numbers for the parameters, of which this package has seen nothing."""

    def numbers(path, x):
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        values = np.random.default_rng(seed).uniform(-1, 1, x.shape)
        return (values / math.sqrt(x.shape[-2] if x.ndim > 1 else 2)).astype(x.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), batch.inputs)["params"]
    return jax.tree_util.tree_map_with_path(numbers, shapes)


def one_device(model, params, batch, gather_dtype):
    """The global mean of the loss and its gradient by plain `jax.grad`."""
    weights = np.ones(BATCH_SIZE, np.float32) if batch.mask is None else batch.mask

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params):
        if gather_dtype:
            params = jax.tree.map(lambda x: x.astype(gather_dtype), params)
        out = model.apply({"params": params}, batch.inputs)
        loss = jnp.square(out - batch.labels).sum(-1)
        return (loss * weights).sum() / (weights.sum() or 1)

    return mean_loss(params)


def check_copies(tree):
    """What several devices hold of an array is the same, bit for bit."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        copies = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            name = jax.tree_util.keystr(path)
            assert copies.setdefault(str(shard.index), bits) == bits, f"{name} on {shard.device}"


def check(example):
    """Takes one step and compares its gradient, its loss and what the devices hold."""
    options = dict(example.options)
    model, batch = make_model(example), make_batch(example)
    params = make_params(model, batch)
    if dtype := options.get("param_dtype"):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    loss, expected = one_device(model, params, batch, options.get("gather_dtype"))

    mesh = make_mesh(example.mesh, jax.devices())
    build = STRATEGIES[example.strategy]
    program = build(
        model, keep_gradients(), loss_fn, mesh=mesh, batch=batch, mode=example.mode, **options
    )

    def place(x, like):
        widths = [(0, size - own) for size, own in zip(like.shape, x.shape, strict=True)]
        return jax.device_put(np.pad(x, widths), like.sharding)

    abstract = program.abstract_state
    state = jax.tree.map(
        lambda like: jax.device_put(np.zeros(like.shape, like.dtype), like.sharding),
        abstract.replace(rng=None),
    )
    state = state.replace(
        params=jax.tree.map(place, params, abstract.params),
        rng=jax.device_put(jax.random.key(0), abstract.rng.sharding),
    )
    state, metrics = program.train_step(state, batch)
    check_copies((state, metrics))

    dtypes = {example.dtype, example.param_dtype, *options.values()} & {"bfloat16"}
    dtype = "bfloat16" if dtypes else "float32"
    tolerance = ROUNDINGS[dtype] * float(jnp.finfo(dtype).eps)
    total, count = metrics["loss"]
    np.testing.assert_allclose(np.asarray(total) / (np.asarray(count) or 1), loss, rtol=tolerance)
    weights = np.ones(BATCH_SIZE) if batch.mask is None else batch.mask
    np.testing.assert_allclose(count, weights.sum(), rtol=1e-6)

    largest = max(np.abs(x.astype(np.float32)).max() for x in jax.tree.leaves(expected))

    def compare(path, x, reference, old, new):
        name = jax.tree_util.keystr(path)
        assert x.dtype == old.dtype, name
        own = tuple(map(slice, old.shape))
        for padded, inside in ((x, reference), (new, old)):
            padded = np.array(padded)
            inner = padded[own].astype(np.float32)
            padded[own] = 0
            assert not padded.any(), f"{name}: padding is not zero"
            scale = max(np.abs(reference.astype(np.float32)).max(), 1e-3 * largest)
            bound = 0 if inside is old else tolerance * scale
            off = np.abs(inner - np.asarray(inside, np.float32)).max()
            assert off <= bound, (
                f"{'gradient' if inside is reference else 'parameter'} of {name} is off by {off}, "
                f"allowed are {bound}"
            )

    jax.tree_util.tree_map_with_path(compare, state.opt_state, expected, params, state.params)


# What is drawn.


@st.composite
def meshes(draw, strategy, devices):
    """A mesh and the options that say what its axes are for."""
    first = draw(st.sampled_from([n for n in (2, 4, 1, 8) if n <= devices]))
    sizes = (first, devices // first)
    if strategy == "hsdp":
        names = draw(st.sampled_from([("replica", "data"), ("data", "replica")]))
        return dict(zip(names, sizes, strict=True)), {}
    axis_name = draw(st.sampled_from([("a", "b"), ("b", "a"), "data", "a"]))
    if axis_name == "data":
        return {"data": devices}, {}
    # With "a" alone, devices along "b" do the same work.
    return dict(zip("ab", sizes, strict=True)), {"axis_name": axis_name}


@st.composite
def layers(draw):
    stack = draw(st.sampled_from([0, 0, 2, 3]))
    return Layer(
        width=draw(st.sampled_from(WIDTHS)),
        bias=draw(st.booleans()),
        norm=draw(st.booleans()),
        remat=draw(st.booleans()),
        stack=stack,
        stack_dim=draw(st.integers(0, 1)) if stack else 0,
    )


@st.composite
def dtypes(draw, mode):
    """Fields of an example and options: in half of them bfloat16 somewhere."""
    if not draw(st.booleans()):
        return {}, {}
    low, wide = "bfloat16", "float32"
    fields = [({"dtype": low}, {}), ({"param_dtype": low}, {}), ({}, {"param_dtype": low})]
    fields += [({}, {"gather_dtype": low}), ({"dtype": low}, {"gather_dtype": low})]
    if mode == "manual":
        fields += [({}, {"reduce_dtype": low}), ({}, {"gather_dtype": low, "reduce_dtype": wide})]
    return draw(st.sampled_from(fields))


@st.composite
def examples(draw, strategy, mode, devices, *, depth):
    """An example. The simplest, which hypothesis tries first, is where much can go wrong: it has a
    mask, two minibatches, two axes, and parameters that divide, that are padded, and that are
    replicated.
    """
    mesh, options = draw(meshes(strategy, devices))
    fields, dtype_options = draw(dtypes(mode))
    options |= dtype_options
    options["num_minibatches"] = draw(st.sampled_from([2, 1, 4]))
    # Unrolled, four minibatches take long to compile: that is for the slow test.
    options["use_scan"] = draw(st.booleans()) or (depth == 1 and options["num_minibatches"] == 4)
    if strategy != "data_parallel":
        options["min_weight_size"] = draw(st.sampled_from([4, 30, 0]))
        options["pad"] = draw(st.sampled_from([True, False]))
    if strategy in ("fsdp", "hsdp"):
        options["reshard_after_forward"] = draw(st.sampled_from([True, False]))
        options["communicate_every"] = draw(st.sampled_from(["minibatch", "step"]))
    return Example(
        strategy,
        mode,
        mesh,
        options,
        layers=tuple(draw(st.lists(layers(), min_size=1, max_size=depth))),
        features=draw(st.sampled_from(WIDTHS[::-1])),
        # Where shardings are types, jax wants to be told that of what nn.Embed looks up.
        vocabulary=0 if mode == "explicit" else draw(st.sampled_from([0, 0, 5, 16])),
        mask=draw(st.sampled_from(MASKS)),
        **fields,
    )


# Hypothesis alone would draw some strategies often and others never, so they are dealt out.
PAIRS = [(strategy, mode) for strategy in STRATEGIES for mode in MODES]
OTHER_MODES = [
    (*pair, DEVICES[(i + i // 4) % 4]) for i, pair in enumerate(PAIRS) if pair[1] != "manual"
]


@pytest.mark.parametrize(
    "strategy", [slow_unless({("zero1",), ("fsdp",)}, strategy) for strategy in STRATEGIES]
)
@hypothesis.settings(max_examples=2)
@hypothesis.given(data=st.data())
def test_gradients_are_those_of_one_device(devices8, strategy, data):
    check(data.draw(examples(strategy, "manual", devices=8, depth=1)))


@pytest.mark.parametrize(
    ("strategy", "mode", "devices"),
    [pytest.param(*case, marks=() if case[2] == 8 else pytest.mark.slow) for case in OTHER_MODES],
)
@hypothesis.settings(max_examples=1)
@hypothesis.given(data=st.data())
def test_gradients_are_the_same_in_every_mode(devices8, strategy, mode, devices, data):
    check(data.draw(examples(strategy, mode, devices, depth=1)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(("strategy", "mode"), PAIRS)
@hypothesis.settings(max_examples=2)
@hypothesis.given(data=st.data())
def test_gradients_in_many_examples(devices8, strategy, mode, devices, data):
    check(data.draw(examples(strategy, mode, devices, depth=3)))
