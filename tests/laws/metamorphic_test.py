"""However devices and minibatches divide a batch, the gradient is the gradient of one device.

Hypothesis draws small models, masks, dtypes, meshes, strategies and modes. The optimizer keeps the
gradient in its state and updates nothing. So the tests compare the gradient itself, and parameters
must not change in the step.
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

# The allowed error of a gradient, in rounding errors of the largest entry of its array. The dtype
# is the coarsest in which anything is computed or sent. In 200 examples the largest errors were 24
# (float32) and 1.6 (bfloat16) rounding errors.
ROUNDINGS = {"float32": 64, "bfloat16": 8}


class Layer(NamedTuple):
    """A dense layer, or a stack of `stack` layers in an `nn.scan` that keep the input's width."""

    width: int = 8
    bias: bool = True
    norm: bool = False
    remat: bool = False
    stack: int = 0
    stack_dim: int = 0


class Example(NamedTuple):
    """Everything that is drawn. A failing test prints its example as code for another test."""

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
    # Fractional weights may add up to less than 1, so jnp.maximum(count, 1) would be wrong.
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
    # Labels are far from 0 and differ between examples, so that every weight changes the gradient.
    labels = rng.uniform(1, 3, (BATCH_SIZE, OUTPUTS)).astype(np.float32)
    return Batch(inputs=inputs, labels=labels, mask=make_mask(example))


def make_mask(example):
    rng, index = np.random.default_rng(1), np.arange(BATCH_SIZE)
    if example.mask == "some minibatches":  # Every second minibatch of each device is masked.
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
    """Makes parameters with NumPy, without code of this package."""

    def numbers(path, x):
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        values = np.random.default_rng(seed).uniform(-1, 1, x.shape)
        return (values / math.sqrt(x.shape[-2] if x.ndim > 1 else 2)).astype(x.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), batch.inputs)["params"]
    return jax.tree_util.tree_map_with_path(numbers, shapes)


def one_device(model, params, batch, gather_dtype):
    """Returns the loss, as a mean over the global batch, and its gradient by plain jax."""
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
    """Asserts that all devices with the same shard of an array have the same bits."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        copies = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            name = jax.tree_util.keystr(path)
            assert copies.setdefault(str(shard.index), bits) == bits, f"{name} on {shard.device}"


def check(example):
    """Takes one step; compares its gradient and loss with one device, and checks all copies."""
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


# Hypothesis' strategies, which draw the parts of an `Example`.


@st.composite
def meshes(draw, strategy, devices):
    """Draws the sizes of the mesh axes, and the option `axis_name` for this mesh."""
    first = draw(st.sampled_from([n for n in (2, 4, 1, 8) if n <= devices]))
    sizes = (first, devices // first)
    if strategy == "hsdp":
        names = draw(st.sampled_from([("replica", "data"), ("data", "replica")]))
        return dict(zip(names, sizes, strict=True)), {}
    axis_name = draw(st.sampled_from([("a", "b"), ("b", "a"), "data", "a"]))
    if axis_name == "data":
        return {"data": devices}, {}
    # If only "a" is a data axis, all devices along "b" compute the same.
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
    """Draws dtypes: fields of an example, and options. Half of the draws use bfloat16."""
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
    """Draws an example.

    The first choices are those with which much can go wrong, because hypothesis tries them first: a
    mask, two minibatches, two axes, and parameters that divide, are padded or are replicated.
    """
    mesh, options = draw(meshes(strategy, devices))
    fields, dtype_options = draw(dtypes(mode))
    options |= dtype_options
    options["num_minibatches"] = draw(st.sampled_from([2, 1, 4]))
    # Four unrolled minibatches take long to compile, so only the slow test (`depth > 1`) has them.
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
        # In mode `explicit` jax refuses nn.Embed, which does not tell the sharding of its result.
        vocabulary=0 if mode == "explicit" else draw(st.sampled_from([0, 0, 5, 16])),
        mask=draw(st.sampled_from(MASKS)),
        **fields,
    )


# Tests go through all strategies and modes, because hypothesis would never draw some of them.
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
