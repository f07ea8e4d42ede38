"""Parameters from anywhere start a program, a state moves to another, flax gets it back whole."""

import math

import chex
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

from manualpar import Batch, abstract_mesh, fsdp, make_mesh
from manualpar.core.program.state_arrays import leaves_of
from tests.one_device import optimize_on_one_device
from tests.training.checkpoints.worker import Model, loss_fn, make_batch, make_program, train

TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=False),
}


@pytest.fixture(scope="module")
def variables():
    """What plain flax makes, on one device."""
    return jax.device_get(Model(norm=True).init(jax.random.key(9), make_batch(0).inputs))


@pytest.fixture(scope="module")
def normed(devices8):
    """A program that pads, with other collections and an optimizer that keeps parameters."""
    tx = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(7)), OPTIMIZERS["schedule_free"])
    return make_program("fsdp_pad", devices8, model=Model(norm=True), tx=tx)


@pytest.fixture(scope="module")
def trained(normed, variables):
    """A state after two steps."""
    return train(normed, normed.init_from(variables, jax.random.key(5)), range(2))[0]


def unpadded(program, state):
    """Every array of a state on the host, without padding, by name."""
    leaves = leaves_of(program.abstract_state, program.unpadded_state)
    arrays = {}
    for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype) == (leaf.abstract.shape, leaf.abstract.dtype), leaf.name
        assert x.sharding.is_equivalent_to(leaf.abstract.sharding, x.ndim), leaf.name
        array = np.array(jax.random.key_data(x) if leaf.is_key else x)
        inside = tuple(map(slice, leaf.shape))
        arrays[leaf.name] = array[inside].copy()
        array[inside] = 0
        assert not array.any(), f"padding of {leaf.name}"
    return arrays


# Starting.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("fsdp_pad", "schedule_free"),
        pytest.param("zero1_pad", "sam", marks=pytest.mark.slow),
        pytest.param("hsdp", "adam", marks=pytest.mark.slow),
        pytest.param("dp", "schedule_free", marks=pytest.mark.slow),
        pytest.param("zero2", "adam", marks=pytest.mark.slow),
        pytest.param("fsdp", "sam", marks=pytest.mark.slow),
    ],
)
def test_training_from_parameters_is_that_of_plain_optax(devices8, name, optimizer):
    tx, batches = OPTIMIZERS[optimizer], [make_batch(step) for step in range(4)]
    params = jax.device_get(Model().init(jax.random.key(9), batches[0].inputs)["params"])
    before = jax.tree.map(np.copy, params)
    plain = optax.GradientTransformation(tx.init, lambda g, s, p: tx.update(g, s, p))
    expected, _, expected_losses = optimize_on_one_device(
        plain, params, batches, lambda p, b: loss_fn(p, Model().apply, b, None)[0]
    )
    program = make_program(name, devices8, tx=tx)
    state = program.init_from(params)
    made = unpadded(program, state)
    reference = leaves_of(*[jax.eval_shape(tx.init, params)] * 2)
    for leaf, x in zip(reference, jax.tree.leaves(tx.init(params)), strict=True):
        np.testing.assert_array_equal(made[f"opt_state/{leaf.name}"], x, err_msg=leaf.name)
    state, losses = train(program, state, range(4))
    np.testing.assert_allclose(losses, expected_losses, **TOLERANCE)
    chex.assert_trees_all_close(program.whole(state)["params"], expected, **TOLERANCE)
    chex.assert_trees_all_equal(params, before)  # Nothing of ours was written into the source.


