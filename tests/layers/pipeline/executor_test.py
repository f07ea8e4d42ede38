"""Pipelines against one device: the gradient of every parameter, and the metrics."""

import dataclasses
import math
import re
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.model.loss_function import Mean
from manualpar.core.modes.gradients import accumulate, scanned, sync_gradients, sync_metrics
from manualpar.core.parameters.placement import empty_part, strip_boxes
from manualpar.core.parameters.sharded_parameter import ShardedParameter, is_box
from manualpar.layers.pipeline.executor import PipelineRun, exchange, sent_in_round

L, D, V = 4, 8, 12  # Layers, features, tokens.
NAMES = {
    "angle": (None,),
    "layers": {"bias": ("stage", None), "kernel": ("stage", None, "data")},
    "table": ("data", None),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline on a mesh."""

    data: int
    stages: int
    microbatches: int
    chunks: int = 1
    schedule: Any = "1f1b"
    keep: Any = "residuals"
    sharded: bool = False
    rings: bool = False

    @property
    def run(self) -> PipelineRun:
        """The schedule of gradients."""
        return PipelineRun(
            axis="stage",
            schedule=self.schedule,
            num_stages=self.stages,
            chunks=self.chunks,
            num_microbatches=self.microbatches,
            stacked=(False, True, True, False),
            keep=self.keep,
            regathers=self.sharded,
        )


def unbox_layer(w: Any) -> Any:
    """A parameter of one layer, gathered."""
    return w.remove_axis(0, {}).unbox() if is_box(w) else w


def there_and_back(x: jax.Array) -> jax.Array:
    """What it is given, sent to the next device and back as ring attention would send it."""
    pairs = [(i, (i + 1) % jax.lax.axis_size("data")) for i in range(jax.lax.axis_size("data"))]
    x = jax.lax.ppermute(x, "data", pairs)
    return jax.lax.ppermute(x, "data", [(b, a) for a, b in pairs])


def loss(params: Any, batch: Any, rng: jax.Array, *, rings: bool = False) -> Any:
    """A table that is also the head, a skip around the layers, noise, and a penalty of each layer.

    Layers know their number, count those before them and what is positive, and share an angle.
    They hand on a number that is the same on all devices.
    """
    table = nn.unbox(params["table"])
    x = table[batch["tokens"]]
    angle = jnp.cos(params["angle"])[None] * batch["weight"][:, None]
    layers = jax.tree.map(lambda w: 1.5 * w, params["layers"])

    def layer(carry: Any, xs: Any) -> Any:
        (x, positive, depth, share), (boxes, key, index) = carry, xs
        weights = {name: unbox_layer(w) for name, w in boxes.items()}
        y = jnp.tanh(x @ weights["kernel"] + weights["bias"][None]) * angle
        y = y * (1 + 0.1 * jax.random.normal(key, (D,)))[None]
        y = there_and_back(y) if rings else y
        y = jax.lax.cond(index % 2 == 0, jnp.sin, lambda y: y * index, y) / (1 + depth)
        carry = x + share * y, positive + (y > 0).sum(), depth + 1, jnp.float32(0.75)
        return carry, (y**2).mean(1)

    xs = layers, jax.random.split(rng, L), jnp.arange(L)
    carry = x, batch["tokens"].sum(), 0, jnp.float32(0.5)
    (y, positive, depth, _), penalty = jax.lax.scan(jax.checkpoint(layer), carry, xs)
    y = y / depth
    scores = jax.nn.log_softmax((y + 0.3 * x) @ table.T)
    each = penalty.sum(0) - jnp.take_along_axis(scores, batch["labels"][:, None], 1)[:, 0]
    total, number = (each * batch["weight"]).sum(), batch["weight"].sum()
    metrics = {"loss": (total, number), "positive": (positive, jnp.ones((), jnp.int32))}
    return total / number, metrics


def make_arrays(examples: int) -> tuple[Any, Any]:
    """Random parameters and a batch."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    layers = {"bias": normal(L, D), "kernel": normal(L, D, D) / 3}
    params = {"angle": normal(D), "layers": layers, "table": normal(V, D)}
    tokens, labels = jax.random.randint(next(keys), (2, examples), 0, V)
    weight = (jax.random.uniform(next(keys), (examples,)) < 0.7) + 0.5
    return params, {"labels": labels, "tokens": tokens, "weight": weight}


def on_one_device(case: Case) -> tuple[Any, Any]:
    """The gradient of the mean over all examples, and the metrics.

    A device's microbatch is a part of the batch, and devices share the keys of microbatches.
    """
    params, batch = make_arrays(2 * case.data * case.microbatches)
    keys = jnp.tile(jax.random.split(jax.random.key(1), case.microbatches), case.data)

    def total(params: Any) -> tuple[jax.Array, Any]:
        parts = jax.tree.map(lambda x: x.reshape(len(keys), 2), batch)
        _, metrics = jax.lax.map(lambda args: loss(params, *args), (parts, keys))
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
        return metrics["loss"][0] / metrics["loss"][1], metrics

    grads, metrics = jax.jit(jax.grad(total, has_aux=True))(params)
    return jax.device_get((grads, metrics))


def on_stages(case: Case, *, evaluate: bool = False) -> tuple[Any, Any]:
    """The gradient and the metrics of a pipeline, or the metrics alone."""
    params, batch = make_arrays(2 * case.data * case.microbatches)
    axes = ("stage", "data") if case.sharded else ("stage",)
    is_names = lambda x: isinstance(x, tuple)  # noqa: E731
    names = jax.tree.map(
        lambda some: tuple(x if x in axes else None for x in some), NAMES, is_leaf=is_names
    )
    specs = jax.tree.map(lambda some: PartitionSpec(*some), names, is_leaf=is_names)

    def box(some: Any, x: jax.Array) -> Any:
        return ShardedParameter(x, some, gather_axes=("data",)) if any(some) else x

    def carrying(params: Any, collections: Any, *args: Any) -> Any:
        mean, metrics = loss(params, *args, rings=case.rings)
        return Mean(mean, metrics["loss"][1]), metrics, collections

    def device(params: Any, batch: Any) -> Any:
        boxes, rng = jax.tree.map(box, names, params, is_leaf=is_names), jax.random.key(1)
        boxes = case.run.exchange_layers(boxes)
        if evaluate:
            metrics = case.run.metrics(
                lambda params, _, *args: loss(params, *args)[1], boxes, {}, batch, rng
            )
            return params, sync_metrics(metrics, "data")
        minibatches = split_minibatches(batch, case.microbatches)
        pair = boxes, empty_part(boxes)
        grads, sums, _ = accumulate(carrying, pair, {}, minibatches, rng, schedule=case.run)
        grads = case.run.exchange_layers(grads, back=True)
        grads = strip_boxes(sync_gradients(grads, "data"))
        for name in ("angle", "table"):
            grads[name] = jax.lax.psum(grads[name], "stage")
        return grads, sync_metrics(sums.metrics, "data")

    mesh = make_mesh({"data": case.data, "stage": case.stages})
    on_mesh = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec("data")),
        out_specs=(specs, PartitionSpec()),
        check_vma=True,
    )
    return jax.device_get(jax.jit(on_mesh)(params, batch))


