"""Linen models without any code for sharding train under FSDP as on one device.

FSDP shards every parameter that it can. Each model trains for three steps of SGD, and is compared
with plain flax on one device. The optimizer is SGD, because Adam would hide a wrong factor in a
gradient.
"""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, assert_same_as_one_device, fsdp, make_mesh
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.tiny import class_loss

WIDTH = 16


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.LayerNorm()(x)))
        return nn.Dense(4)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, name="dense")(nn.tanh(x)), None


class Scanned(nn.Module):
    metadata: Any = None
    remat: bool = False
    axis: int = 0
    length: int = 8  # Eight devices divide it, but FSDP must not shard the dim of the layers.

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        kwargs = {} if self.metadata is None else {"metadata_params": self.metadata}
        stack = nn.scan(
            block,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.length,
            **kwargs,
        )
        return nn.Dense(4)(stack(name="stack")(x, None)[0])


class Broadcast(nn.Module):
    """A loop that calls the same layer several times, with the same parameters."""

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(Block, variable_broadcast="params", split_rngs={"params": False}, length=3)
        return nn.Dense(4)(loop(name="loop")(x, None)[0])


class Remat(nn.Module):
    policy: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = nn.remat(Block, policy=self.policy)()(x, None)
        return nn.Dense(4)(x)


class Ensemble(nn.Module):
    """An ensemble (`nn.vmap`) of eight members with different parameters."""

    @nn.compact
    def __call__(self, x):
        dense = nn.vmap(
            nn.Dense,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=8,
        )
        return nn.Dense(4)(nn.tanh(dense(WIDTH, name="members")(x)).mean(0))


class SharedByVmap(nn.Module):
    """A layer that `nn.vmap` applies over a batch dim, with the same parameters."""

    @nn.compact
    def __call__(self, x):
        dense = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})
        return nn.Dense(4)(dense(WIDTH, name="shared")(x))


class Tied(nn.Module):
    """A model whose embedding is also its head, and which calls a layer twice."""

    def setup(self):
        self.embed = nn.Embed(WIDTH, WIDTH)
        self.dense = nn.Dense(WIDTH)

    def __call__(self, x):
        x = self.embed(jnp.argmax(x, -1))
        return self.embed.attend(self.dense(nn.tanh(self.dense(x))))


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x[:, :, None] * jnp.ones((1, 1, WIDTH))
        return nn.Dense(4)(nn.MultiHeadDotProductAttention(num_heads=8)(x).mean(1))


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Stack)(name="inner")(nn.Sequential([nn.Dense(WIDTH), nn.relu])(x))


class NestedScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                loop = nn.scan(
                    Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
                )
                return loop(name="inner")(x, None)[0], None

        loop = nn.scan(Inner, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(4)(loop(name="outer")(x, None)[0])


class RematScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x + nn.Dense(WIDTH)(nn.tanh(x))

        return nn.Dense(4)(nn.remat_scan(Layer, lengths=(2, 2))(name="stack")(x))


class Recurrent(nn.Module):
    """A recurrent layer; its initial state is zeros, whose type does not vary over devices."""

    cell: Any
    time_major: bool = False

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], 4, 4)
        if self.time_major:
            x = x.swapaxes(0, 1)
        x = nn.RNN(self.cell(WIDTH), time_major=self.time_major)(x)
        return nn.Dense(4)(x.mean(0 if self.time_major else 1))


class BothWays(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], 4, 4)
        both = nn.Bidirectional(nn.RNN(nn.SimpleCell(8)), nn.RNN(nn.SimpleCell(8)))
        return nn.Dense(4)(both(x).mean(1))


MODELS = {
    "stack": Stack(),
    "scan": Scanned(),
    "scan, named": Scanned(metadata={nn.PARTITION_NAME: "layers"}),
    "scan, unnamed": Scanned(metadata={nn.PARTITION_NAME: None}),
    "scan over dim 1": Scanned(axis=1),
    "scan over the last dim": Scanned(axis=-1),
    "scan, remat": Scanned(remat=True),
    "scan, broadcast": Broadcast(),
    "remat": Remat(),
    "remat, dots saveable": Remat(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "vmap": Ensemble(),
    "vmap, shared": SharedByVmap(),
    "tied": Tied(),
    "attention": Attention(),
    "jit": Jitted(),
    "scan in scan": NestedScan(),
    "remat_scan": RematScan(),
    "LSTM": Recurrent(nn.OptimizedLSTMCell),
    "GRU, time major": Recurrent(nn.GRUCell, time_major=True),
    "bidirectional": BothWays(),
}


def make_batch(seed=0, shape=(32, WIDTH)):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=shape).astype(np.float32)
    return Batch(inputs=inputs, labels=rng.integers(0, 4, shape[0]))


