"""Counts the floating point operations of the products in a traced program.

A *product* is a matrix product, a convolution, or a kernel that contains such products. A
multiplication and an addition count as two operations. Operations on numbers that are known to be
zero (the padding of a convolution, the holes of a dilation) do not count. `dot_general`,
`conv_general_dilated` and `ragged_dot_general` are counted exactly, and attention by cuDNN by its
shapes. For a Pallas kernel its `cost_estimate` counts; without one, the products of its body count
in each step of its grid. A kernel of attention counts only the blocks of scores that it computes
(`manualpar.core.tracing.scopes`).

Elementwise operations, reductions, and linear algebra such as `cholesky` are not counted. So the
counts do not describe a program that spends its time on such operations. `uncounted` names the
linear algebra in a program.

`TrafficReader` also counts memory traffic, for the planner: the operands and results of products
and the operands of reductions, because chains of fused elementwise operations read and write these
arrays. Its `fused_attention` models a flash attention kernel (https://arxiv.org/abs/2205.14135).
The scores (the largest array of a product with two batch dims) stay on the chip. The half of the
scores that a causal mask hides is not computed. Blockwise attention
(`manualpar.core.tracing.scopes`) does not compute the hidden half either. Both kinds of
attention compute the scores again in the backward pass; this second computation is not counted.

*Narrow* dtypes are those of 8 bits: `float8_...` and `int8`. `TrafficReader` also counts what makes
the operands of their products: each rounding of a wider array (a reduction finds its largest
number), and each float8 operand that is not summed over its last dim, because Hopper's matrix units
take no other layout. A kernel that rounds reads the array as it was before it was scaled. An array
that several products take, as those of queries, keys and values, is rounded once, because XLA
merges equal operations. XLA for GPUs writes the second layout of an activation or a gradient, for
the product that gives the gradient of a weight, when it rounds. It transposes weights apart.
"""

import itertools
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Var

from manualpar.core.tracing.scopes import (
    PRODUCTS_COMPUTED,
    PRODUCTS_COUNTED,
    blocks_computed,
    innermost_ticks,
    ticks_run,
    ticks_scope,
)
from manualpar.inspect.communication import OUTSIDE, Around, EquationReader, summed
from manualpar.inspect.scope_parsing import PHASES, Phase, module_of, phase_of
from manualpar.layers.pipeline.schedules import Costs, Table

Number = TypeVar("Number", Fraction, float)
Change = Literal["", "rounded", "transposed"]

# Primitives that multiply matrices, and whose number of operations may be unknown.
_UNCOUNTED = """
cholesky custom_linear_solve dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper eig
eigh fft ffi_call geqrf householder_product lu pallas_call qr svd triangular_solve tridiagonal_solve
"""
UNCOUNTED_PRIMITIVES = frozenset(_UNCOUNTED.split())
# The number of products in cuDNN's attention. The backward pass also computes the scores again.
CUDNN_PRODUCTS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}
REDUCTIONS = frozenset(
    {"argmax", "cumlogsumexp", "cumsum", "reduce_max", "reduce_min", "reduce_sum"}
)
# Primitives that convert, scale or clip each element.
SCALINGS = frozenset(
    {"clamp", "convert_element_type", "div", "max", "min", "mul", "reduce_precision", "round"}
)


class Product(NamedTuple, Generic[Number]):
    """A product or a reduction, with the work of one device for all of its runs in a step.

    `flops` and `traffic` are exact fractions if they are read from a traced program. The planner
    uses floats for sums of equal products, and for products that it computes without a trace.

    Attributes:
      scope: The named scopes and transformations around the product, outermost first.
      flops: The product's operations; 0 for a reduction, because its operations are not counted.
      traffic: The bytes that the product reads and writes.
      dtype: The dtype of the widest operand.
      is_fused: Whether the product is a kernel, or is part of a fused attention kernel.
      spread: The number of devices over which the operations are spread evenly.
      change: What happens to an operand in a narrow dtype; "" for a product or a reduction.
    """

    scope: str
    flops: Number
    traffic: Number
    dtype: str = ""
    is_fused: bool = False
    spread: int = 1
    change: Change = ""

    @property
    def phase(self) -> Phase:
        """The part of a step in which the product runs, see `phase_of`."""
        return phase_of(self.scope)


