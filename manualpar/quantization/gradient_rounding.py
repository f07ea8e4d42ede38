"""Corrects the rounding of quantized gradients: by error feedback or by stochastic rounding.

Error feedback: quantization loses a part of a device's gradient. This part is the *residual*. The
residual is added to the next step's gradient before quantization, so no part is lost in the long
run (1-bit SGD: Seide et al., https://doi.org/10.21437/Interspeech.2014-274; Karimireddy et al.,
https://arxiv.org/abs/1901.09847). `state.local["residuals"]` is a tree like the parameters. Each
leaf is one global array with all devices' residuals. The leading dimension of a leaf is sharded
over the axes of the quantized reduction.

Residuals exist only for gradients that are quantized once a step, after all minibatches, because
the backward pass and a single minibatch cannot read or return a residual.

Stochastic rounding (`StochasticQuantizer`) works for all gradients. Every step draws a new key for
each parameter, so that equal gradients of two steps are rounded differently.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.mesh.splitting import fold_rng_over_axis
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.strategy import Strategy
from manualpar.core.parameters.collectives import MixedPrecisionPolicy
from manualpar.core.parameters.placement import ParameterInfo, ParameterSharding
from manualpar.core.parameters.sharded_parameter import comm_policy, is_box
from manualpar.core.program.step import Rounding
from manualpar.core.trees import Grads, Infos, Params, PerDevice, Placements


def check_feedback(strategy: Strategy, options: Mapping[str, Any]) -> None:
    """Refuses error feedback unless gradients are quantized once, after all minibatches."""
    # If the strategy has replica axes, as HSDP, only the reduction over these axes is quantized.
    # This reduction runs once a step, in one collective, as error feedback requires.
    quantizes_all = not strategy.replica_axes
    axes = axis_tuple(options["axis_name"])
    axes += axis_tuple(options["context_axis"])  # This axis shards parameters too.
    for does_not_fit, got, expected in (
        (
            quantizes_all and strategy.reduce_every == "minibatch",
            "gradients that are reduced in each minibatch",
            "reductions once a step: data_parallel, zero with stage=1, hsdp, or "
            "communicate_every='step'",
        ),
        (options["pipeline"], "a pipeline", "pipeline=None"),
        (
            quantizes_all and options["axis_by_axis"] and len(axes) > 1,
            f"axis_by_axis=True over {axes}",
            "one reduction over all axes: axis_by_axis=False",
        ),
    ):
        if does_not_fit:
            raise ValueError(
                f"{strategy.name}: error_feedback=True with {got}, expected {expected}. Leave "
                "out error_feedback, or change the other option."
            )


class Residual(NamedTuple):
    """The global shape and the spec of a parameter's residual, an array of float32."""

    shape: tuple[int, ...]
    spec: PartitionSpec


def residual_of(
    info: ParameterInfo, place: ParameterSharding, comm: MixedPrecisionPolicy, mesh: Any
) -> Residual | None:
    """Returns a parameter's `Residual`; `None` if its gradient is not quantized once a step.

    The residual is the part of the gradient that the quantized reduce-scatter loses. Without a
    reduce-scatter, it is the part that the quantized all-reduce over the other axes loses.
    """
    names, comm = place.sharded_names, comm.for_parameter(info.dtype)
    padded = tuple(map(sum, zip(info.shape, place.padding or (0,) * len(names), strict=True)))
    scattered = [axes for axes in map(axis_tuple, names) if {*axes} & {*place.mean_axes}]
    scatter_axes = {axis for axes in scattered for axis in axes}
    others = tuple(axis for axis in place.mean_axes if axis not in scatter_axes)
    dtype = comm.reduced_dtype(info.dtype)
    for axes in (*scattered, *comm.reductions(others)[-1:]):
        size = axes_size(mesh, axes)
        rest = tuple(None if axis_tuple(name) == axes else name for name in names)
        numbers = 1  # The size of a device's gradient before the reduction.
        for dim, name in zip(padded, rest, strict=True):
            numbers *= dim // axes_size(mesh, axis_tuple(name))
        if place.trainable and size > 1 and comm.reduce_quantizer(numbers / size, dtype, axes):
            return Residual((size, *padded), PartitionSpec(axes, *rest))
    return None


