"""What stages compute in a tick, read from a traced step."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from manualpar import abstract_mesh
from manualpar.core.modes.gradients import accumulate
from manualpar.core.parameters.trainable import empty_part
from manualpar.inspect.flops import stage_costs
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.schedules import Costs

B, INTO, D, OUT, L = 2, 3, 4, 7, 8  # Examples, inputs, features, outputs, layers.


def _trace(run: PipelineRun, *, permutes: bool = False):
    """The gradients of a pipeline, whose layers may permute over another axis."""

    def loss(params, collections, batch, rng):
        def layer(x, kernel):
            if permutes:
                x = jax.lax.ppermute(x, "ring", [(0, 1), (1, 0)])
            return x + jnp.tanh(x @ kernel), None

        x, _ = jax.lax.scan(layer, batch @ params["into"], params["layers"])
        total = jnp.square(x @ params["out"]).sum()
        return total, {"loss": (total, jnp.ones(()))}, collections

    def device(params, batch):
        pair = params, empty_part(params)
        return accumulate(loss, pair, {}, batch, jax.random.key(0), schedule=run)[0]

    mesh = abstract_mesh({"stage": run.num_stages, "ring": 2}, 2 * run.num_stages)
    specs = {"into": PartitionSpec(), "layers": PartitionSpec("stage"), "out": PartitionSpec()}
    varying = jax.tree.map(lambda spec: PartitionSpec(("stage", "ring")), specs)
    on_mesh = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(None, "ring")),
        out_specs=varying,
        check_vma=True,
    )
    shapes = {"into": (INTO, D), "layers": (L, D, D), "out": (D, OUT)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((run.num_microbatches, 2 * B, INTO), "float32")
    return jax.jit(on_mesh).trace(params, batch)


def _run(keep, *, num_stages=2, chunks=2):
    stacked = (False, True, False)
    return PipelineRun("stage", "1f1b", num_stages, chunks, 3, stacked, keep)


BEFORE, LAYER, AFTER = 2 * B * INTO * D, 2 * B * D * D, 2 * B * D * OUT


@pytest.mark.parametrize("keep", ["inputs", pytest.param("residuals", marks=pytest.mark.slow)])
def test_chunks_and_what_is_around_them(keep):
    run = _run(keep)
    again = 1 if keep == "inputs" else 0  # The F is computed again in the B.
    assert stage_costs(_trace(run), run.table) == Costs(
        forward=2 * LAYER,
        backward=(2 + again) * 2 * LAYER,
        before=BEFORE,
        before_backward=2 * BEFORE,  # Once again forward, and the gradient of its parameter.
        after=3 * AFTER,
    )


def test_layers_that_permute_are_computed_by_all_stages_where_one_has_to():
    run = _run("residuals", chunks=1)
    costs = stage_costs(_trace(run, permutes=True), run.table)
    assert (costs.forward, costs.backward) == (4 * LAYER, 8 * LAYER)
    assert (costs.before, costs.after) == (BEFORE, 3 * AFTER)


@pytest.mark.slow
def test_one_stage_has_chunks_alone():
    run = _run("residuals", num_stages=1, chunks=1)
    costs = stage_costs(_trace(run), run.table)
    assert costs.before == costs.after == 0
    assert costs.forward + costs.backward == 3 * (8 * LAYER + BEFORE + AFTER)
