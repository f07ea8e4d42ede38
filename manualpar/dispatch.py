"""Steps that are dispatched ahead of their results, but not too far on simulated devices.

XLA's CPU client runs at most 32 computations at a time. Simulated devices that get further ahead of
each other than that wait in a collective for one whose turn never comes, and after 40 seconds the
process is aborted; so does plain `jax.jit` with any collective in a loop that fetches nothing.
Accelerators have no such limit: on them, and on one device, a step is the jitted function itself.
"""

import collections
from typing import Any

import jax
from jax.sharding import Mesh

MAX_STEPS_AHEAD = 8


def limit_steps_ahead(step: jax.stages.Wrapped, mesh: Mesh) -> jax.stages.Wrapped:
    """Makes a jitted step wait for earlier ones where it has to.

    Args:
      step: A jitted function whose outputs contain `metrics`, alone or as the last of a tuple.
      mesh: The mesh it runs on.

    Returns:
      `step`, or on more than one simulated device a function that is used like it and that waits
      for the step `MAX_STEPS_AHEAD` before it.
    """
    is_simulated = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return _Limited(step) if is_simulated else step


class _Limited:
    """A jitted step with the metrics of those in flight; everything else is the jitted step's.

    Attributes:
      jitted: The step itself, which waits for nothing.
    """

    def __init__(self, step: Any) -> None:
        self.jitted = step
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def __call__(self, *args: Any) -> Any:
        out = self.jitted(*args)
        metrics = out[-1] if isinstance(out, tuple) else out
        self._in_flight.append(jax.tree.leaves(metrics)[0])
        if len(self._in_flight) > MAX_STEPS_AHEAD:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():  # Its owner may have donated it.
                oldest.block_until_ready()
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)
