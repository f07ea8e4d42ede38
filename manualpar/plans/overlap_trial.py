"""Compiles a step with and without the options of `overlap="auto"` if memory is nearly full.

The options let collectives run behind compute, which takes memory. If a step leaves no memory for
this, XLA makes its collectives synchronous in spite of the options, and the options only cost time.
Only compiling both programs tells which of them is faster.
"""

import dataclasses
from collections.abc import Callable

import ml_collections

from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import Topology

# A step that fills this share of a device's memory is also compiled without the options.
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
      vocab_size: The tokens of a language model's vocabulary; 0 for the vocabulary of its data.

    Returns:
      The estimates, the better one first: the one that fits, or the faster one. Its notes begin
      with the reason. There is a single estimate if the options change neither time nor memory.
    """
    plan = compile_for(config, topology, vocab_size=vocab_size)
    used = plan.peak_bytes / plan.hbm_bytes
    if config.parallel.overlap != "auto" or (plan.fits and used < NEARLY_FULL):
        return [plan]
    changed = ml_collections.ConfigDict(config.to_dict())
    changed.parallel.overlap = "none"
    other = compile_for(changed.lock(), topology, vocab_size=vocab_size)
    if (other.peak_bytes, _seconds(other)) == (plan.peak_bytes, _seconds(plan)):
        return [plan]
    other = dataclasses.replace(other, source=f"{other.source}, {WITHOUT}")
    problem = f"memory is {used:.0%} full" if plan.fits else "the step does not fit"
    note = (
        f"With the options of overlap='auto' {problem}, so the step was also compiled without "
        f"them. With them: {_outcome(plan)}. Without them: {_outcome(other)}. "
    )
    if other.fits and (not plan.fits or _seconds(other) < _seconds(plan)):
        note += f"This plan is without them; a run leaves them out with --{WITHOUT}."
        return [_noted(other, note), plan]
    return [_noted(plan, f"{note}This plan is with them."), other]


def _seconds(plan: StepEstimate) -> float:
    """Returns the longer of the two estimates of a step's time."""
    return max(plan.step_seconds or 0.0, plan.step_seconds_by_links or 0.0)


def _outcome(plan: StepEstimate) -> str:
    return f"{_seconds(plan) * 1e3:,.4g} ms" if plan.fits else "it does not fit"


def _noted(plan: StepEstimate, note: str) -> StepEstimate:
    return dataclasses.replace(plan, notes=(note, *plan.notes))
