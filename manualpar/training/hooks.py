"""Hooks: code of a user that a run calls after steps, reports and saves.

A hook may be any object that has some of the methods of `Hook`, or a subclass of it. Every process
calls the hooks, with the same values. A hook that writes anything should do so only where
`jax.process_index()` is 0. If a hook raises an error, a run of one process saves its state and ends
with the error.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from manualpar.core.state.train_state import TrainState
from manualpar.system.cluster.agreement import any_process
from manualpar.system.storage import AnyPath

JSON = Any
METHODS = ("on_step", "on_metrics", "on_checkpoint", "should_stop", "on_end", "state", "restore")


class Hook:
    """A hook that does nothing; a subclass overrides the methods that it needs."""

    def on_step(self, step: int, state: TrainState) -> None:
        """Runs after step `step` was dispatched.

        The next step donates `state`, so the hook must not keep it. Reading a value of the state
        waits for the step.
        """

    def on_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Receives the numbers of each report of `train`, `eval` or `test`.

        The metrics of a step are fetched two steps later, so that the devices are not idle.
        """

    def on_checkpoint(self, step: int, folder: AnyPath) -> None:
        """Runs when the checkpoint of `step` is complete in `folder`."""

    def should_stop(self) -> bool:
        """Returns whether the training should end; asked after reports and before the first step.

        The run then saves a checkpoint and is tested, as after its last step. It ends if any
        process says so.
        """
        return False

    def on_end(self, error: BaseException | None) -> None:
        """Runs once, when the run has finished, or failed because of `error`."""

    def state(self) -> JSON:
        """Returns what a checkpoint should save of this hook, as values for JSON."""
        return None

    def restore(self, state: JSON) -> None:
        """Takes back the value that `state` returned, if the run resumes or rolls back."""


class Hooks:
    """Calls the hooks of a run."""

    def __init__(self, hooks: Sequence[Any] = ()) -> None:
        """Checks that each hook has a method of `Hook`."""
        for hook in hooks:
            if isinstance(hook, type):
                raise TypeError(f"hooks has the class {hook.__name__}, expected an instance of it.")
            if not any(_method(hook, name) for name in METHODS):
                raise TypeError(
                    f"hooks has {hook!r}, which has none of the methods {', '.join(METHODS)}, "
                    "expected at least one, see manualpar.training.hooks."
                )
        self._hooks = tuple(hooks)
        self._failed: Any = None  # The hook that raised the error.
        self.error: Exception | None = None  # The error of the user's code that ends the run.
        self._has_news = True  # Whether anything was reported since `should_stop` was asked.

    def have(self, method: str) -> bool:
        """Returns whether a hook has a method."""
        return bool(self._methods(method))

    def call(self, method: str, *args: Any) -> None:
        """Calls a method of each hook that has it."""
        for hook, each in self._methods(method):
            with self.user_code(hook):
                each(*args)

    @contextlib.contextmanager
    def user_code(self, hook: Any = None) -> Iterator[None]:
        """Notes an error of the user's code in the context, such as of `hook` or of a loader.

        Such an error leaves the state as it is, so the run saves it first. The hook is not called
        again, except to say that the run ends.
        """
        try:
            yield
        except Exception as error:
            self._failed, self.error = hook, error
            raise

    def on_report(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Passes on a report."""
        self._has_news = True
        self.call("on_metrics", step, split, types.MappingProxyType(dict(values)))

    def should_stop(self) -> bool:
        """Returns whether a hook of any process wants to end the training.

        Communication:
          See `any_process`; none if nothing was reported since the last call.
        """
        asked, had_news = self._methods("should_stop"), self._has_news
        self._has_news = False
        if not asked or not had_news:
            return False
        answers = []
        for hook, each in asked:
            with self.user_code(hook):
                answers.append(each())
        return any_process(any(answers))

    def state(self) -> list[list[JSON]]:
        """Returns the name of each hook's class with its state, for those that have one."""
        having = [(hook, state) for hook in self._hooks if (state := _method(hook, "state"))]
        return [[type(hook).__name__, state()] for hook, state in having]

    def restore(self, saved: Sequence[Sequence[JSON]]) -> None:
        """Restores what `state` returned; hooks are found by the names of their classes."""
        waiting = list(saved)
        for hook in self._hooks:
            entry = next((one for one in waiting if one[0] == type(hook).__name__), None)
            if entry is not None:
                waiting.remove(entry)
                if (restore := _method(hook, "restore")) and entry[1] is not None:
                    restore(entry[1])

    def _methods(self, name: str) -> list[tuple[Any, Callable[..., Any]]]:
        """Returns the hooks that have a method, with it, except one that failed."""
        having = [(hook, found) for hook in self._hooks if (found := _method(hook, name))]
        return [
            x
            for x in having
            if name == "on_end" or self._failed is None or x[0] is not self._failed
        ]


def _method(hook: Any, name: str) -> Callable[..., Any] | None:
    """Returns a hook's method; `None` if it has none. It may have other attributes of the name."""
    found = getattr(hook, name, None)
    return found if callable(found) else None
