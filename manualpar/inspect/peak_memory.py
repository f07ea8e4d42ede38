"""Estimates which arrays a program holds at the moment when it holds the most bytes.

The program is the result of `manualpar.inspect.peak_memory`: operations on numbered values. They
run in the order of the program, except that a gather runs where its result is first read. On CPUs
they run in the order of `manualpar.inspect.peak_memory`. An array is held from the operation
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

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from manualpar.core.tracing.jaxprs import COMPOSITE, TYPE_CASTS, inner_jaxprs, scan_sizes
from manualpar.inspect.communication import KIND_OF_PRIMITIVE

# -------------------------------------------------------------------------------------------------
# Flattens a jaxpr to a list of operations on numbered arrays, as input for a model of memory.
#
# A jaxpr nests jitted functions, `shard_map`s, rematerialised functions and custom derivatives.
# XLA sees one function, so this module inlines them. Only the bodies of `scan`, `while` and `cond`
# get lists of their own, because they may run several times or never. An equation that only
# changes the view of an array (a reshape, a transposition, a cast between types of `check_vma`) is
# not an operation: its result gets the number of its operand.
#
# Bytes are per device. Shapes inside `shard_map` are per device; shapes outside are global. To get
# the bytes of a global array, this module estimates into how many parts it is split. Arguments,
# outputs of `shard_map` and sharding constraints give this number; other results have as many
# parts as their largest operand.


AnyJaxpr = ClosedJaxpr | Jaxpr
# Primitives whose result uses the operand's memory. Transpositions are among them because XLA
# chooses layouts, and dot products take operands in any layout (but see `_transposed`).
_VIEW_WORDS = """
copy copy_p expand_dims mesh_cast name optimization_barrier relayout reshape reshard squeeze
stop_gradient transpose
"""
VIEWS = TYPE_CASTS.union(_VIEW_WORDS.split())
# Primitives that contain one jaxpr, which is inlined.
_INLINED_WORDS = """
jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call
custom_vjp_call_jaxpr shard_map xla_metadata_call
"""
INLINED = frozenset({*_INLINED_WORDS.split(), COMPOSITE})
# Primitives whose results may take the place of the operands at the same positions.
_IN_PLACE_WORDS = """
dynamic_update_slice pmax pmin psum psum_invariant scatter scatter-add scatter-mul scatter-sub
while
"""
IN_PLACE = frozenset(_IN_PLACE_WORDS.split())


@dataclasses.dataclass
class FlatValue:
    """An array: its bytes and elements on a device, and a label for its use, such as `batch`.

    `parts` is the number of devices that a global array is split over; it is 1 inside `shard_map`.
    """

    size: int
    elements: int
    parts: int
    label: str


@dataclasses.dataclass(frozen=True)
class Body:
    """The operations of a program, of a loop's iteration or of a branch.

    `results` are the numbers of the results; `None` stands for a constant. `carried` pairs an
    argument of a loop's iteration with the result that takes its place in the next iteration.
    """

    operations: Sequence["Operation"]
    results: Sequence[int | None]
    carried: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation; `inputs` and `outputs` are numbers of arrays, without constants.

    `name` is the name of the primitive, or `store` for a write into a part of an existing array.
    `written_over` pairs an input with an output that may be stored in the input's memory. It is
    empty for elementwise operations, because any output may replace any input of the same size.
    """

    name: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple[Body, ...] = ()
    written_over: tuple[tuple[int, int], ...] = ()


