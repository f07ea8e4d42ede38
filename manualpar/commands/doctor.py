"""Shows the software and devices that a run would use here, to find a fault or to report it.

    manualpar doctor                 # this machine
    manualpar doctor fsdp_lm         # and whether this config would run on it
    manualpar launch --processes=2 manualpar doctor
    srun manualpar doctor --cluster --workdir=/shared/runs   # every host of a cluster

It prints versions, settings, devices, and the links between the devices. For NVIDIA GPUs it says
what is missing, and what does not fit the version of jaxlib or of the driver. On such a GPU it
compares attention, as models choose it, with attention in float32 in plain JAX. It runs one small
step of FSDP on all devices. If there is only one process, it compares the loss and the gradients
with those of one device. With a config, it does everything that a run does before it compiles: it
checks the fields, opens the data, traces the program and counts its memory. It shows only the
environment variables that JAX, XLA and this package read, and hides secrets.

With `--cluster`, every process of a job runs this command, and process 0 prints a line for each
host: `n1: ok`, or what is wrong there and what to do. The checks take at most about ten seconds.
They compare versions, sources, devices, drivers and clocks, and connect the hosts with each other.
They look at each host's own name, at its limit of open files and at its free space, and with
`--workdir` at whether all hosts see the same folder.

The exit code is 0, or 2 if something would not run. With `--cluster` it is 7 if a run on these
hosts would be refused, and 4 if a process did not come within `--wait` seconds.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from manualpar.core.mesh.mesh import describe_links, make_mesh
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import Batch
from manualpar.errors import (
    TRAIN,
    UNREADY_EXIT_CODE,
    USAGE_EXIT_CODE,
    UsageError,
    describe_mistake,
    print_error,
    require,
    suggest,
)
from manualpar.inspect.same_as_one_device import assert_same_as_one_device
from manualpar.strategies.fsdp import fsdp
from manualpar.system.cluster import (
    LOST_PROCESS_EXIT_CODE,
    WAIT_SECONDS,
    NotMetError,
    examine,
    initialize,
)
from manualpar.system.cluster.facts import software_facts as versions_and_sources
from manualpar.system.cluster.this_host import driver_version
from manualpar.system.reports.flags import HELP, Flag, explain, parse_flags
from manualpar.system.reports.help_text import (
    print_help,
    wrap_text,
)
from manualpar.system.storage.compilation_cache import check_compilation_cache

PACKAGES = ("manualpar", "jax", "jaxlib", "flax", "optax", "numpy")
SETTINGS = re.compile(r"(JAX|XLA|LIBTPU|TPU|NCCL|CUDA|MANUALPAR)_|OMP_NUM_THREADS$")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
# A requirement of an extra: `jax[tpu]>=0.10; extra == "tpu"`.
REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,.-]+)\])?.*extra == ["']([\w.-]+)["']""")
WITHIN = "all devices within one host"
CONFIG_HELP = (
    "A config to check too, a name or a file. Its fields are flags, as for `manualpar train`; "
    "`CONFIG --help` shows them."
)
OF_CONFIG: Mapping[str, Flag] = {"devices": Flag("The number of CPU devices to simulate.", int)}
OF_CLUSTER: Mapping[str, Flag] = {
    "cluster": Flag("Checks the hosts of this job, without a config.", bool, False),
    "workdir": Flag(
        "With --cluster, a folder or bucket that all hosts should share.", Path, in_buckets=True
    ),
    "wait": Flag(
        "With --cluster, the time to wait for all processes.", float, WAIT_SECONDS, value="SECONDS"
    ),
}
ROWS, FEATURES = 8, 64  # The batch of the small step has this size on each device.


@dataclasses.dataclass(frozen=True)
class Fact:
    """A line of the report; `is_wrong` means that something would not run."""

    name: str
    value: str
    is_wrong: bool = False


def software_facts() -> Iterator[Fact]:
    """Yields the facts about versions, optional packages and settings; starts no backend."""
    yield Fact("python", f"{platform.python_version()}, {platform.platform()}")
    yield Fact("cores", str(os.cpu_count()))
    for package in PACKAGES:
        yield Fact(package, _version(package) or "not installed")
    if libtpu := _version("libtpu"):
        yield Fact("libtpu", libtpu)
    yield from itertools.starmap(Fact, nvidia_facts())
    for extra, packages in _extras("manualpar").items():
        shown = ", ".join(f"{name} {_version(name) or '-'}" for name in packages)
        yield Fact(f"extra {extra}", shown)
    for name, value in sorted(os.environ.items()):
        if SETTINGS.match(name):
            yield Fact(name, "(set)" if SECRET.search(name) else value)


