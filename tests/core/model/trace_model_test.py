"""Models that say how they are sharded in their initialisers, calls and names train as they are."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from manualpar import Batch, assert_same_as_one_device, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.model.trace_model import PartOfDevice
from manualpar.core.parameters.placement import ParameterInfo
from manualpar.core.parameters.sharded_parameter import ShardedParameter
from manualpar.layers import MoE
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.tiny import square_loss

WIDTH, LAYERS = 16, 2
RNG = np.random.default_rng(0)
BATCHES = [Batch(*(RNG.normal(size=(16, WIDTH)).astype(np.float32) for _ in "xy")) for _ in "ab"]
LECUN = nnx.initializers.lecun_normal()


def typed(*names):
    """An initialiser that types what it makes."""
    return functools.partial(LECUN, out_sharding=P(*names))


class Typed(nn.Module):
    """Says in types how its weights and its products lie; `plain` says nothing."""

    plain: bool = False
    data: object = "data"

    @nn.compact
    def __call__(self, x):
        up, down = (LECUN, LECUN) if self.plain else (typed(None, "model"), typed("model", None))
        h = nn.relu(nn.Dense(WIDTH, kernel_init=up, use_bias=False, name="up")(x))
        if not self.plain:
            assert jax.typeof(h).sharding.spec[1] == "model"  # The weight kept its type.
        down = self.param("down", down, (WIDTH, WIDTH))
        bias = self.param("bias", nn.initializers.zeros, (WIDTH,))
        out = None if self.plain else P(self.data, None)
        return x + jnp.dot(h, down, out_sharding=out) + bias[None]


class TypedStack(nn.Module):
    plain: bool = False
    data: object = "data"

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return layers(Typed(self.plain, self.data, name="layers"), x, None)[0]


class NNXTyped(nnx.Module):
    """The same in NNX; with `plain` all shardings are those of one device."""

    def __init__(self, rngs, plain=False):
        up, down = (LECUN, LECUN) if plain else (typed(None, "model"), typed("model", None))
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Param(down(rngs.params(), (WIDTH, WIDTH)))
        self.bias = nnx.Param(jnp.zeros(WIDTH))
        self.out = None if plain else P("data", None)

    def __call__(self, x):
        h = jax.nn.relu(self.up(x))
        return x + jnp.dot(h, self.down[...], out_sharding=self.out) + self.bias[None]


class NNXTypedStack(nnx.Module):
    def __init__(self, rngs, plain=False):
        make = functools.partial(NNXTyped, plain=plain)
        self.layers = jax.vmap(make, spmd_axis_name=None)(rngs.split(LAYERS))

    def __call__(self, x):
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]


def nnx_on_one_device(make):
    """Trains an NNX model with nothing of this package; returns its parameters and the losses."""
    init_rng, _ = jax.random.split(jax.random.key(0))
    graphdef, params = nnx.split(make(rngs=nnx.Rngs(init_rng)), nnx.Param)

    @jax.jit
    def step(params, batch):
        def mean_loss(params):
            return jnp.square(nnx.merge(graphdef, params)(batch.inputs) - batch.labels).mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    losses = []
    for batch in BATCHES:
        params, loss = step(params, batch)
        losses.append(loss)
    return nnx.to_pure_dict(params), np.stack(losses)


@functools.cache
def reference(model):
    if issubclass(model, nnx.Module):
        return nnx_on_one_device(functools.partial(model, plain=True))
    trained = train_on_one_device(model(plain=True), optax.sgd(0.1), BATCHES, square_loss)
    return trained.params, trained.losses


def check(model, mesh, builder=fsdp, **options):
    if builder is not data_parallel:
        options.setdefault("min_weight_size", 16)
    made = model if issubclass(model, nnx.Module) else model()
    program = builder(made, optax.sgd(0.1), square_loss, mesh=mesh, batch=BATCHES[0], **options)
    state, losses = train_program(program, BATCHES)
    params, expected = reference(model)
    np.testing.assert_allclose(jax.device_get(losses), expected, rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        jax.device_get(state.params),
        jax.device_get(params),
    )
    return {info.path: place.names for info, place in program.parameters}


MODELS = [Typed, TypedStack, NNXTyped, NNXTypedStack]


@pytest.mark.slow
@pytest.mark.parametrize("model", [slow_unless({(TypedStack,)}, model) for model in MODELS])
def test_types_in_initialisers_and_calls_under_an_explicit_mesh(devices8, model):
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Explicit,) * 2, devices=devices8)
    with jax.set_mesh(mesh):
        found = check(model, mesh, mode="explicit", num_minibatches=2)
    stack, layers = ((None,), "layers/") if model in (TypedStack, NNXTypedStack) else ((), "")
    assert found == {
        f"{layers}up/kernel": (*stack, "data", "model"),
        f"{layers}down": (*stack, "model", "data"),
        f"{layers}bias": (*stack, "data"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("builder", [data_parallel, zero, fsdp])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4), (1, 8)], ids=str)
def test_types_on_every_factorisation(devices8, model, builder, sizes):
    check(
        model, make_mesh({"data": sizes[0], "model": sizes[1]}, devices8), builder, mode="explicit"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [Typed, TypedStack])
def test_types_with_two_data_axes(devices8, model):
    mesh = make_mesh({"replica": 2, "data": 2, "model": 2}, devices8)
    made = model(data=("replica", "data"))
    options = {"mesh": mesh, "batch": BATCHES[0], "mode": "explicit", "min_weight_size": 16}
    program = hsdp(made, optax.sgd(0.1), square_loss, **options)
    _, losses = train_program(program, BATCHES)
    np.testing.assert_allclose(jax.device_get(losses), reference(model)[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
def test_typed_weights_start_from_those_of_one_device(devices8):
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    options = {"mesh": mesh, "batch": BATCHES[0], "mode": "explicit", "min_weight_size": 16}
    state = fsdp(Typed(), optax.sgd(0.1), square_loss, **options).init(jax.random.key(0))
    trained = train_on_one_device(Typed(plain=True), optax.sgd(0.1), BATCHES[:1], square_loss)
    # From the same random bits; jax 0.12 rounds narrow shards on CPUs otherwise than whole rows.
    nearly_equal = functools.partial(np.testing.assert_array_max_ulp, maxulp=4)
    jax.tree.map(nearly_equal, jax.device_get(state.params), trained.initial)


# -------------------------------------------------------------------------------------------------
# What a loss reads of experts and of split layers is the whole parameter.


LAYER = MoE(num_experts=2, mlp_size=16, top_k=1, gates="sigmoid", model_axis="model")
EXPERTS = {"data": 2, "expert": 2}


def squares(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - 1).mean((1, 2))
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def with_penalty(params, apply_fn, batch, rng):
    """A norm, which is no sum of what devices have."""
    loss, metrics = squares(params, apply_fn, batch, rng)
    penalty = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(nn.unbox(params))))
    return loss + penalty + jnp.abs(params["down"]).max(), metrics


def of_whole(params, apply_fn, batch, rng):
    """The model is applied to what the loss has gathered and changed."""
    whole = jax.tree.map(lambda x: 1.5 * x, nn.unbox(params))
    assert whole["gate"].shape == (2, 8, 16)
    return squares(whole, apply_fn, batch, rng)


CASES = [
    (with_penalty, fsdp, EXPERTS, {"axis_name": tuple(EXPERTS), "keep_gathered": ("down",)}),
    (with_penalty, data_parallel, {"expert": 2, "model": 2}, {"axis_name": "expert"}),
    (of_whole, fsdp, EXPERTS, {"axis_name": tuple(EXPERTS)}),
    (of_whole, data_parallel, {"data": 2, "model": 2}, {}),
]


@pytest.mark.parametrize(
    ("loss_fn", "build", "sizes", "options"),
    [slow_unless((CASES[0], CASES[2]), *case) for case in CASES],
)
def test_a_loss_reads_whole_parameters(devices8, loss_fn, build, sizes, options):
    x = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(np.float32)
    options = options if build is data_parallel else {"min_weight_size": 16, **options}
    mesh, batch = make_mesh(sizes, devices8[:4]), Batch(x, x)
    program = build(LAYER, optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))


@pytest.mark.parametrize(
    ("shape", "names", "shared_names"),
    [
        ((16, 3), (("expert", "model"), None), ()),
        ((16, 3), (("model", "expert"), None), ()),
        ((4, 8), ("expert", "model"), ()),
        ((4, 2), ("expert", None), (None, "model")),
    ],
)
def test_a_device_takes_its_part_and_one_sum_gives_the_gradient(
    devices8, shape, names, shared_names
):
    mesh = make_mesh({"expert": 2, "model": 4}, devices8)
    split_axes = frozenset(jax.tree.leaves(names))
    info = ParameterInfo("w", shape, np.float32, names, frozenset(), split_axes, shared_names)
    spec = P(*names) if not shared_names else P("expert", "model")
    expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    if shared_names:  # Two devices use each column.
        parts, summed = expected.repeat(2, axis=1), lambda x: x.reshape(4, 2, 2).sum(-1)
    else:
        parts, summed = expected, lambda x: x

    def on_device(x, weight):
        take = PartOfDevice({"w": info}, {"w": ShardedParameter(x, names)})

        def loss(x):
            part = take({"w": x})["w"]
            return jnp.vdot(part, weight), part

        return jax.grad(loss, has_aux=True)(x)

    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(P(), spec), out_specs=(P(), spec)))
    weights = np.random.default_rng(0).normal(size=parts.shape).astype(np.float32)
    grad, found = run(expected, weights)
    np.testing.assert_array_equal(found, parts)
    np.testing.assert_allclose(grad, summed(weights), rtol=1e-6)
    assert run.lower(expected, weights).as_text().count('"stablehlo.all_reduce"') == 1