class Computation(NamedTuple):
    """The sum of a module's products in one phase of a step, in one dtype.

    `flops` are per device. If the devices cannot share them evenly, they are rounded up. `dtype` is
    `"float8"` for all formats of 8 bits.
    """

    phase: Phase
    module: str
    flops: int
    dtype: str = ""


def flops_of(eqn: Any, scope: str = "") -> int | None:
    """Returns the operations of one run of a product; `None` if unknown, or if `eqn` is no product.

    `scope` is the equation's scope. For an attention kernel it contains the number of blocks of
    scores that the kernel computes.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        (_, rhs_contracted), (_, rhs_batch) = eqn.params["dimension_numbers"]
        return _dot(eqn, {*rhs_contracted, *rhs_batch})
    if name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, rhs_contracted), (_, rhs_batch) = numbers.dot_dimension_numbers
        return _dot(eqn, {*rhs_contracted, *rhs_batch, *numbers.rhs_group_dimensions})
    if name == "conv_general_dilated":
        return _convolution(eqn)
    if name in CUDNN_PRODUCTS:
        return CUDNN_PRODUCTS[name] * _product_of_scores(eqn)
    return _kernel(eqn, scope) if name == "pallas_call" else None


def product_dtype(eqn: Any, *, is_fused: bool = False) -> str:
    """Returns the dtype in which an equation multiplies.

    It is the dtype of the widest floating operand; for a kernel, of the first operand; for fused
    attention, of the narrowest operand, because wide scores do not leave the kernel.
    """
    floats = [x.aval.dtype for x in eqn.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
    dtypes = floats or [x.aval.dtype for x in eqn.invars]
    if eqn.primitive.name in UNCOUNTED_PRIMITIVES:
        return str(dtypes[0])
    widest = min if is_fused else max
    return str(widest(dtypes, key=lambda dtype: dtype.itemsize))


class ProductReader(EquationReader[Product[Fraction]]):
    """Collects the products of a program."""

    verb = "computes"
    refuses_several = False

    def find(self, eqn: Any, around: Around) -> tuple[Product[Fraction], ...] | None:
        """Returns the product; `()` for a kernel of unknown work, `None` for other equations."""
        flops = flops_of(eqn, around.scope)
        if flops is not None:
            share = Fraction(around.times * flops, around.spread)
            dtype = product_dtype(eqn)
            return (Product(around.scope, share, Fraction(0), dtype, spread=around.spread),)
        return () if eqn.primitive.name == "pallas_call" else None

    def cost(self, findings: tuple[Product[Fraction], ...]) -> Fraction:
        """Returns the operations of the products."""
        return sum((product.flops for product in findings), Fraction(0))

    def describe(self, findings: tuple[Product[Fraction], ...]) -> str:
        """Says where the first product is."""
        return f"products (first in scope {findings[0].scope or 'none'})"


class TrafficReader(ProductReader):
    """Collects products, reductions and changes of narrow operands, with their memory traffic."""

    fused_attention = False  # Whether attention runs in one kernel, see the module.
    # Of the jaxpr at hand: the equations by result, and the arrays that were rounded or whose
    # largest number was found, each with what was done to it.
    _made_by: Mapping[Any, Any] = types.MappingProxyType({})
    _done: frozenset[Any] = frozenset()

    def read(self, jaxpr: Jaxpr, around: Around = OUTSIDE) -> tuple[Product[Fraction], ...]:
        """Reads a jaxpr and all jaxprs inside it, in the order of the program."""
        outer = self._made_by, self._done
        self._made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self._done = frozenset()
        try:
            return super().read(jaxpr, around)
        finally:
            self._made_by, self._done = outer

    def _source(self, x: Any) -> tuple[Any, int]:
        """Returns what a kernel reads that rounds `x`, and its bytes.

        XLA fuses a scaling in a wider dtype.
        """
        size = _bytes(x)
        while (eqn := self._made_by.get(x)) and _scales(eqn):
            variables: list[Any] = [y for y in eqn.invars if isinstance(y, Var)]
            alike = [y for y in variables if y.aval.shape == x.aval.shape]
            if not alike:
                break
            x = alike[0]
            size = min(size, _bytes(x))
        return x, size

    def _is_done(self, x: Any, how: str) -> bool:
        """Returns whether the same was done to an array before, and notes it."""
        is_done = (x, how) in self._done
        self._done |= {(x, how)}
        return is_done

    def find(self, eqn: Any, around: Around) -> tuple[Product[Fraction], ...] | None:
        """Returns the work of an equation that is a product, a reduction or a rounding."""
        flops: int | Fraction | None = flops_of(eqn, around.scope)
        is_product = flops is not None
        if _is_rounding(eqn):
            x, y = _ends(eqn)
            source, size = self._source(x)
            if self._is_done(source, str(y.aval.dtype)):
                return ()
            return (_changed("rounded", y, size + _bytes(y), around),)
        if not is_product and eqn.primitive.name not in REDUCTIONS:
            return super().find(eqn, around)
        if eqn.primitive.name == "reduce_max" and (made := self._made_by.get(eqn.invars[0])):
            how = f"largest over {eqn.params['axes']}"
            if made.primitive.name == "abs" and self._is_done(self._source(made.invars[0])[0], how):
                return ()
        arrays = [*eqn.invars, *eqn.outvars] if is_product else eqn.invars[:1]
        sizes = [_bytes(x) for x in arrays]
        is_fused = self.fused_attention and _is_of_scores(eqn, is_product)
        if is_fused:
            sizes.remove(max(sizes))
        is_kernel = eqn.primitive.name in UNCOUNTED_PRIMITIVES
        if is_fused and blocks_computed(around.scope) is None:
            flops = Fraction(flops or 0, 2)
        elif is_fused or (is_kernel and self.fused_attention):
            flops = (flops or 0) * Fraction(PRODUCTS_COUNTED, PRODUCTS_COMPUTED)
        dtype = product_dtype(eqn, is_fused=is_fused)
        share = Fraction(around.times, around.spread)
        flops, traffic = (flops or 0) * share, sum(sizes) * share
        is_fused |= is_kernel
        product = Product(around.scope, flops, traffic, dtype, is_fused, around.spread)
        return (product, *(_second_layout(x, around) for x in _turned(eqn)))


def is_narrow(dtype: str) -> bool:
    """Returns whether a dtype has 8 bits."""
    return dtype.startswith("float8") or dtype == "int8"


def _is_rounding(eqn: Any) -> bool:
    """Returns whether an equation rounds an array of floats to a narrow dtype."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (x.aval.dtype for x in _ends(eqn))
    is_wide = jnp.issubdtype(before, jnp.floating) and not is_narrow(str(before))
    return is_wide and is_narrow(str(after))


