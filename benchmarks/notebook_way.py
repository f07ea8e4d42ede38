"""A fully sharded training step in the style of the notebook of `docs/notebook.md`.

Each module is wrapped by hand in `shard_module_params`. It gathers its parameters in each call, so
in every minibatch again. Gathered parameters are kept for the backward pass. Every metric has a
separate all-reduce. Forward pass, backward pass and optimizer are one function inside `shard_map`.
The computation and the initial parameters are the same as for `manualpar.fsdp`, so that the two
steps can be compared.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.compiled_steps import CompiledStep, mean_loss
from benchmarks.workloads import Workload
from manualpar import (
    Batch,
    TrainState,
    accumulate_gradients,
    shard_module_params,
    shard_params,
    sync_gradients,
    sync_metrics,
)
from manualpar.models.classifier import Classifier
from manualpar.models.rotary import rotary_angles
from manualpar.models.transformer import Transformer
from manualpar.models.transformer_layer import Layer, LayerConfig

AXIS = "data"


class NotebookClassifier(nn.Module):
    """A `Classifier` whose layers gather their parameters."""

    like: Classifier
    min_weight_size: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps `[B, D]` to logits, `float32[B, num_classes]`."""
        del train  # The model has no dropout.
        dense = shard_module_params(nn.Dense, AXIS, self.min_weight_size)
        for layer in range(self.like.num_layers):
            name = f"hidden_dense_{layer}" if layer else "input_dense"
            x = nn.silu(dense(self.like.hidden_size, name=name)(x))
        return dense(self.like.num_classes, name="output_dense")(x).astype(jnp.float32)


class Embed(nn.Module):
    """The embedding of a `Transformer` as a module."""

    vocab_size: int
    hidden_size: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `int32[B, S]` to their rows, `[B, S, D]`."""
        shape = (self.vocab_size, self.hidden_size)
        table = self.param("embedding", nn.initializers.normal(1.0), shape)
        return jnp.take(table, tokens, axis=0)


class Head(nn.Module):
    """The norm and the head of a `Transformer` as a module."""

    vocab_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, S, D]` to logits, `float32[B, S, V]`."""
        x = nn.RMSNorm(name="final_norm")(x)
        init = nn.initializers.normal(x.shape[-1] ** -0.5)
        return x @ self.param("head", init, (x.shape[-1], self.vocab_size))


class NotebookTransformer(nn.Module):
    """A `Transformer` whose embedding, layers and head gather their parameters."""

    like: Transformer
    min_weight_size: int

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        """Maps tokens `int32[B, S]` to logits, `float32[B, S, V]`."""
        del train
        like, wrap = self.like, self._wrap
        heads = like.num_heads
        config = LayerConfig(
            hidden_size=like.hidden_size,
            num_heads=heads,
            num_kv_heads=like.num_kv_heads or heads,
            head_size=like.hidden_size // heads,
            mlp_size=like.mlp_size,
            dropout_rate=0.0,
            added_scale=(2 * like.num_layers) ** -0.5,
            dtype=jnp.dtype(jnp.float32),
        )
        x = wrap(Embed)(like.vocab_size, like.hidden_size, name="embed")(tokens)
        angles = rotary_angles(jnp.arange(tokens.shape[1]), config.head_size, base=like.rotary.base)
        layer = wrap(Layer)
        if like.scan_layers:
            layers = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=like.num_layers,
            )
            x, _ = layers(config, name="layers")(x, angles, None)
        else:
            for index in range(like.num_layers):
                x, _ = layer(config, name=f"layer_{index}")(x, angles, None)
        return wrap(Head)(like.vocab_size, name="out")(x)

    def _wrap(self, module: Any) -> Any:
        return shard_module_params(module, AXIS, self.min_weight_size)


def notebook_step(workload: Workload, mesh: Mesh, params: Any) -> CompiledStep:
    """Compiles the training step in the notebook's style.

    Args:
      workload: The workload to train.
      mesh: A mesh whose only axis is `data`.
      params: The unsharded initial parameters of the workload's model, on the host.

    Returns:
      The step. Its state is a pair: a `TrainState`, and the sums of the metrics of all steps.

    Raises:
      TypeError: The workload's model is neither a `Classifier` nor a `Transformer`.
    """
    model, params = _rewrite(workload, params)
    batch = jax.device_put(workload.batch, jax.NamedSharding(mesh, P(AXIS)))

    def init(params: Any) -> TrainState:
        params = shard_params(params, AXIS, workload.min_weight_size)
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=workload.tx, rng=jax.random.key(0)
        )

    # The shapes tell only which axis shards each parameter, so these `out_specs` need not be right.
    shapes = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    specs = nn.get_partition_spec(jax.eval_shape(shapes, params))
    whole_init = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=True)
    state = jax.jit(whole_init)(params)

    def train_step(carried: Any, batch: Batch) -> tuple[Any, Any]:
        state, metrics = carried
        rng, step_rng = jax.random.split(state.rng)
        grads, step_metrics = accumulate_gradients(
            state, batch, step_rng, workload.num_minibatches, loss_fn=workload.loss_fn
        )
        grads = sync_gradients(grads, AXIS)
        state = state.apply_gradients(grads=grads, rng=rng)
        step_metrics = jax.tree.map(lambda x: sync_metrics(x, AXIS), step_metrics)
        return (state, jax.tree.map(jnp.add, metrics, step_metrics)), step_metrics

    specs = (specs, P())
    step = jax.shard_map(
        train_step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(specs, P()), check_vma=True
    )
    zero = jax.device_put(jnp.zeros(()), jax.NamedSharding(mesh, P()))
    names = ("loss", "accuracy")
    metrics = {name: (jnp.copy(zero), jnp.copy(zero)) for name in names}
    return CompiledStep(
        jax.jit(step, donate_argnums=0),
        (state, metrics),
        batch,
        parts=(state.params, state.opt_state),
        read_loss=mean_loss,
    )


def _rewrite(workload: Workload, params: Any) -> tuple[nn.Module, Any]:
    """Returns the notebook's version of the model, and its parameters under the new names."""
    model = workload.model
    if isinstance(model, Classifier):
        return NotebookClassifier(model, workload.min_weight_size), params
    if isinstance(model, Transformer):
        layers = {name: value for name, value in params.items() if name.startswith("layer")}
        renamed = {
            "embed": {"embedding": params["embedding"]},
            "out": {"head": params["head"], "final_norm": params["final_norm"]},
            **layers,
        }
        return NotebookTransformer(model, workload.min_weight_size), renamed
    raise TypeError(
        f"notebook_step: the model is a {type(model).__name__}, expected a Classifier or a "
        "Transformer; write it in the notebook's way in benchmarks/notebook_way.py."
    )
