"""ZeRO scatters the gradients of layers within a loop, and data parallelism averages them there."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, assert_same_as_one_device, data_parallel, make_mesh, zero
from manualpar.core.parameters import placement as shard_rules
from manualpar.core.parameters.placement import ParameterInfo
from manualpar.core.tracing.jaxprs import inner_jaxprs
from manualpar.core.tracing.scopes import REDUCE_SCOPE
from manualpar.inspect import bytes_by_axes, parameter_collectives, step_bytes, trace_collectives
from manualpar.models import Context, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss
from tests.core.model.nnx_stacks import BATCHES, Stack
from tests.tiny import loss_fn, square_loss

LAYERS, SIZE = 4, 32
TOKENS = np.random.default_rng(0).integers(0, 64, (16, 16), dtype=np.int32)
MODEL = Transformer(
    vocab_size=64, num_layers=LAYERS, hidden_size=SIZE, mlp_size=64, num_heads=4, scan_layers=True
)
# Of 3 * 8 + 1 features, no number of devices divides a dim, so states are padded.
UNEVEN = MODEL.clone(mlp_size=25, hidden_size=20, num_heads=2)


class Tower(nn.Module):
    """Layers in a scan, of which a loss may read the parameters."""

    @nn.compact
    def __call__(self, x, train=True):
        layer = nn.scan(
            lambda module, x, _: (x + jnp.tanh(module(x)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return layer(nn.Dense(SIZE, name="layers"), x, None)[0]


def penalized(read):
    """A loss with a penalty on parameters, which `read` makes arrays of."""

    def loss(params, apply_fn, batch, rng):
        loss, metrics = square_loss(params, apply_fn, batch, rng)
        penalty = sum(jnp.square(x).mean() for x in jax.tree.leaves(read(params)))
        return loss + penalty, metrics

    return loss


def build(model, axes, loss=language_model_loss, *, builder=zero, **options):
    batch = Batch(inputs=TOKENS, labels=TOKENS)
    if not isinstance(model, Transformer):
        x = np.random.default_rng(1).normal(size=(16, SIZE)).astype(np.float32)
        batch = Batch(inputs=x, labels=np.roll(x, 1))
    options = {"mesh": make_mesh(axes), **options}
    options |= {"min_weight_size": 0} if builder is zero else {}
    return builder(model, optax.sgd(0.1), loss, batch=batch, **options), batch


@pytest.fixture
def means_in_loops(monkeypatch):
    monkeypatch.setattr(shard_rules, "OVERLAPS_MEANS", {"cpu"})
    monkeypatch.setattr(shard_rules, "MIN_MEAN_SIZE", 0)


def scatters(jaxpr, in_loop=False):
    """Yields for each reduce-scatter whether it is in a loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_scatter":
            yield in_loop
        for _, inner in inner_jaxprs(eqn):
            yield from scatters(inner, in_loop or eqn.primitive.name == "scan")