class FlatProgram:
    """Flattens jaxprs; `values` lists the arrays of all flattened jaxprs by number."""

    def __init__(self) -> None:
        self.values: list[FlatValue] = []
        self._is_local = False

    def add_value(self, aval: Any, *, parts: int = 1, label: str = "") -> int:
        """Adds an array that is split into `parts` parts, and returns its number."""
        shape = getattr(aval, "shape", ())
        elements = -(-math.prod(shape) // parts)
        size = elements * getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.values.append(FlatValue(size, elements, parts, label))
        return len(self.values) - 1

    def flatten(
        self, jaxpr: AnyJaxpr, inputs: Sequence[int | None], *, scope: str = "", label: str = ""
    ) -> Body:
        """Flattens a jaxpr; its constants get `label`, and `None` in `inputs` is a constant."""
        operations: list[Operation] = []
        return Body(operations, self._inline(jaxpr, inputs, operations, scope=scope, label=label))

    def _inline(
        self,
        jaxpr: AnyJaxpr,
        inputs: Sequence[int | None],
        operations: list[Operation],
        *,
        scope: str,
        label: str = "",
    ) -> list[int | None]:
        """Appends the operations of a jaxpr; returns the numbers of its results."""
        jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        known: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: self.add_value(v.aval, label=label) for v in jaxpr.constvars}

        def read(variable: Any) -> int | None:
            return None if isinstance(variable, Literal) else known[variable]

        for eqn in jaxpr.eqns:
            inside = f"{scope}/{eqn.source_info.name_stack}".strip("/")
            outputs = self._equation(eqn, [read(v) for v in eqn.invars], operations, inside)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: Any, values: list[int | None], operations: list[Operation], scope: str
    ) -> list[int | None]:
        """Appends the operations of an equation; returns the numbers of its results."""
        name = eqn.primitive.name
        if name in VIEWS or (
            name in ("broadcast_in_dim", "convert_element_type") and _is_view(eqn)
        ):
            return values[: len(eqn.outvars)]
        if name in INLINED:
            was_local, self._is_local = self._is_local, self._is_local or name == "shard_map"
            _, inner = next(inner_jaxprs(eqn))
            outputs = self._inline(inner, values, operations, scope=scope)
            self._is_local = was_local
            if name == "shard_map":
                self._count_parts(outputs, eqn.outvars)
            return outputs
        if name == "scan":
            return self._scan(eqn, values, operations, scope)
        if name == "dot_general":
            sides = zip((0, 1), values, strict=True)
            values = [self._transposed(eqn, side, x, operations, scope) for side, x in sides]
        made = [self.add_value(v.aval, parts=self._parts(eqn, values)) for v in eqn.outvars]
        bodies: tuple[Body, ...] = ()
        starts = values
        if name == "while":  # Without its condition, which holds almost no memory.
            skipped = eqn.params["cond_nconsts"]
            first = skipped + eqn.params["body_nconsts"]
            inner, starts = eqn.params["body_jaxpr"], values[first:]
            carry = self._add_like(inner.jaxpr.invars[first - skipped :], starts)
            body = self.flatten(inner, [*values[skipped:first], *carry], scope=scope)
            bodies = (dataclasses.replace(body, carried=_pairs(carry, body.results)),)
        elif name == "cond":
            branches = eqn.params["branches"]
            bodies = tuple(self.flatten(x, values[1:], scope=scope) for x in branches)
            starts = _written_in_place(bodies, values[1:], len(made))
        over = _pairs(starts, made) if name in (*IN_PLACE, "cond") else ()
        operations.append(
            Operation(name, scope, _without_constants(values), tuple(made), bodies, over)
        )
        return [*made]

    def _transposed(
        self, eqn: Any, side: int, value: int | None, operations: list[Operation], scope: str
    ) -> int | None:
        """Transposes an operand of a product if XLA has to reshape several of its dims."""
        contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
        shapes = [variable.aval.shape for variable in eqn.invars]
        dims = range(len(shapes[side]))
        free = [dim for dim in dims if dim not in (*contracted, *batch)]
        order = [*batch, *free, *contracted] if side == 0 else [*batch, *contracted, *free]
        order = [dim for dim in order if shapes[side][dim] > 1]
        is_plain = len(contracted) == 1 and max(map(len, shapes)) <= len(batch) + 2
        if value is None or not batch or is_plain or order == sorted(order):
            return value
        new = self._add_like([eqn.invars[side]], [value])
        operations.append(Operation("transpose", scope, (value,), (*new,)))
        return new[0]

    def _scan(
        self, eqn: Any, values: list[int | None], operations: list[Operation], scope: str
    ) -> list[int | None]:
        """Appends a loop, whose iterations write into the arrays of stacked results."""
        inner: ClosedJaxpr = eqn.params["jaxpr"]
        if eqn.params["length"] == 1:  # Compilers make no loop of one iteration.
            return self._inline(inner, values, operations, scope=scope)
        first, size = scan_sizes(eqn.params)
        arguments = self._add_like(inner.jaxpr.invars[first:], values[first:])
        carry, slices = arguments[:size], arguments[size:]
        body = [
            Operation("dynamic_slice", scope, _without_constants([stacked]), (part,))
            for stacked, part in zip(values[first + size :], slices, strict=True)
        ]
        outputs = self._inline(inner, [*values[:first], *arguments], body, scope=scope)
        made = self._add_like(eqn.outvars, outputs)
        body = _with_stores(body, outputs[size:], made[size:], scope)
        loop = Body(body, outputs, _pairs(carry, outputs[:size]))
        over = _pairs(values[first : first + size], made[:size])
        operations.append(
            Operation("scan", scope, _without_constants(values), tuple(made), (loop,), over)
        )
        return [*made]

    def _add_like(self, variables: Sequence[Any], values: Sequence[int | None]) -> list[int]:
        """Adds a value for each variable, split like the value at the same position of `values`."""
        return [
            self.add_value(
                variable.aval,
                parts=1 if value is None or self._is_local else self.values[value].parts,
            )
            for variable, value in zip(variables, values, strict=True)
        ]

    def _parts(self, eqn: Any, values: list[int | None]) -> int:
        """Returns the number of parts into which the results of an equation are split."""
        if self._is_local:
            return 1
        shape = eqn.outvars[0].aval.shape
        sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else 0
        if isinstance(sharding, jax.sharding.NamedSharding):
            return math.prod(shape) // max(math.prod(sharding.shard_shape(shape)), 1) or 1
        operands = [
            (math.prod(v.aval.shape), self.values[x].parts)
            for v, x in zip(eqn.invars, values, strict=True)
            if x is not None
        ]
        largest, parts = max(operands, default=(0, 1))
        # A much smaller result is probably a sum over the split dim, and so has only one part.
        return parts if math.prod(shape) * 2 > largest else 1

    def _count_parts(self, outputs: Sequence[int | None], variables: Sequence[Any]) -> None:
        """Sets the number of parts of the values that leave a `shard_map`."""
        for value, variable in zip(outputs, variables, strict=True):
            if value is not None:
                on_device = max(self.values[value].elements, 1)
                self.values[value].parts = max(math.prod(variable.aval.shape) // on_device, 1)


def _with_stores(
    body: list[Operation], outputs: Sequence[int | None], made: Sequence[int], scope: str
) -> list[Operation]:
    """Adds a store of each stacked value to a loop's body, just after the value is computed."""
    stores: dict[int, list[Operation]] = {}
    for value, stacked in zip(outputs, made, strict=True):
        if value is not None:
            stores.setdefault(value, []).append(Operation("store", scope, (value,), (stacked,)))
    produced = {value for operation in body for value in operation.outputs}
    stored = [store for value in stores if value not in produced for store in stores[value]]
    for operation in body:
        stored.append(operation)
        stored += [store for value in operation.outputs for store in stores.get(value, ())]
    return stored


def _written_in_place(
    branches: Sequence[Body], operands: Sequence[int | None], results: int
) -> list[int | None]:
    """Returns, for each result of a `cond`, the operand that all branches return or overwrite.

    It is `None` if the branches differ, or if the result is a new array.
    """

    def origin(body: Body, value: int | None) -> int | None:
        before = {new: old for op in body.operations for old, new in op.written_over}
        while value in before:
            value = before[value]
        return value

    origins = [{origin(body, body.results[i]) for body in branches} for i in range(results)]
    return [next(iter(x)) if len(x) == 1 and x <= {*operands} else None for x in origins]


def _is_view(eqn: Any) -> bool:
    """Returns whether a result has the dtype and the number of elements of the operand."""
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return bool(before.size == after.size and before.dtype == after.dtype)


def _without_constants(values: Sequence[int | None]) -> tuple[int, ...]:
    """Drops constants (`None`) and repeated numbers."""
    return tuple(dict.fromkeys(value for value in values if value is not None))


def _pairs(old: Sequence[int | None], new: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """Zips numbers of arrays, and drops pairs with a constant (`None`)."""
    both = zip(old, new, strict=False)
    return tuple((x, y) for x, y in both if x is not None and y is not None)


# -------------------------------------------------------------------------------------------------
# Models the order in which XLA's compiler for CPUs runs the operations of a program.
#
# `manualpar.inspect.peak_memory` needs this order to know which arrays are held at the same time.
# We read the rules off the schedules and live ranges of compiled steps (jax 0.10.2,
# `--xla_dump_to`):
#
# - Operations run breadth first, each as soon as its operands are computed, so that many threads
# have
#   work. An operation that needs only arguments of the program runs at the beginning, and its
#   result
#   is held until it is read. Examples are the gathers outside of loops, scores that a backward pass
#   computes again, and the allocations into which loops stack their results.
# - A gather or a cast does not run twice on the same array. But a loop does not use gathers from
#   outside of the loop.
# - All-reduces that do not depend on each other become one all-reduce, which does not write over
# its
#   operands.
# - A matrix product with a 16-bit result is computed in float32, from operands that are cast. If a
#   loop takes slices of a 16-bit array for a product, the complete array is cast before the loop.


PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
_CAST = "convert_element_type"


def as_compiled(
    operations: Sequence[Operation], values: list[FlatValue], kept: Collection[int]
) -> list[Operation]:
    """Applies the compiler's changes to a list of operations, except the order.

    The arrays that the changes add are appended to `values`.

    Args:
      operations: The operations, in their order.
      values: Every value, by number.
      kept: The values that are held to the end; they keep their numbers.
    """
    merged = _without_repeats(operations, values, kept)
    return _widened(_with_stacks(_with_joint_reductions(merged), values), values)


def eager_order(operations: Sequence[Operation], fused: Collection[int]) -> list[int]:
    """Returns the indices of operations in breadth-first order.

    The operations in `fused` come just before the first operation that uses them.
    """
    made_at = {v: i for i, op in enumerate(operations) for v in op.outputs}
    inside: dict[int, set[int]] = {}  # Index of an operation -> it and all fused into it.
    awaited: dict[int, set[int]] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(operations):
        makers = {made_at[v] for v in op.inputs if v in made_at}
        inner = {maker for maker in makers if maker in fused}
        inside[index] = {index}.union(*(inside[maker] for maker in inner))
        awaited[index] = (makers - inner).union(*(awaited[maker] for maker in inner))
        if index not in fused:
            for maker in awaited[index]:
                readers[maker].append(index)
    ready = deque(i for i in range(len(operations)) if i not in fused and not awaited[i])
    order: dict[int, None] = {}
    while ready:
        index = ready.popleft()
        order |= dict.fromkeys(sorted(inside[index]))
        for reader in readers[index]:
            awaited[reader].discard(index)
            if not awaited[reader]:
                ready.append(reader)
    return list(order)


def _without_repeats(
    operations: Sequence[Operation], values: Sequence[FlatValue], kept: Collection[int]
) -> list[Operation]:
    same: dict[int, int] = {}
    before: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}
    found = []
    for op in operations:
        inputs = tuple(dict.fromkeys(same.get(v, v) for v in op.inputs))
        over = tuple((same.get(old, old), new) for old, new in op.written_over)
        is_gather = KIND_OF_PRIMITIVE.get(op.name) == "all_gather"
        if (is_gather or op.name == _CAST) and not any(v in kept for v in op.outputs):
            alike = before.setdefault((op.name, inputs, values[op.outputs[0]].size), op.outputs)
            if alike != op.outputs:
                same |= dict(zip(op.outputs, alike, strict=True))
                continue
        found.append(dataclasses.replace(op, inputs=inputs, written_over=over))
    return found


def _with_joint_reductions(operations: Sequence[Operation]) -> list[Operation]:
    after: dict[int, int] = {}  # Value -> length of the longest chain of reductions before it.
    others: defaultdict[int, list[Operation]] = defaultdict(list)
    reductions: defaultdict[int, list[Operation]] = defaultdict(list)
    for op in operations:
        level = max((after.get(v, 0) for v in op.inputs), default=0)
        is_reduction = KIND_OF_PRIMITIVE.get(op.name) == "all_reduce"
        (reductions if is_reduction else others)[level].append(op)
        after |= dict.fromkeys(op.outputs, level + is_reduction)
    found = []
    for level in range(max([*others, *reductions], default=-1) + 1):
        found += others[level]
        if alike := reductions[level]:
            inputs = tuple(dict.fromkeys(v for op in alike for v in op.inputs))
            outputs = tuple(v for op in alike for v in op.outputs)
            found.append(Operation(alike[0].name, alike[0].scope, inputs, outputs))
    return found


def _with_stacks(operations: Sequence[Operation], values: list[FlatValue]) -> list[Operation]:
    """Adds the allocation of each array into which a loop stacks its results."""
    found: list[Operation] = []
    for op in operations:
        written = {new for _, new in op.written_over}
        stacked = [v for v in op.outputs if v not in written] if op.name == "scan" else []
        places = [_add(values, values[v].size, v) for v in stacked]
        found += [Operation("empty", op.scope, (), (place,)) for place in places]
        over = (*op.written_over, *zip(places, stacked, strict=True))
        found.append(dataclasses.replace(op, inputs=(*op.inputs, *places), written_over=over))
    return found


def _widened(operations: Sequence[Operation], values: list[FlatValue]) -> list[Operation]:
    wide: dict[int, int] = {}
    found: list[Operation] = []
    for op in operations:

        def cast(value: int, scope: str = op.scope) -> int:
            if values[value].size != 2 * values[value].elements:
                return value
            if value not in wide:
                wide[value] = _add(values, 2 * values[value].size, value)
                found.append(Operation(_CAST, scope, (value,), (wide[value],)))
            return wide[value]

        if op.name in PRODUCTS and values[op.outputs[0]].size == 2 * values[op.outputs[0]].elements:
            product = _add(values, 2 * values[op.outputs[0]].size, op.outputs[0])
            inputs = tuple(map(cast, op.inputs))
            found.append(dataclasses.replace(op, inputs=inputs, outputs=(product,)))
            found.append(Operation(_CAST, op.scope, (product,), op.outputs))
        elif op.name == "scan":
            found.append(_with_wide_slices(op, cast))
        else:
            found.append(op)
    return found


def _with_wide_slices(loop: Operation, cast: Callable[[int], int]) -> Operation:
    """Casts the arrays of which a loop takes slices before the loop, by the function `cast`."""
    [body] = loop.bodies
    stacks = {x.inputs[0] for x in body.operations if x.name == "dynamic_slice"} & {*loop.inputs}
    wide = {stack: cast(stack) for stack in loop.inputs if stack in stacks}
    inner = [
        dataclasses.replace(op, inputs=(wide[op.inputs[0]],))
        if op.name == "dynamic_slice" and op.inputs[0] in wide
        else op
        for op in body.operations
    ]
    inputs = tuple(wide.get(v, v) for v in loop.inputs)
    body = dataclasses.replace(body, operations=inner)
    return dataclasses.replace(loop, inputs=inputs, bodies=(body,))


def _add(values: list[FlatValue], size: int, like: int) -> int:
    values.append(dataclasses.replace(values[like], size=size))
    return len(values) - 1


# -------------------------------------------------------------------------------------------------


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
      replaced: Pairs of an argument and the new value that is stored in its memory, such as the old
        and the new parameters. The new value is held to the end.
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
