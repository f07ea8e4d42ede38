"""The arrays of a program's state by name: loaded from other arrays, and returned unsharded.

`init_from` makes a state from parameters, `adopt` takes another program's state, and `whole`
returns the variables for flax on one device. All three copy one array at a time through the host. A
device receives only its shards, and an array on devices is read shard by shard.

Invariants: all arrays are compared with the program's arrays before any array is placed. The
optimizer's state is made from the loaded parameters, because some optimizers store parameters in
their state. The source arrays are neither donated nor changed.
"""

import dataclasses
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh

from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.mesh.splitting import typed_key
from manualpar.core.model.apply_fn import SOWN_COLLECTIONS
from manualpar.core.model.interface import collections_of
from manualpar.core.parameters.placement import map_padded, partition
from manualpar.core.parameters.sharded_parameter import is_box, pad_leaf, unpad_leaf
from manualpar.core.state.train_state import TrainState, is_key
from manualpar.core.summary import show_array, show_leaf
from manualpar.core.trees import Variables, path_keys, path_name
from manualpar.errors import list_some

__all__ = [
    "Leaf",
    "Missing",
    "check_alive",
    "check_has_devices",
    "leaves_of",
    "place_leaf",
    "plain_leaves",
    "read_unpadded",
    "state_with",
    "to_host",
    "variable_leaves",
    "variables_of",
]

