"""What the benchmarks of steps train: a classifier, a language model and a wide MLP.

Each is a model with its loss, its optimizer and one batch, the same in every program that is
compared. All compute in float32, the only precision that a CPU is fast in. None drops activations,
so that losses may be held against those of one device, and none clips gradients: an optimizer that
runs on every device's shards, as the notebook's does, would clip by the norm of a shard.
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
from manualpar.training.optimizer import adamw

NAMES = ("classifier", "lm", "lm-scanned", "mlp", "lm-wide")
FEATURES, CLASSES = 784, 10
# Of the language model, for who writes it with another library.
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Something to train.

    Attributes:
      name: Its name.
      words: What it is, in words.
      model: The Linen model.
      loss_fn: Its loss.
      tx: The optimizer.
      batch: A global batch of random numbers, on the host.
      num_minibatches: How many parts a device takes its share of it in.
      min_weight_size: The fewest elements of a parameter that is sharded.
      split_model: The model with its layers split over the mesh axis `model`; `None` if they do not
        divide over eight devices.
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
        """The batch's shapes."""
        shapes: Batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, self.batch))
        return shapes


def make_workload(name: str, *, is_tiny: bool = False, batch_size: int = 0) -> Workload:
    """Makes a workload.

    Args:
      name: One of `NAMES`: `classifier` is that of `configs/fsdp.py` and `lm` that of
        `configs/fsdp_lm.py`, both in float32, `lm-scanned` runs its layers in a loop, and `mlp` has
        few rows a device for its width, so that what is communicated weighs most; so has the
        language model `lm-wide`.
      is_tiny: Whether it shall be so small that it compiles at once, to test what measures it.
      batch_size: Examples of a batch; 0 for the workload's own number.

    Returns:
      The workload.

    Raises:
      ValueError: There is none of that name.
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
    """A workload of vectors."""
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
    if layers % 2:  # The last hidden layer's features are split.
        plan["output_dense"] = Row()
    return Workload(
        name=name,
        words=f"{words}, batch {size}, minibatches {minibatches}",
        model=model,
        split_model=tensor_parallel(model, plan),
        loss_fn=classification_loss,
        tx=adamw(optax.constant_schedule(1e-3), weight_decay=0.1),
        batch=batch,
        num_minibatches=minibatches,
        min_weight_size=2**4,
    )


def _language_model(name: str, *, is_tiny: bool, batch_size: int) -> Workload:
    """A workload of tokens."""
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
        split_model=model.clone(split_axis="model") if name == "lm-wide" else None,
        loss_fn=language_model_loss,
        tx=adamw(
            optax.constant_schedule(ADAMW["lr"]),
            weight_decay=ADAMW["weight_decay"],
            b1=ADAMW["b1"],
            b2=ADAMW["b2"],
        ),
        batch=Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:]),
        num_minibatches=1,
        min_weight_size=2**10,
    )
