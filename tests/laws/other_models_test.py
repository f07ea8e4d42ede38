"""Losses that call the model of another program: values and gradients are those of one device."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import abstract_mesh, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import bytes_by_axes, state_bytes, step_bytes, step_memory, trace_collectives
from manualpar.inspect.expected_bytes import parameter_collectives
from tests.core.parameters.split_models import BATCH as SPLIT
from tests.core.parameters.split_models import WIDTH, ExpertNet, Net

bce = optax.sigmoid_binary_cross_entropy
RNG = np.random.default_rng(0)
BATCH = {
    "real": RNG.normal(size=(32, 6)).astype(np.float32),
    "noise": RNG.normal(size=(32, 4)).astype(np.float32),
    "mask": (RNG.random(32) < 0.6).astype(np.float32),
}


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        return nn.Dense(6)(nn.tanh(nn.Dense(16)(z)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(8)(x)), None


class Discriminator(nn.Module):
    """Its layers are in a scan, and its statistics are in a collection."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(nn.Dense(8)(x))
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(1)(scan(name="layers")(x, None)[0])[..., 0]


def generator_loss(params, apply_fn, batch, rng, discriminator):
    del rng
    scores = discriminator(apply_fn({"params": params}, batch["noise"]), train=True)
    losses = bce(scores, jnp.ones_like(scores)) * batch["mask"]
    return {"loss": (losses.sum(), batch["mask"].sum())}


def discriminator_loss(params, apply_fn, batch, rng, generator):
    del rng
    real = apply_fn({"params": params}, batch["real"], train=True)
    fake = apply_fn({"params": params}, generator(batch["noise"]), train=True)
    losses = bce(real, jnp.ones_like(real)) + bce(fake, jnp.zeros_like(fake))
    return {"loss": (losses.sum(), losses.size)}


def build_gan(builder, mesh, model, **options):
    """Builds two programs, each of which calls the model of the other."""
    options = {"mesh": mesh, "batch": BATCH, **options}
    tx = optax.sgd(0.1)
    models = {"generator": Generator()}
    discriminator = builder(model, tx, discriminator_loss, other_models=models, **options)
    models = {"discriminator": discriminator}
    return discriminator, builder(Generator(), tx, generator_loss, other_models=models, **options)


def train_on_one_device(variables, number):
    """Trains both models in plain flax; returns their variables and the losses."""
    (one, other), losses, tx = variables, [], optax.sgd(0.1)

    def step(model, variables, loss_fn, function):
        @jax.jit
        def value_and_grad(params):
            return jax.value_and_grad(loss, has_aux=True)(params)

        def loss(params):
            kept = {name: x for name, x in variables.items() if name != "params"}

            def apply_fn(given, *args, **kwargs):
                nonlocal kept
                out, new = model.apply({**kept, **given}, *args, mutable=[*kept], **kwargs)
                kept = {**kept, **new}
                return out

            total, count = loss_fn(params, apply_fn, BATCH, None, function)["loss"]
            return total / count, kept

        (value, kept), grads = value_and_grad(variables["params"])
        updates, _ = tx.update(grads, tx.init(variables["params"]))
        losses.append(value)
        return {"params": optax.apply_updates(variables["params"], updates), **kept}

    for _ in range(number):
        one = step(Discriminator(), one, discriminator_loss, lambda z, x=other: apply(x, z))
        other = step(
            Generator(),
            other,
            generator_loss,
            lambda z, train, x=one: Discriminator().apply(x, z, train=train, mutable=["x", *x])[0],
        )
    return one, other, losses


def apply(variables, z):
    return Generator().apply(variables, z)


