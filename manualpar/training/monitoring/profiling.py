"""Profiles a few steps, by the flag `--config.profile=10:13`.

`a:b` means the steps from `a` to `b`, both included; the first step of a training is 1. The trace
begins when the device has finished all earlier steps and ends when it has finished step `b`, so it
holds complete steps. Nothing waits between them, so they overlap like steps without a profile. The
first step compiles, so choose later steps.

A profile is a folder that XProf and TensorBoard open, with a `perfetto_trace.json.gz`, which
https://ui.perfetto.dev opens. The names given with `jax.named_scope` are in the file that XProf
reads (`*.xplane.pb`); the timeline itself shows them on GPUs and TPUs only.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

STEP_NAME = "train"  # XProf finds steps by this name and their number.
TRACE_FILE = "perfetto_trace.json.gz"
# Python calls are not traced: the annotations of steps have the host's time.
PYTHON_TRACER_LEVEL = 0


def parse_profile(text: str) -> range:
    """Reads the config field `profile`: `10:13` means the steps 10, 11, 12 and 13, `""` none.

    Raises:
      ValueError: It is neither.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"config.profile is {text!r}, expected '' or the first and the last step to profile, "
            "such as '10:13'; the first step of a training is 1."
        )
    return range(first, last + 1)


@dataclasses.dataclass(eq=False)
class StepProfiler:
    """Profiles some steps of a loop. Use it as a context manager, so that no trace is left open.

    In the loop: `before(step, state)`, the step, `after(step, state)`. Other steps cost nothing.
    Processes on one host would write to the same file, so only one of them profiles and the others
    get no steps.
    """

    steps: range
    folder: Path  # Created by the first of the steps.
    say: Callable[[str], None]  # Called with the profile's folder, or the reason why there is none.
    _traced: list[int] = dataclasses.field(default_factory=list)
    # Holds the annotation of a step.
    _step: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _is_tracing: bool = False
    _is_done: bool = False

    def covers(self, step: int) -> bool:
        """Returns whether a step is profiled, which makes it slower than other steps."""
        return step in self.steps

    def before(self, step: int, state: Any) -> None:
        """Begins step number `step`; before the first of the steps it waits for `state`."""
        if self._is_done or step not in self.steps:
            return
        if not self._is_tracing:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = PYTHON_TRACER_LEVEL
            jax.profiler.start_trace(
                self.folder, create_perfetto_trace=True, profiler_options=options
            )
            self._is_tracing = True
        self._step.enter_context(jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=step))

    def after(self, step: int, state: Any) -> None:
        """Ends step number `step`; after the last of the steps it waits for `state`."""
        if self._is_done or step not in self.steps:
            return
        is_last = step == self.steps[-1]
        if is_last:
            # It waits inside the annotation, so that the step is as long as the device takes.
            jax.block_until_ready(state)
        self._step.close()
        self._traced.append(step)
        if is_last:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._step.close()
        if self._is_tracing:
            self._stop()
        elif self.steps and not self._is_done:
            first, last = self.steps[0], self.steps[-1]
            self.say(f"profile: none of the steps {first} to {last} was made, so there is none")

    def _stop(self) -> None:
        """Writes the profile and says where it is."""
        self._is_tracing, self._is_done = False, True
        jax.profiler.stop_trace()
        steps = (
            f"steps {self._traced[0]} to {self._traced[-1]}" if self._traced else "no whole step"
        )
        # The folders are named for the time, and there may be earlier profiles.
        trace = max(self.folder.glob(f"plugins/profile/*/{TRACE_FILE}"), default=self.folder)
        self.say(
            f"profile: {steps} in {trace} for https://ui.perfetto.dev, or for XProf: "
            f"xprof --logdir {self.folder}"
        )