@pytest.mark.slow
def test_arrays_from_anywhere_are_the_same_bits(devices8, normed, variables):
    other = make_program("fsdp_pad", devices8[:4], model=Model(norm=True))
    elsewhere = other.init_from(variables).params
    restored = flax.serialization.msgpack_restore(flax.serialization.to_bytes(variables))
    params = dict(variables["params"])
    params["Dense_0"] = freeze(jax.device_put(params["Dense_0"], devices8[3]))
    params["Dense_1"] = elsewhere["Dense_1"]  # Sharded over four devices, and padded for them.
    params["Dense_2"] = {
        name: nn.Partitioned(jnp.asarray(x), (None,) * x.ndim)
        for name, x in params["Dense_2"].items()
    }
    params["Dense_3"] = restored["params"]["Dense_3"]
    rng = jax.random.key(5)
    state = normed.init_from({"params": params, "batch_stats": variables["batch_stats"]}, rng)
    assert elsewhere["Dense_1"]["bias"].shape != variables["params"]["Dense_1"]["bias"].shape
    chex.assert_trees_all_equal(normed.whole(state), variables)
    made = unpadded(normed, state)
    assert made["step"] == 0
    np.testing.assert_array_equal(made["rng"], jax.random.key_data(jax.random.split(rng)[1]))
    train(normed, state, range(1))  # Donates the state, and nothing of the sources.
    chex.assert_trees_all_equal(params["Dense_0"].unfreeze(), variables["params"]["Dense_0"])
    chex.assert_trees_all_equal(other.whole(other.adopt(other.init_from(variables))), variables)


def test_what_is_missing_is_made_as_init_makes_it(normed, variables):
    rng = jax.random.key(3)
    made = normed.init_from({"Dense_0": variables["params"]["Dense_0"]}, rng, missing="init")
    fresh, mixed = unpadded(normed, normed.init(rng)), unpadded(normed, made)
    for name, array in fresh.items():
        if name.startswith("params/Dense_0"):
            array = variables["params"]["Dense_0"][name.split("/")[-1]]
        elif name.startswith("opt_state") and "/Dense_0/" in name:
            continue  # Of these parameters, as other tests show.
        np.testing.assert_array_equal(mixed[name], array, err_msg=name)
    with pytest.raises(ValueError, match=r"params/Dense_1/bias is missing, expected float32\[13\]"):
        normed.init_from({"Dense_0": variables["params"]["Dense_0"]}, rng)
    with pytest.raises(ValueError, match=r"batch_stats/BatchNorm_0/mean is missing"):
        normed.init_from(variables["params"])


def test_no_device_is_given_more_than_its_shards(devices8, normed, variables, monkeypatch):
    sizes, device_put = [], jax.device_put

    def spy(x, device):
        sizes.append(x.size)
        return device_put(x, device)

    sources = jax.device_put(variables, devices8[2])
    rng = jax.random.key(0)
    monkeypatch.setattr(jax, "device_put", spy)
    with jax.transfer_guard_host_to_device("disallow"):  # What is put otherwise is an error.
        state = normed.init_from(sources, rng)
    held = jax.tree.leaves((normed.abstract_state.params, normed.abstract_state.collections))
    shards = [math.prod(x.sharding.shard_shape(x.shape)) for x in held]
    assert sorted(sizes) == sorted(8 * shards)
    kernel = state.params["Dense_1"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 13)}


def test_a_cast_that_loses_precision_is_said(devices8, variables):
    program = make_program("fsdp", devices8, param_dtype="bfloat16")
    params = variables["params"]
    params = {name: params[name] for name in ("Dense_0", "Dense_1", "Dense_2", "Dense_3")}
    with pytest.warns(UserWarning, match=r"Dense_0/bias from float32 to bfloat16; .*and 3 more"):
        state = program.init_from(params)
    expected = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), params)
    chex.assert_trees_all_equal(program.whole(state)["params"], expected)
    chex.assert_trees_all_equal(program.whole(program.init_from(expected))["params"], expected)


def changed(variables, **leaves):
    """The variables with other arrays in the first layer."""
    layer = {**variables["params"]["Dense_0"], **leaves}
    return {**variables, "params": {**variables["params"], "Dense_0": layer}}


