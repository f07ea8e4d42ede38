"""Walks through the equations of a jaxpr, and counts how often a step runs each of them.

An `EquationReader` reads one equation after another and collects *findings*, such as collectives or
matrix products. It counts the body of a `scan` once for each iteration, counts only the most
expensive branch of a `cond`, and reads the functions in `jit`, `shard_map`, `jax.checkpoint` and
custom derivatives. The number of rounds of a `while` is not known before it runs. So the reader
refuses a `while` with findings, unless the caller gives a number of rounds. The reader's `notes`
list these choices.

A pipeline runs in ticks. Each stage runs a `cond` of the pipeline only in some of the ticks. The
named scope around the `cond` gives the number of these ticks for each stage
(`manualpar.core.tracing.tick_scopes`). The reader counts the ticks of one stage.
"""

import math
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import Jaxpr
from jax.sharding import AxisType

from manualpar.core.tracing.jaxprs import inner_jaxprs
from manualpar.core.tracing.tick_scopes import TickRuns, ticks_run

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
