"""Operations on stacked parameters that treat every layer separately.

A model may cast or scale a parameter before the scan over layers. A stage of a pipeline has some of
the layers, and applies these operations only to its layers. The result is the same only if an
operation treats every entry of dim 0 (every layer) separately.
"""

from collections.abc import Sequence
from typing import Any

# These operations treat every element in the same way.
_ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "exp",
        "integer_pow",
        "log",
        "log2",
        "logistic",
        "max",
        "min",
        "mul",
        "name",
        "neg",
        "one_minus_square",
        "pow",
        "psum",
        "psum_invariant",
        "pvary",
        "reduce_precision",
        "rsqrt",
        "sign",
        "sin",
        "sqrt",
        "square",
        "sub",
        "tanh",
    }
)
_GATHERS = frozenset({"all_gather", "all_gather_invariant"})


def keeps_layers(eqn: Any, stacked: Sequence[bool], length: int) -> bool:
    """Returns whether an equation treats each layer (dim 0 of its operands) separately.

    Args:
      eqn: An equation.
      stacked: For each operand, whether its dim 0 is the layers.
      length: The number of layers.
    """
    name = eqn.primitive.name
    if any(
        not is_stacked and v.aval.shape for v, is_stacked in zip(eqn.invars, stacked, strict=True)
    ):
        return False
    return (
        name in _ELEMENTWISE
        or (name in _GATHERS and eqn.params["all_gather_dimension"] != 0)
        or for_fewer_layers(eqn, length, length) is not None
    )


def for_fewer_layers(eqn: Any, length: int, fewer: int) -> Any:
    """Changes an equation for `length` layers into an equation for `fewer` layers.

    Returns `None` for primitives other than slices, reshapes, broadcasts, transposes, `rev` and
    `squeeze`, and for equations that change dim 0.
    """
    name, params = eqn.primitive.name, eqn.params

    def shortened(field: str) -> Any:
        sizes = params[field]
        return eqn.replace(params={**params, field: (fewer, *sizes[1:])})

    if name == "slice":
        strides = params["strides"] or (1,)
        is_whole = (params["start_indices"][0], params["limit_indices"][0]) == (0, length)
        return shortened("limit_indices") if is_whole and strides[0] == 1 else None
    if name == "reshape" and params["dimensions"] is None:
        return shortened("new_sizes") if params["new_sizes"][:1] == (length,) else None
    if name == "broadcast_in_dim":
        is_kept = params["broadcast_dimensions"][:1] == (0,) and params["shape"][0] == length
        return shortened("shape") if is_kept else None
    if name == "transpose":
        return eqn if params["permutation"][0] == 0 else None
    if name in ("rev", "squeeze"):
        return eqn if 0 not in params["dimensions"] else None
    return None
