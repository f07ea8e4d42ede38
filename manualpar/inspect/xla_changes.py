"""Names the differences between the collectives in a jaxpr and those of the compiled program.

Each operand of a compiled collective is paired with an operand in the jaxpr. The two have the same
purpose and module (XLA keeps these names), kind, size of the group, number of elements and dtype.
If the jaxpr has no such operand, an operand with another dtype or another kind is taken. If a
collective of the jaxpr has no partner, XLA moved it out of a loop, merged it with an equal
collective, or removed it. If a collective of the compiled program has no partner, XLA added it.

Invariant: the bytes of the jaxpr, plus `bytes_after - bytes_before` of every change, are the bytes
  of the compiled program. So every difference in bytes has a name.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp

from manualpar.core.tracing.scopes import GATHER_SCOPE, REGATHER, purpose_of
from manualpar.inspect.communication import Collective, Kind, as_number, ring_bytes
from manualpar.inspect.compiled import CompiledCollective, array_bytes
from manualpar.inspect.scope_parsing import OTHER

ChangeKind = Literal["merged", "hoisted", "retyped", "replaced", "removed", "added"]
UNLIKE = 7  # What `_difference` returns for two collectives that are no pair.


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that XLA made to some collectives of one purpose.

    Attributes:
      kind: `"merged"`: XLA made one collective of several, or uses one result several times.
        `"hoisted"`: XLA moved a collective out of a loop. `"retyped"`: another dtype is sent.
        `"replaced"`: another kind of collective computes the same result. `"removed"`: a collective
        of the jaxpr does not run. `"added"`: a collective that runs is not in the jaxpr.
      purpose: The collectives' purpose, see `Collective.purpose`.
      modules: The modules of these collectives; empty if they belong to no module.
      bytes_before: The bytes that a device would send for these collectives in a step without the
        change.
      bytes_after: The bytes that the device sends for them with the change.
      words: The change as a sentence.
    """

    kind: ChangeKind
    purpose: str
    modules: tuple[str, ...]
    bytes_before: Fraction
    bytes_after: Fraction
    words: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for JSON, as plain numbers and names."""
        return {
            "kind": self.kind,
            "purpose": self.purpose,
            "modules": list(self.modules),
            "bytes_before": as_number(self.bytes_before),
            "bytes_after": as_number(self.bytes_after),
            "words": self.words,
        }


def find_changes(
    traced: Iterable[Collective], compiled: Iterable[CompiledCollective], *, root: str = ""
) -> tuple[Change, ...]:
    """Finds every difference between the collectives of a jaxpr and of the compiled program.

    Changes of one kind, one purpose and one sentence are added up. A collective on one device sends
    nothing and is left out. `root` is the name of the top module, see
    `manualpar.inspect.scope_parsing.module_of`.
    """
    written = [_Written(one, left=one.times) for one in traced if one.bytes_sent]
    running = [part for whole in compiled for part in _parts(whole, root) if part.bytes_each]
    ranked = [(w, r, _difference(w, r)) for r in running for w in written]
    pairs = [pair for pair in ranked if pair[2] < UNLIKE]
    notes: list[Change] = []

    def pair_up(difference: int, is_preferred: Callable[[_Written, _Running], bool]) -> None:
        for w, r, found in pairs:
            if found == difference and w.left and r.left and is_preferred(w, r):
                notes.extend(_pair(w, r))

    # Among pairs that match equally well, prefer pairs that run equally often.
    pair_up(0, lambda w, r: w.left == r.left)
    pair_up(0, lambda w, r: not w.found)
    for difference in range(UNLIKE):
        pair_up(difference, lambda w, r: True)
    notes += _left_over(written)
    notes += [
        _note("added", r.purpose, r.module, Fraction(0), r.left * r.bytes_each, r.noun)
        for r in running
        if r.left
    ]
    return (*_joined_operands(running), *_summed(notes))


@dataclasses.dataclass
class _Written:
    """A collective of the jaxpr; `left` of its runs have no partner yet, `found` runs have one."""

    collective: Collective
    left: int
    found: int = 0

    def __post_init__(self) -> None:
        is_key = jnp.issubdtype(self.collective.dtype, jax.dtypes.prng_key)
        words = self.collective.dtype.itemsize // 4 if is_key else 1
        self.dtype = "u32" if is_key else hlo_dtype(self.collective.dtype)
        self.elements = math.prod(self.collective.shape) * words
        self.bytes_each = self.collective.bytes_sent / self.collective.times
        self.noun = _noun(self.collective.kind, self.dtype)
        # Collectives with equal `result` compute the same values.
        operation = (self.collective.kind, self.collective.axes, self.elements, self.dtype)
        self.result = (_family(self.collective.purpose), self.collective.module, *operation)


@dataclasses.dataclass
class _Running:
    """An operand of a compiled collective; `left` of its runs have no partner in the jaxpr yet.

    `sources` are the partners that have been found.
    """

    collective: CompiledCollective
    elements: int
    dtype: str
    size: int
    root: str

    def __post_init__(self) -> None:
        compiled = self.collective
        self.left, self.sources = compiled.times, list[_Written]()
        self.bytes_each = ring_bytes(compiled.kind, self.size, compiled.group_size)
        self.noun = _noun(compiled.kind, self.dtype)
        self.names = compiled.names(self.root)
        self.purpose, self.module = self.names[0] if self.names else (OTHER, "")


def _note(
    kind: ChangeKind, purpose: str, module: str, before: Fraction, after: Fraction, detail: str
) -> Change:
    """Returns a change of one collective; `_summed` adds up changes with equal `detail`."""
    return Change(kind, purpose, (module,) if module else (), before, after, detail)


def _parts(compiled: CompiledCollective, root: str) -> Iterator[_Running]:
    """Yields the operands of a compiled collective.

    XLA may write the operand of an all-to-all as one operand for each device. It counts as one.
    """
    sizes = [
        (math.prod(shape), dtype, array_bytes(dtype, shape))
        for shape, dtype in zip(compiled.shapes, compiled.dtypes, strict=True)
    ]
    if compiled.kind == "all_to_all" and len(sizes) == compiled.group_size and len(set(sizes)) == 1:
        [(elements, dtype, size)] = set(sizes)  # One operand, cut into a part for each device.
        sizes = [(elements * len(compiled.shapes), dtype, size * len(compiled.shapes))]
    for elements, dtype, size in sizes:
        yield _Running(compiled, elements, dtype, size, root)


def _difference(written: _Written, running: _Running) -> int:
    """Returns how much two collectives differ: 0 if they match, `UNLIKE` if they are no pair."""
    traced, compiled, names = written.collective, running.collective, running.names
    same_group = traced.axis_size == compiled.group_size
    is_alike = same_group and traced.kind == compiled.kind and written.elements == running.elements
    grown = written.elements * (traced.axis_size if traced.kind == "all_gather" else 1)
    is_replaced = same_group and traced.kind != compiled.kind
    is_replaced &= running.elements in (written.elements, grown)
    if not is_alike and not is_replaced:
        return UNLIKE
    is_retyped = written.dtype != running.dtype
    purpose = purpose_of(traced.scope) or OTHER  # Without axes, because HLO has none.
    if (purpose, traced.module) in names and is_alike and not is_retyped:
        return 0
    if (_family(purpose), traced.module) in [(_family(p), module) for p, module in names]:
        return 5 if is_replaced else 1 + is_retyped
    # XLA:TPU may keep the name of only one of several merged collectives, or no name.
    if set(names) <= {(OTHER, "")} or len(names) < len(compiled.shapes):
        return 6 if is_replaced else 3 + is_retyped
    return UNLIKE


def _pair(written: _Written, running: _Running) -> Iterator[Change]:
    """Matches as many runs as both collectives have left; yields the change between the two."""
    runs = min(written.left, running.left)
    written.left -= runs
    written.found += runs
    running.left -= runs
    running.sources.append(written)
    traced, before, after = written.collective, runs * written.bytes_each, runs * running.bytes_each
    if traced.kind != running.collective.kind:
        detail = f"{written.noun} runs as {running.noun}"
        yield _note("replaced", traced.purpose, traced.module, before, after, detail)
    elif written.dtype != running.dtype or before != after:
        detail = f"{written.noun} is sent as {running.dtype}"
        yield _note("retyped", traced.purpose, traced.module, before, after, detail)


def _left_over(written: Sequence[_Written]) -> Iterator[Change]:
    """Yields the changes of collectives of the jaxpr whose runs have no partner."""
    found = {operand.result for operand in written if operand.found}
    for operand in written:
        if not operand.left:
            continue
        lost_bytes, kept_bytes = (
            operand.left * operand.bytes_each,
            operand.found * operand.bytes_each,
        )
        kind: ChangeKind = "removed"
        detail = "is removed, because its result is not used, or is known without communication"
        if operand.found:
            kind = "hoisted"
            runs = f"{operand.found} instead of {operand.collective.times} times"
            detail = f"is moved out of a loop and runs {runs}"
        elif operand.result in found:
            kind, detail = "merged", "has the result of another, which is used again"
        detail = f"{operand.noun} {detail}"
        yield _note(
            kind,
            operand.collective.purpose,
            operand.collective.module,
            lost_bytes + kept_bytes,
            kept_bytes,
            detail,
        )


def _joined_operands(running: Sequence[_Running]) -> Iterator[Change]:
    """Yields a change for each compiled collective that XLA merged from several of the jaxpr.

    The bytes stay the same.
    """
    by_whole: defaultdict[int, list[_Running]] = defaultdict(list)
    for operand in running:
        by_whole[id(operand.collective)].append(operand)
    for parts in by_whole.values():
        compiled = parts[0].collective
        written = list({id(w): w.collective for part in parts for w in part.sources}.values())
        if len(parts) < 2 or len(written) < 2:
            continue
        purposes = ", ".join(dict.fromkeys(x.purpose for x in written))
        modules = tuple(dict.fromkeys(x.module for x in written if x.module))
        words = (
            f"{len(written)} collectives ({purposes}) run as one {_noun(compiled.kind)} with "
            f"{len(parts)} operands."
        )
        yield Change("merged", purposes, modules, compiled.bytes_sent, compiled.bytes_sent, words)


def _summed(notes: Iterable[Change]) -> Iterator[Change]:
    """Adds up changes of equal kind, purpose and words, and completes their sentences."""
    alike: defaultdict[tuple[ChangeKind, str, str], list[Change]] = defaultdict(list)
    for note in notes:
        alike[note.kind, note.purpose, note.words].append(note)
    for (kind, purpose, detail), several in alike.items():
        before = sum((note.bytes_before for note in several), Fraction(0))
        after = sum((note.bytes_after for note in several), Fraction(0))
        modules = tuple(dict.fromkeys(module for note in several for module in note.modules))
        origin = " that the program does not write" if kind == "added" else ""
        count = f" ({len(several)} of them)" if len(several) > 1 else ""
        words = f"{detail}{origin}{count}: {_bytes(before)} become {_bytes(after)}."
        yield Change(kind, purpose, modules, before, after, words)


def hlo_dtype(dtype: Any) -> str:
    """Returns a dtype's name in HLO: `"f32"` for float32, `"pred"` for bool."""
    name = jnp.dtype(dtype).name
    if name == "bool":
        return "pred"
    for jax_name, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u")):
        if name.startswith(jax_name):
            return short + name.removeprefix(jax_name).replace("_", "")
    return name.replace("int", "s")


def _family(purpose: str) -> str:
    """Returns `GATHER_SCOPE` for both purposes of gathers, because XLA may merge equal gathers.

    The merged gather keeps either of the two names.
    """
    return GATHER_SCOPE if purpose == REGATHER else purpose


def _noun(kind: Kind, dtype: str = "") -> str:
    noun = kind.replace("_", "-")
    article = "an" if noun[0] == "a" else "a"
    return f"{article} {noun} of {dtype}" if dtype else noun


def _bytes(sent: Fraction) -> str:
    return f"{float(sent):,.10g} bytes"
