"""A transformer whose layers are split over a mesh axis is the one-device model, to every leaf."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import abstract_mesh
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.models.flat_fields import with_fields
from manualpar.models.layer_config import LayerConfig, Norm
from manualpar.models.transformer import size_of_vocabulary
from manualpar.models.transformer_layer import normalize
from tests.models.split_layers import EXPERTS, SMALL, _batch, build_program
from tests.models.transformer_families import GEMMA, LATENT, LLAMA4, QWEN
from tests.models.transformer_on_one_device import assert_same_as_plain_flax, on_one_device
from tests.one_device import slow_unless

EVERYTHING = {
    "num_kv_heads": 1,
    "tied_head": True,
    "remat": "dots",
    "sequence_parallel": True,
}
UNROLLED = {"scan_layers": False, "num_kv_heads": 4}
MESHES = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "1x8": {"data": 1, "model": 8},
    "8x1": {"data": 8, "model": 1},
    "2x2x2": {"data": 2, "model": 2, "expert": 2},
    "experts": {"data": 2, "expert": 4},
    "all experts": {"data": 1, "expert": 2, "model": 4},
    "replicas": {"replica": 2, "data": 2, "model": 2},
    "replicas of experts": {"replica": 2, "data": 2, "expert": 2},
}
DUAL = {"overlap": "dual_batch"}
FAST = (("fsdp", "2x4", EVERYTHING | QWEN | DUAL, {}),)


def _cases():
    yield from FAST
    yield "fsdp", "2x4", EVERYTHING | QWEN, {}
    yield "fsdp", "2x4", QWEN | DUAL, {}
    yield "fsdp", "2x4", GEMMA | {"sequence_parallel": True, "overlap": "ring"}, {}
    yield "fsdp", "2x4", LLAMA4 | {"sequence_parallel": True, "overlap": "ring"}, {}
    yield "fsdp", "2x4", LLAMA4, {"mode": "auto"}
    yield "zero2", "2x4", GEMMA | QWEN | {"remat": "full"}, {"num_minibatches": 2}
    yield "fsdp", "1x8", GEMMA | QWEN | {"num_kv_heads": 1, "sequence_parallel": True}, {}
    yield "hsdp", "replicas", GEMMA | QWEN | {"scan_layers": False, "remat": "dots"}, {}
    yield "fsdp", "2x4", GEMMA | QWEN, {"mode": "auto"}
    yield "fsdp", "2x2x2", GEMMA | QWEN | EXPERTS | {"activation": "silu"}, {}
    yield "fsdp", "4x2", UNROLLED, {}
    yield "fsdp", "2x4", EVERYTHING, {"num_minibatches": 2}
    for remat in ("none", "dots", "full"):
        for mesh in ("2x4", "4x2", "1x8"):
            yield "fsdp", mesh, EVERYTHING | {"overlap": "ring", "remat": remat}, {}
    for remat in ("none", "dots", "full"):
        yield "fsdp", "4x2", EVERYTHING | DUAL | {"remat": remat}, {}
        yield "fsdp", "2x4", UNROLLED | DUAL | {"remat": remat}, {"num_minibatches": 2}
    for build in ("whole", "zero1", "zero2", "dp"):
        yield build, "1x8", GEMMA | QWEN | DUAL | {"remat": "full"}, {"num_minibatches": 2}
    yield "hsdp", "replicas", LLAMA4 | DUAL | {"sequence_parallel": True}, {}
    yield "fsdp", "8x1", DUAL, {}
    yield "fsdp", "2x4", LATENT | DUAL | {"sequence_parallel": True, "num_kv_heads": 0}, {}
    yield "fsdp", "2x4", DUAL, {"communicate_every": "step", "num_minibatches": 4}
    yield "fsdp", "2x2x2", UNROLLED | EXPERTS | DUAL, {}
    yield "fsdp", "all experts", EVERYTHING | EXPERTS | DUAL, {}
    yield "fsdp", "2x2x2", EXPERTS | DUAL | {"capacity_factor": 0.0}, {}
    ring = UNROLLED | {"sequence_parallel": True, "overlap": "ring"}
    yield "fsdp", "2x4", ring, {"num_minibatches": 2}
    yield "fsdp", "2x2x2", ring | EXPERTS, {}
    for mesh in MESHES:
        for kv_heads in (1, 2, 8):
            for sequence in (False, True):
                fields = {"num_kv_heads": kv_heads, "sequence_parallel": sequence}
                yield "fsdp", mesh, fields, {}
    for build in ("whole", "zero1", "zero2", "dp"):
        for remat in ("none", "full"):
            yield build, "2x4", EVERYTHING | {"remat": remat}, {"num_minibatches": 2}
    for sequence in (False, True):
        yield "hsdp", "replicas", {"sequence_parallel": sequence}, {}
        yield (
            "fsdp",
            "2x4",
            UNROLLED | {"sequence_parallel": sequence},
            {"communicate_every": "step"},
        )
    yield "fsdp", "2x4", EVERYTHING, {"mode": "auto"}
    yield "fsdp", "2x2x2", UNROLLED | EXPERTS, {}
    for mesh in ("2x2x2", "experts", "all experts", "2x4"):
        for sequence in (False, True):
            yield "fsdp", mesh, EVERYTHING | EXPERTS | {"sequence_parallel": sequence}, {}
    for build in ("whole", "zero1", "zero2", "dp"):
        yield build, "2x2x2", EVERYTHING | EXPERTS, {"num_minibatches": 2}
    yield "hsdp", "replicas of experts", EXPERTS, {}
    yield "fsdp", "experts", EXPERTS | {"capacity_factor": 0.0}, {}
    yield "fsdp", "2x2x2", EVERYTHING | EXPERTS, {"mode": "auto"}


@pytest.mark.parametrize(
    ("build", "mesh", "fields", "options"), [slow_unless(FAST, *case) for case in _cases()]
)
def test_a_split_transformer_is_the_same_as_one_device(build, mesh, fields, options, devices8):
    del devices8
    model = with_fields(SMALL, **fields)
    program = build_program(build, model, MESHES[mesh], **options)
    assert_same_as_plain_flax(program, model, _batch)


@pytest.mark.slow
def test_what_pads_the_vocabulary_has_no_part_in_the_model():
    padded = with_fields(SMALL, **EVERYTHING)
    _, params, *_ = on_one_device(padded, _batch)
    model = padded.clone(vocab_multiple=1)
    assert (size_of_vocabulary(padded), size_of_vocabulary(model)) == (32, 29)
    cut = {**params, "embedding": params["embedding"][:29]}
    tokens = jnp.asarray(_batch().inputs)[:3].at[0, 3].set(29)
    logits, expected = (
        jax.jit(model.apply)({"params": params}, tokens)
        for model, params in ((padded, params), (model, cut))
    )
    np.testing.assert_allclose(logits[1:, :, :29], expected[1:], rtol=1e-6, atol=1e-6)
    assert (logits[1:, :, 29:] == -jnp.inf).all()
    assert np.isnan(logits[0, :, :29]).all()
    assert np.isnan(expected[0]).all()


class Normalize(nn.Module):
    norm: Norm
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(
            x, "norm", LayerConfig(8, 2, 2, 4, 8, 0.0, 1.0, self.dtype, norm=self.norm)
        )


@pytest.mark.parametrize("norm", [Norm(), Norm(kind="layer", bias=True), Norm(offset=True)])
def test_gradients_of_a_norm_in_bfloat16_are_summed_over_positions_in_float32(norm):
    module = Normalize(norm, jnp.dtype("bfloat16"))
    x = jnp.ones((2, 8, 8), "bfloat16")
    params = jax.tree.map(lambda p: p.astype("bfloat16"), module.init(jax.random.key(0), x))
    step = jax.shard_map(
        jax.grad(lambda params, x: module.apply(params, x).astype(jnp.float32).sum()),
        mesh=abstract_mesh({"model": 2}, num_devices=2),
        in_specs=(P(), P(None, "model")),
        out_specs=P(),
    )
    equations = all_equations(jax.make_jaxpr(step)(params, x).jaxpr)
    sums = [eqn.invars[0].aval.dtype for eqn in equations if eqn.primitive.name.startswith("psum")]
    assert sums == [jnp.float32] * len(jax.tree.leaves(params))


def test_the_offset_of_a_norm_in_bfloat16_is_added_in_float32():
    scale = jnp.full(8, 2.0**-9, "bfloat16")  # One plus this is one in bfloat16.
    module = Normalize(Norm(offset=True), jnp.dtype("float32"))
    y = module.apply({"params": {"norm": {"scale": scale}}}, jnp.ones((1, 1, 8)))
    np.testing.assert_allclose(y, 1 + 2.0**-9, rtol=1e-5)
