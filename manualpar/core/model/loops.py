"""Finds out how a loss uses parameters, before any parameter is sharded.

The loss is traced once, abstractly, with each parameter in a box that records its uses. The box
records the dims that `nn.scan` and `nn.vmap` run over, because these dims must not be sharded.

The box contains an array of random keys instead of the parameter. Code that reads the content
without `unbox()` would compute with a shard. Such code fails here, because arithmetic on keys
fails. The box also contains zeros, which detect a loss that differentiates a parameter. Such a loss
would be wrong: a gather's handwritten gradient is the gradient of a mean over devices.
"""

import contextlib
import functools
import itertools
import linecache
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.parameters.placement import is_inside
from manualpar.core.parameters.sharded_parameter import ArrayBox, ShardedParameter, boxed_axes
from manualpar.core.tracing.thread_patches import replaced_in_thread
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
      trace_loss: Traces the loss.
      boxed: The same tree with a true leaf for each parameter to probe.
      optional: The same tree with a true leaf for each further parameter to probe. If the loss
        reads one of these in a way that is refused, none of them is probed. One that is read in a
        loop within a branch that some devices skip is left out of the result.
      gathers_in_loss: Whether this package gathers parameters where the loss reads them. If so,
        the loss may not differentiate parameters.
    """
    key_dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype
    loop_dims: dict[str, set[int]] = {}
    in_branch: set[str] = set()

    def failure(boxed: Any) -> Exception | None:
        """Returns the error, if any, that the loss raises with these parameters in boxes."""

        def box(path: Any, is_boxed: bool, x: Any, value: Any) -> Any:
            if not is_boxed:
                return value
            name = path_name(path)
            record = _Uses(loop_dims.setdefault(name, set()), lambda: in_branch.add(name))
            names = tuple(map(str, range(x.ndim)))
            zeros = jnp.zeros(value.shape) if gathers_in_loss else None
            fields = {"uses": record, "part_shape": value.shape, "global_shape": x.shape}
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
            # Not all devices run such a branch, so no loop in it may reduce a gradient.
            for path in in_branch - {path_name(path) for path in _paths(boxed)}:
                del loop_dims[path]
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


def _paths(tree: Any) -> list[Any]:
    """Returns the paths of the true leaves."""
    return [path for path, is_true in jax.tree.leaves_with_path(tree) if is_true]


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
    paths = [path_name(path) for path in _paths(boxed)]

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


class _Uses:
    """Records how a parameter is used; all copies of a box share one record.

    Attributes:
      loop_dims: The dims that loops run over.
      read_in_branch: Records that a branch that some devices skip reads a slice of the parameter.
    """

    def __init__(self, loop_dims: set[int], read_in_branch: Callable[[], None]) -> None:
        self.loop_dims, self.read_in_branch = loop_dims, read_in_branch


class _Probe(ArrayBox, eq=False, repr=False):
    """A box of keys that replaces a parameter and records how the parameter is used.

    The field `names` has the number of each dim of the parameter, and `None` for a dim that a loop
    has added.
    """

    dtype: Any = flax.struct.field(default=None, pytree_node=False)
    uses: Any = flax.struct.field(default=None, pytree_node=False)
    part_shape: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    global_shape: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    # Loops and transformations slice the zeros like the keys. Zeros can be differentiated.
    zeros: Any = None

    def to_array(self) -> Any:
        """Returns zeros of the expected shape, typed as a gathered parameter is."""
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

    def read_in_branch(self) -> None:
        """Records it."""
        self.uses.read_in_branch()

    def only_value(self) -> "_Probe":
        """Returns a copy of the box without the zeros: only the array of keys is left."""
        self.to_array()
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
            self.uses.loop_dims.add(int(dim))
        return self.replace(names=tuple(names))


# -------------------------------------------------------------------------------------------------
# Lets JAX's loops and conditionals combine constants with arrays of data.
#
# Under `check_vma=True` the type of data says that it varies over devices; the type of a constant
# (`jnp.zeros(3)`) does not. With explicit axes, the type of data says how it is sharded. An
# operator casts a constant that it combines with data. `jax.lax.scan` and similar functions refuse
# the combination, because a carry keeps its type in all iterations, and all branches return the
# same types. The model would have to make the constant from data (`jnp.zeros_like(x)`), even in a
# library such as optax, or in flax, whose recurrent cells start from zeros. Therefore these
# functions of JAX are replaced while a model and a loss are traced. Where JAX refuses a type, the
# replacement finds the types at the end of the loop or the branches, casts the initial carry or
# the results to them, and tries again.
#
# The replacements also type the result if a condition differs between devices. JAX types `cond`
# only by its branches and `while_loop` only by its body, so a result that is one of two constants
# would be typed as the same on all devices.
#
# A parameter that gathers itself, or whose gradient is reduced where it is read, has a collective
# there. If some devices skip a branch, they also skip its collectives, and the others wait for
# ever. So a parameter that is read in a branch whose condition differs between devices is gathered
# before the conditional, and its gradient is reduced before it too, on all devices: a layer that
# is skipped (LayerDrop) is gathered, and has a gradient of zero. This is not possible for the
# slice of a parameter that a loop within the branch makes. Such a parameter is told
# (`read_in_branch`).
#
# Invariants: numbers do not change. A call that JAX accepts is traced as JAX traces it, unless its
# condition differs between devices. A cast only says that devices may differ, so it hides no
# missing sum: a result that has to be the same on all devices is refused later. The transpose of a
# cast sums over the devices, as the transpose of an operator's cast does. A cast shards dims that
# were not sharded, and never changes the axes of a dim.


# Words of JAX's error about types that vary over different axes, and of any error about types.
MISMATCH = "manual axis types"
_UNEQUAL = "must have equal"
_NAMES = ("scan", "while_loop", "fori_loop", "cond", "switch")


class _Type(NamedTuple):
    """The part of an array's type that a cast can change."""

    varying: frozenset[str]  # The mesh axes over which the array varies.
    shape: tuple[int, ...] = ()  # The shape, if the mesh has explicit axes.
    spec: tuple[Any, ...] = ()  # For each dim of the shape, the explicit axes that shard it.


