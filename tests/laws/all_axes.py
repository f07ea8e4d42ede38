"""Builds a transformer whose mesh has data, model, context and stage axes, for several tests."""

import numpy as np
import optax

from manualpar import Batch, Pipeline, abstract_mesh, fsdp, make_mesh
from manualpar.models import Context, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.flat_fields import with_fields

TOKENS = np.random.default_rng(0).integers(0, 32, (8, 17), dtype=np.int32)
MASK = (np.arange(16)[None] < np.arange(1, 16, 2)[:, None]).astype(np.float32)
BATCH = Batch(TOKENS[:, :-1], TOKENS[:, 1:], MASK)
MODEL = Transformer(
    vocab_size=32,
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    mlp_size=16,
    scan_layers=True,
    split=Split("model"),
    context=Context("context"),
)


def build(sizes, *, devices=None, builder=fsdp, fields=(), **options):
    fields = dict(fields)
    mesh = make_mesh(sizes, devices) if devices else abstract_mesh(sizes, 8)
    axes = tuple(axis for axis in ("data", "expert") if axis in sizes) or ("data",)
    if "expert" in sizes:
        fields |= {"num_experts": 4, "capacity_factor": 1.0, "expert_axis": "expert"}
    if "context" in sizes:
        options.setdefault("context_axis", "context")
    if "stage" in sizes:
        options.setdefault("pipeline", Pipeline())
    return builder(
        with_fields(MODEL, **fields),
        optax.sgd(1.0),
        mixture_of_experts_loss if "num_experts" in fields else language_model_loss,
        mesh=mesh,
        batch=BATCH,
        axis_name=axes,
        **({"num_minibatches": 2, "min_weight_size": 1} | options),
    )
