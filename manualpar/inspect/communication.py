"""Lists the collectives of a traced step, how often each runs, and the bytes that each sends.

The jaxpr of a program contains exactly the collectives that the program calls. XLA may still merge
them, move them out of loops, or drop a collective whose result is not used. Outside `shard_map`,
and along axes that are not manual, XLA inserts other collectives. `manualpar.inspect.compiled`
reads the collectives of the compiled program.

Bytes are the bytes that one device sends to its neighbour with ring algorithms on `N` devices
(Thakur et al., https://doi.org/10.1177/1094342005051521). The devices of a tuple of axes form one
ring. Bytes are exact fractions, because `(N - 1) / N` of an operand need not be an integer.

No collective is left out silently. For a primitive that names a mesh axis this module has a
formula, or knows that the primitive sends nothing, or raises an error. Copies between devices
inside a Pallas kernel and callbacks on the host name no axis, so this module does not see them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType

from manualpar.core.tracing.jaxprs import TYPE_CASTS, inner_jaxprs
from manualpar.core.tracing.scopes import TickRuns, ticks_run
from manualpar.inspect.scope_parsing import Phase, module_of, phase_of, purpose_in

# -------------------------------------------------------------------------------------------------
# Walks through the equations of a jaxpr, and counts how often a step runs each of them.
#
# An `EquationReader` reads one equation after another and collects *findings*, such as collectives
# or matrix products. It counts the body of a `scan` once for each iteration, counts only the most
# expensive branch of a `cond`, and reads the functions in `jit`, `shard_map`, `jax.checkpoint` and
# custom derivatives. The number of rounds of a `while` is not known before it runs. So the reader
# refuses a `while` with findings, unless the caller gives a number of rounds. The reader's `notes`
# list these choices.
#
# A pipeline runs in ticks. Each stage runs a `cond` of the pipeline only in some of the ticks. The
# named scope around the `cond` gives the number of these ticks for each stage
# (`manualpar.core.tracing.scopes`). The reader counts the ticks of one stage.


Finding = TypeVar("Finding")


class Around(NamedTuple):
    """The surroundings of an equation, which a step runs `times` times.

    `sizes` are the sizes of the mesh axes of all `shard_map`s around the equation. The compiler
    spreads the equation's arrays over `spread` devices: over all devices outside of `shard_map`,
    and inside of it over the devices along the axes that are not manual. In a pipeline `runs` is
    the number of ticks in which the stage runs the equation; `None` if no scope gives it.
    """

    sizes: Mapping[str, int] = {}
    times: int = 1
    scope: str = ""
    spread: int = 1
    runs: int | None = None

    @property
    def place(self) -> str:
        """The equation's scope, for messages."""
        return f"(scope: {self.scope or 'none'})"


OUTSIDE = Around()