# -------------------------------------------------------------------------------------------------
# Names the arrays of a state, and copies each to the host or to the devices.
#
# In a program the arrays are sharded, and some are padded. Without padding, the arrays fit a
# program on any mesh, under the same names.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Describes an array of the state, both as the program stores it and without padding.

    Attributes:
      name: The array's name, such as `params/dense/kernel`.
      keys: The array's keys in nested dicts.
      abstract: Shape, dtype and sharding of the array in the program, with padding; it may be a
        typed key.
      shape: The shape without padding.
      padded_shape: The shape that the program stores; for a key, the shape of its data.
      dtype: The dtype; for a key, the dtype of its data.
    """

    name: str
    keys: tuple[str, ...]
    abstract: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def is_key(self) -> bool:
        """Whether the array is a typed key."""
        return is_key(self.abstract)

    @property
    def padding(self) -> tuple[int, ...]:
        """The number of zeros that the program stores at the end of each dimension."""
        return tuple(x - size for x, size in zip(self.padded_shape, self.shape, strict=True))


def leaves_of(padded: Any, unpadded: Any) -> list[Leaf]:
    """Describes each array of a tree, in the order of its leaves.

    Args:
      padded: A tree of abstract arrays, such as the `abstract_state` of a program.
      unpadded: The same tree without padding, such as the program's `unpadded_state`.
    """
    leaves = []
    for (path, abstract), without_padding in zip(
        jax.tree_util.tree_leaves_with_path(padded), jax.tree.leaves(unpadded), strict=True
    ):
        data, shape = abstract, without_padding.shape
        if is_key(abstract):
            # A new function in each call: jax frees its cache entry together with the function.
            data = jax.eval_shape(lambda key: jax.random.key_data(key), abstract)
            shape = data.shape
        keys = tuple(path_name((entry,)) for entry in path)
        leaves.append(Leaf(path_name(path), keys, abstract, shape, data.shape, data.dtype))
    return leaves


def place_leaf(function: str, leaf: Leaf, x: Any) -> jax.Array:
    """Copies an array to a program's devices, padded, cast and sharded as `leaf` describes.

    Communication:
      The communication of `to_host`. A device receives only its shard.
    """
    value = read_unpadded(function, leaf, x)

    def shard(index: Any) -> np.ndarray:
        bounds = [s.indices(size)[:2] for s, size in zip(index, leaf.padded_shape, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
        values = value[index]  # `values` is smaller than `out` if the shard is padded.
        out[tuple(map(slice, values.shape))] = values
        return out

    sharding = leaf.abstract.sharding
    shards = [
        jax.device_put(shard(index), device)
        for device, index in sharding.addressable_devices_indices_map(leaf.padded_shape).items()
    ]
    data = jax.make_array_from_single_device_arrays(leaf.padded_shape, sharding, shards)
    if not leaf.is_key:
        return data
    return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))


def read_unpadded(function: str, leaf: Leaf, x: Any) -> np.ndarray:
    """Copies an array to the host without its padding; copies the data of a typed key.

    Communication:
      The communication of `to_host`.
    """
    value = to_host(jax.random.key_data(x) if is_key(x) else x)
    if value.shape == leaf.shape:
        return value
    inside = tuple(map(slice, leaf.shape))
    # The padding is zeros if all non-zeros are inside. Counting them makes no copy.
    if np.count_nonzero(value) != np.count_nonzero(value[inside]):
        raise ValueError(
            f"{function}: {leaf.name} is {show_leaf(value)}, expected "
            f"{show_array(leaf.dtype, leaf.shape)}, or an array padded from this shape with zeros; "
            "its padding has other values. Pass arrays of the same model."
        )
    return value[inside]


def to_host(x: Any) -> np.ndarray:
    """Copies a NumPy array or a complete `jax.Array` into the memory of every process.

    Communication:
      None in one process: each shard is copied to the host separately. One all-gather if the array
      is sharded over several processes: every device then stores the whole array for a short time.
    """
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.array(x.addressable_data(0))  # A copy: the array may be donated.
    if not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    out = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            out[shard.index] = np.asarray(shard.data)
    return out


# -------------------------------------------------------------------------------------------------


Missing = Literal["error", "init"]
# How to mend an argument with deleted arrays.
_MENDS = {
    "state": "a train step donates its state, so that the returned state can use the memory. "
    "Use the returned state: `state, metrics = program.train_step(state, batch)`. In a notebook, "
    "run the cells again, beginning with the cell that makes the state.",
    "batch": "an earlier call donated it or its delete() was called. Make the batch again before "
    "every step that donates it, or do not donate it.",
}
RESIDUALS = "local/residuals/"  # See `manualpar.quantization.gradient_rounding`.


def init_from(
    program: Any,
    params_or_variables: Any,
    rng: jax.Array | None = None,
    *,
    missing: Missing = "error",
) -> TrainState:
    """Makes a state at step 0 from existing parameters, see `Program.init_from`."""
    check_has_devices("init_from", program.mesh)
    if missing not in ("error", "init"):
        raise ValueError(f"init_from: missing={missing!r}, expected 'error' or 'init'.")
    if rng is None and missing == "init":
        raise TypeError("init_from: rng is None with missing='init', expected a key.")
    key = typed_key("init_from", jax.random.key(0) if rng is None else rng)
    leaves = variable_leaves(program)
    found = dict(_by_name(params_or_variables, program))
    check_alive("init_from", variables=found)
    plain, encodings = plain_leaves(program, leaves, only=found)
    _check_all(
        "init_from",
        [leaf for leaf in plain if missing == "error" or leaf.name in found],
        found,
        _fits_as_variable,
        "Pass the result of model.init, or set missing='init' and rng to make missing arrays.",
    )
    _warn_of_casts(plain, found)
    placed: dict[str, jax.Array] = {}
    for leaf in plain:
        if leaf.name in found:
            x = place_leaf("init_from", leaf, found[leaf.name])
            encoding = encodings.get(leaf.name)
            placed |= encoding.encode(x) if encoding else {leaf.name: x}
    return state_with(program, leaves, placed, key)


def adopt(program: Any, state: TrainState) -> TrainState:
    """Converts the state of another program, see `Program.adopt`."""
    check_has_devices("adopt", program.mesh)
    leaves = leaves_of(program.abstract_state, program.unpadded_state)
    found = _checked_state("adopt", leaves, state)
    placed = [place_leaf("adopt", leaf, found[leaf.name]) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(program.abstract_state), placed)


def whole(program: Any, state: TrainState) -> dict[str, Any]:
    """Returns the variables of a state without sharding and padding, see `Program.whole`."""
    leaves = leaves_of(program.abstract_state, program.unpadded_state)
    found = _checked_state("whole", leaves, state)
    values = {
        leaf.name.removeprefix("collections/"): read_unpadded("whole", leaf, found[leaf.name])
        for leaf in leaves
        if leaf.keys[0] in ("params", "collections")
    }
    arrays = [values[leaf.name] for leaf in variable_leaves(program)]
    structure = jax.tree.structure(variables_of(program.unpadded_state))
    return dict(jax.tree.unflatten(structure, arrays))


def variables_of(state: TrainState) -> dict[str, Any]:
    """Returns the variables of a state by collection, with their padding."""
    return {"params": state.params, **state.collections}


def check_has_devices(function: str, mesh: Any) -> None:
    """Refuses an abstract mesh; the error names `function`, the caller."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{function}: the program is on an abstract mesh, which has no devices; expected a "
            "mesh of devices. Build the program on a mesh of make_mesh; this program can only be "
            "traced."
        )


