"""A language model of experts and split products with biases, without attention."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.state.train_state import Batch
from manualpar.layers import MoE, SplitDense, auxiliary_loss, enter, leave, split_lookup

VOCABULARY, WIDTH, LAYERS = 64, 32, 2


class ExpertBlock(nn.Module):
    """Two split products with biases, then experts."""

    sequence: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        """Adds to the activations; the second value is for `nn.scan`."""
        dim = 1 if self.sequence else None
        h = enter(nn.LayerNorm(name="norm")(x), "model", dim)
        h = nn.gelu(SplitDense((WIDTH, 2 * WIDTH), (None, "model"), name="up")(h))
        down = SplitDense((2 * WIDTH, WIDTH), ("model", None), sequence_dim=dim, name="down")
        x = x + down(h)
        experts = MoE(
            num_experts=8,
            mlp_size=WIDTH,
            capacity_factor=1.0,
            num_shared=1,
            axis="expert",
            model_axis="model",
            sequence=self.sequence,
            name="experts",
        )
        return x + experts(nn.LayerNorm(name="experts_norm")(x)), None


class ExpertModel(nn.Module):
    """A language model without attention, some of whose layers are experts."""

    sequence_parallel: bool = False
    scan_layers: bool = True
    remat: str = "none"

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """The logits."""
        table = self.param("embedding", nn.initializers.normal(1.0), (VOCABULARY, WIDTH))
        x = split_lookup(table, tokens, "model", 1 if self.sequence_parallel else None)
        block: Any = ExpertBlock
        if self.remat == "full":
            block = nn.remat(block, prevent_cse=not self.scan_layers)
        if self.scan_layers:
            block = nn.scan(
                block,
                variable_axes={"params": 0, "losses": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
        for _ in range(1 if self.scan_layers else LAYERS):
            x, _ = block(self.sequence_parallel)(x, None)
        if self.sequence_parallel:
            x = enter(x, "model", 1)
            x = leave(x / jax.lax.axis_size("model"), "model") if is_axis_bound("model") else x
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="final_norm")(x))


def expert_loss(
    params: Any, apply_fn: Callable[..., Any], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Any]:
    """The cross entropy and the losses of the routers."""
    del rng
    logits, sown = apply_fn({"params": params}, batch.inputs, mutable=["losses", "intermediates"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels) * batch.mask
    count = batch.mask.sum()
    auxiliary, _ = auxiliary_loss(sown, batch.mask.sum(-1), load_balance=0.1, router_z=0.1)
    loss = losses.sum() / jnp.where(count > 0, count, 1) + auxiliary
    return loss, {"loss": (loss * count, count)}
