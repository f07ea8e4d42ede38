"""The walk through a traced program: every equation once, and what surrounds it.

What a program sends and what it computes are read in one walk, each by a `Reader` that looks at one
equation at a time. The walk knows how often an equation runs and in which scope: a `scan` runs its
body as often as it is long; of a `cond` the branch counts that costs most, for each reader; what
`jit`, `shard_map`, `jax.checkpoint` and custom derivatives have inside runs where they stand. How
often a `while` runs is not known before it runs: it is refused, or bounded by a number that the
caller gives. Whatever was not read off the program but chosen or assumed is said in a note.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType


class Around(NamedTuple):
    """What surrounds an equation.

    Attributes:
      sizes: The sizes of the mesh axes of each `shard_map` around it.
      times: How often a step runs it.
      scope: The named scopes and transformations around it, outermost first.
      spread: Over how many devices the compiler spreads its values: outside of `shard_map` all
        devices, where a device holds its own part of them only the axes that are left to XLA.
    """

    sizes: Mapping[str, int]
    times: int
    scope: str
    spread: int

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"(scope: {self.scope or 'none'})"


class Reader(NamedTuple):
    """What is looked for in a program.

    Attributes:
      read: What an equation consists of by itself, without what is inside it: a tuple of findings,
        `None` to look inside.
      cost: What findings cost together; of branches the dearest counts.
      noun: The first of the findings in words, for messages: `"contains all_reduce over ..."`.
      verb: What they do, for notes: `"sends"`.
      wants_one: Whether a primitive that has findings in several functions is refused, for nobody
        knows how often it runs each; otherwise they are added up, and a note says so.
    """

    read: Callable[[Any, Around], tuple[Any, ...] | None]
    cost: Callable[[tuple[Any, ...]], Any]
    noun: Callable[[tuple[Any, ...]], str]
    verb: str
    wants_one: bool


Found = tuple[tuple[Any, ...], ...]  # The findings of each reader.


class Walk:
    """A walk, which collects the notes of what it meets.

    Attributes:
      caller: In whose name it refuses.
      readers: What is looked for.
      while_trips: How often a `while` runs whose count is not known; `None`: such are refused.
      notes: What was chosen or assumed, in words.
    """

    def __init__(
        self, caller: str, readers: tuple[Reader, ...], *, while_trips: int | None = None
    ) -> None:
        if while_trips is not None and (
            not isinstance(while_trips, int) or isinstance(while_trips, bool) or while_trips < 0
        ):
            raise ValueError(
                f"{caller}: while_trips is {while_trips!r}, expected the most rounds that a while "
                "runs, an integer, or None to refuse what has no known number."
            )
        self.caller = caller
        self.readers = readers
        self.while_trips = while_trips
        self.notes: dict[str, None] = {}

    def of_jaxpr(self, jaxpr: Jaxpr, around: Around) -> Found:
        """The findings in a jaxpr and in all that is inside its equations, in their order."""
        return self._of_jaxpr(jaxpr, around, self.readers)

    def _of_jaxpr(self, jaxpr: Jaxpr, around: Around, readers: tuple[Reader, ...]) -> Found:
        parts = [self._of_equation(eqn, around, readers) for eqn in jaxpr.eqns]
        return tuple(
            tuple(finding for part in parts for finding in part[index])
            for index in range(len(readers))
        )

    def _of_equation(self, eqn: Any, around: Around, readers: tuple[Reader, ...]) -> Found:
        """What each reader finds in an equation or, if it asks for that, inside it."""
        scope = f"{around.scope}/{eqn.source_info.name_stack}".strip("/")
        around = around._replace(scope=scope)
        read = [reader.read(eqn, around) for reader in readers]
        asking = tuple(reader for reader, found in zip(readers, read, strict=True) if found is None)
        inner = list(_parts(eqn, around)) if asking else []
        if eqn.primitive.name == "while" and inner:
            inside = self._of_while(inner, asking)
        else:
            parts = [self._of_jaxpr(jaxpr, within, asking) for _, jaxpr, within in inner]
            inside = tuple(
                self._one_of(eqn, reader, around, [part[index] for part in parts if part[index]])
                for index, reader in enumerate(asking)
            )
        answers = iter(inside)
        return tuple(next(answers) if found is None else found for found in read)

    def _of_while(
        self, inner: list[tuple[str, Jaxpr, Around]], readers: tuple[Reader, ...]
    ) -> Found:
        """The findings of a loop, whose condition runs once more than its body."""
        trips = 1 if self.while_trips is None else self.while_trips
        total: list[tuple[Any, ...]] = [()] * len(readers)
        for name, jaxpr, around in inner:
            rounds = trips + 1 if name == "cond_jaxpr" else trips
            within = around._replace(times=around.times * rounds)
            found = self._of_jaxpr(jaxpr, within, readers)
            total = [first + more for first, more in zip(total, found, strict=True)]
        place = inner[0][2].place
        for reader, findings in zip(readers, total, strict=True):
            if not findings:
                continue
            if self.while_trips is None:
                raise ValueError(
                    f"{self.caller}: a while {place} {reader.noun(findings)}, and its number of "
                    "rounds is not known before it runs. Write the loop as a jax.lax.scan, or a "
                    "fori_loop whose bounds are Python integers, or take it out of the loop, or "
                    "say with while_trips= how many rounds to count."
                )
            self.note(f"while {place}: {trips} rounds are counted, as while_trips says")
        return tuple(total)

    def _one_of(
        self, eqn: Any, reader: Reader, around: Around, parts: list[tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """The findings in the functions of an equation: of branches those of the dearest."""
        name = eqn.primitive.name
        if name == "cond" and parts:
            count = len(eqn.params["branches"])
            costs = {reader.cost(part) for part in parts} | ({0} if len(parts) < count else set())
            if len(costs) > 1:
                self.note(
                    f"cond {around.place}: of {count} branches the one that {reader.verb} most is "
                    "counted"
                )
            return max(parts, key=reader.cost)
        if len(parts) > 1 and reader.wants_one:
            raise ValueError(
                f"{self.caller}: {name} {around.place} contains {len(parts)} functions with "
                "collectives, expected one: how often it runs which is not known here. Take the "
                "collectives out of it."
            )
        if len(parts) > 1:
            self.note(
                f"{name} {around.place}: how often its {len(parts)} functions run is not known; "
                "each is counted once"
            )
        return tuple(finding for part in parts for finding in part)

    def note(self, words: str) -> None:
        """Says something once."""
        self.notes[words] = None


def _parts(eqn: Any, around: Around) -> Iterator[tuple[str, Jaxpr, Around]]:
    """The jaxprs directly inside an equation, each with its parameter and what surrounds it."""
    name = eqn.primitive.name
    if name == "shard_map":
        mesh, manual = eqn.params["mesh"], manual_axes(eqn)
        left = [size for axis, size in mesh.shape.items() if axis not in manual]
        around = around._replace(sizes={**around.sizes, **mesh.shape}, spread=math.prod(left))
    elif name == "scan":
        around = around._replace(times=around.times * eqn.params["length"])
    for parameter, value in eqn.params.items():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield parameter, inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, around


def manual_axes(shard_map: Any) -> frozenset[str]:
    """The mesh axes of which a device sees only its own part inside of a `shard_map`."""
    mesh = shard_map.params["mesh"]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    already = {axis for axis, kind in kinds if kind == AxisType.Manual}
    params = shard_map.params
    # The older of the supported versions of jax say it with another word.
    newly = params.get("newly_manual_axes", params.get("manual_axes", frozenset()))
    return frozenset(already | newly)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside it, each once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
