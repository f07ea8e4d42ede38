"""Programs of small transformers that answer."""

import jax
import numpy as np
import optax

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from tests.models.transformer_families import GEMMA, GPT_OSS, LATENT, LLAMA4

SIZES = {"vocab_size": 64, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "mlp_size": 16}
FAMILIES = {
    "grouped, documents, tied": {"num_kv_heads": 2, "bos_token": 0, "tied_head": True},
    "window": {"attention_window": 3, "qkv_bias": True, "scan_layers": False},
    "two kinds": GEMMA | {"num_layers": 5, "num_kv_heads": 1, "attention_window": 4},
    "experts": {"num_experts": 4, "mlp_size": 8, "remat": "full"},
    "sinks": GPT_OSS | {"num_layers": 5, "num_kv_heads": 2},
    "chunks": LLAMA4 | {"num_layers": 5, "num_kv_heads": 2, "bos_token": 0},
    "latent": LATENT | {"bos_token": 0},
}


def make_program(model, axes, builder=fsdp, **options):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    batch = Batch(inputs=np.zeros((8, 16), np.int32), labels=np.zeros((8, 16), np.int32))
    data_axes = tuple(axis for axis in axes if axis in ("data", "expert"))
    if builder not in (data_parallel,):
        options["min_weight_size"] = 0
    experts = getattr(model, "model", model).experts  # Adapters have a model.
    loss = mixture_of_experts_loss if experts.num_experts else language_model_loss
    mesh = make_mesh(axes, devices)
    options |= {"mesh": mesh, "batch": batch, "axis_name": data_axes}
    return builder(model, optax.sgd(0.1), loss, **options)


def make_state(program):
    """A state with parameters that tell layers and heads apart, the same on every mesh."""
    params = program.init(jax.random.key(0)).params
    rng = np.random.default_rng(1)
    whole = jax.tree.map(
        lambda x: np.asarray(x) * rng.uniform(0.5, 2.0, x.shape).astype(x.dtype), params
    )
    return program.init_from(whole)