def check_alive(function: str, **trees: Any) -> None:
    """Refuses named arguments that contain donated or deleted arrays.

    Tracers are accepted, and so are leaves that are not JAX arrays.
    """
    for name, tree in trees.items():
        if not any(map(is_deleted, jax.tree.leaves(tree))):
            continue
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if is_deleted(x):
                raise ValueError(
                    f"{function}: {name}{jax.tree_util.keystr(path)} has been deleted, expected "
                    f"arrays that are alive: {_MENDS.get(name, _MENDS['state'])}"
                )


def is_deleted(x: Any) -> bool:
    """Returns whether a leaf is a deleted array; `False` for a tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def variable_leaves(program: Any) -> list[Leaf]:
    """Returns all variables of a program, under names such as `params/dense/kernel`."""
    return leaves_of(variables_of(program.abstract_state), variables_of(program.unpadded_state))


def plain_leaves(
    program: Any, leaves: list[Leaf], only: Container[str] | None = None
) -> tuple[list[Leaf], dict[str, Any]]:
    """Replaces the codes and scales of each quantized weight by the leaf of the plain weight.

    Args:
      program: The program, whose model may have quantized weights.
      leaves: The program's leaves, as `variable_leaves` returns them.
      only: The names of the plain (unquantized) weights to replace codes and scales by; `None` for
        all weights.

    Returns:
      The leaves after the replacement, and the encodings by the name of the plain weight. An
      encoding quantizes a plain weight to codes and scales.
    """
    encodings = program.model.interface.encodings(leaves)
    plain: dict[str, Leaf | None] = {}
    for name, each in encodings.items():
        if only is None or name in only:
            plain |= {each.codes.name: each.plain, each.scales.name: None}
    found = [plain.get(leaf.name, leaf) for leaf in leaves]
    return [leaf for leaf in found if leaf is not None], encodings


def state_with(
    program: Any, leaves: list[Leaf], placed: dict[str, jax.Array], rng: jax.Array
) -> TrainState:
    """Makes a state from variables that are already on the program's devices.

    `placed` has these variables by name. They are donated. `init` makes all other arrays.
    """

    def replace_variables(placed: dict[str, jax.Array], state: TrainState) -> TrainState:
        made, structure = jax.tree.flatten(variables_of(state))
        values = [placed.get(leaf.name, x) for leaf, x in zip(leaves, made, strict=True)]
        values = _with_derived(program, leaves, values, placed)
        collections = jax.tree.unflatten(structure, values)
        params = collections.pop("params")
        paddings = [leaf.padding for leaf in leaves if leaf.keys[0] == "params"]
        unpadded = map_padded(unpad_leaf, params, paddings)
        opt_state = state.tx.init(partition(program.placements, unpadded)[0])
        opt_leaves = leaves_of(program.abstract_state.opt_state, program.unpadded_state.opt_state)
        opt_state = map_padded(pad_leaf, opt_state, (leaf.padding for leaf in opt_leaves))
        return state.replace(params=params, opt_state=opt_state, collections=collections)

    on_auto = with_auto_axes(replace_variables, mesh=program.mesh, out_specs=program.layout)
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    with no_mesh():  # XLA removes the unused initialisation of the placed variables.
        make = jax.jit(
            lambda placed, rng: on_auto(placed, program.init(rng)),
            out_shardings=shardings,
            donate_argnums=0,
        )
        return make(placed, rng)


def _with_derived(
    program: Any, leaves: list[Leaf], values: list[Any], placed: Container[str]
) -> list[Any]:
    """Replaces the parameters that were not loaded and follow from those that were."""
    own = {
        leaf.name.partition("/")[2]: number
        for number, leaf in enumerate(leaves)
        if leaf.keys[0] == "params" and not leaf.is_key
    }
    missing = {path for path, number in own.items() if leaves[number].name not in placed}
    params = {
        path: unpad_leaf(values[number], leaves[number].padding) for path, number in own.items()
    }
    for path, x in program.model.interface.derived(params, missing).items():
        leaf = leaves[own[path]]
        values[own[path]] = pad_leaf(x.astype(leaf.dtype), leaf.padding)
    return values


def _checked_state(function: str, leaves: list[Leaf], state: Any) -> dict[str, Any]:
    """Checks that a state fits the program except for padding; returns its arrays by name."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{function}: state is a {type(state).__name__}, expected a TrainState. Pass "
            "parameters or variables to init_from."
        )
    check_alive(function, state=state)
    found = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    expected = {leaf.name: leaf.shape for leaf in leaves if leaf.name.startswith(RESIDUALS)}
    got = {name: x.shape for name, x in found.items() if name.startswith(RESIDUALS)}
    if expected != got:  # Other devices' residuals cannot be used, so residuals start at zero.
        zeros = {name: np.zeros(shape, np.float32) for name, shape in expected.items()}
        found = {name: x for name, x in found.items() if name not in got} | zeros
    mend = "Pass a state of the same model, optimizer and param_dtype."
    _check_all(function, leaves, found, _fits_in_state, mend)
    return found


