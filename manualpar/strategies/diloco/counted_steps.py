"""Decides from a state's step number whether an outer step follows the inner step.

A state counts its steps, so a restored or adopted state continues at the right step. If the host
read this counter in each step, it would wait for the device each time. So the host also counts the
steps of the state that the latest call returned, and reads the counter only from other states.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from manualpar.core.model.loss_function import Metrics
from manualpar.core.program.guarded_step import check_alive, is_deleted
from manualpar.core.program.outer_steps import StepFunction
from manualpar.core.state.train_state import TrainState


class OuterStep:
    """Runs a jitted outer step, and refuses donated states and states of another program.

    Directly after an outer step there is nothing to exchange, so a second call returns the state
    unchanged. `train_step` takes each outer step that is due. A training loop may take additional
    outer steps.

    Attributes:
      jitted: The jitted outer step without checks.
    """

    def __init__(self, jitted: Any, check: Callable[[Any], None]) -> None:
        """Wraps an outer step; `check` raises an error for a state that does not fit."""
        self.jitted, self._check = jitted, check
        self._latest: Any = lambda: None  # A weak reference, so that the user can free the state.

    def __call__(self, state: TrainState) -> TrainState:
        """Takes the outer step."""
        check_alive("outer_step", state=state)
        if state is self._latest():
            return state
        self._check(state)
        new: TrainState = self.jitted(state)
        self.remember(new)
        return new

    def remember(self, state: TrainState) -> None:
        """Records that an outer step has just returned `state`."""
        self._latest = weakref.ref(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


class CountedStep:
    """A train step that also takes each outer step that is due.

    Attributes:
      inner_step: The step that each replica takes separately. Attributes such as `lower` and
        `trace` come from it.
    """

    def __init__(
        self,
        inner_step: Any,
        outer_steps: tuple[OuterStep, ...],
        overlapped_outer_steps: tuple[Any, ...],
        due_at: Callable[[int], int | None],
        every: int,
    ) -> None:
        """Combines the steps of DiLoCo.

        `due_at(number)` returns the fragment that step `number` exchanges, or `None`.
        """
        self.inner_step, self._due_at, self._every = inner_step, due_at, every
        self._outer_steps, self._overlapped_outer_steps = outer_steps, overlapped_outer_steps
        self._number, self._latest = 0, cast(Any, lambda: None)
        # Made once, so that a caller recognises a step that it has called before.
        self._combined_steps = [
            functools.partial(self._with_outer_step, fragment)
            for fragment in range(len(outer_steps))
        ]

    def at(self, number: int) -> StepFunction:
        """Returns the function that takes step `number`, counted from 1."""
        fragment = self._due_at(number)
        if fragment is None:
            return cast(StepFunction, self.inner_step)
        return self._combined_steps[fragment]

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes the next step of a state: the step after the number in its step counter."""
        number = self._number
        if state is not self._latest():
            step = getattr(state, "step", None)
            if isinstance(step, jax.core.Tracer):
                return self._in_trace(state, batch)
            if is_deleted(step) or not hasattr(step, "__int__"):
                return cast(StepFunction, self.inner_step)(state, batch)  # This call raises.
            number = int(cast(Any, step))
        new, metrics = self.at(number + 1)(state, batch)
        self._number, self._latest = number + 1, weakref.ref(new)
        return new, metrics

    def _with_outer_step(
        self, fragment: int, state: TrainState, batch: Any
    ) -> tuple[TrainState, Metrics]:
        if self._overlapped_outer_steps:
            state, metrics = self._overlapped_outer_steps[fragment](state, batch)
            self._outer_steps[fragment].remember(state)
            return state, metrics
        state, metrics = self.inner_step(state, batch)
        return self._outer_steps[fragment](state), metrics

    def _in_trace(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes a step inside a traced function, where the step number is not known yet."""
        fragments = [self._due_at(number) for number in range(1, self._every + 1)]
        branches = jnp.asarray([0 if f is None else f + 1 for f in fragments])
        result: tuple[TrainState, Metrics] = jax.lax.switch(
            branches[state.step % self._every],
            [self.inner_step, *self._combined_steps],
            state,
            batch,
        )
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner_step, name)
