"""A multilayer perceptron that classifies: hidden layers with silu and dropout, then the logits.

This model is an example: it has no code for parallelism and trains unchanged under every strategy.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Classifier(nn.Module):
    """Classifies vectors.

    The layers are `input_dense`, then `hidden_dense_1`, `hidden_dense_2`, ..., then `output_dense`.

    Attributes:
      hidden_size: The number of features of every hidden layer.
      num_classes: The number of features of the output.
      dropout_rate: The fraction of hidden activations that are dropped in training.
      num_layers: The number of hidden layers, including `input_dense`; at least 1.
      dtype: The dtype of the computation, or the dtype's name; parameters are float32.
      annotate: Whether the dims of kernels have names, for logical axis rules: `("embed", "mlp")`
        in hidden layers, `("mlp", None)` in the output.
    """

    hidden_size: int = 512
    num_classes: int = 10
    dropout_rate: float = 0.1
    num_layers: int = 1
    dtype: DTypeLike = "float32"
    annotate: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Computes the logits.

        Args:
          x: `[B, D]`, the vectors.
          train: Whether to apply dropout, which needs a `dropout` key.

        Returns:
          `float32[B, num_classes]`, unnormalised log-probabilities.

        Raises:
          ValueError: `num_layers` is less than 1.
        """
        if self.num_layers < 1:
            raise ValueError(
                f"Classifier: num_layers is {self.num_layers}, expected at least 1: input_dense."
            )
        dtype = jnp.dtype(self.dtype)
        kernel_init = nn.linear.default_kernel_init
        hidden_init, output_init = (
            nn.with_logical_partitioning(kernel_init, names) if self.annotate else kernel_init
            for names in (("embed", "mlp"), ("mlp", None))
        )
        for layer in range(self.num_layers):
            name = f"hidden_dense_{layer}" if layer else "input_dense"
            dense = nn.Dense(self.hidden_size, dtype=dtype, kernel_init=hidden_init, name=name)
            x = nn.silu(dense(x))
            x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        logits = nn.Dense(
            self.num_classes, dtype=dtype, kernel_init=output_init, name="output_dense"
        )(x)
        return logits.astype(jnp.float32)