def _scales(eqn: Any) -> bool:
    """Returns whether an equation converts, scales or clips each element."""
    return eqn.primitive.name in SCALINGS or eqn.params.get("name") in ("clip", "round")


def _turned(eqn: Any) -> Iterator[Any]:
    """Yields the operands in float8 of a matrix product that are not summed over their last dim."""
    if eqn.primitive.name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
        for x, dims in zip(eqn.invars, contracted, strict=True):
            if str(x.aval.dtype).startswith("float8") and x.aval.ndim - 1 not in dims:
                yield x


def _second_layout(x: Any, around: Around) -> Product[Fraction]:
    if phase_of(around.scope) == "backward":
        return _changed("rounded", x, _bytes(x), around)
    return _changed("transposed", x, 2 * _bytes(x), around)


def _changed(change: Change, x: Any, size: int, around: Around) -> Product[Fraction]:
    traffic = Fraction(around.times * size, around.spread)
    dtype = str(x.aval.dtype)
    return Product(around.scope, Fraction(0), traffic, dtype, spread=around.spread, change=change)


def _ends(eqn: Any) -> tuple[Any, Any]:
    return eqn.invars[0], eqn.outvars[0]


def _bytes(variable: Any) -> int:
    size: int = math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
    return size


def _is_of_scores(eqn: Any, is_product: bool) -> bool:
    """Returns whether a product or a reduction is of attention scores, by its number of dims.

    These are products with at least 2 batch dims, and reductions of arrays of at least 4 dims.
    """
    if not is_product:
        return len(eqn.invars[0].aval.shape) >= 4
    return eqn.primitive.name == "dot_general" and len(eqn.params["dimension_numbers"][1][0]) > 1


