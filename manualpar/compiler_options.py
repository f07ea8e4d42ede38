"""Which compiler options make XLA run collectives behind compute, for each generation of TPUs.

A v5e does so by default for gathers, and no option was found that does it for reduce-scatters and
leaves room for the rest. A v6e has units of its own for it, the SparseCores, and a v5p takes some
of both. To choose the sets, one step (FSDP, sixteen scanned layers of width 2048) was compiled with
each, with libtpu 0.0.42. The set was taken that leaves the least to wait for: the bytes of each
collective over one direction of all links, less what is computed between its start and its end.
None has run on a TPU. `benchmarks/compiled_for_tpu.py` compiles with them.

A compiler refuses an option that it does not know, so some of them may have to go with another
version of libtpu.
"""

import re
from collections.abc import Mapping
from typing import Literal

Overlap = Literal["default", "asynchronous"]
OVERLAPS: tuple[Overlap, ...] = ("default", "asynchronous")

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
_FUSE = "xla_tpu_enable_async_collective_fusion"
# By `jax.Device.device_kind`, as a regular expression for all of it.
ASYNCHRONOUS: Mapping[str, Mapping[str, str]] = {
    "TPU v5 lite|TPU v5e": {},
    "TPU v5|TPU v5p": dict.fromkeys(
        (
            "xla_enable_async_all_gather",
            _FUSE,
            f"{_FUSE}_fuse_all_gather",
            f"{_OFFLOAD}_all_reduce",
            f"{_OFFLOAD}_reduce_scatter",
        ),
        "true",
    ),
    "TPU v6 lite|TPU v6e": dict.fromkeys(
        (
            f"{_OFFLOAD}_all_gather",
            f"{_OFFLOAD}_all_reduce",
            f"{_OFFLOAD}_reduce_scatter",
            "xla_tpu_enable_sparse_core_reduce_scatter_v2",
            "xla_tpu_use_tc_device_shape_on_sc",
        ),
        "true",
    ),
}


def compiler_options(
    device_kind: str, overlap: Overlap = "default", *, others: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The options to compile with.

    Args:
      device_kind: `jax.Device.device_kind`, such as `TPU v5 lite`.
      overlap: `"default"` for the compiler's own options, `"asynchronous"` for those that make it
        run collectives behind compute where it can.
      others: More options, which win over these.

    Returns:
      Options as `jax.jit` and `jax.stages.Lowered.compile` take them. For devices without known
      options, such as CPUs and GPUs, `others` alone.

    Raises:
      ValueError: `overlap` is not known.
    """
    if overlap not in OVERLAPS:
        raise ValueError(
            f"compiler_options: overlap is {overlap!r}, expected one of "
            f"{', '.join(map(repr, OVERLAPS))}."
        )
    matching = (
        options for kind, options in ASYNCHRONOUS.items() if re.fullmatch(kind, device_kind)
    )
    chosen = {} if overlap == "default" else next(matching, {})
    return {**chosen, **(others or {})}
