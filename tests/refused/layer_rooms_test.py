"""Mistakes in attention, experts, pipelines and tensor-parallel plans."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from manualpar import (
    Batch,
    Column,
    Row,
    Vocab,
    abstract_mesh,
    data_parallel,
    make_mesh,
    tensor_parallel,
)
from manualpar.core.mesh.axes import with_axis_types
from manualpar.layers import Context, MoE, split_cross_entropy
from manualpar.layers.attention import attention
from manualpar.layers.moe.routing import auxiliary_loss
from manualpar.layers.pipeline.cut import check_divides
from manualpar.layers.pipeline.schedules import make_table
from tests.refused.table import build, check_refused, rows, trace_on
from tests.tiny import class_loss

ones = functools.partial(np.ones, dtype=np.float32)


# Attention.


def heads(*counts, length=12, batch=2):
    return [jax.ShapeDtypeStruct((batch, length, n, 4), jnp.float32) for n in counts]


def attend(options):
    counts = options.pop("heads", (4, 2, 2))
    jax.eval_shape(functools.partial(attention, **options), *heads(*counts))


def attend_split(case):
    """Traces attention over a sequence that is split over four devices."""
    how, counts, length, *options = case
    context = Context("context", how)
    function = functools.partial(context.attention, **dict(*options))
    mesh, arrays = abstract_mesh({"context": 4}, 4), heads(*counts, length=length, batch=1)
    trace_on(mesh, function, P(None, "context"), *arrays)


# Experts.

TOKENS = ones((8, 8, 4))
DATA_EXPERT, ALL = {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "model": 2}
BOTH = ("data", "expert")


def moe(**fields):
    return MoE(**{"num_experts": 8, "mlp_size": 8, "capacity_factor": 0.7} | fields)


def init_moe(x, *mask, **fields):
    jax.eval_shape(moe(**fields).init, jax.eval_shape(jax.random.key, 0), x, *mask)


def init_moe_on(case):
    """Initialises an MoE layer on a mesh; `case` is (fields, sizes of axes, data axes)."""
    fields, sizes, data_axes = case

    def init(x):
        return moe(**fields).init(jax.random.key(0), x)["params"]["router"]

    trace_on(abstract_mesh(sizes, 8), init, P(data_axes), TOKENS, out=P())


def init_moe_by_types(fields):
    mesh = with_axis_types(make_mesh(DATA_EXPERT), AxisType.Explicit)
    x = jax.ShapeDtypeStruct(TOKENS.shape, jnp.float32, sharding=jax.NamedSharding(mesh, P(BOTH)))
    with jax.set_mesh(mesh):
        init_moe(x, **fields)


# Plans.

VOCAB = 16


class Between(nn.Module):
    """Two dense layers, with a function between them."""

    between: object = nn.relu
    width: int = 32

    @nn.compact
    def __call__(self, x):
        x = self.between(nn.Dense(self.width, name="up")(x))
        return nn.Dense(VOCAB, name="down")(x)


def split_loss(params, apply_fn, batch, rng):
    losses = split_cross_entropy(apply_fn({"params": params}, batch.inputs), batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def build_planned(case, loss=split_loss):
    batch = Batch(ones((8, 4, 16)), np.zeros((8, 4), np.int32))
    build(
        tensor_parallel(*case), data_parallel, loss=loss, batch=batch, axes={"data": 2, "model": 4}
    )


PAIR = {"up": Column(), "down": Row()}
KERNEL = nn.with_partitioning(nn.initializers.ones, (None, "model"))
LINEAR = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
REFUSED = [
    *rows(
        "attention",
        lambda options: attend(dict(options)),
        ({"kind": "flash"}, "kind is 'flash', expected one of '', 'splash', 'cudnn'"),
        ({"kind": "cudnn"}, "is 'cudnn', and the devices are cpus.*expected a kind that can run"),
        ({"kind": "splash"}, "is 'splash', and the devices are cpus, and no TPUs"),
        ({"kind": "xla", "soft_cap": 30.0}, "is 'xla', and soft_cap is 30.0, but this kind"),
        ({"window": 0}, "window is 0, expected at least 1, or None"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0, expected more than 0, or None"),
        ({"documents": np.zeros((2, 11), np.int32)}, r"documents are int32\[2, 11\], expected"),
        ({"heads": (4, 2, 1)}, r"key is .* and value float32\[2, 12, 1, 4\], expected"),
        ({"heads": (3, 2, 2)}, r"query is float32\[2, 12, 3, 4\].*a multiple of"),
    ),
    *rows(
        "a split sequence",
        attend_split,
        (("ring", (2, 2, 2), 12), "a device has 3 positions, expected an even number"),
        (("gather", (2, 2, 2), 4), "Make the sequence a multiple of 8, two times the"),
        (("ulysses", (6, 2, 2), 8), "6 query heads and 2 key heads do not divide over the 4 dev"),
        (("ulysses", (12, 6, 6), 8), "12 query heads and 6 key heads do not divide"),
        (("ulysses", (12, 3, 3), 8), "12 query heads and 3 key heads do not divide"),
        (("ring", (5, 2, 2), 8), r"query is float32\[1, 2, 5, 4\].*a multiple of the number"),
        (("ring", (2, 2, 1), 8), r"key is float32\[1, 2, 2, 4\] and value float32\[1, 2, 1, 4\]"),
        (("rings", (2, 2, 2), 8), "how is 'rings', expected one of 'auto', 'ring', 'ulys"),
        (
            ("ring", (2, 2, 2), 8, {"kind": "xla"}),
            "is 'xla', expected '' or 'blockwise' with how='ring'",
        ),
    ),
    *rows(
        "a sequence that is not split",
        lambda x: trace_on(
            abstract_mesh({"context": 4}, 4),
            lambda _: Context("context").check_split(x),
            P("context"),
            ones(4),
        ),
        (ones((1, 8, 2, 4)), "same on all devices along 'context' by its type, expect"),
    ),
    *rows(
        "MoE",
        lambda fields: init_moe(TOKENS, **fields),
        *(
            (fields, f"MoE: .*{words}")
            for fields, words in (
                ({"num_experts": 0}, "num_experts is 0, expected at least 1"),
                ({"top_k": 9}, "top_k is 9, expected from 1 to num_experts=8"),
                ({"capacity_factor": 0.0}, "capacity_factor is 0.0, expected more than 0"),
                ({"gates": "relu"}, "gates is 'relu', expected one of 'softmax', 'sigmoid'"),
                ({"model_axis": ("model", "expert")}, "'expert'.* are in both"),
                ({"sequence": True}, "sequence is True, expected a model_axis"),
                (
                    {"num_shared": 1, "shared_size": 8},
                    "shared_size is 8, expected 0 with num_shared=1",
                ),
                ({"shared_is_gated": True}, "shared_is_gated is True, expected False without"),
                ({"gate_scale": 0.0}, "gate_scale is 0.0, expected more than 0"),
                ({"groups": 3}, "groups is 3, expected a divisor of num_experts=8"),
                (
                    {"groups": 4, "groups_per_token": 5},
                    "groups_per_token is 5, expected from 1 to groups=4",
                ),
                ({"groups": 4, "top_k": 3}, "groups_per_token is 1, expected from 2 to groups=4"),
                ({"groups": 8, "top_k": 1}, "group_score is 'best_two', expected 'best'"),
                (
                    {"group_score": "all"},
                    "group_score is 'all', expected one of 'best_two'",
                ),
            )
        ),
    ),
    *rows(
        "inputs of MoE",
        lambda args: init_moe(*args),
        ((TOKENS[0],), "MoE: x has the shape .* expected .batch, sequence, features."),
        ((TOKENS, np.ones((8, 1), bool)), "MoE: mask has the shape"),
    ),
    *rows(
        "MoE by types",
        init_moe_by_types,
        ({"capacity_factor": None}, "MoE: capacity_factor=None with"),
    ),
    *rows(
        "MoE on a mesh",
        init_moe_on,
        (
            ({"shared_size": 7, "model_axis": "model"}, ALL, BOTH),
            "MoE: .*shared_size is 7, expected a multiple",
        ),
        (
            ({"num_experts": 6}, DATA_EXPERT, BOTH),
            "MoE: .*num_experts is 6, expected a multiple of the 4",
        ),
        (
            ({"model_axis": "model", "mlp_size": 7}, ALL, BOTH),
            "MoE: .*mlp_size is 7, expected a multiple of",
        ),
        (({"axis": BOTH}, DATA_EXPERT, "data"), "MoE: .*varies over .'data'. only"),
    ),
    *rows("auxiliary_loss", auxiliary_loss, ({"intermediates": {}}, "variable_axes")),
    *rows(
        "a table of a schedule",
        lambda args: make_table(*args),
        (("zb", 2, 2), "schedule='zb', expected 'gpipe' or '1f1b'"),
        (("1f1b", 0, 2), "num_stages=0, expected at least 1"),
        (("1f1b", 2, 0), "num_microbatches=0, expected at least 1"),
        (("gpipe", 2, 2, -1), "chunks=-1, expected at least 1"),
    ),
    *rows(
        "layers in chunks",
        lambda args: check_divides(*args),
        ((6, 4, 1), r"6 layers, expected a multiple of the 4 stages, because"),
        ((12, 4, 2), r"multiple of the 4 stages times chunks=2, because"),
    ),
    *rows(
        "a plan",
        build_planned,
        (
            (Between(), {**PAIR, "*/up": Column()}),
            r"key '\*/up' .* matches no module .* such as 'up'",
        ),
        ((Between(), {**PAIR, "": Column()}), "key '' .* matches no module"),
        ((Between(), {**PAIR, "u*": Column(-2)}), "module 'up' has more than one style"),
        ((Between(), {"down": Row()}), "module 'down' .*Row.* the same on every device.*Column"),
        ((Between(), {"up": Column()}), "'down' .*Dense.* gets only a part of the features"),
        ((Between(lambda x: nn.Dense(8)(x)), PAIR), "'Dense_0'.* gets only a part of the features"),
        ((Between(nn.LayerNorm()), PAIR), "'between' .LayerNorm. gets only a part of the features"),
        (
            (Between(nn.relu, width=30), PAIR),
            "parameter 'down/kernel' .* dim 0 of size 30 does not",
        ),
        (
            (Between(), {"up": Column(-2), "down": Row()}),
            "module 'up' .* cannot compute with its shard",
        ),
        (
            (Between(), {"up": Column(), "down": Row(-3)}),
            "'down/kernel' has 2 dims.*expected at least 3",
        ),
        (
            (Between(), {"up": Vocab(), "down": Row()}),
            "module 'up' .* is a Dense, expected an nn.Embed",
        ),
        (
            (Between(nn.Dense(32, kernel_init=KERNEL)), {**PAIR, "between": Column()}),
            "'between/kernel' is annotated already",
        ),
    ),
    *rows(
        "a plan of logits in parts",
        functools.partial(build_planned, loss=class_loss),
        (
            (nn.Sequential([nn.Dense(VOCAB)]), {"layers_0": Column()}),
            r"the loss has a type that varies over .*call split_cross_entropy",
        ),
    ),
    *rows(
        "tensor_parallel",
        lambda args: tensor_parallel(*args[:2], **dict(*args[2:])),
        ((LINEAR, PAIR), TypeError, r"nnx.with_partitioning\(init, names, split=True\)"),
        ((Between(), [("up", Column())]), TypeError, r"plan is .*, expected styles by globs"),
        (
            (Between(), PAIR, {"overlap": "ring"}),
            r"overlap='ring' with sequence=False, expected 'none', or",
        ),
        (
            (Between(), PAIR, {"axis": ("model", "expert")}),
            TypeError,
            r"axis is .*, expected the name of a mesh axis",
        ),
        (
            (tensor_parallel(Between(), PAIR), PAIR),
            TypeError,
            r"(?s)model is TensorParallel.*, expected an instance",
        ),
    ),
    *rows("Row", Row, (0, "Row: dim=0, expected a negative number")),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
