"""Calls Linen models on a mesh.

A module's fields are written for one device. While a method of the module runs in a program, some
fields are replaced:

- `axis_name`: by the mesh axes for which the name is an alias, see `axis_names`.
- Switches that tell the module to train: in evaluation, by their values for evaluation, see
  `evaluation`.
- The method of `nn.Dropout` that draws its key, and the `attention_fn` of attention, so that split
  activations are dropped independently, see `key_like`.
- The scales of flax's FP8 products, by scales that vary over the mesh axes of the operands, see
  `overwritten`.
- The switch `gathers_float8` of layers, by that of the program, see `ModelInterface`.
- Initializers, by initializers without annotations. When a model is applied, flax calls the
  initializers once more, to get the shapes. An annotated initializer (`nn.with_partitioning`) then
  returns a box. `nn.DenseGeneral`, which attention uses, calls the initializer with the flattened
  shape of its kernel, unboxes the result and reshapes it. On a mesh, the unboxing would constrain
  the sharding of the flattened array by the names of the kernel's dims. The program has read all
  annotations before, so they can be removed.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
from flax import nnx
from flax.errors import InvalidRngError
from flax.nnx.bridge.variables import NNXMeta

from manualpar.core.model.apply_fn import (
    DROPOUT_STREAM,
    EVAL_SWITCHES,
    EVALUATION_FIELDS,
    SWITCHES,
    overrule,
    required,
    signature_of,
)
from manualpar.core.model.interface import (
    InitArgs,
    ModelInterface,
    SplitAttention,
    key_like,
    register_interface,
)
from manualpar.core.model.nnx_model import adjust_to_mesh, annotate
from manualpar.core.modes.variable_reduction import overwritten_on_mesh
from manualpar.core.trees import Batch, Variables, path_name


@register_interface
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LinenModel(ModelInterface):
    """The interface of a Linen model.

    Attributes:
      interceptors: Functions for `nn.intercept_methods`, in calls and in `init`. The last
        interceptor is nearest to the modules' methods.
    """

    interceptors: tuple[Callable[..., Any], ...] = ()
    makes_variables_in_calls: ClassVar[bool] = True

    def __repr__(self) -> str:
        return repr(self.module)

    @classmethod
    def wrap(cls, model: Any) -> Self | None:
        """Returns the interface of a Linen module; `None` for anything else."""
        return cls(model) if isinstance(model, nn.Module) else None

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The module's `apply`, which equal modules share; `self.apply` if calls change fields."""
        changed = self.axis_aliases.axes or self.interceptors
        apply: Callable[..., Any] = self.apply if changed else self.module.apply
        return apply

    def initial_call(
        self, batch: Batch, init_args: InitArgs | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments that initialise the module, see `call_arguments.initial_call`."""
        return initial_call(self.module, batch, init_args)

    def first_call(self, loss_fn: Callable[..., Any], batch: Batch) -> InitArgs | None:
        """Returns `init_args` that call the module as a loss does, see `first_call`."""
        return first_call(self.module, loss_fn, batch)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls `module.init` with the interceptors; returns the variables by collection."""

        def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            with replace_fields(context.module, self._bridged(context.module)):
                return next_fun(*args, **kwargs)

        with nn.intercept_methods(intercept), self._intercepted():
            return _without_metadata(dict(self.module.init(rngs, *args, **kwargs)))

    def intercepted(self, interceptor: Callable[..., Any]) -> Self:
        """Returns the same model with `interceptor` added, nearest to the modules' methods."""
        return dataclasses.replace(self, interceptors=(*self.interceptors, interceptor))

    def annotated(self, path: str, kernel: Any) -> Any:
        """Returns the kernel of the module at `path` as `init` does: boxed if it is to be split.

        A subclass with a plan for tensor parallelism boxes kernels. This class boxes none.
        """
        del path
        return kernel

    def apply(self, variables: Variables, *args: Any, **kwargs: Any) -> Any:
        """Calls `module.apply` with fields replaced in every module."""
        switches, rngs = SWITCHES[self.phase], kwargs.get("rngs")
        withheld = False
        if "deterministic" in switches and isinstance(rngs, Mapping):
            withheld = DROPOUT_STREAM in rngs
            kwargs["rngs"] = {name: key for name, key in rngs.items() if name != DROPOUT_STREAM}

        with self.calls_on_mesh(withheld=withheld):
            out = self.module.apply(variables, *args, **kwargs)
        return out if kwargs.get("mutable", False) is False else (out[0], _without_metadata(out[1]))

    def drops(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether a call of `apply` after the variables drops activations.

        It does if it has a key of the stream `dropout`, and no switch that says to evaluate.
        """
        rngs, method = kwargs.pop("rngs", None), kwargs.pop("method", None)
        has_key = isinstance(rngs, Mapping) and DROPOUT_STREAM in rngs
        if self.phase == "eval" or not has_key:
            return False
        given = {name: value for name, value in kwargs.items() if name not in OF_APPLY}
        bound = signature_of(self.module, method).bind(*args, **given)
        bound.apply_defaults()
        return not any(bound.arguments.get(name) is value for name, value in EVAL_SWITCHES.items())

    @contextlib.contextmanager
    def calls_on_mesh(self, *, withheld: bool = False) -> Iterator[None]:
        """Replaces fields in every module of Linen that is called while the context is open.

        `withheld` says whether the key of the stream `dropout` is withheld, for an error message.
        """
        switches = SWITCHES[self.phase]

        def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            if context.method_name == "__getattr__":  # Fields are read with it.
                return next_fun(*args, **kwargs)
            if switches:
                signature = inspect.signature(context.orig_method)
                args, kwargs = overrule(signature, args, kwargs, switches)
            try:
                fields = self._fields_on_mesh(module, args) | overwritten_on_mesh(module, args)
                with replace_fields(module, fields):
                    return next_fun(*args, **kwargs)
            except InvalidRngError as error:
                if not withheld:
                    raise
                kind = type(module).__name__
                raise ValueError(
                    f"model: {'/'.join(module.path) or kind!r} ({kind}) draws from "
                    f"rngs[{DROPOUT_STREAM!r}] in evaluation, and has no argument or field that "
                    f"turns this off; expected one of {', '.join(EVAL_SWITCHES)}. Give the module "
                    "such an argument. If it is not dropout, let it draw from another stream. Or "
                    "leave dropout on in evaluation: eval_dropout=True."
                ) from error

        with nn.intercept_methods(intercept), self._intercepted():
            yield

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for interceptor in self.interceptors:
                stack.enter_context(nn.intercept_methods(interceptor))
            yield

    def _fields_on_mesh(self, module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
        """Returns, by name, the fields of a module whose values change in a call on the mesh."""
        fields: dict[str, Any] = self.axis_aliases.resolve(module)
        if self.phase != "train":
            fields |= getattr(module, EVALUATION_FIELDS, {})
        switches = SWITCHES[self.phase]
        for name in (field.name for field in dataclasses.fields(module)):
            value = getattr(module, name, None)
            if name in switches and isinstance(value, bool):
                fields[name] = switches[name]
            elif name == "gathers_float8" and isinstance(value, bool):
                fields[name] = value or self.gathers_float8
            elif name.endswith("init") and callable(value):
                fields[name] = _Unannotated(value)
        if isinstance(module, nn.Dropout) and args:
            draw = module.make_rng
            fields["make_rng"] = lambda *names: key_like(draw(*names), args[0])
        if isinstance(module, nn.MultiHeadDotProductAttention):
            fields["attention_fn"] = SplitAttention(module.attention_fn)
        return fields | self._bridged(module)

    def _bridged(self, module: nn.Module) -> dict[str, Any]:
        """Replaces what makes the NNX module in a bridge, `nnx.bridge.to_linen`."""
        if not isinstance(module, nnx.bridge.ToLinen):
            return {}
        make = module.nnx_class

        @functools.wraps(make, updated=())
        def made(*args: Any, rngs: Any = None, **kwargs: Any) -> Any:
            # A bridge has only the streams of the call, and `init` is called with `params` alone.
            # Layers such as dropout ask for their stream when they are made, and draw nothing.
            keys = {name: stream.key[...] for name, stream in rngs.items()} if rngs else {}
            streams = {"rngs": nnx.Rngs({"default": jax.random.key(0), **keys})} if rngs else {}
            with nnx.use_eager_sharding(False):  # The program shards the parameters.
                nnx_module = make(*args, **streams, **kwargs)
            adjust_to_mesh(nnx_module, self.axis_aliases, self.phase)
            return nnx_module

        return {"nnx_class": made}


def _without_metadata(variables: Any) -> dict[str, Any]:
    """Replaces variables of a bridge by arrays; parameters that are annotated are in boxes."""

    def strip(path: Any, x: Any) -> Any:
        if not isinstance(x, NNXMeta):
            return x
        name = path_name(path[1:])
        if path[0].key != "params":
            return x.value
        with nnx.use_eager_sharding(False):  # The program shards the parameters.
            return annotate(x.to_nnx_variable(), name)

    stripped: dict[str, Any] = jax.tree_util.tree_map_with_path(
        strip, variables, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)
    )
    return stripped


@contextlib.contextmanager
def replace_fields(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Sets fields of a frozen module to other values while the context is open."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


@dataclasses.dataclass(frozen=True)
class _Unannotated:
    """An initializer without its annotation. Equal wrappers compare equal, as `nn.jit` needs."""

    initializer: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = self.initializer(*args, **kwargs)
        return x.value if isinstance(x, nn.Partitioned) else x


# -------------------------------------------------------------------------------------------------
# Makes the arguments for a model's initialisation from a batch.
#
# The model is called with `batch.inputs`, or with the arguments that the user's `init_args`
# returns. A batch without `.inputs` and `init_args` is given to the loss, to see how it calls the
# model. Switches such as `train` are added. A call that does not fit the method is refused, and
# the error shows the `init_args` to write.

# Arguments of `apply` that are not the method's.
OF_APPLY = ("rngs", "mutable", "capture_intermediates")


def initial_call(
    module: Any, batch: Batch, init_args: InitArgs | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the `args` and `kwargs` with which a module is initialised.

    The `kwargs` of `init_args` may name another `method` than `__call__`. If the method has an
    argument `train` and `init_args` does not set it, `train` is `False`. Other `EVAL_SWITCHES` are
    added if they have no default.
    """
    if init_args is None and not hasattr(batch, "inputs"):
        raise TypeError(
            f"batch is a {type(batch).__name__}, expected one with .inputs, such as "
            "manualpar.Batch, or a loss that calls the model before it reads parameters. Or name "
            "the arguments of the model's call: "
            f"{_example(signature_of(module, None))}."
        )
    args, kwargs = _checked_pair(init_args(batch)) if init_args else ((batch.inputs,), {})
    method = kwargs.get("method")
    signature = signature_of(module, method)
    passed = {name: value for name, value in kwargs.items() if name != "method"}
    switches: dict[str, Any] = {}
    names: Mapping[str, Any] = signature.parameters
    try:
        names = signature.bind_partial(*args, **passed).arguments
        switches = {
            name: value
            for name, value in EVAL_SWITCHES.items()
            if name in signature.parameters.keys() - names.keys()
            and (name == "train" or signature.parameters[name].default is inspect.Parameter.empty)
        }
        signature.bind(*args, **passed, **switches)
    except TypeError as error:
        missing = [repr(name) for name in _required(signature) if name not in names]
        source = "the result of init_args" if init_args else "batch.inputs alone"
        called = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        raise TypeError(
            f"model: {type(module).__name__}.{called} cannot be called with {source} to initialise "
            f"the model: {'it also needs ' + ', '.join(missing) if missing else error}. It takes "
            f"{signature}. Make the arguments of the call from the batch: {_example(signature)}."
        ) from error
    return args, {**kwargs, **switches}


class _FirstCallError(Exception):
    """Leaves a loss at its first call of the model."""


def first_call(module: Any, loss_fn: Callable[..., Any], batch: Batch) -> InitArgs | None:
    """Returns `init_args` that make the arguments of the first call of a module in a loss.

    The result is `None` if the loss fails before, as with parameters that it reads itself, or if
    the call is within a transformation such as `jax.checkpoint`.
    """

    def init_args(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def apply_fn(variables: Any, *args: Any, **kwargs: Any) -> Any:
            del variables
            found.append((args, kwargs))
            raise _FirstCallError

        with contextlib.suppress(_FirstCallError):
            loss_fn({}, apply_fn, batch, jax.random.key(0))
        [(args, kwargs)] = found
        method = kwargs.get("method")
        kwargs = {name: x for name, x in kwargs.items() if name not in (*EVAL_SWITCHES, *OF_APPLY)}
        return overrule(signature_of(module, method), args, kwargs, EVAL_SWITCHES)

    def arrays(batch: Batch) -> list[Any]:
        return [x for x in jax.tree.leaves(init_args(batch)) if isinstance(x, jax.Array)]

    try:
        consts = jax.make_jaxpr(arrays)(batch).consts
    except Exception:  # Any error of the user's loss; `initial_call` then says what to write.
        return None
    # Arrays that exist only within a transformation become constants.
    return None if any(isinstance(x, jax.core.Tracer) for x in consts) else init_args


def _required(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """Selects the arguments without a default, except switches."""
    found = required(signature.parameters)
    return {name: parameter for name, parameter in found.items() if name not in EVAL_SWITCHES}


def _example(signature: inspect.Signature) -> str:
    """Formats the `init_args` that a method may need, as a user would write it."""
    args, kwargs = "", []
    for name, parameter in _required(signature).items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs.append(f"'{name}': batch['{name}']")
        else:
            args += f"batch['{name}'], "
    args = args[:-1] if args.count(",") == 1 else args[:-2]
    return f"init_args=lambda batch: (({args}), {{{', '.join(kwargs)}}})"


def _checked_pair(returned: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (0, 0)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise TypeError(
            f"init_args returned a {type(returned).__name__} that is not the pair (args, kwargs), "
            "expected a tuple of positional arguments and a dict of others, such as "
            "init_args=lambda batch: ((batch.inputs,), {})."
        )
    return tuple(args), dict(kwargs)
