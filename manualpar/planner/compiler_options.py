"""Which compiler options make XLA run collectives behind compute, for each generation of TPUs.

A v5e does so by default for what is gathered; others have to be asked, and for each kind of
collective by two options: one that makes it asynchronous and one that lets it be fused with what is
computed meanwhile. `benchmarks/compiled_for_tpu.py` shows what that is worth for a step. An option
that the compiler does not know is an error of its own, so these are those of the libtpu in use.
"""

from collections.abc import Mapping
from typing import Literal

Overlap = Literal["default", "asynchronous"]
OVERLAPS: tuple[Overlap, ...] = ("default", "asynchronous")

_FUSE = "xla_tpu_enable_async_collective_fusion"
_GATHERS = {"xla_enable_async_all_gather": "true", f"{_FUSE}_fuse_all_gather": "true"}
_REDUCTIONS = {"xla_enable_async_all_reduce": "true", f"{_FUSE}_fuse_all_reduce": "true"}
_SCATTERS = {
    "xla_enable_async_reduce_scatter_fusion": "true",
    f"{_FUSE}_fuse_reduce_scatter": "true",
}
ASYNCHRONOUS: Mapping[str, Mapping[str, str]] = {
    "v4": _GATHERS,
    "v5e": _GATHERS | _REDUCTIONS | _SCATTERS,
    "v5p": _GATHERS | _REDUCTIONS | _SCATTERS,
    "v6e": _GATHERS | _REDUCTIONS | _SCATTERS,
    "tpu7x": _GATHERS,
}


def compiler_options(
    chip: str, overlap: Overlap = "default", *, others: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The options to compile with.

    Args:
      chip: The name of a chip, such as `v5e`.
      overlap: `"default"` for the compiler's own, `"asynchronous"` for those that make what it can
        run behind compute run so.
      others: More options, which win over these.

    Returns:
      Options as `jax.stages.Lowered.compile` takes them.

    Raises:
      ValueError: `overlap` is not known, or no options are for the chip.
    """
    if overlap not in OVERLAPS:
        raise ValueError(
            f"compiler_options: overlap is {overlap!r}, expected one of "
            f"{', '.join(map(repr, OVERLAPS))}."
        )
    chosen = {} if overlap == "default" else ASYNCHRONOUS.get(chip)
    if chosen is None:
        raise ValueError(
            f"compiler_options: chip is {chip!r}, expected one of {', '.join(ASYNCHRONOUS)}: for "
            "others it is not known which options make collectives asynchronous."
        )
    return {**chosen, **(others or {})}
