"""Finds out how a loss uses parameters, before any parameter is sharded.

The loss is traced once, abstractly, with each parameter in a box that records its uses. The box
records the dims that `nn.scan` and `nn.vmap` run over, because these dims must not be sharded.

The box contains an array of random keys instead of the parameter. Code that reads the content
without `unbox()` would compute with a shard. Such code fails here, because arithmetic on keys
fails. The box also contains zeros, which detect a loss that differentiates a parameter. Such a loss
would be wrong: a gather's handwritten gradient is the gradient of a mean over devices.
"""

import linecache
import operator
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from manualpar.core.parameters.array_box import ArrayBox
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.parameters.shard_rules import is_inside
from manualpar.core.trees import path_name

# Packages whose code is not the user's.
LIBRARIES = frozenset({"flax", "jax", "jaxlib", "manualpar", "numpy", "optax"})
# `trace_loss(params, box)` traces the loss with the parameters `box(params)`, as a step does.
TraceLoss = Callable[[Any, Callable[[Any], Any]], None]


def find_loop_dims(
    strategy: str,
    trace_loss: TraceLoss,
    params: Any,
    boxed: Any,
    optional: Any,
    *,
    gathers_in_loss: bool,
) -> dict[str, frozenset[int]]:
    """Finds the dims of parameters that `nn.scan` and `nn.vmap` run over, by path.

    Args:
      strategy: The strategy's name, for messages.
      trace_loss: Traces the loss.
      params: The tree of abstract parameters.
      boxed: The same tree with a true leaf for each parameter to probe.
      optional: The same tree with a true leaf for each further parameter to probe. If the loss
        reads one of these in a way that is refused, none of them is probed.
      gathers_in_loss: Whether this package gathers parameters where the loss reads them. If so,
        the loss may not differentiate parameters.

    Raises:
      ValueError: A parameter is differentiated, or read without its module's `self.param`.
    """
    key_dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype
    loop_dims: dict[str, set[int]] = {}

    def failure(boxed: Any) -> Exception | None:
        """Returns the error, if any, that the loss raises with these parameters in boxes."""

        def box(path: Any, is_boxed: bool, x: Any, value: Any) -> Any:
            if not is_boxed:
                return value
            record = _LoopDims(loop_dims.setdefault(path_name(path), set()))
            names = tuple(map(str, range(x.ndim)))
            zeros = jnp.zeros(value.shape) if gathers_in_loss else None
            fields = {"loop_dims": record, "part_shape": value.shape, "global_shape": x.shape}
            return _Probe(value, names, dtype=x.dtype, zeros=zeros, **fields)

        def box_all(values: Any) -> Any:
            return jax.tree_util.tree_map_with_path(box, boxed, params, values)

        def with_keys(is_boxed: bool, x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, key_dtype) if is_boxed else x

        try:
            trace_loss(jax.tree.map(with_keys, boxed, params), box_all)
        except Exception as error:
            return error
        return None

    everything = jax.tree.map(operator.or_, boxed, optional)
    if any(jax.tree.leaves(optional)):
        if failure(everything) is None:
            return _frozen(loop_dims)
        loop_dims.clear()
    error = failure(boxed)
    if error is not None:
        trace_loss(params, lambda params: params)  # Raises the loss's own error, if any.
        read = _find_read(boxed, failure)
        raise ValueError(
            f"{strategy}: parameters of {', '.join(map(repr, read))} would be sharded, but they "
            "are not read by self.param in their own module, or as arrays in self.variables (in "
            f"NNX by param[...]){_place(error)}. In a loss function call nn.unbox(params) for "
            "penalties on parameters, for gradients of parameters, and for steps such as "
            "p - lr * g. Parameters that a model changes with nn.map_variables (as nn.WeightNorm "
            "and nn.SpectralNorm do), or maps functions over, must not be sharded: use "
            f"replicate={read!r} with fsdp, hsdp or zero, or use data_parallel without annotations "
            "and without pipeline=."
        ) from error
    return _frozen(loop_dims)


def _frozen(loop_dims: dict[str, set[int]]) -> dict[str, frozenset[int]]:
    return {path: frozenset(dims) for path, dims in loop_dims.items()}


