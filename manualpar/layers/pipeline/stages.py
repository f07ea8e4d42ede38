"""`Pipeline`: the option `pipeline=` of every builder, which divides layers among stages."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.modes.strategy import Strategy
from manualpar.core.trees import path_name
from manualpar.errors import check_choice
from manualpar.layers.pipeline.cut import check_divides, find_stacked
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.schedules import ScheduleName
from manualpar.layers.pipeline.staged_loss import PipelineSaves

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
KEEPS: tuple[PipelineSaves, ...] = get_args(PipelineSaves)
# The largest number of forward passes in a table (microbatches times all chunks). Making and
# checking a table of this size takes 10 s of one processor.
MOST_PASSES = 2**18


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Divides a model's layers among stages, which compute several microbatches at once.

    The model and the loss are written for one device, because the traced loss is cut at its scan
    over layers. The microbatches are the builder's minibatches; any number is allowed. With `M`
    microbatches and `S` stages a device is idle for `(S - 1) / (chunks M + S - 1)` of the time.

    Attributes:
      axis: The mesh axis; each device along it is a stage.
      schedule: The order of the passes: `"1f1b"` (the default) begins each microbatch's backward
        pass as soon as possible, and `"gpipe"` runs all forward passes first. With `"1f1b"` memory
        does not grow with the number of microbatches. (Narayanan et al.,
        https://arxiv.org/abs/2104.04473, section 2.2; Huang et al.,
        https://arxiv.org/abs/1811.06965.)
      chunks: The number of chunks of consecutive layers on a stage. With more chunks a device is
        idle for less time, but sends more and keeps more activations.
      keep: What a stage keeps of a microbatch until its backward pass: `"residuals"`, like
        autodiff, or `"inputs"`. With `"inputs"` the backward pass computes the stage again from its
        inputs, which takes a third more operations. 1F1B keeps up to `2 S - 1`
        microbatches on a stage, so residuals take much memory, and moving residuals takes time;
        `docs/pipelines.md` has measurements.
    """

    axis: str = "stage"
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    keep: PipelineSaves = "residuals"

    def __post_init__(self) -> None:
        """Refuses invalid values of fields."""
        check_choice("Pipeline", "schedule", self.schedule, SCHEDULES)
        check_choice("Pipeline", "keep", self.keep, KEEPS)
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"Pipeline: chunks={self.chunks!r}, expected a positive integer.")
        if not isinstance(self.axis, str):
            raise TypeError(f"Pipeline: axis={self.axis!r}, expected the name of a mesh axis.")

    def check(self, strategy: Strategy, options: Mapping[str, Any]) -> None:
        """Refuses strategies and options that a pipeline cannot be combined with.

        Raises:
          ValueError: `mode` is not `"manual"`, `use_scan` is set, or in each minibatch the strategy
            reduces gradients but does not gather parameters.
        """
        name = strategy.name
        if (mode := options["mode"]) != "manual":
            raise ValueError(
                f"{name}: pipeline= with mode={mode!r}, expected 'manual': a pipeline is made of "
                "collectives that are written by hand."
            )
        if options["use_scan"]:
            raise ValueError(
                f"{name}: pipeline= with use_scan=True, expected False: a pipeline already runs "
                "its microbatches in a scan."
            )
        if strategy.reduce_every == "minibatch" and strategy.sends(2, True).gathers < 2:
            raise ValueError(
                f"{name}: pipeline= with a strategy that reduces gradients in each minibatch but "
                "does not gather parameters in each of them, expected gradients that are reduced "
                "once a step, because a stage adds up full gradients. Use zero with stage=1, or "
                "communicate_every='step' or 'minibatch'."
            )

    def stacked(self, loss: ClosedJaxpr, paths: Sequence[str], size: int) -> frozenset[str]:
        """Finds the parameters with layers in dim 0, see `cut.find_stacked`.

        Raises:
          ValueError: The loss cannot be cut, or the number of layers is no multiple of the number
            of chunks on all `size` stages.
        """
        found = find_stacked(loss, paths)
        for path, x in zip(paths, loss.in_avals, strict=False):
            if path in found:
                check_divides(x.shape[0], size, self.chunks)
        return found

    def on_mesh(
        self, mesh: Mesh, strategy: Strategy, placements: Any, num_minibatches: int
    ) -> PipelineRun:
        """Makes the `PipelineRun` for a mesh, see `manualpar.core.modes.strategy.Stages`.

        Raises:
          ValueError: `keep_gathered` names a parameter of the layers, or the schedule has more than
            `MOST_PASSES` passes.
        """
        num_stages = mesh.shape[self.axis]
        if num_stages * self.chunks * num_minibatches > MOST_PASSES:
            raise ValueError(
                f"{strategy.name}: pipeline= with chunks={self.chunks} on each of {num_stages} "
                f"stages and num_minibatches={num_minibatches}, expected a product of at most "
                f"{MOST_PASSES}, because scheduling takes time for every pass; choose fewer chunks "
                "or minibatches."
            )
        for path, place in jax.tree_util.tree_leaves_with_path(placements):
            gathered = {axis for name in place.names for axis in axis_tuple(name)}
            gathered &= {*place.mean_axes}
            is_kept = place.keep and strategy.gather_every == "minibatch"
            if is_kept and gathered and self.axis in place.split_axes:
                raise ValueError(
                    f"{strategy.name}: pipeline= with keep_gathered, which names "
                    f"{path_name(path)!r}, a parameter of the layers; expected only other "
                    "parameters, such as ('head',), because a stage gathers a layer's parameters "
                    "where that layer runs."
                )
        return PipelineRun(
            axis=self.axis,
            schedule=self.schedule,
            num_stages=num_stages,
            chunks=self.chunks,
            num_microbatches=num_minibatches,
            stacked=tuple(self.axis in x.split_axes for x in jax.tree.leaves(placements)),
            keep=self.keep,
            regathers=strategy.reshard_after_forward,
        )
