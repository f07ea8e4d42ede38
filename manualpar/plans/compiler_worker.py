"""Compiles a training step for TPUs or GPUs that are not here, in a separate process.

    python -m manualpar.plans.compiler_worker FOLDER

The worker reads `request.json` in the folder, and writes the program's text to `program.txt` and
everything else, also errors, to `result.json`. `manualpar.plans.compiler_process` starts the
worker, with the environment variables that the compiler needs on a machine without the devices. The
worker is a separate process because these variables would keep a training process from looking for
its devices, and because a crash in the compiler ends the process.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
from jax.experimental import topologies
from jax.sharding import NamedSharding

from manualpar.core.mesh.compiler_options import under_new_names
from manualpar.core.mesh.mesh import describe_links
from manualpar.core.modes.layer_loops import planned_memory
from manualpar.core.tracing.thread_patches import replaced_in_thread
from manualpar.inspect import ledger, state_bytes, trace_step
from manualpar.layers.attention.causal_attention import Device, planned_device
from manualpar.planner.hardware import chip_named, kernels_in
from manualpar.plans.planned_experiment import prepare_planned
from manualpar.strategies import strategy_kinds
from manualpar.system.storage.untrusted import write_file
from manualpar.training.experiment import Experiment

REQUEST, RESULT, PROGRAM = "request.json", "result.json", "program.txt"
# libtpu writes the text of the compiled program to files in this folder. They are read if the XLA
# in jaxlib is older than the XLA in libtpu and does not understand the program.
DUMP, DUMPED = "dump", "*.after_codegen.txt"
# The stages of the worker. The result names the stage in which an error occurred, so that the
# parent process can choose its message.
LIBRARY, TOPOLOGY, PREPARE, COMPILE = "library", "topology", "prepare", "compile"
MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}


def main(folder: Path) -> int:
    """Compiles the step that a folder's request describes."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    stage = [LIBRARY]
    result: dict[str, Any]
    try:
        result = _compile(request, folder, stage)
    except Exception as error:  # The parent turns any error into a sentence.
        result = {"stage": stage[0], "type": type(error).__name__, "error": str(error)}
    write_file(folder / RESULT, json.dumps(result))
    return 0


def _compile(request: dict[str, Any], folder: Path, stage: list[str]) -> dict[str, Any]:
    """Builds, lowers and compiles the step; `stage[0]` names the current stage."""
    compiler = installed(request["packages"])
    if not compiler:
        raise ModuleNotFoundError(f"no package {' or '.join(request['packages'])}")
    stage[0] = TOPOLOGY
    topology = topologies.get_topology_desc(**_tuples(request["topology"]))
    devices: list[Any] = list(topology.devices)
    stage[0] = PREPARE
    chip = chip_named(request["chip"])
    attention = contextlib.nullcontext() if chip.is_tpu else tracing_for(chip.device)
    with attention, planned_memory(chip.hbm_bytes):
        trace = _trace_function if "function" in request else _trace_config
        traced, about = trace(request, devices)
        lowered = traced.lower()
    stage[0] = COMPILE
    facts = {
        "compiler": compiler,
        "num_devices": len(devices),
        "kernels": list({kernel.key: kernel for kernel in kernels_in(traced.jaxpr.jaxpr)}.values()),
        **about,
    }
    try:
        given = under_new_names(request["options"], devices[0])
        facts["given"] = dict(given)
        options = request["diagnostics"] | given
        if chip.is_tpu:
            options |= {"xla_dump_to": str(folder / DUMP), "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_hbm(str(error)):
            raise
        return facts | {"out_of_memory": str(error)}
    memory = compiled.memory_analysis()
    write_file(folder / PROGRAM, text_of(compiled, folder / DUMP))
    return facts | {"memory": {name: int(getattr(memory, field)) for name, field in MEMORY.items()}}


def _trace_config(
    request: dict[str, Any], devices: list[Any]
) -> tuple[jax.stages.Traced, dict[str, Any]]:
    """Traces the step of a request's config; returns it with its facts."""
    config = ml_collections.ConfigDict(_tuples(request["config"])).lock()
    if config.parallel.strategy not in strategy_kinds():
        runpy.run_path(request["strategy_file"])  # The strategy registers itself.
    experiment = prepare_planned(config, devices=devices, vocab_size=request["vocab_size"])
    program = experiment.program
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return traced, _facts(experiment)


def _trace_function(
    request: dict[str, Any], devices: list[Any]
) -> tuple[jax.stages.Traced, dict[str, Any]]:
    """Traces a step that is not of this package; returns it with the facts of `_facts`.

    The request's function gets the devices, and returns the step and the tuple of its arguments.
    """
    name = request["function"]
    module, _, function = name.partition(":")
    sys.path.insert(0, request["folder"])
    try:
        made = getattr(importlib.import_module(module), function)(devices)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{error}.") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TypeError(
            f"it returned a {type(made).__name__}, expected a pair: the step, and the tuple of its "
            "arguments, which may be jax.ShapeDtypeStructs with shardings."
        )
    step, arguments = made
    traced = trace_step(step, *arguments)
    leaves = jax.tree.leaves(arguments)
    shardings = (getattr(x, "sharding", None) for x in leaves)
    mesh: Any = next((x.mesh for x in shardings if isinstance(x, NamedSharding)), None)
    if mesh is None or set(mesh.devices.flat) != set(devices):
        raise ValueError(
            f"the arguments of the step are on {mesh or 'no mesh'}, expected NamedShardings on a "
            f"mesh of the {len(devices)} devices that the function gets."
        )
    flops = 0
    with contextlib.suppress(ValueError):  # Something whose length or cost is not known.
        flops = ledger(traced).total_flops
    dtypes = {str(getattr(x, "dtype", "")) for x in leaves}
    return traced, {
        **_facts_of_mesh(mesh),
        "name": name,
        "order": tuple(mesh.axis_names),
        "options": {},
        "why_options": "not chosen, because the step is not of this package",
        "layers": "",
        "state": {},
        "dtype": "bfloat16" if "bfloat16" in dtypes else "float32",
        "examples_per_step": 1,
        "tokens_per_example": 0,
        "flops_per_example": flops * len(devices),
    }


