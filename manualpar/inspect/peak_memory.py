"""Estimates which arrays a program holds at the moment when it holds the most bytes.

The program is the result of `manualpar.inspect.flat_program`: operations on numbered values. They
run in the order of the program, except that a gather runs where its result is first read. On CPUs
they run in the order of `manualpar.inspect.xla_cpu_schedule`. An array is held from the operation
that makes it to the last operation that reads it. Not every value is an array in memory, because
XLA *fuses* operations. This module models the fusion as follows:

- An elementwise operation, a broadcast, a cast, a slice or a lookup is computed inside the fusion
  that reads its result, if all of its readers are in one fusion. Its operands are then held until
  the fusion runs.
- An operation with readers in several fusions is computed again in each fusion, if it is cheap (no
  exponential, division or root), if it reads at most one array, and if holding this array takes no
  more memory than holding the result. Broadcasts of scalars and counters are always computed again.
- Every other result is an array in memory: a result that a collective or a loop reads, a result of
  the program, and the result of a reduction, a matrix product or any operation not named here.

Compilers differ (`FUSIONS`): XLA:TPU also fuses operands into matrix products, and also computes
operations again that are not cheap. XLA:GPU postpones the reduce-scatters of a loop: they run while
the next iteration computes, so complete gradients of two iterations are held.

A fusion may write over an operand of the same size that no later operation reads. A scatter, an
all-reduce, and a loop with its carry may do this too. A loop's carry stays in its place; a new
carry that is made before the last read of the old carry takes additional memory. Only the fullest
branch of a conditional counts. Values that are never read are left out.

This is a model: XLA reorders operations, merges equal ones, hoists some out of loops, pads arrays,
and chooses layouts of its own. `benchmarks/planned_memory.py` measures the error on the CPU.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from manualpar.inspect.communication import KIND_OF_PRIMITIVE
from manualpar.inspect.flat_program import FlatValue, Operation
from manualpar.inspect.xla_cpu_schedule import PRODUCTS, as_compiled, eager_order

# Operations that are fused, and cheap enough to be computed several times.
_CHEAP_WORDS = """
abs add add_any and bitcast_convert_type broadcast_in_dim clamp complex concatenate conj
convert_element_type dynamic_slice eq ge gt imag iota is_finite le lt max min mul ne neg not or
pad population_count real reduce_precision rev round select_n shift_left shift_right_arithmetic
shift_right_logical sharding_constraint sign slice split square stack sub transpose xor ceil floor
clz nextafter one_minus_square
"""
CHEAP = frozenset(_CHEAP_WORDS.split())
# Operations that are fused if a single fusion reads them.
_DEAR_WORDS = """
acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1
gather integer_pow lgamma log log1p log2 logistic polynomial pow rem rsqrt sin sinh sqrt tan tanh
"""
DEAR = frozenset(_DEAR_WORDS.split())
# Operations that are fused with their operands, but whose result is an array.
_REDUCTIONS_WORDS = """
argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
store
"""
REDUCTIONS = frozenset(_REDUCTIONS_WORDS.split())


class Fusion(NamedTuple):
    """Which operations a compiler fuses."""

    into_products: bool  # Whether operands are fused into matrix products.
    repeats_dear: bool  # Whether operations that are not cheap are computed again, too.
    is_eager: bool  # Whether `xla_cpu_schedule` gives the operations and their order.
    postpones_scatters: bool = False  # Whether a loop scatters during its next iteration.


FUSIONS: Mapping[str, Fusion] = {
    "cpu": Fusion(into_products=False, repeats_dear=False, is_eager=True),
    "tpu": Fusion(into_products=True, repeats_dear=True, is_eager=False),
    "gpu": Fusion(into_products=False, repeats_dear=True, is_eager=False, postpones_scatters=True),
}


def find_peak(
    operations: Sequence[Operation],
    values: list[FlatValue],
    *,
    kept: Collection[int],
    replaced: Sequence[tuple[int, int]] = (),
    fusion: Fusion,
    elsewhere: Collection[int] = (),
) -> Counter[str]:
    """Counts the bytes at the fullest moment of a list of operations, by the labels of values.

    Arguments (values that no operation makes) do not count.

    Args:
      operations: The operations, in their order.
      values: Every value, by number. Values that the compiler adds are appended.
      kept: The values that are held to the end.
      replaced: Pairs of an argument and the new value that is stored in its memory, such as the old
        and the new parameters. The new value is held to the end.
      fusion: The operations that the compiler fuses.
      elsewhere: Values that are stored in the memory of arrays outside of `operations`.
    """
    kept = {*kept, *(new for _, new in replaced)}
    operations = _needed(operations, kept)
    operations = as_compiled(operations, values, kept) if fusion.is_eager else _delayed(operations)
    fused = _Fusing(operations, values, kept, fusion, _makers(operations)).find()
    if fusion.is_eager:
        order = eager_order(operations, fused)
        operations = [operations[index] for index in order]
        fused = frozenset(place for place, index in enumerate(order) if index in fused)
    made_at = _makers(operations)
    last_read = _last_reads(operations, fused)
    in_place = set(elsewhere)
    dying: defaultdict[int, list[int]] = defaultdict(list)
    for old, new in replaced:
        if old == new or new not in made_at:
            continue
        read = last_read.get(old, -1)
        if not _takes_place(operations[made_at[new]], read - made_at[new]):
            dying[read].append(new)  # Until the old value is read, both values are held.
        # The new value takes the old value's place. If the new value was written over another
        # value, that value takes the place too.
        while new in made_at and _takes_place(operations[made_at[new]], read - made_at[new]):
            in_place.add(new)
            maker = made_at[new]
            under = [x for x, y in operations[maker].written_over if y == new]
            new = next((x for x in under if last_read.get(x, -1) <= maker), -1)
    for value, index in last_read.items():
        if value in made_at and value not in kept:
            dying[index].append(value)
    held_by_label: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    alive: set[int] = set()
    for index, op in enumerate(operations):
        if index in fused:
            continue
        ends = [v for v in dying[index] if v in alive]
        reused = _reused_bytes(op, ends, values)
        made = [v for v in op.outputs if v not in in_place and op.name != "store"]
        for value in made:
            held_by_label[values[value].label] += values[value].size
            alive.add(value)
        inside = _inside(op, values, fusion)
        if held_by_label.total() + inside.total() - reused > peak.total():
            peak = held_by_label + inside
            # Subtract operands whose memory results reuse, because `peak` counts both.
            for value in ends:
                label = values[value].label
                taken = min(reused, values[value].size, peak[label])
                peak[label] -= taken
                reused -= taken
        unread = [v for v in made if v not in last_read and v not in kept]
        for value in {*dying[index], *unread} & alive:
            held_by_label[values[value].label] -= values[value].size
            alive.discard(value)
    return +peak


def _inside(op: Operation, values: list[FlatValue], fusion: Fusion) -> Counter[str]:
    """Counts the bytes of a loop's body or of a `cond`'s fullest branch, by label.

    Values from outside of the body do not count.
    """
    is_loop = op.name in ("scan", "while")
    fullest: Counter[str] = Counter()
    for body in op.bodies:
        results = {value for value in body.results if value is not None}
        found = find_peak(
            body.operations,
            values,
            kept=op.outputs if is_loop else results,
            replaced=body.carried,
            fusion=fusion,
            # The results of a branch take the place of the outputs of the operation.
            elsewhere=() if is_loop else results,
        )
        if is_loop and fusion.postpones_scatters:
            found["gradients"] += _scattered_bytes(body.operations, values)
        fullest = max(fullest, found, key=lambda peak: peak.total())
    return fullest


def _scattered_bytes(operations: Sequence[Operation], values: Sequence[FlatValue]) -> int:
    """Counts the bytes of the operands of reduce-scatters."""
    scatters = (op for op in operations if KIND_OF_PRIMITIVE.get(op.name) == "reduce_scatter")
    return sum(values[value].size for op in scatters for value in op.inputs)


def _makers(operations: Sequence[Operation]) -> dict[int, int]:
    """Maps each value to the index of the operation that makes it."""
    return {v: i for i, op in enumerate(operations) for v in op.outputs}


def _takes_place(maker: Operation, later: int) -> bool:
    """Returns whether `maker` may write over an old value.

    The last reader of the old value comes `later` operations after `maker`, or before if negative.
    """
    return later < 0 or (later == 0 and (bool(maker.written_over) or _is_fusible(maker)))


def _reused_bytes(op: Operation, ends: Sequence[int], values: Sequence[FlatValue]) -> int:
    """Counts the bytes of results that are stored in the memory of the operands `ends`.

    No later operation reads `ends`.
    """
    if not _is_fusible(op):
        return sum(values[new].size for old, new in op.written_over if old in ends)
    free = {values[v].size for v in ends}
    return sum(values[v].size for v in op.outputs if values[v].size in free)


class _Fusing(NamedTuple):
    """Finds the operations whose results are not arrays in memory."""

    operations: Sequence[Operation]
    values: Sequence[FlatValue]
    kept: Collection[int]
    fusion: Fusion
    made_at: Mapping[int, int]

    def find(self) -> frozenset[int]:
        """Returns the indices of the operations that are fused into their readers."""
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(self.operations):
            for value in op.inputs:
                readers[value].append(index)
        fused: set[int] = set()
        # Index of an operation -> the fusions that compute it. The index of a fusion's last
        # operation stands for the fusion.
        roots: dict[int, frozenset[int]] = {}
        for index in reversed(range(len(self.operations))):
            op = self.operations[index]
            roots[index] = frozenset({index})
            if not _is_fusible(op) or any(value in self.kept for value in op.outputs):
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
        """Returns whether an operation is computed several times rather than kept."""
        arrays = self._arrays(op)
        if len(arrays) != 1 or not (op.name in CHEAP or self.fusion.repeats_dear):
            return not arrays
        value = arrays[0]
        if self.values[value].size <= sum(self.values[v].size for v in op.outputs):
            return True
        # If the result is smaller than its operand, it is kept, unless the operand (or the array
        # from which it is computed) has other readers and is held for these.
        while len(readers[value]) == 1 and value in self.made_at:
            maker = self.operations[self.made_at[value]]
            arrays = self._arrays(maker)
            if not _is_fusible(maker) or len(arrays) != 1:
                return False
            value = arrays[0]
        return True

    def _arrays(self, op: Operation) -> list[int]:
        """Returns the inputs with over 1/8 of the elements of the operation's largest output."""
        largest = max((self.values[v].elements for v in op.outputs), default=0)
        return [v for v in op.inputs if self.values[v].elements * 8 > largest]


def _last_reads(operations: Sequence[Operation], fused: Collection[int]) -> dict[int, int]:
    """Maps each value to the index of its last reader; a fused operation reads in its fusion."""
    behind: dict[int, frozenset[int]] = {}
    last: dict[int, int] = {}
    for index, op in enumerate(operations):
        found = frozenset().union(*(behind.get(v, frozenset({v})) for v in op.inputs))
        if index in fused:
            behind.update(dict.fromkeys(op.outputs, found))
        else:
            last.update(dict.fromkeys(found, index))
    return last


def _is_fusible(op: Operation) -> bool:
    return op.name in CHEAP or op.name in DEAR


def _needed(operations: Sequence[Operation], kept: Collection[int]) -> list[Operation]:
    """Returns the operations that the kept values need."""
    needed, found = set(kept), []
    for op in reversed(operations):
        if needed & set(op.outputs):
            needed.update(op.inputs)
            found.append(op)
    return found[::-1]


def _delayed(operations: Sequence[Operation]) -> list[Operation]:
    """Moves each gather, and each cast of a gathered value, to where it is first read.

    JAX puts all gathers of a rematerialised function first, but compilers run each where it is
    used.
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
