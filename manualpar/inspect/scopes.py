"""What the scope of an operation says: its module, its phase, its purpose.

A scope is what stands around an operation, outermost first, separated by slashes: names that
somebody gave (flax names each module, this package what it sends), transformations around some of
them, `transpose(jvp(Model))`, and what JAX and XLA add of their own: `jit(train)`, `while/body`,
`rematted_computation`. Stripped of all but the names it is the path of a module, which is the same
in the forward pass, where it is computed again, and in the backward pass.

A transformed or rematerialised function is traced with the names that stood around it when it was
called, so that a prefix of the path may stand there again, once for each transformation: it is
written once.
"""

import re
from collections.abc import Collection, Iterator
from typing import Literal

from manualpar.core.collectives import (
    CAST_SCOPE,
    NEW_PARAMS_SCOPE,
    NONFINITE_SCOPE,
    OPTIMIZER_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
    SCOPES,
    purpose_of,
)

Phase = Literal["forward", "backward", "recomputed", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputed", "update")

# The purposes of what this package has not written.
TENSOR_PARALLEL = "tensor_parallel"
OTHER = "other"

_RECOMPUTED = "rematted_computation"
# What is done to gradients outside of what autodiff writes is part of the backward pass.
_OF_GRADIENTS = frozenset({SCATTER_SCOPE, REDUCE_SCOPE, CAST_SCOPE, NONFINITE_SCOPE})
# Names that JAX gives to what it calls; behind each of them a function's own names begin.
_CALLS = frozenset(
    {
        _RECOMPUTED,
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "remat",
        "remat2",
        "shard_map",
        "shmap_body",
    }
)
_IN_CONTROL_FLOW = re.compile(r"while/(body|cond)(?=/|$)|cond/branch_\d+_fun(?=/|$)")
_NAME = re.compile(r"[A-Za-z_][\w\-]*")
_METHOD = re.compile(r"[A-Za-z_]\w*\.\w+")  # What flax calls a method of the module it names last.
_MINIBATCH = re.compile(r"minibatch(_\d+)?")


def module_of(scope: str, root: str = "") -> str:
    """The path of the module or parameter that an operation comes from.

    Args:
      scope: Its scope, as in a jaxpr or, without the primitive at its end, in a compiled program.
      root: The name of the whole model, which is left out of the paths of its parts, as it is of
        the paths of parameters.

    Returns:
      Names separated by slashes: `"layers/attention/query"`; `root` for what the model itself does;
      `""` for what stands in no module.
    """
    path: list[str] = []
    for names in _segments(scope):
        path = _joined(path, names)
    purposes = [index for index, name in enumerate(path) if name in SCOPES]
    if ours := [index for index in purposes if path[index] != OPTIMIZER_SCOPE]:
        path = path[: ours[-1]]
    path = [name for name in path if name not in SCOPES]
    if root and path and path[0] == root:
        path = path[1:] or path
    return "/".join(path)


def phase_of(scope: str) -> Phase:
    """In which part of a step an operation runs.

    What autodiff transposes is the backward pass, and so is what is done to gradients; what
    `jax.checkpoint` computes again for it is told apart. The update is what this package runs in
    the scope of the optimizer; in a program that does not it counts as forward.
    """
    parts = set(re.split(r"[/()]", scope))
    if OPTIMIZER_SCOPE in parts or NEW_PARAMS_SCOPE in parts:
        return "update"
    if _RECOMPUTED in parts:
        return "recomputed"
    return "backward" if "transpose" in parts or parts & _OF_GRADIENTS else "forward"


def purpose_in(scope: str, axes: Collection[str], data_axes: Collection[str] = ()) -> str:
    """For what purpose something is sent, by its scope and the axes it goes over.

    Args:
      scope: Its scope.
      axes: The mesh axes.
      data_axes: Those that split a program's batch, as far as they are known.

    Returns:
      See `manualpar.core.collectives.purpose_of`; for what this package has not written
      `TENSOR_PARALLEL` if it goes over none of the data axes, else `OTHER`.
    """
    if ours := purpose_of(scope):
        return ours
    is_parallel = data_axes and axes and not set(axes) & set(data_axes)
    return TENSOR_PARALLEL if is_parallel else OTHER


def compiled_scopes(op_name: str) -> tuple[str, ...]:
    """The scopes of an instruction of a compiled program, without the primitive at their ends.

    Several if XLA has made it of several: `prefix/(a/psum:b/psum)` is of `prefix/a` and `prefix/b`.
    """
    prefix, is_merged, rest = op_name.partition("/(")
    if not is_merged or not rest.endswith(")"):
        return (op_name.rpartition("/")[0],)
    parts = _split_outside_parentheses(rest[:-1])
    return tuple(f"{prefix}/{part.rpartition('/')[0]}".rstrip("/") for part in parts)


def _split_outside_parentheses(text: str) -> Iterator[str]:
    """The parts between colons; a colon in a name's parentheses separates nothing."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _segments(scope: str) -> Iterator[list[str]]:
    """The names in a scope, a list for each stretch without a transformation, call or method."""
    scope = _IN_CONTROL_FLOW.sub("closed_call", scope)
    depth_of_jit: list[bool] = []  # For each open parenthesis, whether it holds a function's name.
    names: list[str] = []
    for text, end in re.findall(r"([^/()]*)([/()]|$)", scope):
        if end == "(":
            yield names
            names = []
            depth_of_jit.append(text in ("jit", "pjit"))
        elif any(depth_of_jit):
            pass
        elif text in _CALLS or _METHOD.fullmatch(text):
            yield names
            names = []
        elif _NAME.fullmatch(text) and not _MINIBATCH.fullmatch(text):
            names.append(text)
        if end == ")" and depth_of_jit:
            depth_of_jit.pop()
    yield names


def _joined(path: list[str], names: list[str]) -> list[str]:
    """A path and what follows it, without what of the path is repeated."""
    for index in range(len(path)):
        rest = path[index:]
        if names[: len(rest)] == rest:
            return path[:index] + names
    return names if path and names[:1] == path[:1] else path + names