def _by_name(variables: Variables, program: Any) -> Iterator[tuple[str, Any]]:
    """Yields arrays of parameters or variables with names such as `params/dense/kernel`.

    Values that the model sows are left out: the result of `model.init` has them.
    """
    abstract, sown = program.abstract_state, program.model.sown
    by_collection = collections_of(variables)
    if by_collection is not None:
        variables = by_collection
    if not isinstance(variables, Mapping):
        fields = "; pass its params" if hasattr(variables, "params") else ""
        raise TypeError(
            f"init_from: params_or_variables is a {type(variables).__name__}, expected a tree of "
            f"parameters, or variables by collection{fields}. Pass the state of a program to adopt."
        )
    inner = variables.get("params") if "params" in variables else None
    has_collections = by_collection is not None or (
        isinstance(inner, Mapping) and ("params" not in abstract.params or "params" in inner)
    )
    ignored = SOWN_COLLECTIONS - abstract.collections.keys()
    if not has_collections:
        variables = {"params": variables}
    for path, x in jax.tree_util.tree_leaves_with_path(variables, is_leaf=_holds_array):
        keys = path_keys(path)
        is_sown = any(keys[:length] in sown for length in range(len(keys) + 1))
        if keys[0] not in ignored and not is_sown:
            yield path_name(path), _array_of(x)


def _holds_array(x: Any) -> bool:
    """Returns whether `x` is a box or an NNX variable."""
    return isinstance(x, nn.meta.AxisMetadata) or hasattr(x, "get_raw_value")


