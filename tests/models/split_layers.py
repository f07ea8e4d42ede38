"""Transformers whose layers are split over a mesh axis."""

import functools

import numpy as np
import optax

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.models import Split, Transformer
from tests.models.transformer_on_one_device import loss_of

BOS = 28
SMALL = Transformer(
    vocab_size=29,
    vocab_multiple=8,
    num_layers=2,
    hidden_size=16,
    num_heads=8,
    num_kv_heads=2,
    mlp_size=32,
    bos_token=BOS,
    split=Split("model"),
)
BUILDERS = {
    "fsdp": functools.partial(fsdp, min_weight_size=16),
    "whole": functools.partial(fsdp, min_weight_size=16, reshard_after_forward=False),
    "hsdp": functools.partial(hsdp, min_weight_size=16),
    "zero1": functools.partial(zero, stage=1, min_weight_size=16),
    "zero2": functools.partial(zero, stage=2, min_weight_size=16),
    "dp": data_parallel,
}


def _batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, BOS, (16, 9)).astype(np.int32)
    tokens[:, [2, 6]] = BOS
    mask = (rng.random((16, 8)) < 0.7).astype(np.float32)
    mask[:2] = 0  # The share of a device in a minibatch may be padding alone.
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=mask)


def build_program(build, model, mesh, batch=None, **options):
    axes = tuple(axis for axis in ("data", "expert") if axis in mesh)
    return BUILDERS[build](
        model,
        optax.sgd(1.0),
        loss_of(model),
        mesh=make_mesh(mesh),
        axis_name=axes if len(axes) > 1 else axes[0],
        batch=batch or _batch(),
        **options,
    )


EXPERTS = {"num_experts": 4, "mlp_size": 8, "capacity_factor": 0.75, "expert_axis": "expert"}
