import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import (
    Batch,
    abstract_mesh,
    data_parallel,
    fsdp,
    gather_examples,
    make_mesh,
)
from manualpar.checks.collectives_check import check_traced_steps
from tests.tiny import mean_loss

BATCH = Batch(
    inputs=jax.ShapeDtypeStruct((16, 8), jnp.float32), labels=jax.ShapeDtypeStruct((16,), jnp.int32)
)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, name="dense")(x), None


class Branching(nn.Module):
    """Takes a branch with a loop of layers, by the data, by a constant, or by what all agree on."""

    condition: str

    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(Layer, length=2, **axes)(name="layers")
        if self.is_initializing():
            return layers(x, None)[0]
        taken = {
            "data": lambda: x[0, 0] > 0,
            "constant": lambda: jnp.array(True),
            "agreed": lambda: jax.lax.pmax(x[0, 0], "data") > 0,
        }[self.condition]()
        return nn.cond(taken, lambda layers, x: layers(x, None)[0], lambda _, x: x, layers, x)


class Looping(nn.Module):
    """Applies a layer until the data is small."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(8, name="dense")
        if self.is_initializing():
            return dense(x)
        x = jax.lax.stop_gradient(x)
        return nn.while_loop(
            lambda _, x: (x**2).sum() > 1e-3,
            lambda _, x: jax.lax.stop_gradient(dense(x)) * 0.1,
            self,
            x,
            split_rngs={"params": False},
        )


def stopped_loss(params, apply_fn, batch, rng):
    return mean_loss(jax.lax.stop_gradient(params), apply_fn, batch, rng)


def build(builder, model, loss_fn=mean_loss):
    kwargs = {"min_weight_size": 0} if builder is fsdp else {}
    return builder(
        model, optax.sgd(0.1), loss_fn, mesh=make_mesh({"data": 8}), batch=BATCH, **kwargs
    )


def test_a_loop_with_a_gather_in_a_branch_that_only_some_take_is_refused(devices8):
    message = (
        r"fsdp: a cond contains a all_gather \(.*Branching.*\).*along \['data'\].*keep_gathered"
    )
    with pytest.raises(ValueError, match=message):
        build(fsdp, Branching("data"))
    # A layer outside of such a loop is gathered before the condition.
    build(fsdp, Looping(), stopped_loss)


@pytest.mark.parametrize("condition", ["constant", "agreed"])
def test_a_gather_in_a_branch_that_all_take_runs(devices8, condition):
    program = build(fsdp, Branching(condition))
    batch = Batch(np.ones((16, 8), np.float32), np.zeros(16, np.int32))
    _, metrics = program.train_step(program.init(jax.random.key(0)), batch)
    assert metrics["loss"][1] == 16 * 8


def test_branches_without_collectives_may_differ(devices8):
    build(data_parallel, Branching("data"))


def test_examples_gathered_in_another_order_than_the_batch_is_in_are_refused(devices8):
    def coupled(axis_name):
        def loss_fn(params, apply_fn, batch, rng):
            out = gather_examples(apply_fn({"params": params}, batch.inputs), axis_name)
            return out.mean(), {"loss": (out.sum(), out.size)}

        return loss_fn

    def build(axis_name):
        axes, mesh = ("b", "a"), make_mesh({"a": 2, "b": 4})
        loss, tx = coupled(axis_name), optax.sgd(0.1)
        return data_parallel(nn.Dense(4), tx, loss, mesh=mesh, batch=BATCH, axis_name=axes)

    message = r"gather_examples gathers over \('a', 'b'\), but .*Pass axis_name=\('b', 'a'\)"
    with pytest.raises(ValueError, match=message):
        build(None)
    build(("b", "a"))
    build("a")  # Some of them, as somebody wishes.


def branch_on_stage(send, is_loop=False):
    """Traces a branch that some stages take, with a collective in it; it is not compiled."""

    def on_device(x):
        stage = jax.lax.axis_index("stage")
        if is_loop:
            return jax.lax.while_loop(
                lambda c: c[0] < stage, lambda c: (c[0] + 1, send(c[1])), (stage - 2, x)
            )[1]
        return jax.lax.cond(stage < 2, send, lambda x: x, x)

    mesh = abstract_mesh({"data": 2, "stage": 4}, num_devices=8)
    spec = P("data", "stage")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    traced = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((4, 8), "float32"))
    check_traced_steps("fsdp", traced, traced, traced, data_axes=("data",))


@pytest.mark.parametrize("axis", ["stage", "data"])
@pytest.mark.parametrize("is_loop", [False, True])
def test_a_permutation_waits_for_all_devices_whatever_its_axis(axis, is_loop):
    what = "while" if is_loop else "cond"
    message = (
        rf"fsdp: a {what} contains a ppermute \(.*\), over \['{axis}'\], and its condition differs "
        r"between the devices along \['stage'\]: .* all devices of the program.*jnp.where"
    )
    with pytest.raises(ValueError, match=message):
        branch_on_stage(lambda x: jax.lax.ppermute(x, axis, [(0, 1), (1, 0)]), is_loop)


def test_other_collectives_wait_for_the_devices_along_their_axis_alone():
    def summed(x, axis):
        return jax.lax.pcast(jax.lax.psum(x, axis), axis, to="varying")

    def gathered(x):
        return jax.lax.all_gather(x, "data", axis=0, tiled=True)[: len(x)]

    branch_on_stage(lambda x: summed(x, "data"))
    branch_on_stage(gathered)
    with pytest.raises(ValueError, match=r"a cond contains a psum.*along \['stage'\]"):
        branch_on_stage(lambda x: summed(x, "stage"))
