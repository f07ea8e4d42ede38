"""The differences between the collectives that a program writes and those that XLA runs.

Each operand of a compiled collective is paired with the operand in the jaxpr that it was made from.
That has the same purpose and module (XLA keeps their names), kind, group and number of elements;
where there is none, another dtype or another kind will do. XLA has hoisted what is left of the
jaxpr out of a loop, merged it with an equal collective, or removed it. It has added what is left of
the compiled program.

Invariant: the bytes of the jaxpr, plus the bytes after less the bytes before of every change, are
the bytes of the compiled program. No part of the difference is left without a name.
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
from manualpar.inspect.compiled import CompiledCollective
from manualpar.inspect.hlo import array_bytes
from manualpar.inspect.scope_parsing import OTHER

ChangeKind = Literal["merged", "hoisted", "retyped", "replaced", "removed", "added"]
UNLIKE = 7  # See `_difference`.


@dataclasses.dataclass(frozen=True)
class Change:
    """What XLA has done to some collectives of one purpose.

    Attributes:
      kind: `"merged"`: several are one, because XLA put them together or because they had the same
        result; `"hoisted"`: one in a loop runs less often; `"retyped"`: another dtype travels;
        `"replaced"`: another kind has the same result; `"removed"`; `"added"`: it was not written.
      purpose: Their purpose, see `Collective.purpose`.
      modules: Their modules, as far as they have one.
      bytes_before: What a device would have sent for them in a step.
      bytes_after: What it sends.
      words: A sentence.
    """

    kind: ChangeKind
    purpose: str
    modules: tuple[str, ...]
    bytes_before: Fraction
    bytes_after: Fraction
    words: str

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names."""
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
    """Names every difference between the collectives that were written and those that run.

    The changes come in the order of the program, those of one kind and purpose together. A
    collective on a ring of one device sends nothing and is not considered. `root` is the name of
    the whole model, see `manualpar.inspect.scope_parsing.module_of`.
    """
    written = [_Written(one, left=one.times) for one in traced if one.bytes_sent]
    running = [part for one in compiled for part in _parts(one, root) if part.bytes_each]
    ranked = [(w, r, _difference(w, r)) for r in running for w in written]
    pairs = [pair for pair in ranked if pair[2] < UNLIKE]
    notes: list[Change] = []

    def pair_up(difference: int, is_preferred: Callable[[_Written, _Running], bool]) -> None:
        for w, r, found in pairs:
            if found == difference and w.left and r.left and is_preferred(w, r):
                notes.extend(_pair(w, r))

    # Of several that are the same those come first that run equally often.
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
    return (*_put_together(running), *_summed(notes))


@dataclasses.dataclass
class _Written:
    """A collective of the jaxpr: how many of its runs are still to be found, and were found."""

    one: Collective
    left: int
    found: int = 0

    def __post_init__(self) -> None:
        is_key = jnp.issubdtype(self.one.dtype, jax.dtypes.prng_key)
        words = self.one.dtype.itemsize // 4 if is_key else 1
        self.dtype = "u32" if is_key else hlo_dtype(self.one.dtype)
        self.elements = math.prod(self.one.shape) * words
        self.bytes_each = self.one.bytes_sent / self.one.times
        self.noun = _noun(self.one.kind, self.dtype)
        # Collectives that agree in this have the same result.
        what = (self.one.kind, self.one.axes, self.elements, self.dtype)
        self.result = (_family(self.one.purpose), self.one.module, *what)


@dataclasses.dataclass
class _Running:
    """An operand of a compiled collective: how many of its runs are not paired, and its sources."""

    whole: CompiledCollective
    elements: int
    dtype: str
    size: int
    root: str

    def __post_init__(self) -> None:
        whole = self.whole
        self.left, self.sources = whole.times, list[_Written]()
        self.bytes_each = ring_bytes(whole.kind, self.size, whole.group_size)
        self.noun = _noun(whole.kind, self.dtype)
        self.names = whole.names(self.root)
        self.purpose, self.module = self.names[0] if self.names else (OTHER, "")


def _note(
    kind: ChangeKind, purpose: str, module: str, before: Fraction, after: Fraction, detail: str
) -> Change:
    """A change of one collective, to be summed with others like it."""
    return Change(kind, purpose, (module,) if module else (), before, after, detail)


def _parts(whole: CompiledCollective, root: str) -> Iterator[_Running]:
    """A part for each operand of which one was written."""
    sizes = [
        (math.prod(shape), dtype, array_bytes(dtype, shape))
        for shape, dtype in zip(whole.shapes, whole.dtypes, strict=True)
    ]
    if whole.kind == "all_to_all" and len(sizes) == whole.group_size and len(set(sizes)) == 1:
        [(elements, dtype, size)] = set(sizes)  # One operand, cut into a part for each device.
        sizes = [(elements * len(whole.shapes), dtype, size * len(whole.shapes))]
    for elements, dtype, size in sizes:
        yield _Running(whole, elements, dtype, size, root)