def means(program):
    """Counts the collectives of means of gradients by how often a step runs each of them."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    found = [
        x for x in parameter_collectives(trace_collectives(traced)) if x.purpose == REDUCE_SCOPE
    ]
    return collections.Counter(x.times for x in found)


def traced_scatters(program, batch):
    state = program.abstract_state
    return list(scatters(program.train_step.trace(state, batch).jaxpr.jaxpr))


CASES = {
    "stage 1": (MODEL, {"data": 8}, {"stage": 1}),
    "two minibatches": (MODEL, {"data": 8}, {"stage": 2, "num_minibatches": 2}),
    "scanned minibatches": (
        MODEL,
        {"data": 8},
        {"stage": 2, "num_minibatches": 2, "use_scan": True},
    ),
    "remat": (MODEL.clone(remat="full"), {"data": 8}, {"stage": 2}),
    "split layers": (MODEL.clone(split=Split("model")), {"data": 4, "model": 2}, {"stage": 2}),
    "padded": (UNEVEN, {"data": 8}, {"stage": 2, "pad": True}),
    "two axes": (MODEL, {"a": 2, "b": 4}, {"axis_name": ("a", "b"), "axis_by_axis": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_scattered_in_a_loop_are_those_of_one_device(case):
    model, axes, options = CASES[case]
    program, batch = build(model, axes, **options)
    assert any(traced_scatters(program, batch))
    assert_same_as_one_device(program, batch, jax.random.key(0))


def test_each_gradient_is_scattered_once():
    for options in ({"stage": 1}, {"stage": 2}):
        program, batch = build(MODEL, {"data": 8}, **options)
        placed = [place for _, place in program.parameters if place.state_names is not None]
        in_loop = [place for place in placed if place.in_loop]
        found = traced_scatters(program, batch)
        assert len(found) == len(placed)
        assert sum(found) == len(in_loop) > 0


def test_several_minibatches_of_stage_1_are_scattered_once_after_all():
    program, batch = build(MODEL, {"data": 8}, stage=1, num_minibatches=2)
    assert not any(traced_scatters(program, batch))


@pytest.mark.slow
def test_a_device_never_holds_the_gradients_of_all_layers():
    deep = MODEL.clone(num_layers=16, vocab_size=16)
    sizes = {}
    for name, stage in {"in": 2, "after": 1}.items():
        program, batch = build(deep, {"data": 8}, stage=stage, num_minibatches=2)
        compiled = program.train_step.lower(program.abstract_state, batch).compile()
        sizes[name] = compiled.memory_analysis().temp_size_in_bytes
    layers = 16 * 4 * (4 * SIZE * SIZE + 3 * 64 * SIZE)
    assert sizes["after"] - sizes["in"] > layers / 2


@pytest.mark.parametrize("read", [lambda params: params, nn.unbox], ids=["leaves", "unboxed"])
def test_a_loss_may_read_the_parameters(read):
    program, batch = build(Tower(), {"data": 8}, penalized(read), stage=2)
    # Leaves of boxes are no parameters, so gradients are scattered after the loop.
    assert any(traced_scatters(program, batch)) == (read is nn.unbox)
    assert_same_as_one_device(program, batch, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["nnx.scan", "jax.lax.scan"])
def test_nnx_models_scatter_after_the_loop(devices8, loop):
    program = zero(
        functools.partial(Stack, loop=loop),
        optax.sgd(0.1),
        loss_fn,
        stage=2,
        mesh=make_mesh({"data": 8}, devices8),
        batch=BATCHES[0],
        min_weight_size=16,
    )
    found = traced_scatters(program, BATCHES[0])
    assert found
    assert not any(found)
    assert_same_as_one_device(program, BATCHES[0], jax.random.key(0))


AVERAGED = {
    "plain": (MODEL, {"data": 8}, {}),
    "remat": (MODEL.clone(remat="full"), {"data": 8}, {}),
    "split layers": (MODEL.clone(split=Split("model")), {"data": 4, "model": 2}, {}),
    "context": (
        MODEL.clone(context=Context("context")),
        {"data": 4, "context": 2},
        {"context_axis": "context"},
    ),
    "two axes": (MODEL, {"a": 2, "b": 4}, {"axis_name": ("a", "b")}),
    "bfloat16": (MODEL, {"data": 8}, {"gather_dtype": "bfloat16", "reduce_dtype": "float32"}),
    "codes": (
        MODEL.clone(hidden_size=64),
        {"data": 2},
        {"reduce_code": "int8", "stochastic_rounding": True},
    ),
    "frozen": (MODEL, {"data": 8}, {"trainable": ("*/mlp/*", "head")}),
}


@pytest.mark.usefixtures("means_in_loops")
@pytest.mark.slow
@pytest.mark.parametrize("case", AVERAGED)
def test_gradients_averaged_in_a_loop_are_those_of_one_device(case):
    model, axes, options = AVERAGED[case]
    program, batch = build(model, axes, builder=data_parallel, **options)
    placed = [place for _, place in program.parameters if place.trainable]
    assert means(program)[LAYERS] >= sum(place.in_loop for place in placed) > 0
    if case not in ("split layers", "context"):  # These also send activations.
        traced = program.train_step.trace(program.abstract_state, batch)
        assert bytes_by_axes(parameter_collectives(trace_collectives(traced))) == step_bytes(
            program
        )
    rtol = 0.05 if case == "codes" else None
    assert_same_as_one_device(program, batch, jax.random.key(0), rtol=rtol)


@pytest.mark.parametrize(
    ("platform", "shape", "expected"),
    [("gpu", (4, 512, 512), True), ("gpu", (4, 512, 511), False), ("tpu", (4, 512, 512), False)],
)
def test_gpus_average_large_layers_in_a_loop(platform, shape, expected):
    names, loops = (None,) * 3, frozenset({0})
    info = ParameterInfo("kernel", shape, jnp.float32, names, loops, platform=platform)
    place = functools.partial(shard_rules.replicate, info, ("data",))
    assert place(8, mean_in_loop=True).mean_in_loop == expected
    assert not place(1, mean_in_loop=True).mean_in_loop
    assert not place(8).mean_in_loop


@pytest.mark.usefixtures("means_in_loops")
def test_only_large_layers_are_averaged_in_a_loop(monkeypatch):
    monkeypatch.setattr(shard_rules, "MIN_MEAN_SIZE", 64 * SIZE)
    program, _ = build(MODEL, {"data": 8}, builder=data_parallel)
    averaged = [info for info, place in program.parameters if place.is_averaged_in_loop]
    assert {info.path.split("/")[1] for info in averaged} == {"mlp"}
    assert means(program)[LAYERS] == len(averaged)


@pytest.mark.usefixtures("means_in_loops")
@pytest.mark.parametrize(
    "options",
    [{"num_minibatches": 2}, {"reduce_code": "int8", "error_feedback": True}, {"mode": "auto"}],
    ids=["minibatches", "feedback", "auto"],
)
def test_gradients_are_averaged_once_a_step_if_a_backward_pass_cannot(options):
    program, _ = build(MODEL, {"data": 8}, builder=data_parallel, **options)
    assert not means(program)[LAYERS]


@pytest.mark.usefixtures("means_in_loops")
@pytest.mark.parametrize("read", [lambda params: params, nn.unbox], ids=["leaves", "unboxed"])
def test_a_loss_may_read_averaged_parameters(read):
    program, batch = build(Tower(), {"data": 8}, penalized(read), builder=data_parallel)
    assert bool(means(program)[LAYERS]) == (read is nn.unbox)
    assert_same_as_one_device(program, batch, jax.random.key(0))