def _extras(distribution: str) -> dict[str, list[str]]:
    """Returns the packages of each extra of a distribution, without those of its other extras."""
    found: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires(distribution) or ():
        if not (match := REQUIREMENT.match(requirement)):
            continue
        package, inner, extra = match.groups()
        names = found.setdefault(extra, [])
        if package in PACKAGES:  # jax[tpu] stands for the packages of this extra.
            names += _extras(package).get(inner, ()) if package != distribution else ()
        else:
            names.append(package)
    return {extra: names for extra, names in found.items() if names}


def device_facts() -> Iterator[Fact]:
    """Yields the facts about the devices and their links, and the result of one step on them."""
    devices = jax.devices()
    kinds = ", ".join(dict.fromkeys(device.device_kind for device in devices))
    yield Fact("devices", f"{len(devices)} of {kinds} ({devices[0].platform})")
    yield Fact("processes", f"{jax.process_count()}, this is {jax.process_index()}")
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if limits := [entry["bytes_limit"] for entry in stats if "bytes_limit" in entry]:
        yield Fact("memory of a device", f"{min(limits) / 2**30:.1f} GiB")
    mesh = make_mesh({"data": -1})
    yield Fact("links", describe_links(mesh) or WITHIN)
    yield _try_step(mesh)
    if jax.default_backend() == "gpu":
        yield _try_attention()


def config_facts(config: Any) -> Iterator[Fact]:
    """Yields facts about a config: whether it would run, as far as is known before compilation."""
    # These imports need an extra, which may be missing.
    from manualpar.core.mesh.mesh import describe_mesh
    from manualpar.inspect.tables import describe_bytes
    from manualpar.training.experiment import prepare
    from manualpar.training.memory_check import check_fits, least_bytes

    try:
        experiment = prepare(config)
        check_fits(experiment)
    except (UsageError, ValueError, OSError) as error:
        yield Fact("would run", f"no: {describe_mistake(error)}", is_wrong=True)
        return
    program = experiment.program
    yield Fact("mesh", describe_mesh(program.mesh))
    yield Fact("links of the mesh", describe_links(program.mesh) or WITHIN)
    yield Fact("compiler options", experiment.chosen.describe())
    parts = least_bytes(program)
    shown = ", ".join(f"{name} {describe_bytes(size)}" for name, size in parts.items())
    yield Fact("a device holds at least", f"{describe_bytes(sum(parts.values()))} ({shown})")
    yield Fact("would run", "yes, as far as is known before compilation")