def _array_of(x: Any) -> Any:
    if is_box(x):
        return x.value
    if isinstance(x, nn.meta.AxisMetadata):
        return x.unbox()
    return x.get_raw_value() if _holds_array(x) else x


def _check_all(
    function: str,
    leaves: list[Leaf],
    found: Mapping[str, Any],
    fits: Callable[[Leaf, Any], bool],
    mend: str,
) -> None:
    """Refuses arrays that are missing, unknown to the program, or of another shape or dtype."""
    lines = []
    for leaf in leaves:
        shape = leaf.abstract.shape if leaf.is_key else leaf.shape
        expected = show_array(leaf.abstract.dtype, shape)
        if leaf.name not in found:
            lines.append(f"{leaf.name} is missing, expected {expected}")
            continue
        x = found[leaf.name]
        if isinstance(x, jax.ShapeDtypeStruct):
            lines.append(f"{leaf.name} is abstract, expected the values of {expected}")
        elif not fits(leaf, x):
            lines.append(f"{leaf.name} is {show_leaf(x)}, expected {expected}")
    known = {leaf.name for leaf in leaves}
    lines += [
        f"{name} is {show_leaf(x)}, expected no such array"
        for name, x in found.items()
        if name not in known
    ]
    if lines:
        raise ValueError(
            f"{function}: the arrays do not fit the program: {'; '.join(list_some(lines))}. {mend}"
        )


def _fits_as_variable(leaf: Leaf, x: Any) -> bool:
    """Returns whether a variable has the leaf's shape and kind of dtype, such as floating."""
    if is_key(x) or leaf.is_key or _dtype(x).kind == "O":
        return _dtype(x) == leaf.abstract.dtype and np.shape(x) == leaf.abstract.shape
    kinds = (jnp.floating, jnp.complexfloating, jnp.signedinteger, jnp.unsignedinteger, jnp.bool_)
    is_of_kind = any(
        jnp.issubdtype(_dtype(x), kind) and jnp.issubdtype(leaf.dtype, kind) for kind in kinds
    )
    return is_of_kind and np.shape(x) in (leaf.shape, _padded_shape(leaf, x))


def _fits_in_state(leaf: Leaf, x: Any) -> bool:
    """Returns whether an array has the leaf's dtype and, except for padding, the leaf's shape."""
    if _dtype(x) != leaf.abstract.dtype:
        return False
    if leaf.is_key:
        return bool(x.shape == leaf.abstract.shape)
    shape = np.shape(x)
    if isinstance(x, jax.Array) or len(shape) != len(leaf.shape):
        return shape in (leaf.shape, _padded_shape(leaf, x))
    # An array from a file has no sharding. `read_unpadded` checks that its padding is zeros.
    return all(size >= unpadded for size, unpadded in zip(shape, leaf.shape, strict=True))


def _padded_shape(leaf: Leaf, x: Any) -> tuple[int, ...]:
    """Returns the leaf's shape with the padding that the sharding of `x` needs."""
    if not isinstance(x, jax.Array) or x.ndim != len(leaf.shape):
        return leaf.shape
    parts = x.sharding.shard_shape(x.shape)
    shards = [size // max(part, 1) for size, part in zip(x.shape, parts, strict=True)]
    return tuple(size + -size % max(n, 1) for size, n in zip(leaf.shape, shards, strict=True))


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _warn_of_casts(leaves: list[Leaf], found: Mapping[str, Any]) -> None:
    narrowed = [
        f"{leaf.name} from {_dtype(found[leaf.name])} to {leaf.dtype}"
        for leaf in leaves
        if leaf.name in found
        and not leaf.is_key
        and jnp.promote_types(_dtype(found[leaf.name]), leaf.dtype) != leaf.dtype
    ]
    if narrowed:
        warnings.warn(
            f"init_from: cast to the dtypes that the program stores (param_dtype, frozen_dtype): "
            f"{'; '.join(list_some(narrowed))}.",
            stacklevel=4,
        )
