"""Chooses compiler options that make XLA overlap collectives with compute, by chip and mesh.

With `overlap="auto"`, the options come from one table, `CHOICES`. For each kind of TPU or GPU the
table gives the options, the largest ring (the devices over which gradients are reduced) for which
they make a step faster, and the step times that show the gain. The compiler's default options are
kept in four cases: nothing is sent, because there is one device; the ring is larger; the mesh has
other axes with which the options were slower or were not measured; the devices are not in the
table.

The figures are estimates of a full step of eight layers of width 2,048, with FSDP on all devices of
a topology. For TPUs the planner estimates the time of the program that libtpu 0.0.42.1 compiles.
For GPUs XLA's cost model estimates the time of the program that XLA's GPU compiler (jax 0.10.2)
compiles. `benchmarks/README.md` has steps with and without options. One H200 ran a step with and
without them: 338.4 and 314.7 ms, where the compiled programs were estimated at 335.4 and 302.6. The
loss is double buffering, which copies what a loop keeps for its backward pass; it costs nothing if
the loop keeps only the results of products (276.0 ms). On eight H100s, which hide gathers behind
it, it pays even for a loop that keeps everything: 22.6 to 21.2 ms.

A compiler refuses an option that it does not know, and compiler versions know different options. So
`keep_if_known` first compiles a program of one operation with the options. If the compiler refuses
an option, it takes the name that later compilers have for it (`RENAMED`), or leaves it out. The run
reports the options that were left out.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

__all__ = [
    "OVERLAPS",
    "SEQUENCE",
    "ChosenOptions",
    "Overlap",
    "choose_options",
    "keep_if_known",
    "under_new_names",
]

Overlap = Literal["auto", "none"]
OVERLAPS: tuple[Overlap, ...] = ("auto", "none")
SEQUENCE = "sequence"  # Stands for positions that are split between split layers.

_WINDOWS = "xla_tpu_decompose_einsum_reduce_scatter"
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
# Without the next two options XLA sends twice the bytes. On a mesh of two or three dimensions XLA
# turns a reduce-scatter into an all-reduce, and each chip keeps a part of the result. On large
# meshes XLA turns an all-gather into an all-reduce of arrays padded with zeros.
_SCATTER = f"{_OFFLOAD}_nd_reduce_scatter"
_GATHER = "xla_tpu_prefer_async_allgather_to_allreduce"
# With either of these options XLA does not turn a reduce-scatter into an all-reduce.
KEEPING_SCATTERS = frozenset({_SCATTER, _WINDOWS})

_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
# The kinds of GPU for which steps were compiled, and superchips with one of them.
_GPUS = r"NVIDIA (A100-SXM4-\d+GB|(H100|GH200|H200|B200|GB200)( \d+GB)?( HBM\w+)?)"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Compiler options for one kind of chip, and the meshes for which they are used.

    Attributes:
      device_kind: A regular expression that must match `jax.Device.device_kind` completely.
      most: The size of the largest ring for which the options make a step faster.
      options: The options, as `jax.jit` takes them.
      measured: Estimated step times without and with the options, by topology.
      beside: What may be divided in addition to the axis of the ring, see `others` in
        `choose_options`; `None` for anything else, and for any number of rings.
      averages: Whether the options are only for means over several hosts, see `choose_options`.
      halves: Whether the options are only for layers that run two halves of a batch.
    """

    device_kind: str
    most: int
    options: Mapping[str, str | bool]
    measured: str
    beside: tuple[str, ...] | None = ()
    averages: bool = False
    halves: bool = False

    def suits(
        self, rings: Sequence[int], others: Sequence[str], *, averages: bool, halves: bool
    ) -> bool:
        """Returns whether the options are used for these rings and these other axes."""
        if max(rings, default=1) > self.most:
            return False
        if (self.averages and not averages) or (self.halves and not halves):
            return False
        return self.beside is None or (len(rings) < 2 and set(others) <= set(self.beside))


