"""A model's annotations decide how its parameters are sharded; the strategy adds its data axis."""

import itertools
import re

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from tests.one_device import name_of, slow_unless, train_on_one_device, train_program
from tests.tiny import square_loss

RULES = (("embed", None), ("mlp", "model"), ("batch", "data"))


class Annotated(nn.Module):
    """Two layers whose kernels are annotated with logical names or with mesh axes."""

    logical: bool = True

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        annotate = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else (None, "model")
        up = nn.Dense(64, kernel_init=annotate(init, names), name="up")
        down = nn.Dense(16, kernel_init=annotate(init, names[::-1]), name="down")
        h = nn.silu(up(x))
        if self.logical:
            h = nn.with_logical_constraint(h, ("batch", "mlp"))
        return nn.LayerNorm()(x + down(h))


def make_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 16)).astype(np.float32)
    return Batch(inputs=x, labels=np.roll(x, 1, axis=1))


def make_tx():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def build(builder, mesh, model=None, **kwargs):
    options = {"mesh": mesh, "batch": make_batch(), "rules": RULES, **kwargs}
    if builder is not data_parallel:
        options.setdefault("min_weight_size", 1)
    return builder(model or Annotated(), make_tx(), square_loss, **options)


@pytest.fixture(scope="module")
def reference():
    class Plain(Annotated):
        logical: bool = False

        @nn.compact
        def __call__(self, x):
            h = nn.silu(nn.Dense(64, name="up")(x))
            return nn.LayerNorm()(x + nn.Dense(16, name="down")(h))

    return train_on_one_device(Plain(), make_tx(), [make_batch()] * 4, square_loss)


BUILDERS = [data_parallel, zero, fsdp, hsdp]


FAST = {(fsdp, "manual", False), (hsdp, "manual", True), (zero, "explicit", False)}


@pytest.mark.parametrize(
    ("builder", "mode", "logical"),
    [
        slow_unless(FAST, *case)
        for case in itertools.product(BUILDERS, ("manual", "auto", "explicit"), (True, False))
    ],
    ids=name_of,
)
def test_annotated_models_train_as_on_one_device(devices8, reference, builder, mode, logical):
    mesh = make_mesh({"replica": 2, "data": 2, "model": 2}, devices8)
    program = build(builder, mesh, Annotated(logical), mode=mode)
    up = program.layout.params["up"]["kernel"]
    assert up == (P(None, "model") if builder in (data_parallel, zero) else P("data", "model"))
    moments = program.layout.opt_state[1][0].mu
    assert moments["up"]["kernel"] == (
        P(None, "model") if builder is data_parallel else P("data", "model")
    )
    state, losses = train_program(program, [make_batch()] * 4)
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)
    kernel = jax.device_get(state.params["down"]["kernel"])
    np.testing.assert_allclose(kernel, reference.params["down"]["kernel"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "communicate_every"),
    [
        pytest.param({"data": 8, "model": 1}, "minibatch", marks=pytest.mark.slow),
        pytest.param({"data": 4, "model": 2}, "minibatch", marks=pytest.mark.slow),
        pytest.param({"data": 4, "model": 2}, "step", marks=pytest.mark.slow),
        ({"data": 1, "model": 8}, "minibatch"),
    ],
    ids=str,
)
def test_fsdp_with_a_model_axis_of_any_size(devices8, reference, shape, communicate_every):
    program = build(
        fsdp,
        make_mesh(shape, devices8),
        communicate_every=communicate_every,
        num_minibatches=2,
        gather_dtype="float32",
    )
    _, losses = train_program(program, [make_batch()] * 4)
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)


def test_unknown_names_and_axes_are_refused(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    with pytest.raises(ValueError, match=r"parameter 'down/kernel'.*\['mlp'\] are not in rules"):
        build(fsdp, mesh, rules=(("embed", None),))
    with pytest.raises(ValueError, match=r"'modle'.*the nearest one is 'model'"):
        build(fsdp, mesh, rules=(("embed", None), ("mlp", "modle")))


def test_a_dim_over_a_data_axis_and_another_is_refused(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    rules = (("embed", None), ("mlp", ("data", "model")))
    with pytest.raises(
        ValueError, match=r"dim [01] over \('data', 'model'\), of which only \['data'"
    ):
        build(fsdp, mesh, rules=rules)
    program = build(fsdp, mesh, rules=rules, axis_name=("data", "model"))
    assert program.layout.params["up"]["kernel"] == P(None, ("data", "model"))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("builder", [pytest.param(data_parallel, marks=pytest.mark.slow), fsdp])
def test_a_dim_over_two_model_axes(devices8, reference, builder, axes):
    mesh = make_mesh({"a": 2, "data": 2, "b": 2}, devices8)
    # Shards the dim of the inputs, because a wrong order of its shards changes the result. (A wrong
    # order of hidden features in both kernels would not.)
    program = build(builder, mesh, rules=(("embed", axes), ("mlp", None)))
    assert program.layout.params["up"]["kernel"][0] == axes
    state, losses = train_program(program, [make_batch()] * 4)
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)
    kernel = jax.device_get(state.params["down"]["kernel"])
    np.testing.assert_allclose(kernel, reference.params["down"]["kernel"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "constraints"), [("manual", 0), ("auto", 1), ("auto-unconstrained", 0)]
)
def test_rules_hold_for_activations_in_auto_mode_alone(devices8, mode, constraints):
    program = build(fsdp, make_mesh({"data": 4, "model": 2}, devices8), mode=mode)
    lowered = program.eval_step.lower(program.abstract_state, program.abstract_batch).as_text()
    # Counts constraints of the hidden activations [batch, mlp]. The gathered kernel has the same
    # shape, but its sharding is [{}, {"model"}].
    constrained = re.findall(r'constraint .*\[{"data"}, {"model"}\]> : tensor<16x64xf32>', lowered)
    assert len(constrained) == constraints


class Constrained(nn.Module):
    """A model that constrains the sharding of its activations, as in flax's guide to scaling up."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.Dense(64, kernel_init=nn.with_partitioning(init, (None, "model")), name="up")
        h = jax.lax.with_sharding_constraint(nn.silu(up(x)), P("data", "model"))
        return nn.LayerNorm()(x + nn.Dense(16, name="down")(h))


@pytest.mark.parametrize("builder", [pytest.param(data_parallel, marks=pytest.mark.slow), fsdp])
def test_a_model_may_constrain_its_activations_in_auto_mode(devices8, reference, builder):
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    program = build(builder, mesh, Constrained(), mode="auto")
    _, losses = train_program(program, [make_batch()] * 4)
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
    assert re.search(r'constraint .*\[{"data"}, {"model"}\]> : tensor<16x64xf32>', lowered)
    with pytest.raises(ValueError, match=r"uses jax.lax.with_sharding_constraint.*mode='auto'"):
        build(builder, mesh, Constrained(), mode="manual")
