"""The workloads of the step benchmarks: a classifier, a language model and a wide MLP.

A workload is a model with a loss, an optimizer and one batch, which all compared programs use. All
workloads compute in float32, because a CPU is fast only in this precision. They have no dropout, so
that losses can be compared with one device. They do not clip gradients, because an optimizer that
updates shards, as in the notebook, would clip by the norm of a shard.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Column, Row, tensor_parallel
from manualpar.core.model.loss_function import LossFn
from manualpar.core.state.train_state import Batch
from manualpar.models import Classifier, Transformer
from manualpar.models.cross_entropy import classification_loss, language_model_loss
from manualpar.models.flat_fields import with_fields
from manualpar.training.optimizer import weight_decay_mask

NAMES = ("classifier", "lm", "lm-scanned", "mlp", "lm-wide")
FEATURES, CLASSES = 784, 10
# The arguments of the language model's AdamW, also for PyTorch.
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with all that is needed to train it.

    Attributes:
      name: The workload's name.
      words: A description.
      model: The Linen model.
      loss_fn: The loss function.
      tx: The optimizer.
      batch: A global batch of random numbers, on the host.
      num_minibatches: The number of minibatches in a device's share of the batch.
      min_weight_size: Parameters with fewer elements are not sharded.
      split_model: The model with its layers split over the mesh axis `model`; `None` if the layers
        cannot be divided among eight devices.
    """

    name: str
    words: str
    model: nn.Module
    loss_fn: LossFn
    tx: optax.GradientTransformation
    batch: Batch
    num_minibatches: int
    min_weight_size: int
    split_model: Any = None

    @property
    def abstract_batch(self) -> Batch:
        """The batch as shapes and dtypes."""
        shapes: Batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, self.batch))
        return shapes


def make_workload(name: str, *, is_tiny: bool = False, batch_size: int = 0) -> Workload:
    """Makes a workload.

    Args:
      name: One of `NAMES`. `classifier` is the model of `configs/fsdp.py`, and `lm` the model of
        `configs/fsdp_lm.py`, both in float32. `lm-scanned` is `lm` with layers in a loop. `mlp` and
        the language model `lm-wide` have few rows per device for their width, so that
        communication is a large part of the time.
      is_tiny: Whether the model is so small that it compiles fast, to test the benchmarks.
      batch_size: The number of examples in a batch; 0 for the workload's default.

    Returns:
      The workload.

    Raises:
      ValueError: There is no workload of that name.
    """
    if name == "classifier":
        layers, width, size = (1, 32, 64) if is_tiny else (2, 256, 128)
        words = f"classifier, {layers} hidden layers of {width}"
        return _classifier(name, words, layers, width, batch_size or size, minibatches=4)
    if name == "mlp":
        layers, width, size = (2, 64, 32) if is_tiny else (4, 1024, 128)
        words = f"MLP, {layers} hidden layers of {width}"
        return _classifier(name, words, layers, width, batch_size or size, minibatches=1)
    if name in ("lm", "lm-scanned", "lm-wide"):
        return _language_model(name, is_tiny=is_tiny, batch_size=batch_size)
    raise ValueError(f"make_workload: name={name!r}, expected one of {', '.join(NAMES)}.")


def _classifier(
    name: str, words: str, layers: int, width: int, size: int, *, minibatches: int
) -> Workload:
    """Makes the workload of a classifier of vectors."""
    random = np.random.default_rng(0)
    batch = Batch(
        inputs=random.normal(size=(size, FEATURES)).astype(np.float32),
        labels=random.integers(0, CLASSES, size).astype(np.int32),
    )
    model = Classifier(hidden_size=width, num_classes=CLASSES, dropout_rate=0.0, num_layers=layers)
    hidden = ["input_dense", *(f"hidden_dense_{layer}" for layer in range(1, layers))]
    plan: dict[str, Column | Row] = {
        name: Row() if index % 2 else Column() for index, name in enumerate(hidden)
    }
    if layers % 2:  # Then the last hidden layer is split by columns.
        plan["output_dense"] = Row()
    return Workload(
        name=name,
        words=f"{words}, batch {size}, minibatches {minibatches}",
        model=model,
        split_model=tensor_parallel(model, plan),
        loss_fn=classification_loss,
        tx=optax.adamw(optax.constant_schedule(1e-3), weight_decay=0.1, mask=weight_decay_mask),
        batch=batch,
        num_minibatches=minibatches,
        min_weight_size=2**4,
    )


def _language_model(name: str, *, is_tiny: bool, batch_size: int) -> Workload:
    """Makes a workload of tokens."""
    layers, hidden, mlp, length, heads, size = 3, 160, 512, 128, 5, 32
    if name == "lm-wide":
        layers, hidden, mlp, length, heads, size = 2, 512, 1536, 32, 8, 8
    if is_tiny:
        layers, hidden, mlp, length, heads, size = 2, 32, 64, 16, 8 if name == "lm-wide" else 2, 8
    size = batch_size or size
    tokens = np.random.default_rng(0).integers(0, 256, (size, length + 1)).astype(np.int32)
    is_scanned = name == "lm-scanned"
    how = "scanned" if is_scanned else "unrolled"
    model = Transformer(
        vocab_size=256 if name == "lm-wide" else 260,
        num_layers=layers,
        hidden_size=hidden,
        mlp_size=mlp,
        num_heads=heads,
        num_kv_heads=1,
        scan_layers=is_scanned,
    )
    return Workload(
        name=name,
        words=f"transformer, {layers} layers of {hidden}, {how}, batch {size} x {length} tokens",
        model=model,
        split_model=with_fields(model, split_axis="model") if name == "lm-wide" else None,
        loss_fn=language_model_loss,
        tx=optax.adamw(
            optax.constant_schedule(ADAMW["lr"]),
            mask=weight_decay_mask,
            weight_decay=ADAMW["weight_decay"],
            b1=ADAMW["b1"],
            b2=ADAMW["b2"],
        ),
        batch=Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:]),
        num_minibatches=1,
        min_weight_size=2**10,
    )
