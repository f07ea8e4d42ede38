"""Compiles a config's step for TPUs that nobody here has, with XLA's own compiler for them.

libtpu has the compiler and a description of every topology, and needs no TPU for either. It is run
in a process of its own, see `manualpar.planner.tpu_worker`. What comes back is what would run: the
schedule with its collectives and the memory on a chip are facts. The time is an estimate: the
compiler's cycles for what is computed, and the wire's bandwidth for what is sent.
"""

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

from manualpar.compiler_options import compiler_options
from manualpar.planner.compiled_plan import CompiledStep, plan_of
from manualpar.planner.hardware import Chip
from manualpar.planner.out_of_memory import read_out_of_memory
from manualpar.planner.plan import Plan
from manualpar.planner.schedule import ScheduledCollective, read_schedule
from manualpar.planner.schedule_time import follow
from manualpar.planner.topology import Topology, parse_topology, path_over
from manualpar.planner.tpu_worker import (
    COMPILE,
    LIBRARY,
    PREPARE,
    PROGRAM,
    REQUEST,
    RESULT,
    TOPOLOGY,
)

# Nobody is to be asked for a TPU, and several of these processes may run at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
INSTALL = 'pip install "manualpar[tpu-compiler]"'
TIMEOUT = 1800.0


class TpuCompilerError(ValueError):
    """The compiler cannot be asked, or does not answer."""


def compile_for_tpu(
    config: ml_collections.ConfigDict,
    topology: Topology | str,
    *,
    options: Mapping[str, str] | None = None,
    vocab_size: int = 0,
    timeout: float = TIMEOUT,
) -> Plan:
    """Compiles a config's training step for a topology and says what that needs and takes.

    Args:
      config: A training config.
      topology: The topology, or its name, such as `"v5e:4x4"` or `"2xv5p:4x4x4"`.
      options: Compiler options besides those of `config.parallel.overlap`, over which they win;
        see `manualpar.compiler_options`.
      vocab_size: How many tokens a language model knows; 0 for those of its data.
      timeout: Seconds to wait for the compiler.

    Returns:
      The plan.

    Raises:
      ValueError: The config does not fit itself or the topology.
      TpuCompilerError: libtpu is not installed, does not know the topology or an option, crashes,
        or takes too long.
    """
    return plan_of(
        compile_step(config, topology, options=options, vocab_size=vocab_size, timeout=timeout)
    )