def _difference(written: _Written, running: _Running) -> int:
    """How unlike the two are, from 0; `UNLIKE` if one is not made from the other."""
    one, whole, names = written.one, running.whole, running.names
    same_group = one.axis_size == whole.group_size
    is_alike = same_group and one.kind == whole.kind and written.elements == running.elements
    grown = written.elements * (one.axis_size if one.kind == "all_gather" else 1)
    is_replaced = same_group and one.kind != whole.kind
    is_replaced &= running.elements in (written.elements, grown)
    if not is_alike and not is_replaced:
        return UNLIKE
    is_retyped = written.dtype != running.dtype
    purpose = purpose_of(one.scope) or OTHER  # The axes of the compiled one are not known.
    if (purpose, one.module) in names and is_alike and not is_retyped:
        return 0
    if (_family(purpose), one.module) in [(_family(p), module) for p, module in names]:
        return 5 if is_replaced else 1 + is_retyped
    # XLA:TPU merges collectives and keeps the name of one.
    if set(names) <= {(OTHER, "")} or len(names) < len(whole.shapes):
        return 6 if is_replaced else 3 + is_retyped
    return UNLIKE


def _pair(written: _Written, running: _Running) -> Iterator[Change]:
    """Pairs as many runs as both have left, and notes how they differ."""
    runs = min(written.left, running.left)
    written.left -= runs
    written.found += runs
    running.left -= runs
    running.sources.append(written)
    one, before, after = written.one, runs * written.bytes_each, runs * running.bytes_each
    if one.kind != running.whole.kind:
        detail = f"{written.noun} is {running.noun}"
        yield _note("replaced", one.purpose, one.module, before, after, detail)
    elif written.dtype != running.dtype or before != after:
        detail = f"{written.noun} travels as {running.dtype}"
        yield _note("retyped", one.purpose, one.module, before, after, detail)


def _left_over(written: Sequence[_Written]) -> Iterator[Change]:
    """Notes what has become of the runs that were not found."""
    found = {one.result for one in written if one.found}
    for one in written:
        if not one.left:
            continue
        lost, kept = one.left * one.bytes_each, one.found * one.bytes_each
        kind: ChangeKind = "removed"
        detail = "is gone: nobody uses its result, or it is known without sending"
        if one.found:
            kind = "hoisted"
            detail = f"has left a loop and runs {one.found} of {one.one.times} times"
        elif one.result in found:
            kind, detail = "merged", "has the result of another, which is used again"
        detail = f"{one.noun} {detail}"
        yield _note(kind, one.one.purpose, one.one.module, lost + kept, kept, detail)


def _put_together(running: Sequence[_Running]) -> Iterator[Change]:
    """Collectives with several operands that were written one by one; the bytes stay the same."""
    by_whole: defaultdict[int, list[_Running]] = defaultdict(list)
    for one in running:
        by_whole[id(one.whole)].append(one)
    for parts in by_whole.values():
        whole = parts[0].whole
        written = list({id(w): w.one for part in parts for w in part.sources}.values())
        if len(parts) < 2 or len(written) < 2:
            continue
        purposes = ", ".join(dict.fromkeys(one.purpose for one in written))
        modules = tuple(dict.fromkeys(one.module for one in written if one.module))
        words = (
            f"{len(written)} times {_noun(whole.kind)} ({purposes}) run as one with "
            f"{len(parts)} operands."
        )
        yield Change("merged", purposes, modules, whole.bytes_sent, whole.bytes_sent, words)


def _summed(notes: Iterable[Change]) -> Iterator[Change]:
    """Notes that say the same, as one change."""
    alike: defaultdict[tuple[ChangeKind, str, str], list[Change]] = defaultdict(list)
    for note in notes:
        alike[note.kind, note.purpose, note.words].append(note)
    for (kind, purpose, detail), several in alike.items():
        before = sum((note.bytes_before for note in several), Fraction(0))
        after = sum((note.bytes_after for note in several), Fraction(0))
        modules = tuple(dict.fromkeys(module for note in several for module in note.modules))
        whose = " that nobody has written" if kind == "added" else ""
        often = f" ({len(several)} of them)" if len(several) > 1 else ""
        words = f"{detail}{whose}{often}: {_bytes(before)} become {_bytes(after)}."
        yield Change(kind, purpose, modules, before, after, words)


def hlo_dtype(dtype: Any) -> str:
    """A dtype's name in HLO: `"f32"` for float32, `"pred"` for bool."""
    name = jnp.dtype(dtype).name
    if name == "bool":
        return "pred"
    for jax_name, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u")):
        if name.startswith(jax_name):
            return short + name.removeprefix(jax_name).replace("_", "")
    return name.replace("int", "s")


def _family(purpose: str) -> str:
    """The purpose as far as XLA keeps it: of equal gathers it may keep the name of any one."""
    return GATHER_SCOPE if purpose == REGATHER else purpose


def _noun(kind: Kind, dtype: str = "") -> str:
    noun = kind.replace("_", "-")
    article = "an" if noun[0] == "a" else "a"
    return f"{article} {noun} of {dtype}" if dtype else noun


def _bytes(sent: Fraction) -> str:
    return f"{float(sent):,.10g} bytes"
