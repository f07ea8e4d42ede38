"""Layers of two kinds: where they lie, what they see, and rotations that are slower."""

import functools
import math
import time

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.models import Attention, Rotary, RotaryScaling, Transformer, flops_per_token
from manualpar.models.flat_fields import with_fields
from manualpar.models.rotary import rotary_angles
from manualpar.models.transformer import layer_place, layers_by_window, window_of

# Two groups of three layers, and two that are left over.
MODEL = Transformer(
    vocab_size=16,
    num_layers=8,
    hidden_size=8,
    num_heads=2,
    mlp_size=8,
    attention=Attention(window=2, global_every=3),
    rotary=Rotary(local_base=100.0, scaling=RotaryScaling("linear", factor=4.0)),
)
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 9)).astype(np.int32)


def _written_out(model, params):
    """The parameters of a scanned model as one has them whose layers are written out."""
    others = {name: x for name, x in params.items() if not name.startswith("layer")}
    for layer in range(model.num_layers):
        place = layer_place(model, layer)
        own = functools.reduce(lambda tree, name: tree[name], place.path, params)
        if place.entry is not None:
            own = jax.tree.map(lambda x, entry=place.entry: x[entry], own)
        others[f"layer_{layer}"] = own
    return others


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_groups_are_the_same_layers_as_those_written_out(remat):
    scanned = MODEL.clone(remat=remat)
    params = nn.unbox(jax.jit(scanned.init)(jax.random.key(0), TOKENS)["params"])
    assert sorted(params["layers"]) == ["layer_0", "layer_1", "layer_2"]
    assert params["layers"]["layer_1"]["attention"]["query"]["kernel"].shape == (2, 8, 2, 4)

    @functools.partial(jax.jit, static_argnums=0)
    def differentiate(model, params):
        def loss(params):
            return (model.apply({"params": params}, TOKENS) ** 2).mean()

        return jax.value_and_grad(loss)(params)

    value, grads = differentiate(scanned, params)
    one_by_one = MODEL.clone(scan_layers=False)
    expected, of_each = differentiate(one_by_one, _written_out(MODEL, params))
    assert value == pytest.approx(float(expected), rel=1e-5)
    chex.assert_trees_all_close(_written_out(MODEL, grads), of_each, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_only_every_so_many_layers_see_more_than_a_window():
    model = MODEL.clone(num_layers=3, scan_layers=False)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    assert "layers" not in params
    logits, changed = jax.jit(model.apply), TOKENS.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 16
    seen = []
    for layer in (0, 2):
        # The others add nothing.
        quiet = {name: params[name] for name in params if name != f"layer_{layer}"}
        others = {name: x for name, x in quiet.items() if name.startswith("layer_")}
        own = {"params": {**params, **jax.tree.map(jnp.zeros_like, others)}}
        differs = np.abs(logits(own, TOKENS) - logits(own, changed)).max((0, 2)) > 1e-6
        seen.append(int(differs.sum()))
        assert differs[: seen[-1]].all()
    assert seen == [2, 9]


def test_a_token_costs_what_its_layers_see():
    def of(layers):
        model = MODEL.clone(num_layers=layers)
        return flops_per_token(model, 100) - flops_per_token(model, 2)

    # Beyond the window only global layers see more: 12 N H for each position.
    assert [of(layers) for layers in (2, 3, 8)] == [0, 12 * 8 * 98, 2 * 12 * 8 * 98]


def test_scanned_layers_cost_nothing_each_before_anything_is_computed():
    model = MODEL.clone(num_layers=10**9)
    started = time.process_time()
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert flops_per_token(model.clone(num_layers=10**8), 100) > 0
    # Walking through these layers took 40 and 35 seconds.
    assert time.process_time() - started < 8
    [kernel] = jax.tree.leaves(params["layers"]["layer_1"]["attention"]["query"])
    assert kernel.shape[0] == 10**9 // 3
    assert sorted(name for name in params if name.startswith("layer_")) == ["layer_999999999"]


@pytest.mark.parametrize("fields", [{}, {"global_every": 0}, {"num_layers": 9}, {"num_layers": 2}])
def test_layers_of_each_kind_are_counted_as_one_by_one(fields):
    model = with_fields(MODEL, **fields)
    counted = dict.fromkeys((2, 0), 0)
    for layer in range(model.num_layers):
        counted[window_of(model, layer)] += 1
    assert layers_by_window(model) == tuple(counted.items())


def test_slow_rotations_keep_what_turns_fast():
    plain = rotary_angles(jnp.arange(4), 8, base=1e4)
    linear = rotary_angles(jnp.arange(4), 8, base=1e4, scaling=RotaryScaling("linear", 8.0))
    np.testing.assert_allclose(linear, plain / 8, rtol=1e-6)
    # In 64 pi positions the pairs turn 32, 3.2, 0.32 and 0.032 times.
    scaling = RotaryScaling("llama3", 8.0, 1.0, 4.0, round(64 * math.pi))
    turns = round(64 * math.pi) / (2 * math.pi) * 10.0 ** -np.arange(4)
    kept = np.clip((turns - 1) / 3, 0, 1)
    assert (kept[0], kept[2], kept[3]) == (1, 0, 0)
    assert 0.5 < kept[1] < 0.8
    scaled = rotary_angles(jnp.arange(4), 8, base=1e4, scaling=scaling)
    np.testing.assert_allclose(scaled, plain * (kept + (1 - kept) / 8)[None], rtol=1e-5)
    # Without pairs between the limits.
    at_once = RotaryScaling("llama3", 8.0, 1.0, 1.0, round(64 * math.pi))
    scaled = rotary_angles(jnp.arange(4), 8, base=1e4, scaling=at_once)
    np.testing.assert_allclose(scaled, plain / np.where(turns > 1, 1, 8)[None], rtol=1e-6)
