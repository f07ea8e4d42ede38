"""Runs one of XLA's compilers for devices that are not here, in a separate process.

The process, `manualpar.plans.compiler_worker`, writes the program's text and some facts about the
program to a folder. `manualpar.planner.compiled_plan` makes a `StepEstimate` from the text and the
facts. `manualpar.plans.tpu_compiler` and `manualpar.plans.gpu_compiler` define how each
compiler is started, and explain its errors.
"""

import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from manualpar.planner.compiled_plan import CompiledStep
from manualpar.planner.topology import Topology, parse_topology
from manualpar.plans import compiler_worker as worker
from manualpar.strategies import strategy_kinds
from manualpar.system.storage.untrusted import write_file

TIMEOUT = 1800.0  # Seconds for one compilation.


class CompilerError(ValueError):
    """A compiler cannot be run, or gives no result."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """One of XLA's compilers, as a worker starts it.

    Attributes:
      name: `"TPU"` or `"GPU"`.
      packages: The distributions that contain the compiler; the first one installed is used.
      environment: Environment variables of the worker.
      describe: Returns the arguments of `jax.experimental.topologies.get_topology_desc` for a
        topology.
      explain: Turns the worker's record of an exception into a sentence.
      refuse: Returns why the compiler does not take a topology; "" if it does.
      diagnostics: Returns compiler options that leave the program as it is.
    """

    name: str
    packages: tuple[str, ...]
    environment: Mapping[str, str]
    describe: Callable[[Topology], dict[str, Any]]
    explain: Callable[[Mapping[str, str], Topology], str]
    refuse: Callable[[Topology], str]
    diagnostics: Callable[[Topology], dict[str, Any]] = lambda _: {}


def run_compiler(
    compiler: Compiler,
    step: ml_collections.ConfigDict | str,
    topology: Topology | str,
    *,
    options: Mapping[str, str | bool] | None = None,
    vocab_size: int = 0,
) -> CompiledStep:
    """Compiles a training step for a topology.

    Args:
      step: A config, whose training step is compiled. Or `module:function`, a function of the
        devices that returns any step and the tuple of its arguments, with shardings on a mesh of
        these devices. The module is found on the Python path and in the current folder.
      topology: The topology, or its name.
      options: Additional compiler options, which override the options that
        `config.parallel.overlap` chooses; see `manualpar.core.mesh.compiler_options`.
      vocab_size: The tokens of a language model's vocabulary; 0 for the vocabulary of its data.

    Raises:
      CompilerError: The compiler is not installed, does not know the topology or an option,
        crashes, or takes too long.
    """
    if isinstance(topology, str):
        topology = parse_topology(topology)
    if refusal := compiler.refuse(topology):
        raise CompilerError(refusal)
    request = {
        **_described(step),
        "packages": compiler.packages,
        "chip": topology.chip.name,
        "topology": compiler.describe(topology),
        "options": dict(options or {}),
        "diagnostics": compiler.diagnostics(topology),
        "vocab_size": vocab_size,
    }
    with tempfile.TemporaryDirectory(prefix=f"manualpar-{compiler.name.lower()}-") as name:
        folder = Path(name)
        write_file(folder / worker.REQUEST, json.dumps(request))
        facts = _run_worker(compiler, folder, topology)
        program = folder / worker.PROGRAM
        text = program.read_text(encoding="utf-8") if program.exists() else ""
    given = facts.get("given", request["options"])  # The names that this compiler has for them.
    return CompiledStep(topology, facts["options"] | given, facts, text)


def _described(step: ml_collections.ConfigDict | str) -> dict[str, Any]:
    if isinstance(step, str):
        return {"function": step, "folder": os.getcwd()}
    builder = strategy_kinds()[step.parallel.strategy].builder
    return {"config": step.to_dict(), "strategy_file": inspect.getsourcefile(builder)}


def _run_worker(compiler: Compiler, folder: Path, topology: Topology) -> dict[str, Any]:
    """Runs the worker and reads its result; raises an error if the worker failed."""
    package = str(Path(__file__).parents[2])
    paths = filter(None, [package, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **compiler.environment, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "manualpar.plans.compiler_worker", str(folder)],
                env=environment,
                timeout=TIMEOUT,
                stdout=stderr,
                stderr=stderr,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompilerError(
                f"the {compiler.name} compiler has not finished after {TIMEOUT:,.0f} seconds for "
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
        raise CompilerError(_unknown_option(compiler, facts) or compiler.explain(facts, topology))
    if done.returncode or not ("memory" in facts or "out_of_memory" in facts):
        raise CompilerError(_crash(compiler, done.returncode, messages, topology))
    if facts["num_devices"] != topology.num_devices:
        raise CompilerError(
            f"{facts['compiler']} takes {topology.name} for {facts['num_devices']} devices, "
            f"expected {topology.num_devices}: it uses this name for another topology."
        )
    return dict(facts)


def _unknown_option(compiler: Compiler, facts: Mapping[str, str]) -> str:
    """Returns a sentence about an option that the compiler does not know; "" if there is none."""
    option = re.search(r"No such compile option: '?(\w+)", facts["error"])
    if facts["stage"] != worker.COMPILE or not option:
        return ""
    return (
        f"the {compiler.name} compiler does not know the option {option[1]!r}; leave it out, or "
        f"write it as `{compiler.packages[0]}` spells it."
    )


def _crash(compiler: Compiler, returncode: int, messages: str, topology: Topology) -> str:
    """Turns the end of a worker without a result into a sentence."""
    ending = f"exit code {returncode}"
    if returncode < 0:
        ending = f"signal {signal.Signals(-returncode).name}"
    lines = [line for line in messages.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.match(r"[FE]\d{4}|\w*Error", line)]
    last = (errors or lines)[-1]
    return (
        f"the {compiler.name} compiler ended with {ending} for {topology.name}; its last line: "
        f"{last[:300]}"
    )
