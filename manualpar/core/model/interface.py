"""The functions of a model that a program calls, the same for every model library.

Each library has a subclass of `ModelInterface`. Importing the subclass's module registers it. The
subclass for Linen is in `manualpar.core.model.linen_model`, the subclass for NNX in
`manualpar.core.model.nnx_model`. Modules that call models import only this module.
Sections at the end have what both subclasses need: sown values, and keys of dropout.
"""

import abc
import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import AxisName, axis_tuple, is_axis_bound
from manualpar.core.mesh.splitting import fold_rng_over_axis
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.parameters.placement import Declared, MatrixDims, as_matrix
from manualpar.core.tracing.scopes import TENSOR_SCOPE
from manualpar.core.tracing.thread_patches import replaced_in_thread
from manualpar.core.trees import Batch, Variables

__all__ = [
    "InitArgs",
    "Model",
    "ModelInterface",
    "interface_of",
    "register_interface",
]

# -------------------------------------------------------------------------------------------------
# Replaces the axis names in a model's modules by the mesh axes that they stand for.
#
# `nn.BatchNorm(axis_name="batch")` computes its statistics over the devices along an axis called
# `batch`. The mesh's axes may have other names, so an alias maps `batch` to mesh axes. While the
# model runs inside `shard_map`, the field `axis_name` of its modules (in NNX the attribute) is set
# to these axes. In the other modes arrays are global, so the field is set to `None` and nothing is
# reduced. All modes give the same result if the alias stands for all axes that split the batch.
#
# Only fields with the name `axis_name` are replaced. If a model calls a collective, the axis
# argument of the call does not change.


@dataclasses.dataclass(frozen=True)
class AxisAliases:
    """Maps names that a model uses to mesh axes.

    Attributes:
      axes: For each name, the mesh axes that it stands for.
      split: The mesh axes of more than one device over which the batch is split.
    """

    axes: Mapping[str, tuple[str, ...]]
    split: tuple[str, ...]

    def resolve(self, module: Any) -> dict[str, AxisName | None]:
        """Returns the new field of a module, `{"axis_name": axes}`; `{}` if no alias fits it.

        If the mesh axes are not bound, because arrays are global, the new value is `None`.
        """
        names = getattr(module, "axis_name", None)
        all_names = names if isinstance(names, tuple | list) else (names,)
        if not any(name in self.axes for name in all_names if isinstance(name, str)):
            return {}
        axes = tuple(axis for name in all_names for axis in self.axes.get(name, (name,)))
        if all(map(is_axis_bound, axes)):
            return {"axis_name": axes if len(axes) > 1 else axes[0]}
        groups = getattr(module, "axis_index_groups", None)
        if set(self.split) - set(axes) or groups is not None:
            raise ValueError(
                f"model: {type(module).__name__} has axis_name={names!r}, which stands for {axes}"
                f"{'' if groups is None else ', and axis_index_groups'}, but in this mode the "
                f"batch is global along {self.split}, expected an alias for all of these axes"
                f"{'' if groups is None else ' and no groups'}, or mode='manual'."
            )
        return {"axis_name": None}


NO_ALIASES = AxisAliases({}, ())


def check_axis_aliases(
    strategy: str,
    aliases: Any,
    *,
    mesh: Mesh | AbstractMesh,
    data_axes: tuple[str, ...],
    on_global_arrays: bool,
) -> AxisAliases:
    """Checks a user's aliases, which map a name in the model to a mesh axis or a tuple of axes.

    With `on_global_arrays` no axis is bound, so each of `data_axes` becomes an alias of itself.
    """
    example = "axis_aliases={'batch': 'data'}"
    is_mapping = isinstance(aliases, Mapping) and all(isinstance(name, str) for name in aliases)
    if not is_mapping or not all(isinstance(x, str | tuple) for x in aliases.values()):
        raise TypeError(
            f"{strategy}: axis_aliases={aliases!r}, expected a dict with a mesh axis, or a tuple "
            f"of axes, for each name that the model uses. Write {example}."
        )
    axes = {name: axis_tuple(value) for name, value in aliases.items()}
    for name, value in axes.items():
        unknown = [axis for axis in value if axis not in mesh.shape]
        if unknown or not value:
            raise ValueError(
                f"{strategy}: axis_aliases has {name!r}: {aliases[name]!r}, expected axes of the "
                f"mesh, which has {list(mesh.shape)}. Write {example}."
            )
        if name in mesh.shape and value != (name,):
            raise ValueError(
                f"{strategy}: axis_aliases has {name!r}: {aliases[name]!r}, but {name!r} is an "
                "axis of the mesh; expected a name that is not an axis of the mesh. Rename the "
                "mesh's axis."
            )
    if on_global_arrays:
        axes = {axis: (axis,) for axis in data_axes} | axes
    split = tuple(axis for axis in data_axes if mesh.shape[axis] > 1)
    return AxisAliases(axes, split)


