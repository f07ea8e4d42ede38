"""Products of layers that may be split over a mesh axis, and the names of their dims."""

from typing import Any

import flax.linen as nn

from manualpar.layers import SplitDense
from manualpar.models.layer_config import LayerConfig

# The logical names of the dims that are split over the axis.
SPLIT_DIMS = frozenset({"vocab", "heads", "kv_heads", "mlp"})

DimNames = tuple[str | None, ...]


def marked(init: Any, dim_names: DimNames, *, annotate: bool) -> Any:
    """Adds the names of a parameter's dims to its initializer if `annotate` is set."""
    return nn.with_logical_partitioning(init, dim_names) if annotate else init


def split_dims(dim_names: DimNames, axis: str | None) -> DimNames:
    """Returns `axis` for each dim name that layers split, and `None` for all other dims."""
    return tuple(axis if name in SPLIT_DIMS else None for name in dim_names)


def make_product(
    config: LayerConfig,
    shape: tuple[int, ...],
    dim_names: DimNames,
    *,
    contracted: int = 1,
    scale: float = 1.0,
    use_bias: bool = False,
    name: str,
) -> SplitDense:
    """Makes a `SplitDense` layer; the variance of its initial weights is `scale**2 / inputs`."""
    dims, names = range(len(shape)), split_dims(dim_names, config.split.axis)
    is_row = any(names[:contracted])
    init = nn.initializers.variance_scaling(
        scale**2, "fan_in", "normal", dims[:contracted], dims[contracted:]
    )
    return SplitDense(
        shape,
        names,
        contracted,
        use_bias=use_bias,
        kernel_init=marked(init, dim_names, annotate=config.annotate),
        bias_init=marked(nn.initializers.zeros, dim_names[contracted:], annotate=config.annotate),
        dtype=config.dtype,
        sequence_dim=config.split.sequence_dim if is_row else None,
        overlap=config.split.overlap if is_row else "none",
        shared="kv_heads" in dim_names,
        name=name,
    )
