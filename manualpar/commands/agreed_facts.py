"""The facts that the processes of a run must agree on, for `Cluster.agree` to compare.

Hosts may differ in prefetching, monitoring, reports and profiles, and in the last number of
Python's version. They may also differ in the path of the data, because the data's fingerprint and
its first examples are compared instead.
"""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from typing import Any

import jax
import ml_collections

from manualpar.commands.command_line import CommandLine
from manualpar.data import train_batch
from manualpar.system.cluster.facts import Facts
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment

PACKAGES = ("manualpar", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# JAX settings that change the results, or only their last bits.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
FIRST_EXAMPLES = 8
# Config fields that may differ between processes; a prefix ends in a dot.
LOCAL = (
    *("watch.", "profile", "debug.draw_sharding"),
    *("data.path", "data.tokenizer", "data.template", "data.cache", "data.prefetch"),
)


def run_facts(command: CommandLine) -> Facts:
    """Collects the facts known before JAX has devices: the config, the folder and versions."""
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
    """Collects the facts of an experiment whose data is open and whose program is traced."""
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
    value = value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value
    return json.dumps(value, sort_keys=True, default=str)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