# -------------------------------------------------------------------------------------------------


class Applicable(Protocol):
    """A wrapped Linen module with `apply`, such as a module with a plan for tensor parallelism."""

    def apply(self, variables: Variables, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, as `flax.linen.Module.apply` does."""


# A Linen module, an NNX module, or a function that makes an NNX module.
Model = nn.Module | Callable[..., Any] | Applicable
# Makes the arguments of a model's call from a batch.
InitArgs = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]
# "eval" turns training off. "eval_dropout" turns training off except for dropout.
RunPhase = Literal["train", "eval", "eval_dropout"]


# A collection, the names of modules, and the name of a value.
SownPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelInterface(abc.ABC):
    """A model, and the settings of a program that change the model's calls.

    Attributes:
      module: The module.
      phase: Whether calls train or evaluate.
      axis_aliases: Maps axis names in the module to mesh axes.
      loop_dims: For each parameter's path, the dims over which loops run; `None` until these dims
        have been found.
      gathers_float8: Whether layers gather activations as float8 codes where only products in
        float8 read them. Modules with a field of this name get it.
      makes_variables_in_calls: Whether a call may add to collections, as `sow` does.
    """

    module: Any
    phase: RunPhase = "train"
    axis_aliases: AxisAliases = NO_ALIASES
    loop_dims: Mapping[str, frozenset[int]] | None = None
    gathers_float8: bool = False
    makes_variables_in_calls: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def wrap(cls, model: Any) -> Self | None:
        """Returns the interface of a model of this library; `None` for anything else."""

    @classmethod
    def collections_of(cls, variables: Variables) -> Mapping[str, Any] | None:
        """Returns the arrays of this library's containers by collection; `None` for other types."""
        del variables
        return None

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The function for the field `apply_fn` of a training state."""
        return self.apply

    @property
    def trainable(self) -> tuple[str, ...]:
        """Globs over the paths of trained parameters, used if the option `trainable` is not set."""
        return ("*",)

    @property
    def decodes_weights(self) -> bool:
        """Whether calls dequantize stored parameters, in the named scope `DECODE_SCOPE`."""
        return False

    def encodings(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Returns, for each array that a program stores quantized, an object that quantizes it.

        The keys are the names of the unquantized arrays. `leaves` are the `Leaf`s of the program's
        state. An object has `plain`, the `Leaf` of the unquantized array, and `encode(array)`,
        which returns by name the arrays that the state stores instead, such as codes and scales.
        """
        del leaves
        return {}

    def derived(self, params: Mapping[str, Any], missing: Collection[str]) -> dict[str, Any]:
        """Returns, by path, those of the parameters `missing` that follow from the others.

        A program calls it when parameters are loaded. `params` has all global arrays by path,
        without padding; those of `missing` are initial values.
        """
        del params, missing
        return {}

    def adapt_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Turns a loss in the form of this library into one of four arguments."""
        return loss_fn

    def initial_call(
        self, batch: Batch, init_args: InitArgs | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the `(args, kwargs)` with which `init` makes the variables for a batch."""
        del batch, init_args
        return (), {}

    def first_call(self, loss_fn: Callable[..., Any], batch: Batch) -> InitArgs | None:
        """Returns `init_args` that call the model as a loss does; `None` if they are not needed."""
        del loss_fn, batch
        return None

    @property
    def may_hold_sown(self) -> bool:
        """Whether the variables may have values that calls of the model left there by `sow`."""
        return False

    def without_earlier_sows(self) -> tuple[Self, frozenset[SownPath]]:
        """Returns the model without such values, and their paths, after a trace of its calls."""
        return self, frozenset()

    def declared(
        self, noted: Mapping[str, Declared], params: Mapping[str, Any]
    ) -> Mapping[str, Declared]:
        """Returns how modules declare the parameters, by path.

        `noted` has the parameters that modules of Linen made, see `noting_declared`; `params` has
        the abstract parameters by path. Parameters of unknown modules are left out.
        """
        del params
        return noted

    def check(self, trace: Callable[["ModelInterface"], None]) -> None:
        """Refuses a model that would compute wrong results on the mesh.

        `trace(interface)` traces the loss with the calls of `interface`.
        """
        del trace

    @abc.abstractmethod
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Initialises the variables, by collection, from a key or from `{"params": key}`."""

    @abc.abstractmethod
    def apply(self, variables: Variables, *args: Any, **kwargs: Any) -> Any:
        """Calls the model as `flax.linen.Module.apply` does; parameters may be in boxes."""

    def apply_keeping(
        self,
        variables: Variables,
        *args: Any,
        kept: Sequence[str],
        requested: Sequence[str],
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Calls `apply`, and separates the variables of the model from the values that it sows.

        Returns:
          The result, the updates of the collections `requested`, which have the sown values, and
          the updates of the collections `kept`, without sown values.
        """
        with recording_sows() as sown:
            out, updates = self.apply(variables, *args, mutable=[*kept, *requested], **kwargs)
        own = without_sown(updates, sown)
        asked = {name: updates[name] for name in requested if name in updates}
        return out, asked, {name: own[name] for name in kept if name in own}


_INTERFACES: list[type[ModelInterface]] = []
# The modules of the interfaces to flax's two libraries, which register themselves when they are
# imported. The core does not import them before a model is given to it.
_LIBRARIES = ("manualpar.core.model.linen_model", "manualpar.core.model.nnx_model")


def register_interface(interface: type[ModelInterface]) -> type[ModelInterface]:
    """Registers a class for `interface_of`; a decorator."""
    _INTERFACES.append(interface)
    return interface


def interface_of(model: Any) -> Any:
    """Returns the interface of a model; returns `model` itself if no class wraps it."""
    wrapped = (interface.wrap(model) for interface in _interfaces())
    return next((found for found in wrapped if found is not None), model)


def collections_of(variables: Variables) -> Mapping[str, Any] | None:
    """Splits a library's container of variables by collection; `None` for other types."""
    found = (interface.collections_of(variables) for interface in _interfaces())
    return next((tree for tree in found if tree is not None), None)


def _interfaces() -> list[type[ModelInterface]]:
    for library in _LIBRARIES:
        importlib.import_module(library)
    return _INTERFACES


# -------------------------------------------------------------------------------------------------
# Dropout keys for activations that are split over a model axis.
#
# The key of a loss differs over the axes that split the batch, and is the same along a model axis.
# This is right for activations that are replicated along the model axis, because all devices along
# the axis need the same mask. But split activations would be dropped at the same positions of
# every shard. Therefore the device's index is folded into the key for split activations. The type
# of the activations shows whether the activations are split.
#
# Invariants: a key changes only if the activations vary over an axis over which the key does not
# vary. Axes of one device do not count. A key that is the same on all devices does not change
# either: a program gives no such key to a loss, so the user has made this key to get one mask
# everywhere.


def key_like(key: jax.Array, x: jax.Array) -> jax.Array:
    """Makes a key differ along the axes over which `x` varies.

    Communication:
      None.
    """
    axes = sorted(varying_axes(x) - varying_axes(key))
    axes = [axis for axis in axes if jax.lax.axis_size(axis) > 1]
    with jax.named_scope(TENSOR_SCOPE):
        return fold_rng_over_axis(key, tuple(axes)) if axes and varying_axes(key) else key


@dataclasses.dataclass(frozen=True)
class SplitAttention:
    """Wraps flax's `attention_fn`, so that its dropout key varies like the queries.

    Attention draws its dropout key before the types show whether heads are split. With
    `broadcast_dropout` all heads share one mask on all devices.
    """

    attention_fn: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function whose signature flax reads."""
        return self.attention_fn

    def __call__(self, query: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """Calls `attention_fn`; flax passes the arguments of dropout by name."""
        key = kwargs.get("dropout_rng")
        if key is not None and not kwargs.get("broadcast_dropout", False):
            kwargs["dropout_rng"] = key_like(key, query)
        return self.attention_fn(query, *args, **kwargs)


# -------------------------------------------------------------------------------------------------
# Tells the values that a Linen model sows from the variables that a state keeps.
#
# `self.sow(collection, name, value)` and `self.perturb(name, value)` store a value of one call in
# a collection of any name. A variable (`self.variable`) looks the same in the collection. So the
# two methods are replaced while a model runs, to record the paths that they create.
#
# Invariants: a value that `sow` adds to a variable of the model belongs to this variable; numbers
# do not change. (`nn.jit` may take a call from its cache, which records nothing.)


@contextlib.contextmanager
def recording_sows() -> Iterator[set[SownPath]]:
    """Records the values that Linen models sow in this thread while the context is open."""
    found: set[SownPath] = set()

    def note(module: nn.Module, collection: str, name: str) -> None:
        scope = module.scope
        if scope is not None and scope.is_mutable_collection(collection):
            path = (collection, *scope.path, name)
            # The first call creates the value, and calls after it add to the value.
            if not scope.has_variable(collection, name):
                found.add(path)

    def replacement(method: str, old: Callable[..., Any]) -> Callable[..., Any]:
        def sow(module: nn.Module, col: str, name: str, *args: Any, **kwargs: Any) -> Any:
            note(module, col, name)
            return old(module, col, name, *args, **kwargs)

        def perturb(
            module: nn.Module, name: str, value: Any, collection: str = "perturbations"
        ) -> Any:
            note(module, collection, name)
            return old(module, name, value, collection)

        return sow if method == "sow" else perturb

    with replaced_in_thread([(nn.Module, "sow"), (nn.Module, "perturb")], replacement):
        yield found


def without_sown(variables: Mapping[str, Any], sown: set[SownPath]) -> dict[str, Any]:
    """Returns variables by collection without sown values, and without what is then empty."""
    firsts = {path[:1] for path in sown}

    def rest(tree: Any, path: SownPath) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        kept = {
            name: rest(value, (*path, name))
            for name, value in tree.items()
            if (*path, name) not in sown
        }
        dropped = {name for name, value in kept.items() if _is_empty(value, tree[name])}
        return {name: value for name, value in kept.items() if name not in dropped}

    found = {
        name: rest(tree, (name,)) if (name,) in firsts else tree for name, tree in variables.items()
    }
    return {name: tree for name, tree in found.items() if not _is_empty(tree, variables[name])}


def _is_empty(tree: Any, before: Any) -> bool:
    """Returns whether a mapping has lost all of its entries."""
    return isinstance(tree, Mapping) and not tree and bool(before)


# -------------------------------------------------------------------------------------------------
# Learns from a Linen model which dims of its parameters are the inputs and outputs of products.
#
# A module knows its kernel: `nn.DenseGeneral(features=(4, 8))` has two output dims. An optimizer
# that works on matrices needs these dims, and a loop hides them: it stacks a kernel `[D, F]` to
# `[L, D, F]`, and a bias `[F]` to `[L, F]`. So parameters are noted where modules make them.


@contextlib.contextmanager
def noting_declared() -> Iterator[dict[str, Declared]]:
    """Notes, by path, the parameters that Linen modules make in this thread in the context."""
    noted: dict[str, Declared] = {}

    def replacement(_: str, old: Callable[..., Any]) -> Callable[..., Any]:
        def param(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
            value = old(module, name, *args, **kwargs)
            shape = getattr(nn.unbox(value), "shape", None)
            if module.scope is not None and shape is not None:
                path = "/".join((*module.scope.path, name))
                noted[path] = Declared(shape, _matrix_of_linen(module, name, path, shape))
            return value

        return param

    with replaced_in_thread([(nn.Module, "param")], replacement):
        yield noted


def _matrix_of_linen(
    module: Any, name: str, path: str, shape: tuple[int, ...]
) -> MatrixDims | None:
    # The class first: flax intercepts the lookup of an attribute that a module does not have.
    own = module.matrix_dims if hasattr(type(module), "matrix_dims") else {}
    if name in own:
        found: MatrixDims | None = own[name]
        return found
    last, dims = len(shape) - 1, tuple(range(len(shape)))
    if isinstance(module, nn.Embed):
        return MatrixDims((0,), (1,), hidden=False)
    if isinstance(module, nn.Dense):
        return MatrixDims((0,), (1,)) if name == "kernel" else None
    if isinstance(module, nn.DenseGeneral):
        batch = len(axis_dims(module.batch_dims))
        first = len(shape) - len(axis_dims(module.features))
        return MatrixDims(dims[batch:first], dims[first:]) if name == "kernel" else None
    if isinstance(module, nn.Conv | nn.ConvTranspose):
        # Groups are blocks on the diagonal of a matrix, and not dims of the kernel.
        if name != "kernel" or getattr(module, "feature_group_count", 1) > 1:
            return None
        return of_convolution(len(shape), flipped=getattr(module, "transpose_kernel", False))
    if isinstance(module, nn.ConvLocal):  # Its kernel has the positions in front.
        return MatrixDims((last - 1,), (last,)) if name == "kernel" else None
    if isinstance(module, nn.Einsum) and module.einsum_str:
        return of_einsum(module.einsum_str) if name == "kernel" else None
    return as_matrix(path, len(shape))


def axis_dims(dims: Any) -> tuple[int, ...]:
    """Returns a layer's dims, which may be one number, as a tuple."""
    return (dims,) if isinstance(dims, int) else tuple(dims)


def of_convolution(number_of_dims: int, *, flipped: bool = False) -> MatrixDims:
    """Returns the dims of a kernel `[..., in, out]`; with `flipped` of `[..., out, in]`."""
    *window, one, other = range(number_of_dims)
    inputs, outputs = (other, one) if flipped else (one, other)
    return MatrixDims((*window, inputs), (outputs,))


def of_einsum(text: str) -> MatrixDims | None:
    """Returns the dims of the kernel in `input,kernel->result`; `None` if it is no matrix."""
    operands, _, result = "".join(text.split()).partition("->")
    x, _, kernel = operands.partition(",")
    if not result or "." in kernel:
        return None
    inputs = [dim for dim, name in enumerate(kernel) if name in x and name not in result]
    outputs = [dim for dim, name in enumerate(kernel) if name in result and name not in x]
    return MatrixDims(tuple(inputs), tuple(outputs)) if inputs and outputs else None
