"""Compiles a step with and without the options of `overlap="auto"` if memory is nearly full.

The options let collectives run behind compute, which takes memory. If a step leaves no memory for
that, XLA makes its collectives synchronous in spite of the options, and the options only cost time.
Which is faster then, only compiling both tells.
"""

import dataclasses
from collections.abc import Callable

import ml_collections

from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import Topology

# The share of a device's memory from which the options are put to the test.
NEARLY_FULL = 0.95
WITHOUT = "parallel.overlap=none"


def compile_both(
    compile_for: Callable[..., StepEstimate],
    config: ml_collections.ConfigDict,
    topology: Topology,
    *,
    vocab_size: int = 0,
) -> list[StepEstimate]:
    """Compiles a config's step; if memory is nearly full, also with `parallel.overlap="none"`.

    Args:
      compile_for: `compile_for_tpu` or `compile_for_gpu`.
      config: A training config.
      topology: The devices.
      vocab_size: The tokens of a language model's vocabulary; 0 for the vocabulary of its data.

    Returns:
      The estimates, the one to choose first: the one that fits, or the faster one. The first one
      has a note that says which it is and why.

    Raises:
      ValueError: See `compile_for`.
    """
    plan = compile_for(config, topology, vocab_size=vocab_size)
    used = plan.peak_bytes / plan.hbm_bytes
    if config.parallel.overlap != "auto" or (plan.fits and used < NEARLY_FULL):
        return [plan]
    changed = ml_collections.ConfigDict(config.to_dict())
    changed.parallel.overlap = "none"
    other = compile_for(changed.lock(), topology, vocab_size=vocab_size)
    other = dataclasses.replace(other, source=f"{other.source}, {WITHOUT}")
    is_taken = other.fits and (not plan.fits or _seconds(other) < _seconds(plan))
    if not is_taken:
        note = (
            f"{_state(plan, used)}, so the step was also compiled with --{WITHOUT}: "
            f"{_outcome(other)}. The options of overlap='auto' stay."
        )
        return [_noted(plan, note), other]
    note = (
        f"{_state(plan, used)} with the options of overlap='auto', so the step was also compiled "
        f"without them: {_outcome(other)} instead of {_outcome(plan)}. This plan is without them. "
        f"A run leaves them out with --{WITHOUT}."
    )
    return [_noted(other, note), plan]


def _seconds(plan: StepEstimate) -> float:
    """Returns the longer of the two estimates of a step's time."""
    return max(plan.step_seconds or 0.0, plan.step_seconds_by_links or 0.0)


def _state(plan: StepEstimate, used: float) -> str:
    return f"Memory is {used:.0%} full" if plan.fits else "The step does not fit"


def _outcome(plan: StepEstimate) -> str:
    return f"{_seconds(plan) * 1e3:,.4g} ms" if plan.fits else "it does not fit"


def _noted(plan: StepEstimate, note: str) -> StepEstimate:
    return dataclasses.replace(plan, notes=(note, *plan.notes))
