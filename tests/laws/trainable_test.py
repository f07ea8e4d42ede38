"""With `trainable`, other parameters do not change, and cost neither gradients nor state."""

import fnmatch
import itertools
from fractions import Fraction

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import Batch, Pipeline, assert_same_as_one_device, fsdp, make_mesh
from manualpar.core.modes.strategy import MODES
from manualpar.core.trees import path_name
from manualpar.inspect import bytes_by_axes, ledger, parameter_collectives, state_bytes, step_bytes
from manualpar.inspect.memory import step_memory
from manualpar.inspect.state_layout import trained_parts
from manualpar.models import Context, Experts, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.training.replicas import ReplicaSentinel
from tests.inspect import counted_pipeline as pipelined
from tests.inspect import counted_program as formulas
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.tiny import BATCHES, STRATEGIES, TOLERANCE, Classifier, build, loss_fn, own_shapes

GLOBS = ("output_dense/*", "*/bias")


def is_trained(path, globs=GLOBS):
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def make_tx():
    """Returns an optimizer that clips by the norm of all gradients, and decays all weights."""
    steps = optax.sgd(0.5, momentum=0.9)
    return optax.chain(optax.clip_by_global_norm(0.05), optax.add_decayed_weights(0.01), steps)


def some(tx, globs=GLOBS):
    """Returns the optimizer for one device; it gets only the trained parameters."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: is_trained(path_name(path), globs), params
        )

    return optax.multi_transform({True: tx, False: optax.set_to_zero()}, labels)


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Classifier(), some(make_tx()), BATCHES, loss_fn, train=False)


def frozen_arrays(program, params):
    """Returns the frozen parameters on the host."""
    leaves = zip(program.parameters, jax.tree.leaves(params), strict=True)
    return [np.asarray(x) for (info, _), x in leaves if not is_trained(info.path)]


FAST = {("fsdp, pad", "manual")}


@pytest.mark.parametrize(
    ("name", "mode"), [slow_unless(FAST, *pair) for pair in itertools.product(STRATEGIES, MODES)]
)
def test_steps_equal_those_of_one_device(devices8, reference, name, mode):
    options = {"num_minibatches": 2, "use_scan": True, "nonfinite": "skip"}
    program = build(name, devices8, tx=make_tx(), mode=mode, trainable=GLOBS, **options)
    before = frozen_arrays(program, program.init(jax.random.key(0)).params)
    state, losses = train_program(program, BATCHES)
    np.testing.assert_allclose(losses, reference.losses, **TOLERANCE)
    params = own_shapes(program, state.params)
    chex.assert_trees_all_close(params, reference.params, **TOLERANCE)
    ReplicaSentinel(program.mesh, program.layout).check(state)
    assert len(before) == 2
    chex.assert_trees_all_equal(before, frozen_arrays(program, state.params))


# Bytes and memory.


ENDS, LAST = ("Dense_0/*", "Dense_2/*"), ("Dense_2/*",)
IN_BFLOAT16 = {"gather_dtype": "bfloat16", "reduce_dtype": "float32"}
COSTS = list(itertools.product(formulas.BUILDERS, (False, True), (ENDS, LAST)))
FAST_COSTS = [("fsdp-reshard", True, ENDS)]


@pytest.mark.parametrize(
    ("name", "in_bfloat16", "trainable"), [slow_unless(FAST_COSTS, *case) for case in COSTS]
)
def test_frozen_parameters_cost_their_gathers_alone(devices8, name, in_bfloat16, trainable):
    del devices8
    wire = IN_BFLOAT16 if in_bfloat16 else {}
    options = {"num_minibatches": 2, "trainable": trainable, **wire}
    program = formulas.build(name, **options, frozen_dtype="bfloat16")
    found, predicted = formulas.read(program), step_bytes(program)
    sent = bytes_by_axes(found)
    if name.endswith("reshard"):
        # The backward pass does not need the kernels up to the first trained one.
        again = range(1) if "Dense_0/*" in trainable else range(3)
        axes, size = ("data",), program.mesh.shape["data"]
        for kernel in again:
            itemsize = 4 if f"Dense_{kernel}/*" in trainable and not wire else 2
            elements = formulas.KERNELS[kernel]
            predicted[axes] -= 2 * Fraction(elements * itemsize * (size - 1), size)
    assert {axes: x for axes, x in sent.items() if x} == {a: x for a, x in predicted.items() if x}
    reductions = [x for x in found if x.kind in ("reduce_scatter", "all_reduce")]
    whole = formulas.read(formulas.build(name, num_minibatches=2, **wire))
    all_reductions = [x for x in whole if x.kind in ("reduce_scatter", "all_reduce")]
    number, every = (sum(x.times for x in some) for some in (reductions, all_reductions))
    assert 3 * number == len(trainable) * every
    trained = [info for info, _ in program.parameters if info.trainable]
    moments = [x for x in jax.tree.leaves(program.abstract_state.opt_state) if x.ndim]
    assert [x.shape for x in moments] == [info.shape for info in trained] * 2
    infos = {info.path: str(info.dtype) for info, _ in program.parameters}
    assert infos["Dense_1/kernel"] == "bfloat16"
    assert infos["Dense_2/kernel"] == "float32"
    parts = trained_parts(program, found)
    elements = {"trained": 0, "frozen": 0}
    for index, size in enumerate(formulas.KERNELS):
        elements["trained" if f"Dense_{index}/*" in trainable else "frozen"] += size
    assert {name: parts[name]["elements"] for name in elements} == elements
    assert parts["frozen"]["bytes"] == elements["frozen"] * 2 // (program.mesh.shape["data"]) or (
        name in ("dp", "zero1", "zero2")
    )
    assert parts["gradients_sent"] == sum(x.bytes_sent for x in reductions)
    assert step_memory(program).optimizer == state_bytes(program.abstract_state.opt_state)[0]


PIPELINES = [
    ("step", {"data": 4, "stage": 2}, {"chunks": 2}),
    ("reshard", {"data": 2, "stage": 4}, {}),
    ("zero1", {"data": 4, "stage": 2}, {"keep": "inputs"}),
    ("hsdp", {"replica": 2, "data": 2, "stage": 2}, {"chunks": 2, "schedule": "gpipe"}),
]
# Trained are: only the layers; only parameters before or after the layers; a parameter that the
# layers share.
PIPELINED = [("layers/*",), ("table",), ("last/*",), ("shared", "last/*")]


@pytest.mark.parametrize("globs", PIPELINED, ids=str)
@pytest.mark.parametrize(("name", "mesh", "fields"), PIPELINES, ids=str)
@pytest.mark.slow
def test_pipelines_skip_the_gradients_of_what_is_frozen(devices8, globs, name, mesh, fields):
    del devices8
    program = pipelined.build(name, mesh, trainable=globs, **fields)
    for stage in range(mesh["stage"]):
        found = ledger(program, stage=stage)
        sent = bytes_by_axes(parameter_collectives(found.collectives))
        expected = {axes: x for axes, x in found.predicted.items() if x}
        bound = name in ("reshard", "hsdp")
        assert sent.keys() <= expected.keys() | {axes for axes, x in sent.items() if not x}
        for axes, x in expected.items():
            assert sent.get(axes, 0) <= x if bound else sent.get(axes, 0) == x
    tokens = np.arange(pipelined.EXAMPLES) * 7 % pipelined.VOCABULARY
    assert_same_as_one_device(program, Batch(tokens, tokens[::-1].copy()), jax.random.key(0))


# Together with all other kinds of mesh axes.

AXES = [
    ({"data": 2, "model": 2, "expert": 2}, {}),
    ({"data": 2, "context": 2, "stage": 2}, {"num_minibatches": 2}),
    ({"context": 2, "model": 2, "stage": 2}, {"num_minibatches": 2, "frozen_dtype": "bfloat16"}),
    ({"replica": 2, "data": 2, "model": 2}, {"gather_dtype": "bfloat16"}),
    ({"data": 4, "model": 2}, {"mode": "auto"}),
    ({"data": 4, "model": 2}, {"mode": "explicit", "frozen_dtype": "bfloat16"}),
]
ATTENTION, HERE_AND_THERE, HEAD = (
    ("*/attention/*",),
    ("embedding", "*/query/*", "*/down*"),
    ("head",),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options", "globs"),
    [
        *((*axes, HERE_AND_THERE) for axes in AXES),
        *((*axes, HEAD) for axes in AXES[:2]),
        (*AXES[3], ATTENTION),
    ],
    ids=str,
)
def test_some_of_a_transformer_on_every_axis(devices8, sizes, options, globs):
    del devices8
    axis = {name: name if name in sizes else None for name in ("model", "expert", "context")}
    model = Transformer(
        vocab_size=32,
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        mlp_size=32,
        remat="full",
        experts=Experts(4 if "expert" in sizes else 0, capacity_factor=0.0, axis=axis["expert"]),
        split=Split(axis["model"]),
        context=Context(axis["context"]),
    )
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9), dtype=np.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    loss = mixture_of_experts_loss if "expert" in sizes else language_model_loss
    program = fsdp(
        model,
        make_tx(),
        loss,
        mesh=make_mesh(sizes),
        batch=batch,
        axis_name=tuple(name for name in ("replica", "data", "expert") if name in sizes),
        context_axis=axis["context"],
        pipeline=Pipeline() if "stage" in sizes else None,
        min_weight_size=16,
        trainable=globs,
        **options,
    )
    assert_same_as_one_device(program, batch, jax.random.key(0))
    state = program.init(jax.random.key(0))
    before = jax.device_get(jax.tree.leaves(state.params))
    state, _ = program.train_step(state, batch)
    after = jax.device_get(jax.tree.leaves(state.params))
    for (info, _), old, new in zip(program.parameters, before, after, strict=True):
        assert (old == new).all() != is_trained(info.path, globs), info.path
    ReplicaSentinel(program.mesh, program.layout).check(state)


class Coded(nn.Module):
    """A frozen table of integers, and a trained layer after it."""

    @nn.compact
    def __call__(self, x):
        codes = self.param("codes", lambda key: jax.random.randint(key, (16, 32), -9, 9, jnp.int8))
        return nn.Dense(8, use_bias=False, name="head")(x @ (codes.astype(x.dtype) / 9))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_may_be_integers(devices8, mode):
    del devices8
    batch = Batch(np.linspace(0, 1, 16 * 16, dtype=np.float32).reshape(16, 16), None)
    given = {"mesh": make_mesh({"data": 8}), "batch": batch, "min_weight_size": 16, "mode": mode}
    with pytest.raises(ValueError, match="'codes' is int8, expected a floating"):
        fsdp(Coded(), optax.adamw(0.1), formulas.squares, **given)
    options = {**given, "gather_dtype": "bfloat16", "norm_metrics": True}
    program = fsdp(Coded(), optax.adamw(0.1), formulas.squares, trainable=("head/*",), **options)
    if mode == "manual":
        gathers = {str(x.dtype) for x in formulas.read(program) if x.kind == "all_gather"}
        assert gathers == {"int8", "bfloat16"}
    assert_same_as_one_device(program, batch, jax.random.key(0))
    state = program.init(jax.random.key(0))
    before = np.asarray(state.params["codes"])
    assert state.params["codes"].sharding.spec != P()
    state, metrics = program.train_step(state, batch)
    np.testing.assert_array_equal(state.params["codes"], before)
    kernel = np.asarray(state.params["head"]["kernel"])
    np.testing.assert_allclose(metrics["parameter_norm"][0], np.linalg.norm(kernel), rtol=1e-5)
    again = program.init_from(program.whole(state))
    np.testing.assert_array_equal(again.params["codes"], before)


@pytest.mark.slow
def test_optimizers_that_try_other_parameters_try_those_that_are_trained(devices8):
    # The line search of L-BFGS evaluates the loss at other parameters.
    tx = optax.lbfgs(memory_size=3)
    reference = train_with_value(Classifier(), tx, BATCHES[:3])
    program = build("fsdp, pad", devices8, tx=tx, trainable=GLOBS)
    _, losses = train_program(program, BATCHES[:3])
    np.testing.assert_allclose(losses, reference, rtol=1e-4)


def train_with_value(model, tx, batches):
    """Returns the losses on one device with an optimizer that evaluates the loss.

    The optimizer gets only the trained parameters.
    """
    key, _ = jax.random.split(jax.random.key(0))
    params = model.init({"params": key}, batches[0].inputs, train=False)["params"]
    flags = jax.tree_util.tree_map_with_path(lambda path, _: is_trained(path_name(path)), params)
    mine = jax.tree.map(lambda x, flag: x if flag else optax.MaskedNode(), params, flags)
    opt_state, losses = tx.init(mine), []
    for batch in batches:

        def value_fn(mine, batch=batch):
            def choose(flag, x, own):
                return own if flag else x

            whole = jax.tree.map(choose, flags, params, mine)
            return loss_fn(whole, model.apply, batch, jax.random.key(0))[0]

        value, grads = jax.value_and_grad(value_fn)(mine)
        options = {"value": value, "grad": grads, "value_fn": value_fn}
        updates, opt_state = tx.update(grads, opt_state, mine, **options)
        mine = optax.apply_updates(mine, updates)
        losses.append(value)
    return np.asarray(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("fsdp, pad", "manual"), ("zero1", "auto")])
def test_some_of_an_nnx_module(devices8, name, mode):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.input_dense = nnx.Linear(16, 32, rngs=rngs)
            self.output_dense = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.output_dense(jnp.tanh(self.input_dense(x)))

    batch = Batch(np.linspace(0, 1, 64 * 16, dtype=np.float32).reshape(64, 16), None)
    options = {"model": Model, "batch": batch, "loss": formulas.squares, "mode": mode}
    program = build(name, devices8, tx=make_tx(), trainable=("*/bias", "output_dense/*"), **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))
    state = program.init(jax.random.key(0))
    before = jax.device_get(jax.tree.leaves(state.params))
    state, _ = program.train_step(state, batch)
    after = jax.device_get(jax.tree.leaves(state.params))
    changed = [not (old == new).all() for old, new in zip(before, after, strict=True)]
    assert (
        changed == [info.trainable for info, _ in program.parameters] == [True, False, True, True]
    )
