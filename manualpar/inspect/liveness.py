"""What a program holds at its fullest moment, from when each array is made and last read.

Operations run in the order in which they are written, but gathers where they are first read. An
array is held from the operation that makes it to the last one that reads it. Not everything that is
written is an array in memory, for XLA *fuses*. The model of that is its rule for fusion:

- an elementwise operation, a broadcast, a cast, a slice, a lookup is computed where it is read, if
  everything that reads it ends up in one fusion; its operands are then held until that is computed;
- if it is read by several, it is computed anew in each of them, if that is cheap (no exponential,
  division or root), if it reads no more than one array, and if keeping that array does not take
  more than keeping the result would; a broadcast of a scalar and a counter always;
- otherwise, or if something else reads it, such as a collective or a loop, or if it is a result, it
  is an array in memory; so is what a reduction, a matrix product, or any other operation makes.

Compilers differ: XLA's for TPUs computes in a matrix product what that reads, and repeats what is
not cheap as well (`FUSIONS`). GPUs have not been measured; most of their products are calls of a
library, as on the CPU.

A fusion may write over an operand of the same bytes that nobody reads later; so may a scatter, an
all-reduce, and a loop over what it carries. What a loop carries stays in its place: a new one that
is made before the old one was read for the last time is held besides. Of branches the fullest
counts. What is written and never read is left out.

A model it is: XLA reorders operations, merges equal ones, hoists some out of loops, pads, and keeps
what it computes in layouts of its own. `benchmarks/planned_memory.py` says how far off it is on the
CPU.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from manualpar.inspect.communication import KIND_OF_PRIMITIVE
from manualpar.inspect.operations import Body, Operation, Value

# Fused, and cheap enough to be computed several times.
_CHEAP_WORDS = """
abs add add_any and bitcast_convert_type broadcast_in_dim clamp complex concatenate conj
convert_element_type dynamic_slice eq ge gt imag iota is_finite le lt max min mul ne neg not or
pad population_count real reduce_precision rev round select_n shift_left shift_right_arithmetic
shift_right_logical sharding_constraint sign slice split square stack sub xor ceil floor clz
nextafter
"""
CHEAP = frozenset(_CHEAP_WORDS.split())
# Fused where one fusion reads them.
_DEAR_WORDS = """
acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1
gather integer_pow lgamma log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh
"""
DEAR = frozenset(_DEAR_WORDS.split())
# They compute what they read in the same loop, and their result is an array.
_REDUCTIONS_WORDS = """
argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
store
"""
REDUCTIONS = frozenset(_REDUCTIONS_WORDS.split())

PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What a compiler computes where it is read.

    Attributes:
      into_products: Whether matrix products compute what they read.
      repeats_dear: Whether what is not cheap is computed several times too, rather than kept.
    """

    into_products: bool
    repeats_dear: bool