def main(argv: Sequence[str]) -> int:
    """Prints the report; `argv` is the command line, the program's name first."""
    is_wrong = False
    try:
        if HELP & set(argv):
            print_help(_help([argument for argument in argv if argument not in HELP]))
            return 0
        check_compilation_cache()
        if "--cluster" in argv:
            return _check_cluster(argv)
        config = _prepare_devices(argv)
        with initialize() as cluster:
            reports = [software_facts, device_facts]
            if config is not None:
                reports.append(functools.partial(config_facts, config))
            for fact in itertools.chain.from_iterable(report() for report in reports):
                is_wrong |= fact.is_wrong
                if cluster.is_main:
                    print(f"{fact.name + ':':26s} {fact.value}", flush=True)
    except BrokenPipeError:
        raise  # `manualpar.commands.main` ends quietly.
    except NotMetError as error:
        print_error(error)
        return LOST_PROCESS_EXIT_CODE
    except (UsageError, ValueError, RuntimeError, ConnectionError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    return USAGE_EXIT_CODE if is_wrong else 0


def _help(argv: Sequence[str]) -> str:
    """Returns the text of `--help`, with the fields of a config if the command line names one."""
    description = (__doc__ or "").replace("manualpar doctor", argv[0])
    if not _names_config(argv):
        flags = {"config": Flag(CONFIG_HELP, value="NAME"), **OF_CONFIG, **OF_CLUSTER}
        return f"{wrap_text(description)}\n\n{explain(flags)}"
    require("--config", *TRAIN)
    from manualpar.commands.command_line import Syntax, command_help

    return command_help(description, argv, "", Syntax(OF_CONFIG))


def _check_cluster(argv: Sequence[str]) -> int:
    """Checks the hosts of a cluster, and prints a line for each; returns the exit code."""
    flags = parse_flags(argv, "", OF_CLUSTER, check=_check_wait)
    # Several processes of a host look at the same GPUs, and none of them needs their memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    facts = {**versions_and_sources(), "--workdir": str(flags.workdir or "not given")}
    started = time.perf_counter()
    cluster, verdict = examine(start_timeout_seconds=flags.wait, facts=facts, workdir=flags.workdir)
    if cluster.is_main:
        for line in verdict.lines:
            print(line)
        would = "would be refused" if verdict.fatal else "may start"
        seconds = time.perf_counter() - started
        print(f"a run of {cluster.num_processes} processes {would} ({seconds:.1f} s)", flush=True)
    return UNREADY_EXIT_CODE if verdict.fatal else 0


def _check_wait(flags: types.SimpleNamespace) -> None:
    if not (math.isfinite(flags.wait) and flags.wait > 0):
        raise UsageError(f"--wait={flags.wait}: expected a positive number of seconds.")


def _names_config(argv: Sequence[str]) -> bool:
    given = argv[1:]
    is_first = bool(given) and not given[0].startswith("-")
    return is_first or any(re.match(r"--?config(=|$)", argument) for argument in given)


def _prepare_devices(argv: Sequence[str]) -> Any:
    """Loads the config of a command line, and simulates the same CPU devices as a run would."""
    if not argv[1:]:
        return None
    if not _names_config(argv):
        name = argv[1].lstrip("-").partition("=")[0].replace("-", "_")
        near = suggest(name, {"config", *OF_CONFIG, *OF_CLUSTER}, show=lambda x: f"--{x}")
        raise UsageError(f"{argv[1]!r} is not understood, expected a config or no argument{near}.")
    require("--config", *TRAIN)
    from manualpar.commands.command_line import Syntax, parse_command_line
    from manualpar.commands.results import choose_devices, quiet_absl

    quiet_absl()
    syntax = Syntax(OF_CONFIG)
    line = parse_command_line(argv, default_config=Path(), syntax=syntax)
    choose_devices(line.flags.devices)
    return line.config


def _try_step(mesh: jax.sharding.Mesh) -> Fact:
    """Runs a small step of FSDP on all devices, and compares the results with one device's."""
    name = "a step over all devices"
    try:
        program, batch = _small_program(mesh)
        if jax.process_count() == 1:
            assert_same_as_one_device(program, batch, jax.random.key(0))
            return Fact(name, "right: loss and gradients equal those of one device")
        _, metrics = program.train_step(program.init(jax.random.key(0)), batch)
        total, count = metrics["loss"]
        return Fact(name, f"runs, with a loss of {float(total) / float(count):.4f}")
    except (AssertionError, ValueError, RuntimeError) as error:
        return Fact(name, f"fails: {describe_mistake(error)}", is_wrong=True)


# The cases of attention for which a model on GPUs takes a kernel, and how far 16 bits may differ.
ATTENTION_CASES: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "documents": {"documents": True},
    "a window": {"window": 96},
    "a soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "all": {"documents": True, "window": 96, "soft_cap": 5.0, "sinks": True},
}
MOST_DIFFERENCE = 0.02


def _try_attention() -> Fact:
    """Compares values and gradients of attention in bfloat16 with those of plain JAX in float32."""
    name = "attention in bfloat16"
    try:
        wrong = {
            case: difference
            for case, options in ATTENTION_CASES.items()
            if not (difference := _attention_difference(**options)) <= MOST_DIFFERENCE
        }
    except (ValueError, RuntimeError) as error:
        return Fact(name, f"fails: {describe_mistake(error)}", is_wrong=True)
    if not wrong:
        return Fact(name, "right: values and gradients equal those in float32")
    listed = ", ".join(f"{case} ({difference:.2g})" for case, difference in wrong.items())
    return Fact(
        name,
        f"wrong: values or gradients differ by more than {MOST_DIFFERENCE} of their size for "
        f"{listed}; set config.model.attention=blockwise, and report it",
        is_wrong=True,
    )


def _attention_difference(*, documents: bool = False, sinks: bool = False, **options: Any) -> float:
    """Returns the largest difference of the result and of the gradients, relative to their norm."""
    # Imported here, because hosts of a cluster that are only examined need no layers.
    from manualpar.layers.attention import attention

    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value, g = (
        jax.random.normal(keys[i], (2, 384, heads, 64), jnp.bfloat16)
        for i, heads in enumerate((4, 2, 2, 4))
    )
    number = jnp.cumsum(jax.random.bernoulli(keys[4], 0.02, (2, 384)), axis=1)
    of_heads = jnp.linspace(-1.0, 2.0, 4) if sinks else None

    def pulled(kind: Any, dtype: Any) -> Any:
        def attend(*arrays: jax.Array) -> jax.Array:
            query, key, value, *rest = arrays
            own = rest[0] if rest else None
            of_documents = number if documents else None
            out = attention(query, key, value, of_documents, kind=kind, sinks=own, **options)
            return out.astype(jnp.float32)

        arrays = [x.astype(dtype) for x in (query, key, value)] + ([of_heads] if sinks else [])
        out, pullback = jax.vjp(attend, *arrays)
        return out, *pullback(g.astype(jnp.float32))

    # On a mesh of one device, because XLA could partition a program without a mesh over all
    # devices, and then attention would take no kernel that XLA cannot partition.
    with jax.set_mesh(make_mesh({"data": 1}, devices=jax.local_devices()[:1])):
        found = jax.jit(functools.partial(pulled, "", jnp.bfloat16))()
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(functools.partial(pulled, "blockwise", jnp.float32))()

    def difference(got: jax.Array, right: jax.Array) -> float:
        apart = jnp.linalg.norm((got.astype(jnp.float32) - right).ravel())
        return float(apart / jnp.linalg.norm(right.ravel()))

    return max(map(difference, found, wanted))


