"""Styles: the ways in which a module computes with shards of its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Column:
    """Each device computes some of a module's outputs.

    Attributes:
      dim: The split dimension of kernel and bias, counted from the end: -1, or -2 for the heads
        of a kernel `[D, N, H]`.
      shared: Whether devices may share entries of a dim that is too small for one entry each, such
        as the key heads of grouped-query attention; see
        `manualpar.core.parameters.split_parameter.split`.
      bias_dim: The split dimension of the bias, if it differs from `dim`. A kernel `[F, D]` that
        the module transposes has `dim=-2` and `bias_dim=-1`.
    """

    dim: int = -1
    shared: bool = False
    bias_dim: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuses a dim that does not count from the end."""
        _check_dim(self)
        if self.bias_dim is not None:
            _check_dim(self, "bias_dim")

    def split_dim(self, name: str, ndim: int) -> int | None:
        """Returns the split dim of a parameter; `None` (not split) if it has too few dims."""
        dim = self.bias_dim if name == "bias" and self.bias_dim is not None else self.dim
        return dim if ndim >= -dim else None


@dataclasses.dataclass(frozen=True)
class Row:
    """Each device multiplies some of a module's inputs; then products are summed, and a bias added.

    Attributes:
      dim: The split dimension of the kernel, counted from the end: -2, or -3 for the heads of a
        kernel `[N, H, D]`.
    """

    dim: int = -2
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses a dim that does not count from the end."""
        _check_dim(self)

    def split_dim(self, name: str, ndim: int) -> int | None:
        """Returns the split dim of a parameter; `None` (not split) for the bias."""
        return None if name == "bias" or ndim < -self.dim else self.dim


@dataclasses.dataclass(frozen=True)
class Vocab:
    """An `nn.Embed` with some rows on each device; `attend` returns a part of the logits."""

    shared: ClassVar[bool] = False

    def split_dim(self, name: str, ndim: int) -> int | None:
        """Returns the split dim of the embedding."""
        del name
        return -2 if ndim >= 2 else None


@dataclasses.dataclass(frozen=True, init=False)
class PerDevice:
    """On each device a module's code gets the device's share of some of the module's numbers.

    Some modules reshape the output of their `Column`s, as in `query.reshape(B, S, self.num_heads,
    head_size)` in the module that calls `query`. On shards there are fewer heads. With the style
    `PerDevice("num_heads")` for that module, `self.num_heads` is this device's number of heads
    while one of its methods runs.

    Attributes:
      names: The names of the numbers: fields, attributes that `setup` sets, or entries of one of
        these, such as `"config.num_attention_heads"`. The device count must divide each number.
        Name the number of heads, and the size of the merged heads if the module uses that size
        (`"embed_dim"`).
    """

    names: tuple[str, ...]
    shared: ClassVar[bool] = False

    def __init__(self, *names: str) -> None:
        """Checks the names.

        Args:
          *names: The names of the numbers, see the class.

        Raises:
          ValueError: There are no names, or one is not a nonempty string.
        """
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"PerDevice: names={names!r}, expected names of numbers that the module has, such "
                "as PerDevice('num_heads')."
            )
        object.__setattr__(self, "names", names)

    def __repr__(self) -> str:
        return f"PerDevice({', '.join(map(repr, self.names))})"

    def split_dim(self, name: str, ndim: int) -> None:
        """Returns `None`, because the parameters of this module are not split."""
        del name, ndim


Style = Column | Row | Vocab | PerDevice
# Styles by globs on module paths.
TensorParallelPlan = Mapping[str, Style]


def _check_dim(style: Column | Row, name: str = "dim") -> None:
    dim = getattr(style, name)
    if not isinstance(dim, int) or dim >= 0:
        kind = type(style).__name__
        raise ValueError(
            f"{kind}: {name}={dim!r}, expected a negative number: dims count from the end, because "
            f"a loop over layers adds dims in front. Write {kind}() for the default."
        )
