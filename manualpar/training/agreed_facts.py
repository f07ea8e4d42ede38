"""The facts that must be equal in all processes of a run; `Cluster.agree` compares them.

Processes may have different settings for prefetching, monitoring and profiles, and different patch
versions of Python. They may also read the data from different paths, because the fingerprint and
the first examples of the data are compared instead.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import ml_collections

from manualpar.data import BatchStream, train_batch
from manualpar.system.cluster.facts import Facts
from manualpar.system.cluster.software import software_facts
from manualpar.system.storage import AnyPath
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment
from manualpar.training.sources import source_facts

FIRST_EXAMPLES = 8
# The settings of JAX that change the results, even if only their last bits.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
# The config fields that may differ between processes. An entry that ends in a dot means all fields
# that begin with it.
LOCAL = (
    *("watch.", "profile", "debug.draw_sharding"),
    *("data.path", "data.tokenizer", "data.template", "data.cache", "data.prefetch"),
)


def run_facts(
    config: ml_collections.ConfigDict, workdir: AnyPath | None, *, files: Iterable[Path] = ()
) -> Facts:
    """Collects the facts that are known before JAX starts: config, sources, folder, versions.

    Args:
      config: The config of the run.
      workdir: The folder of the run, if it is given.
      files: Files of Python with which the run is described, such as its config.
    """
    facts = {
        f"config.{name}": _show(value)
        for name, value in flatten_config(config).items()
        if not any(name.startswith(x) if x.endswith(".") else name == x for x in LOCAL)
    }
    facts |= source_facts(files=files)
    facts["--workdir"] = str(workdir or "not given")
    facts |= software_facts()
    return facts | {setting: str(getattr(jax.config, setting)) for setting in SETTINGS}


def experiment_facts(experiment: Experiment) -> Facts:
    """Collects the facts of an experiment: data, mesh, sources, the state's layout and so on."""
    config, task, program = experiment.config, experiment.task, experiment.program
    written = [getattr(x, "__module__", None) for x in (task.loss_fn, task.model, type(task.model))]
    dataset = task.dataset
    batch: Any = ()
    if not isinstance(dataset.train, BatchStream):  # Each process may read other rows of a stream.
        count = min(config.data.batch_size, FIRST_EXAMPLES)
        batch = train_batch(dataset.train, 0, batch_size=count, seed=config.seed)
    layout = [
        f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(program.abstract_state)
    ]
    return {
        **source_facts(*filter(None, written)),
        "the batch size": str(config.data.batch_size),
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