def deleted():
    x = jnp.ones(16)
    x.delete()
    return x


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (
            {"bias": np.ones(24, np.float32)},
            r"params/Dense_0/bias is float32\[24\], expected float32\[16\]",
        ),
        ({"bias": np.zeros(24, np.float32)}, r"Dense_0/bias is float32\[24\]"),
        ({"bias": np.ones((1, 16), np.float32)}, r"is float32\[1,16\]"),
        ({"bias": np.ones(16, np.int32)}, r"is int32\[16\], expected float32\[16\]"),
        ({"bias": np.ones(16, np.complex64)}, r"is complex64\[16\]"),
        ({"bias": np.ones(16, bool)}, r"is bool\[16\]"),
        ({"bias": jax.ShapeDtypeStruct((16,), jnp.float32)}, r"Dense_0/bias is abstract"),
        ({"bias": "zeros"}, r"Dense_0/bias is "),
        ({"bias": object()}, r"Dense_0/bias is a object"),
        ({"bias": None}, r"Dense_0/bias is missing"),
        ({"scale": np.ones(3)}, r"params/Dense_0/scale is float64\[3\], expected no such array"),
    ],
)
def test_arrays_that_do_not_fit_are_named(normed, variables, leaves, message):
    with pytest.raises(ValueError, match=f"init_from: the arrays do not fit.*{message}"):
        normed.init_from(changed(variables, **leaves))


def test_other_bad_arguments_are_refused(devices8, normed, variables, trained):
    with pytest.raises(ValueError, match=r"init_from: variables\['params/Dense_0/bias'\] has been"):
        normed.init_from(changed(variables, bias=deleted()))
    with pytest.raises(ValueError, match="missing='ignore', expected 'error' or 'init'"):
        normed.init_from(variables, missing="ignore")
    with pytest.raises(TypeError, match="rng is None with missing='init'"):
        normed.init_from(variables, missing="init")
    with pytest.raises(TypeError, match="init_from: rng is 3, expected one key"):
        normed.init_from(variables, 3)
    with pytest.raises(TypeError, match=r"is a TrainState, .*; pass its params"):
        normed.init_from(trained)
    with pytest.raises(TypeError, match="adopt: state is a dict, expected a TrainState"):
        normed.adopt(variables)
    # What model.init has sown is no part of a state, and does not hinder.
    with pytest.raises(ValueError, match=r"fit the program: other/x is float64\[1\], expected no"):
        normed.init_from({**variables, "other": {"x": np.ones(1)}, "losses": {"x": np.ones(1)}})
    mesh = abstract_mesh({"data": 8}, 8)
    options = {"mesh": mesh, "batch": make_batch(0), "min_weight_size": 1}
    nowhere = fsdp(Model(), optax.sgd(0.1), loss_fn, **options)
    for call in (nowhere.init_from, nowhere.adopt, nowhere.init):
        with pytest.raises(ValueError, match=r"on an abstract mesh.*Build the program on a mesh"):
            call(variables["params"])


# Moving.


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("hsdp", 4),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("zero1_pad", 8), ("dp", 2))),
    ],
)
def test_another_program_takes_a_state_bit_for_bit(devices8, normed, trained, name, count):
    tx = trained.tx
    other = make_program(name, devices8[:count], model=Model(norm=True), tx=tx)
    with pytest.raises(ValueError, match=r"eval_step: .* expected .*program.adopt\(state\)"):
        other.eval_step(trained, make_batch(5))
    moved, before = other.adopt(trained), unpadded(normed, trained)
    after = unpadded(other, moved)
    assert after.keys() == before.keys()
    for leaf, array in before.items():
        np.testing.assert_array_equal(after[leaf], array, err_msg=leaf)
    chex.assert_trees_all_equal(other.whole(moved), normed.whole(trained))
    expected = normed.eval_step(trained, make_batch(5))["loss"][0]
    np.testing.assert_allclose(other.eval_step(moved, make_batch(5))["loss"][0], expected, 1e-6)