def text_of(compiled: jax.stages.Compiled, dump: Path) -> str:
    """Returns a program's text, from the compiler's own files if jaxlib cannot read the program.

    libtpu 0.0.52 gives the operations of SparseCores several operands. The XLA of jaxlib 0.10.2
    refuses these operations ("async-update instruction should have 1 operands").
    """
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        files = sorted(dump.glob(DUMPED), key=lambda path: path.stat().st_size)
        if not files:
            raise
        return files[-1].read_text(encoding="utf-8")


def installed(packages: Sequence[str]) -> str:
    """Returns the first installed package with its version, such as `libtpu 0.0.42`; "" if none."""
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return ""


def is_out_of_hbm(message: str) -> bool:
    """Returns whether an error says that a program needs too much HBM, not too much VMEM."""
    return "RESOURCE_EXHAUSTED" in message and "hbm" in message.lower().partition("vmem")[0]


def _facts(experiment: Experiment) -> dict[str, Any]:
    """Returns the facts about the program that `manualpar.planner.compiled_plan` needs."""
    program = experiment.program
    state = program.abstract_state
    batch = state_bytes(program.abstract_batch)[0]
    parameters, optimizer = (state_bytes(part)[0] for part in (state.params, state.opt_state))
    return {
        "name": f"{program.strategy.name} {program.mode}",
        **_facts_of_mesh(program.mesh),
        "order": experiment.config.parallel.mesh_order,
        "options": dict(experiment.chosen.options),
        "why_options": experiment.chosen.why,
        "layers": str(program.layer_choice or ""),
        "state": {"parameters": parameters, "optimizer": optimizer, "batch": batch},
        "dtype": str(getattr(experiment.task.model, "dtype", "float32")),
        "examples_per_step": jax.tree.leaves(program.abstract_batch)[0].shape[0],
        "tokens_per_example": experiment.task.tokens_per_example,
        "flops_per_example": experiment.task.flops_per_example,
    }


def _facts_of_mesh(mesh: Any) -> dict[str, Any]:
    return {
        "mesh": dict(mesh.shape),
        "links": describe_links(mesh),
        "places": [
            (getattr(device, "slice_index", 0), *device.coords) for device in mesh.devices.flat
        ],
    }


def _tuples(value: Any) -> Any:
    """Converts lists in a config's values to tuples, because JSON has only lists."""
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------------
# Traces cuDNN's attention for GPUs that are not here.
#
# JAX examines the GPU and the cuDNN of this process before it traces cuDNN's kernel, and has no
# setting for another GPU. So `tracing_for` replaces JAX's checks, whose names JAX does not
# promise, in the calling thread as long as a trace lasts. Only the process of a compiler
# (`manualpar.plans.compiler_worker`) does so; no training does. If a version of JAX has other
# checks, the context refuses it.


CUDNN_VERSION = 91_002  # 9.10.2, the first that takes a window and a mask together.


@contextlib.contextmanager
def tracing_for(device: Device) -> Iterator[None]:
    """Traces attention for a device that this process need not have.

    JAX's questions about the GPU and about cuDNN are answered for `device` and `CUDNN_VERSION`. Use
    it around the traces of programs for a planned mesh. JAX caches traces, so a function that was
    traced outside is not traced again.

    Raises:
      RuntimeError: This version of JAX asks other questions.
    """
    attend: Any = inspect.unwrap(jax.nn.dot_product_attention)
    kernel: Any = attend.__globals__.get("cudnn_dot_product_attention")
    module = sys.modules[inspect.unwrap(kernel).__module__] if kernel else None
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: _numbers(device) >= _version(least),
        "is_cuda_compute_capability_equal": lambda one: _numbers(device) == _version(one),
    }
    if missing := [name for name in sorted(answers) if not hasattr(module, name)]:
        raise RuntimeError(
            f"tracing_for: JAX {jax.__version__} has no {', '.join(missing)}, expected the checks "
            "of jax.nn.dot_product_attention that JAX 0.10 has."
        )
    checks = [(module, name) for name in answers]
    with replaced_in_thread(checks, lambda name, _: answers[name]), planned_device(device):
        yield


def _numbers(device: Device) -> tuple[int, ...]:
    return _version(device.compute_capability) if device.major else (0,)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
