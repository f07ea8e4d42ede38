import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, assert_same_as_one_device, data_parallel, fsdp, make_mesh
from manualpar.core.parameters.placement import strip_boxes
from tests.tiny import mean_loss

BATCH = Batch(
    inputs=jax.ShapeDtypeStruct((16, 8), jnp.float32), labels=jax.ShapeDtypeStruct((16,), jnp.int32)
)


def build(model, loss_fn=mean_loss, axes=("data",), builder=fsdp, **kwargs):
    if builder is fsdp:
        kwargs.setdefault("min_weight_size", 0)
    mesh = make_mesh({"data": 4, "model": 2})
    return builder(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCH, axis_name=axes, **kwargs)


def parameters(model, **kwargs):
    return {info.path: (info, placement) for info, placement in build(model, **kwargs).parameters}


def block(dense):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(dense(8, name="dense")(x)), None

    return Block


@pytest.mark.parametrize("metadata_params", [{}, {nn.PARTITION_NAME: "layers"}])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_dims_that_scan_runs_over_are_found(devices8, axis, metadata_params):
    stack = nn.scan(
        block(nn.Dense),
        variable_axes={"params": axis},
        split_rngs={"params": True},
        length=16,
        metadata_params=metadata_params,
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(stack(name="stack")(x, None)[0])

    found = parameters(Model())
    kernel, placement = found["stack/dense/kernel"]
    assert kernel.shape[axis] == 16
    assert kernel.loop_dims == {axis % 3}
    assert found["stack/dense/bias"][0].loop_dims == {axis % 2}
    assert found["head/kernel"][0].loop_dims == frozenset()
    # 16 layers of 8 x 8: the layers would be the largest dim, but no device may miss one.
    assert placement.names[axis] is None
    assert "data" in placement.names


def test_the_dims_of_nested_loops_are_found(devices8):
    inner = nn.scan(
        block(nn.Dense), variable_axes={"params": 0}, split_rngs={"params": True}, length=16
    )

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return inner(name="inner")(x, None)[0]

    model = nn.vmap(
        Outer, variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=None, axis_size=32
    )()
    kernel, _ = parameters(model)["inner/dense/kernel"]
    assert kernel.shape == (16, 32, 8, 8)
    assert kernel.loop_dims == {0, 1}


def test_annotations_in_a_scan(devices8):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, ("data", "model")))
    stack = nn.scan(
        block(lambda *args, **kwargs: nn.Dense(*args, kernel_init=init, **kwargs)),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=4,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack(name="stack")(x, None)[0]

    for builder in (fsdp, data_parallel):
        kernel, placement = parameters(Model(), axes=("data", "model"), builder=builder)[
            "stack/dense/kernel"
        ]
        assert kernel.loop_dims == {0}
        assert placement.spec == P(None, None, ("data", "model"))


# Reading shards for parameters.


@pytest.mark.parametrize(
    "penalty",
    [
        lambda params: sum(jnp.sum(p**2) for p in jax.tree.leaves(params)),
        optax.tree.norm,
        lambda params: jnp.abs(strip_boxes(params)["kernel"]).sum(),
        lambda params: jax.tree.map(jnp.mean, params)["kernel"],
    ],
    ids=["squares", "norm", "value", "map"],
)
def test_a_penalty_on_shards_is_refused(devices8, penalty):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = mean_loss(params, apply_fn, batch, rng)
        return loss + penalty(params), metrics

    message = r"fsdp: .* in .* at \w+.py:\d+ .*nn.unbox\(params\) for penalties"
    with pytest.raises(ValueError, match=message) as caught:
        build(nn.Dense(8), penalised)
    for leak in ("_Probe", "key<", "Key", "float0"):
        assert leak not in str(caught.value)
    if penalty.__name__ == "tree_norm":
        build(nn.Dense(8), penalised, builder=data_parallel)


def test_a_penalty_on_whole_parameters_is_accepted(devices8):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = mean_loss(params, apply_fn, batch, rng)
        return loss + optax.tree.norm(nn.unbox(params)), metrics

    build(nn.Dense(8), penalised)


def test_a_penalty_on_one_parameter_as_an_array_is_accepted(devices8):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = mean_loss(params, apply_fn, batch, rng)
        return loss + jnp.sum(params["kernel"] ** 2), metrics

    build(nn.Dense(8), penalised)


class Differentiated(nn.Module):
    """Adds its own gradient with respect to its input."""

    vjp_variables: Any = "params"
    normalise: bool = False

    @nn.compact
    def __call__(self, x):
        def call(dense, x):
            return dense(x)

        y, pullback = nn.vjp(call, nn.Dense(8), x, vjp_variables=self.vjp_variables)
        dense = nn.Dense(8, name="head")
        y = y + pullback(jnp.ones_like(y))[1]
        return nn.SpectralNorm(dense)(y, update_stats=False) if self.normalise else dense(y)


def pulled_back(params, apply_fn, batch, rng):
    """A loss with a derivative of the parameters in it."""
    out, _ = jax.vjp(lambda p: apply_fn({"params": p}, batch.inputs), params)
    return out.mean(), {"loss": (out.sum(), out.size)}


def stepped(params, apply_fn, batch, rng):
    """A loss after a step of gradient descent of its own, as in MAML."""
    grads = jax.grad(lambda p: mean_loss(p, apply_fn, batch, rng)[0])(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return mean_loss(params, apply_fn, batch, rng)


@pytest.mark.slow
def test_a_derivative_of_shards_is_refused(devices8):
    why = (
        "model: .* is differentiated within .* with nn.vjp, .*If you need only .* inputs, .*=False"
    )
    here = r"at probe_test.py:\d+"
    message = rf"of 'Dense_0' .*, in call {here} \(return dense\(x\)\): {why}"
    with pytest.raises(ValueError, match=message):
        build(Differentiated())
    with pytest.raises(ValueError, match=rf", in <lambda> {here} .*: {why}"):
        build(nn.Dense(8), pulled_back)
    with pytest.raises(ValueError, match=r"in stepped at .* steps such as p - lr \* g"):
        build(nn.Dense(8), stepped)
    # In training it is whole, but evaluation gathers it where it is used.
    with pytest.raises(ValueError, match=r"is differentiated within .* use replicate="):
        build(Differentiated(), communicate_every="step")


def test_a_derivative_of_whole_parameters_is_accepted(devices8):
    build(Differentiated(), builder=data_parallel)
    build(Differentiated(), mode="auto")
    build(Differentiated(), replicate=("Dense_0",))
    for loss in (pulled_back, stepped):
        build(nn.Dense(8), lambda params, *args, loss=loss: loss(nn.unbox(params), *args))


@pytest.mark.slow
def test_what_the_refusals_advise_trains_as_on_one_device(devices8):
    model = Differentiated(vjp_variables=False, normalise=True)
    with pytest.raises(ValueError, match=r"of 'head' .*SpectralNorm .* replicate=\('head',\)"):
        build(model)
    program = build(model, replicate=("head",))
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    state = program.init(jax.random.key(0))
    params, others = jax.device_get((state.params, state.collections))
    grads = jax.grad(lambda p: model.apply({"params": p, **others}, x).mean())(params)
    state, _ = program.train_step(state, Batch(x, np.zeros(16, np.int32)))
    jax.tree.map(
        lambda p, g, new: np.testing.assert_allclose(new, p - 0.1 * g, rtol=1e-5, atol=1e-7),
        params,
        grads,
        jax.device_get(state.params),
    )


class Critic(nn.Module):
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        return self.dense(8)(jnp.tanh(self.dense(8)(x)))


@pytest.mark.parametrize(
    "dense", [pytest.param(nn.Dense, marks=pytest.mark.slow), nn.remat(nn.Dense)], ids=["", "remat"]
)
def test_a_penalty_on_the_gradient_of_the_inputs_is_that_of_one_device(devices8, dense):
    def penalised(params, apply_fn, batch, rng):
        def total(x):
            return (apply_fn({"params": params}, x) ** 2).sum()

        slopes = jax.grad(total)(batch.inputs)
        losses = (jnp.sqrt((slopes**2).sum(-1)) - 1) ** 2
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    batch = Batch(x, np.zeros(16, np.int32))
    assert_same_as_one_device(build(Critic(dense), penalised), batch, jax.random.key(0))


class Normalised(nn.Module):
    """Changes its parameters behind the module's back."""

    @nn.compact
    def __call__(self, x):
        def normalise(params):
            return jax.tree.map(lambda p: p / (1 + jnp.abs(p).max()), params)

        wrapped = nn.map_variables(
            nn.Dense, "params", trans_in_fn=normalise, init=self.is_initializing()
        )
        return wrapped(8)(x)


class Raw(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(8, name="dense")(x)
        return y + sum(map(jnp.mean, jax.tree.leaves(self.variables["params"]["dense"])))


class Weight(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(8))(x)


@pytest.mark.parametrize("model", [Normalised(), Raw(), Weight()], ids=["map", "raw", "WeightNorm"])
def test_a_model_that_reads_shards_is_refused_and_runs_replicated(devices8, model):
    with pytest.raises(ValueError, match=r"nn.map_variables .* not be sharded: use replicate=\('"):
        build(model)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    batch = Batch(x, np.zeros(16, np.int32))
    for program in (build(model, builder=data_parallel), build(model, min_weight_size=10**6)):
        state = program.init(jax.random.key(0))
        params = jax.device_get(state.params)
        _, metrics = program.train_step(state, batch)
        expected = model.apply({"params": params}, x).mean()
        np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], expected, rtol=1e-4)


def test_errors_of_the_users_own_stay_their_own(devices8):
    def broken(params, apply_fn, batch, rng):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine"):
        build(nn.Dense(8), broken)


# Collections.


def test_what_is_sown_is_not_carried(devices8):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            self.sow("growing", "norm", jnp.sum(x**2))
            self.sow("intermediates", "x", x)
            total = {"reduce_fn": jnp.add, "init_fn": lambda: jnp.zeros(())}
            self.sow("losses", "total", jnp.sum(x), **total)
            return x

    def training_loss(params, apply_fn, batch, rng):
        return mean_loss(params, lambda *args: apply_fn(*args, train=True), batch, rng)

    init = functools.partial(Model().init, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), BATCH.inputs)
    assert {"growing", "losses"} <= set(variables)
    carried = build(Model(), training_loss).abstract_state.collections
    assert set(carried) == {"batch_stats"}
    assert set(carried["batch_stats"]["BatchNorm_0"]) == {"mean", "var"}
