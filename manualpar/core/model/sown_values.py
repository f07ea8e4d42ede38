"""Tells the values that a Linen model sows from the variables that a state keeps.

`self.sow(collection, name, value)` and `self.perturb(name, value)` store a value of one call in a
collection of any name. A variable (`self.variable`) looks the same in the collection. So the two
methods are replaced while a model runs, to record the paths that they create.

Invariants: a value that `sow` adds to a variable of the model belongs to this variable; numbers do
not change. (`nn.jit` may take a call from its cache, which records nothing.)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn

from manualpar.core.tracing.thread_patches import replaced_in_thread

# A collection, the names of modules, and the name of a value.
SownPath = tuple[str, ...]


@contextlib.contextmanager
def recording_sows() -> Iterator[set[SownPath]]:
    """Records the values that Linen models sow in this thread while the context is open."""
    found: set[SownPath] = set()

    def note(module: nn.Module, collection: str, name: str) -> None:
        scope = module.scope
        if scope is not None and scope.is_mutable_collection(collection):
            path = (collection, *scope.path, name)
            # The first call creates the value, and calls after it add to the value.
            if not scope.has_variable(collection, name):
                found.add(path)

    def replacement(method: str, old: Callable[..., Any]) -> Callable[..., Any]:
        def sow(module: nn.Module, col: str, name: str, *args: Any, **kwargs: Any) -> Any:
            note(module, col, name)
            return old(module, col, name, *args, **kwargs)

        def perturb(
            module: nn.Module, name: str, value: Any, collection: str = "perturbations"
        ) -> Any:
            note(module, collection, name)
            return old(module, name, value, collection)

        return sow if method == "sow" else perturb

    with replaced_in_thread([(nn.Module, "sow"), (nn.Module, "perturb")], replacement):
        yield found


def without_sown(variables: Mapping[str, Any], sown: set[SownPath]) -> dict[str, Any]:
    """Returns variables by collection without sown values, and without what is then empty."""
    firsts = {path[:1] for path in sown}

    def rest(tree: Any, path: SownPath) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        kept = {
            name: rest(value, (*path, name))
            for name, value in tree.items()
            if (*path, name) not in sown
        }
        dropped = {name for name, value in kept.items() if _is_empty(value, tree[name])}
        return {name: value for name, value in kept.items() if name not in dropped}

    found = {
        name: rest(tree, (name,)) if (name,) in firsts else tree for name, tree in variables.items()
    }
    return {name: tree for name, tree in found.items() if not _is_empty(tree, variables[name])}


def _is_empty(tree: Any, before: Any) -> bool:
    """Returns whether a mapping has lost all of its entries."""
    return isinstance(tree, Mapping) and not tree and bool(before)
