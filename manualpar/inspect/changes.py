"""What XLA has changed of what a program sends, one sentence for each change.

The jaxpr and the compiled program are held against each other operand by operand. An operand of the
compiled program is the one that was written with the same purpose and module (XLA keeps their names
with what it makes of them), the same kind, group and number of elements; where none is, one that
was written in another dtype, or as another kind. What is left over on the one side XLA has hoisted
out of a loop, merged with an equal one, or removed; on the other side it has added it.

Invariant: the bytes of the jaxpr, and of every change those after less those before, are together
the bytes of the compiled program. Nothing of the difference is left without a name.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp

from manualpar.core.collectives import GATHER_SCOPE, REGATHER
from manualpar.inspect.communication import Collective, Kind, as_number, ring_bytes
from manualpar.inspect.compiled import CompiledCollective
from manualpar.inspect.hlo import array_bytes
from manualpar.inspect.scopes import (
    OTHER,
    TENSOR_PARALLEL,
    compiled_scopes,
    module_of,
    purpose_in,
)

ChangeKind = Literal["merged", "hoisted", "retyped", "replaced", "removed", "added"]


@dataclasses.dataclass(frozen=True)
class Change:
    """What XLA has done to some collectives of one purpose.

    Attributes:
      kind: `"merged"`: several are one, because they were put together, or because they had the
        same result; `"hoisted"`: one in a loop runs less often; `"retyped"`: another dtype travels;
        `"replaced"`: another kind does the same; `"removed"`; `"added"`: nobody has written it.
      purpose: Their purpose, see `Collective.purpose`.
      modules: Their modules, those that have one.
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
    """Names every difference between what was written and what runs.

    Args:
      traced: The collectives of the jaxpr.
      compiled: Those of the compiled program.
      root: The name of the whole model, see `manualpar.inspect.scopes.module_of`.

    Returns:
      The changes, those of one kind and purpose together, in the order of the program. What sends
      nothing, for it runs on a ring of one device, is no change.
    """
    written = [_Written(one, one.times) for one in traced if one.bytes_sent]
    running = [_Running(one, part, root) for one in compiled for part in _operands(one)]
    running = [one for one in running if one.bytes_each]
    notes: list[_Note] = []
    for fits in _FITS:
        for one in running:
            for other in written:
                if one.left and other.left and fits(other, one):
                    _pair(other, one, notes)
    notes += _left_over(written)
    notes += [
        _Note("added", one.purpose, one.module, Fraction(0), one.left * one.bytes_each, one.noun)
        for one in running
        if one.left
    ]
    return (*_put_together(running), *_summed(notes))


@dataclasses.dataclass
class _Written:
    """A collective of the jaxpr, of which so many runs have not been found in what was compiled."""

    one: Collective
    left: int
    found: int = 0

    @functools.cached_property
    def dtype(self) -> str:
        return "u32" if _is_key(self.one.dtype) else hlo_dtype(self.one.dtype)

    @functools.cached_property
    def elements(self) -> int:
        words = self.one.dtype.itemsize // 4 if _is_key(self.one.dtype) else 1
        return math.prod(self.one.shape) * words

    @property
    def bytes_each(self) -> Fraction:
        return self.one.bytes_sent / self.one.times

    @property
    def same(self) -> tuple[Any, ...]:
        """What collectives with the same result have in common."""
        one = self.one
        return _family(one.purpose), one.module, one.kind, one.axes, self.elements, self.dtype

    @property
    def noun(self) -> str:
        return _noun(self.one.kind, self.dtype)


@dataclasses.dataclass
class _Running:
    """An operand of a compiled collective, of which so many runs have not been found written."""

    whole: CompiledCollective
    left: int
    elements: int
    dtype: str
    bytes_each: Fraction
    num_scopes: int
    names: frozenset[tuple[str, str]]  # Purpose and module, of each that it was made from.
    of: list[_Written]

    def __init__(
        self, whole: CompiledCollective, part: tuple[int, str, int], root: str = ""
    ) -> None:
        self.whole, self.left, self.of = whole, whole.times, []
        self.elements, self.dtype, size = part
        self.bytes_each = ring_bytes(whole.kind, size, whole.group_size)
        scopes = compiled_scopes(whole.scope) if whole.scope else ()
        self.num_scopes = len(scopes)
        self.names = frozenset((purpose_in(scope, ()), module_of(scope, root)) for scope in scopes)
        first = scopes[0] if scopes else ""
        self.purpose, self.module = purpose_in(first, ()), module_of(first, root)

    @property
    def noun(self) -> str:
        return _noun(self.whole.kind, self.dtype)


@dataclasses.dataclass(frozen=True)
class _Note:
    """A change of one collective, to be summed with others like it."""

    kind: ChangeKind
    purpose: str
    module: str
    before: Fraction
    after: Fraction
    detail: str


def _operands(whole: CompiledCollective) -> Iterator[tuple[int, str, int]]:
    """Elements, dtype and bytes of each operand of which one was written."""
    sizes = [
        (math.prod(shape), dtype, array_bytes(dtype, shape))
        for shape, dtype in zip(whole.shapes, whole.dtypes, strict=True)
    ]
    if whole.kind == "all_to_all" and len(sizes) == whole.group_size and len(set(sizes)) == 1:
        [(elements, dtype, size)] = set(sizes)  # One operand, cut into what each device gets.
        sizes = [(elements * len(whole.shapes), dtype, size * len(whole.shapes))]
    yield from sizes


def _is_named(written: _Written, running: _Running) -> bool:
    """Whether one was made from what was written with such a purpose and in such a module."""
    names = {(_family(purpose), module) for purpose, module in running.names}
    return (_family(written.one.purpose), written.one.module) in names