_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_PIPELINED = {
    **{f"xla_gpu_enable_pipelined_{name}": True for name in _COLLECTIVES},
    "xla_gpu_enable_while_loop_double_buffering": True,
}
# Option -> its name and value from jax 0.11 on.
RENAMED = {
    f"xla_gpu_enable_pipelined_{name}": (
        f"xla_gpu_pipeline_{name}",
        "COLLECTIVE_PIPELINING_MODE_ON",
    )
    for name in _COLLECTIVES
}
XLA_JOINS = 30 * 2**20  # The bytes up to which XLA:GPU joins all-reduces by default.
# If a kind of chip has several entries, the first that suits the mesh is used.
CHOICES: tuple[Choice, ...] = (
    Choice(
        "TPU v5 lite|TPU v5e",
        16,
        {_WINDOWS: "true", "xla_tpu_rwb_fusion": "false"},
        "v5e:4x4: 112.9 to 111.4 ms, by links 105.9, and 32 layers of 4,096 1,173 to 1,006; "
        "v5e:2x4: 103.5 to 108.1, but eight layers of 4,096 310.2 to 287.9; 4x8: 100.1 to 106.1",
    ),
    Choice("TPU v5 lite|TPU v5e", 256, {_GATHER: "true"}, "v5e:16x16: 103.7 to 94.3 ms"),
    Choice(
        "TPU v5|TPU v5p",
        128,
        dict.fromkeys(
            (
                f"{_OFFLOAD}_all_gather",
                f"{_OFFLOAD}_all_reduce",
                f"{_OFFLOAD}_reduce_scatter",
                _SCATTER,
                _GATHER,
            ),
            "true",
        ),
        "v5p:2x2x4: 54.2 to 38.0 ms, and 32 layers of 4,096 445.4 to 348.6; with asynchronous "
        "fused gathers, which libtpu 0.0.52 refuses, in place of offloaded ones: v5p:2x2x4 38.8, "
        "v5p:2x4x4 55.5 to 38.6, v5p:4x4x8 58.0 to 35.2, v5p:2x2x4 with layers split over 4 70.5 "
        "to 63.3",
        beside=("model", SEQUENCE),
    ),
    Choice(
        "TPU v6 lite|TPU v6e",
        256,
        dict.fromkeys(
            (
                f"{_OFFLOAD}_all_gather",
                f"{_OFFLOAD}_all_reduce",
                f"{_OFFLOAD}_reduce_scatter",
                _SCATTER,
                _GATHER,
            ),
            "true",
        ),
        "v6e:4x4: 35.3 ms, 42.8 with scatters as all-reduces; data parallelism 77.2 to 69.0, by "
        "the all-reduces in this list; v6e:4x8: 47.9 to 35.6; v6e:16x16: 44.5 to 28.4; v6e:4x4 "
        "with layers split over 4: 68.8 to 60.8",
        beside=("model", SEQUENCE),
    ),
    Choice(
        _GPUS,
        128,
        {_SCHEDULER: True, **_PIPELINED},  # And the thresholds of `_apart`.
        "the planner's model, without halves and with halves and these: h100:8 with layers split "
        "over 4 26.3 to 24.6 ms, with positions split too 28.4 to 25.0; h100:4x8 32.8 to 30.4",
        beside=("model", SEQUENCE),
        halves=True,
    ),
    Choice(
        _GPUS,
        128,
        {_SCHEDULER: True},
        "the planner's model, with the next set and with this: h100:4x8 with data parallelism 33.2 "
        "to 32.4 ms; h100:16x8 35.9 to 35.6; h100:8, one host, 30.8 to 31.4",
        averages=True,
    ),
    Choice(
        _GPUS,
        128,
        {
            _SCHEDULER: True,
            **_PIPELINED,
            "xla_gpu_all_gather_combine_threshold_bytes": str(2**27),
            "xla_gpu_reduce_scatter_combine_threshold_bytes": str(2**26),
        },
        "h100:8: 26.6 to 23.3 ms, by the thresholds alone 28.0; h100:2x8: 38.9 to 28.1; h100:16x8: "
        "87.4 to 40.4; h100:8 with two replicas 27.2 to 25.6, with experts 27.0 to 24.9; by the "
        "planner's model zero1 30.1 to 29.5, with four stages 60.2 to 51.8, on h100:4x8 62.7 to "
        "55.6, and with sequences over four devices 40.6 to 37.8, with Ulysses 27.2 to 25.5",
        beside=("replica", "stage", "context"),
    ),
    Choice(
        _GPUS,
        128,
        {_SCHEDULER: True, **_PIPELINED},
        "the planner's model, with the scheduler alone, with thresholds too, and with these: "
        "h100:8 with layers split over 4 26.7, 26.9 and 26.3 ms; h100:4x8 33.2 and, with these, "
        "32.8; h100:16x8 37.4 and 36.3. With positions split too 28.4 and 26.5, but the "
        "temporaries are 1.2 to 1.7 times as large, so these have the scheduler alone",
        beside=("model",),
    ),
    Choice(
        _GPUS,
        2**20,
        {_SCHEDULER: True},
        "h100:8 with experts without a capacity: 94.1 to 88.7 ms; other programs are the same",
        beside=None,
    ),
)


@dataclasses.dataclass(frozen=True)
class ChosenOptions:
    """Compiler options, and the reason for them; `why` is "" if `CHOICES` lacks the chip."""

    options: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        return self.describe() if self.why else ""

    def describe(self) -> str:
        """Describes the options, and the reason for them if there is one."""
        named = [f"{name}={value}" for name, value in self.options.items()]
        shown = ", ".join(named) or "the compiler's defaults"
        return f"{shown} ({self.why})" if self.why else shown


