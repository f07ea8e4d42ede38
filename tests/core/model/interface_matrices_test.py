"""The dims by which parameters are matrices come from the modules that make them."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import (
    Batch,
    MatrixDims,
    abstract_mesh,
    data_parallel,
    fsdp,
    lora,
    muon_dims,
)
from manualpar.models import Attention, Experts, Latent, Transformer
from tests.models.finetuning.adapted_models import Somebodys

TOKENS = Batch(*(np.zeros((8, 4), np.int32) for _ in "xy"))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
        return nn.Dense(4, name="dense")(nn.LayerNorm()(x)), None


class EveryLayer(nn.Module):
    """Layers of Linen; `outer` are stacked in front, and `inner` between the dims of a kernel."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Embed(16, 4, name="embed")(x)
        for axis, name in enumerate(("outer", "inner")):
            axes = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Layer, **axes, length=4)(name=name)(x, None)
        x = nn.Conv(4, (3,), name="conv")(x)
        x = nn.Conv(4, (3,), feature_group_count=4, name="grouped")(x)
        x = nn.ConvTranspose(4, (3,), transpose_kernel=True, name="back")(x)
        x = nn.Einsum((4, 2, 3), "bsd,dnh->bsnh", name="einsum")(x)
        x = nn.DenseGeneral(4, axis=(-2, -1), name="joined")(x)
        experts = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        x = experts(4, name="experts")(jnp.stack([x, x])).sum(0)
        return x @ self.param("own", nn.initializers.ones, (4, 16))


LINEN = {
    "back/kernel": ((0, 2), (1,)),
    "conv/kernel": ((0, 1), (2,)),
    "einsum/kernel": ((0,), (1, 2)),
    "embed/embedding": ((0,), (1,)),
    "experts/kernel": ((1,), (2,)),
    "inner/attention/key/kernel": ((0,), (2, 3)),
    "inner/attention/out/kernel": ((0, 2), (3,)),
    "inner/attention/query/kernel": ((0,), (2, 3)),
    "inner/attention/value/kernel": ((0,), (2, 3)),
    "inner/dense/kernel": ((0,), (2,)),
    "joined/kernel": ((0, 1), (2,)),
    "outer/attention/key/kernel": ((1,), (2, 3)),
    "outer/attention/out/kernel": ((1, 2), (3,)),
    "outer/attention/query/kernel": ((1,), (2, 3)),
    "outer/attention/value/kernel": ((1,), (2, 3)),
    "outer/dense/kernel": ((1,), (2,)),
    "own": ((0,), (1,)),
}


class Own(nnx.Module):
    """A module whose attribute says which dims are inputs and outputs."""

    matrix_dims: ClassVar = {"heads": MatrixDims((0,), (1, 2))}

    def __init__(self, rngs):
        self.heads = nnx.Param(jnp.ones((4, 2, 2)))
        self.table = nnx.Param(jnp.ones((4, 4)))
        self.shift = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        heads = jnp.einsum("...d,dnh->...nh", x, self.heads[...])
        return heads.reshape(x.shape) @ self.table[...] + self.shift[...].reshape(1, 1, 4)


