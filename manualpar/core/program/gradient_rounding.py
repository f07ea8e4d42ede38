"""What codes leave out of gradients is sent with the next step's, or right on average by itself.

A device's *residual* of a parameter is what the code of its own gradient left out. It is added to
the gradient of the next step before that is encoded, so that nothing is left out for good (1-bit
SGD: Seide et al., https://doi.org/10.21437/Interspeech.2014-274; error feedback: Karimireddy et
al., https://arxiv.org/abs/1901.09847). Of all devices together it is an array with a leading
dimension, sharded over the axes over which codes are exchanged: `state.local["residuals"]`, a tree
like the parameters'.

Residuals are for gradients that are encoded once a step, after all minibatches. What the backward
pass encodes, or each minibatch, has none to begin with and none to return.

Rounding at random (`StochasticQuantizer`) is for all gradients. It takes a key that every step
makes anew for each parameter. A key made of the gradient alone would round equal gradients equally.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.mesh.rng import fold_rng_over_axis
from manualpar.core.model.options import ROUNDING
from manualpar.core.modes.manual import Manual
from manualpar.core.modes.strategy import Strategy
from manualpar.core.parameters.collectives import CommPolicy
from manualpar.core.parameters.placement import ParameterInfo, Placement
from manualpar.core.parameters.sharded_parameter import comm_policy, is_box


def check_feedback(strategy: Strategy, options: Mapping[str, Any]) -> None:
    """Refuses residuals where gradients are not encoded once, after all minibatches.

    Raises:
      ValueError: `error_feedback=True` does not go with another option, which is named.
    """
    # What crosses axes of replicas is encoded once a step, over all of them at once.
    is_within = not strategy.replica_axes
    axes = axis_tuple(options.get("axis_name", "data"))
    axes += axis_tuple(options.get("context_axis"))  # Parameters are sharded over it too.
    for does_not_fit, got, expected in (
        (
            is_within and strategy.reduce_every == "minibatch",
            "gradients that are reduced in each minibatch",
            "reductions once a step: of data_parallel, of zero with stage=1, of hsdp, or with "
            "communicate_every='step'",
        ),
        (options.get("pipeline"), "a pipeline", "pipeline=None"),
        (
            is_within and options.get("axis_by_axis") and len(axes) > 1,
            f"axis_by_axis=True over {axes}",
            "one reduction over all axes: axis_by_axis=False",
        ),
    ):
        if does_not_fit:
            raise ValueError(
                f"{strategy.name}: error_feedback=True with {got}, expected {expected}. Leave "
                "error_feedback out, or change that."
            )


class Residual(NamedTuple):
    """The residual of a parameter, in float32: its global shape, and how it lies."""

    shape: tuple[int, ...]
    spec: PartitionSpec


def residual_of(
    info: ParameterInfo, place: Placement, wire: CommPolicy, mesh: Any
) -> Residual | None:
    """The residual of a parameter whose gradient is encoded once a step; `None` if it is not.

    Its gradient is scattered, if that takes codes, or else averaged over the axes that do.
    """
    names, wire = place.sharded_names, wire.for_parameter(info.dtype)
    padded = tuple(map(sum, zip(info.shape, place.padding or (0,) * len(names), strict=True)))
    scattered = [axes for axes in map(axis_tuple, names) if {*axes} & {*place.mean_axes}]
    done = {axis for axes in scattered for axis in axes}
    others = tuple(axis for axis in place.mean_axes if axis not in done)
    dtype = jnp.dtype(wire.reduce_dtype or wire.gather_dtype or info.dtype)
    for axes in (*scattered, *wire.reductions(others)[-1:]):
        size = axes_size(mesh, axes)
        rest = tuple(None if axis_tuple(name) == axes else name for name in names)
        has = 1  # What a device has of the gradient before it is encoded.
        for dim, name in zip(padded, rest, strict=True):
            has *= dim // axes_size(mesh, axis_tuple(name))
        if place.trainable and size > 1 and wire.reduce_quantizer(has / size, dtype, axes):
            return Residual((size, *padded), PartitionSpec(axes, *rest))
    return None


@dataclasses.dataclass(eq=False)
class _Reducer:
    """The code of a parameter's reductions in a step: a `Coding` that gathers nothing.

    Attributes:
      coding: The code.
    """

    coding: Any

    @property
    def name(self) -> str:
        """The name of its codes."""
        return str(self.coding.name)

    def row_bytes(self, n: int) -> int:
        """The bytes in which a row of `n` numbers travels."""
        return int(self.coding.row_bytes(n))


# A pytree, so that a backward pass gets its key as a value.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["coding"])
@dataclasses.dataclass(eq=False)
class StochasticQuantizer(_Reducer):
    """A code that rounds up or down at random.

    Attributes:
      key: A key, the same on all devices, into which the device's place is folded. The layers of a
        scan and the minibatches share it. They round otherwise as far as their scales differ, see
        `block_quantization.quantize`.
    """

    key: jax.Array

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """As a `Coding` does."""
        return self.coding.scatter_sum(x, dim, axes, key=self._key(x, axes))

    def mean(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """As a `Coding` does."""
        return self.coding.mean(x, axes, key=self._key(x, axes))

    def _key(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # Each further reduction of a gradient has fewer numbers. With the key of the one before,
        # whose result it rounds, it would not be right on average.
        return fold_rng_over_axis(jax.random.fold_in(self.key, x.size), axes)


@dataclasses.dataclass(eq=False)
class ErrorFeedback(_Reducer):
    """A code that takes what it left out in the step before with it, for one reduction.

    Attributes:
      residual: What is added before it is encoded.
      lost: After the reduction, what this device's codes have left out.
    """

    residual: jax.Array
    lost: jax.Array | None = None

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """As a `Coding` does."""
        total, self.lost = self.coding.scatter_sum(self._with(x), dim, axes)
        return total, self.lost

    def mean(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """As a `Coding` does."""
        mean, self.lost = self.coding.mean(self._with(x), axes)
        return mean, self.lost

    def _with(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) + self.residual


@dataclasses.dataclass(frozen=True)
class GradientRounding:
    """What a step does about what its codes leave out.

    Attributes:
      infos: The tree of trained parameters with a `ParameterInfo` at each leaf.
      residuals: The residual of each parameter that has one, by its path.
      rounds_at_random: Whether it rounds at random, and not to the nearest.
    """

    infos: Any
    residuals: Mapping[str, Residual]
    rounds_at_random: bool

    def specs(self) -> dict[str, Any]:
        """How what devices have of their own lies."""
        return self._local(lambda residual: residual.spec)

    def zeros(self) -> dict[str, Any]:
        """What they begin with."""
        return self._local(lambda residual: jnp.zeros(residual.shape, jnp.float32))

    def round_at_random(self, rng: jax.Array, *trees: Any) -> Any:
        """Trees of boxes that round at random, if that is asked for."""
        if not self.rounds_at_random:
            return trees
        infos, structure = jax.tree.flatten(self.infos)
        keys = jax.random.split(jax.random.fold_in(rng, len(infos)), len(infos))
        keys = jax.tree.unflatten(structure, [*keys])

        def at_random(key: jax.Array, x: Any) -> Any:
            return _with_code(x, StochasticQuantizer(comm_policy(x).reduce_code, key))

        return [jax.tree.map(at_random, keys, tree) for tree in trees]

    def attach(self, local: Any, grads: Any, shards: Any) -> tuple[dict[str, ErrorFeedback], Any]:
        """The sender of each parameter that has a residual, and both trees with them in boxes."""
        boxes = jax.tree.leaves(shards, is_leaf=is_box)
        pairs = zip(jax.tree.leaves(self.infos), boxes, strict=True)
        codes = {info.path: comm_policy(box).reduce_code for info, box in pairs}
        residuals = flatten_dict(local.get("residuals", {}), sep="/")
        senders = {path: ErrorFeedback(codes[path], each[0]) for path, each in residuals.items()}

        def with_sender(info: ParameterInfo, x: Any) -> Any:
            return _with_code(x, senders[info.path]) if info.path in senders else x

        return senders, [jax.tree.map(with_sender, self.infos, tree) for tree in (grads, shards)]

    def left_out(self, senders: Mapping[str, ErrorFeedback]) -> dict[str, Any]:
        """The residuals after the reductions."""
        lost = {path: cast(jax.Array, sender.lost)[None] for path, sender in senders.items()}
        return {"residuals": unflatten_dict(lost, sep="/")} if lost else {}

    def _local(self, function: Any) -> dict[str, Any]:
        residuals = {path: function(each) for path, each in self.residuals.items()}
        return {"residuals": unflatten_dict(residuals, sep="/")} if residuals else {}


def gradient_rounding(
    strategy: Strategy,
    infos: Any,
    placements: Any,
    *,
    mode: Manual,
    options: Mapping[str, Any],
) -> GradientRounding | None:
    """What the options of a program ask for; `None` if it is neither residuals nor randomness.

    `infos` and `placements` are trees of trained parameters.

    Raises:
      ValueError: See `check_feedback`.
    """
    keeps, rounds_at_random = (options.get(name, False) for name in ROUNDING)
    if not keeps and not rounds_at_random:
        return None
    residuals: dict[str, Residual] = {}
    if keeps:
        check_feedback(strategy, options)
        for info, place in zip(*map(jax.tree.leaves, (infos, placements)), strict=True):
            if residual := residual_of(info, place, mode.wire, mode.mesh):
                residuals[info.path] = residual
    return GradientRounding(infos, residuals, rounds_at_random)


def _with_code(x: Any, code: Any) -> Any:
    """A box that reduces by another code; what is reduced as it is stays so."""
    wire = comm_policy(x)
    return x if wire.reduce_code is None else x.replace(wire=wire._replace(reduce_code=code))
