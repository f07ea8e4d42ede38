"""Checks that an operation on shards gives the shard of its result on unsharded arrays.

The operation is given twice, on shards and on unsharded (*whole*) arrays. The dim in which the
shapes differ is the split dim. An operation is right along the split dim if it is elementwise, a
product that does not contract this dim, a reduction over other dims, or a reshape that keeps this
dim in front of the dims with which it is merged.

How to correct a mistake depends on the axis that splits the arrays. So each check that uses this
module provides its own advice: a sentence for each `Reason`.

Invariant: an operation that is not known to be right is refused.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, Jaxpr

from manualpar.core.model.loops import LIBRARIES
from manualpar.core.tracing.jaxprs import COMPOSITE, ELEMENTWISE, expanded

Shape = tuple[int, ...]
Reason = Literal[
    "axis",
    "constant",
    "convolution",
    "examples",
    "loop",
    "mixed",
    "pad",
    "parts",
    "product",
    "program",
    "random",
    "reduction",
    "reshape",
    "size",
    "sum",
    "two dims",
    "unknown",
]

# These operations are right along every dim.
_PLAIN = frozenset(
    """
    bitcast_convert_type broadcast_in_dim optimization_barrier pmax pmin psum psum_invariant
    squeeze stack transpose
    """.split()  # noqa: SIM905
)
# Operations that are wrong along some dims, and the parameter that names these dims.
_ALONG = {
    "argmax": "axes",
    "argmin": "axes",
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "iota": "dimension",
    "reduce_and": "axes",
    "reduce_max": "axes",
    "reduce_min": "axes",
    "reduce_or": "axes",
    "reduce_prod": "axes",
    "reduce_sum": "axes",
    "rev": "dimensions",
    "sort": "dimension",
    "split": "axis",
    "top_k": "axis",
    "unstack": "axis",
}
# These operations contain programs, which are checked separately.
_CALLS = frozenset(
    """
    call_hi_primitive checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call jit
    remat2 scan while
    """.split()  # noqa: SIM905
)


class WrongOnShardsError(Exception):
    """An operation on shards does not give the shard of the result on unsharded arrays.

    The message begins with a verb, because the name of a module comes before it.
    """

    def __init__(self, mistake: str, reason: Reason) -> None:
        super().__init__(mistake)
        self._reason: Reason = reason

    def mended(self, mends: Mapping[Reason, str]) -> str:
        """Returns the message, followed by the advice in `mends` for this kind of mistake."""
        return f"{self}. {mends[self._reason]}."


def check_operation(shards: Any, whole: Any, *, axis: str, devices: int) -> None:
    """Refuses an operation that is wrong on shards.

    Args:
      whole: The same equation on whole arrays.
      devices: The number of devices along `axis`.

    Raises:
      WrongOnShardsError: The operation is not known to be right.
    """
    name = shards.primitive.name
    ins, outs = (
        [split_dim(name, *shapes, devices) for shapes in _shapes(shards, whole, kind)]
        for kind in ("invars", "outvars")
    )
    if name in _CALLS:
        if name == "scan" and shards.params["length"] != whole.params["length"]:
            refuse("loops over a split dim", "loop")
    elif name == "random_bits":
        varies = axis in shards.outvars[0].aval.mat.varying
        if varies != (outs[0] is not None):
            refuse("draws random numbers for a split array", "random")
    elif not any(dim is not None for dim in (*ins, *outs)):
        if _plain_params(shards) != _plain_params(whole):
            refuse(f"applies {name} to an unsplit array with the size of a shard", "size")
    elif name in ELEMENTWISE or name == "polynomial":
        if outs[0] is None:
            refuse(f"applies {name} to a shard and an unsplit array", "mixed")
    elif name in _ALONG:
        dims = shards.params[_ALONG[name]]
        dims = dims if isinstance(dims, tuple) else (dims,)
        for dim in set(ins or outs) & set(dims):
            is_reduction = name.startswith(("arg", "reduce"))
            reason: Reason = "reduction" if is_reduction else "size"
            x = whole.invars[0] if ins else whole.outvars[0]
            _refuse_dim(name, dim, x, "parts" if name == "split" else reason)
    elif name in _RULES:
        _RULES[name](shards, whole, ins, outs)
    elif name.startswith("reduce_window"):
        _refuse_dim(name, ins[0], whole.invars[0], "convolution")
    elif name not in _PLAIN:
        refuse(f"applies {name} to a split array", "unknown")


def _shapes(shards: Any, whole: Any, kind: str) -> list[tuple[Shape, Shape]]:
    """Returns `(shape on shards, shape on whole arrays)` of each of the `invars` or `outvars`."""
    both = [[tuple(x.aval.shape) for x in getattr(eqn, kind)] for eqn in (shards, whole)]
    if shards.primitive.name in _CALLS:  # The calls may close over different arrays.
        return []
    if len(both[0]) != len(both[1]):
        refuse(f"applies {shards.primitive.name} to fewer arrays than on one device", "size")
    return list(zip(*both, strict=True))


def split_dim(name: str, shard: Shape, whole: Shape, devices: int) -> int | None:
    """Returns the dim in which a shard differs from the whole array; `None` if there is none."""
    if len(shard) != len(whole):
        refuse(f"applies {name} to shapes {shard} and not {whole}", "size")
    dims = [dim for dim, sizes in enumerate(zip(shard, whole, strict=True)) if len(set(sizes)) > 1]
    if not dims:
        return None
    if len(dims) > 1:
        refuse(
            f"applies {name} to an array {list(whole)} whose dims {dims} are both split",
            "two dims",
        )
    if shard[dims[0]] * devices != whole[dims[0]]:
        refuse(f"applies {name} to an array {list(shard)} in the place of {list(whole)}", "size")
    return dims[0]


def _check_product(shards: Any, whole: Any, ins: Sequence[int | None], outs: Any) -> None:
    (contracted, _) = shards.params["dimension_numbers"]
    for dim, dims, x in zip(ins, contracted, whole.invars, strict=True):
        if dim in dims:
            _refuse_dim("dot_general", dim, x, "product")


def _check_reshape(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    x, y = whole.invars[0], whole.outvars[0]
    before = [v.aval.shape[: dims[0]] for v, dims in ((x, ins), (y, outs)) if dims[0] is not None]
    if len(before) < 2 or math.prod(before[0]) != math.prod(before[1]):
        _refuse_dim("reshape", ins[0], x, "reshape", f". It makes {list(y.aval.shape)} of it")


def _check_slice(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    for eqn in (shards, whole):
        dim, shape = ins[0] if ins[0] is not None else outs[0], eqn.invars[0].aval.shape
        strides = eqn.params["strides"] or (1,) * len(shape)
        limits = eqn.params["start_indices"][dim], eqn.params["limit_indices"][dim]
        if (*limits, strides[dim]) != (0, shape[dim], 1):
            _refuse_dim("slice", dim, whole.invars[0], "size")


def _check_slice_sizes(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    for eqn in (shards, whole):
        dim = ins[0] if ins[0] is not None else outs[0]
        if eqn.params["slice_sizes"][dim] != eqn.invars[0].aval.shape[dim]:
            _refuse_dim("dynamic_slice", dim, whole.invars[0], "size")


def _check_update(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    for eqn in (shards, whole):
        operand, update = (x.aval.shape for x in eqn.invars[:2])
        if operand[outs[0]] != update[outs[0]]:
            _refuse_dim("dynamic_update_slice", outs[0], whole.invars[0], "size")


def _check_pad(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    if any(shards.params["padding_config"][outs[0]]):
        _refuse_dim("pad", outs[0], whole.invars[0], "pad")


def _check_tile(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    if shards.params["reps"][outs[0]] != 1:
        _refuse_dim("tile", outs[0], whole.invars[0], "size")


def _check_gather(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    numbers, (dim, index_dim) = shards.params["dimension_numbers"], ins
    sizes = shards.params["slice_sizes"], whole.params["slice_sizes"]
    if index_dim == len(whole.invars[1].aval.shape) - 1:
        _refuse_dim("gather", index_dim, whole.invars[1], "size")
    if dim in numbers.operand_batching_dims:
        return
    shapes = [eqn.invars[0].aval.shape for eqn in (shards, whole)]
    is_full = dim is not None and [s[dim] for s in sizes] == [s[dim] for s in shapes]
    if sizes[0] != sizes[1] if dim is None else not is_full or dim in numbers.start_index_map:
        _refuse_dim("gather", dim or 0, whole.invars[0], "size")


def _check_convolution(shards: Any, whole: Any, ins: Any, outs: Any) -> None:
    (batch_dim, _, *spatial), kernel = (
        getattr(shards.params["dimension_numbers"], name) for name in ("lhs_spec", "rhs_spec")
    )
    is_right = ins[1] is None and ins[0] == batch_dim
    if ins[1] is None and ins[0] in spatial:  # A kernel of size 1 reads no neighbours.
        index = spatial.index(ins[0])
        strides, paddings = (shards.params[name] for name in ("window_strides", "padding"))
        has_size_1 = whole.invars[1].aval.shape[kernel[2 + index]] == 1
        is_right = has_size_1 and strides[index] == 1 and not any(paddings[index])
    if not is_right:
        _refuse_dim("conv_general_dilated", ins[0] or 0, whole.invars[0], "convolution")


_RULES: dict[str, Callable[[Any, Any, Any, Any], None]] = {
    "conv_general_dilated": _check_convolution,
    "dot_general": _check_product,
    "dynamic_slice": _check_slice_sizes,
    "dynamic_update_slice": _check_update,
    "gather": _check_gather,
    "pad": _check_pad,
    "reshape": _check_reshape,
    "slice": _check_slice,
    "tile": _check_tile,
}


def _plain_params(eqn: Any) -> dict[str, Any]:
    return {name: value for name, value in eqn.params.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | str)


def _refuse_dim(
    name: str, dim: int | None, variable: Any, reason: Reason, result: str = ""
) -> NoReturn:
    shape = list(variable.aval.shape)
    refuse(f"applies {name} along dim {dim} of an array {shape}, which is split{result}", reason)


def refuse(mistake: str, reason: Reason) -> NoReturn:
    """Raises the error for a mistake, such as `applies sort to a split array`."""
    raise WrongOnShardsError(mistake, reason)


# -------------------------------------------------------------------------------------------------
# Pairs the operations of two traces of the same code: on shards and on unsharded arrays.
#
# Both traces have the same operations unless the code depends on the sizes of split dims.


CASTS = frozenset({"pvary", "pcast"})


def paired(shards: Iterator[Any], whole: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields pairs `(on shards, on whole arrays)` of equations; `None` for a missing equation."""
    for eqn in shards:
        whole_eqn = next(whole, None)
        # A broadcast may be in only one trace: a device with one head needs no broadcast over
        # heads.
        while whole_eqn is not None and _is_broadcast(whole_eqn) and not _is_like(whole_eqn, eqn):
            whole_eqn = next(whole, None)
        yield eqn, whole_eqn
    yield from ((None, whole_eqn) for whole_eqn in whole if not _is_broadcast(whole_eqn))


