"""Profiles a few steps, by the flag `--config.profile=10:13`.

`a:b` means the steps from `a` to `b`, both included. The first step of a training is 1. The trace
begins when the device has finished all earlier steps, and ends when the device has finished step
`b`. So the trace contains complete steps. The host does not wait between these steps, so they
overlap like steps without a profile. The first step compiles, so choose later steps.

XProf and TensorBoard open the folder of a profile. https://ui.perfetto.dev opens the
`perfetto_trace.json.gz` in it. XProf reads the names given with `jax.named_scope` from
`*.xplane.pb`. The timeline shows these names only on GPUs and TPUs.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

STEP_NAME = "train"  # XProf finds a step by this name and the step's number.
TRACE_FILE = "perfetto_trace.json.gz"
# Python calls are not traced, because the annotations of steps already show the host's time.
PYTHON_TRACER_LEVEL = 0


def parse_profile(text: str) -> range:
    """Parses the config field `profile`: `10:13` means the steps 10 to 13, `""` means no steps."""
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

    In the loop, call `before(step, state)`, run the step, and call `after(step, state)`. A step
    that is not profiled costs nothing. Give `steps` to only one process of a host, because several
    processes of a host would write to the same file.
    """

    steps: range
    folder: Path  # Created in the first profiled step.
    say: Callable[[str], None]  # Called with a sentence: the profile's path, or why it is missing.
    _traced: list[int] = dataclasses.field(default_factory=list)
    # Holds the annotation of a step.
    _step: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _is_tracing: bool = False
    _is_done: bool = False

    def covers(self, step: int) -> bool:
        """Returns whether a step is profiled, which makes it slower than other steps."""
        return step in self.steps

    def begin_step(self, step: int, state: Any) -> None:
        """Begins step number `step`; waits for `state` if this is the first profiled step."""
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

    def end_step(self, step: int, state: Any) -> None:
        """Ends step number `step`; waits for `state` if this is the last profiled step."""
        if self._is_done or step not in self.steps:
            return
        is_last = step == self.steps[-1]
        if is_last:
            # Waits before the annotation of the step ends, so that it covers the device's work.
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
            try:
                self._stop()
            except Exception as failure:  # Of JAX and of the disk.
                if not isinstance(error, BaseException):
                    raise
                error.add_note(f"the profile was not written: {failure}")
        elif self.steps and not self._is_done:
            first, last = self.steps[0], self.steps[-1]
            self.say(f"profile: the run made no step from {first} to {last}, so there is none")

    def _stop(self) -> None:
        """Ends the trace, writes the profile, and reports its path."""
        self._is_tracing, self._is_done = False, True
        jax.profiler.stop_trace()
        steps = (
            f"steps {self._traced[0]} to {self._traced[-1]}" if self._traced else "no whole step"
        )
        # The name of a profile's folder is its time, so the largest name is the newest profile.
        trace = max(self.folder.glob(f"plugins/profile/*/{TRACE_FILE}"), default=self.folder)
        self.say(
            f"profile: {steps} in {trace} for https://ui.perfetto.dev, or for XProf: "
            f"xprof --logdir {self.folder}"
        )
