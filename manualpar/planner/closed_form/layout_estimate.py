"""Estimates a step on a layout that has not been traced.

The closed form makes the `StepWork` of a layout: its collectives, its products and its memory. The
roofline then times this work like the work of a traced program (`manualpar.planner.roofline`).

The closed form makes these assumptions. Only the largest products and reductions count. All stages
have as many layers as the fullest stage. If a model has a token that begins documents, each step
numbers the documents of its batch. Each step checks that gradients are finite. Quantizing and
dequantizing take no time, and quantization saves bytes that are sent, but no memory.
"""

import dataclasses
import functools
from typing import Any

from manualpar.core.mesh.compiler_options import Overlap
from manualpar.inspect.communication import grouped
from manualpar.inspect.parameter_formulas import ParameterForm
from manualpar.inspect.tick_parts import TickParts
from manualpar.layers.pipeline.schedules import make_table
from manualpar.models import Transformer
from manualpar.models.transformer_fields import flops_per_token
from manualpar.planner.closed_form.layout import (
    Layout,
    check_closed_form,
    find_obstacle,
    sizes_on_device,
)
from manualpar.planner.closed_form.layout_collectives import LayoutCollectives
from manualpar.planner.closed_form.layout_parameters import (
    abstract_parameters,
    model_on,
    parameter_forms,
)
from manualpar.planner.closed_form.layout_work import (
    SINGLE,
    STATE,
    state_elements,
    step_memory_of,
    step_products,
)
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import PartWork, PipelineWork, StepWork
from manualpar.planner.timed_collectives import Rings
from manualpar.planner.topology import Topology
from manualpar.strategies.shared_options import PARAMETER_SHARDING
from manualpar.training.monitoring.throughput import Throughput


class LayoutEstimator:
    """Estimates steps of a model on layouts of the same devices.

    Args:
      model: The model on one device, computed in bfloat16 and stored in float32.
      topology: The devices.
      examples: Examples of a step on all devices.
      positions: Positions of each example.
      even: Whether all stages must have equally many layers. If not, each stage counts as the
        stage with the most layers.
      min_weight_size: The size from which parameters are sharded, see `ParameterShardingOptions`.
      overlap: The compiler options, see `manualpar.core.mesh.compiler_options`.

    Raises:
      ValueError: There is no closed form for the model.
    """

    def __init__(
        self,
        model: Transformer,
        topology: Topology,
        *,
        examples: int,
        positions: int,
        even: bool = True,
        min_weight_size: int = PARAMETER_SHARDING["min_weight_size"].default,
        overlap: Overlap = "auto",
    ) -> None:
        check_closed_form(model)
        self.model, self.topology, self.even = model, topology, even
        self.examples, self.positions = examples, positions
        self._min_weight_size, self._overlap = min_weight_size, overlap
        self._throughput = Throughput(
            examples_per_step=examples,
            tokens_per_example=positions,
            flops_per_example=flops_per_token(model, positions) * positions,
        )
        self._rings: dict[str, Rings] = {}
        # A cache, because layouts that differ only in minibatches, chunks, `keep` and remat have
        # the same model and the same collectives of parameters.
        self._on_mesh = functools.cache(self._uncached_on_mesh)

    def estimate(self, layout: Layout, *, brief: bool = False) -> StepEstimate:
        """Estimates a step; with `brief`, without collectives, assumptions and notes.

        Raises:
          ValueError: The layout does not divide the model or the batch, or the mesh does not fit.
        """
        rings = self._rings.setdefault(layout.name, {})
        return estimate(self.work(layout, brief=brief), self.topology, rings=rings, brief=brief)

    def work(self, layout: Layout, *, brief: bool = False) -> StepWork:
        """Returns the work of a device, as `read_work` reads it off a traced program.

        If `brief` is set, `collectives` leaves out the collectives in a pipeline's ticks, which
        `pipeline` contains in any case.

        Raises:
          ValueError: The layout does not divide the model or the batch.
        """
        sizes: Any = {"examples": self.examples, "positions": self.positions}
        if problem := find_obstacle(self.model, layout, **sizes, even=self.even):
            raise ValueError(f"{layout.name}: {problem}.")
        x = sizes_on_device(self.model, layout, **sizes)
        shared = dataclasses.replace(
            layout, num_minibatches=1, chunks=1, keep="residuals", remat=next(iter(layout.remats))
        )
        model, forms = self._on_mesh(shared, x.L * layout.stage)
        ticks = _tick_parts(layout) if layout.stage > 1 else None
        sends = LayoutCollectives(model, layout, x, forms, ticks)
        chunk_runs = sends.chunk_runs if ticks is not None else 0
        products = step_products(x, layout, ticks=ticks, chunk_runs=chunk_runs)
        pipeline = None
        if ticks is not None:
            runs = {"forward": chunk_runs, "backward": chunk_runs}
            computed = grouped((ticks.of(product.scope), product) for product in products)
            works = {
                part: PartWork(
                    runs.get(part, layout.num_minibatches),
                    tuple(of_part),
                    tuple(computed.get(part, ())),
                )
                for part, of_part in sends.of_ticks().items()
            }
            pipeline = PipelineWork(ticks, works)
        return StepWork(
            name=f"{forms[0].program.strategy.name} manual",
            mesh=layout.mesh,
            throughput=self._throughput,
            num_minibatches=layout.num_minibatches,
            collectives=sends.outside_ticks() if brief else sends.of_step(),
            products=products,
            update_traffic=int(SINGLE * (3 + 2 * STATE) * state_elements(x, layout)),
            memory=step_memory_of(x, layout),
            overlap=self._overlap,
            pipeline=pipeline,
            source="closed form",
        )

    def _uncached_on_mesh(
        self, layout: Layout, num_layers: int
    ) -> tuple[Transformer, tuple[ParameterForm, ...]]:
        """Returns the model for the layout's program, and the collectives of its parameters."""
        model = self.model
        if layout.stage > 1 and num_layers != model.num_layers:  # As if all stages were full.
            model = model.clone(num_layers=num_layers)
        params = abstract_parameters(model)
        device = self.topology.chip.abstract_device
        forms = parameter_forms(params, layout, device, min_weight_size=self._min_weight_size)
        return model_on(model, layout, device), forms


def estimate_layout(
    model: Transformer, layout: Layout, topology: Topology, **options: Any
) -> StepEstimate:
    """Estimates one step; see `LayoutEstimator` for `options` and errors."""
    return LayoutEstimator(model, topology, **options).estimate(layout)


def _tick_parts(layout: Layout) -> TickParts:
    return _parts_of_table(layout.stage, layout.num_minibatches, layout.chunks)


@functools.lru_cache(maxsize=512)
def _parts_of_table(stages: int, microbatches: int, chunks: int) -> TickParts:
    return TickParts(make_table("1f1b", stages, microbatches, chunks))