def choose_options(
    device_kind: str,
    rings: Sequence[int],
    others: Sequence[str] = (),
    *,
    overlap: Overlap = "auto",
    averages: bool = False,
    half_bytes: int = 0,
) -> ChosenOptions:
    """Chooses the options to compile a step with.

    Args:
      device_kind: `jax.Device.device_kind`, such as `TPU v5 lite` or `NVIDIA H100 80GB HBM3`.
      rings: The number of devices in each ring. Gradients are reduced over one ring after another.
      others: The names of the mesh's other axes with more than one device, and `SEQUENCE` if the
        positions of activations are split over one of them, between split layers.
      overlap: `"auto"` for the options in `CHOICES`, `"none"` for the compiler's default options.
      averages: Whether gradients are averaged by all-reduces over several hosts, as data
        parallelism does. If XLA delays the all-reduces of a layer into the next iteration of a
        loop, those of the last iteration are exposed, and they take longer between hosts.
      half_bytes: If split layers run two halves of a device's batch side by side, the bytes of a
        half between layers: all that an all-reduce sums, or a device's part of a reduce-scatter.
        0 without halves.
    """
    if overlap not in OVERLAPS:
        raise ValueError(
            f"choose_options: overlap is {overlap!r}, expected one of "
            f"{', '.join(map(repr, OVERLAPS))}."
        )
    known = [choice for choice in CHOICES if re.fullmatch(choice.device_kind, device_kind)]
    if not known:
        return ChosenOptions()
    if overlap == "none":
        return ChosenOptions(why="overlap is 'none'")
    largest = max(rings, default=1)
    if largest == 1 and not others:
        return ChosenOptions(why=f"{device_kind}, one device, which sends nothing")
    where = f"{device_kind}, gradients over {' and '.join(map(str, rings))} devices"
    if largest > (most := max(choice.most for choice in known)):
        return ChosenOptions(
            why=f"{where}; the other options are faster for at most {most} devices"
        )
    where += f" and also {', '.join(others)}" * bool(others)
    facts = {"averages": averages, "halves": half_bytes > 0}
    choice = next((x for x in known if x.suits(rings, others, **facts)), None)
    if choice is None:
        return ChosenOptions(why=f"{where}; the other options were measured only for one axis")
    options = dict(choice.options)
    if choice.halves:
        options |= _apart(half_bytes, is_scattered=SEQUENCE in others)
    return ChosenOptions(options, where)


def _apart(half_bytes: int, *, is_scattered: bool) -> dict[str, str | bool]:
    """Returns thresholds with which XLA does not join the collectives of two halves of a batch.

    Joined, each half waits for the other. Where XLA's own threshold is small enough it stays,
    because XLA then joins gradients as it likes. With a threshold of 4 or 16 MiB a step on `h100:8`
    would take 1% more time.
    """
    if is_scattered:
        return {"xla_gpu_reduce_scatter_combine_threshold_bytes": str(half_bytes)}
    if 2 * half_bytes > XLA_JOINS:
        return {}
    return {"xla_gpu_all_reduce_combine_threshold_bytes": str(half_bytes)}


def keep_if_known(chosen: ChosenOptions, device: jax.Device) -> ChosenOptions:
    """Renames or drops options that a device's compiler refuses.

    Compiles a program of one operation for this device with all options, and then with the names
    that later compilers have for some. If the compiler refuses them, compiles the program once more
    for each option, with the options accepted so far. `why` of the result names each refused option
    with the compiler's message.
    """
    if not chosen.options:
        return chosen
    chosen = ChosenOptions(under_new_names(chosen.options, device), chosen.why)
    if not _refusal(chosen.options, device):
        return chosen
    accepted: dict[str, str | bool] = {}
    refused = []
    for name, value in chosen.options.items():
        later = RENAMED.get(name)
        if not (message := _refusal({**accepted, name: value}, device)):
            accepted[name] = value
        elif later and not _refusal({**accepted, later[0]: later[1]}, device):
            accepted[later[0]] = later[1]
        else:
            refused.append(f"{name} ({message})")
    return ChosenOptions(accepted, f"{chosen.why}; refused: {', '.join(refused)}")


def under_new_names(
    options: Mapping[str, str | bool], device: jax.Device
) -> Mapping[str, str | bool]:
    """Returns options under the names of later compilers if a device's compiler needs them."""
    now = dict(RENAMED.get(name, (name, value)) for name, value in options.items())
    needs = now != options and _refusal(options, device) and not _refusal(now, device)
    return now if needs else options


def _refusal(options: Mapping[str, str | bool], device: jax.Device) -> str:
    """Returns the compiler's error message for some options; '' if it accepts them."""
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative).lower(x).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split())
    return ""
