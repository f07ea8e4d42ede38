"""Walks the traces on a device's positions and on the full sequence; finds each value's kind.

Invariants: an operation that is not known to be right is refused. Code inside
`named_scope("context_parallel")` is trusted, because its author handles the axis: a result is
*split* if its shapes in the two traces differ, and *same* otherwise. The collectives of sequence
parallelism over another axis are trusted too. A sum over the context axis turns a value of kind
*sum* into the kind *same*, also in trusted code.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from manualpar.core.checks.paired_programs import (
    CASTS,
    check_same_operation,
    inner_programs,
    module_of_equation,
    paired,
    place_of,
    stands_in,
)
from manualpar.core.checks.sequence_operations import SUMS, SequenceOperations, named_axes
from manualpar.core.checks.sequence_values import SplitValue, added
from manualpar.core.checks.shard_operations import (
    Reason,
    WrongOnShardsError,
    check_operation,
    refuse,
    split_dim,
)
from manualpar.core.checks.value_numbers import ValueNumbers
from manualpar.core.tracing.jaxprs import all_equations, inner_jaxprs, scan_sizes
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, SEQUENCE_SCOPE, purpose_of

_SCOPES = frozenset({CONTEXT_SCOPE, SEQUENCE_SCOPE})
_INLINE = frozenset(
    """
    call_hi_primitive checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit remat2
    """.split()  # noqa: SIM905
)

# A value's kind, and its value number, see `value_numbers`.
Numbered = tuple[SplitValue, int]


class SequenceWalk:
    """Walks through a pair of traces: on a device's positions, and on the full sequence.

    Args:
      axis: The mesh axis over which positions are divided.
      devices: The number of devices along `axis`.
      mends: For each `Reason`, the sentence of an error message that says how to correct the
        mistake.
      complaint: The beginning of each error message.
    """

    def __init__(
        self, axis: str, devices: int, mends: Mapping[Reason, str], complaint: str
    ) -> None:
        self._axis, self._devices = axis, devices
        self._mends, self._complaint = mends, complaint
        self._numbers = ValueNumbers()
        self._operations = SequenceOperations(axis, devices, self._numbers)
        self._values: dict[Any, SplitValue] = {}
        self._constants: dict[Any, Any] = {}
        self._aliases: dict[Any, Any] = {}

    def outputs(self, part: ClosedJaxpr, whole: ClosedJaxpr) -> list[Numbered]:
        """Finds the `SplitValue` and the value number of each result of a program.

        Args:
          part: The trace on a device's positions. An argument is *split* if its shapes in `part`
            and `whole` differ, and *same* otherwise.
          whole: The trace on all positions.

        Raises:
          ValueError: An operation is wrong or unknown. The message names the operation's module and
            line.
        """
        return self._walk(part, whole, None, "")

    def _walk(
        self, part: Any, whole: Any, inputs: Sequence[Numbered] | None, path: str
    ) -> list[Numbered]:
        """Finds what `outputs` finds, for a program in the module at `path`.

        `inputs` are the `SplitValue`s and value numbers of the program's arguments; `None` to
        derive them from the shapes.
        """
        part, whole = (self._record_constants(program) for program in (part, whole))
        if inputs is not None:
            for variable, numbered in zip(part.invars, inputs, strict=True):
                self._set(variable, numbered)
        equations = self._equations(part, path), self._equations(whole, None)
        for pair in paired(*equations):
            eqn = pair[0] or pair[1]
            with self._naming(eqn, path) as where:
                check_same_operation(*pair)
                self._visit(*pair, where)
        return [self._read(*pair) for pair in zip(part.outvars, whole.outvars, strict=True)]

    def _record_constants(self, program: Any) -> Jaxpr:
        if not isinstance(program, ClosedJaxpr):
            return program
        self._constants.update(zip(program.jaxpr.constvars, program.consts, strict=True))
        return program.jaxpr

    @contextlib.contextmanager
    def _naming(self, eqn: Any, path: str) -> Iterator[str]:
        """Yields the path of an equation's module; adds the path to errors in the context."""
        where = "/".join(filter(None, (path, module_of_equation(eqn, _SCOPES))))
        try:
            yield where
        except WrongOnShardsError as error:
            place = f"{f'module {where!r}' if where else 'the loss'}{place_of(eqn)}"
            message = f"{self._complaint} {place} {error.mended(self._mends)}"
            raise ValueError(message) from None

    def _equations(self, jaxpr: Jaxpr, path: str | None) -> Iterator[Any]:
        """Yields the equations whose results are used, without casts and trusted code.

        Trusted code has no counterpart in the trace of the full sequence. `_trust` checks trusted
        code in the trace on a device's positions, the only trace for which `path` is given.
        """
        used = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        live = []
        for eqn in reversed(jaxpr.eqns):
            if not used.isdisjoint(eqn.outvars):
                live.append(eqn)
                used.update(v for v in eqn.invars if not isinstance(v, Literal))
        for eqn in reversed(live):
            if eqn.primitive.name in CASTS:
                self._aliases.update(zip(eqn.outvars, map(self._origin, eqn.invars), strict=True))
            elif not stands_in(eqn, _SCOPES):
                yield eqn
            elif path is not None:
                with self._naming(eqn, path):
                    self._trust(eqn)

    def _trust(self, eqn: Any) -> None:
        """Checks the axes and the inputs of an equation in trusted code."""
        inputs = [self._known(x) for x in eqn.invars]
        named = {axis for inner in _with_inner(eqn) for axis in named_axes(inner)}
        purpose = purpose_of(str(eqn.source_info.name_stack))
        # A layer of experts is in the context scope, so experts may be split over the axis.
        if self._axis in named and not stands_in(eqn, frozenset({CONTEXT_SCOPE})):
            refuse(f"splits layers over {self._axis!r}", "axis")
        if purpose == CONTEXT_SCOPE and named:
            if self._axis not in named:
                refuse(f"is split over {sorted(named)} in Context", "axis")
            if eqn.primitive.name in SUMS:
                for x, value, y in zip(eqn.invars, inputs, eqn.outvars, strict=True):
                    if value is None and self._constant(self._origin(x)) is not None:
                        value = SplitValue("same")
                    if value is not None:
                        self._values[y] = self._operations.summed(value)
                return
        for value in inputs:
            if value is not None and value.kind != "unpaired" and not value.is_plain:
                refuse(f"gives {value.description} to {eqn.primitive.name}", value.reason)

    def _visit(self, part: Any, whole: Any, where: str) -> None:
        name = part.primitive.name
        inputs = self._inputs(part, whole)
        programs = inner_programs(part), inner_programs(whole)
        if name in _INLINE and len(programs[0]) == 1:
            results = self._walk(programs[0][0], programs[1][0], inputs, where)
        elif name in ("scan", "while", "cond"):
            check_operation(part, whole, axis=self._axis, devices=self._devices)
            values = getattr(self, f"_{name}")(part.params, whole.params, inputs, where)
            results = [(value, self._numbers.fresh()) for value in values]
        else:
            values, numbers = [x for x, _ in inputs], [number for _, number in inputs]
            values = self._operations.results(part, whole, values, numbers)
            results = [(x, self._numbers.of(y)) for x, y in zip(values, part.outvars, strict=True)]
        for variable, numbered in zip(part.outvars, results, strict=True):
            self._set(variable, numbered)

    def _inputs(self, part: Any, whole: Any) -> list[Numbered]:
        """Finds the `SplitValue`s and value numbers of an operation's operands.

        In the trace on a device's positions, a loop may have additional constants that only trusted
        code uses. These constants are *unpaired*.
        """
        if len(part.invars) == len(whole.invars):
            return [self._read(*pair) for pair in zip(part.invars, whole.invars, strict=True)]
        rest = iter([x for x in whole.invars if self._constant(self._origin(x)) is None])
        inputs = []
        for x in part.invars:
            value = self._known(x)
            is_constant = self._constant(self._origin(x)) is not None
            if value.kind == "unpaired" if value is not None else is_constant:
                inputs.append((SplitValue("unpaired"), self._numbers.fresh()))
            elif (y := next(rest, None)) is None:
                refuse(f"applies {part.primitive.name} to other arrays than one device", "program")
            else:
                inputs.append(self._read(x, y))
        return inputs

    def _scan(self, part: Any, whole: Any, inputs: Any, where: str) -> list[SplitValue]:
        consts, carry = scan_sizes(part)
        return self._loop("scan", (part["jaxpr"], whole["jaxpr"]), inputs, consts, carry, where)

    def _while(self, part: Any, whole: Any, inputs: Any, where: str) -> list[SplitValue]:
        cond_consts, body_consts = part["cond_nconsts"], part["body_nconsts"]
        fixed, rest = inputs[:cond_consts], inputs[cond_consts:]
        bodies = part["body_jaxpr"], whole["body_jaxpr"]
        results = self._loop("while", bodies, rest, body_consts, len(rest) - body_consts, where)
        carry = [(value, self._numbers.fresh()) for value in results]
        inputs = [*fixed, *carry]
        condition = self._walk(part["cond_jaxpr"], whole["cond_jaxpr"], inputs, where)[0][0]
        _check_condition("while", condition)
        return results

    def _cond(self, part: Any, whole: Any, inputs: Any, where: str) -> list[SplitValue]:
        _check_condition("cond", inputs[0][0])
        branches = zip(part["branches"], whole["branches"], strict=True)
        results = [self._walk(*pair, inputs[1:], where) for pair in branches]
        return [_joined("cond", [x for x, _ in of_all]) for of_all in zip(*results, strict=True)]

    def _loop(
        self, name: str, bodies: Any, inputs: Any, consts: int, carry: int, where: str
    ) -> list[SplitValue]:
        """Finds the `SplitValue`s of a loop's results.

        Walks the loop's body until the kinds of the carry do not change. `consts` and `carry` are
        the numbers of the body's constants and carried values.
        """
        values = [value for value, _ in inputs]
        while True:
            renumbered = [(value, self._numbers.fresh()) for value in values[consts:]]
            outputs = self._walk(bodies[0], bodies[1], [*inputs[:consts], *renumbered], where)
            results = [value for value, _ in outputs]
            before = values[consts : consts + carry]
            pairs = zip(before, results[:carry], strict=True)
            after = [_joined(name, pair) for pair in pairs]
            if after == before:
                return [*after, *results[carry:]]
            values[consts : consts + carry] = after

    def _set(self, variable: Any, numbered: Numbered) -> None:
        self._values[variable] = numbered[0]
        self._numbers.set(variable, numbered[1])

    def _read(self, part: Any, whole: Any) -> Numbered:
        """Finds the `SplitValue` and the value number of a variable or a constant."""
        part, whole = self._origin(part), self._origin(whole)
        return self._value(part, whole), self._numbers.of(part)

    def _value(self, part: Any, whole: Any) -> SplitValue:
        if (known := self._known(part)) is not None:
            return known
        constants = [self._constant(x) for x in (part, whole)]
        is_key = jnp.issubdtype(part.aval.dtype, jax.dtypes.extended)
        if not is_key and not any(x is None for x in constants):
            return self._of_constants(*map(np.asarray, constants))
        shape, whole_shape = tuple(part.aval.shape), tuple(whole.aval.shape)
        dim = split_dim("something", shape, whole_shape, self._devices)
        is_integral = not jnp.issubdtype(part.aval.dtype, jnp.inexact)
        if dim is None:
            return SplitValue(is_integral=is_integral)
        return SplitValue("split", layout=(1, shape[dim], 1), is_integral=is_integral)

    def _known(self, variable: Any) -> SplitValue | None:
        """Returns a variable's `SplitValue` if the walk has set it; `None` otherwise."""
        variable = self._origin(variable)
        return None if isinstance(variable, Literal) else self._values.get(variable)

    def _of_constants(self, part: np.ndarray, whole: np.ndarray) -> SplitValue:
        is_number = jnp.issubdtype(part.dtype, jnp.number)
        is_inexact = jnp.issubdtype(part.dtype, jnp.inexact)
        is_integral = bool(not is_inexact or np.all(part == np.round(part)))
        if part.shape != whole.shape:
            if np.all(part == part.flat[0]) and np.all(whole == part.flat[0]):
                return SplitValue("split", is_integral=is_integral)
        elif np.array_equal(part, whole, equal_nan=bool(is_inexact)):
            return SplitValue(
                "zero" if is_number and not part.any() else "same", is_integral=is_integral
            )
        elif is_number:
            for power in (-1, 1, -2, 2):
                if np.allclose(part, whole * float(self._devices) ** power, rtol=1e-5, atol=0):
                    return SplitValue("same", power, is_integral=is_integral)
        return refuse("takes a constant that depends on the size of a split dim", "constant")

    def _constant(self, variable: Any) -> Any:
        value = variable.val if isinstance(variable, Literal) else self._constants.get(variable)
        return None if isinstance(value, jax.core.Tracer) else value

    def _origin(self, variable: Any) -> Any:
        return variable if isinstance(variable, Literal) else self._aliases.get(variable, variable)


def _with_inner(eqn: Any) -> Iterator[Any]:
    yield eqn
    for _, jaxpr in inner_jaxprs(eqn):
        yield from all_equations(jaxpr)


def _joined(name: str, values: Sequence[SplitValue]) -> SplitValue:
    """Finds the `SplitValue` of a result that is one of `values`, as after a branch."""
    return dataclasses.replace(
        added(name, values), is_integral=all(value.is_integral for value in values)
    )


def _check_condition(name: str, value: SplitValue) -> None:
    if not value.is_plain or value.kind not in ("same", "zero"):
        refuse(f"decides by {value.description} in a {name}", "sum")
