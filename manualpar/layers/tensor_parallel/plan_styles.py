"""Styles: the ways in which a module computes with shards of its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.model.interface import InitArgs
from manualpar.core.model.linen_model import initial_call
from manualpar.core.parameters.annotations import Rules
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.state.train_state import Batch
from manualpar.core.trees import path_name
from manualpar.layers.dense import SplitDense


@dataclasses.dataclass(frozen=True)
class Column:
    """Each device computes some of a module's outputs.

    Attributes:
      dim: The split dimension of kernel and bias, counted from the end: -1, or -2 for the heads
        of a kernel `[D, N, H]`.
      shared: Whether devices may share entries of a dim that is too small for one entry each, such
        as the key heads of grouped-query attention; see
        `manualpar.core.parameters.annotations.split`.
      bias_dim: The split dimension of the bias, if it differs from `dim`. A kernel `[F, D]` that
        the module transposes has `dim=-2` and `bias_dim=-1`.
    """

    dim: int = -1
    shared: bool = False
    bias_dim: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuses a dim that does not count from the end."""
        _check_dim(self)
        if self.bias_dim is not None:
            _check_dim(self, "bias_dim")

    def split_dim(self, name: str, ndim: int) -> int | None:
        """Returns the split dim of a parameter; `None` (not split) if it has too few dims."""
        dim = self.bias_dim if name == "bias" and self.bias_dim is not None else self.dim
        return dim if ndim >= -dim else None


