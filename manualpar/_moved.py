"""Keeps old names of modules usable for one more release, with a warning.

`import manualpar.pretrained` gives the module object of `manualpar.models.pretrained`. Old names of
its submodules work in the same way. Remove an entry of `MOVED` in the release after the module's
move.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

# Old name of a module -> new name, both without `manualpar.`
MOVED = {
    "checkpoints": "training.checkpoints",
    "cluster": "system.cluster",
    "core.collectives": "core.parameters.collectives",
    "core.gradients": "core.modes.gradients",
    "core.partitioning": "core.parameters.sharded_parameter",
    "core.strategy": "core.modes.strategy",
    "extras": "errors",
    "finetuning": "models.finetuning",
    "generation": "models.generation",
    "generation.stored_run": "training.load_run",
    "layers.blockwise_attention": "layers.attention.blockwise_attention",
    "layers.context": "layers.attention.context",
    "layers.experts": "layers.moe.moe",
    "layers.plan": "layers.tensor_parallel.plan",
    "layers.routing": "layers.moe.routing",
    "layers.splash_attention": "layers.attention.splash_attention",
    "metrics": "core.state.metrics",
    "modes.remat": "core.modes.remat",
    "pipeline": "layers.pipeline",
    "pretrained": "models.pretrained",
    "rng": "core.mesh.splitting",
    "sharding.layout": "core.parameters.placement",
    "sharding.mesh": "core.mesh.mesh",
    "sharding.zigzag": "core.mesh.splitting",
    "storage": "system.storage",
    "train_state": "core.state.train_state",
    "training.cross_entropy": "models.cross_entropy",
    "training.devices": "core.mesh.mesh",
    "training.main": "commands.train_command",
    "training.sampling": "models.generation.drawing",
    "training.saved_run": "training.load_run",
    "untrusted": "system.storage.untrusted",
    "usage": "errors",
    "watching": "training.monitoring",
}
PACKAGE = "manualpar."
# Removed folders whose modules are in `MOVED`.
GONE = frozenset({"modes", "sharding"})


def new_name(name: str) -> str:
    """Returns the new full name of a module from its old full name; `""` if it did not move."""
    parts = name.removeprefix(PACKAGE).split(".") if name.startswith(PACKAGE) else []
    for n in range(len(parts), 0, -1):
        if moved := MOVED.get(".".join(parts[:n])):
            return PACKAGE + ".".join((moved, *parts[n:]))
    return ""


def import_moved(name: str) -> types.ModuleType:
    """Imports a module that has moved; `name` is its old name without `manualpar.`.

    Raises:
      AttributeError: No module had that name.
    """
    if name in GONE:
        return importlib.import_module(PACKAGE + name)
    if not (new := new_name(PACKAGE + name)):
        raise AttributeError(f"module 'manualpar' has no attribute {name!r}")
    _warn(PACKAGE + name, new, stacklevel=4)
    return importlib.import_module(new)


def _warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warns that a name is old; `stacklevel` selects the line that the warning shows."""
    warnings.warn(
        f"{old} is {new} now; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under their old names."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module that has moved."""
        del path, target
        is_gone = fullname.removeprefix(PACKAGE) in GONE and fullname.startswith(PACKAGE)
        if not is_gone and not new_name(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_gone)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Warns, and returns the module of the new name; `None` (an empty module) for a folder."""
        if not (name := new_name(spec.name)):
            return None
        _warn(spec.name, name)
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__  # The import system will replace `__spec__`.
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restores the spec that the module has under its new name."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def find_old_names() -> None:
    """Makes old names importable."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        # The finder must be first: others would import the files of a moved folder a second time.
        sys.meta_path.insert(0, MovedFinder())
