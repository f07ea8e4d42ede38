"""Compiles a config's step for GPUs that are not here, with XLA's compiler for GPUs.

The compiler is in the wheel of JAX's CUDA plugin, and needs no GPU, no driver and no other library
of NVIDIA: a description of the chip replaces the GPU (`manualpar.planner.gpu_targets`).
`manualpar.plans.compiler_process` runs the compiler.

The worker traces attention for the planned chip (`manualpar.plans.compiler_worker`). Calls of
cuDNN's kernels stay calls in the compiled program, so cuDNN is not needed.
"""

import re
from collections.abc import Mapping
from typing import Any

import ml_collections

from manualpar.planner.compiled_plan import plan_of
from manualpar.planner.gpu_targets import GPU_TARGETS, describe_target
from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import Topology, levels_of
from manualpar.plans import compiler_worker as worker
from manualpar.plans.compiler_process import Compiler, run_compiler

PACKAGES = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
INSTALL = 'pip install "manualpar[gpu-compiler]"'
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
_COSTS = "xla_gpu_collect_cost_model_stats"


def compile_for_gpu(
    config: ml_collections.ConfigDict,
    topology: Topology | str,
    *,
    options: Mapping[str, str | bool] | None = None,
    vocab_size: int = 0,
) -> StepEstimate:
    """Compiles a config's training step for a topology of GPUs and estimates it.

    Args:
      config: A training config.
      topology: The topology, or its name, such as `"h100:8"` or `"h100:2x8"`.
      options: Additional compiler options, which override the options that
        `config.parallel.overlap` chooses; see `manualpar.core.mesh.compiler_options`. The compiler
        takes `True` for an option that is a switch, and refuses `"true"`.
      vocab_size: The tokens of a language model's vocabulary; 0 for the vocabulary of its data.

    Raises:
      ValueError: The config contradicts itself or does not fit the topology.
      CompilerError: The compiler is not installed, has no description of the chip, does not know
        an option, crashes, or takes too long.
    """
    return plan_of(run_compiler(GPU, config, topology, options=options, vocab_size=vocab_size))


def _refuse(topology: Topology) -> str:
    if topology.chip.name in GPU_TARGETS:
        return ""
    return (
        f"topology {topology.name!r} is of {topology.chip.name}, expected one of "
        f"{', '.join(GPU_TARGETS)}, because XLA's GPU compiler needs a description of the chip. "
        "Use the roofline's estimate, or for TPUs manualpar.plans.tpu_compiler.compile_for_tpu."
    )


def _describe(topology: Topology) -> dict[str, Any]:
    nodes, inside = levels_of(topology)
    target = describe_target(topology.chip, GPU_TARGETS[topology.chip.name])
    return {"platform": "cuda", "topology": f"1x{nodes}x{inside}", "target_config": target}


def _diagnose(topology: Topology) -> dict[str, Any]:
    """Asks for estimates of times; for a chip without rates XLA would fail."""
    return {_COSTS: True} if GPU_TARGETS[topology.chip.name].has_costs else {}


def _explain(facts: Mapping[str, str], topology: Topology) -> str:
    """Turns an exception in the worker into a sentence."""
    stage, error = facts["stage"], " ".join(facts["error"].split())
    if stage == worker.LIBRARY:
        return (
            f"{PACKAGES[0]}, which has the GPU compiler, cannot be used here ({facts['type']}: "
            f"{error}); install it with: {INSTALL}"
        )
    if stage == worker.TOPOLOGY:
        return (
            f"the GPU compiler does not take the description of {topology.name} ({error[:300]}); "
            f"expected {PACKAGES[0]} of the same version as jaxlib: {INSTALL}"
        )
    if "is not a valid bool value" in error:
        return f"the GPU compiler refuses an option ({error[:300]}); write True or False."
    # An error in Python code that the compiler calls, such as cuDNN's partitioner, begins with a
    # traceback, whose last line has the message.
    raised = re.findall(r"^(?:\w+\.)*\w*Error: .*", facts["error"], re.MULTILINE)
    message = raised[-1] if raised else error
    return f"the GPU compiler failed for {topology.name}: {message[:500]}"


GPU = Compiler("GPU", PACKAGES, ENVIRONMENT, _describe, _explain, _refuse, _diagnose)