def _place(error: Exception) -> str:
    """Describes the last line of the user's code in an error's traceback, for a message.

    If this package raised the error, its text follows.
    """
    foreign = sys.stdlib_module_names | LIBRARIES
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in foreign:
            code = frame.f_code
            text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            place = f", in {code.co_name} at {Path(code.co_filename).name}:{line}"
            place += f" ({text})" if text else ""
    said = str(error).removesuffix(".")
    return f"{place}: {said}" if said.startswith("model: ") else place


def _find_read(boxed: Any, failure: Callable[[Any], Exception | None]) -> tuple[str, ...]:
    """Finds the first modules, at most three, whose boxed parameters make a trace fail."""
    paths = [path_name(path) for path, is_boxed in jax.tree.leaves_with_path(boxed) if is_boxed]

    def fails(candidates: list[str]) -> bool:
        selected = jax.tree.map_with_path(lambda path, _: path_name(path) in candidates, boxed)
        return failure(selected) is not None

    found: list[str] = []
    while len(found) < 3 and paths and (not found or fails(paths)):
        candidates = paths
        while len(candidates) > 1:  # Bisects, to find one such parameter.
            half = len(candidates) // 2
            candidates = candidates[:half] if fails(candidates[:half]) else candidates[half:]
        found.append(candidates[0].rpartition("/")[0] or candidates[0])
        paths = [path for path in paths if not is_inside(path, found[-1])]
    return tuple(found)


@jax.custom_vjp
def _refuse_derivative(x: jax.Array) -> jax.Array:
    return x


def _refuse(x: jax.Array) -> Any:
    raise ValueError(
        "model: a parameter that is gathered is differentiated within the model or the loss, with "
        "nn.vjp, nnx.grad, jax.vjp or the like, and the gradient of a shard is not the gradient "
        "of the parameter; expected a parameter that is not sharded. If you need only the gradient "
        "of the inputs, call nn.vjp(..., vjp_variables=False). Otherwise call nn.unbox(params) in "
        "the loss, and for a module that differentiates its own parameters use replicate= or "
        "data_parallel."
    )


_refuse_derivative.defvjp(_refuse, lambda _, g: (g,))


class _LoopDims:
    """The dims of a parameter that loops run over; all copies of a box share one `_LoopDims`."""

    def __init__(self, dims: set[int]) -> None:
        self.dims = dims


class _Probe(ArrayBox, eq=False):
    """A box of keys that replaces a parameter and records how the parameter is used.

    The field `names` has the number of each dim of the parameter, and `None` for a dim that a loop
    has added.
    """

    dtype: Any = flax.struct.field(default=None, pytree_node=False)
    loop_dims: Any = flax.struct.field(default=None, pytree_node=False)
    part_shape: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    global_shape: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    # Loops and transformations slice the zeros like the keys. Zeros can be differentiated.
    zeros: Any = None

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns zeros of the expected shape, typed as a gathered parameter is.

        Raises:
          ValueError: The box's arrays were changed from outside the box, or are differentiated.
        """
        if self.zeros is not None:
            _refuse_derivative(self.zeros)
        expected = [None if name is None else self.part_shape[int(name)] for name in self.names]
        shape = self.value.shape
        if len(expected) != len(shape) or any(
            a not in (None, b) for a, b in zip(expected, shape, strict=True)
        ):
            raise ValueError(f"model: an array of shape {shape} is taken for a shard of {expected}")
        spec = jax.typeof(self.value).sharding.spec
        sharding = {"out_sharding": spec} if any(spec) else {}
        if self.is_whole:
            dims = zip(self.names, shape, strict=True)
            shape = tuple(n if name is None else self.global_shape[int(name)] for name, n in dims)
        zeros = jnp.zeros(shape, self.dtype, **sharding)
        return cast_to_varying(zeros, varying_axes(self.value))

    def of_one_array(self) -> "_Probe":
        """Returns a copy of the box without the zeros: only the array of keys is left."""
        self.unbox()
        return self.replace(zeros=None)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Probe":
        """Adds a dim that the parameter does not have."""
        names = list(self.names)
        names.insert(index % (len(names) + 1), None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Probe":
        """Records that a loop runs over the dim."""
        names = list(self.names)
        dim = names.pop(index % len(names))
        if dim is not None:
            self.loop_dims.dims.add(int(dim))
        return self.replace(names=tuple(names))
