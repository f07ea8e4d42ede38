"""The transformer of `manualpar.models` in PyTorch, with the same parameters.

Only code that needs PyTorch imports this module (extra `torch`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-6  # The default of flax's norm.


class TorchAttention(nn.Module):
    """Causal attention with rotary positions and shared key and value heads."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, heads = shape["hidden_size"], shape["num_heads"]
        self.size = hidden // heads
        self.query = nn.Linear(hidden, heads * self.size, bias=False)
        self.key = nn.Linear(hidden, shape["num_kv_heads"] * self.size, bias=False)
        self.value = nn.Linear(hidden, shape["num_kv_heads"] * self.size, bias=False)
        self.out = nn.Linear(heads * self.size, hidden, bias=False)

    def forward(self, x: Any, sin: Any, cos: Any) -> Any:
        """Maps `[B, S, D]` to `[B, S, D]`."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(query, sin, cos),
            rotate(key, sin, cos),
            value,
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class TorchLayer(nn.Module):
    """Attention and a gated MLP, each added to the residual stream."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, mlp = shape["hidden_size"], shape["mlp_size"]
        self.attention_norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.attention = TorchAttention(shape)
        self.mlp_norm = nn.RMSNorm(hidden, eps=EPSILON)
        self.gate = nn.Linear(hidden, mlp, bias=False)
        self.up = nn.Linear(hidden, mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Any, sin: Any, cos: Any) -> Any:
        """Maps `[B, S, D]` to `[B, S, D]`."""
        x = x + self.attention(self.attention_norm(x), sin, cos)
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class TorchTransformer(nn.Module):
    """A causal language model."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        """Makes parameters with PyTorch's initial values, which `load` replaces.

        Args:
          shape: The sizes, under the names that `manualpar.models.Transformer` gives them:
            `vocab_size`, `num_layers`, `hidden_size`, `num_heads`, `num_kv_heads`, `mlp_size` and
            `rope_base`. None of them is 0.
        """
        super().__init__()
        self.size = shape["hidden_size"] // shape["num_heads"]
        self.rope_base = shape["rope_base"]
        self.embedding = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(TorchLayer(shape) for _ in range(shape["num_layers"]))
        self.final_norm = nn.RMSNorm(shape["hidden_size"], eps=EPSILON)
        self.head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)

    def forward(self, tokens: Any) -> Any:
        """Maps `int[B, S]` to `[B, S, V]`, the logits of each next token."""
        exponents = -torch.arange(0, self.size, 2, device=tokens.device) / self.size
        positions = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = torch.outer(positions, self.rope_base**exponents)
        x = self.embedding(tokens)
        sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        for layer in self.layers:
            x = layer(x, sin, cos)
        return self.head(self.final_norm(x))


def rotate(x: Any, sin: Any, cos: Any) -> Any:
    """Rotates pairs of features of `[B, N, S, H]`; features `i` and `i + H/2` are a pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def load(model: TorchTransformer, params: Mapping[str, np.ndarray]) -> None:
    """Copies the parameters of a `Transformer` with unrolled layers into a model.

    Args:
      model: The model.
      params: The arrays by their paths, such as `"layer_0/attention/query/kernel"`.

    Raises:
      ValueError: The names differ from the names of the model's parameters.
    """
    taken = {}
    for name, parameter in model.named_parameters():
        path, is_kernel = _path_of(name)
        value = params[path]
        if is_kernel:  # `nn.Linear` stores the transposed kernel.
            inputs = parameter.shape[1]
            value = value.reshape(inputs, -1).T
        taken[path] = value
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    if taken.keys() != params.keys():
        raise ValueError(f"load: parameters {sorted(params.keys() ^ taken.keys())} are left over.")


def _path_of(name: str) -> tuple[str, bool]:
    """Returns a parameter's path in the `Transformer`, and whether it is a kernel (a matrix)."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts = [f"layer_{parts[1]}", *parts[2:]]
        if parts[1] in ("gate", "up", "down"):
            parts.insert(1, "mlp")
    *path, _ = parts
    if path[-1].endswith("norm"):
        return "/".join([*path, "scale"]), False
    if path == ["embedding"]:
        return "embedding", False
    return ("head", True) if path == ["head"] else ("/".join([*path, "kernel"]), True)