class NNXLayers(nnx.Module):
    """Layers of NNX; those in `stack` are made by `nnx.vmap`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3,), rngs=rngs)
        self.einsum = nnx.Einsum("bsd,dnh->bsnh", (4, 2, 3), (2, 3), rngs=rngs)
        self.joined = nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=rngs)
        self.stack = nnx.split_rngs(splits=3)(nnx.vmap(Own))(rngs)
        self.dense = nnx.Linear(4, 16, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.attention(self.embed(x)))
        x = self.joined(self.einsum(self.conv(x)))
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.stack
        )
        return self.dense(x)


NNX = {
    **{f"attention/{name}/kernel": ((0,), (1, 2)) for name in ("key", "query", "value")},
    "attention/out/kernel": ((0, 1), (2,)),
    "conv/kernel": ((0, 1), (2,)),
    "dense/kernel": ((0,), (1,)),
    "einsum/kernel": ((0,), (1, 2)),
    "embed/embedding": ((0,), (1,)),
    "joined/kernel": ((0, 1), (2,)),
    "stack/heads": ((1,), (2, 3)),
    "stack/table": ((1,), (2,)),  # Its shift, stacked, has two dims too.
}


def loss_of_tokens(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def matrices(program):
    """The dims of all matrices, by path."""
    return {x.path: x.matrix[:2] for x, _ in program.parameters if x.matrix is not None}


def program_of(model, build=fsdp, *, loss=loss_of_tokens, batch=TOKENS, tx=None, **options):
    options = {"min_weight_size": 1} | options if build is fsdp else options
    tx = tx or optax.sgd(0.1)
    return build(model, tx, loss, mesh=abstract_mesh({"data": 8}, 8), batch=batch, **options)


@pytest.mark.parametrize("build", [fsdp, data_parallel])
@pytest.mark.parametrize(("model", "expected"), [(EveryLayer(), LINEN), (NNXLayers, NNX)])
def test_each_layer_says_which_dims_of_its_kernel_are_inputs_and_outputs(model, expected, build):
    options = {"mode": "auto"} if build is data_parallel else {"pad": True}
    assert matrices(program_of(model, build, **options)) == expected


def test_a_program_asks_for_its_optimizer_with_the_dims_of_its_parameters():
    found = []

    def tx(parameters):
        found.append(muon_dims(parameters))
        return optax.contrib.muon(0.1, muon_weight_dimension_numbers=found[0])

    program = program_of(EveryLayer(), tx=tx, pad=True)
    dims = muon_dims(program, ("!own", "!inner/*"))
    kinds = jax.tree.map(lambda _, x: x is not None, program.unpadded_state.params, found[0])
    assert not kinds["embed"]["embedding"]
    assert kinds["own"]
    assert dims["own"] is None
    assert dims["inner"]["dense"] == {"bias": None, "kernel": None}
    assert dims["outer"]["dense"]["kernel"] == optax.contrib.MuonDimensionNumbers((1,), (2,))
    muon = program.abstract_state.opt_state.inner_states["muon"].inner_state[0].mu
    assert jax.tree.map(jnp.ndim, muon["outer"]["dense"]["kernel"]) == 3
    with pytest.raises(TypeError, match=r"the function .* returned 0\.1, expected an optax"):
        program_of(EveryLayer(), tx=lambda _: 0.1)


def test_both_parts_of_an_adapter_are_matrices():
    targets = {"*/heads": 2, "*/out": 3, "*/down": 2, "embed/embedding": 2}
    model = lora(Somebodys(), targets, alpha=4)
    tokens = Batch(*(np.zeros((8, 8), np.int32) for _ in "xy"))
    found = program_of(model, batch=tokens).parameters
    dims = {x.path: x.matrix for x, _ in found if x.trainable}
    assert dims == {
        "embed/embedding_lora_a": ((0,), (1,), False),
        "embed/embedding_lora_b": ((0,), (1,), False),
        "layers/down/lora_a": ((1,), (2,), True),
        "layers/down/lora_b": ((1,), (2,), True),
        "layers/heads/lora_a": ((1,), (2,), True),
        "layers/heads/lora_b": ((1,), (2, 3), True),
        "layers/out/lora_a": ((1, 2), (3,), True),
        "layers/out/lora_b": ((1,), (2,), True),
    }


@pytest.mark.parametrize("is_latent", [False, True])
def test_the_hidden_matrices_of_a_transformer_are_its_layers_kernels(is_latent):
    attention = Attention(latent=Latent(rank=4, rotary_size=2, value_size=4), qkv_bias=False)
    model = Transformer(
        vocab_size=16,
        hidden_size=8,
        num_heads=2,
        mlp_size=8,
        num_layers=2,
        attention=attention if is_latent else Attention(qkv_bias=True),
        experts=Experts(4, shared_size=8) if is_latent else Experts(),
    )
    hidden = {
        x.path.removeprefix("layers/"): x.matrix[:2]
        for x, _ in program_of(model).parameters
        if x.matrix is not None and x.matrix.hidden
    }
    if is_latent:
        expected = dict.fromkeys(("gate", "up", "down"), ((2,), (3,)))
        expected |= dict.fromkeys(("shared_gate", "shared_up", "shared_down"), ((1,), (2,)))
        expected = {f"experts/{name}": dims for name, dims in expected.items()}
        expected |= {"attention/latent/kernel": ((1,), (2,))}
        expected |= {f"attention/{name}/kernel": ((1,), (2, 3)) for name in ("expand", "query")}
    else:
        expected = {f"mlp/{name}/kernel": ((1,), (2,)) for name in ("gate", "up", "down")}
        names = ("query", "key", "value")
        expected |= {f"attention/{name}/kernel": ((1,), (2, 3)) for name in names}
    assert hidden == expected | {"attention/out/kernel": ((1, 2), (3,))}
