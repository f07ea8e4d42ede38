"""Trains NNX models, and counts what they send."""

import collections

import jax
import jax.numpy as jnp
import pytest

from manualpar.core.modes.strategy import MODES
from manualpar.inspect import trace_collectives


def sent(program):
    """How often a step sends what for which purpose, in whatever order."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return collections.Counter(
        (c.kind, c.axes, c.shape, str(c.dtype), c.times, c.purpose, c.bytes_sent)
        for c in trace_collectives(traced)
    )


def with_params(program, params):
    """The initial state with other parameters."""
    state = program.init(jax.random.key(0))
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state.params)
    return state.replace(params=jax.device_put(params, shardings))


def train(program, state, batches):
    losses = []
    for batch in batches:
        state, metrics = program.train_step(state, batch)
        losses.append(metrics["loss"][0] / metrics["loss"][1])
    return state, jnp.stack(losses)


def in_modes(*fast):
    """Every mode, of which all but some are slow."""
    marks = {mode: () if mode in fast else pytest.mark.slow for mode in MODES}
    return pytest.mark.parametrize("mode", [pytest.param(m, marks=marks[m]) for m in MODES])
