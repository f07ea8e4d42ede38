"""How a module of a plan computes with shards of its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Column:
    """Each device computes some of a module's outputs.

    Attributes:
      dim: The dimension of kernel and bias, counted from the end, that is split: -1, or -2 for the
        heads of a kernel `[D, N, H]`.
      shared: Whether devices may share what is too little to give each its own, such as the key
        heads of grouped-query attention; see `manualpar.sharding.split_parameter.split`.
    """

    dim: int = -1
    shared: bool = False

    def __post_init__(self) -> None:
        """Refuses a dim that does not count from the end."""
        _check_dim(self)

    def split_dim(self, name: str, ndim: int) -> int | None:
        """The dim of a parameter that is split; `None` for one of fewer dims, which stays whole."""
        del name
        return self.dim if ndim >= -self.dim else None


@dataclasses.dataclass(frozen=True)
class Row:
    """Each device takes some of a module's inputs; the products are summed, then `bias` is added.

    Attributes:
      dim: The dimension of the kernel, counted from the end, that is split: -2, or -3 for the heads
        of a kernel `[N, H, D]`.
    """

    dim: int = -2
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses a dim that does not count from the end."""
        _check_dim(self)

    def split_dim(self, name: str, ndim: int) -> int | None:
        """The dim of a parameter that is split; `None` for the bias, which stays whole."""
        return None if name == "bias" or ndim < -self.dim else self.dim


@dataclasses.dataclass(frozen=True)
class Vocab:
    """An `nn.Embed` of which each device has some rows; `attend` gives its part of the logits."""

    shared: ClassVar[bool] = False

    def split_dim(self, name: str, ndim: int) -> int | None:
        """The dim of the embedding that is split."""
        del name
        return -2 if ndim >= 2 else None


Style = Column | Row | Vocab
# Styles by globs on module paths.
Plan = Mapping[str, Style]


def _check_dim(style: Column | Row) -> None:
    if not isinstance(style.dim, int) or style.dim >= 0:
        kind = type(style).__name__
        raise ValueError(
            f"{kind}: dim={style.dim!r}, expected a negative number: dims count from the end, "
            f"because a loop over layers adds dims in front. Write {kind}() for the usual."
        )
