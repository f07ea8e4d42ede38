"""Reads the module, the phase of the step and the purpose of an operation off its scope.

A scope lists the names and transformations around an operation, outermost first, separated by
slashes. It holds the names of modules (from flax) and of collectives (from this package);
transformations around some names, such as `transpose(jvp(Model))`; and names that JAX and XLA add,
such as `jit(train)`, `while/body` and `rematted_computation`. The names of modules form the path of
a module. The path is the same in the forward pass, in a recomputation, and in the backward pass.

JAX traces a transformed or rematerialised function with the names around its call. So the path of
a module may begin several times in one scope. `module_of` returns this beginning once.
"""

import functools
import re
from collections.abc import Iterator
from typing import Literal

from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    CONTEXT_SCOPE,
    CROSS_ENTROPY_SCOPE,
    EXPERT_SCOPE,
    GATHER_SCOPE,
    NEW_PARAMS_SCOPE,
    NONFINITE_SCOPE,
    OPTIMIZER_SCOPE,
    PIPELINE_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
    SCOPES,
    SEQUENCE_SCOPE,
    TENSOR_SCOPE,
    blocks_computed,
    purpose_of,
    ticks_run,
)

__all__ = [
    "LAYER_SCOPES",
    "OTHER",
    "PHASES",
    "Phase",
    "module_of",
    "phase_of",
    "purpose_in",
]

Phase = Literal["forward", "backward", "recomputed", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputed", "update")

# Scopes of the collectives that split layers run for their activations.
LAYER_SCOPES = (
    TENSOR_SCOPE,
    SEQUENCE_SCOPE,
    CROSS_ENTROPY_SCOPE,
    EXPERT_SCOPE,
    CONTEXT_SCOPE,
    PIPELINE_SCOPE,
)
OTHER = "other"  # The purpose of a collective whose scope and axes do not show a purpose.

_RECOMPUTED = "rematted_computation"
# Scopes of operations on gradients that autodiff does not add. They count as the backward pass.
_OF_GRADIENTS = frozenset({SCATTER_SCOPE, REDUCE_SCOPE, CAST_SCOPE, NONFINITE_SCOPE})
# Names of calls. After such a name JAX may repeat names from the beginning of the path.
_CALL_WORDS = """
rematted_computation checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr
remat remat2 shard_map shmap_body
"""
_CALLS = frozenset(_CALL_WORDS.split())
_IN_CONTROL_FLOW = re.compile(r"while/(body|cond)(?=/|$)|cond/branch_\d+_fun(?=/|$)")
_NAME = re.compile(r"[A-Za-z_][\w\-]*")
_METHOD = re.compile(r"[A-Za-z_]\w*\.\w+")  # Flax's name for a method of the last module.
_MINIBATCH = re.compile(r"minibatch(_\d+)?")
# The path of a parameter in `op_name`. HLO's text has a backslash before each quote.
_KEY = r"\[\\?'?(\w+)\\?'?\]"
_PARAMETER = re.compile(rf"state\.params(?:{_KEY})+")


# These functions are cached, because a program has many operations with the same scope.
@functools.lru_cache(maxsize=4096)
def module_of(scope: str, root: str = "") -> str:
    """Returns the path of the module or parameter of an operation: `"layers/attention/query"`.

    Args:
      scope: The operation's scope, from a jaxpr or from a compiled program (there without the
        primitive at the end).
      root: The name of the top module, which is left out of the path. The path is this name for
        operations that the top module runs itself, outside of its submodules.

    Returns:
      The path, `""` for operations in no module.
    """
    path: list[str] = []
    for names in _segments(scope):
        path = _joined(path, names)
    purposes = [index for index, name in enumerate(path) if name in SCOPES]
    if ours := [index for index in purposes if path[index] != OPTIMIZER_SCOPE]:
        path = path[: ours[-1]]
    path = [name for name in path if name not in SCOPES and blocks_computed(name) is None]
    if root and path and path[0] == root:
        path = path[1:] or path
    return "/".join(path)


@functools.lru_cache(maxsize=4096)
def phase_of(scope: str) -> Phase:
    """Returns the part of a step in which an operation runs.

    Transposed operations and collectives of gradients are the backward pass. Recomputations by
    `jax.checkpoint` are a separate phase. The update is the optimizer, and the gather of parameters
    after it.
    """
    parts = set(re.split(r"[/()]", scope))
    if OPTIMIZER_SCOPE in parts or NEW_PARAMS_SCOPE in parts:
        return "update"
    if _RECOMPUTED in parts:
        return "recomputed"
    return "backward" if "transpose" in parts or parts & _OF_GRADIENTS else "forward"


@functools.lru_cache(maxsize=4096)
def purpose_in(scope: str, axes: tuple[str, ...], data_axes: tuple[str, ...] = ()) -> str:
    """Returns the purpose of a collective, by its scope and its axes; see `scopes.purpose_of`.

    A collective that other code added has no scope of this package, so its axes give the purpose.
    If one of them splits the batch (is in `data_axes`), or if `data_axes` are not known, the
    purpose is `OTHER`. Otherwise the collective belongs to a parallel layer. Its purpose is then
    `CAST_SCOPE` in the backward pass, and `TENSOR_SCOPE` in other phases. `CAST_SCOPE` is the sum
    that autodiff adds for the gradient of a replicated array, such as the scale of a norm if the
    sequence is split.
    """
    if ours := purpose_of(scope):
        return ours
    if not data_axes or not axes or set(axes) & set(data_axes):
        return OTHER
    return CAST_SCOPE if phase_of(scope) == "backward" else TENSOR_SCOPE


def compiled_scopes(op_name: str) -> tuple[str, ...]:
    """Returns the scopes of a compiled instruction, from its `op_name`, without primitives.

    There are several scopes if XLA has merged operations: `prefix/(a/psum:b/psum)` gives `prefix/a`
    and `prefix/b`. Since JAX 0.12 the gather of a parameter that XLA itself adds has the name of
    this parameter: `state.params['a']['kernel']` gives `a/gather_params`.
    """
    if _PARAMETER.fullmatch(op_name):
        return ("/".join([*re.findall(_KEY, op_name)[:-1], GATHER_SCOPE]),)
    prefix, is_merged, rest = op_name.partition("/(")
    if not is_merged or not rest.endswith(")"):
        return (op_name.rpartition("/")[0],)
    parts = _split_outside_parentheses(rest[:-1])
    return tuple(f"{prefix}/{part.rpartition('/')[0]}".rstrip("/") for part in parts)


def _split_outside_parentheses(text: str) -> Iterator[str]:
    """Yields the parts between colons, except for colons in parentheses."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _segments(scope: str) -> Iterator[list[str]]:
    """Yields the names in a scope as lists, split at transformations, calls and methods."""
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
        elif _NAME.fullmatch(text) and not _MINIBATCH.fullmatch(text) and not ticks_run(text):
            names.append(text)
        if end == ")" and depth_of_jit:
            depth_of_jit.pop()
    yield names


def _joined(path: list[str], names: list[str]) -> list[str]:
    """Appends names to a path, without the names that repeat the end of the path.

    Names that begin with the first name of the path replace the path.
    """
    for index in range(len(path)):
        rest = path[index:]
        if names[: len(rest)] == rest:
            return path[:index] + names
    return names if path and names[:1] == path[:1] else path + names
