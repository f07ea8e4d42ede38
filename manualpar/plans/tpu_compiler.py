"""Compiles a config's step for TPUs that are not here, with XLA's compiler for TPUs.

libtpu contains the compiler and a description of every topology, and neither needs a TPU.
`manualpar.plans.compiler_process` runs the compiler.
"""

from collections.abc import Mapping
from typing import Any

import ml_collections

from manualpar.planner.compiled_plan import plan_of
from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import Topology
from manualpar.plans import compiler_worker as worker
from manualpar.plans.compiler_process import Compiler, run_compiler

# libtpu must not look for a TPU, and several of these processes may run at the same time. A flag in
# XLA_FLAGS that libtpu does not know, such as one for CPUs, would end the process.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
PACKAGES = ("libtpu",)
INSTALL = 'pip install "manualpar[tpu-compiler]"'


def compile_for_tpu(
    config: ml_collections.ConfigDict,
    topology: Topology | str,
    *,
    options: Mapping[str, str | bool] | None = None,
    vocab_size: int = 0,
) -> StepEstimate:
    """Compiles a config's training step for a topology of TPUs and estimates it.

    Args:
      config: A training config.
      topology: The topology, or its name, such as `"v5e:4x4"` or `"2xv5p:4x4x4"`.
      options: Additional compiler options, which override the options that
        `config.parallel.overlap` chooses; see `manualpar.core.mesh.compiler_options`.
      vocab_size: The tokens of a language model's vocabulary; 0 for the vocabulary of its data.

    Raises:
      ValueError: The config contradicts itself or does not fit the topology.
      CompilerError: libtpu is not installed, does not know the topology or an option, crashes, or
        takes too long.
    """
    return plan_of(run_compiler(TPU, config, topology, options=options, vocab_size=vocab_size))


def _refuse(topology: Topology) -> str:
    if topology.chip.is_tpu:
        return ""
    return (
        f"topology {topology.name!r} is of {topology.chip.name}, expected TPUs, because this "
        "compiler supports only TPUs. Use manualpar.plans.gpu_compiler.compile_for_gpu."
    )


def _describe(topology: Topology) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if topology.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return {"topology_name": topology.slice_name, "platform": "tpu", **options}


def _explain(facts: Mapping[str, str], topology: Topology) -> str:
    """Turns an exception in the worker into a sentence."""
    stage, error, chip = facts["stage"], " ".join(facts["error"].split()), topology.chip
    if stage == worker.LIBRARY:
        return (
            f"libtpu, which has the TPU compiler, cannot be used here ({facts['type']}: {error}); "
            f"install it with: {INSTALL}"
        )
    if stage == worker.TOPOLOGY:
        return (
            f"libtpu does not know the topology {topology.name!r} ({error[:200]}); expected a "
            f"shape that slices of {chip.name} have, such as "
            f"{chip.name}:{'2x2' if chip.network.dims == 2 else '2x2x1'}."
        )
    if stage == worker.COMPILE and "RESOURCE_EXHAUSTED" in error:
        return (
            f"the TPU compiler's schedule for {topology.name} needs more of the chip's own memory "
            f"than there is ({error[:300]}); leave out compiler options that fuse, or plan a "
            "smaller batch."
        )
    return f"the TPU compiler failed for {topology.name}: {error[:500]}"


TPU = Compiler("TPU", PACKAGES, ENVIRONMENT, _describe, _explain, _refuse)