def _is_itself(written: _Written, running: _Running) -> bool:
    """Whether nothing about it has changed, as far as one can see."""
    purpose = OTHER if written.one.purpose == TENSOR_PARALLEL else written.one.purpose
    is_named = (purpose, written.one.module) in running.names
    return is_named and _is_alike(written, running) and _has_dtype(written, running)


def _is_nameless(running: _Running) -> bool:
    """Whether it may be made from what it does not name: XLA:TPU merges and keeps one name."""
    has_none = not running.names or running.names == {(OTHER, "")}
    return has_none or running.num_scopes < len(running.whole.shapes)


def _is_alike(written: _Written, running: _Running) -> bool:
    """Whether one does what the other does, but for the dtype."""
    one, whole = written.one, running.whole
    same_group = (one.kind, one.axis_size) == (whole.kind, whole.group_size)
    return same_group and written.elements == running.elements


def _has_dtype(written: _Written, running: _Running) -> bool:
    return written.dtype == running.dtype


def _is_replaced(written: _Written, running: _Running) -> bool:
    """Whether another kind of collective has the result of the one that was written."""
    one, whole = written.one, running.whole
    if one.kind == whole.kind or one.axis_size != whole.group_size:
        return False
    grows = one.axis_size if one.kind == "all_gather" else 1
    return running.elements in (written.elements, written.elements * grows)


# The best fits first.
_FITS: tuple[Callable[[_Written, _Running], bool], ...] = (
    lambda w, r: _is_itself(w, r) and w.left == r.left,
    lambda w, r: _is_itself(w, r) and not w.found,
    _is_itself,
    lambda w, r: _is_named(w, r) and _is_alike(w, r) and _has_dtype(w, r),
    lambda w, r: _is_named(w, r) and _is_alike(w, r),
    lambda w, r: _is_nameless(r) and _is_alike(w, r) and _has_dtype(w, r),
    lambda w, r: _is_nameless(r) and _is_alike(w, r),
    lambda w, r: _is_named(w, r) and _is_replaced(w, r),
    lambda w, r: _is_nameless(r) and _is_replaced(w, r),
)


def _pair(written: _Written, running: _Running, notes: list[_Note]) -> None:
    """Finds runs of what was written in what was compiled, and notes how they differ."""
    runs = min(written.left, running.left)
    written.left -= runs
    written.found += runs
    running.left -= runs
    running.of.append(written)
    one, before, after = written.one, runs * written.bytes_each, runs * running.bytes_each
    if one.kind != running.whole.kind:
        detail = f"{written.noun} is {running.noun}"
        notes.append(_Note("replaced", one.purpose, one.module, before, after, detail))
    elif written.dtype != running.dtype or before != after:
        detail = f"{written.noun} travels as {running.dtype}"
        notes.append(_Note("retyped", one.purpose, one.module, before, after, detail))


def _left_over(written: Sequence[_Written]) -> Iterator[_Note]:
    """What was written and is not found, by what has become of it."""
    found = {one.same for one in written if one.found}
    for one in written:
        if not one.left:
            continue
        lost = one.left * one.bytes_each
        purpose, module = one.one.purpose, one.one.module
        if one.found:
            kept = one.found * one.bytes_each
            detail = f"{one.noun} has left a loop and runs {one.found} of {one.one.times} times"
            yield _Note("hoisted", purpose, module, kept + lost, kept, detail)
        elif one.same in found:
            detail = f"{one.noun} has the result of another, which is used again"
            yield _Note("merged", purpose, module, lost, Fraction(0), detail)
        else:
            detail = f"{one.noun} is gone: nobody uses its result, or it is known without sending"
            yield _Note("removed", purpose, module, lost, Fraction(0), detail)


def _put_together(running: Sequence[_Running]) -> Iterator[Change]:
    """Collectives with several operands that were written one by one; the bytes stay the same."""
    by_whole: defaultdict[int, list[_Running]] = defaultdict(list)
    for one in running:
        by_whole[id(one.whole)].append(one)
    for parts in by_whole.values():
        whole = parts[0].whole
        written = list({id(w): w for part in parts for w in part.of}.values())
        if len(parts) < 2 or len(written) < 2:
            continue
        purposes = list(dict.fromkeys(w.one.purpose for w in written))
        modules = tuple(dict.fromkeys(w.one.module for w in written if w.one.module))
        sent = whole.bytes_sent
        words = (
            f"{len(written)} times {_noun(whole.kind)} ({', '.join(purposes)}) run as one with "
            f"{len(parts)} operands."
        )
        yield Change("merged", ", ".join(purposes), modules, sent, sent, words)


def _summed(notes: Iterable[_Note]) -> Iterator[Change]:
    """Notes that say the same, as one change."""
    alike: defaultdict[tuple[ChangeKind, str, str], list[_Note]] = defaultdict(list)
    for note in notes:
        alike[note.kind, note.purpose, note.detail].append(note)
    for (kind, purpose, detail), several in alike.items():
        before = sum((note.before for note in several), Fraction(0))
        after = sum((note.after for note in several), Fraction(0))
        modules = tuple(dict.fromkeys(note.module for note in several if note.module))
        whose = "" if kind != "added" else " that nobody has written"
        often = "" if len(several) == 1 else f" ({len(several)} of them)"
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


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _family(purpose: str) -> str:
    """The purpose as far as XLA keeps it: of equal gathers any one's name may be left."""
    return {REGATHER: GATHER_SCOPE, TENSOR_PARALLEL: OTHER}.get(purpose, purpose)


def _noun(kind: Kind, dtype: str = "") -> str:
    noun = kind.replace("_", "-")
    article = "an" if noun[0] == "a" else "a"
    return f"{article} {noun} of {dtype}" if dtype else noun


def _bytes(sent: Fraction) -> str:
    return f"{float(sent):,.10g} bytes"
