"""What zero bubble would gain in one program for all devices: the least time of any table.

Zero bubble (Qi et al., https://arxiv.org/abs/2401.10241) takes a backward pass B apart. Bi gives
the gradient of a chunk's input, for which the stage before waits. W gives the gradients of the
weights, for which nobody waits, so it fills what would be a bubble. Here a tick is at most one F,
one Bi and one W of each stage, in this order, and then a hop. A tick lasts as long as its slowest
stage.

- `least_time` goes through all tables of few stages and microbatches. `fill` makes a table of any
  size, whose ticks are one F, Bi or W of each stage.
- `split_backward` takes the backward pass of layers apart, and says what W reads: what the F has
  kept, and gradients inside of the layers that Bi has computed. F, Bi and W are timed.

    python -m benchmarks.zero_bubble
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from manualpar.core.tracing.jaxprs import all_equations
from manualpar.inspect.flops import flops_of
from manualpar.layers.attention.context import Context
from manualpar.layers.pipeline.schedules import make_table
from manualpar.models.rotary import rotary_angles
from manualpar.models.transformer_layer import Layer, LayerConfig
from manualpar.system.reports.tables import describe_share, print_table

# What F, Bi and W take: equal; two layers as they are measured below; with the F computed again.
EQUAL = (1.0, 1.0, 1.0)
COSTS = (EQUAL, (1.0, 1.08, 0.92), (1.0, 1.22, 0.78), (1.0, 2.0, 1.0))
SIZES = ((2, 6), (3, 4))
FILLED = ((4, 8), (4, 16), (8, 32))
CHUNKS = (1, 2, 3, 4)
LAYERS = (
    ((2, 256), {"hidden": 512, "heads": 8, "mlp": 1376, "runs": 9}),
    ((1, 8192), {"hidden": 4096, "heads": 32, "mlp": 14336}),  # Traced only.
)
NO_LIMIT = 1_000_000


def bubble(least: float, microbatches: int, costs: Sequence[float]) -> float:
    """The share of idle time where a step takes so long."""
    return 1 - microbatches * sum(costs) / least


def bound(stages: int, microbatches: int, costs: Sequence[float]) -> float:
    """The bubble that no table falls below: the last stage begins after S - 1 F of the others."""
    return bubble(microbatches * sum(costs) + (stages - 1) * costs[0], microbatches, costs)


def least_time(
    stages: int, microbatches: int, costs: Sequence[float], *, waiting: int = NO_LIMIT
) -> float:
    """The least time of any table, with at most so many W of a stage that wait between ticks.

    A state is how many F, Bi and W each stage has done. They are visited from the end: the least
    time from a state is that of a tick and of the state after it.
    """
    counts = microbatches + 1
    shape = (counts,) * (3 * stages)
    states = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape)).astype(np.int8)
    f, b, w = states[0::3], states[1::3], states[2::3]
    possible = ((b <= f) & (w <= b) & (b - w <= waiting)).all(axis=0)
    possible &= (f[1:] <= f[:-1]).all(axis=0) & (b[:-1] <= b[1:]).all(axis=0)
    places = np.flatnonzero(possible)
    states = states[:, places]
    strides = counts ** np.arange(3 * stages - 1, -1, -1)
    least = np.full(math.prod(shape), np.inf)
    least[-1] = 0
    ticks = [np.reshape(t, (stages, 3)) for t in itertools.product((0, 1), repeat=3 * stages)]
    done = states.sum(axis=0, dtype=int)
    for total in reversed(range(3 * stages * microbatches)):
        chosen = np.flatnonzero(done == total)
        now = states[:, chosen]
        for tick in ticks[1:]:
            after = places[chosen] + int((tick.ravel() * strides).sum())
            ok = _allowed(now, tick, microbatches)
            time_of_tick = float((tick * np.asarray(costs)).sum(axis=1).max())
            here, there = places[chosen[ok]], after[ok]
            least[here] = np.minimum(least[here], time_of_tick + least[there])
    return float(least[0])


def _allowed(now: np.ndarray, tick: np.ndarray, microbatches: int) -> np.ndarray:
    """In which states a tick can be done."""
    ok = np.ones(now.shape[1], bool)
    for stage, (has_f, has_b, has_w) in enumerate(tick):
        f, b, w = now[3 * stage : 3 * stage + 3]
        if has_f:
            ok &= f < (now[3 * stage - 3] if stage else microbatches)
        if has_b:
            ok &= b < f + has_f
            if stage < len(tick) - 1:
                ok &= b < now[3 * stage + 4]
        if has_w:
            ok &= w < b + has_b
    return ok


class Filled(NamedTuple):
    """A table whose ticks are one of F, B and W of each stage.

    Attributes:
      ticks: For each tick and stage a letter, or a space.
      kept: For each stage, the most microbatches at one time between F and the last use.
      waiting: For each stage, the most W at one time that wait.
    """

    ticks: list[str]
    kept: list[int]
    waiting: list[int]

    def time(self, costs: Sequence[float]) -> float:
        """The time of a step, where B is Bi if there are W."""
        cost = dict(zip("FBW", costs, strict=False)) | {" ": 0.0}
        return sum(max(cost[letter] for letter in tick) for tick in self.ticks)


def fill(stages: int, microbatches: int, *, has_weights: bool) -> Filled:
    """Makes a table by preferring Bi to F and F to W; a W goes first where s + 1 of them wait.

    Stage s has at most 2 (S - s) - 1 microbatches in flight; S - s without W, as in textbook 1F1B.
    """
    done = np.zeros((stages, 3), int)  # F, B, W
    ticks: list[str] = []
    kept, waiting = np.zeros((2, stages), int)
    while done[:, : 2 + has_weights].min() < microbatches:
        tick = ""
        before = done.copy()
        for stage in range(stages):
            f, b, w = before[stage]
            limit = 2 * (stages - stage) - 1 if has_weights else stages - stage
            can_f = f < (before[stage - 1, 0] if stage else microbatches) and f - b < limit
            can_b = b < (before[stage + 1, 1] if stage < stages - 1 else f)
            can_w = has_weights and w < b
            order = [("W", can_w and b - w > stage), ("B", can_b), ("F", can_f), ("W", can_w)]
            letter = next((letter for letter, can in order if can), " ")
            if letter != " ":
                done[stage, "FBW".index(letter)] += 1
            tick += letter
        last_use = before[:, 2 if has_weights else 1]
        kept = np.maximum(kept, done[:, 0] - last_use)
        waiting = np.maximum(waiting, done[:, 1] - before[:, 2])
        ticks.append(tick)
    return Filled(ticks, kept.tolist(), waiting.tolist() if has_weights else [])


class Split(NamedTuple):
    """A backward pass in two programs.

    Attributes:
      inputs: Bi, `(residuals and the gradient of the output) -> (gradient of the input, *passed)`.
      weights: W, `(residuals that it reads, *passed) -> gradients of the weights`.
      reads: Which residuals, and gradients of the output, W reads.
      passed: Types of what Bi computes for W.
    """

    inputs: ClosedJaxpr
    weights: ClosedJaxpr
    reads: list[int]
    passed: list[Any]


def split_backward(backward: ClosedJaxpr) -> Split:
    """Takes apart a program whose last output is the gradient of the input.

    Bi is all that this output depends on, and W is the rest.
    """
    jaxpr = backward.jaxpr
    ours, theirs = [], []
    needed = {jaxpr.outvars[-1]}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(x for x in eqn.invars if isinstance(x, Var))
            ours.append(eqn)
        else:
            theirs.append(eqn)
    ours.reverse()
    theirs.reverse()
    made = {x for eqn in ours for x in eqn.outvars}
    read = dict.fromkeys(x for eqn in theirs for x in eqn.invars if isinstance(x, Var))
    read |= dict.fromkeys(x for x in jaxpr.outvars[:-1] if isinstance(x, Var))
    passed = [x for x in read if x in made]
    reads = [index for index, x in enumerate(jaxpr.invars) if x in read]

    def program(invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[Any]) -> ClosedJaxpr:
        part = Jaxpr(jaxpr.constvars, invars, outvars, eqns, debug_info=jaxpr.debug_info)
        return ClosedJaxpr(part, backward.consts)

    inputs = program(jaxpr.invars, [jaxpr.outvars[-1], *passed], ours)
    given = [*(jaxpr.invars[index] for index in reads), *passed]
    weights = program(given, jaxpr.outvars[:-1], theirs)
    return Split(inputs, weights, reads, [x.aval for x in passed])


class Measured(NamedTuple):
    """A layer: products, what is kept, and seconds of F, Bi, W, and of the whole B."""

    flops: list[int]
    kept: int
    scores: int
    read: int
    passed: int
    seconds: list[float]


def measure_layer(
    batch: int, length: int, *, hidden: int, heads: int, mlp: int, runs: int = 0
) -> Measured:
    """Takes a layer of the `Transformer` in float32 apart; runs it if `runs` says how often.

    What is kept is counted in numbers for each token, without weights.
    """
    config = LayerConfig(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        mlp_size=mlp,
        dropout_rate=0.0,
        added_scale=1.0,
        dtype=jnp.dtype("float32"),
        attention="xla",
        annotate=False,
        context=Context(None),
    )
    layer = Layer(config)
    x_type = jax.ShapeDtypeStruct((batch, length, hidden), jnp.float32)

    def angles() -> jax.Array:
        return rotary_angles(jnp.arange(length), hidden // heads, base=10_000.0)

    def run(params: Any, x: jax.Array) -> jax.Array:
        return layer.apply(params, x, angles(), None)[0]

    def initialise() -> Any:
        return layer.init(jax.random.key(0), jnp.zeros(x_type.shape), angles(), None)

    structure: Any = None

    def forward(params: Any, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        nonlocal structure
        y, pull = jax.vjp(run, params, x)
        leaves, structure = jax.tree.flatten(pull)
        return y, leaves

    def backward(leaves: list[jax.Array], dy: jax.Array) -> Any:
        return jax.tree.unflatten(structure, leaves)(dy)

    params_type = jax.eval_shape(initialise)
    traced = jax.make_jaxpr(forward)(params_type, x_type)
    kept_types = jax.eval_shape(forward, params_type, x_type)[1]
    traced_backward = jax.make_jaxpr(backward)(kept_types, x_type)
    split = split_backward(traced_backward)
    inputs = set(traced.jaxpr.invars[:-1])
    is_weight = [not isinstance(x, Var) or x in inputs for x in traced.jaxpr.outvars[1:]]
    tokens = batch * length

    def numbers(types: Iterable[Any]) -> int:
        return sum(math.prod(x.shape) for x in types) // tokens

    activations = [x for x, no in zip(kept_types, is_weight, strict=True) if not no]
    read = [kept_types[i] for i in split.reads if i < len(is_weight) and not is_weight[i]]
    parts = (traced, split.inputs, split.weights, traced_backward)
    seconds = []
    if runs:
        params, x = jax.jit(initialise)(), jax.random.normal(jax.random.key(1), x_type.shape)
        _, kept = jax.jit(forward)(params, x)
        given = [*kept, x]
        _, *passed = jax.jit(jaxpr_as_fun(split.inputs))(*given)
        arguments = (
            [*jax.tree.leaves(params), x],
            given,
            [*(given[i] for i in split.reads), *passed],
            given,
        )
        seconds = [
            _median_time(part, args, runs) for part, args in zip(parts, arguments, strict=True)
        ]
    return Measured(
        flops=[sum(flops_of(e) or 0 for e in all_equations(part.jaxpr)) for part in parts],
        kept=numbers(activations),
        scores=numbers(x for x in activations if x.shape[-2:] == (length, length)),
        read=numbers(read),
        passed=numbers(split.passed),
        seconds=seconds,
    )


def _median_time(program: ClosedJaxpr, arguments: Sequence[jax.Array], runs: int) -> float:
    compiled = jax.jit(jaxpr_as_fun(program)).lower(*arguments).compile()
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    """Prints the tables."""
    console = rich.console.Console(width=140)
    rows = []
    for (stages, microbatches), costs in itertools.product(SIZES, COSTS):
        best = [
            bubble(least_time(stages, microbatches, costs, waiting=waiting), microbatches, costs)
            for waiting in (0, stages - 1, stages, NO_LIMIT)
        ]
        shares = [*best, bound(stages, microbatches, costs)]
        shares += [make_table("1f1b", stages, microbatches, v).bubble for v in CHUNKS]
        rows.append([f"S={stages} M={microbatches}", _ratio(costs), *map(describe_share, shares)])
    headers = ["size", "F:Bi:W", "W waiting 0", "S-1", "S", "any", "bound"]
    headers += [f"1f1b v={v}" for v in CHUNKS]
    title = "Least bubble of all tables, by how many W of a stage wait"
    print_table(console, headers, rows, title=title, words=2)

    rows = []
    for stages, microbatches in FILLED:
        table = fill(stages, microbatches, has_weights=True)
        shares = [bubble(table.time(costs), microbatches, costs) for costs in COSTS]
        half = fill(stages, microbatches, has_weights=False)
        shares.append(bubble(half.time((1, 2)), microbatches, (1, 2)))
        shares += [make_table("1f1b", stages, microbatches, v).bubble for v in CHUNKS]
        numbers = [str(max(table.kept)), str(max(table.waiting)), *map(describe_share, shares)]
        rows.append([f"S={stages} M={microbatches}", *numbers])
    headers = ["size", "kept", "waiting", *map(_ratio, COSTS), "F or B"]
    headers += [f"1f1b v={v}" for v in CHUNKS]
    title = "Bubbles of tables whose ticks are one F, Bi or W (F or B: textbook 1F1B) of each stage"
    print_table(console, headers, rows, title=title)

    rows = []
    for (batch, length), sizes in LAYERS:
        found = measure_layer(batch, length, **sizes)
        hidden = sizes["hidden"]
        kept = (found.kept - found.scores, found.read, found.passed)
        rows.append(
            [
                f"D={hidden} S={length}",
                _ratio([x / found.flops[0] for x in found.flops[:3]]),
                _ratio([x / found.seconds[0] for x in found.seconds[:3]]) if found.seconds else "",
                *(f"{x / hidden:.1f}" for x in kept),
            ]
        )
    headers = ["layer", "operations F:Bi:W", "seconds", "kept by F", "of it read by W", "Bi to W"]
    title = "A layer of the transformer taken apart; what is kept for each token, in multiples of D"
    print_table(console, headers, rows, title=title, words=3)


def _ratio(costs: Sequence[float]) -> str:
    return ":".join(f"{cost:.3g}" for cost in costs)


if __name__ == "__main__":
    main()