class EquationReader(Generic[Finding]):
    """Collects findings from every equation of a program; subclasses define the findings.

    Error messages name the function `caller`, and `notes` lists the reader's choices and
    assumptions. In a pipeline the reader reads the stage `stage`, and sets `num_stages`.

    A primitive other than `cond` and `while` may call several functions. The reader does not know
    how often it runs each of them. If more than one of them has findings, a reader with
    `refuses_several` raises an error. Another reader adds up the findings, and notes this.
    """

    verb: str  # What an equation with findings does, for notes: "sends", "computes".
    refuses_several: bool

    def __init__(self, caller: str, *, while_trips: int | None = None, stage: int = 0) -> None:
        if while_trips is not None and (type(while_trips) is not int or while_trips < 0):
            raise ValueError(
                f"{caller}: while_trips is {while_trips!r}, expected the largest number of "
                "iterations of a while_loop (an integer, at least 0), or None to refuse such loops."
            )
        self.caller = caller
        self.while_trips = while_trips
        self.stage, self.num_stages = stage, 1
        self.notes: list[str] = []

    def find(self, eqn: Any, around: Around) -> tuple[Finding, ...] | None:
        """Returns an equation's findings; `None` if its inner jaxprs have to be read."""
        raise NotImplementedError

    def cost(self, findings: tuple[Finding, ...]) -> Any:
        """Returns the cost of a branch's findings, by which branches are compared."""
        raise NotImplementedError

    def describe(self, findings: tuple[Finding, ...]) -> str:
        """Describes the first finding, for messages."""
        raise NotImplementedError

    def read(self, jaxpr: Jaxpr, around: Around = OUTSIDE) -> tuple[Finding, ...]:
        """Reads a jaxpr and all jaxprs inside it, in the order of the program."""
        found: list[Finding] = []
        for eqn in jaxpr.eqns:
            scope = f"{around.scope}/{eqn.source_info.name_stack}".strip("/")
            found += self._read_equation(eqn, around._replace(scope=scope))
        return tuple(found)

    def _read_equation(self, eqn: Any, around: Around) -> tuple[Finding, ...]:
        found = self.find(eqn, around)
        if found is not None:
            return found
        name = eqn.primitive.name
        if name == "while":
            return self._read_while(eqn, around)
        if name == "shard_map":
            mesh, manual = eqn.params["mesh"], _manual_axes(eqn)
            left = [size for axis, size in mesh.shape.items() if axis not in manual]
            around = around._replace(sizes={**around.sizes, **mesh.shape}, spread=math.prod(left))
        elif name == "scan":
            around = around._replace(times=around.times * eqn.params["length"])
        elif name == "cond" and (ticks := ticks_run(str(eqn.source_info.name_stack))):
            return self._read_ticks(eqn, ticks, around)
        read = [self.read(jaxpr, around) for _, jaxpr in inner_jaxprs(eqn)]
        parts = [part for part in read if part]
        if name == "cond" and parts:
            if len({self.cost(part) for part in read}) > 1:
                self._note(
                    f"cond {around.place}: only the branch that {self.verb} most is counted, of "
                    f"{len(read)}"
                )
            return max(parts, key=self.cost)
        if len(parts) > 1 and self.refuses_several:
            raise ValueError(
                f"{self.caller}: {name} {around.place} contains {len(parts)} functions with "
                "collectives, expected one, because it is not known how often each of them runs. "
                f"Take the collectives out of the {name}."
            )
        if len(parts) > 1:
            self._note(
                f"{name} {around.place}: how often its {len(parts)} functions run is not known; "
                "each is counted once"
            )
        return sum(parts, ())

    def _read_ticks(self, cond: Any, ticks: TickRuns, around: Around) -> tuple[Finding, ...]:
        """Reads a `cond` that the stage runs only in some ticks of a pipeline."""
        self.num_stages = len(ticks.runs)
        # If an enclosing `cond` runs in some ticks, `times` already counts these ticks.
        ticks_counted = ticks.ticks if around.runs is None else around.runs
        runs = ticks.runs[self.stage]
        if not runs:
            return ()
        around = around._replace(times=around.times * runs // ticks_counted, runs=runs)
        return max((self.read(jaxpr, around) for _, jaxpr in inner_jaxprs(cond)), key=self.cost)

    def _read_while(self, eqn: Any, around: Around) -> tuple[Finding, ...]:
        trips = 1 if self.while_trips is None else self.while_trips
        found: tuple[Finding, ...] = ()
        for name, jaxpr in inner_jaxprs(eqn):
            rounds = trips + 1 if name == "cond_jaxpr" else trips
            found += self.read(jaxpr, around._replace(times=around.times * rounds))
        if found and self.while_trips is None:
            raise ValueError(
                f"{self.caller}: a while {around.place} contains {self.describe(found)}, and its "
                "number of rounds is not known before it runs. Write the loop as a jax.lax.scan, "
                "or a fori_loop whose bounds are Python integers; or move this out of the loop; or "
                "set while_trips= to the number of rounds to count."
            )
        if found:
            self._note(f"while {around.place}: {trips} rounds are counted, as while_trips says")
        return found

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _manual_axes(shard_map: Any) -> frozenset[str]:
    """Returns the mesh axes along which shapes inside a `shard_map` are per device."""
    mesh = shard_map.params["mesh"]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    already = {axis for axis, kind in kinds if kind == AxisType.Manual}
    params = shard_map.params
    # Older supported versions of jax call this parameter `manual_axes`.
    newly = params.get("newly_manual_axes", params.get("manual_axes", frozenset()))
    return frozenset(already | newly)


# -------------------------------------------------------------------------------------------------


Key = TypeVar("Key")
Value = TypeVar("Value")
Amount = TypeVar("Amount", int, float, Fraction)
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]