FAST = [Case(4, 2, 3, chunks=2, keep="inputs", rings=True)]
SLOW = [
    Case(data, stages, microbatches, chunks, schedule, keep, sharded)
    for data, stages, microbatches, chunks, sharded in (
        (4, 2, 1, 1, False),
        (4, 2, 3, 1, True),
        (4, 2, 4, 2, True),
        (2, 4, 3, 1, True),
        (2, 4, 6, 1, False),
    )
    for schedule in ("gpipe", "1f1b")
    for keep in ("inputs", "residuals")
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(
    "case", FAST + [pytest.param(case, marks=pytest.mark.slow) for case in SLOW], ids=str
)
def test_gradients_and_metrics_are_those_of_one_device(case: Case) -> None:
    chex.assert_trees_all_close(on_stages(case), on_one_device(case), rtol=2e-5, atol=1e-6)


@pytest.mark.usefixtures("devices8")
def test_evaluation_runs_the_forward_pass_alone() -> None:
    case = Case(4, 2, 3, sharded=True)
    chex.assert_trees_all_close(
        on_stages(case, evaluate=True)[1], on_one_device(case)[1], rtol=2e-5
    )


# -------------------------------------------------------------------------------------------------
# Layers that are exchanged for interleaved chunks.


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


# -------------------------------------------------------------------------------------------------
# Layers that permute, which no stage may leave out while another one runs them.


B, WORK_DIM, WORK_LAYERS, M = 2, 4, 8, 3  # Examples, features, layers, microbatches.
STACKED = PartitionSpec("stage")


def _loss(params, collections, batch, rng):
    def layer(x, kernel):
        x = jax.lax.ppermute(x, "ring", [(0, 1), (1, 0)])
        return x + jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch @ params["into"], params["layers"])
    total = jnp.square(x @ params["into"].T).sum()
    return Mean(total, jnp.ones(())), {"loss": (total, jnp.ones(()))}, collections


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
    shapes = ((WORK_DIM, WORK_DIM), (WORK_LAYERS, WORK_DIM, WORK_DIM))
    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        name: jax.random.normal(key, shape) / 2
        for name, key, shape in zip(names, keys, shapes, strict=False)
    }
    return jax.jit(on_mesh), (params, jax.random.normal(keys[2], (M, 2 * B, WORK_DIM)))


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
