"""Measures the bandwidth of each kind of collective over all devices, by size."""

import argparse
import collections
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.gpu_rows import Row
from manualpar import make_mesh
from manualpar.checks.guarded_step import MAX_STEPS_AHEAD
from manualpar.layers.boundaries import enter, leave
from manualpar.layers.ring import shift
from manualpar.system.cluster.agreement import from_first

AXIS = "data"
WARM_UPS = 2
# The bytes that a device sends, divided by the bytes of the whole array on a device: the larger of
# its operand and its result. With `n` devices in a ring, `nccl-tests` calls the bytes that are sent
# a second the bus bandwidth.
SENT: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1.0,
}
COLLECTIVES = tuple(SENT)


def collective(kind: str, mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns a jitted collective: from an array `[n, m]`, a row on each device, to a new array.

    For an all-gather, `m` is the length of a shard. For the others, a multiple of `n`. The
    all-to-all is XLA's, for an array whose columns are sharded in place of its rows; the others are
    those of layers.
    """
    if kind == "all-to-all":
        columns = jax.sharding.NamedSharding(mesh, P(None, AXIS))
        return jax.jit(lambda x: x, out_shardings=columns)
    kinds: Mapping[str, Callable[[jax.Array], jax.Array]] = {
        "all-gather": lambda x: enter(x, AXIS, 0),
        "reduce-scatter": lambda x: leave(x, AXIS, 0),
        "all-reduce": lambda x: leave(x, AXIS),
        "ppermute": lambda x: shift(x, (AXIS,), 1),
    }

    def on_device(x: jax.Array) -> jax.Array:
        return kinds[kind](x[0])[None]

    result = P() if kind == "all-reduce" else P(AXIS)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=P(AXIS), out_specs=result, check_vma=True)
    return jax.jit(run)


def measure_bandwidth(options: argparse.Namespace, kind: str) -> Row:
    """Measures a collective of bfloat16 for each of `options.sizes`.

    A size is the bytes of the whole array on a device, as in nccl-tests: the result of an
    all-gather, and the operand of the other kinds.
    """
    mesh = make_mesh({AXIS: options.devices}, jax.devices()[: options.devices])
    run, n = collective(kind, mesh), mesh.size
    found = []
    for size in options.sizes:
        whole = max(size // 2 // n, 1) * n  # Two bytes a number.
        shape = (n, whole // n if kind == "all-gather" else whole)
        sharding = jax.sharding.NamedSharding(mesh, P(AXIS))
        x = jax.jit(functools.partial(jnp.ones, shape, jnp.bfloat16), out_shardings=sharding)()
        for _ in range(WARM_UPS):
            jax.block_until_ready(run(x))
        once = _seconds(run, x, 1)
        # All processes must run the collective equally often.
        times = int(from_first(max(1, math.ceil(options.seconds / options.rounds / once))))
        seconds = [_seconds(run, x, times) / times for _ in range(options.rounds)]
        found.append((2 * whole, statistics.median(seconds)))
    return Row(kind, bandwidths=tuple(found))


def bytes_per_second(kind: str, size: int, seconds: float, devices: int) -> float:
    """Returns the bytes that a device sends a second (the bus bandwidth of nccl-tests)."""
    return SENT[kind](devices) * size / seconds


def _seconds(run: Callable[[jax.Array], jax.Array], x: jax.Array, times: int) -> float:
    """Runs a collective `times` times, a few of them in flight; returns the seconds."""
    in_flight: collections.deque[jax.Array] = collections.deque()
    jax.block_until_ready(x)
    started = time.perf_counter()
    for _ in range(times):
        in_flight.append(run(x))
        if len(in_flight) > MAX_STEPS_AHEAD:
            in_flight.popleft().block_until_ready()
    jax.block_until_ready(list(in_flight))
    return time.perf_counter() - started