RAGGED = "ragged_all_to_all"
# JAX primitive -> kind. JAX has several primitives for one kind, because they have different types
# under check_vma=True. For example, a psum of values that vary over the axis is psum_invariant.
KIND_OF_PRIMITIVE: Mapping[str, Kind] = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "unreduced_psum": "all_reduce",
    "unreduced_pmax": "all_reduce",
    "unreduced_pmin": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_to_all": "all_to_all",
    RAGGED: "all_to_all",
    "ppermute": "permute",
}

# Primitives that name mesh axes and send nothing.
SILENT_PRIMITIVES = TYPE_CASTS | {"axis_index"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operand of a collective that a program calls or a formula predicts.

    XLA compiles one or several of these operands to one instruction, which is a
    `manualpar.inspect.compiled.CompiledCollective`. For either class the planner's
    `manualpar.planner.timed_collectives.TimedCollective` adds the seconds.

    Attributes:
      axis_size: The number of devices that the axes span together.
      shape: The operand's shape on one device.
      times: How many times a step runs the collective.
      scope: The `jax.named_scope`s and transformations around the collective, outermost first.
      root: The name of the top module, `""` if the name is not known.
      data_axes: The mesh axes that split the batch; empty if these axes are not known.
    """

    kind: Kind
    axes: tuple[str, ...]
    axis_size: int
    shape: tuple[int, ...]
    dtype: Any
    times: int
    scope: str
    root: str = dataclasses.field(default="", repr=False)
    data_axes: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def bytes_sent(self) -> Fraction:
        """The bytes that a device sends for the collective in a step, see `ring_bytes`."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return ring_bytes(self.kind, self.times * size, self.axis_size)

    @property
    def float_bytes_sent(self) -> float:
        """`bytes_sent` as the nearest float; much faster than the exact fraction."""
        operands = _operands_sent(self.kind, self.axis_size)
        size = self.times * math.prod(self.shape) * self.dtype.itemsize
        return operands.numerator * size / operands.denominator

    @property
    def purpose(self) -> str:
        """The purpose of the collective, see `purpose_in`."""
        return purpose_in(self.scope, self.axes, self.data_axes)

    @property
    def module(self) -> str:
        """The path of the collective's module or parameter, see `module_of`."""
        return module_of(self.scope, self.root)

    @property
    def phase(self) -> Phase:
        """The part of a step in which the collective runs, see `phase_of`."""
        return phase_of(self.scope)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for JSON, as plain numbers and names."""
        return {
            "kind": self.kind,
            "axes": ",".join(self.axes),
            "axis_size": self.axis_size,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "times": self.times,
            "bytes": as_number(self.bytes_sent),
            "purpose": self.purpose,
            "module": self.module,
            "phase": self.phase,
            "scope": self.scope,
        }


def ring_bytes(kind: Kind, operand_bytes: int, group_size: int) -> Fraction:
    """Returns the bytes that each device of a ring of `N = group_size` sends for one collective.

    In an all-gather a device sends `N - 1` operands (each the operand of one device). In a
    reduce-scatter it sends `(N - 1) / N` of its operand, and in an all-reduce twice as much. In an
    all-to-all it sends `(N - 1) / N` of its operand: the part for the other devices. In a
    permutation it sends its operand once, whatever the distance. In a ring of one device it sends
    nothing.
    """
    return _operands_sent(kind, group_size) * operand_bytes


@functools.lru_cache(maxsize=1024)
def _operands_sent(kind: Kind, group_size: int) -> Fraction:
    others = group_size - 1
    operands: dict[Kind, Fraction] = {
        "all_gather": Fraction(others),
        "reduce_scatter": Fraction(others, group_size),
        "all_reduce": Fraction(2 * others, group_size),
        "all_to_all": Fraction(others, group_size),
        "permute": Fraction(1 if others else 0),
    }
    return operands[kind]


def trace_collectives(
    program: jax.stages.Traced | ClosedJaxpr,
    *,
    while_trips: int | None = None,
    stage: int | None = None,
) -> tuple[Collective, ...]:
    """Returns the collectives of a traced program.

    Args:
      program: The result of `jax.jit(f).trace(*args)` or `jax.make_jaxpr(f)(*args)`; the arguments
        may be `jax.ShapeDtypeStruct`s. For a `Program`, pass
        `program.train_step.trace(program.abstract_state, program.abstract_batch)`.
      while_trips: The number of rounds to count for a `while` whose number of rounds is not known.
      stage: The stage of a pipeline to read; `None` for the stage that sends the most.

    Returns:
      A `Collective` for each operand of each collective, in the order of the program. A collective
      in a `scan` is listed once, with the scan's length as `times`. For a `cond`, the collectives
      of the branch that sends the most bytes are listed (if equal, of the first branch).

    Raises:
      TypeError: `program` is neither the result of `trace` nor of `make_jaxpr`.
      ValueError: A `while` contains a collective, and `while_trips` is `None`; or a primitive that
        names a mesh axis has no formula here; or no `shard_map` binds the axis of a collective; or
        the stage does not exist.
    """
    jaxpr = program.jaxpr if isinstance(program, jax.stages.Traced) else program
    if not isinstance(jaxpr, ClosedJaxpr):
        raise TypeError(
            f"trace_collectives: program is a {type(program).__name__}, expected the result of "
            "jax.jit(f).trace(*args) or jax.make_jaxpr(f)(*args)."
        )
    options: Any = {"while_trips": while_trips, "stage": stage}
    return read_stage("trace_collectives", jaxpr.jaxpr, **options)[1]


def count_by_kind(collectives: Iterable[Any]) -> dict[str, int]:
    """Counts how many collectives of each kind a step runs; kinds with 0 are left out."""
    counts = summed((collective.kind, collective.times) for collective in collectives)
    return {kind: count for kind, count in counts.items() if count}


def bytes_by_axes(collectives: Iterable[Collective]) -> dict[tuple[str, ...], Fraction]:
    """Returns the bytes that a device sends in a step, by axis or tuple of axes."""
    return summed((collective.axes, collective.bytes_sent) for collective in collectives)


def total_bytes(collectives: Iterable[Any]) -> Fraction:
    """Returns the bytes that a device sends in a step, summed over all collectives."""
    return sum((collective.bytes_sent for collective in collectives), Fraction(0))


def summed(amounts: Iterable[tuple[Key, Amount]]) -> dict[Key, Amount]:
    """Sums the amounts of each key, in the order in which the keys first appear."""
    totals: dict[Key, Amount] = {}
    for key, amount in amounts:
        totals[key] = totals[key] + amount if key in totals else amount
    return totals


def grouped(values: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Lists the values of each key, in the order in which the keys first appear."""
    groups: dict[Key, list[Value]] = {}
    for key, value in values:
        groups.setdefault(key, []).append(value)
    return groups


def as_number(value: Fraction) -> int | float:
    """Converts bytes for JSON: to an integer if there is no fraction, else to a float."""
    return value.numerator if value.denominator == 1 else float(value)


class CollectiveReader(EquationReader[Collective]):
    """Collects the collectives of a program."""

    verb = "sends"
    refuses_several = True

    def __init__(
        self,
        caller: str,
        *,
        root: str = "",
        data_axes: tuple[str, ...] = (),
        while_trips: int | None = None,
        stage: int = 0,
    ) -> None:
        super().__init__(caller, while_trips=while_trips, stage=stage)
        self.names: Any = {"root": root, "data_axes": data_axes}

    def find(self, eqn: Any, around: Around) -> tuple[Collective, ...] | None:
        """Returns a collective for each operand, if the equation is a collective."""
        name = eqn.primitive.name
        if name in KIND_OF_PRIMITIVE:
            return self._collectives(eqn, around)
        axes = [axis for axis in _named_axes(eqn) if axis in around.sizes]
        if axes and name != "shard_map" and name not in SILENT_PRIMITIVES:
            raise ValueError(
                f"trace_collectives: the program contains {name} over {axes} {around.place}, "
                f"expected one of {', '.join(KIND_OF_PRIMITIVE)}, because the bytes of other "
                "primitives are unknown. Use one of these, or give the primitive a kind in "
                "manualpar/inspect/communication.py."
            )
        return None

    def cost(self, findings: tuple[Collective, ...]) -> Fraction:
        """Returns the bytes that the collectives send."""
        return total_bytes(findings)

    def describe(self, findings: tuple[Collective, ...]) -> str:
        """Returns the kind and axes of the first collective."""
        return f"{findings[0].kind} over {findings[0].axes}"

    def _collectives(self, eqn: Any, around: Around) -> tuple[Collective, ...]:
        axes = tuple(_named_axes(eqn))
        unbound = [axis for axis in axes if axis not in around.sizes]
        if unbound:
            raise ValueError(
                f"trace_collectives: the program contains {eqn.primitive.name} over {unbound} "
                f"{around.place}, expected axes of a jax.shard_map around it, here "
                f"{list(around.sizes)}. Trace the whole program, not the function in its shard_map."
            )
        groups = eqn.params.get("axis_index_groups")
        size = max(map(len, groups)) if groups else math.prod(around.sizes[axis] for axis in axes)
        return tuple(
            Collective(
                kind=KIND_OF_PRIMITIVE[eqn.primitive.name],
                axes=axes,
                axis_size=size,
                shape=x.aval.shape,
                dtype=x.aval.dtype,
                times=around.times,
                scope=around.scope,
                **self.names,
            )
            for x in _sent_operands(eqn)
        )


def read_stage(
    caller: str, jaxpr: Jaxpr, around: Around = OUTSIDE, *, stage: int | None, **options: Any
) -> tuple[CollectiveReader, tuple[Collective, ...]]:
    """Reads the collectives that one stage of a pipeline runs.

    A program without a pipeline has one stage. With `stage=None` the stage that sends the most is
    read (if equal, the first stage). `options` are the other arguments of `CollectiveReader`.
    """

    def read(stage: int) -> tuple[CollectiveReader, tuple[Collective, ...]]:
        reader = CollectiveReader(caller, stage=stage, **options)
        return reader, reader.read(jaxpr, around)

    first = read(0)
    num_stages = first[0].num_stages
    if stage is not None and stage not in range(num_stages):
        raise ValueError(
            f"{caller}: stage={stage!r}, expected a stage from 0 to {num_stages - 1}, or None for "
            "the stage that sends the most."
        )
    stages = range(1, num_stages) if stage is None else [stage]
    readings = [*([first] if stage is None else []), *map(read, stages)]
    reader, found = max(readings, key=lambda reading: total_bytes(reading[1]))
    if num_stages > 1:
        which = "the one that sends the most" if stage is None else "as requested"
        reader.notes.append(f"the numbers are of stage {reader.stage} of {num_stages}, {which}")
    return reader, found


def _sent_operands(eqn: Any) -> Sequence[Any]:
    """Returns the operands of a collective that are sent.

    A ragged all-to-all also has a buffer for the result, and the starts and numbers of rows. Either
    the rows or the buffer has room for the most rows that could arrive, and the other one has the
    rows of a device. On average as many of them stay on the device as in an all-to-all.
    """
    if eqn.primitive.name != RAGGED:
        return eqn.invars
    return [min(eqn.invars[:2], key=lambda x: math.prod(x.aval.shape))]


def _named_axes(eqn: Any) -> list[str]:
    """Returns the mesh axes that an equation's parameters name; axes given as numbers are dims."""
    values = [value for name, value in eqn.params.items() if "axis" in name or "axes" in name]
    values = [sorted(value) if isinstance(value, frozenset) else value for value in values]
    return [axis for axis in jax.tree.leaves(values) if isinstance(axis, str)]