def check_gan(builder, mesh, axes, **options):
    mode = options.get("mode", "manual")
    model = Discriminator(axes if mode == "manual" else None)
    discriminator, generator = build_gan(builder, mesh, model, **options)
    one, other = discriminator.init(jax.random.key(0)), generator.init(jax.random.key(1))
    before = jax.device_get((discriminator.whole(one), generator.whole(other)))
    losses = []
    for _ in range(2):
        one, of_one = discriminator.train_step(one, BATCH, generator=other)
        other, of_other = generator.train_step(other, BATCH, discriminator=one)
        losses += [m["loss"][0] / m["loss"][1] for m in (of_one, of_other)]
    *after, expected = train_on_one_device(before, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = jax.device_get((discriminator.whole(one), generator.whole(other)))
    chex.assert_trees_all_close(found, tuple(after), rtol=1e-4, atol=1e-6)
    return discriminator, generator


@pytest.mark.slow
def test_a_gan_on_every_mesh_is_that_of_one_device(mesh8):
    axes = ("replica", "data") if "replica" in mesh8.shape else "data"
    check_gan(fsdp, mesh8, axes, axis_name=axes, min_weight_size=1)


@pytest.mark.parametrize(
    ("builder", "options"),
    [
        (data_parallel, {}),
        pytest.param(zero, {"stage": 1, "min_weight_size": 1}, marks=pytest.mark.slow),
        (zero, {"stage": 2, "min_weight_size": 1}),
        pytest.param(fsdp, {"min_weight_size": 1, "pad": True}, marks=pytest.mark.slow),
        pytest.param(
            fsdp, {"min_weight_size": 1, "communicate_every": "step"}, marks=pytest.mark.slow
        ),
        pytest.param(hsdp, {"min_weight_size": 1}, marks=pytest.mark.slow),
        (fsdp, {"min_weight_size": 1, "mode": "auto"}),
        pytest.param(fsdp, {"min_weight_size": 1, "mode": "explicit"}, marks=pytest.mark.slow),
        pytest.param(
            fsdp, {"min_weight_size": 1, "mode": "auto-unconstrained"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_gan_under_every_strategy_and_mode_is_that_of_one_device(devices8, builder, options):
    mesh = make_mesh({"replica": 2, "data": 4} if builder is hsdp else {"data": 8}, devices8)
    axes = tuple(mesh.axis_names)
    check_gan(builder, mesh, axes, **options)


class Critic(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.up = nnx.Linear(6, 16, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.tanh(self.up(x))))[..., 0]


class Actor(nnx.Module):
    def __init__(self, rngs):
        self.only = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, x):
        return self.only(x)


def actor_loss(model, batch, critic):
    scores = critic(model(batch["noise"]), rngs={"dropout": jax.random.key(0)})
    return {"loss": (-scores.sum(), scores.size)}


def critic_loss(model, batch):
    return {"loss": (jnp.square(model(batch["real"]) - 1).sum(), 32)}


def build_actor(devices8, rate, **more):
    """Builds a replicated critic with a program of its own, and a sharded actor that calls it."""
    options = {"mesh": make_mesh({"data": 8}, devices8), "batch": BATCH}
    make = functools.partial(Critic, rate=rate)
    critic = data_parallel(make, optax.sgd(0.1), critic_loss, **options)
    models = {"critic": critic}
    placing = {"min_weight_size": 1, **options, **more}
    return critic, fsdp(Actor, optax.sgd(0.1), actor_loss, other_models=models, **placing)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_actor_of_nnx_calls_a_critic_that_another_strategy_places(devices8, number):
    critic, actor = build_actor(devices8, 0.0, num_minibatches=number)
    value, state = critic.init(jax.random.key(0)), actor.init(jax.random.key(1))
    w, (up, down) = jax.device_get(
        (actor.whole(state)["params"]["only"], [value.params[name] for name in ("up", "down")])
    )

    def plain(w):
        x = BATCH["noise"] @ w["kernel"] + w["bias"][None]
        hidden = jnp.tanh(x @ up["kernel"] + up["bias"][None])
        return -(hidden @ down["kernel"] + down["bias"][None]).mean()

    loss, grads = jax.jit(jax.value_and_grad(plain))(w)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
    state, metrics = actor.train_step(state, BATCH, critic=value)
    np.testing.assert_allclose(metrics["loss"][0] / 32, loss, rtol=1e-5)
    found = jax.device_get(actor.whole(state)["params"]["only"])
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
    total, _ = actor.eval_step(state, BATCH, critic=value)["loss"]
    np.testing.assert_allclose(total / 32, plain(expected), rtol=1e-5)


def test_evaluation_turns_training_off_in_the_other_model_too(devices8):
    critic, actor = build_actor(devices8, 0.5)
    value, state = critic.init(jax.random.key(0)), actor.init(jax.random.key(1))
    plain, without = build_actor(devices8, 0.0)
    states = without.init(jax.random.key(1)), plain.init(jax.random.key(0))
    found = actor.eval_step(state, BATCH, critic=value)["loss"]
    expected = without.eval_step(states[0], BATCH, critic=states[1])["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    trained = actor.train_step(state, BATCH, critic=value)[1]["loss"]
    assert abs(trained[0] - expected[0]) > 1e-3


def predicted_and_traced(program):
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sent = bytes_by_axes(parameter_collectives(trace_collectives(traced)))
    return step_bytes(program), sent


@pytest.mark.parametrize(
    ("builder", "options", "is_exact"),
    [(data_parallel, {}, True), (zero, {"stage": 2}, True), (fsdp, {}, False)],
)
def test_step_bytes_has_the_gathers_of_the_other_model(builder, options, is_exact):
    """Under FSDP it is an upper bound: what no gradient needs is not gathered again."""
    placing = {} if builder is data_parallel else {"min_weight_size": 1}
    mesh = abstract_mesh({"data": 8}, 8)
    tx, models = optax.sgd(0.1), {"discriminator": Discriminator()}
    build = functools.partial(builder, Generator(), tx, mesh=mesh, batch=BATCH, **placing)
    program = build(generator_loss, other_models=models, **options)
    predicted, sent = predicted_and_traced(program)
    if is_exact:
        assert predicted == sent
        return
    plain = build(plain_generator_loss)
    alone, _ = predicted_and_traced(plain)
    own = alone["data",]
    held = state_bytes(program.abstract_others)[0]
    assert step_memory(program).parameters == step_memory(plain).parameters + held
    assert own < sent["data",] <= predicted["data",]
    sizes = jax.tree.map(lambda x: x.size, program.abstract_others["discriminator"]["params"])
    gathered = predicted["data",] - own
    # Parameters with a dim of 8, and 2 gathers of 7/8 of their bytes; the rest is replicated.
    assert gathered == 2 * 4 * 7 * (sum(jax.tree.leaves(sizes)) - 1) / 8


def plain_generator_loss(params, apply_fn, batch, rng):
    del rng
    out = apply_fn({"params": params}, batch["noise"])
    return {"loss": (out.sum(), batch["mask"].sum())}


def test_a_state_that_does_not_fit_is_refused(devices8):
    critic, actor = build_actor(devices8, 0.0)
    value, state = critic.init(jax.random.key(0)), actor.init(jax.random.key(1))
    with pytest.raises(TypeError, match=r"train_step: critic is not given, expected the state of"):
        actor.train_step(state, BATCH)
    with pytest.raises(TypeError, match=r"critic is a list, expected the state of that model"):
        actor.train_step(state, BATCH, critic=[])
    with pytest.raises(TypeError, match=r"got \['critik'\], expected \['critic'\] beside"):
        actor.train_step(state, BATCH, critik=value)
    with pytest.raises(TypeError, match=r"got \['critic'\], expected no state beside"):
        critic.train_step(value, BATCH, critic=value)
    with pytest.raises(ValueError, match="critic does not fit: params/down/bias is missing"):
        actor.train_step(state, BATCH, critic={"params": {"up": value.params["up"]}})
    sharded = fsdp(
        Critic,
        optax.sgd(0.1),
        critic_loss,
        mesh=critic.mesh,
        batch=BATCH,
        min_weight_size=1,
    ).init(jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"critic does not fit: .* has sharding P\(.*other_models="
    ):
        actor.train_step(state, BATCH, critic=sharded)
    own = fsdp(
        Actor,
        optax.sgd(0.1),
        lambda model, batch, average: {"loss": (average(batch["noise"]).sum(), 1)},
        other_models={"average": Actor},
        mesh=critic.mesh,
        batch=BATCH,
        min_weight_size=1,
    )
    state = own.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"average has arrays of the state itself, .* a copy"):
        own.train_step(state, BATCH, average=state)


class Student(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.tanh(nn.Dense(16)(x)))


def student_loss(params, apply_fn, batch, rng, teacher):
    del rng
    out = teacher(apply_fn({"params": params}, batch.inputs))
    losses = jnp.square(out - batch.labels).mean(-1) * batch.mask
    total = sum(jnp.square(x).sum() for x in jax.tree.leaves(nn.unbox(teacher.params)))
    return {"loss": (losses.sum() * total, batch.mask.sum())}


def draw_variables(abstract):
    """Draws variables of a teacher with the shardings that a step expects."""
    leaves, structure = jax.tree.flatten(abstract)
    rng = np.random.default_rng(1)
    draw = [rng.normal(size=x.shape).astype(x.dtype) * 0.3 for x in leaves]
    placed = [jax.device_put(x, like.sharding) for x, like in zip(draw, leaves, strict=True)]
    return structure.unflatten(placed)


@pytest.mark.parametrize(
    "teacher",
    [
        pytest.param(Net(), marks=pytest.mark.slow, id="split"),
        pytest.param(Net(loop="scan"), marks=pytest.mark.slow, id="split, scanned"),
        pytest.param(ExpertNet(), id="experts"),
    ],
)
def test_a_teacher_that_computes_with_shards_is_that_of_one_device(devices8, teacher):
    """The loss also reads all of its parameters."""
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    options = {"mesh": mesh, "batch": SPLIT, "min_weight_size": 16}
    models, rate = {"teacher": teacher}, 0.01
    program = fsdp(Student(), optax.sgd(rate), student_loss, other_models=models, **options)
    state = program.init(jax.random.key(0))
    variables = draw_variables(program.abstract_others["teacher"])
    params, whole = jax.device_get((program.whole(state)["params"], variables))

    def loss(params):
        function = functools.partial(teacher.apply, whole)
        function.params = whole["params"]
        total, count = student_loss(params, Student().apply, SPLIT, None, function)["loss"]
        return total / count

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    state, metrics = program.train_step(state, SPLIT, teacher=variables)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], value, rtol=1e-5)
    expected = jax.tree.map(lambda w, g: w - rate * g, params, grads)
    found = jax.device_get(program.whole(state)["params"])
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