# The types of a tree's leaves.
_Types = list[_Type]


def varying_loops() -> contextlib.AbstractContextManager[None]:
    """Makes JAX's loops and conditionals cast constants in this thread; a context manager.

    Communication:
      None. The transpose of a cast is a `psum`, see `cast_to_varying`; of a cast that shards dims,
      it is an all-gather.
    """
    return replaced_in_thread([(jax.lax, name) for name in _NAMES], _replacement)


def _replacement(name: str, original: Any) -> Callable[..., Any]:
    make: Callable[[Any], Callable[..., Any]] = globals()[f"_{name}"]
    return make(original)


def _scan(original: Any) -> Callable[..., Any]:
    def scan(f: Any, init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        def next_carry(carry: Any) -> Any:
            return f(carry, jax.tree.map(_like_one, xs))[0]

        def keeping_type(carry: Any, x: Any) -> Any:
            after, y = f(carry, x)
            return _cast(after, _types(carry)), y

        return _with_retry(
            lambda: original(f, init, xs, *args, **kwargs),
            lambda: original(keeping_type, _fixed_point(next_carry, init), xs, *args, **kwargs),
        )

    return scan


def _while_loop(original: Any) -> Callable[..., Any]:
    def while_loop(cond_fun: Any, body_fun: Any, init_val: Any) -> Any:
        def next_carry(carry: Any) -> Any:
            """Computes the next carry, typed to vary over the axes of the condition too."""
            return cast_to_varying(body_fun(carry), varying_axes(cond_fun(carry)))

        def keeping_type(carry: Any) -> Any:
            return _cast(body_fun(carry), _types(carry))

        axes = frozenset[str]().union(*(t.varying for t in _traced_types(cond_fun, init_val)))
        with _gathered_before(axes, lambda: (cond_fun(init_val), body_fun(init_val))):
            return _with_retry(
                lambda: original(cond_fun, body_fun, init_val),
                lambda: original(cond_fun, keeping_type, _fixed_point(next_carry, init_val)),
                at_once=bool(axes),
            )

    return while_loop


def _fori_loop(original: Any) -> Callable[..., Any]:
    def fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any, **kwargs: Any) -> Any:
        axes = varying_axes((lower, upper))

        def next_carry(carry: Any) -> Any:
            return cast_to_varying(body_fun(jnp.asarray(lower), carry), axes)

        def keeping_type(index: Any, carry: Any) -> Any:
            return _cast(body_fun(index, carry), _types(carry))

        fixed = functools.partial(_fixed_point, next_carry, init_val)
        with _gathered_before(axes, lambda: body_fun(jnp.asarray(lower), init_val)):
            return _with_retry(
                lambda: original(lower, upper, body_fun, init_val, **kwargs),
                lambda: original(lower, upper, keeping_type, fixed(), **kwargs),
                at_once=bool(axes),
            )

    return fori_loop


