"""Finds out how a loss uses parameters, before any of them is sharded.

The loss is traced once, abstractly, with each parameter in a box that takes notes. The box notes
the dimensions that `nn.scan` and `nn.vmap` run over, because those must stay whole. It holds an
array of keys in the parameter's place, with which nothing can be computed: code that reads the
box's content without asking the box, and would take a shard for the parameter, fails here. Zeros
beside the keys notice code that differentiates the parameter: the gather's hand-written gradient is
that of a loss, and a gradient within a loss would count every device.
"""

import linecache
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
from manualpar.core.parameters.placement import is_inside, path_name

# Packages whose lines are not the user's.
LIBRARIES = frozenset({"flax", "jax", "jaxlib", "manualpar", "numpy", "optax"})
# Traces the loss as a step calls it, with abstract parameters to which a function is applied first.
TraceLoss = Callable[[Any, Callable[[Any], Any]], None]


def find_loop_dims(
    strategy: str, trace_loss: TraceLoss, params: Any, boxed: Any, *, gathers_in_loss: bool
) -> dict[str, frozenset[int]]:
    """Finds the dimensions of parameters that `nn.scan` and `nn.vmap` run over, by path.

    It looks at the parameters for which `boxed` has a true leaf. With `gathers_in_loss` this
    package gathers parameters where the loss reads them, so that none may be differentiated there.

    Raises:
      ValueError: A parameter is read other than by a module that asks for it, or differentiated.
    """
    key_dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype
    notes: dict[str, set[int]] = {}

    def failure(boxed: Any) -> Exception | None:
        """The error, if any, that the loss raises with these parameters in boxes."""

        def box(path: Any, is_boxed: bool, x: Any, value: Any) -> Any:
            if not is_boxed:
                return value
            dims = _Notes(notes.setdefault(path_name(path), set()))
            names = tuple(map(str, range(x.ndim)))
            witness = jnp.zeros(value.shape) if gathers_in_loss else None
            own = {"notes": dims, "part_shape": value.shape, "whole_shape": x.shape}
            own["witness"] = witness
            return _Probe(value, names, dtype=x.dtype, **own)

        def box_all(values: Any) -> Any:
            return jax.tree_util.tree_map_with_path(box, boxed, params, values)

        def stored(is_boxed: bool, x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, key_dtype) if is_boxed else x

        try:
            trace_loss(jax.tree.map(stored, boxed, params), box_all)
        except Exception as error:
            return error
        return None

    error = failure(boxed)
    if error is not None:
        trace_loss(params, lambda params: params)  # Raises what the boxes are not to blame for.
        read = _find_read(boxed, failure)
        raise ValueError(
            f"{strategy}: parameters that are to be sharded, of {', '.join(map(repr, read))}, are "
            "read other than by a module that asks for them with self.param, or as arrays in "
            f"self.variables (in NNX by param[...]){_place(error)}. In a loss function take "
            "nn.unbox(params) for penalties on parameters, for gradients of them, and for steps "
            "such as p - lr * g. What a model changes with nn.map_variables (nn.WeightNorm and "
            "nn.SpectralNorm do), or maps functions over, must be whole: use "
            f"replicate={read!r} with fsdp, hsdp or zero. All is whole with data_parallel, if no "
            "annotation shards it and pipeline= spreads no layers."
        ) from error
    return {path: frozenset(dims) for path, dims in notes.items()}


def _place(error: Exception) -> str:
    """Where in the user's code an error arose, and why if it is in words of this package."""
    foreign = sys.stdlib_module_names | LIBRARIES
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in foreign:
            code = frame.f_code
            text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            place = f", in {code.co_name} at {Path(code.co_filename).name}:{line}"
            place += f" ({text})" if text else ""
    return f"{place}: {error}" if str(error).startswith("model: ") else place


def _find_read(boxed: Any, failure: Callable[[Any], Exception | None]) -> tuple[str, ...]:
    """The first modules, three at most, whose boxed parameters make a trace fail."""
    paths = [path_name(path) for path, is_boxed in jax.tree.leaves_with_path(boxed) if is_boxed]

    def fails(some: list[str]) -> bool:
        chosen = jax.tree.map_with_path(lambda path, _: path_name(path) in some, boxed)
        return failure(chosen) is not None

    found: list[str] = []
    while len(found) < 3 and paths and (not found or fails(paths)):
        some = paths
        while len(some) > 1:
            half = len(some) // 2
            some = some[:half] if fails(some[:half]) else some[half:]
        found.append(some[0].rpartition("/")[0] or some[0])
        paths = [path for path in paths if not is_inside(path, found[-1])]
    return tuple(found)


@jax.custom_vjp
def _refuse_derivative(x: jax.Array) -> jax.Array:
    return x


def _refuse(x: jax.Array) -> Any:
    raise ValueError(
        "model: a parameter that is gathered is differentiated within the model or the loss, with "
        "nn.vjp, nnx.grad, jax.vjp or the like, and the gradient of a shard is not that of the "
        "parameter; expected one that is whole. If only the gradient of the inputs is used, say "
        "nn.vjp(..., vjp_variables=False). Otherwise take nn.unbox(params) in the loss, and for a "
        "module that differentiates its own parameters use replicate= or data_parallel."
    )


_refuse_derivative.defvjp(_refuse, lambda _, g: (g,))


class _Notes:
    """The dimensions of a parameter that loops run over; one object in all copies of a box."""

    def __init__(self, dims: set[int]) -> None:
        self.dims = dims


class _Probe(ArrayBox, eq=False):
    """A box of keys that stands for a parameter and notes how it is used.

    Its `names` are the numbers of the parameter's dims, `None` for one that a loop has added.
    """

    dtype: Any = flax.struct.field(default=None, pytree_node=False)
    notes: Any = flax.struct.field(default=None, pytree_node=False)
    part_shape: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    whole_shape: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    # Zeros that go where the keys go, and unlike them can be differentiated.
    witness: Any = None

    def unbox(self, apply_constraint: bool = True) -> Any:
        """A parameter of the expected shape, typed as a gathered one is.

        It refuses content that was changed without asking the box, or is differentiated.
        """
        if self.witness is not None:
            _refuse_derivative(self.witness)
        own = [None if name is None else self.part_shape[int(name)] for name in self.names]
        shape = self.value.shape
        if len(own) != len(shape) or any(
            a not in (None, b) for a, b in zip(own, shape, strict=True)
        ):
            raise ValueError(f"model: an array of shape {shape} is taken for a shard of {own}")
        spec = jax.typeof(self.value).sharding.spec
        sharding = {"out_sharding": spec} if any(spec) else {}
        if self.is_whole:
            dims = zip(self.names, shape, strict=True)
            shape = tuple(n if name is None else self.whole_shape[int(name)] for name, n in dims)
        zeros = jnp.zeros(shape, self.dtype, **sharding)
        return cast_to_varying(zeros, varying_axes(self.value))

    def of_one_array(self) -> "_Probe":
        """The box with the keys alone, which nobody can differentiate."""
        self.unbox()
        return self.replace(witness=None)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Probe":
        """A dimension that is not the parameter's own."""
        names = list(self.names)
        names.insert(index % (len(names) + 1), None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Probe":
        """Notes the dimension."""
        names = list(self.names)
        dim = names.pop(index % len(names))
        if dim is not None:
            self.notes.dims.add(int(dim))
        return self.replace(names=tuple(names))
