"""Steps as they are called: what was donated is refused, and simulated devices keep together.

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

from manualpar.guards.donation import check_alive, is_deleted
from manualpar.sharding.layout import path_name
from manualpar.state_arrays import list_some
from manualpar.train_state import TrainState

MAX_STEPS_AHEAD = 8


def guard_step(
    name: str,
    step: jax.stages.Wrapped,
    mesh: Mesh,
    check_state: Callable[[Any], None] = lambda state: None,
) -> jax.stages.Wrapped:
    """Makes a jitted step refuse what was donated, and wait for earlier steps where it has to.

    Args:
      name: What the step is called, for messages.
      step: A jitted function of a state and a batch whose outputs contain `metrics`, alone or as
        the last of a tuple.
      mesh: The mesh it runs on.
      check_state: Raises for a state that does not fit. It is asked about states that the step has
        neither taken nor returned.

    Returns:
      A function that is used like `step`. It raises a `ValueError` for arrays that have been
      deleted and for another program's state, and a `TypeError` for what is no state or no batch.
      On more than one simulated device it waits for the step `MAX_STEPS_AHEAD` before it.
    """
    is_simulated = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return _Guarded(name, step, check_state, is_limited=is_simulated)


def check_state(function: str, abstract: TrainState, state: Any) -> None:
    """Refuses a state that is not as a program holds it, before JAX sees it.

    Args:
      function: In whose name to raise.
      abstract: The program's `abstract_state`.
      state: The state. What is no `TrainState`, or is being traced, passes, and so do arrays that
        are committed to no device: JAX places them.

    Raises:
      ValueError: Arrays are missing, unknown, of another shape, or lie elsewhere; each is named.
    """
    if not isinstance(state, TrainState):
        return
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


class _Guarded:
    """A jitted step with the metrics of those in flight; everything else is the jitted step's.

    Looking at every array of a state takes 0.4 us for each. So that a loop does not pay for it, the
    state that the latest call took or returned is known to be alive if its step counter is.

    Attributes:
      jitted: The step itself, which waits for nothing and checks nothing.
      is_limited: Whether it waits for earlier steps.
    """

    def __init__(
        self, name: str, step: Any, check_state: Callable[[Any], None], *, is_limited: bool
    ) -> None:
        self.jitted = step
        self._check_state = check_state
        self.is_limited = is_limited
        self._name = name
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self._known: Any = lambda: None  # A weak reference: a state's memory is its owner's.

    def __call__(self, state: Any, batch: Any) -> Any:
        is_state = isinstance(state, TrainState)
        if not is_state or state is not self._known() or is_deleted(state.step):
            check_alive(self._name, state=state)
            self._check_state(state)
        check_alive(self._name, batch=batch)
        try:
            out = self.jitted(state, batch)
        except (TypeError, ValueError) as error:
            _say_what_differs(self._name, state, batch, error)
            raise
        new, metrics = out if isinstance(out, tuple) else (state, out)
        if is_state:
            self._known = weakref.ref(new)
        if self.is_limited:
            self._wait_for_earlier(jax.tree.leaves(metrics)[0])
        return out

    def _wait_for_earlier(self, metric: Any) -> None:
        """Waits until few enough steps are in flight."""
        if isinstance(metric, jax.core.Tracer):  # Nothing runs while somebody traces the step.
            return
        self._in_flight.append(metric)
        if len(self._in_flight) > MAX_STEPS_AHEAD:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():  # Its owner may have donated it.
                oldest.block_until_ready()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _say_what_differs(name: str, state: Any, batch: Any, error: Exception) -> None:
    """Raises in words what `jit` says of arguments that are not those of a step."""
    if "pjit in_shardings" in str(error):
        mend = "expected one of this program: what program.init or the step before returned"
        if not isinstance(state, TrainState):
            message = f"{name}: state is a {type(state).__name__}, {mend}."
            raise TypeError(message) from error
        raise ValueError(
            f"{name}: the state is another program's (of another model, optimizer or layout), "
            f"{mend}. program.adopt(state) makes one of another program's state."
        ) from error
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        is_array = hasattr(x, "shape") or isinstance(x, int | float | complex)
        if "Error interpreting argument" in str(error) and not is_array:
            raise TypeError(
                f"{name}: batch{jax.tree_util.keystr(path)} is a {type(x).__name__}, expected an "
                "array of numbers."
            ) from error
