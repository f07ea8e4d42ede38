"""Transformers with the experts of other families: the same on every mesh as on one device."""

import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, Pipeline, Program, fsdp, make_mesh, zero
from manualpar.models import Experts, Transformer, flops_per_token
from manualpar.models.flat_fields import with_fields
from manualpar.models.generation import Generator
from manualpar.models.generation.drawing import sample_tokens
from manualpar.models.transformer import layer_place
from tests.models.transformer_families import (
    GPT_OSS,
    GPT_OSS_EXPERTS,
    LATENT,
    LLAMA4,
    LLAMA4_EXPERTS,
)
from tests.models.transformer_on_one_device import assert_same_as_plain_flax, loss_of

SMALL = Transformer(
    vocab_size=32,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=8,
    experts=Experts(8, capacity_factor=0.0),
)
QWEN = with_fields(SMALL, normalize_gates=False, shared_experts_size=12, shared_gate=True)
DEEPSEEK_V2 = with_fields(
    SMALL,
    experts_per_token=3,
    normalize_gates=False,
    gate_scale=3.0,
    expert_groups=4,
    expert_groups_per_token=2,
    expert_group_score="best",
    shared_experts_size=16,
)
DEEPSEEK_V3 = with_fields(
    SMALL,
    num_layers=3,
    expert_gates="sigmoid",
    gate_scale=2.5,
    router_bias=True,
    expert_groups=4,
    expert_groups_per_token=2,
    shared_experts_size=8,
    dense_layers=1,
    dense_mlp_size=24,
)
SCOUT = with_fields(SMALL, **LLAMA4, **LLAMA4_EXPERTS)
OSS = with_fields(SMALL, **GPT_OSS, **GPT_OSS_EXPERTS)
LATENT_V3 = with_fields(DEEPSEEK_V3, **LATENT, num_kv_heads=0)
LOCAL = {"attention_window": 3, "global_every": 2, "remat": "full"}
SPLIT = {"split_axis": "model", "expert_axis": "expert"}
SEQUENCE = SPLIT | {"sequence_parallel": True}
CONTEXT = {"context_axis": "context", "expert_axis": "expert"}
STAGES = {"stage": 2, "data": 2, "model": 2}
BOTH = ("data", "expert")


def make_batch() -> Batch:
    """Sixteen sequences, the last ones partly masked."""
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
    mask = np.ones((16, 8), bool)
    mask[12:, 3:] = False
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=mask)


def build(model: Transformer, mesh: dict[str, int], **options: Any) -> Program:
    """A program with SGD, of which a step shows the gradient itself."""
    if "expert" in mesh:
        options = {"axis_name": BOTH} | options
    if "context" in mesh:
        options["context_axis"] = "context"
    if "stage" in mesh:
        options["pipeline"] = Pipeline()
    strategy = functools.partial(options.pop("strategy", fsdp), min_weight_size=1)
    return strategy(
        model, optax.sgd(1.0), loss_of(model), mesh=make_mesh(mesh), batch=make_batch(), **options
    )


CASES: list[Any] = [
    (QWEN, SEQUENCE, {"data": 2, "expert": 2, "model": 2}, {}),
    (QWEN, SPLIT, {"data": 2, "model": 4}, {}),
    (QWEN, CONTEXT | {"capacity_factor": 0.75}, {"data": 2, "expert": 2, "context": 2}, {}),
    (DEEPSEEK_V2, SPLIT, {"data": 1, "expert": 4, "model": 2}, {"num_minibatches": 2}),
    (DEEPSEEK_V2, {"scan_layers": False}, {"data": 8}, {}),
    (DEEPSEEK_V3, {"expert_axis": "expert"}, {"data": 2, "stage": 2, "expert": 2}, {}),
    (DEEPSEEK_V3, SPLIT | CONTEXT, {"data": 1, "expert": 2, "context": 2, "model": 2}, {}),
    (DEEPSEEK_V3, SEQUENCE, STAGES, {"num_minibatches": 4}),
    (DEEPSEEK_V3, CONTEXT, {"stage": 2, "data": 2, "context": 2}, {"strategy": zero}),
    (OSS, SEQUENCE, {"data": 2, "expert": 2, "model": 2}, {}),
    (OSS, SPLIT | {"capacity_factor": 0.75}, {"data": 2, "expert": 2, "model": 2}, {}),
    (OSS, CONTEXT, {"data": 2, "expert": 2, "context": 2}, {}),
    *(
        (
            OSS,
            SPLIT | CONTEXT | {"context_attention": how},
            {"data": 2, "context": 2, "model": 2},
            {},
        )
        for how in ("ulysses", "gather")
    ),
    (
        OSS,
        SEQUENCE | {"num_layers": 4},
        {"stage": 2, "data": 2, "model": 2},
        {"num_minibatches": 4},
    ),
    (SCOUT, SEQUENCE | {"remat": "full"}, {"data": 2, "expert": 2, "model": 2}, {}),
    (SCOUT, SPLIT | {"capacity_factor": 0.75}, {"data": 1, "expert": 4, "model": 2}, {}),
    *(
        (
            SCOUT,
            SPLIT | CONTEXT | {"context_attention": how},
            {"data": 2, "context": 2, "model": 2},
            {},
        )
        for how in ("ring", "ulysses", "gather")
    ),
    (SCOUT, SEQUENCE | {"num_layers": 4}, STAGES, {"num_minibatches": 4}),
    (LATENT_V3, SEQUENCE, {"data": 2, "expert": 2, "model": 2}, {}),
    (LATENT_V3, SPLIT | {"latent_query_rank": 0, "remat": "dots"}, {"data": 2, "model": 4}, {}),
    (LATENT_V3, SPLIT | CONTEXT, {"data": 1, "expert": 2, "context": 2, "model": 2}, {}),
    (LATENT_V3, CONTEXT | {"context_attention": "ulysses"}, {"data": 4, "context": 2}, {}),
    (LATENT_V3, SEQUENCE, STAGES, {"num_minibatches": 4}),
    (
        *(DEEPSEEK_V3, LOCAL | {"expert_axis": "expert", "num_layers": 5, "dense_layers": 2}),
        *({"data": 2, "expert": 4}, {"axis_name": "data"}),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[2]))
