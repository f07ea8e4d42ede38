"""Layers that permute, which no stage may leave out while another one runs them."""

import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.core.modes.gradients import accumulate, scanned
from manualpar.core.parameters.trainable import empty_part
from manualpar.layers.pipeline.executor import PipelineRun

B, D, L, M = 2, 4, 8, 3  # Examples, features, layers, microbatches.
STACKED = PartitionSpec("stage")


def _loss(params, collections, batch, rng):
    def layer(x, kernel):
        x = jax.lax.ppermute(x, "ring", [(0, 1), (1, 0)])
        return x + jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch @ params["into"], params["layers"])
    total = jnp.square(x @ params["into"].T).sum()
    return total, {"loss": (total, jnp.ones(()))}, collections


def _gradients(stages, schedule):
    """The gradients on each half of the ring, jitted, and their arguments."""
    names = ("into", "layers")
    specs = {"into": PartitionSpec(), "layers": STACKED if stages > 1 else PartitionSpec()}

    def device(params, batch):
        pair = params, empty_part(params)
        grads = accumulate(_loss, pair, {}, batch, jax.random.key(0), schedule=schedule)[0]
        if stages > 1:
            grads["into"] = jax.lax.psum(grads["into"], "stage")
        return jax.tree.map(lambda g: jax.lax.psum(g, "ring"), grads)

    mesh = make_mesh({"stage": stages, "ring": 2} if stages > 1 else {"ring": 2})
    on_mesh = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(None, "ring")),
        out_specs=specs,
        check_vma=True,
    )
    shapes = ((D, D), (L, D, D))
    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        name: jax.random.normal(key, shape) / 2
        for name, key, shape in zip(names, keys, shapes, strict=False)
    }
    return jax.jit(on_mesh), (params, jax.random.normal(keys[2], (M, 2 * B, D)))


@pytest.mark.slow
@pytest.mark.usefixtures("devices8")
def test_layers_that_permute_run_on_all_stages_where_one_has_to():
    run = PipelineRun("stage", "1f1b", 4, 1, M, (False, True))
    function, arguments = _gradients(4, run)
    # In the other ticks no stage computes: F in M + S - 1 ticks of M + 2 (S - 1), and B too.
    jaxpr = str(function.trace(*arguments).jaxpr.pretty_print(name_stack=True))
    assert set(re.findall(r"ticks_\d_[\d_]+_in_\d_of_\d", jaxpr)) == {
        "ticks_6_6_6_6_in_6_of_9",
        "ticks_3_0_0_0_in_3_of_9",
        "ticks_0_0_0_3_in_3_of_9",
    }
    expected, arguments = _gradients(1, scanned)
    chex.assert_trees_all_close(
        jax.device_get(function(*arguments)), jax.device_get(expected(*arguments)), rtol=2e-5
    )