# By the names of platforms.
FUSIONS: Mapping[str, Fusion] = {
    "cpu": Fusion(into_products=False, repeats_dear=False),
    "tpu": Fusion(into_products=True, repeats_dear=True),
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The fullest moment.

    Attributes:
      by_label: The bytes held, by what they are for.
      scope: The named scopes of the operation that runs then.
    """

    by_label: Mapping[str, int]
    scope: str = ""

    @property
    def total(self) -> int:
        """All bytes held."""
        return sum(self.by_label.values())


def find_peak(
    operations: Sequence[Operation],
    values: Sequence[Value],
    *,
    results: Iterable[int],
    replaced: Iterable[tuple[int, int]] = (),
    fusion: Fusion,
) -> Peak:
    """Finds what is held at the fullest moment besides what is there before.

    Args:
      operations: What runs.
      values: Every value, by number.
      results: The values that are held to the end.
      replaced: Pairs of a value that is there before, and the one that takes its place.
      fusion: What is computed where it is read.

    Returns:
      The bytes that operations have made.
    """
    replaced = tuple(replaced)
    kept = {*results, *(new for _, new in replaced)}
    return _Walk(operations, values, kept=kept, replaced=replaced, fusion=fusion).run()


class _Walk:
    """A walk through operations that run one after the other."""

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Sequence[Value],
        *,
        kept: Collection[int],
        replaced: Sequence[tuple[int, int]],
        fusion: Fusion,
        elsewhere: Collection[int] = (),
    ) -> None:
        self.values = values
        self.fusion = fusion
        self.elsewhere = elsewhere
        self.kept = set(kept)
        self.operations = _delayed(_needed(operations, self.kept))
        self.replaced = replaced
        self.made_at = {v: i for i, op in enumerate(self.operations) for v in op.outputs}
        self.fused = self._find_fused()
        self.reads = self._find_reads()
        self.last_read: dict[int, int] = {}
        for index, reads in enumerate(self.reads):
            self.last_read.update(dict.fromkeys(reads, index))

    def run(self) -> Peak:
        """Runs through them."""
        made_at = self.made_at
        dying: defaultdict[int, list[int]] = defaultdict(list)
        in_place = set(self.elsewhere)
        for old, new in self.replaced:
            end = self.last_read.get(old, -1)
            if old == new or new not in made_at:
                continue
            makes = self.operations[made_at[new]]
            if end < made_at[new] or (end == made_at[new] and self._is_in_place(makes)):
                in_place.add(new)
            else:
                dying[end].append(new)
        for value, index in self.last_read.items():
            if value in made_at and value not in self.kept:
                dying[index].append(value)
        held: Counter[str] = Counter()
        alive: set[int] = set()
        best = Peak({})
        for index, op in enumerate(self.operations):
            if index in self.fused:
                continue
            ends = [v for v in dying[index] if v in alive]
            reused = self._reuse(op, ends)
            made = [v for v in op.outputs if v not in in_place and op.name != "store"]
            for value in made:
                held[self.values[value].label] += self.values[value].size
                alive.add(value)
            inside = self._inside(op)
            total = held.total() + inside.total - reused
            if total > best.total:
                moment = held + Counter(inside.by_label)
                _take_off(moment, reused, [self.values[v].label for v in ends])
                best = Peak({k: n for k, n in moment.items() if n}, inside.scope or op.scope)
            unread = [v for v in made if v not in self.last_read and v not in self.kept]
            for value in {*ends, *unread, *(v for v in dying[index] if v in made)}:
                if value in alive:
                    held[self.values[value].label] -= self.values[value].size
                    alive.discard(value)
        return best

    def _reuse(self, op: Operation, ends: list[int]) -> int:
        """The bytes of results that lie where operands lay."""
        if not _is_fusible(op):
            pairs = [(old, new) for old, new in op.written_over if old in ends]
            return sum(self.values[new].size for _, new in pairs)
        free = Counter(self.values[v].size for v in ends)
        return sum(size for v in op.outputs if free[size := self.values[v].size])

    def _inside(self, op: Operation) -> Peak:
        """What the functions inside of an operation hold besides what is held around them."""
        peaks = [self._of_body(body, op) for body in op.bodies]
        return max(peaks, key=lambda peak: peak.total, default=Peak({}))

    def _of_body(self, body: Body, op: Operation) -> Peak:
        """The same of one of them, whose results lie where those of the operation do."""
        results = {value for value in body.results if value is not None}
        is_loop = op.name in ("scan", "while")
        return _Walk(
            body.operations,
            self.values,
            kept={*op.outputs, *(new for _, new in body.carried)} if is_loop else results,
            replaced=body.carried,
            fusion=self.fusion,
            elsewhere=frozenset() if is_loop else results,
        ).run()

    def _is_in_place(self, op: Operation) -> bool:
        return bool(op.written_over) or _is_fusible(op)

    def _find_fused(self) -> frozenset[int]:
        """The operations whose result is no array in memory, by their place."""
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(self.operations):
            for value in op.inputs:
                readers[value].append(index)
        fused: set[int] = set()
        # The fusions that compute an operation: places of those whose result is in memory.
        roots: dict[int, frozenset[int]] = {}
        for index in reversed(range(len(self.operations))):
            op = self.operations[index]
            roots[index] = frozenset({index})
            if not _is_fusible(op) or self.kept & set(op.outputs):
                continue
            reading = [reader for value in op.outputs for reader in readers[value]]
            if not all(self._computes_inside(self.operations[reader]) for reader in reading):
                continue
            computing = frozenset().union(*(roots[reader] for reader in reading))
            if len(computing) == 1 or self._is_repeated(op, readers):
                fused.add(index)
                roots[index] = computing
        return frozenset(fused)

    def _computes_inside(self, op: Operation) -> bool:
        is_product = op.name in PRODUCTS and self.fusion.into_products
        return _is_fusible(op) or op.name in REDUCTIONS or is_product

    def _is_repeated(self, op: Operation, readers: Mapping[int, list[int]]) -> bool:
        """Whether an operation is rather computed several times than kept."""
        arrays = self._arrays(op)
        if len(arrays) != 1 or not (op.name in CHEAP or self.fusion.repeats_dear):
            return not arrays
        if self.values[arrays[0]].size <= sum(self.values[v].size for v in op.outputs):
            return True
        # What is smaller than what it is made of is kept, unless that is read by others anyway.
        value = arrays[0]
        while len(readers[value]) == 1 and value in self.made_at:
            behind = self.operations[self.made_at[value]]
            arrays = self._arrays(behind)
            if not _is_fusible(behind) or len(arrays) != 1:
                return False
            value = arrays[0]
        return True

    def _arrays(self, op: Operation) -> list[int]:
        """What an operation reads that is not much smaller than what it makes."""
        largest = max((self.values[v].elements for v in op.outputs), default=0)
        return [v for v in op.inputs if self.values[v].elements * 8 > largest]

    def _find_reads(self) -> list[frozenset[int]]:
        """The arrays in memory that each operation reads, itself or through what it computes."""
        behind: dict[int, frozenset[int]] = {}
        reads: list[frozenset[int]] = []
        for index, op in enumerate(self.operations):
            found = frozenset().union(*(behind.get(v, frozenset({v})) for v in op.inputs))
            reads.append(frozenset() if index in self.fused else found)
            if index in self.fused:
                behind.update(dict.fromkeys(op.outputs, found))
        return reads


def _is_fusible(op: Operation) -> bool:
    return op.name in CHEAP or op.name in DEAR


def _needed(operations: Sequence[Operation], kept: Collection[int]) -> list[Operation]:
    """The operations that lead to what is kept."""
    needed, found = set(kept), []
    for op in reversed(operations):
        if needed & set(op.outputs):
            needed.update(op.inputs)
            found.append(op)
    return found[::-1]


def _delayed(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with each gather, and each cast of what was gathered, where it is first read.

    What is recomputed begins with all gathers at once, which no compiler runs so early.
    """
    gathered: set[int] = set()
    moved = []
    for op in operations:
        is_cast = _is_fusible(op) and len(op.inputs) == 1 and op.inputs[0] in gathered
        moved.append(KIND_OF_PRIMITIVE.get(op.name) == "all_gather" or is_cast)
        if moved[-1]:
            gathered.update(op.outputs)
    first: dict[int, tuple[int, int]] = {}
    places: list[tuple[int, int]] = [(index, 0) for index in range(len(operations))]
    for index in reversed(range(len(operations))):
        op = operations[index]
        if moved[index]:
            readers = [first[value] for value in op.outputs if value in first]
            place, before = min(readers, default=places[index])
            places[index] = (place, before - 1) if readers else places[index]
        for value in op.inputs:
            first[value] = min(first.get(value, places[index]), places[index])
    return [operations[i] for i in sorted(range(len(operations)), key=places.__getitem__)]


def _take_off(moment: Counter[str], size: int, labels: Iterable[str]) -> None:
    """Takes bytes that are counted twice off what gave up its place."""
    for label in labels:
        taken = min(size, moment[label])
        moment[label] -= taken
        size -= taken
