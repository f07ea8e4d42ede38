"""Flattens a jaxpr to a list of operations on numbered arrays, as input for a model of memory.

A jaxpr nests jitted functions, `shard_map`s, rematerialised functions and custom derivatives. XLA
sees one function, so this module inlines them. Only the bodies of `scan`, `while` and `cond` get
lists of their own, because they may run several times or never. An equation that only changes the
view of an array (a reshape, a transposition, a cast between types of `check_vma`) is not an
operation: its result gets the number of its operand.

Bytes are per device. Shapes inside `shard_map` are per device; shapes outside are global. To get
the bytes of a global array, this module estimates into how many parts it is split. Arguments,
outputs of `shard_map` and sharding constraints give this number; other results have as many parts
as their largest operand.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from manualpar.core.tracing.jaxprs import COMPOSITE, TYPE_CASTS, inner_jaxprs, scan_sizes

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
            carry = self._like(inner.jaxpr.invars[first - skipped :], starts)
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
        new = self._like([eqn.invars[side]], [value])
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
        arguments = self._like(inner.jaxpr.invars[first:], values[first:])
        carry, slices = arguments[:size], arguments[size:]
        body = [
            Operation("dynamic_slice", scope, _without_constants([stacked]), (part,))
            for stacked, part in zip(values[first + size :], slices, strict=True)
        ]
        outputs = self._inline(inner, [*values[:first], *arguments], body, scope=scope)
        made = self._like(eqn.outvars, outputs)
        body = _with_stores(body, outputs[size:], made[size:], scope)
        loop = Body(body, outputs, _pairs(carry, outputs[:size]))
        over = _pairs(values[first : first + size], made[:size])
        operations.append(
            Operation("scan", scope, _without_constants(values), tuple(made), (loop,), over)
        )
        return [*made]

    def _like(self, variables: Sequence[Any], values: Sequence[int | None]) -> list[int]:
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
