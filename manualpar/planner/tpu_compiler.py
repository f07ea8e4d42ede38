"""Compiles a config's step for TPUs that are not here, with XLA's compiler for TPUs.

libtpu contains the compiler and a description of every topology, and neither needs a TPU. The
compiler runs in a separate process, `manualpar.planner.tpu_worker`, which writes the program's text
and some facts about the program to a folder. `manualpar.planner.compiled_plan` makes a
`StepEstimate` from the text and the facts.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from manualpar.planner import tpu_worker as worker
from manualpar.planner.compiled_plan import CompiledStep, plan_of
from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import Topology, parse_topology
from manualpar.strategies import strategy_kinds

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
INSTALL = 'pip install "manualpar[tpu-compiler]"'
TIMEOUT = 1800.0  # Seconds for one compilation.


class TpuCompilerError(ValueError):
    """The compiler cannot be run, or gives no result."""


def compile_for_tpu(
    config: ml_collections.ConfigDict,
    topology: Topology | str,
    *,
    options: Mapping[str, str] | None = None,
    vocab_size: int = 0,
) -> StepEstimate:
    """Compiles a config's training step for a topology and estimates it.

    Args:
      config: A training config.
      topology: The topology, or its name, such as `"v5e:4x4"` or `"2xv5p:4x4x4"`.
      options: Additional compiler options, which override the options that
        `config.parallel.overlap` chooses; see `manualpar.core.mesh.compiler_options`.
      vocab_size: The tokens of a language model's vocabulary; 0 for the vocabulary of its data.

    Raises:
      ValueError: The config contradicts itself or does not fit the topology.
      TpuCompilerError: libtpu is not installed, does not know the topology or an option, crashes,
        or takes too long.
    """
    return plan_of(compile_step(config, topology, options=options, vocab_size=vocab_size))


def compile_step(
    config: ml_collections.ConfigDict,
    topology: Topology | str,
    *,
    options: Mapping[str, str] | None = None,
    vocab_size: int = 0,
) -> CompiledStep:
    """Compiles a config's training step for a topology; see `compile_for_tpu`."""
    if isinstance(topology, str):
        topology = parse_topology(topology)
    if not topology.chip.is_tpu:
        raise TpuCompilerError(
            f"topology {topology.name!r} is of {topology.chip.name}, expected TPUs, because this "
            "compiler supports only TPUs. Use the roofline's estimate."
        )
    request = {
        "config": config.to_dict(),
        "strategy_file": inspect.getsourcefile(strategy_kinds()[config.parallel.strategy].builder),
        "topology": topology.slice_name,
        "num_slices": topology.num_slices,
        "single_chip": topology.num_chips == 1,
        "options": dict(options or {}),
        "vocab_size": vocab_size,
    }
    with tempfile.TemporaryDirectory(prefix="manualpar-tpu-") as name:
        folder = Path(name)
        (folder / worker.REQUEST).write_text(json.dumps(request), encoding="utf-8")
        facts = _run_worker(folder, topology)
        program = folder / worker.PROGRAM
        text = program.read_text(encoding="utf-8") if program.exists() else ""
    return CompiledStep(topology, facts["options"] | request["options"], facts, text)


def _run_worker(folder: Path, topology: Topology) -> dict[str, Any]:
    """Runs the worker and reads its result; raises an error if the worker failed."""
    package = str(Path(__file__).parents[2])
    paths = filter(None, [package, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "stderr.txt").open("w+", encoding="utf-8") as stderr:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "manualpar.planner.tpu_worker", str(folder)],
                env=environment,
                timeout=TIMEOUT,
                stdout=stderr,
                stderr=stderr,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TpuCompilerError(
                f"the TPU compiler has not finished after {TIMEOUT:,.0f} seconds for "
                f"{topology.name}, and was stopped. Compile fewer layers: with model.scan_layers "
                "only one layer is compiled."
            ) from error
        stderr.seek(0)
        messages = stderr.read()
    result = folder / worker.RESULT
    facts = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "error" in facts:
        is_mistake = facts["stage"] == worker.PREPARE and facts["type"] in (
            "ValueError",
            "TypeError",
        )
        if is_mistake:
            raise ValueError(facts["error"])
        raise TpuCompilerError(_failure(facts, topology))
    if done.returncode or not ("memory" in facts or "out_of_memory" in facts):
        raise TpuCompilerError(_crash(done.returncode, messages, topology))
    if facts["num_devices"] != topology.num_devices:
        raise TpuCompilerError(
            f"libtpu {facts['libtpu']} takes {topology.name} for {facts['num_devices']} devices, "
            f"expected {topology.num_devices}: libtpu uses this name for another topology."
        )
    return dict(facts)


def _failure(facts: Mapping[str, str], topology: Topology) -> str:
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
    if stage == worker.COMPILE and (option := re.search(r"No such compile option: '?(\w+)", error)):
        return (
            f"the TPU compiler does not know the option {option[1]!r}; leave it out, or write it "
            "as `libtpu` spells it."
        )
    if stage == worker.COMPILE and "RESOURCE_EXHAUSTED" in error:
        return (
            f"the TPU compiler's schedule for {topology.name} needs more of the chip's own memory "
            f"than there is ({error[:300]}); leave out compiler options that fuse, or plan a "
            "smaller batch."
        )
    return f"the TPU compiler failed for {topology.name}: {error[:500]}"


def _crash(returncode: int, messages: str, topology: Topology) -> str:
    """Turns the end of a worker without a result into a sentence."""
    ending = f"exit code {returncode}"
    if returncode < 0:
        ending = f"signal {signal.Signals(-returncode).name}"
    lines = [line for line in messages.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.match(r"[FE]\d{4}|\w*Error", line)]
    last = (errors or lines)[-1]
    return f"the TPU compiler ended with {ending} for {topology.name}; its last line: {last[:300]}"
