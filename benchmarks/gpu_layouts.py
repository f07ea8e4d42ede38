"""The ways to train that `benchmarks.gpu` compares: layouts, modes, compiler options, kernels."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from benchmarks.workloads import Workload
from manualpar import Batch, Pipeline, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.mesh.compiler_options import (
    SEQUENCE,
    ChosenOptions,
    choose_options,
    keep_if_known,
)
from manualpar.core.program.program import Program
from manualpar.inspect.throughput import PEAKS, Throughput
from manualpar.layers.attention import ATTENTION_KINDS
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.flat_fields import with_fields
from manualpar.models.transformer import Transformer, flops_per_token
from manualpar.planner import roofline
from manualpar.planner.hardware import CHIPS, Chip, chip_named
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import topology_of_size
from manualpar.plans.sweep import has_kernel

LOGITS = "manual fsdp, whole logits"
OURS = ", our options"
NUM_EXPERTS = 8
# The most devices along the second axis of a mesh, such as the one that splits layers.
LARGEST_PART = 4
# The axes over which parameters are sharded and gradients scattered.
SHARDED_AXES = ("data", "expert")


def loss_of_logits(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    """Computes the language model's loss from stored logits, without the fused head and loss.

    The lambda hides that the model takes labels, so that the model returns logits.
    """
    return language_model_loss(params, lambda *args, **more: apply_fn(*args, **more), batch, rng)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to train with this package.

    Attributes:
      builder: The builder of the program.
      options: The builder's options.
      axis: The second axis of the mesh; "" for a mesh of one axis.
      fields: Changes to the model's fields, by flat name.
      loss_fn: The loss function.
      overlap: `"auto"` for the compiler options of this package, `"none"` for the compiler's own.
    """

    builder: Callable[..., Program] = fsdp
    options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"min_weight_size": 0})
    axis: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_fn: Any = language_model_loss
    overlap: Any = "none"

    @property
    def mode(self) -> str:
        """The mode of the program."""
        return str(self.options.get("mode", "manual"))


_FSDP: Mapping[str, Any] = {"min_weight_size": 0}
_EXPERTS = {"num_experts": NUM_EXPERTS, "expert_axis": "expert"}
_SPLIT = {"split_axis": "model"}
LAYOUTS: Mapping[str, Contender] = {
    "fsdp": Contender(),
    "hsdp": Contender(hsdp, axis="replica"),
    "zero": Contender(zero),
    "tp": Contender(axis="model", fields=_SPLIT),
    "experts": Contender(axis="expert", fields=_EXPERTS, loss_fn=mixture_of_experts_loss),
    "context": Contender(
        options={**_FSDP, "context_axis": "context"},
        axis="context",
        fields={"context_axis": "context"},
    ),
}
# XLA writes the collectives of the other modes, which lack these layouts.
MANUAL_LAYOUTS: Mapping[str, Contender] = {
    "tp with sequences": Contender(axis="model", fields={**_SPLIT, "sequence_parallel": True}),
    "pipeline": Contender(options={**_FSDP, "pipeline": Pipeline("stage")}, axis="stage"),
    "codes": Contender(options={**_FSDP, "gather_code": "int8", "reduce_code": "int8"}),
}


def _with_modes() -> Iterator[tuple[str, Contender]]:
    """Yields each layout in each of its modes, without and with the options of this package."""
    for layout, contender in {**LAYOUTS, **MANUAL_LAYOUTS}.items():
        for mode in ("manual", "auto", "explicit") if layout in LAYOUTS else ("manual",):
            chosen = dataclasses.replace(contender, options={**contender.options, "mode": mode})
            yield f"{mode} {layout}", chosen
            yield f"{mode} {layout}{OURS}", dataclasses.replace(chosen, overlap="auto")