def uncounted(eqns: Iterable[Any]) -> Iterator[str]:
    """Yields the primitives of `eqns` that multiply matrices, and whose operations are unknown."""
    for eqn in eqns:
        if eqn.primitive.name in UNCOUNTED_PRIMITIVES and flops_of(eqn) is None:
            yield eqn.primitive.name


def by_phase_and_module(
    products: Iterable[Product[Fraction]], root: str = ""
) -> tuple[Computation, ...]:
    """Adds up products by phase (in the order of `PHASES`), module and dtype (as they come)."""
    totals = summed(
        ((each.phase, module_of(each.scope, root), without_format(each.dtype)), each.flops)
        for each in products
    )
    return tuple(
        Computation(phase, module, math.ceil(flops), dtype)
        for wanted in PHASES
        for (phase, module, dtype), flops in totals.items()
        if phase == wanted and flops
    )


def without_format(dtype: str) -> str:
    """Returns a dtype as ledgers and tables of peaks name it: all float8 formats are `float8`."""
    return "float8" if dtype.startswith("float8") else dtype


def _dot(eqn: Any, not_free: set[int]) -> int:
    """Counts a matrix product: each left element meets all indices of the right free dims."""
    left, right = (variable.aval.shape for variable in eqn.invars[:2])
    free = math.prod(size for dim, size in enumerate(right) if dim not in not_free)
    return 2 * math.prod(left) * free


def _kernel(eqn: Any, scope: str) -> int | None:
    """Returns a kernel's `cost_estimate`, or the operations of its body in all steps of its grid.

    An attention kernel runs its body once for each computed block of each head, which may be fewer
    steps than its grid has. Its first floating operand is the queries, `[..., S, H]`.
    """
    if estimate := eqn.params["cost_estimate"]:
        return int(estimate.flops)
    grid = eqn.params["grid_mapping"].grid
    if not all(isinstance(size, int) for size in grid):
        return None
    steps = math.prod(grid)
    if (blocks := blocks_computed(scope)) is not None:
        queries = next(x for x in eqn.invars if jnp.issubdtype(x.aval.dtype, jnp.floating))
        steps = min(steps, blocks * math.prod(queries.aval.shape[:-2]))
    try:
        products = ProductReader("flops_of").read(eqn.params["jaxpr"])
    except ValueError:  # A loop of unknown length.
        return None
    return steps * int(sum(product.flops for product in products))


def _product_of_scores(eqn: Any) -> int:
    """Counts one product of queries and keys; a causal mask halves it, a window limits the keys."""
    query, key = (x.aval.shape for x in eqn.invars[:2])
    length, heads = (1, 2) if eqn.params["layout"] == 0 else (2, 1)
    pairs = query[length] * key[length]
    if "CAUSAL" in eqn.params["mask_type"].name:
        pairs //= 2
    if (window := eqn.params["sliding_window_length"]) and window > 0:
        pairs = min(pairs, query[length] * window)
    return int(2 * query[0] * query[heads] * query[3] * pairs)


