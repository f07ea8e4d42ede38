"""A traced program as a straight list of operations on numbered values, each with its bytes.

A jaxpr nests: a jitted function, a `shard_map`, what is recomputed and a function with a gradient
of its own are jaxprs inside of equations, where XLA sees one function. Here they are written out in
line, so that only what runs several times or perhaps (`scan`, `while`, `cond`) has a list of its
own inside. What only says anew how an array is looked at (a reshape, a transposition, a cast
between the types of `check_vma`) is no operation: its result is the value of its operand.

Bytes are those of one device. Inside `shard_map` shapes are a device's. Outside they are global,
and how many parts an array is in follows from the arguments, from what leaves a `shard_map` and
from sharding constraints: the result of an operation is in as many parts as its largest operand.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Whose result is the operand, as far as memory is concerned. A transposition is one because XLA
# chooses layouts, and dot products take their operands in any.
VIEWS = frozenset(
    {
        "copy",
        "copy_p",
        "expand_dims",
        "mesh_cast",
        "name",
        "optimization_barrier",
        "preduced",
        "pvary",
        "reduced_vary_cast_p",
        "reshape",
        "reshard",
        "squeeze",
        "stop_gradient",
        "transpose",
        "vary_unreduced_cast_p",
    }
)
# Run in line: primitives with one function inside, by the parameter that holds it.
INLINED: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "shard_map": "jaxpr",
}

# Their results may lie where their operands lay, the first in the place of the first.
_IN_PLACE_WORDS = """
dynamic_update_slice pmax pmin psum psum_invariant scatter scatter-add scatter-mul scatter-sub
while
"""
IN_PLACE = frozenset(_IN_PLACE_WORDS.split())


@dataclasses.dataclass
class Value:
    """An array.

    Attributes:
      size: Its bytes on a device.
      elements: Its elements there.
      parts: How many devices it is split over, where shapes are global; 1 inside of `shard_map`.
      label: What it is for.
    """

    size: int
    elements: int
    parts: int
    label: str


@dataclasses.dataclass(frozen=True)
class Body:
    """A function inside of a loop or a branch.

    Attributes:
      operations: What it does.
      results: The values that it results in, `None` for a constant.
      carried: Pairs of values, one that comes in and the one that takes its place.
    """

    operations: tuple["Operation", ...]
    results: tuple[int | None, ...]
    carried: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Operation:
    """What reads some values and makes others.

    Attributes:
      name: The primitive's name; `store` writes a part of an array that is there already.
      scope: The named scopes around it.
      inputs: The values it reads, constants left out.
      outputs: The values it makes.
      bodies: The functions inside.
      written_over: Pairs of a value it reads and one it makes that may lie in its place, besides
        those of what is elementwise.
    """

    name: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple[Body, ...] = ()
    written_over: tuple[tuple[int, int], ...] = ()


class Operations:
    """Writes a jaxpr out.

    Attributes:
      values: All values, by their number.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._is_local = False

    def value(self, aval: Any, *, parts: int = 1, label: str = "") -> int:
        """Numbers a new value."""
        shape = getattr(aval, "shape", ())
        elements = -(-math.prod(shape) // parts)
        size = elements * getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.values.append(Value(size, elements, parts, label))
        return len(self.values) - 1

    def write_out(
        self, closed: ClosedJaxpr, inputs: Sequence[int], *, label: str = ""
    ) -> tuple[tuple[Operation, ...], list[int | None]]:
        """Writes out a whole program.

        Args:
          closed: The program.
          inputs: The values of its arguments.
          label: Of the constants that it contains.

        Returns:
          The operations, and the values of its results, `None` for a constant.
        """
        operations: list[Operation] = []
        consts = [self.value(v.aval, label=label) for v in closed.jaxpr.constvars]
        outputs = self._inline(closed.jaxpr, [*consts, *inputs], operations, scope="")
        return tuple(operations), outputs

    def _inline(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[int | None],
        operations: list[Operation],
        *,
        scope: str,
    ) -> list[int | None]:
        """Adds a jaxpr's operations; returns the values of its results."""
        variables = (*jaxpr.constvars, *jaxpr.invars)
        known: dict[Any, int | None] = dict(zip(variables, inputs, strict=True))

        def read(variable: Any) -> int | None:
            return None if isinstance(variable, Literal) else known[variable]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            inside = f"{scope}/{eqn.source_info.name_stack}".strip("/")
            outputs = self._equation(eqn, values, operations, inside)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: Any, values: list[int | None], operations: list[Operation], scope: str
    ) -> list[int | None]:
        """Adds an equation; returns the values of its results."""
        name = eqn.primitive.name
        if name in VIEWS or (name in ("broadcast_in_dim", "convert_element_type") and _same(eqn)):
            return [*values[: len(eqn.outvars)]]
        if name in INLINED:
            inner = eqn.params[INLINED[name]]
            jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            consts = [self.value(v.aval) for v in jaxpr.constvars]
            if name != "shard_map":
                return self._inline(jaxpr, [*consts, *values], operations, scope=scope)
            outside, self._is_local = self._is_local, True
            outputs = self._inline(jaxpr, [*consts, *values], operations, scope=scope)
            self._is_local = outside
            self._count_parts(outputs, eqn.outvars)
            return outputs
        if name == "scan":
            return self._scan(eqn, values, operations, scope)
        made = [self.value(v.aval, parts=self._parts(eqn, values)) for v in eqn.outvars]
        bodies: tuple[Body, ...] = ()
        starts = values
        if name == "while":
            starts = values[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
            bodies = (self._while(eqn, values, scope),)
        elif name == "cond":
            bodies = tuple(
                self._branch(branch, values[1:], scope) for branch in eqn.params["branches"]
            )
        over = _pairs(starts if name == "while" else values, made) if name in IN_PLACE else ()
        operations.append(Operation(name, scope, _known(values), tuple(made), bodies, over))
        return [*made]

    def _scan(
        self, eqn: Any, values: list[int | None], operations: list[Operation], scope: str
    ) -> list[int | None]:
        """Adds a loop: results that are stacked are written into their array in each iteration."""
        inner: ClosedJaxpr = eqn.params["jaxpr"]
        first = eqn.params["num_consts"]
        last = first + eqn.params["num_carry"]
        carry = [
            self._like(v, x)
            for v, x in zip(inner.jaxpr.invars[first:last], values[first:last], strict=True)
        ]
        body: list[Operation] = []
        slices = []
        for variable, x in zip(inner.jaxpr.invars[last:], values[last:], strict=True):
            slices.append(self._like(variable, x))
            body.append(Operation("dynamic_slice", scope, _known([x]), (slices[-1],)))
        consts = [self.value(v.aval) for v in inner.jaxpr.constvars]
        arguments = [*consts, *values[:first], *carry, *slices]
        outputs = self._inline(inner.jaxpr, arguments, body, scope=scope)
        made = [self._like(v, x) for v, x in zip(eqn.outvars, outputs, strict=True)]
        size = last - first
        body = _with_stores(body, outputs[size:], made[size:], scope)
        loop = Body(tuple(body), tuple(outputs), _pairs(carry, outputs[:size]))
        over = _pairs(values[first:last], made[:size])
        operations.append(Operation("scan", scope, _known(values), tuple(made), (loop,), over))
        return [*made]

    def _while(self, eqn: Any, values: list[int | None], scope: str) -> Body:
        """The body of a loop that ends when it does; its condition holds next to nothing."""
        inner: ClosedJaxpr = eqn.params["body_jaxpr"]
        skipped, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, starts = values[skipped : skipped + count], values[skipped + count :]
        carry = [self._like(v, x) for v, x in zip(inner.jaxpr.invars[count:], starts, strict=True)]
        body: list[Operation] = []
        own = [self.value(v.aval) for v in inner.jaxpr.constvars]
        outputs = self._inline(inner.jaxpr, [*own, *consts, *carry], body, scope=scope)
        return Body(tuple(body), tuple(outputs), _pairs(carry, outputs))

    def _branch(self, branch: ClosedJaxpr, values: list[int | None], scope: str) -> Body:
        """One of the functions of a `cond`."""
        operations: list[Operation] = []
        own = [self.value(v.aval) for v in branch.jaxpr.constvars]
        outputs = self._inline(branch.jaxpr, [*own, *values], operations, scope=scope)
        return Body(tuple(operations), tuple(outputs))

    def _like(self, variable: Any, value: int | None) -> int:
        """A value of a variable's shape, in as many parts as another."""
        if value is None or self._is_local:
            return self.value(variable.aval)
        return self.value(variable.aval, parts=self.values[value].parts)

    def _parts(self, eqn: Any, values: list[int | None]) -> int:
        """How many parts an equation's results are in."""
        if self._is_local:
            return 1
        sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else 0
        if isinstance(sharding, jax.sharding.NamedSharding):
            shape = eqn.outvars[0].aval.shape
            return math.prod(shape) // max(math.prod(sharding.shard_shape(shape)), 1) or 1
        operands = [
            (math.prod(v.aval.shape), self.values[x].parts)
            for v, x in zip(eqn.invars, values, strict=True)
            if x is not None
        ]
        largest, parts = max(operands, default=(0, 1))
        # A sum over what is split is whole on every device.
        return parts if math.prod(eqn.outvars[0].aval.shape) * 2 > largest else 1

    def _count_parts(self, outputs: Sequence[int | None], variables: Sequence[Any]) -> None:
        """Notes of what leaves a `shard_map` how many parts it is in."""
        for value, variable in zip(outputs, variables, strict=True):
            if value is not None:
                local = max(self.values[value].elements, 1)
                self.values[value].parts = max(math.prod(variable.aval.shape) // local, 1)


def _with_stores(
    body: list[Operation], outputs: Sequence[int | None], made: Sequence[int], scope: str
) -> list[Operation]:
    """A loop's body in which each value to be stacked is written as soon as it is there."""
    waiting: dict[int, list[int]] = {}
    for value, stacked in zip(outputs, made, strict=True):
        if value is not None:
            waiting.setdefault(value, []).append(stacked)
    stored: list[Operation] = []

    def store(value: int) -> None:
        for stacked in waiting.pop(value, ()):
            stored.append(Operation("store", scope, (value,), (stacked,)))

    produced = {value for operation in body for value in operation.outputs}
    for value in [value for value in waiting if value not in produced]:
        store(value)
    for operation in body:
        stored.append(operation)
        for value in operation.outputs:
            store(value)
    return stored


def _same(eqn: Any) -> bool:
    """Whether a result has the operand's elements and dtype."""
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return before.size == after.size and before.dtype == after.dtype


def _known(values: Sequence[int | None]) -> tuple[int, ...]:
    """The values that are not constants, each once."""
    return tuple(dict.fromkeys(value for value in values if value is not None))


def _pairs(old: Sequence[int | None], new: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """Pairs of values, without those that are constants."""
    both = zip(old, new, strict=False)
    return tuple((x, y) for x, y in both if x is not None and y is not None)