CONTENDERS: Mapping[str, Contender] = {
    **dict(_with_modes()),
    "manual fsdp, kept": Contender(options={**_FSDP, "reshard_after_forward": False}),
    "manual dp": Contender(data_parallel, {}),
    "auto dp": Contender(data_parallel, {"mode": "auto"}),
    LOGITS: Contender(loss_fn=loss_of_logits),
    **{
        f"manual fsdp, attention {kind}": Contender(fields={"attention": kind})
        for kind in ATTENTION_KINDS
        if kind
    },
}


def mesh_of(contender: Contender, devices: int) -> dict[str, int]:
    """Returns the sizes of a contender's mesh axes on a number of devices.

    Raises:
      ValueError: The second axis needs an even number of devices.
    """
    if not contender.axis:
        return {"data": devices}
    if devices % 2:
        raise ValueError(
            f"the number of devices is {devices}, expected an even number for {contender.axis!r}; "
            "give another number of --devices."
        )
    if contender.axis == "replica":
        return {"replica": 2, "data": devices // 2}
    part = LARGEST_PART if devices % LARGEST_PART == 0 else 2
    return {"data": devices // part, contender.axis: part}


def build(workload: Workload, name: str, *, devices: int = 1) -> tuple[Program, ChosenOptions]:
    """Builds the program of `CONTENDERS[name]` on the first `devices` devices.

    Returns:
      The program, and its compiler options.

    Raises:
      ValueError: The contender cannot train on so many devices, or in its mode.
    """
    contender, model = CONTENDERS[name], workload.model
    assert isinstance(model, Transformer)
    axes = mesh_of(contender, devices)
    model = with_fields(model, **contender.fields)
    options = dict(contender.options)
    if contender.builder is not data_parallel and model.dtype == "bfloat16":
        narrow = {"gather_dtype": "bfloat16", "reduce_dtype": "float32"}
        options |= narrow if contender.mode == "manual" else {"gather_dtype": "bfloat16"}
    if contender.axis == "expert":
        options["axis_name"] = SHARDED_AXES
    if contender.axis == "stage":
        options["num_minibatches"] = 2 * axes["stage"]
    mesh = make_mesh(axes, jax.devices()[:devices])
    ring = math.prod(axes.get(axis, 1) for axis in SHARDED_AXES)
    others = [axis for axis, size in axes.items() if size > 1 and axis not in SHARDED_AXES]
    others += [SEQUENCE] * bool(contender.fields.get("sequence_parallel"))
    device = jax.local_devices()[0]
    chosen = choose_options(device.device_kind, [ring], others, overlap=contender.overlap)
    chosen = keep_if_known(chosen, device)
    program = contender.builder(
        model,
        workload.tx,
        contender.loss_fn,
        mesh=mesh,
        batch=workload.abstract_batch,
        compiler_options=chosen.options,
        **options,
    )
    return program, chosen


def find_chip(device_kind: str, name: str = "") -> Chip | None:
    """Returns the chip called `name`, or else that of a `jax.Device.device_kind`, if known."""
    if name:
        return chip_named(name)
    alike = [peak.kind for peak in PEAKS if re.fullmatch(peak.kind, device_kind)][:1]
    exact = [chip for chip in CHIPS if chip.device_kind == device_kind]
    near = [chip for chip in CHIPS if any(re.fullmatch(kind, chip.device_kind) for kind in alike)]
    return next(iter([*exact, *near]), None)


def plan_step(program: Program, workload: Workload, chip: Chip | None) -> dict[str, Any]:
    """Plans a program's step by the roofline; empty for an unknown chip or another mode."""
    model, positions = workload.model, workload.batch.inputs.shape[1]
    assert isinstance(model, Transformer)
    topology = chip and topology_of_size(chip, program.mesh.size)
    if not topology or program.mode != "manual":
        return {}
    flops = flops_per_token(model, positions) * positions
    throughput = Throughput(workload.batch.inputs.shape[0], positions, flops)
    is_fused = has_kernel(model, program, topology.chip)
    work = read_work(program, throughput, fused_attention=is_fused, overlap="none")
    plan = roofline.estimate(work, topology, brief=True)
    return {"topology": plan.topology, "seconds": plan.step_seconds, "bytes": plan.peak_bytes}
