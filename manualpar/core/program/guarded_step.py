"""Steps as they are called: unusable arrays are refused, and simulated devices keep together.

A train step donates its state: the state that it returns takes over the memory. Whoever uses the
old state again, by running a notebook's cell twice for instance, hands deleted arrays to JAX. On
several simulated devices that ends the process without a Python error.

XLA's CPU client runs at most 32 computations at a time. Simulated devices that get further ahead of
each other than that wait in a collective for one whose turn never comes, and after 40 seconds the
process is aborted; so does plain `jax.jit` with any collective in a loop that fetches nothing.
Accelerators and a single device have no such limit, and on them no step waits for another.
"""

import collections
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from manualpar.core.mesh.splitting import shapes_of_batch
from manualpar.core.parameters.placement import path_name
from manualpar.core.state.state_arrays import list_some
from manualpar.core.state.train_state import TrainState

MAX_STEPS_AHEAD = 8
_MENDS = {
    "state": "a train step donates its state, so that the one it returns can take over the memory. "
    "Use the returned one, `state, metrics = program.train_step(state, batch)`. In a notebook, "
    "run the cells again from the one that makes the state.",
    "batch": "an earlier call donated it or its delete() was called. Make the batch again before "
    "every step that donates it, or do not donate it.",
}


class GuardedStep:
    """A jitted step that refuses what was donated, and waits for earlier steps where it has to.

    It is used like the step. Its outputs contain `metrics`, alone or as the last of a tuple.

    Looking at every array of a state takes 0.4 us for each. So that a loop does not pay for it, the
    state that the latest call took or returned is known to be alive if its step counter is.

    Attributes:
      jitted: The step itself, which waits for nothing and checks nothing.
      is_limited: Whether it waits for the step `MAX_STEPS_AHEAD` before it.
    """

    def __init__(
        self,
        name: str,
        step: Any,
        mesh: Mesh,
        check_state: Callable[[Any], None] = lambda state: None,
    ) -> None:
        """Takes the step's name, for messages, and what raises for a state that does not fit."""
        self.jitted = step
        self.is_limited = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._name, self._check_state = name, check_state
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self._known: Any = lambda: None  # A weak reference: a state's memory is its owner's.

    def __call__(self, state: Any, batch: Any) -> Any:
        """Calls the step with a state and a batch that can be used."""
        is_state = isinstance(state, TrainState)
        if not is_state or state is not self._known() or is_deleted(state.step):
            check_alive(self._name, state=state)
            self._check_state(state)
        check_alive(self._name, batch=batch)
        try:
            out = self.jitted(state, batch)
        except TypeError:
            shapes_of_batch(f"{self._name}: batch", batch)  # Raises if something is no array.
            raise
        new, metrics = out if isinstance(out, tuple) else (state, out)
        if is_state:
            self._known = weakref.ref(new)
        if self.is_limited:
            self._wait_for_earlier(jax.tree.leaves(metrics)[0])
        return out

    def _wait_for_earlier(self, metric: Any) -> None:
        if isinstance(metric, jax.core.Tracer):  # Nothing runs while somebody traces the step.
            return
        self._in_flight.append(metric)
        if len(self._in_flight) > MAX_STEPS_AHEAD:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():  # Its owner may have donated it.
                oldest.block_until_ready()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def check_alive(function: str, **trees: Any) -> None:
    """Refuses trees, by the name of the argument, with arrays that have been donated or deleted.

    Leaves that are no arrays of JAX's, or that are being traced, pass.
    """
    for name, tree in trees.items():
        if not any(map(is_deleted, jax.tree.leaves(tree))):
            continue
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if is_deleted(x):
                raise ValueError(
                    f"{function}: {name}{jax.tree_util.keystr(path)} has been deleted, expected "
                    f"arrays that are alive: {_MENDS.get(name, _MENDS['state'])}"
                )


def is_deleted(x: Any) -> bool:
    """Whether a leaf is an array whose memory is gone; false while it is being traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def check_state(function: str, abstract: TrainState, state: Any) -> None:
    """Refuses a state that is not as a program holds it, before JAX sees it.

    What is being traced passes, and so do arrays that are committed to no device: JAX places them.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{function}: state is a {type(state).__name__}, expected one of this program: what "
            "program.init or the step before returned."
        )
    wanted = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(abstract)}
    found = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    lines = [f"{name} is missing" for name in wanted if name not in found]
    for name, x in found.items():
        if name not in wanted:
            lines.append(f"{name} is not in this program's states")
        elif np.shape(x) != wanted[name].shape:
            lines.append(f"{name} has shape {np.shape(x)}, expected {wanted[name].shape}")
        elif not _lies_as(x, wanted[name].sharding):
            lies, expected = map(_show_sharding, (x.sharding, wanted[name].sharding))
            lines.append(f"{name} lies {lies}, expected {expected}")
    structure: Any = jax.tree.structure(abstract)
    if not lines and structure != jax.tree.structure(state):
        lines = ["it belongs to another model or optimizer"]
    if lines:
        raise ValueError(
            f"{function}: the state is another program's, or lies elsewhere: "
            f"{'; '.join(list_some(lines))}. program.adopt(state) takes another program's state, "
            "and program.init_from(params) parameters from anywhere."
        )


def _show_sharding(sharding: Any) -> str:
    """Where an array lies: `P('data',) over 8 devices`."""
    count = len(sharding.device_set)
    return f"{getattr(sharding, 'spec', 'whole')} over {count} device{'s' * (count > 1)}"


def _lies_as(x: Any, sharding: Any) -> bool:
    """Whether an array lies on the devices in a way, or can still be placed."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
        return True
    if x.sharding.device_set != sharding.device_set:
        return False
    return len(sharding.device_set) == 1 or x.sharding.is_equivalent_to(sharding, x.ndim)