def test_what_flax_serializes_is_adopted(normed, trained):
    """Its typed keys used to stop flax."""
    data = flax.serialization.to_bytes(trained)
    read = normed.adopt(flax.serialization.from_bytes(normed.abstract_state, data))
    before, after = unpadded(normed, trained), unpadded(normed, read)
    assert any(name.startswith("opt_state") and "key" in name for name in before)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def test_another_models_state_is_refused(devices8, normed, trained):
    tx = trained.tx
    wider = make_program("fsdp", devices8, model=Model(hidden_size=24, norm=True), tx=tx)
    with pytest.raises(ValueError, match=r"Dense_0/bias is float32\[16\], expected float32\[24\]"):
        wider.adopt(trained)
    with pytest.raises(ValueError, match=r"params/Dense_0/bias is float32\[24\], expected float32"):
        normed.adopt(wider.abstract_state.replace(params=wider.init(jax.random.key(0)).params))
    other = make_program("fsdp", devices8, model=Model(norm=True), tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"opt_state/.* expected no such array.*same model, opti"):
        other.adopt(trained)
    with pytest.raises(ValueError, match=r"train_step: the state is .*program.adopt\(state\)"):
        other.train_step(trained, make_batch(0))
    # On the host padding is zeros, or it is no padding.
    host = flax.serialization.from_bytes(
        normed.abstract_state, flax.serialization.to_bytes(trained)
    )
    host.params["Dense_1"]["bias"] = np.ones(16, np.float32)
    with pytest.raises(ValueError, match=r"params/Dense_1/bias is float32\[16\].*other values"):
        normed.adopt(host)


# Whole.


def test_flax_gets_the_variables_whole(normed, trained):
    batch = make_batch(5)
    variables = normed.whole(trained)
    assert {type(x) for x in jax.tree.leaves(variables)} == {np.ndarray}
    logits = Model(norm=True).apply(variables, batch.inputs, train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).sum()
    np.testing.assert_allclose(loss, normed.eval_step(trained, batch)["loss"][0], rtol=1e-5)


def test_a_state_that_was_donated_is_not_given_away(devices8):
    program = make_program("fsdp", devices8, tx=optax.sgd(0.1))
    state = program.init(jax.random.key(0))
    kept = program.whole(state)
    before = jax.tree.map(np.copy, kept)
    train(program, state, range(1))
    chex.assert_trees_all_equal(kept, before)
    for call in (program.whole, program.adopt):
        with pytest.raises(
            ValueError, match=r"state.step has been deleted.*Use the returned state"
        ):
            call(state)


def test_a_state_that_lies_elsewhere_is_named(devices8, normed, trained):
    params = jax.device_put(normed.whole(trained)["params"], devices8[1])
    got = "params/Dense_0/bias has sharding replicated over 1 device"
    with pytest.raises(ValueError, match=rf"{got}, expected .*'data'.* over 8 devices"):
        normed.eval_step(trained.replace(params={**trained.params, **params}), make_batch(0))


# NNX.


class Net(nnx.Module):
    """A list, statistics and a random stream."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 13, rngs=rngs), nnx.Linear(13, 6, rngs=rngs)])
        self.norm = nnx.BatchNorm(13, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(nnx.relu(self.layers[0](x)))))


def nnx_loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


def test_nnx_models_come_and_go(devices8):
    module, batch = Net(nnx.Rngs(4)), make_batch(0)
    program = fsdp(
        lambda rngs: Net(rngs),
        optax.sgd(0.1),
        nnx_loss_fn,
        mesh=make_mesh({"data": 8}, devices8),
        batch=Batch(*batch.__dict__.values()),
        min_weight_size=0,
        pad=True,
    )
    of_module = program.whole(program.init_from(module))
    chex.assert_trees_all_equal(program.whole(program.init_from(nnx.state(module))), of_module)
    pure = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    start = program.init_from({"params": pure, "batch_stats": of_module["batch_stats"]})
    chex.assert_trees_all_equal(program.whole(start), of_module)
    np.testing.assert_array_equal(
        of_module["params"]["layers"]["0"]["kernel"], module.layers[0].kernel[...]
    )
    state, _ = train(program, start, range(2))
    values = nnx.state(module)
    for tree in program.whole(state).values():
        nnx.replace_by_pure_dict(values, tree)
    nnx.update(module, values)
    module.eval()
    logits = module(jnp.asarray(batch.inputs))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).sum()
    np.testing.assert_allclose(loss, program.eval_step(state, batch)["loss"][0], rtol=1e-5)