# Models that JAX refuses in mode `explicit`, because of how flax implements a module.
NOT_EXPLICIT = {
    "tied": "nn.Embed looks up sharded indices without saying how the result is sharded",
    "vmap, shared": "nn.vmap over sharded examples with the parameters unmapped",
}


# A loop, a common module, and mode `explicit`.
FAST = {("scan, broadcast", "manual"), ("attention", "manual"), ("scan, remat", "explicit")}


def every_mode():
    for name in MODELS:
        for mode in ("manual", "auto", "explicit"):
            if mode != "explicit" or name not in NOT_EXPLICIT:
                yield slow_unless(FAST, name, mode)


@pytest.mark.parametrize(("name", "mode"), list(every_mode()))
def test_the_model_trains_as_on_one_device(devices8, name, mode):
    model, batches = MODELS[name], [make_batch(seed) for seed in range(3)]
    expected = train_on_one_device(model, optax.sgd(0.1), batches, class_loss)
    program = fsdp(
        model,
        optax.sgd(0.1),
        class_loss,
        mesh=make_mesh({"data": 8}, devices8),
        batch=batches[0],
        min_weight_size=0,
        num_minibatches=2,
        use_scan=True,
        mode=mode,
    )
    sharded = [info for info, placement in program.parameters if len(placement.spec)]
    assert len(sharded) >= len(program.parameters) - 1  # Only the last bias may be replicated.
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=2e-5)
    params = jax.device_get(state.params)
    chex.assert_trees_all_close(params, expected.params, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NOT_EXPLICIT)
def test_what_explicit_types_do_not_take_is_refused_by_jax(devices8, name):
    """If this test fails, jax or flax now supports the model: remove it from `NOT_EXPLICIT`."""
    mesh = make_mesh({"data": 8}, devices8)
    with pytest.raises(Exception, match=r"out_sharding=|cannot be sharded"):
        fsdp(
            MODELS[name],
            optax.sgd(0.1),
            class_loss,
            mesh=mesh,
            batch=make_batch(),
            min_weight_size=0,
            mode="explicit",
        )


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    [
        ("stack", 9, 9),  # Nine parameters are sharded, each used once.
        ("scan", 3, 3),  # Kernel and bias of a layer inside the loop, kernel of the head.
        ("scan, remat", 4, 3),  # The backward pass gathers the loop's kernel again.
        ("tied", 5, 5),  # `setup` asks for the embedding once, the layer is called twice.
    ],
)
def test_a_parameter_is_gathered_once_for_each_use(devices8, name, gathers, scatters):
    program = fsdp(
        MODELS[name],
        optax.sgd(0.1),
        class_loss,
        mesh=make_mesh({"data": 8}, devices8),
        batch=make_batch(),
        min_weight_size=0,
        reshard_after_forward=False,
    )
    text = str(program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr)
    assert text.count(" = all_gather[") == gathers
    assert text.count(" = reduce_scatter[") == scatters


@pytest.mark.slow
def test_a_penalty_on_the_parameters_reads_them_unboxed(devices8):
    """Tests that a loss function can read the complete parameters with `nn.unbox`."""

    def penalised(params, apply_fn, batch, rng):
        loss, metrics = class_loss(params, apply_fn, batch, rng)
        norm = optax.tree.norm(nn.unbox(params))
        return loss + 0.5 * norm, metrics

    batch, mesh = make_batch(), make_mesh({"data": 8}, devices8)
    program = fsdp(Stack(), optax.sgd(0.1), penalised, mesh=mesh, batch=batch, min_weight_size=0)
    assert_same_as_one_device(program, batch, jax.random.key(0))