def _cond(original: Any) -> Callable[..., Any]:
    def cond(pred: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or not callable(args[0]) or not callable(args[1]):  # JAX's old signature.
            return original(pred, *args, **kwargs)
        return _call_branch(original, pred, args[:2], args[2:], kwargs, as_list=False)

    return cond


def _switch(original: Any) -> Callable[..., Any]:
    def switch(index: Any, branches: Sequence[Any], *operands: Any, **kwargs: Any) -> Any:
        return _call_branch(original, index, branches, operands, kwargs, as_list=True)

    return switch


def _call_branch(
    original: Any, index: Any, branches: Sequence[Any], operands: Any, kwargs: Any, *, as_list: bool
) -> Any:
    """Calls a conditional; its result varies over the axes of all branches and of the index."""
    if "operand" in kwargs:
        kwargs = dict(kwargs)
        operands = (kwargs.pop("operand"),)
    index_axes = varying_axes(index)
    if index_axes:
        # The transpose of a cast is a collective. Inside a branch only some devices would run it.
        operands = cast_to_varying(operands, index_axes)
        # As constants of the branches, the operands are known outside of the conditional.
        branches = [functools.partial(branch, *operands) for branch in branches]
        operands = ()

    def choose(branches: Sequence[Any]) -> Any:
        return original(index, *((branches,) if as_list else branches), *operands, **kwargs)

    def cast_and_choose() -> Any:
        types = [_traced_types(branch, *operands) for branch in branches]
        if len({len(leaves) for leaves in types}) > 1:
            return choose(branches)  # JAX refuses the different structures.
        by_index = _Type(index_axes)
        joined = [functools.reduce(_join, (*leaf, by_index)) for leaf in zip(*types, strict=True)]

        def casting(branch: Any) -> Any:
            return lambda *operands: _cast(branch(*operands), joined)

        return choose([casting(branch) for branch in branches])

    with _gathered_before(index_axes, *branches):
        return _with_retry(lambda: choose(branches), cast_and_choose, at_once=bool(index_axes))


@contextlib.contextmanager
def _gathered_before(axes: frozenset[str], *functions: Callable[[], Any]) -> Iterator[None]:
    """Unboxes parameters that functions read, before a condition that varies over `axes`.

    These are the parameters whose `unbox()` communicates over some of the axes.

    While the context is open, a box that could be unboxed here returns the value from here.

    Communication:
      The communication of `unbox()` for each of these boxes.
    """
    # A box whose arrays are the same in two traces of the functions comes from outside of them.
    first = _unboxed_in(functions) if axes else {}
    outside = first.keys() & _unboxed_in(functions).keys() if first else set[Any]()
    values = {
        key: cast_to_varying(box.unbox(), axes)
        for key, box in first.items()
        if key in outside and not axes.isdisjoint(_communication_axes(box))
    }
    for key in first.keys() - outside:
        first[key].read_in_branch()

    def unboxing(_: str, unbox: Any) -> Any:
        def unbox_before(box: ArrayBox, *args: Any, **kwargs: Any) -> Any:
            key = _identity(box)
            return values[key] if key in values else unbox(box, *args, **kwargs)

        return unbox_before

    with _replaced_unbox(unboxing) if values else contextlib.nullcontext():
        yield


def _unboxed_in(functions: Sequence[Callable[[], Any]]) -> dict[Any, ArrayBox]:
    """Traces functions, and returns the boxes that they unbox, by identity."""
    found: dict[Any, ArrayBox] = {}  # The boxes stay alive, so an identity stays unique.

    def recording(_: str, unbox: Any) -> Any:
        def unbox_and_record(box: ArrayBox, *args: Any, **kwargs: Any) -> Any:
            found.setdefault(_identity(box), box)
            return unbox(box, *args, **kwargs)

        return unbox_and_record

    with _replaced_unbox(recording), _drawing_again():
        for function in functions:
            # A new function in each call, because JAX would not trace the same one again.
            jax.eval_shape(lambda function=function: function())
    return found


def _communication_axes(box: ArrayBox) -> set[str]:
    """Returns the axes over which `unbox()` and its gradient communicate.

    A box that consists of other boxes returns none, because it unboxes them.
    """
    if not isinstance(box, ShardedParameter):
        return set()
    whole = boxed_axes(box) if box.is_whole else ()
    return {*box.gather_axes, *box.shard_only_axes, *box.comm.averaged_axes, *whole}


def _identity(box: ArrayBox) -> tuple[Any, ...]:
    return (type(box), box.is_whole, *map(id, jax.tree.leaves(box)))


def _replaced_unbox(replacement: Any) -> contextlib.AbstractContextManager[None]:
    classes = [x for x in _with_subclasses(ArrayBox) if "unbox" in vars(x)]
    return replaced_in_thread([(x, "unbox") for x in classes], replacement)


def _with_retry(plain: Callable[[], Any], cast: Callable[[], Any], *, at_once: bool = False) -> Any:
    """Calls `plain`, and `cast` if JAX refuses its types; with `at_once`, calls only `cast`."""
    if not at_once:
        with _drawing_again() as drawn:
            try:
                result = plain()
            except TypeError as error:
                has_explicit_axes = bool(jax.sharding.get_abstract_mesh().explicit_axes)
                is_of_types = MISMATCH in str(error)
                if not is_of_types and not (has_explicit_axes and _UNEQUAL in str(error)):
                    raise
            else:
                drawn.clear()
                return result
    return cast()


# The counters of a scope of flax, and what they were.
_Drawn = list[tuple[dict[Any, Any], dict[Any, Any]]]


@contextlib.contextmanager
def _drawing_again() -> Iterator[_Drawn]:
    """Lets a trace after this context draw the same keys as the traces inside of it.

    A scope of flax counts the keys that it draws, also in a trace that is thrown away. The counters
    that have changed are in the list, and get their old values when the context ends.
    """
    drawn: _Drawn = []

    def counting(_: str, make_rng: Any) -> Any:
        def make(scope: flax.core.Scope, *args: Any, **kwargs: Any) -> Any:
            drawn.append((scope.rng_counters, dict(scope.rng_counters)))
            return make_rng(scope, *args, **kwargs)

        return make

    with replaced_in_thread([(flax.core.Scope, "make_rng")], counting):
        try:
            yield drawn
        finally:
            for counters, before in reversed(drawn):
                counters.update(before)


def _fixed_point(after: Callable[[Any], Any], carry: Any) -> Any:
    """Casts the carry until `after(carry)` varies over no other axes and shards no other dims."""
    while True:
        found = _traced_types(after, carry)
        if len(found) != len(jax.tree.leaves(carry)):
            return carry  # JAX refuses the different structures.
        before, carry = _types(carry), _cast(carry, found)
        if _types(carry) == before:
            return carry


def _traced_types(function: Callable[..., Any], *args: Any) -> _Types:
    """Traces a function, and returns the types of its result's leaves."""
    found: list[_Types] = []
    with _drawing_again():
        jax.eval_shape(lambda *args: found.append(_types(function(*args))), *args)
    return found[-1]


def _like_one(xs: Any) -> Any:
    """Makes an array of the type of `xs[0]`; `xs` may have no entries."""
    type_ = _type(xs)
    zeros = jnp.zeros_like(xs, shape=jnp.shape(xs)[1:])
    # `zeros_like` of keys does not vary, and that of sharded arrays is not sharded.
    return _cast_leaf(zeros, _Type(type_.varying, type_.shape[1:], type_.spec[1:]))


def _type(x: Any) -> _Type:
    varying = varying_axes(x)
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return _Type(varying)
    return _Type(varying, jnp.shape(x), tuple(jax.typeof(x).sharding.spec))


def _types(tree: Any) -> _Types:
    return [_type(x) for x in jax.tree.leaves(tree)]


def _join(one: _Type, other: _Type) -> _Type:
    """Returns the type to which both can be cast; of shardings that contradict, the first one."""
    joined = one._replace(varying=one.varying | other.varying)
    if one.shape != other.shape or one.spec == other.spec:
        return joined  # JAX refuses different shapes.
    spec = tuple(a or b for a, b in itertools.zip_longest(one.spec, other.spec))
    names = [name for entry in spec for name in axis_tuple(entry or ())]
    return joined if len(names) > len(set(names)) else joined._replace(spec=spec)


def _cast_leaf(x: Any, wanted: _Type) -> Any:
    before = _type(x)
    joined = _join(before, wanted)
    x = cast_to_varying(x, joined.varying)
    return x if joined.spec == before.spec else jax.sharding.reshard(x, PartitionSpec(*joined.spec))


def _cast(tree: Any, types: _Types) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) != len(types):
        return tree  # JAX refuses the different structures.
    cast = [_cast_leaf(x, of_leaf) for x, of_leaf in zip(leaves, types, strict=True)]
    return jax.tree.unflatten(structure, cast)


def _with_subclasses(base: Any) -> set[Any]:
    """Returns a class and all its subclasses."""
    return {base}.union(*map(_with_subclasses, base.__subclasses__()))
