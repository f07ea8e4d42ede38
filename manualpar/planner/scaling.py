"""The work of a step that was not traced, from that of one that was: closed forms, for a sweep.

With `m` minibatches of a batch in place of one, each device computes the same, in `m` parts; what
it sends in a minibatch it sends `m` times, what it sends in a step once: exact. With another dtype
on the wire shapes stay and bytes change: exact. What the device holds is not exact: of activations
an `m`-th is taken, of gathered parameters the ratio of the dtypes; weights are read again in each
minibatch, which is not counted. A sweep therefore traces again what it ranks first.
"""

import dataclasses
import re

import jax.numpy as jnp

from manualpar.core.collectives import GATHER_SCOPE, REDUCE_SCOPE, REGATHER, SCATTER_SCOPE
from manualpar.inspect.communication import Collective
from manualpar.planner.work import Work

_MINIBATCH = re.compile(r"\bminibatch(_\d+)?\b")


def with_minibatches(work: Work, num_minibatches: int) -> Work:
    """The work in another number of minibatches.

    Args:
      work: That of a step in one.
      num_minibatches: How many.

    Returns:
      The work; what it holds is an estimate.
    """
    assert work.num_minibatches == 1
    if num_minibatches == 1:
        return work
    memory = work.memory
    return dataclasses.replace(
        work,
        num_minibatches=num_minibatches,
        collectives=tuple(
            dataclasses.replace(each, times=each.times * num_minibatches)
            if _MINIBATCH.search(each.scope)
            else each
            for each in work.collectives
        ),
        memory=dataclasses.replace(memory, activations=memory.activations // num_minibatches),
    )


def with_gather_dtype(work: Work, gather_dtype: str, *, reduce_dtype: str = "") -> Work:
    """The work with parameters gathered in another dtype.

    Args:
      work: That of a step that gathers them as they are stored.
      gather_dtype: A dtype's name; `""` leaves the work as it is.
      reduce_dtype: What gradients are summed in; `""`: the same.

    Returns:
      The work; what it holds is an estimate.
    """
    if not gather_dtype:
        return work
    travels = {
        GATHER_SCOPE: gather_dtype,
        REGATHER: gather_dtype,
        SCATTER_SCOPE: reduce_dtype or gather_dtype,
        REDUCE_SCOPE: reduce_dtype or gather_dtype,
    }

    def retyped(each: Collective) -> Collective:
        name = travels.get(each.purpose)
        return each if name is None else dataclasses.replace(each, dtype=jnp.dtype(name))

    gathers = [each for each in work.collectives if each.purpose in (GATHER_SCOPE, REGATHER)]
    memory = work.memory
    if gathers:
        stored = max(each.dtype.itemsize for each in gathers)
        gathered = memory.gathered * jnp.dtype(gather_dtype).itemsize // stored
        memory = dataclasses.replace(memory, gathered=gathered)
    collectives = tuple(map(retyped, work.collectives))
    return dataclasses.replace(work, collectives=collectives, memory=memory)