def _convolution(eqn: Any) -> int:
    """Counts, dim by dim, the pairs of positions that are multiplied for each pair of features."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in eqn.invars)
    out = eqn.outvars[0].aval.shape
    pairs = 1
    for index, (low, _) in enumerate(params["padding"]):
        positions = np.arange(out[numbers.out_spec[2 + index]]) * params["window_strides"][index]
        offsets = np.arange(right[numbers.rhs_spec[2 + index]]) * params["rhs_dilation"][index]
        reached = positions[:, None] + offsets[None, :] - low
        hole = params["lhs_dilation"][index]
        last = (left[numbers.lhs_spec[2 + index]] - 1) * hole
        pairs *= int(((reached >= 0) & (reached <= last) & (reached % hole == 0)).sum())
    batch, features = (out[dim] for dim in numbers.out_spec[:2])
    return 2 * batch * features * right[numbers.rhs_spec[1]] * pairs


# -------------------------------------------------------------------------------------------------
# Counts the operations of each part of a pipeline's tick in a traced step.
#
# The parts are a chunk of layers, the model before its layers (first stage) and the model after
# its layers with the loss (last stage), each forward and backward; see
# `manualpar.layers.pipeline.schedules.Costs`. The named scopes of
# `manualpar.core.tracing.scopes` contain the number of ticks in which each stage runs a part.
# These numbers tell the parts apart. A part and its backward pass run equally often, but in
# different phases of the step. If a part has permutes, all stages run it together, in the ticks in
# which at least one stage has to run it.


# Name of a part, as in `Costs` -> the row of the schedule's table that has an entry in the ticks in
# which a stage runs the part.
ROWS = {
    "forward": "forward_microbatch",
    "backward": "backward_microbatch",
    "before": "is_first",
    "before_backward": "backward_is_first",
    "after": "is_last",
}


class TickParts:
    """Finds the part of a tick that an operation belongs to, by the operation's scope.

    Attributes:
      table: The pipeline's schedule.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._by_scope: dict[str, list[str]] = {}
        self._scopes: dict[tuple[str, bool], str] = {}
        for together, (part, row) in itertools.product((False, True), ROWS.items()):
            scope = ticks_scope(table.is_run(row, together=together))
            self._by_scope.setdefault(scope, []).append(part)
            self._scopes[part, together] = scope

    def scope(self, part: str, *, together: bool) -> str:
        """Returns the scope of a part; with `together` all stages run it in the same ticks."""
        return self._scopes[part, together]

    def part_of(self, scope: str) -> str:
        """Returns the part of an operation with this scope; "" outside of a tick's parts.

        Forward and backward operations after the layers are one part. With one stage all parts run
        as often as a chunk, so every operation counts as an operation of a chunk.
        """
        parts = self._by_scope.get(innermost_ticks(scope), ())
        is_backward = phase_of(scope) in ("backward", "recomputed")
        fitting = (part for part in parts if part == "after" or ("backward" in part) == is_backward)
        return next(fitting, "")

    def runs(self, scope: str, stage: int) -> int:
        """Returns the number of ticks in which a stage runs an operation with this scope."""
        ticks = ticks_run(innermost_ticks(scope))
        assert ticks
        return ticks.runs[stage]


def stage_costs(traced: jax.stages.Traced, table: Table) -> Costs:
    """Returns the number of operations of each part of a tick.

    Args:
      traced: The traced train step of a program with a pipeline, such as
        `program.train_step.trace(program.abstract_state, program.abstract_batch)`.
      table: The table of the pipeline's schedule, as `make_table` returns it.

    Returns:
      The floating point operations of each part in one tick. With one stage, all operations count
      as operations of chunks.
    """
    costs: dict[str, float] = dict.fromkeys(Costs._fields, 0.0)
    parts = TickParts(table)
    for stage in sorted({0, table.num_stages - 1}):
        for product in ProductReader("stage_costs", stage=stage).read(traced.jaxpr.jaxpr):
            part = parts.part_of(product.scope)
            if part and (part == "after" or not stage):  # Chunks are the same on all stages.
                costs[part] += float(product.flops / parts.runs(product.scope, stage))
    return Costs(**costs)
