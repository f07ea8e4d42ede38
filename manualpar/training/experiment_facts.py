"""The facts of a prepared experiment that must be equal in all processes of a run."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax

from manualpar.data import BatchStream, train_batch
from manualpar.system.cluster.facts import Facts
from manualpar.training.experiment import Experiment
from manualpar.training.sources import source_facts

FIRST_EXAMPLES = 8


def experiment_facts(experiment: Experiment) -> Facts:
    """Collects the facts of an experiment: data, mesh, sources, the state's layout and so on."""
    config, program = experiment.config, experiment.program
    task = experiment.task
    written = [getattr(x, "__module__", None) for x in (task.loss_fn, task.model, type(task.model))]
    dataset = experiment.task.dataset
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
        "the data's fingerprint": dataset.fingerprint,
        "the hash of the first examples": _digest(x.tobytes() for x in jax.tree.leaves(batch)),
        "the mesh": show_fact(dict(program.mesh.shape)),
        "the compiler's options": str(experiment.chosen),
        "the hash of the state's names, shapes and layout": _digest(map(str.encode, layout)),
    }


def show_fact(value: Any) -> str:
    """Returns the text of a value that is compared."""
    return json.dumps(value, sort_keys=True, default=str)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
