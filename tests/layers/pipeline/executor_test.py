"""Pipelines against one device: the gradient of every parameter, and the metrics."""

import dataclasses
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from manualpar import make_mesh
from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.modes.gradients import accumulate, sync_gradients, sync_metrics
from manualpar.core.parameters.placement import strip_boxes
from manualpar.core.parameters.sharded_parameter import ShardedParameter, is_box
from manualpar.core.parameters.trainable import empty_part
from manualpar.layers.pipeline.executor import PipelineRun

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
        return *loss(params, *args, rings=case.rings), collections

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