@dataclasses.dataclass(frozen=True)
class Row:
    """Each device multiplies some of a module's inputs; then products are summed, and a bias added.

    Attributes:
      dim: The split dimension of the kernel, counted from the end: -2, or -3 for the heads of a
        kernel `[N, H, D]`.
    """

    dim: int = -2
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses a dim that does not count from the end."""
        _check_dim(self)

    def split_dim(self, name: str, ndim: int) -> int | None:
        """Returns the split dim of a parameter; `None` (not split) for the bias."""
        return None if name == "bias" or ndim < -self.dim else self.dim


@dataclasses.dataclass(frozen=True)
class Vocab:
    """An `nn.Embed` with some rows on each device; `attend` returns a part of the logits."""

    shared: ClassVar[bool] = False

    def split_dim(self, name: str, ndim: int) -> int | None:
        """Returns the split dim of the embedding."""
        del name
        return -2 if ndim >= 2 else None


@dataclasses.dataclass(frozen=True, init=False)
class PerDevice:
    """On each device a module's code gets the device's share of some of the module's numbers.

    Some modules reshape the output of their `Column`s, as in `query.reshape(B, S, self.num_heads,
    head_size)` in the module that calls `query`. On shards there are fewer heads. With the style
    `PerDevice("num_heads")` for that module, `self.num_heads` is this device's number of heads
    while one of its methods runs.

    Attributes:
      names: The names of the numbers: fields, attributes that `setup` sets, or entries of one of
        these, such as `"config.num_attention_heads"`. The device count must divide each number.
        Name the number of heads, and the size of the merged heads if the module uses that size
        (`"embed_dim"`).
    """

    names: tuple[str, ...]
    shared: ClassVar[bool] = False

    def __init__(self, *names: str) -> None:
        """Checks the names.

        Args:
          *names: The names of the numbers, see the class.

        Raises:
          ValueError: There are no names, or one is not a nonempty string.
        """
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"PerDevice: names={names!r}, expected names of numbers that the module has, such "
                "as PerDevice('num_heads')."
            )
        object.__setattr__(self, "names", names)

    def __repr__(self) -> str:
        return f"PerDevice({', '.join(map(repr, self.names))})"

    def split_dim(self, name: str, ndim: int) -> None:
        """Returns `None`, because the parameters of this module are not split."""
        del name, ndim


Style = Column | Row | Vocab | PerDevice
# Styles by globs on module paths.
TensorParallelPlan = Mapping[str, Style]


def _check_dim(style: Column | Row, name: str = "dim") -> None:
    dim = getattr(style, name)
    if not isinstance(dim, int) or dim >= 0:
        kind = type(style).__name__
        raise ValueError(
            f"{kind}: {name}={dim!r}, expected a negative number: dims count from the end, because "
            f"a loop over layers adds dims in front. Write {kind}() for the default."
        )


# -------------------------------------------------------------------------------------------------
# Derives a tensor parallelism plan from the logical names of a model's parameters.
#
# If a model's parameters are annotated for XLA (`nn.with_logical_partitioning`, with rules from
# names to mesh axes), the annotations already say which dims are split. If the product sums over
# the split dim of a kernel, the module is a `Row`, otherwise a `Column`. An `nn.Embed` with split
# rows is a `Vocab`.


class DerivedPlan(dict[str, Style]):
    """A plan that maps the path of each module to the module's style.

    Attributes:
      whole: The parameters that the rules split but the plan does not: path -> reason.
    """

    whole: dict[str, str]


def plan_from_rules(
    model: nn.Module,
    batch: Any,
    rules: Rules,
    axis: str = "model",
    *,
    init_args: InitArgs | None = None,
) -> DerivedPlan:
    """Derives the plan for `tensor_parallel` from logical names and rules.

    ```python
    plan = plan_from_rules(model, batch, rules)
    print(plan, plan.whole)
    program = manualpar.fsdp(tensor_parallel(model, plan), tx, loss_fn, rules=rules, ...)
    ```

    A parameter that the plan does not split is stored by the program's `rules`, and gathered where
    it is used. Devices may share heads of a `Column`, which grouped-query attention needs.

    Args:
      model: The model. It is initialised abstractly.
      batch: A batch as for a program, or the single input of the model; arrays or
        `jax.ShapeDtypeStruct`s.
      rules: Pairs of a logical name and a mesh axis, a tuple of axes or `None`, as for a program.
      axis: The mesh axis that the plan is for.
      init_args: Makes the arguments of the model's call from the batch, as for a program.

    Returns:
      The plan, which names each module by its path.

    Raises:
      ValueError: The plan would be empty; the message says why.

    Communication:
      None.
    """
    modules: dict[str, nn.Module] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.scope is not None:
            modules["/".join(context.module.path)] = context.module
        return next_fun(*args, **kwargs)

    def init(batch: Any) -> Any:
        args, kwargs = initial_call(model, batch, init_args)
        with nn.intercept_methods(note):
            return model.init(jax.random.key(0), *args, **kwargs)["params"]

    if init_args is None and not hasattr(batch, "inputs"):
        batch = Batch(batch, None)
    params = jax.eval_shape(init, batch)
    plan, whole = DerivedPlan(), dict[str, str]()
    for keys, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box):
        path = path_name(keys)
        if not isinstance(x, nn.LogicallyPartitioned):
            continue
        names = nn.logical_to_mesh_axes(x.names, (*(x.rules or ()), *rules)) or ()
        dims = [dim - len(names) for dim, name in enumerate(names) if axis in axis_tuple(name)]
        if not dims:
            continue
        module, _, name = path.rpartition("/")
        found = _style(modules[module], name, dims[0])
        if axis_tuple(names[dims[0]]) != (axis,):
            found = f"its dim {dims[0]} is split over {names[dims[0]]}"
        if isinstance(found, str):
            whole[path] = found
        elif name != "bias":
            plan[module] = found
    plan.whole = whole
    if not plan:
        reasons = f" ({whole})" if whole else ""
        raise ValueError(
            f"plan_from_rules: the rules {rules} split no module of {type(model).__name__} over "
            f"{axis!r}{reasons}, expected rules that split at least one module. Annotate kernels "
            "with nn.with_logical_partitioning, and give their names rules."
        )
    return plan


def _style(module: nn.Module, name: str, dim: int) -> Style | str:
    """Returns the style of a module whose parameter is split along `dim`, or why there is none."""
    kind = type(module).__name__
    if isinstance(module, nn.Embed):
        return Vocab() if dim == -2 else "the features of an nn.Embed are never split"
    outputs = _number_of_outputs(module)
    if outputs is None:
        return f"{kind} does not say which dims of it are summed over"
    if name not in ("kernel", "bias"):
        return f"it is neither the kernel nor the bias of its {kind}"
    # Devices may share heads. Any split dim before the last is taken for a dim of heads.
    return Column(dim, shared=dim < -1) if -dim <= outputs else Row(dim)


def _number_of_outputs(module: nn.Module) -> int | None:
    """Counts the last dims of a module's kernel that its product does not sum over."""
    if isinstance(module, SplitDense):
        return len(module.shape) - module.contracted
    if isinstance(module, nn.DenseGeneral):
        return 1 if isinstance(module.features, int) else len(module.features)
    return 1 if isinstance(module, nn.Dense | nn.Conv) else None
