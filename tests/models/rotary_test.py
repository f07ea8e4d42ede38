"""Scaled and partial rotations, beside transformers' own functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.models import Rotary, RotaryScaling, Transformer
from manualpar.models.flat_fields import nest_fields
from manualpar.models.pretrained.architecture import (
    complete_fields,
    parse_architecture,
    write_config,
)
from manualpar.models.pretrained.family import Keys, read_rotations
from manualpar.models.rotary import rotary_angles, rotate

ORIGINAL, HEAD = 64, 32
PAIRS = HEAD // 2
SIZES = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 2 * HEAD,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(PAIRS)],
    "long_factor": [2.0 + i for i in range(PAIRS)],
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, given": YARN | {"attention_factor": 1.5},
    "yarn, scales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "longrope": LONGROPE,
    "longrope, given": LONGROPE | {"factor": 8.0, "attention_factor": 1.2},
    "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"rope_type": "proportional", "factor": 2.0},
}


def config_of(name, partial=1.0):
    """Returns a config whose longest sequence is longer than the original one."""
    scaling = {**SCALINGS[name], "rope_theta": 500.0}
    if partial != 1:
        scaling["partial_rotary_factor"] = partial
        if name.startswith("longrope"):
            kept = int(PAIRS * partial)
            for key in ("short_factor", "long_factor"):
                scaling[key] = scaling[key][:kept]
    longest = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    return {**SIZES, "max_position_embeddings": longest, "rope_parameters": scaling}


@pytest.mark.parametrize("name", SCALINGS)
def test_a_config_is_read_and_written(name):
    read = parse_architecture(config_of(name))
    fields = complete_fields(read)
    assert complete_fields(parse_architecture(write_config(fields))) == fields
    assert Transformer(**read.fields).rotary.scaling.kind == SCALINGS[name]["rope_type"]


@pytest.mark.slow
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("length", [16, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, length, partial):
    pytest.importorskip("torch", reason="pip install -e '.[interop]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = config_of(name, partial)
    theirs = transformers.LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
    expected, factor = functions[SCALINGS[name]["rope_type"]](theirs, "cpu", seq_len=length)
    read = read_rotations(Keys(config, "config.json"), "phi3", {"head_size": HEAD})
    rotary = Transformer(**nest_fields(read)).rotary
    angles = rotary_angles(
        jnp.arange(length),
        HEAD,
        base=rotary.base,
        scaling=rotary.scaling,
        features=rotary.features,
        length=length,
    )
    np.testing.assert_allclose(angles[1], expected, rtol=3e-6)
    assert rotary.scaling.amplitude == pytest.approx(factor, rel=1e-9)


def test_each_sequence_has_the_frequencies_of_its_length():
    scaling = RotaryScaling(
        "longrope", 4.0, original_length=4, short_factors=(1.0, 1.0), long_factors=(3.0, 5.0)
    )
    options = {"base": 100.0, "scaling": scaling}
    short, long = (rotary_angles(jnp.arange(6), 4, length=length, **options) for length in (4, 5))
    both = rotary_angles(jnp.tile(jnp.arange(6), (2, 1)), 4, length=jnp.array([4, 5]), **options)
    np.testing.assert_allclose(both, [short, long], rtol=1e-6)
    same = rotary_angles(jnp.arange(6), 4, length=jnp.array([4, 5]), **options)
    np.testing.assert_array_equal(same, both)
    np.testing.assert_allclose(long[1] / short[1], [1 / 3, 1 / 5], rtol=1e-6)


def test_features_are_rotated_in_part_and_as_neighbours():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    angles = rotary_angles(jnp.arange(3), 8, base=100.0, features=4)
    turned = rotate(x, angles, scale=2.0, rotary=Rotary(features=4))
    np.testing.assert_array_equal(turned[..., 4:], 2 * x[..., 4:])
    np.testing.assert_allclose(turned[..., :4], rotate(x[..., :4], angles, scale=2.0), rtol=1e-6)
    order = np.array([0, 2, 1, 3])
    neighbours = rotate(x[..., order], angles, rotary=Rotary(features=4, interleaved=True))
    np.testing.assert_allclose(
        neighbours[..., :4], rotate(x[..., :4], angles)[..., order], rtol=1e-6
    )