def compile_step(
    config: ml_collections.ConfigDict,
    topology: Topology | str,
    *,
    options: Mapping[str, str] | None = None,
    vocab_size: int = 0,
    timeout: float = TIMEOUT,
) -> CompiledStep:
    """Compiles a config's training step for a topology; see `compile_for_tpu`."""
    if isinstance(topology, str):
        topology = parse_topology(topology)
    if not topology.chip.is_tpu:
        raise TpuCompilerError(
            f"topology {topology.name!r} is of {topology.chip.name}, expected TPUs: there is no "
            "compiler for others here. Take the roofline's estimate."
        )
    request = {
        "config": config.to_dict(),
        "topology": topology.slice_name,
        "num_slices": topology.num_slices,
        "single_chip": topology.num_chips == 1,
        # The program has those of the config by itself; here they are so that the plan can say so.
        "options": compiler_options(
            topology.chip.device_kind, config.parallel.overlap, others=options
        ),
        "vocab_size": vocab_size,
    }
    with tempfile.TemporaryDirectory(prefix="manualpar-tpu-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        facts = _run_worker(folder, topology, timeout)
        program = folder / PROGRAM
        text = program.read_text(encoding="utf-8") if program.exists() else ""
    if "out_of_memory" in facts:
        too_much = read_out_of_memory(facts["out_of_memory"])
        return CompiledStep(topology, facts, {}, None, None, too_much, request["options"])
    schedule = read_schedule(text, facts["mesh"])
    timeline = follow(
        schedule,
        clock=topology.chip.clock,
        wire_seconds=lambda collective: _wire_seconds(collective, topology, facts["mesh"]),
    )
    return CompiledStep(
        topology, facts, facts["memory"], schedule, timeline, None, request["options"]
    )


def _wire_seconds(
    collective: ScheduledCollective, topology: Topology, mesh: Mapping[str, int]
) -> float:
    """How long a collective takes once, by itself."""
    if collective.group_size < 2:
        return 0.0
    axes = collective.axes or tuple(axis for axis, size in mesh.items() if size > 1)
    sent = float(collective.bytes_sent) / collective.times
    return path_over(topology, mesh, axes).seconds(topology.chip.network, sent)


def _run_worker(folder: Path, topology: Topology, timeout: float) -> dict[str, Any]:
    """Runs the worker and reads its result; raises for what it could not do."""
    package = str(Path(__file__).parents[2])
    paths = filter(None, [package, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "manualpar.planner.tpu_worker", str(folder)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "stderr.txt").open("w+", encoding="utf-8") as stderr:
        try:
            done = subprocess.run(
                command, env=environment, timeout=timeout, stdout=stderr, stderr=stderr, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TpuCompilerError(
                f"the TPU compiler has not finished after {timeout:,.0f} seconds for "
                f"{topology.name}, and was stopped. Give it more time, or fewer layers to compile: "
                "model.scan_layers compiles one."
            ) from error
        stderr.seek(0)
        said = stderr.read()
    result = folder / RESULT
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "error" in found:
        raise _failure(found, topology)
    if done.returncode or not ("memory" in found or "out_of_memory" in found):
        raise TpuCompilerError(_crash(done.returncode, said, topology))
    if found["num_devices"] != topology.num_devices:
        raise TpuCompilerError(
            f"libtpu {found['libtpu']} takes {topology.name} for {found['num_devices']} devices, "
            f"expected {topology.num_devices}: it means other chips by that name."
        )
    return dict(found)


def _failure(found: Mapping[str, str], topology: Topology) -> ValueError:
    """What the worker could not do, as an exception with one sentence."""
    stage, error = found["stage"], " ".join(found["error"].split())
    if stage == LIBRARY:
        return TpuCompilerError(
            f"libtpu, which has the TPU compiler, cannot be used here ({found['type']}: {error}); "
            f"install it with: {INSTALL}"
        )
    if stage == TOPOLOGY:
        return TpuCompilerError(
            f"libtpu does not know the topology {topology.name!r} ({error[:200]}); expected a "
            f"shape that slices of {topology.chip.name} have, such as "
            f"{_example(topology.chip)}."
        )
    if stage == PREPARE and found["type"] in ("ValueError", "TypeError"):
        return ValueError(found["error"])
    if stage == COMPILE and (option := re.search(r"No such compile option: '?(\w+)", error)):
        return TpuCompilerError(
            f"the TPU compiler does not know the option {option[1]!r}; leave it out, or write it "
            "as `libtpu` spells it."
        )
    if stage == COMPILE and "RESOURCE_EXHAUSTED" in error:
        return TpuCompilerError(
            f"the TPU compiler needs more of the chip's own memory than there is for what it has "
            f"scheduled for {topology.name} ({error[:300]}); leave out compiler options that fuse, "
            "or plan a smaller batch."
        )
    return TpuCompilerError(f"the TPU compiler failed for {topology.name}: {error[:500]}")


def _example(chip: Chip) -> str:
    """The name of a topology that there is."""
    return f"{chip.name}:{'2x2' if chip.network.dims == 2 else '2x2x1'}"


def _crash(returncode: int, said: str, topology: Topology) -> str:
    """What to say of a worker that has ended without a word."""
    how = f"exit code {returncode}"
    if returncode < 0:
        how = f"signal {signal.Signals(-returncode).name}"
    lines = [line for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.match(r"[FE]\d{4}|\w*Error", line)), "")
    last = last or (lines[-1] if lines else "nothing was said")
    return f"the TPU compiler ended with {how} for {topology.name}; its last words: {last[:300]}"