def cast_values(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Returns, for each result of a cast in a program, the variable or the number that was cast.

    A conversion of a number counts as a cast. jax 0.12 casts the number in `2 * x` to varying if
    the type of `x` varies, and then converts it; otherwise it writes the converted number.
    """
    values: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        found = [x if isinstance(x, jex.Literal) else values.get(x, x) for x in eqn.invars]
        if eqn.primitive.name in CASTS:
            values.update(zip(eqn.outvars, found, strict=True))
        elif eqn.primitive.name == "convert_element_type" and isinstance(found[0], jex.Literal):
            [result] = eqn.outvars
            number = np.asarray(found[0].val).astype(eqn.params["new_dtype"])
            values[result] = jex.Literal(number, result.aval)
    return values


def check_same_operation(eqn: Any, whole_eqn: Any) -> None:
    """Refuses a pair from `paired` if its two operations are not the same."""
    if eqn is None or whole_eqn is None or eqn.primitive is not whole_eqn.primitive:
        names = [x.primitive.name if x else "nothing" for x in (eqn, whole_eqn)]
        refuse(f"applies {names[0]} to shards and {names[1]} to whole arrays", "program")


def inner_programs(eqn: Any) -> list[Any]:
    """Returns the programs in an equation's parameters, with their constants if they have any."""
    if eqn.primitive.name == COMPOSITE:
        return [expanded(eqn)]
    params = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    return [v for values in params for v in values if isinstance(v, ClosedJaxpr | Jaxpr)]


def stands_in(eqn: Any, scopes: frozenset[str]) -> bool:
    """Returns whether an equation is inside one of `scopes`."""
    return not scopes.isdisjoint(str(eqn.source_info.name_stack).split("/"))


def module_of_equation(eqn: Any, but: frozenset[str] = frozenset()) -> str:
    """Returns the path of the module that contains an equation, without the scopes in `but`."""
    parts = str(eqn.source_info.name_stack).split("/")
    return "/".join(part for part in parts if part.isidentifier() and part not in but)


def place_of(eqn: Any) -> str:
    """Describes, for messages, the line of the user's code that made an equation."""
    folders = [Path(str(sys.modules[name].__file__)).parent for name in LIBRARIES & {*sys.modules}]
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        file = Path(frame.file_name)
        if file.exists() and not any(file.is_relative_to(folder) for folder in folders):
            return f" at {file.name}:{frame.line_num}"
    return ""


def _is_broadcast(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "broadcast_in_dim")


def _is_like(broadcast: Any, eqn: Any) -> bool:
    dims = "broadcast_dimensions"
    return _is_broadcast(eqn) and eqn.params[dims] == broadcast.params[dims]


# -------------------------------------------------------------------------------------------------
# Value numbering: values that a program computes in the same way get the same number.
#
# A trace repeats a computation that the code repeats, such as the count `mask.sum()`. So two
# variables may be the same count. Value numbers show whether a loss divides by the count that it
# returns (https://en.wikipedia.org/wiki/Value_numbering). The sum of all entries of an array has
# one number, whatever the order of summation: `mask.sum()` and `mask.sum(-1).sum()` have the same
# number.


# These operations keep the sum of all entries of their operand.
_SUM_PRESERVING = frozenset({"reduce_sum", "reshape", "squeeze", "transpose"})


class ValueNumbers:
    """The value numbers of all values that a walk through a program has visited."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._expressions: dict[Any, int] = {}
        # For a result of `_SUM_PRESERVING` operations, the number of the array to which these
        # operations were applied.
        self._sum_of: dict[int, int] = {}
        self._scalars: set[int] = set()
        self._constants: dict[int, float] = {}
        self._fresh = itertools.count(1)

    def fresh(self) -> int:
        """Returns a value number that no value has yet."""
        return next(self._fresh)

    def number(self, variable: Any) -> int:
        """Returns the value number of a variable or a constant."""
        if not isinstance(variable, jex.Literal):
            return self._numbers.setdefault(variable, self.fresh())
        number = self._expression_number(("literal", str(variable.aval), str(variable.val)))
        if not np.ndim(variable.val):
            self._scalars.add(number)
            if np.isrealobj(variable.val):
                self._constants[number] = float(variable.val)
        return number

    def set(self, variable: Any, number: int) -> None:
        """Gives a variable the number of another value, to which it is equal."""
        self._numbers[variable] = number

    def set_result(self, variable: Any, eqn: Any, index: int, numbers: Sequence[int]) -> None:
        """Sets the number of an operation's `index`-th result; `numbers` belong to its operands."""
        name = eqn.primitive.name
        expression: Any = (name, str(eqn.params), index, *numbers)
        terms = self._sum_of.get(numbers[0], numbers[0]) if name in _SUM_PRESERVING else None
        if name == "reduce_sum" and not variable.aval.shape:
            expression = ("sum of all", terms)
        number = self._expression_number(expression)
        if terms is not None:
            self._sum_of[number] = terms
        if math.prod(variable.aval.shape) == 1:
            self._scalars.add(number)
        self._numbers[variable] = number

    def is_scalar(self, number: int) -> bool:
        """Returns whether the value with a number is a scalar or a broadcast scalar."""
        return number in self._scalars

    def constant(self, number: int) -> float | None:
        """Returns the scalar constant that has a number; `None` if it belongs to no constant."""
        return self._constants.get(number)

    def _expression_number(self, expression: Any) -> int:
        return self._expressions.setdefault(expression, self.fresh())
