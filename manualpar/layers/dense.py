"""A dense layer whose kernel may be split over a model axis.

The layer gets a mesh axis or `None` for each dim of the kernel. These names choose between the two
products of Megatron-LM (Shoeybi et al., https://arxiv.org/abs/1909.08053). A product with a split
output dim is *column-parallel*: each device computes its part of the features, and nothing is sent.
A product with a split contracted dim is *row-parallel*: each device computes a term of every
output, and the terms are summed over the axis.

```python
x = enter(x, "model")  # Once for all products of the same input.
gate = SplitDense((D, F), (None, "model"), name="gate")(x)
up = SplitDense((D, F), (None, "model"), name="up")(x)
x = SplitDense((F, D), ("model", None), name="down")(nn.silu(gate) * up)
```

The layer does not call `enter` itself, because each call adds a collective. It refuses a
column-parallel product if `enter` was not called on the input.

To overlap communication and products, use `enter_ring` in place of `enter`, and `overlap="ring"`
for the row-parallel product, see `manualpar.layers.ring`. Column-parallel products then return
`Chunks`.

Invariants: parameters and their initial values are the same, bit for bit, as on one device. If no
`shard_map` binds the axis, the layer is a dense layer of one device.

Symbols: `N` devices along the axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from manualpar.core.mesh.axes import Names, axis_tuple
from manualpar.core.parameters.annotations import split
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.parameters.placement import MatrixDims
from manualpar.layers.boundaries import bound_axes, enter, has_lost_types, leave
from manualpar.layers.low_precision import MATMULS, Matmul
from manualpar.layers.ring import (
    LAYER_OVERLAPS,
    Chunks,
    LayerOverlap,
    gather_matmul,
    matmul_scatter,
)

Initializer = Callable[..., Any]


class SplitDense(nn.Module):
    """A dense layer over the last dims of its input, whose kernel may be split over devices.

    Its parameters are `kernel`, of the shape `shape`, and `bias`, of the output dims' shape.

    Attributes:
      shape: The shape of the kernel on all devices together: the contracted dims, then the output
        dims.
      names: For each dim of the kernel the mesh axis, or tuple of axes, that it is split over, or
        `None`. With only `None`s nothing is split, on any mesh.
      contracted: The number of dims to sum over: the last dims of the input and the first dims of
        the kernel.
      use_bias: Whether a bias is added, after the sum over devices.
      kernel_init: The initializer of the kernel, called with all of `shape`. If it scales by
        fan-in, make it with `in_axis` set to the contracted dims, see
        `jax.nn.initializers.variance_scaling`. `None` for the default distribution of
        `nn.DenseGeneral`.
      bias_init: The initializer of the bias.
      dtype: The dtype of the computation; `None` for the promoted dtype of input and parameters.
      sequence_dim: The dim along which the result of a row-parallel product is split, see `leave`;
        `None` if every device gets the whole result.
      overlap: `"ring"`: a row-parallel product computes while it sends, see `matmul_scatter`; this
        needs a `sequence_dim`. `"none"`: the product sends after it has computed.
      shared: Whether an output dim may have fewer entries than there are devices. Then the devices
        of a group all compute the same entry; see `split`.
      matmul: The format of the product: `"float8"` or `"int8"`, see
        `manualpar.layers.float8_dot_general`; `""` for `dtype`.
      gathers_float8: Whether the gradient of a row-parallel product in float8 is gathered as codes,
        see `leave`. A program with `gather_code="float8"` sets it.
    """

    shape: tuple[int, ...]
    names: Names
    contracted: int = 1
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros
    dtype: DTypeLike | None = None
    sequence_dim: int | None = None
    overlap: LayerOverlap = "none"
    shared: bool = False
    matmul: Matmul = ""
    gathers_float8: bool = False

    @property
    def matrix_dims(self) -> dict[str, MatrixDims | None]:
        """The dims by which the kernel is a matrix."""
        dims = tuple(range(len(self.shape)))
        kernel = MatrixDims(dims[: self.contracted], dims[self.contracted :])
        return {"kernel": kernel, "bias": None}

    @nn.compact
    def __call__(self, x: jax.Array | Chunks) -> Any:
        """Multiplies the last dims of `x` by the kernel, and adds the bias, if any.

        Args:
          x: For a column-parallel product the result of `enter` or `enter_ring`, `[..., D]`; for a
            row-parallel product this device's features, `[..., F/axis]`.

        Returns:
          A column-parallel product returns this device's features, `[..., F/axis]`, as `Chunks` if
          `x` is `Chunks`. A row-parallel product returns `[..., D]`, the same on all devices along
          the axis; with `sequence_dim` this device's positions, `[..., S/axis, ..., D]`.

        Raises:
          ValueError: The fields do not fit each other, `x` does not fit the kernel, or `enter` was
            not called on `x`.

        Communication:
          Column-parallel: none. Row-parallel: see `leave` or `matmul_scatter`; the result is sent
          in the dtype of the computation. With `sequence_dim` and a bias there is also an
          all-reduce of the bias's gradient.
        """
        contracted, outputs = self._names_of_both_sides()
        kernel = self.param("kernel", _marked(self._init(), self.names, self.shared), self.shape)
        bias = None
        if self.use_bias:
            names, shape = self.names[self.contracted :], self.shape[self.contracted :]
            bias = self.param("bias", _marked(self.bias_init, names, self.shared), shape)
        parts, structure = jax.tree.flatten(x)
        self._check_input(parts[0], kernel, outputs)
        self._check_overlap(x, outputs)
        *parts, kernel, bias = promote_dtype(*parts, kernel, bias, dtype=self.dtype)
        x = jax.tree.unflatten(structure, parts)
        if self.overlap == "ring" and self.sequence_dim is not None:
            dim = self.sequence_dim
            y: Any = matmul_scatter(x, kernel, contracted, dim, self.contracted, self.matmul)
        else:
            y = gather_matmul(x, kernel, self.contracted, self.matmul)
            if contracted:
                float8 = self.gathers_float8 and self.matmul == "float8"
                y = leave(y, contracted, self.sequence_dim, float8=float8)
        if bias is None:
            return y
        # With `sequence_dim` each device along the axis adds the bias to different positions.
        bias = bias if self.sequence_dim is None else enter(bias, contracted)
        return jax.tree.map(
            lambda part: part + bias.reshape((1,) * (part.ndim - bias.ndim) + bias.shape), y
        )

    def _init(self) -> Initializer:
        dims = range(len(self.shape))
        contracted, outputs = dims[: self.contracted], dims[self.contracted :]
        return self.kernel_init or nn.initializers.lecun_normal(contracted, outputs)

    def _names_of_both_sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Checks the names; returns the axes of the contracted and of the output dims."""
        if len(self.names) != len(self.shape):
            self._refuse("expected a mesh axis or None for each dim of shape")
        if not 0 < self.contracted < len(self.shape):
            self._refuse(f"expected contracted from 1 to {len(self.shape) - 1}")
        contracted = _axes(self.names[: self.contracted])
        outputs = _axes(self.names[self.contracted :])
        if both := set(contracted) & set(outputs):
            self._refuse(
                f"names {sorted(both)} among the contracted dims and among the others, expected "
                "an axis on one side: it splits either the sum or the result of the product"
            )
        if self.shared and contracted:
            self._refuse(
                "has shared=True, expected False with a contracted dim that is split: devices that "
                "share an entry would add the same product to the sum more than once"
            )
        if self.sequence_dim is not None and not contracted:
            self._refuse(
                f"has sequence_dim={self.sequence_dim}, expected None where no contracted dim is "
                "split: the result is not summed. Give sequence_dim to the enter of the input"
            )
        return contracted, outputs

    def _check_input(self, x: jax.Array, kernel: jax.Array, outputs: tuple[str, ...]) -> None:
        expected = kernel.shape[: self.contracted]
        if x.shape[-self.contracted :] != expected:
            is_whole = x.shape[-self.contracted :] == self.shape[: self.contracted]
            mend = ": this device's part, as a column-parallel product returns it" * is_whole
            self._refuse(f"got x of shape {x.shape}, expected last dims {expected}{mend}")
        axes = bound_axes("SplitDense", outputs)
        if not set(axes) <= varying_axes(x) and not has_lost_types(x, axes):
            self._refuse(
                f"got x of shape {x.shape}, the same on all devices along {axes} by its type, "
                "expected what enter returns. Call enter once for all products of the same input"
            )

    def _check_overlap(self, x: jax.Array | Chunks, outputs: tuple[str, ...]) -> None:
        if self.matmul not in MATMULS:
            self._refuse(f"has matmul={self.matmul!r}, expected one of {MATMULS}")
        if self.overlap not in LAYER_OVERLAPS:
            self._refuse(f"has overlap={self.overlap!r}, expected 'none' or 'ring'")
        if self.overlap == "ring" and self.sequence_dim is None:
            self._refuse(
                "has overlap='ring' and no sequence_dim, expected the sequence_dim of a "
                "row-parallel product. Before a column-parallel product use enter_ring"
            )
        if isinstance(x, Chunks) and self.overlap == "none" and not set(x.axes) <= set(outputs):
            self._refuse(
                f"got a sequence in chunks over {x.axes}, expected an output dim that is split "
                "over them, or overlap='ring'. Otherwise give it whole_sequence(x)"
            )

    def _refuse(self, why: str) -> None:
        where = "/".join(self.path) or "SplitDense"
        fields = f"shape={self.shape}, names={self.names}, contracted={self.contracted}"
        raise ValueError(f"{where} with {fields}: {why}.")


def _marked(init: Initializer, names: Names, shared: bool) -> Initializer:
    return split(init, names, shared=shared) if any(names) else init


def _axes(names: Names) -> tuple[str, ...]:
    return tuple(axis for name in names for axis in axis_tuple(name))
