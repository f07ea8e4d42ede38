"""An NNX model trains as its Linen twin does, and sends the same, whatever the strategy."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import abstract_mesh, data_parallel, fsdp, make_mesh
from manualpar.core.model.interface import interface_of
from manualpar.core.model.nnx_model import NNXModel
from manualpar.core.modes.strategy import MODES
from manualpar.inspect import ledger
from manualpar.training.checkpoints import Checkpoints
from tests.core.model.nnx.training import sent, train, with_params
from tests.tiny import BATCHES, STRATEGIES, TOLERANCE, Classifier, build, loss_fn


class NNXClassifier(nnx.Module):
    """`Classifier`, whose call has no argument `train`."""

    def __init__(self, rngs, hidden=32):
        self.input_dense = nnx.Linear(12, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.output_dense = nnx.Linear(hidden, 5, rngs=rngs)

    def __call__(self, x):
        return self.output_dense(self.norm(nn.silu(self.input_dense(x))))


def renamed(params):
    """`Classifier`'s parameters with the names of its twin."""
    names = {"LayerNorm_0": "norm"}
    return {names.get(name, name): tree for name, tree in jax.device_get(params).items()}


def fast_or_slow(name, mode):
    is_fast = (name, mode) in {
        ("fsdp, pad, step", "manual"),
    }
    return pytest.param(name, mode, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "mode"), [fast_or_slow(*pair) for pair in itertools.product(STRATEGIES, MODES)]
)
def test_twins_train_and_send_alike(devices8, name, mode):
    options = {"mode": mode, "num_minibatches": 2, "use_scan": True}
    linen = build(name, devices8, **options)
    program = build(name, devices8, model=NNXClassifier, **options)
    assert sent(program) == sent(linen)
    start = linen.init(jax.random.key(0))
    state = with_params(program, renamed(start.params))
    _, expected = train(linen, start, BATCHES[:3])
    _, losses = train(program, state, BATCHES[:3])
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"gather_dtype": "bfloat16", "reduce_dtype": "float32"},
        {"gather_dtype": "bfloat16", "mode": "auto"},
        {"param_dtype": "bfloat16"},
        {"keep_gathered": ("output_dense",)},
        {"communicate_every": "gather-step"},
    ],
    ids=str,
)
def test_options_do_to_both_the_same(devices8, options):
    linen = build("fsdp", devices8[:4], **options)
    program = build("fsdp", devices8[:4], model=NNXClassifier, **options)
    assert sent(program) == sent(linen)


def test_the_ledgers_are_the_same(devices8):
    linen, program = (ledger(build("fsdp", devices8, model=m)) for m in (None, NNXClassifier))
    assert program.bytes_by_purpose() == linen.bytes_by_purpose()
    assert program.flops_by_phase() == linen.flops_by_phase()
    assert program.memory == linen.memory
    assert program.bytes_by_module() == renamed(linen.bytes_by_module())


# What is initialised.


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_parameters_are_those_of_the_module_on_every_mesh(devices8, num_devices):
    program = build("fsdp", devices8[:num_devices], model=NNXClassifier)
    state = program.init(jax.random.key(7))
    init_rng, _ = jax.random.split(jax.random.key(7))
    make = jax.jit(lambda key: nnx.state(NNXClassifier(rngs=nnx.Rngs(key)), nnx.Param))
    expected = nnx.to_pure_dict(make(init_rng))
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(expected))
    assert state.params["input_dense"]["kernel"].sharding.num_devices == num_devices


def test_an_instance_gives_its_values(devices8):
    model = NNXClassifier(rngs=nnx.Rngs(3))
    state = build("fsdp", devices8, model=model).init(jax.random.key(7))
    expected = nnx.to_pure_dict(nnx.state(model))
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(expected))


@pytest.mark.parametrize(
    "model",
    [
        NNXClassifier,
        functools.partial(NNXClassifier, hidden=32),
        lambda rngs: NNXClassifier(rngs, 32),
        NNXClassifier(nnx.Rngs(0)),
    ],
    ids=["class", "partial", "function", "instance"],
)
def test_whatever_makes_a_module_is_a_model(model):
    mesh = abstract_mesh({"data": 8}, 8)
    program = fsdp(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCHES[0], min_weight_size=16)
    assert program.abstract_state.params["input_dense"]["kernel"].shape == (12, 32)


def test_what_is_no_nnx_model_is_left_alone():
    for model in (Classifier, 3, None, jnp.sin):
        assert interface_of(model) is model
    assert isinstance(interface_of(NNXClassifier), NNXModel)
    assert interface_of(NNXClassifier).module.__class__ is NNXClassifier
    assert not isinstance(interface_of(Classifier()), NNXModel)


@pytest.mark.slow
def test_checkpoints_read_like_the_module(devices8, tmp_path):
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(12, 12, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x[:, :5]

    program = build("fsdp", devices8[:4], model=Layers)
    state, _ = train(program, program.init(jax.random.key(0)), BATCHES[:1])
    paths = [info.path for info, _ in program.parameters]
    assert paths == [f"layers/{i}/{name}" for i in range(2) for name in ("bias", "kernel")]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1, extra={})
    elsewhere = build("fsdp", devices8[:2], model=Layers)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(elsewhere, report=lambda line: None).state
    chex.assert_trees_all_equal(jax.device_get(restored.params), jax.device_get(state.params))


# What is refused.


def test_a_derivative_of_shards_in_a_loss_is_refused(devices8):
    def pulled_back(params, apply_fn, batch, rng):
        y, _ = jax.vjp(lambda p: apply_fn({"params": p}, batch.inputs), params)
        return y.mean(), {"loss": (y.sum(), y.size)}

    options = {"mesh": make_mesh({"data": 4}, devices8[:4]), "batch": BATCHES[0]}
    with pytest.raises(ValueError, match=r"<lambda> at nnx_model_test.py.* is differentiated with"):
        fsdp(NNXClassifier, optax.sgd(0.1), pulled_back, min_weight_size=16, **options)
    data_parallel(NNXClassifier, optax.sgd(0.1), pulled_back, **options)


class PulledBack(nnx.Module):
    def __init__(self, phases, rngs):
        self.dense = nnx.Linear(12, 12, rngs=rngs)
        self.phases = phases

    def __call__(self, x, train):
        if ("train" if train else "eval") not in self.phases:
            return self.dense(x)
        graphdef, state = nnx.split(self.dense)
        y, pullback = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        return y + pullback(jnp.ones_like(y))[1]


@pytest.mark.parametrize(
    ("phases", "options"),
    [
        (("train", "eval"), {}),
        (("train",), {"num_minibatches": 2}),
        (("train",), {"reshard_after_forward": False}),
        (("eval",), {}),
    ],
)
def test_a_derivative_of_shards_in_a_module_is_refused(devices8, phases, options):
    def loss_fn(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs, train=True)
        return (y**2).mean(), {"loss": ((y**2).sum(), jnp.float32(y.size))}

    args = (lambda rngs: PulledBack(phases, rngs)), optax.sgd(0.1), loss_fn
    shared = {"mesh": make_mesh({"data": 4}, devices8[:4]), "batch": BATCHES[0]}
    message = r"\(.*gather_params\) is differentiated within the model or the loss \(jax"
    with pytest.raises(ValueError, match=message):
        fsdp(*args, min_weight_size=16, **options, **shared)
    data_parallel(*args, **shared)
    fsdp(*args, min_weight_size=16, replicate=("dense",), **shared)
