"""The optimizer and schedule of a config are those that optax makes by hand."""

import dataclasses
import functools
import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import optax.contrib
import pytest

from configs import fsdp, fsdp_lm
from manualpar import make_mesh
from manualpar.core.parameters.placement import describe_parameters, matrix_of
from manualpar.models import Classifier
from manualpar.training.config import check_config, complete_config
from manualpar.training.experiment import prepare
from manualpar.training.optimizer import (
    describe_jump,
    make_optimizer,
    make_schedule,
    optimizers,
    weight_decay_mask,
)
from tests.one_device import optimize_on_one_device, train_program

PEAK, DECAY = 0.02, 0.1
OF_OPTAX = {
    name: function
    for module in (optax, optax.contrib)
    for name, function in inspect.getmembers(module, callable)
    if inspect.isfunction(getattr(function, "func", function)) and not name.startswith("_")
}
# What no config can name, though it has a learning rate: why, or what it needs.
NOT_NAMED = {
    "scale_by_learning_rate": "a part",
    "scale_by_madgrad": "a part",
    "scale_by_rprop": "a part",
    "schedule_free": "another optimizer",
}
# The arguments of optimizers that no run can use, and words of the refusal.
REFUSED = {
    "dpsgd": ({"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0}, "batch dimension"),
    "schedule_free_adamw": ({}, "evaluates an average"),
    "schedule_free_sgd": ({}, "evaluates an average"),
    "sophia": ({}, "obj_fn must be provided"),
}
ONLY_ALL = {"dadapt_adamw", "madgrad", "momo", "momo_adam", "novograd", "prodigy"}
ONLY_NUMBERS = {"optimistic_adam", "rprop", "sm3"}
if not hasattr(optax.contrib, "MuonDimensionNumbers"):  # Optax 0.2.5.
    ONLY_NUMBERS |= {"fromage"}
FAST = ("adafactor", "adamw", "lion", "muon", "sgd", "sm3")


def config_with(**groups):
    """`configs/fsdp.py` with other fields: `optimizer={"name": "lion"}`."""
    config = fsdp.get_config()
    with config.unlocked(), config.ignore_type():
        config.optimizer.update({"learning_rate": PEAK, "warmup_steps": 3, "weight_decay": DECAY})
        config.training.num_steps = 13
        for group, fields in groups.items():
            config[group] = config.get(group, ml_collections.ConfigDict())
            for name, value in fields.items():
                is_dict = isinstance(value, dict)
                config[group][name] = ml_collections.ConfigDict(value) if is_dict else value
    config = complete_config(config)
    check_config(config)
    return config


def rates(*, optimizer=None, num_steps=13, **schedule):
    more = {"schedule": schedule} if schedule else {}
    config = config_with(optimizer=optimizer or {}, training={"num_steps": num_steps}, **more)
    return [float(make_schedule(config)(step)) for step in range(num_steps + 1)]


# Schedules.


def test_by_default_it_warms_up_from_the_first_update_and_ends_at_zero():
    found = rates(optimizer={"learning_rate": 0.8})
    np.testing.assert_allclose(found[:4], [0.2, 0.4, 0.6, 0.8], rtol=1e-6)
    assert found[8] == pytest.approx(0.4)  # half-way down
    assert found[13] == pytest.approx(0, abs=1e-7)
    assert np.all(np.diff(found[3:]) < 0)


def test_without_warmup_the_first_update_is_at_the_peak():
    assert rates(optimizer={"warmup_steps": 0})[0] == pytest.approx(PEAK)


def test_a_run_may_end_with_its_warmup():
    found = rates(optimizer={"warmup_steps": 5}, num_steps=5)
    np.testing.assert_allclose(found[:5], PEAK * np.arange(1, 6) / 6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "by_hand"),
    [
        ("constant_schedule", {}, optax.constant_schedule(PEAK)),
        ("linear_schedule", {"end_value": 0}, optax.linear_schedule(PEAK, 0.0, 10)),
        ("linear_schedule", {"end_value": 0, "transition_steps": 4}, None),
        ("cosine_decay_schedule", {"alpha": 0.1}, optax.cosine_decay_schedule(PEAK, 10, 0.1)),
        ("exponential_decay", {"decay_rate": 0.5}, optax.exponential_decay(PEAK, 10, 0.5)),
        (
            "piecewise_constant_schedule",
            {"boundaries_and_scales": {"4": 0.5}},  # As in JSON.
            optax.piecewise_constant_schedule(PEAK, {4: 0.5}),
        ),
    ],
)
def test_a_schedule_begins_after_the_warmup_and_has_the_rest_of_the_run(name, arguments, by_hand):
    found = rates(name=name, arguments=arguments)
    by_hand = by_hand or optax.linear_schedule(PEAK, 0.0, 4)
    np.testing.assert_allclose(found[:3], [PEAK / 4, PEAK / 2, 3 * PEAK / 4], rtol=1e-6)
    np.testing.assert_allclose(found[3:], [by_hand(step) for step in range(11)], rtol=1e-6)


def test_a_schedule_with_a_warmup_of_its_own_has_the_whole_run():
    found = rates(name="warmup_cosine_decay_schedule", arguments={"init_value": 0.001})
    by_hand = optax.warmup_cosine_decay_schedule(0.001, PEAK, 3, 13)
    np.testing.assert_allclose(found, [by_hand(step) for step in range(14)], rtol=1e-6)
    found = rates(optimizer={"warmup_steps": 0}, name="cosine_onecycle_schedule")
    by_hand = optax.cosine_onecycle_schedule(13, PEAK)
    np.testing.assert_allclose(found, [by_hand(step) for step in range(14)], rtol=1e-6)


def test_a_jump_of_the_rate_is_described():
    long, short = (complete_config(fsdp.get_config()).copy_and_resolve_references() for _ in "ab")
    long.training.num_steps, short.training.num_steps = 300, 150
    was, now = (float(make_schedule(config)(100)) for config in (long, short))
    assert now < was
    expected = f"jumps from {was:.3g} to {now:.3g}, because training.num_steps was 300 and is 150"
    assert expected in describe_jump(long, short, 100)
    assert describe_jump(long, long, 100) == ""


# Masks.


def test_biases_and_scales_are_spared_also_in_a_scan():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm()(nn.Dense(4)(x)), None

    scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    params = scanned().init(jax.random.key(0), jnp.ones((2, 4)), None)["params"]
    assert params["Dense_0"]["bias"].ndim == 2
    mask = weight_decay_mask(params)
    assert mask == {
        "Dense_0": {"kernel": True, "bias": False},
        "LayerNorm_0": {"scale": False, "bias": False},
    }
    assert weight_decay_mask({"gain": jnp.ones(3), "table": jnp.ones((3, 2))}) == {
        "gain": False,
        "table": True,
    }


@pytest.mark.parametrize(
    ("globs", "decayed"),
    [
        ((), {"embedding/table", "layer/dense/kernel"}),
        (("*",), {"embedding/table", "layer/dense/kernel", "layer/dense/bias", "gain"}),
        (("*kernel", "gain"), {"layer/dense/kernel", "gain"}),
        (("!embedding/*",), {"layer/dense/kernel"}),
        (("!*", "*"), set()),
        (("*", "!*/bias"), {"embedding/table", "layer/dense/kernel", "gain"}),
    ],
)
def test_globs_name_the_parameters_to_decay_and_those_to_spare(globs, decayed):
    matrix, vector = jnp.ones((3, 2)), jnp.ones(2)
    params = {
        "embedding": {"table": matrix},
        "layer": {"dense": {"kernel": matrix, "bias": vector}},
        "gain": vector,
    }
    mask = jax.tree_util.tree_leaves_with_path(weight_decay_mask(params, globs))
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    assert {keystr(path) for path, is_decayed in mask if is_decayed} == decayed


@pytest.mark.slow
def test_weight_decay_moves_kernels_by_its_share_and_biases_not_at_all():
    params = Classifier(hidden_size=4).init(jax.random.key(0), jnp.ones((1, 3)), train=False)
    params = jax.tree.map(lambda x: x + 1.0, params["params"])
    tx = make_optimizer(config_with(), lambda _: 0.5, described(params))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for layer in params:
        np.testing.assert_allclose(updates[layer]["bias"], 0)
        np.testing.assert_allclose(
            updates[layer]["kernel"], -0.5 * DECAY * params[layer]["kernel"], rtol=1e-6
        )


# Optimizers.

PARAMS = {
    "dense": {"kernel": jnp.sin(jnp.arange(12.0) ** 2).reshape(4, 3), "bias": jnp.ones(3)},
    "heads": {"kernel": jnp.cos(jnp.arange(12.0) ** 2).reshape(2, 3, 2)},
}


def described(params):
    """The parameters as a program describes those of a module that it does not know."""
    infos = describe_parameters(params, {}, make_mesh({"data": 1}), ())
    return jax.tree.map(lambda x: dataclasses.replace(x, matrix=matrix_of(x, None)), infos)


def quadratic(params):
    return sum(jnp.square(x - 0.3).sum() for x in jax.tree.leaves(params))


def three_updates(tx):
    """The parameters after three updates, compiled as one function."""

    @jax.jit
    def run(params):
        state, update = tx.init(params), optax.with_extra_args_support(tx).update
        for _ in range(3):
            value, grad = jax.value_and_grad(quadratic)(params)
            more = {"value": value, "grad": grad, "value_fn": quadratic}
            updates, state = update(grad, state, params, **more)
            params = optax.apply_updates(params, updates)
        return params

    return run(PARAMS)


def assert_equal(tx, by_hand):
    jax.tree.map(np.testing.assert_array_equal, three_updates(tx), three_updates(by_hand))


def decayed(params):
    return {"dense": {"kernel": True, "bias": False}, "heads": {"kernel": True}}


def test_every_optimizer_of_optax_has_a_name_or_a_reason_to_have_none():
    with_rate = {
        name for name, f in OF_OPTAX.items() if "learning_rate" in inspect.signature(f).parameters
    }
    assert {"adamw", "lion", "muon", "nadamw", "prodigy"} <= optimizers().keys()
    assert with_rate - NOT_NAMED.keys() == optimizers().keys()
    assert REFUSED.keys() <= optimizers().keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in optimizers()
        if name not in REFUSED
    ],
)
def test_an_optimizer_is_what_optax_makes(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some are deprecated.
        parameters = inspect.signature(OF_OPTAX[name]).parameters
        fields = {"name": name, "b1": 0.8, "b2": 0.95}
        by_hand = {key: fields[key] for key in ("b1", "b2") if key in parameters}
        if "weight_decay" in parameters:
            by_hand["weight_decay"] = DECAY
            fields |= {"decay_mask": ("*",)} if name in ONLY_ALL else {}
        else:
            fields["weight_decay"] = 0.0
        by_hand |= {key: decayed for key in ("mask", "weight_decay_mask") if key in parameters}
        if name == "muon":
            fields["weight_decay"] = by_hand["weight_decay"] = 0.0
        schedule = {}
        if name in ONLY_NUMBERS:
            fields, schedule = fields | {"warmup_steps": 0}, {"name": "constant_schedule"}
        config = config_with(optimizer=fields, schedule=schedule)
        rate = PEAK if name in ONLY_NUMBERS else make_schedule(config)
        tx = make_optimizer(config, make_schedule(config), described(PARAMS))
        assert_equal(tx, OF_OPTAX[name](rate, **by_hand))


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused(name, devices8):
    arguments, words = REFUSED[name]
    fields = {"name": name, "weight_decay": 0.0, "arguments": arguments}
    with pytest.raises(ValueError, match=f"config.optimizer.name is '{name}'.*{words}"):
        prepare_silently(optimizer=fields)


def prepare_silently(**groups):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some are deprecated.
        prepare(config_with(**groups))


@pytest.mark.parametrize(
    ("fields", "by_hand"),
    [
        (
            {"name": "lion", "arguments": {"b1": 0.7}, "b1": 0.9, "b2": 0.98, "clip_norm": 0.1},
            lambda rate: optax.chain(
                optax.clip_by_global_norm(0.1),
                optax.lion(rate, b1=0.7, b2=0.98, weight_decay=DECAY, mask=decayed),
            ),
        ),
        (
            {"name": "sgd", "weight_decay": 0.0, "arguments": {"momentum": 0.9, "nesterov": True}},
            lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
        ),
        (
            {"name": "prodigy", "decay_mask": ("*",), "arguments": {"betas": [0.8, 0.99]}},
            lambda rate: optax.contrib.prodigy(rate, betas=(0.8, 0.99), weight_decay=DECAY),
        ),
        (
            {"arguments": {"mu_dtype": "bfloat16"}, "b2": 0.95, "decay_mask": ("!heads/*",)},
            lambda rate: optax.adamw(
                rate,
                b2=0.95,
                mu_dtype=jnp.bfloat16,
                weight_decay=DECAY,
                mask={"dense": {"kernel": True, "bias": False}, "heads": {"kernel": False}},
            ),
        ),
        (
            {"name": "lbfgs", "weight_decay": 0.0, "arguments": {"linesearch": None}},
            lambda rate: optax.lbfgs(rate, linesearch=None),
        ),
    ],
)
def test_arguments_reach_the_optimizer(fields, by_hand):
    config = config_with(optimizer=fields)
    schedule = make_schedule(config)
    assert_equal(make_optimizer(config, schedule, described(PARAMS)), by_hand(schedule))


def test_muon_decays_each_marked_parameter_once():
    """Within optax it decays matrices alone, or without a mask whatever is no matrix."""
    config = config_with(optimizer={"name": "muon"}, schedule={"name": "constant_schedule"})

    def update(config):
        tx = make_optimizer(config, make_schedule(config), described(PARAMS))
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        return jax.jit(lambda: tx.update(zeros, tx.init(PARAMS), PARAMS)[0])()

    moved = update(config)
    for layer in PARAMS:
        expected = -PEAK / 4 * DECAY * PARAMS[layer]["kernel"]
        np.testing.assert_allclose(moved[layer]["kernel"], expected, rtol=1e-5)
    np.testing.assert_array_equal(moved["dense"]["bias"], 0)


SCANNED = {"num_layers": 2, "hidden_size": 8, "mlp_size": 16, "num_heads": 2, "num_kv_heads": 1}


@pytest.mark.parametrize("globs", [(), pytest.param(("!*down*",), marks=pytest.mark.slow)])
def test_muon_of_a_scanned_transformer_is_that_of_optax_with_dims_by_hand(globs):
    config = fsdp_lm.get_config()
    config.model.update({"scan_layers": True, "tied_head": False} | SCANNED)
    config.data.sequence_length = 8
    config.optimizer.update({"weight_decay": DECAY, "clip_norm": 0.0})
    with config.unlocked():
        config.optimizer.update({"name": "muon", "matrices": globs})
        config.schedule = ml_collections.ConfigDict({"name": "constant_schedule"})
    config.optimizer.warmup_steps = 0
    program = prepare(config, devices=1).program
    dims = optax.contrib.MuonDimensionNumbers
    kernels = {
        **dict.fromkeys(("query", "key", "value"), dims((1,), (2, 3))),
        "gate": dims(1, 2),
        "up": dims(1, 2),
        "down": None if globs else dims(1, 2),
        "out": dims((1, 2), (3,)),
    }
    params = program.unpadded_state.params
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(program.parameters)))
    params, grads = (
        jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params) for _ in "pg"
    )
    names = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    tree = jax.tree.map_with_path(
        lambda path, _: kernels.get(names(path).split("/")[-2]) if len(path) > 2 else None, params
    )
    assert tree["embedding"] is tree["head"] is None

    @jax.jit
    def updates(params, grads):
        muon = optax.contrib.muon(
            config.optimizer.learning_rate,
            weight_decay=DECAY,
            weight_decay_mask=weight_decay_mask,
            muon_weight_dimension_numbers=tree,
        )
        ours = program.abstract_state.tx
        return [tx.update(grads, tx.init(params), params)[0] for tx in (ours, muon)]

    ours, by_hand = updates(params, grads)
    rate, decays = config.optimizer.learning_rate, weight_decay_mask(params)
    by_hand = jax.tree.map(
        lambda matrix, x, update, is_decayed: (
            update - rate * DECAY * x if matrix is None and is_decayed else update
        ),
        *(tree, params, by_hand, decays),
        is_leaf=lambda x: x is None or isinstance(x, dims),
    )
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(assert_close, ours, by_hand)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "by_hand"),
    [
        (
            {"name": "sgd", "weight_decay": 0.0, "arguments": {"momentum": 0.9}},
            {"name": "linear_schedule", "arguments": {"end_value": 0.0}},
            lambda rate: optax.sgd(rate, momentum=0.9),
        ),
        pytest.param(
            {"name": "lion", "decay_mask": ("output_dense/*",), "b1": 0.9, "b2": 0.99},
            {"name": "constant_schedule"},
            lambda rate: optax.lion(
                rate,
                weight_decay=DECAY,
                mask={
                    layer: {"kernel": layer == "output_dense", "bias": layer == "output_dense"}
                    for layer in ("input_dense", "output_dense")
                },
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"name": "muon", "weight_decay": 0.0},
            {},
            lambda rate: optax.contrib.muon(rate),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_config_trains_with_its_optimizer(devices8, optimizer, schedule, by_hand):
    config = config_with(
        optimizer={"learning_rate": 0.1, "num_minibatches": 1} | optimizer,
        schedule=schedule,
        data={"source": "synthetic", "batch_size": 16},
        model={"hidden_size": 16, "num_layers": 1, "dropout_rate": 0.0, "dtype": "float32"},
    )
    experiment = prepare(config)
    program, task = experiment.program, experiment.task
    key = jax.random.key(1)
    x = np.asarray(jax.random.normal(key, program.abstract_batch.inputs.shape))
    labels = np.arange(16, dtype=np.int32) % 10
    batches = [program.abstract_batch.replace(inputs=x, labels=labels, mask=None)] * 3
    params = program.whole(program.init(jax.random.key(0)))["params"]

    def mean_loss(params, batch):
        return task.loss_fn(params, task.model.apply, batch, jax.random.key(0))[0]

    state, _ = train_program(program, batches)
    expected, _, _ = optimize_on_one_device(
        by_hand(experiment.schedule), params, batches, mean_loss
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5),
        program.whole(state)["params"],
        expected,
    )
