"""QK-clip: the largest scores of a step are noted, and kernels of queries and keys are scaled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import fsdp_lm
from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.models import Attention, Latent, Rotary, Split, Transformer, qk_clip
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.transformer_layer import largest_scores
from manualpar.training.experiment import prepare
from tests.one_device import train_program

THRESHOLD = 0.5
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 16, 9)).astype(np.int32)
BATCHES = [Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:]) for tokens in TOKENS]
MODEL = Transformer(
    vocab_size=16,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=16,
    num_layers=2,
    attention=Attention(notes_largest=True, qkv_bias=True),
    rotary=Rotary(learned=8),  # Not rotated, so that scores are products of kernels' results.
)
TX = optax.chain(optax.sgd(0.3, momentum=0.9), qk_clip(THRESHOLD))
KEY = "_overwrite_with_gradient"
close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)


def train(build, axes, model=MODEL, *, tx=TX, batches=BATCHES, **options):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = make_mesh(axes, devices)
    program = build(model, tx, language_model_loss, mesh=mesh, batch=batches[0], **options)
    state, losses = train_program(program, batches)
    return program.whole(state), losses


@functools.cache
def on_one_device():
    return train(data_parallel, {"data": 1})


def by_hand(params, batch):
    """The largest score of each head, `[L, N]`, from the queries and keys of a plain call."""
    plain = dataclasses.replace(MODEL, attention=Attention(qkv_bias=True), scan_layers=False)
    layers = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(2)}
    params = {name: x for name, x in params.items() if name != "layers"} | layers
    _, kept = plain.apply(
        {"params": params},
        batch.inputs,
        capture_intermediates=lambda m, _: m.name in ("query", "key"),
    )
    found = []
    for layer in range(2):
        heads = kept["intermediates"][f"layer_{layer}"]["attention"]
        query, key = (heads[name]["__call__"][0] for name in ("query", "key"))
        key = jnp.repeat(key, 2, axis=2)
        scores = jnp.einsum("bqnh,bsnh->bnqs", query, key) / 2.0
        found.append(jnp.where(jnp.tri(8, dtype=bool), scores, -jnp.inf).max((0, 2, 3)))
    return jnp.stack(found)


def test_kernels_of_heads_with_large_scores_shrink_after_the_update(devices8):
    """Heads that share a key shrink together, by what the plain scores of the step say."""
    clipped, _ = train(data_parallel, {"data": 1}, batches=BATCHES[:1])
    plain, _ = train(data_parallel, {"data": 1}, batches=BATCHES[:1], tx=optax.sgd(0.3, 0.9))
    program = data_parallel(
        MODEL, TX, language_model_loss, mesh=make_mesh({"data": 1}, devices8[:1]), batch=BATCHES[0]
    )
    params = program.whole(program.init(jax.random.key(0)))["params"]
    largest = jax.jit(by_hand)(params, BATCHES[0])
    close(clipped[KEY]["layers"]["attention"]["largest_score"], largest)
    groups = np.asarray(largest).reshape(2, 2, 2).max(-1)
    assert (groups > THRESHOLD).any()
    factor = np.sqrt(np.minimum(THRESHOLD / groups, 1))
    for name, of_heads in (("query", np.repeat(factor, 2, axis=1)), ("key", factor)):
        ours, before = (x["params"]["layers"]["attention"][name] for x in (clipped, plain))
        close(ours["kernel"], before["kernel"] * of_heads[:, None, :, None])
        close(ours["bias"], before["bias"] * of_heads[:, :, None])
    close(
        clipped["params"]["layers"]["attention"]["value"]["kernel"][0],
        plain["params"]["layers"]["attention"]["value"]["kernel"][0],
    )


SPLIT = dataclasses.replace(MODEL, split=Split("model"))
SHARDED = {"min_weight_size": 1}
CASES = {
    "fsdp": (fsdp, {"data": 8}, MODEL, SHARDED),
    "dp": (data_parallel, {"data": 8}, MODEL, {}),
    "zero": (functools.partial(zero, stage=1), {"data": 8}, MODEL, SHARDED),
    "hsdp, scan": (
        hsdp,
        {"replica": 2, "data": 4},
        MODEL,
        {**SHARDED, "num_minibatches": 2, "use_scan": True},
    ),
    "heads, minibatches": (
        fsdp,
        {"data": 2, "model": 4},
        SPLIT,
        {**SHARDED, "num_minibatches": 2},
    ),
    "heads, hsdp": (hsdp, {"replica": 2, "data": 2, "model": 2}, SPLIT, SHARDED),
    "heads, ring": (
        data_parallel,
        {"data": 4, "model": 2},
        dataclasses.replace(MODEL, split=Split("model", sequence_parallel=True, overlap="ring")),
        {},
    ),
    "auto": (fsdp, {"data": 8}, MODEL, {**SHARDED, "mode": "auto"}),
    "remat": (fsdp, {"data": 8}, dataclasses.replace(MODEL, remat="full"), SHARDED),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "heads, minibatches")) for x in CASES]
)
def test_every_mesh_clips_as_one_device(devices8, name):
    build, axes, model, options = CASES[name]
    found, losses = train(build, axes, model, **options)
    expected, of_one = on_one_device()
    close(losses, of_one)
    jax.tree.map(close, found, expected)


@pytest.mark.parametrize("fields", [{}, {"window": 5}, {"chunk": 7}], ids=str)
def test_the_largest_scores_are_those_that_attention_sees(fields, monkeypatch):
    monkeypatch.setattr("manualpar.models.transformer_layer._SMALLEST_BLOCK", 6)
    B, S, N, K, H = 2, 20, 4, 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (B, S, N, H))
    key = jax.random.normal(keys[1], (B, S, K, H))
    documents = jnp.cumsum(jax.random.bernoulli(keys[2], 0.2, (B, S)), axis=1)
    position = np.arange(S)
    seen = position[:, None] >= position[None]
    if "window" in fields:
        seen &= position[:, None] - position[None] < fields["window"]
    if "chunk" in fields:
        seen &= position[:, None] // 7 == position[None] // 7
    scores = np.einsum("bqnh,bsnh->bnqs", query, np.repeat(key, N // K, axis=2)) * H**-0.5
    same = np.asarray(documents)[:, :, None] == np.asarray(documents)[:, None]
    expected = np.where((seen & same)[:, None], scores, -np.inf).max((0, 2, 3))
    found = jax.jit(functools.partial(largest_scores, how=Attention(**fields)))
    np.testing.assert_allclose(found(query, key, documents), expected, rtol=1e-5)


def test_a_config_clips_and_refuses_models_whose_scores_it_cannot_bound(devices8):
    config = fsdp_lm.get_config()
    config.data.sequence_length = 8
    config.model.update({"num_layers": 1, "hidden_size": 16, "mlp_size": 16, "num_heads": 2})
    with config.unlocked():
        config.optimizer.qk_clip = 100.0
    state = prepare(config).program.abstract_state
    assert state.collections[KEY]["layer_0"]["attention"]["largest_score"].shape == (2,)
    for field, value, words in (
        ("query_key_norm", True, "attention.query_key_norm is True, expected none with"),
        ("attention_soft_cap", 50.0, "attention.soft_cap is 50.0, expected none with"),
        ("lora", ("*query:2",), "the model is LowRankModel, expected 0.0, because only a"),
    ):
        other = config.copy_and_resolve_references()
        with other.unlocked():
            other.model[field] = value
        with pytest.raises(ValueError, match=rf"config.optimizer.qk_clip is 100.0.* {words}"):
            prepare(other)


def test_an_optimizer_without_noted_scores_is_refused(devices8):
    model = dataclasses.replace(MODEL, attention=Attention())
    with pytest.raises(ValueError, match="no layer notes its largest scores, expected a Transf"):
        train(data_parallel, {"data": 1}, model)
    latent = Attention(notes_largest=True, latent=Latent(rank=4, rotary_size=2, value_size=4))
    for fields, words in (
        ({"attention": latent, "num_kv_heads": 0, "rotary": Rotary()}, "attention.latent is .*"),
        ({"split": Split("model", overlap="dual_batch")}, "split.overlap is 'dual_batch'"),
    ):
        model = dataclasses.replace(MODEL, **fields)
        with pytest.raises(ValueError, match=f"{words}, expected .* with notes_largest"):
            jax.eval_shape(model.init, jax.random.key(0), BATCHES[0].inputs)