def _small_program(mesh: jax.sharding.Mesh) -> tuple[Program, Batch]:
    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        del rng
        squares = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels)
        return squares.mean(), {"loss": (squares.sum(), jnp.float32(squares.size))}

    size = mesh.size * FEATURES
    inputs = jnp.sin(jnp.arange(mesh.size * ROWS * size, dtype=jnp.float32)).reshape(-1, size)
    batch = Batch(inputs, inputs[:, :FEATURES])
    model = nn.Sequential([nn.Dense(size), nn.tanh, nn.Dense(FEATURES)])
    program = fsdp(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch)
    return program, jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, program.batch_sharding, x.__getitem__),
        batch,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -------------------------------------------------------------------------------------------------
# The software that JAX needs for NVIDIA GPUs: what is installed, what is missing, what misfits.


# The oldest driver for each version of CUDA, https://docs.jax.dev/en/latest/installation.html.
OLDEST_DRIVER: Mapping[int, int] = {12: 525, 13: 580}
PARTS = ("jax-cuda{}-plugin", "jax-cuda{}-pjrt")
LIBRARIES = ("nvidia-nccl-cu{}", "nvidia-cudnn-cu{}")
SMI_SECONDS = 30.0


def nvidia_facts() -> Iterator[tuple[str, str, bool]]:
    """Yields the name and value of each fact, and whether it keeps JAX from using the GPUs.

    Yields nothing on a machine without a driver and without a package for NVIDIA GPUs.
    """
    found = {
        name.format(cuda): version
        for cuda in OLDEST_DRIVER
        for name in (*PARTS, *LIBRARIES)
        if (version := _nvidia_version(name.format(cuda)))
    }
    driver = find_driver()
    if not found and not driver:
        return
    yield "NVIDIA driver", driver or "not found, so JAX cannot use a GPU here", False
    for name, version in found.items():
        yield name, version, False
    if not driver:  # The packages may be there for the compiler alone.
        return
    is_asked = os.environ.get("JAX_PLATFORMS", "") != "cpu"
    major = int(number[0]) if (number := re.match(r"\d+", driver)) else 0
    cudas = [cuda for cuda in OLDEST_DRIVER if any(x.format(cuda) in found for x in PARTS)]
    if not cudas:
        newest = max((cuda for cuda in OLDEST_DRIVER if OLDEST_DRIVER[cuda] <= major), default=12)
        text = f"no jax-cuda{newest}-plugin: JAX cannot use the GPUs; {_install(newest)}"
        yield "missing for GPUs", text, is_asked
    for cuda in cudas:
        for sentence in _misfits(cuda, found, major):
            yield "does not fit", sentence, is_asked
        for name in (x.format(cuda) for x in LIBRARIES):
            if name not in found:
                text = f"{name}: JAX needs the system's library, or {_install(cuda)}"
                yield "missing for GPUs", text, False
    if len(cudas) > 1:
        text = f"plugins for CUDA {' and '.join(map(str, cudas))}; uninstall those of one version"
        yield "does not fit", text, is_asked


def find_driver() -> str:
    """Returns the version of NVIDIA's driver; "" if there is none."""
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            ran = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return driver_version()
        if ran.returncode == 0 and (lines := ran.stdout.split()):
            return lines[0]
    return driver_version()


def _misfits(cuda: int, found: Mapping[str, str], driver: int) -> Iterator[str]:
    """Yields a sentence for each part of the plugin that is missing or does not fit the rest."""
    jaxlib = _nvidia_version("jaxlib")
    for name in (x.format(cuda) for x in PARTS):
        if name not in found:
            yield f"{name} is missing, which the plugin needs; {_install(cuda)}"
        elif _numbers(found[name]) != _numbers(jaxlib):
            yield (
                f"{name} is {found[name]} and jaxlib is {jaxlib}, expected the same version; "
                f"pip install '{name}=={jaxlib}'"
            )
    oldest = OLDEST_DRIVER[cuda]
    if driver < oldest:
        yield (
            f"the driver is of version {driver}, expected at least {oldest} for CUDA {cuda}; "
            f"install a newer driver{' or jax[cuda12]' * (cuda > 12 and driver >= 525)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers at the beginning of a version, the part that JAX compares."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _install(cuda: int) -> str:
    return f"pip install 'jax[cuda{cuda}]'"


def _nvidia_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
