"""Layers that are exchanged for interleaved chunks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.layers.pipeline.executor import exchange, sent_in_round


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 9))
def test_in_each_round_every_stage_sends_one_chunk_and_receives_one(
    num_stages: int, chunks: int
) -> None:
    rounds = [sent_in_round(num_stages, chunks, index) for index in range(chunks)]
    for sent in rounds:
        assert [chunk // chunks for chunk in sent] == list(range(num_stages))
        assert sorted(chunk % num_stages for chunk in sent) == list(range(num_stages))
    assert sorted(chunk for sent in rounds for chunk in sent) == list(range(num_stages * chunks))


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(
    ("num_stages", "chunks"), [(4, 2), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_stages_get_the_chunks_that_they_run_and_give_them_back(
    num_stages: int, chunks: int
) -> None:
    layers = jnp.arange(num_stages * chunks * 2)[:, None] * jnp.ones((1, 3))
    mesh = make_mesh({"data": 2, "stage": num_stages}, jax.devices()[: 2 * num_stages])
    spec = PartitionSpec("stage")

    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = exchange(x, "stage", chunks)
        return there, exchange(there, "stage", chunks, back=True)

    on_mesh = jax.shard_map(
        there_and_back, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True
    )
    traced = jax.jit(on_mesh).trace(layers)
    assert str(traced.jaxpr).count("ppermute[") == 2 * chunks
    there, back = traced.lower().compile()(layers)
    np.testing.assert_array_equal(back, layers)
    runs = there[:, 0].reshape(num_stages, chunks, 2)
    for stage, place in np.ndindex(num_stages, chunks):
        first = 2 * (place * num_stages + stage)
        assert runs[stage, place].tolist() == [first, first + 1]
    assert math.prod(runs.shape) == len(layers)
