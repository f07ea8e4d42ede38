"""Models the order in which XLA's compiler for CPUs runs the operations of a program.

`manualpar.inspect.peak_memory` needs this order to know which arrays are held at the same time. We
read the rules off the schedules and live ranges of compiled steps (jax 0.10.2, `--xla_dump_to`):

- Operations run breadth first, each as soon as its operands are computed, so that many threads have
  work. An operation that needs only arguments of the program runs at the beginning, and its result
  is held until it is read. Examples are the gathers outside of loops, scores that a backward pass
  computes again, and the allocations into which loops stack their results.
- A gather or a cast does not run twice on the same array. But a loop does not use gathers from
  outside of the loop.
- All-reduces that do not depend on each other become one all-reduce, which does not write over its
  operands.
- A matrix product with a 16-bit result is computed in float32, from operands that are cast. If a
  loop takes slices of a 16-bit array for a product, the complete array is cast before the loop.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence

from manualpar.inspect.communication import KIND_OF_PRIMITIVE
from manualpar.inspect.flat_program import FlatValue, Operation

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