def test_every_mesh_computes_what_one_device_does(case, devices8):
    del devices8
    model, fields, mesh, options = case
    model = with_fields(model, **fields)
    assert_same_as_plain_flax(build(model, mesh, **options), model, make_batch)


@pytest.mark.slow
def test_text_is_the_same_with_a_cache_and_without(devices8):
    del devices8
    program = build(with_fields(DEEPSEEK_V3, **SPLIT), {"data": 2, "expert": 2, "model": 2})
    state, prompt = program.init(jax.random.key(0)), [3, 1, 4]
    bias = jax.tree.map(lambda x: x.at[..., :3].set(0.3), state.collections)
    state = state.replace(collections=bias)
    (answer,) = Generator(program, stop_tokens=()).generate(state, [prompt], max_tokens=4)
    variables = jax.tree.map(jnp.asarray, program.whole(state))
    numbers: Any = {"num_tokens": 4, "sequence_length": 8, "temperature": 0}
    numbers["rng"] = jax.random.key(0)
    params = variables.pop("params")
    drawn = sample_tokens(DEEPSEEK_V3.apply, params, prompt, collections=variables, **numbers)
    assert answer.tokens == drawn.tolist()
    logits = DEEPSEEK_V3.apply({"params": params, **variables}, np.array([prompt]))[0, -1]
    expected = float(jax.nn.log_softmax(logits).max())
    assert answer.log_probabilities[0] == pytest.approx(expected, abs=1e-5)
    without = jax.tree.map(jnp.zeros_like, variables)
    changed = DEEPSEEK_V3.apply({"params": params, **without}, np.array([prompt]))[0, -1]
    assert abs(changed - logits).max() > 1e-3
    with pytest.raises(flax.errors.ScopeCollectionNotFound, match="router"):
        sample_tokens(DEEPSEEK_V3.apply, params, prompt, **numbers)


def test_dense_layers_stand_before_the_loop():
    shapes = jax.eval_shape(DEEPSEEK_V3.init, jax.random.key(0), make_batch().inputs)
    params = nn.unbox(shapes["params"])
    assert [layer_place(DEEPSEEK_V3, layer) for layer in range(3)] == [
        (("layer_0",), None),
        (("layers",), 0),
        (("layers",), 1),
    ]
    assert params["layer_0"]["mlp"]["up"]["kernel"].shape == (16, 24)
    assert params["layers"]["experts"]["up"].shape == (2, 8, 16, 8)
    assert params["layers"]["experts"]["shared_up"].shape == (2, 16, 8)
    assert shapes["router"]["layers"]["experts"]["bias"].shape == (2, 8)
    grouped = with_fields(
        DEEPSEEK_V3, num_layers=9, dense_layers=2, attention_window=2, global_every=2
    )
    assert layer_place(grouped, 1) == (("layer_1",), None)
    assert layer_place(grouped, 5) == (("layers", "layer_1"), 1)
    assert layer_place(grouped, 8) == (("layer_8",), None)


def test_operations_are_those_of_chosen_and_shared_experts():
    plain = flops_per_token(SMALL.clone(num_layers=3), 8)
    shared, dense, chosen = 3 * 8, 3 * 24, 2 * 3 * 8 + 8
    weights = 16 * (2 * shared + dense - chosen)
    assert flops_per_token(DEEPSEEK_V3, 8) == plain + 6 * weights
    assert flops_per_token(QWEN, 8) == flops_per_token(SMALL, 8) + 6 * 2 * 16 * (3 * 12 + 1)
