"""Mistakes with a `Transformer`: in its fields, tokens, mesh and layout."""

import functools

import jax
import numpy as np
import optax
import pytest

from manualpar import Batch, fsdp, make_mesh
from manualpar.models import Transformer, flops_per_token
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import with_fields
from manualpar.planner.topology import parse_topology
from manualpar.plans.layouts.layout_estimate import LayoutEstimator
from tests.models import split_layers
from tests.models.transformer_families import LATENT
from tests.refused.sentences import cases
from tests.refused.table import check_refused, rows

KEY = jax.eval_shape(lambda: jax.random.key(0))
SMALL = Transformer(
    vocab_size=16, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=24
)
TWO_KINDS = with_fields(
    SMALL, num_layers=8, attention_window=2, global_every=3, local_rope_base=100.0
)
TWO_KINDS = with_fields(TWO_KINDS, rope_scaling="linear", rope_factor=4.0)
EXPERTS = with_fields(SMALL, mlp_size=8, num_experts=8, capacity_factor=0.0)
QWEN = with_fields(EXPERTS, normalize_gates=False, shared_experts_size=12, shared_gate=True)
LATENT_MODEL = with_fields(SMALL, **LATENT, num_kv_heads=0)
TOKENS = np.zeros((2, 4), np.int32)
# Fields of a model that are wrong on every mesh, and in a count of its FLOPs.
FIELDS = (
    ({"num_layers": 0}, "num_layers is 0, expected at least 1"),
    ({"num_heads": 0}, "num_heads is 0, expected at least 1"),
    ({"hidden_size": 18}, "hidden_size is 18, expected a multiple of num_heads=4"),
    ({"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads=4"),
    ({"num_kv_heads": -1}, "num_kv_heads is -1, expected a divisor"),
    ({"head_size": 5}, "head_size is 5, expected an even number"),
    ({"head_size": -2}, "head_size is -2, expected an even number"),
    ({"hidden_size": 12}, r"head_size is 0, expected an even .*num_heads is 3\)"),
    ({"rope_base": 1}, "Rotary: base is 1, expected more than 1"),
    ({"dropout_rate": 1.0}, "dropout_rate is 1.0, expected from 0"),
    ({"remat": "all"}, "remat is 'all', expected one of 'auto', 'none', 'dots', 'full'"),
    ({"attention": "flash"}, "Attention: kind is 'flash', expected one of '', 'splash', 'cu"),
    ({"attention_window": -1}, "Attention: window is -1, expected at least 1"),
    ({"attention_soft_cap": -0.5}, "Attention: soft_cap is -0.5, expected more than 0"),
    ({"bos_token": 16}, "bos_token is 16, expected less than vocab_size=16"),
    ({"bos_token": -2}, "bos_token is -2, expected less than vocab_size=16, or -1"),
    ({"dtype": "int32"}, "dtype is 'int32', expected a floating dtype"),
)


def init(model, inputs=TOKENS):
    jax.eval_shape(model.init, KEY, inputs)


def count(model):
    flops_per_token(model, 8)


def fields(use, model, *given):
    """Yields rows for wrong fields; messages begin with a group's name or with `Transformer:`."""
    own = (row for row in given if not row[1][0].isupper())
    of_groups = (row for row in given if row[1][0].isupper())
    named = (*cases(*own, begins="Transformer: "), *cases(*of_groups, begins="^"))
    return rows("fields", lambda changes: use(with_fields(model, **changes)), *named)


def build_halves(options):
    model = with_fields(split_layers.SMALL, overlap="dual_batch")
    split_layers.build_program("fsdp", model, {"data": 2, "model": 4}, **options)


def build(changes, mesh=(2, 4)):
    axes = dict(zip(("data", "model"), mesh, strict=True))
    split_layers.build_program("fsdp", with_fields(split_layers.SMALL, **changes), axes)


def build_context(changes, context_axis="context"):
    model = with_fields(
        split_layers.SMALL, **{"split_axis": "", "context_axis": "context", **changes}
    )
    axes = {"data": 2, "context": 4} if context_axis == "" else {"data": 1, "context": 8}
    options = {"batch": Batch(*np.ones((2, 8, 16), np.int32)), "min_weight_size": 16}
    options |= {"context_axis": context_axis} if context_axis else {}
    fsdp(model, optax.sgd(1.0), language_model_loss, mesh=make_mesh(axes), **options)


def plan_layouts(model):
    LayoutEstimator(model, parse_topology("v5p:2x2x1"), examples=8, positions=8)


REFUSED = [
    *fields(init, SMALL, *FIELDS),
    *fields(count, SMALL, *FIELDS),
    *fields(
        count,
        TWO_KINDS,
        ({"global_every": 1}, "Attention: global_every is 1, expected at least 2, such as 6"),
        ({"attention_window": 0}, "Attention: global_every is 3, expected 0 without window"),
        ({"global_every": 0}, r"rotary.local_base is 100.0, expected 0 without attention.glo"),
        ({"local_rope_base": 0.5}, "Rotary: local_base is 0.5, expected more than 1"),
        ({"rope_scaling": ""}, "RotaryScaling: factor is 4.0, expected 1 without kind"),
        ({"rope_scaling": "ntk"}, "RotaryScaling: kind is 'ntk', expected one of '', 'linear"),
        ({"rope_attention_factor": 2.0}, "RotaryScaling: attention_factor is 2.0, expected 0, bec"),
        ({"rope_scaling": "longrope"}, r"RotaryScaling: short_factors is \(\), expected a number"),
        ({"rope_scaling": "longrope"}, r"RotaryScaling: .* config\.model\.rope_short_factors\."),
        ({"rotary_features": 3}, "Rotary: features is 3, expected an even number, or 0"),
        ({"rotary_features": 64}, "Transformer: rotary.features is 64, expected at most the"),
        ({"rope_factor": 0.5}, "RotaryScaling: factor is 0.5, expected at least 1"),
        ({"rope_low_factor": 4.0}, "RotaryScaling: low_factor is 4.0, expected between 0 and high"),
        ({"rope_original_length": 0}, "RotaryScaling: original_length is 0, expected at least 1"),
        ({"norm_epsilon": 0.0}, "Norm: epsilon is 0.0, expected more than 0"),
        ({"attention_scale": -1.0}, "Attention: scale is -1.0, expected more than 0"),
        ({"activation": "relu"}, "activation is 'relu', expected one of 'silu', 'gelu'"),
        ({"activation": "gelu", "num_experts": 2}, "activation is 'gelu', expected 'silu' with"),
    ),
    *fields(
        init,
        TWO_KINDS,
        ({"attention_chunk": -1}, "Attention: chunk is -1, expected at least 1, such as 8192"),
        ({"attention_chunk": 4}, "Attention: chunk is 4, .* and 0 with a window"),
        (
            {"rotated_norm": True, "query_key_norm": True},
            "Attention: rotated_norm is True, expected False with query_key_norm",
        ),
        ({"score_growth": -1.0}, "Attention: score_growth is -1.0, expected more than 0"),
        ({"score_growth_length": 0}, "Attention: score_growth_length is 0, expected at least 1"),
        (
            {"score_growth": 0.1},
            "attention.score_growth is 0.1, expected 0 without attention.unrotated_global",
        ),
        ({"gates_on_inputs": True}, "Experts: gates_on_inputs is True, expected False without"),
    ),
    *fields(
        init,
        QWEN,
        ({"gates_on_inputs": True}, "Experts: gates_on_inputs is True, expected False with top"),
        ({"num_experts": 0}, "Experts: shared_size is 12, expected 0 without num_experts"),
        ({"gate_scale": 0.0}, "Experts: gate_scale is 0.0, expected more than 0"),
        ({"expert_gates": "relu"}, "Experts: gates is 'relu', expected one of 'softmax', 'sig"),
        ({"expert_groups": 3}, "Experts: groups is 3, expected a divisor of num_experts=8"),
        (
            {"expert_groups": 8, "expert_group_score": "best"},
            "Experts: groups_per_token is 1, expected from 2 to groups=8, because",
        ),
        (
            {"expert_groups": 8, "expert_groups_per_token": 2},
            "Experts: group_score is 'best_two', expected 'best' with groups of one",
        ),
        ({"shared_experts_size": -1}, "Experts: shared_size is -1, expected at least 1, or 0"),
        ({"shared_experts_size": 0}, "Experts: shared_is_gated is True, expected False without"),
        ({"dense_layers": 2}, "experts.dense_layers is 2, expected less than num_layers=2"),
        (
            {"dense_layers": 1, "attention_window": 2, "global_every": 2},
            "experts.dense_layers is 1, expected a multiple of 2",
        ),
        ({"dense_mlp_size": 8}, "Experts: dense_mlp_size is 8, expected 0 without dense_layers"),
    ),
    *fields(
        init,
        LATENT_MODEL,
        ({"pre_norms": False, "post_norms": True}, "norm.pre is False, expected True with exp"),
        ({"shared_norm": True, "parallel_mlp": True}, "norm.shared is True, expected False with"),
        ({"learned_positions": 8}, "rotary.learned is 8, expected 0 with attention.latent, whose"),
        ({"rotary_features": 2}, "rotary.features is 2, expected 0 with attention.latent, whose"),
        (
            {"global_every": 2, "unrotated_global": True},
            "attention.unrotated_global is True, expected False with attention.latent",
        ),
        ({"head_size": 4}, "head_size is 4, expected more than attention.latent.rotary_size=4"),
        ({"attention_sinks": True}, "Attention: sinks is True, expected False with a latent"),
        ({"rotated_norm": True}, "Attention: rotated_norm is True, expected False with a latent"),
    ),
    *fields(
        init,
        SMALL,
        (
            {"learned_positions": 8, "rotated_norm": True},
            "attention.rotated_norm is True, expected False with rotary.learned",
        ),
        ({"learned_positions": 3}, "tokens have 4 positions, expected at most rotary.learned=3"),
        ({"logit_soft_cap": -1.0}, "logit_soft_cap is -1.0, expected more than 0, such as 30, or"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, expected from 0 to less than 1"),
        ({"z_loss": -1.0}, "z_loss is -1.0, expected 0 for none, or more, such as 1e-4"),
    ),
    *rows(
        "on a mesh",
        build,
        (
            {"num_heads": 6, "head_size": 4, "num_kv_heads": 6},
            r"attention/key/kernel.*dim 2 of size",
        ),
        ({"num_heads": 12, "head_size": 4, "num_kv_heads": 3}, r"key/kernel.*dim 2 of size 3"),
        ({"mlp_size": 30}, r"down/kernel.*dim 1 of size 30 does not divide over the 4 devices"),
        ({"vocab_multiple": 1}, r"embedding.*dim 0 of size 29 does not divide over the 4 devices"),
        ({"annotate": True}, "annotate is True, expected False with split.axis='model'"),
        ({"split_axis": "", "sequence_parallel": True}, "sequence_parallel is True, expected Fal"),
        ({"vocab_multiple": 0}, "vocab_multiple is 0, expected at least 1"),
        ({"overlap": "ring"}, "overlap is 'ring', expected 'none' or 'dual_batch' without sequ"),
        ({"overlap": "dual_batch", "split_axis": ""}, "overlap is 'dual_batch', expected 'none', "),
        ({"overlap": "rings", "sequence_parallel": True}, "overlap is 'rings', expected one of"),
        ({"num_experts": -1}, "num_experts is -1, expected the number of experts, or 0"),
        ({"num_experts": 2, "experts_per_token": 3}, "Experts: top_k is 3, expected from 1 to"),
        ({"num_experts": 2, "capacity_factor": -1.0}, "capacity_factor is -1.0, expected more"),
        ({"expert_axis": "data"}, "Experts: axis is 'data', expected None without num_experts"),
    ),
    *rows(
        "two halves",
        build_halves,
        (
            {"num_minibatches": 8},
            "split.overlap is 'dual_batch', and a device has 1 sequence of a minibatch, expected "
            "an even number",
        ),
        (
            {"mode": "auto"},
            "split.overlap is 'dual_batch', expected 'none' or mode='manual', because in other",
        ),
    ),
    *rows(
        "split contexts",
        build_context,
        (
            {"split_axis": "context"},
            "context.axis is 'context', expected another axis than split.ax",
        ),
        (
            {"attention": "cudnn", "context_attention": "ring"},
            "attention.kind is 'cudnn', expected '' or 'blockwise' with con",
        ),
        (
            {"context_attention": "all"},
            "Context: how is 'all', expected one of 'auto', 'ring', 'uly",
        ),
        ({"context_attention": "ulysses", "num_heads": 4}, "4 query heads and 2 key heads do not"),
    ),
    *rows(
        "a context that the program does not split",
        functools.partial(build_context, context_axis=""),
        ({}, "Build the program with context_axis='context'"),
    ),
    *rows(
        "tokens",
        lambda tokens: init(SMALL, tokens),
        (np.zeros((1, 4), np.float32), r"tokens are \w+\[.*expected integers \[batch, sequence"),
        (np.zeros(4, np.int32), r"tokens are \w+\[.*expected integers \[batch, sequence"),
        ({"tokens": TOKENS}, "inputs have tokens, expected 'tokens' and 'doc"),
        (
            {"tokens": TOKENS, "documents": np.zeros((2, 5), np.int32)},
            r"documents are int32\[2, 5\], expected integers \[2, 4\]",
        ),
        (
            {"tokens": TOKENS, "documents": np.zeros((2, 4), np.float32)},
            r"documents are float32\[2, 4\], expected integers \[2, 4\]",
        ),
    ),
    *rows(
        "layouts",
        plan_layouts,
        (QWEN, "plan: config.model.shared_experts_size is .*, expected"),
        (with_fields(EXPERTS, dense_layers=1), "plan: config.model.dense_layers is .*, expected"),
        (
            with_fields(EXPERTS, capacity_factor=0.0),
            "plan: config.model.capacity_factor is .*, expected",
        ),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