@dataclasses.dataclass(eq=False)
class _ReductionQuantizer:
    """The base of quantizers for one parameter's gradient in one step; they only reduce.

    Attributes:
      quantizer: The wrapped quantizer.
    """

    quantizer: Any

    @property
    def name(self) -> str:
        """The name of the quantizer."""
        return str(self.quantizer.name)

    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether to use the quantizer, see `Quantizer`."""
        return bool(self.quantizer.is_worth(n, itemsize))


# The class is a pytree, so that a backward pass gets the key as a value.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["quantizer"])
@dataclasses.dataclass(eq=False)
class StochasticQuantizer(_ReductionQuantizer):
    """A quantizer that rounds up or down at random.

    Attributes:
      key: A key, the same on all devices; each device folds its index into the key. The layers of
        a scan share the key, and so do the minibatches. Their random numbers differ only if their
        scales differ, see `block_quantization.quantize`.
    """

    key: jax.Array

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Reduce-scatters with stochastic rounding, see `Quantizer`."""
        return self.quantizer.scatter_sum(x, dim, axes, key=self._key(x, axes))

    def mean(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """Averages with stochastic rounding, see `Quantizer`."""
        return self.quantizer.mean(x, axes, key=self._key(x, axes))

    def _key(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # A gradient may be reduced twice: the second reduction rounds the result of the first. With
        # the same key for both, the mean would be biased. So the key depends on the array's size.
        return fold_rng_over_axis(jax.random.fold_in(self.key, x.size), axes)


@dataclasses.dataclass(eq=False)
class ErrorFeedback(_ReductionQuantizer):
    """Quantizes a gradient plus the last step's residual, in one reduction.

    Attributes:
      residual: The residual of the last step.
      lost: The new residual: the part of gradient plus residual that quantization lost. `None`
        before the reduction.
    """

    residual: jax.Array
    lost: jax.Array | None = None

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Reduce-scatters `x` plus the residual, and sets `lost`, see `Quantizer`."""
        total, self.lost = self.quantizer.scatter_sum(self._add_residual(x), dim, axes)
        return total, self.lost

    def mean(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """Averages `x` plus the residual, and sets `lost`, see `Quantizer`."""
        mean, self.lost = self.quantizer.mean(self._add_residual(x), axes)
        return mean, self.lost

    def _add_residual(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) + self.residual


@dataclasses.dataclass(frozen=True)
class GradientRounding(Rounding):
    """The rounding of a step's quantized gradients; by default to the nearest code.

    Attributes:
      infos: The tree of trained parameters with a `ParameterInfo` at each leaf. It is read only
        with error feedback or stochastic rounding.
      residuals: The shape and spec of each residual, by the path of its parameter; `{}` without
        error feedback.
      is_stochastic: Whether gradients are rounded stochastically.
    """

    infos: Infos = None
    residuals: Mapping[str, Residual] = dataclasses.field(default_factory=dict)
    is_stochastic: bool = False

    def specs(self) -> dict[str, Any]:
        """Returns the specs of `TrainState.local`."""
        return self._per_device(lambda residual: residual.spec)

    def zeros(self) -> dict[str, Any]:
        """Returns the initial `TrainState.local`: residuals of zeros."""
        return self._per_device(lambda residual: jnp.zeros(residual.shape, jnp.float32))

    def with_keys(self, rng: jax.Array, *trees: Params) -> Sequence[Params]:
        """Gives each box in `trees` its key for stochastic rounding in this step, if needed."""
        if not self.is_stochastic:
            return trees
        infos, structure = jax.tree.flatten(self.infos)
        keys = jax.random.split(jax.random.fold_in(rng, len(infos)), len(infos))
        keys = jax.tree.unflatten(structure, [*keys])

        def with_key(key: jax.Array, x: Any) -> Any:
            return _with_quantizer(x, StochasticQuantizer(comm_policy(x).reduce.quantizer, key))

        return [jax.tree.map(with_key, keys, tree) for tree in trees]

    def reduce(
        self,
        reduce: Callable[[Params, Grads], Grads],
        grad_boxes: Params,
        grads: Grads,
        per_device: PerDevice,
    ) -> tuple[Grads, PerDevice]:
        """Adds the residuals to gradients, reduces them over the devices, and updates residuals.

        `reduce` uses the quantizers in the boxes; see `Rounding.reduce` for the arguments.
        """
        if not self.residuals:
            return reduce(grad_boxes, grads), per_device
        leaves = jax.tree.leaves(grad_boxes, is_leaf=is_box)
        pairs = zip(jax.tree.leaves(self.infos), leaves, strict=True)
        plain = {info.path: comm_policy(box).reduce.quantizer for info, box in pairs}
        residuals = flatten_dict(per_device["residuals"], sep="/")
        quantizers = {path: ErrorFeedback(plain[path], x[0]) for path, x in residuals.items()}

        def with_residual(info: ParameterInfo, x: Any) -> Any:
            return _with_quantizer(x, quantizers[info.path]) if info.path in quantizers else x

        trees = [jax.tree.map(with_residual, self.infos, tree) for tree in (grad_boxes, grads)]
        reduced = reduce(*trees)
        lost = {path: cast(jax.Array, each.lost)[None] for path, each in quantizers.items()}
        return reduced, {"residuals": unflatten_dict(lost, sep="/")}

    def _per_device(self, function: Any) -> dict[str, Any]:
        residuals = {path: function(each) for path, each in self.residuals.items()}
        return {"residuals": unflatten_dict(residuals, sep="/")} if residuals else {}


def gradient_rounding(
    strategy: Strategy,
    infos: Infos,
    placements: Placements,
    *,
    mode: Mode,
    options: Mapping[str, Any],
) -> GradientRounding:
    """Makes the `GradientRounding` of a program.

    Args:
      infos: The tree of trained parameters with a `ParameterInfo` at each leaf.
      placements: The same tree with a `ParameterSharding` at each leaf.
      options: The options of the program, see `ProgramOptions`.
    """
    error_feedback, is_stochastic = options["error_feedback"], options["stochastic_rounding"]
    residuals: dict[str, Residual] = {}
    if error_feedback:
        check_feedback(strategy, options)
        for info, place in zip(*map(jax.tree.leaves, (infos, placements)), strict=True):
            if residual := residual_of(info, place, mode.comm, mode.mesh):
                residuals[info.path] = residual
    return GradientRounding(infos, residuals, is_stochastic)


def _with_quantizer(x: Any, quantizer: Any) -> Any:
    """Replaces the gradient quantizer of a box, if the box has one."""
    comm = comm_policy(x)
    if comm.reduce.quantizer is None:
        return x
    return x.replace(comm=comm.with_reduce_quantizer(quantizer))
