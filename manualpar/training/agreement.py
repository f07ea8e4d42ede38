"""The facts that must be equal in all processes of a run; `Cluster.agree` compares them.

Processes may have different settings for prefetching, monitoring and profiles, and different patch
versions of Python. They may also read the data from different paths, because the fingerprint and
the first examples of the data are compared instead.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_collections

from manualpar.data import BatchStream, train_batch
from manualpar.errors import LIBRARIES
from manualpar.system.cluster.facts import PACKAGE, Facts, hash_files, software_facts
from manualpar.system.storage import AnyPath
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment

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
        "how layers run": str(program.layer_choice or ""),
        "the hash of the state's names, shapes and layout": _digest(map(str.encode, layout)),
    }


def _show(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------
# Hashes of a user's sources, which must be equal in all processes of a run.


def source_facts(*modules: str, files: Iterable[Path] = ()) -> Facts:
    """Hashes the sources of the running script, of modules and of files, without this package.

    Args:
      *modules: Names of modules. If a module is in a package, all files of the package count. A
        module that is not loaded, or is an installed library, does not count.
      files: Files of Python, and with each of them the loaded modules of its folder.

    Returns:
      A hash by the name of each source.
    """
    facts = {}
    given = [path.absolute() for path in files]
    folders = {path.parent for path in given}
    loaded = {name: _file_of(name) for name in list(sys.modules)}
    named = [path for name in ("__main__", *modules) for path in _sources(name)]
    beside = [path for path in loaded.values() if path and path.parent in folders]
    for path in dict.fromkeys([*given, *named, *beside]):
        if not path.is_relative_to(PACKAGE):
            facts[f"the hash of {path.parent.name}/{path.name}"] = hash_files([path])
    return facts


def _sources(module: str) -> Iterator[Path]:
    package = getattr(sys.modules.get(module), "__package__", "") or ""
    root = _file_of(package.partition(".")[0])
    if root and root.name == "__init__.py":
        yield from sorted(root.parent.rglob("*.py"))
    elif path := _file_of(module):
        yield path


def _file_of(module: str) -> Path | None:
    """Returns the Python file of a loaded module; `None` for libraries and what has no file."""
    name = getattr(sys.modules.get(module), "__file__", None)
    path = Path(name).absolute() if isinstance(name, str) else None
    if path is None or path.suffix != ".py" or not path.is_file():
        return None
    return None if any(path.is_relative_to(folder) for folder in LIBRARIES) else path
