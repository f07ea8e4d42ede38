"""Which step a state is at, and what replicas do in it: train alone, or meet as well.

A state counts its own steps, so that one that is restored or adopted goes on where it was. Reading
the counter waits for the device, so the host counts along: it knows the number of the state
that the latest call returned, and reads that of any other.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from manualpar.core.model.loss_function import Metrics
from manualpar.core.program.guarded_step import check_alive, is_deleted
from manualpar.core.state.train_state import TrainState

StepFunction = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class OuterStep:
    """A jitted outer step that refuses a state that was donated or is another program's.

    Replicas that have just met have nothing to exchange, and the outer optimizer takes no second
    step: their state is returned as it is. So a loop may call the outer step as well as
    `train_step`, which takes it when it is due.

    Attributes:
      jitted: The outer step itself.
    """

    def __init__(self, jitted: Any, check: Callable[[Any], None]) -> None:
        """Takes the outer step, and what raises for a state that does not fit."""
        self.jitted, self._check = jitted, check
        self._met: Any = lambda: None  # A weak reference: a state's memory is its owner's.

    def __call__(self, state: TrainState) -> TrainState:
        """Takes the outer step."""
        check_alive("outer_step", state=state)
        if state is self._met():
            return state
        self._check(state)
        met: TrainState = self.jitted(state)
        self.remember(met)
        return met

    def remember(self, met: TrainState) -> None:
        """Notes that a state has just been made by an outer step."""
        self._met = weakref.ref(met)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


class CountedStep:
    """A train step after which replicas meet when it is time.

    Attributes:
      alone: The step in which each replica trains alone. All but a call is that of this one, such
        as `lower` and `trace`.
    """

    def __init__(
        self,
        alone: Any,
        outer_steps: tuple[OuterStep, ...],
        streamed_steps: tuple[Any, ...],
        due_at: Callable[[int], int | None],
        every: int,
    ) -> None:
        """Takes the steps of `LocalSteps`; `due_at(number)` is the fragment of a step, if any."""
        self.alone, self._due_at, self._every = alone, due_at, every
        self._outer_steps, self._streamed_steps = outer_steps, streamed_steps
        self._number, self._known = 0, cast(Any, lambda: None)

    def at(self, number: int) -> StepFunction:
        """The function that takes step `number`, counted from 1."""
        fragment = self._due_at(number)
        if fragment is None:
            return cast(StepFunction, self.alone)
        return functools.partial(self._meet, fragment)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes the step that the state is at."""
        number = self._number
        if state is not self._known():
            step = getattr(state, "step", None)
            if isinstance(step, jax.core.Tracer):
                return self._in_trace(state, batch)
            if is_deleted(step) or not hasattr(step, "__int__"):
                return cast(StepFunction, self.alone)(state, batch)  # It refuses such a state.
            number = int(cast(Any, step))
        new, metrics = self.at(number + 1)(state, batch)
        self._number, self._known = number + 1, weakref.ref(new)
        return new, metrics

    def _meet(self, fragment: int, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if self._streamed_steps:
            state, metrics = self._streamed_steps[fragment](state, batch)
            self._outer_steps[fragment].remember(state)
            return state, metrics
        state, metrics = self.alone(state, batch)
        return self._outer_steps[fragment](state), metrics

    def _in_trace(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """The step inside of a function that is traced, where the number is not known yet."""
        due = [self._due_at(number) for number in range(1, self._every + 1)]
        meets = [functools.partial(self._meet, f) for f in range(len(self._outer_steps))]
        which = jnp.asarray([0 if f is None else f + 1 for f in due])[state.step % self._every]
        taken: tuple[TrainState, Metrics] = jax.lax.switch(
            which, [self.alone, *meets], state, batch
        )
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone, name)
