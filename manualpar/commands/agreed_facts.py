"""The facts that must be equal in all processes of a run; `Cluster.agree` compares them.

Processes may have different settings for prefetching, monitoring and profiles, and different patch
versions of Python. They may also read the data from different paths, because the fingerprint and
the first examples of the data are compared instead.
"""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from typing import Any

import jax

from manualpar.commands.command_line import CommandLine
from manualpar.data import train_batch
from manualpar.system.cluster.facts import Facts
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment

PACKAGES = ("manualpar", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# The settings of JAX that change the results, even if only their last bits.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
FIRST_EXAMPLES = 8
# The config fields that may differ between processes. An entry that ends in a dot means all fields
# that begin with it.
LOCAL = (
    *("watch.", "profile", "debug.draw_sharding"),
    *("data.path", "data.tokenizer", "data.template", "data.cache", "data.prefetch"),
)


def run_facts(command: CommandLine) -> Facts:
    """Collects the facts that are known before JAX starts: config, folder, versions, settings."""
    facts = {
        f"config.{name}": _show(value)
        for name, value in flatten_config(command.config).items()
        if not any(name.startswith(x) if x.endswith(".") else name == x for x in LOCAL)
    }
    facts["--workdir"] = str(command.flags.workdir or "not given")
    facts["Python"] = ".".join(platform.python_version_tuple()[:2])
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return facts | {setting: str(getattr(jax.config, setting)) for setting in SETTINGS}


def experiment_facts(experiment: Experiment) -> Facts:
    """Collects the facts of a prepared experiment: data, mesh, compiler options, state's layout."""
    config, program = experiment.config, experiment.program
    dataset = experiment.task.dataset
    count = min(config.data.batch_size, FIRST_EXAMPLES)
    batch = train_batch(dataset.train, 0, batch_size=count, seed=config.seed)
    layout = [
        f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(program.abstract_state)
    ]
    return {
        "the data's fingerprint": dataset.fingerprint,
        "the hash of the first examples": _digest(x.tobytes() for x in jax.tree.leaves(batch)),
        "the mesh": _show(dict(program.mesh.shape)),
        "the compiler's options": str(experiment.chosen),
        "the hash of the state's names, shapes and layout": _digest(map(str.encode, layout)),
    }


def _show(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
