"""What a `Transformer` on any mesh must agree with: itself without an axis, in plain flax."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar import Batch, Program
from manualpar.core.model.loss_function import LossFn
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.flat_fields import with_fields


def loss_of(model: Transformer) -> LossFn:
    """The loss that suits a model."""
    return mixture_of_experts_loss if model.experts.num_experts else language_model_loss


@functools.cache
def on_one_device(model: Transformer, make_batch: Callable[[], Batch]) -> Any:
    """Parameters of the model without an axis, with random scales, and what it makes of them.

    And the collection of its routers' biases, which are random.
    """
    none = {"split_axis": "", "expert_axis": "", "sequence_parallel": False, "overlap": "none"}
    model = with_fields(model, context_axis="", **none)
    key, batch = jax.random.split(jax.random.key(0))[0], make_batch()
    initial = nn.unbox(jax.jit(lambda key: model.init({"params": key}, batch.inputs))(key))
    rng = np.random.default_rng(1)

    def perturb(x: jax.Array) -> jax.Array:
        # Biases, and the scales of norms with an offset, begin with zeros.
        noise, factors = rng.normal(0, 0.3, x.shape), rng.uniform(0.5, 2.0, x.shape)
        return jnp.asarray(np.where(x == 0, noise, x * factors), x.dtype)

    params = jax.tree.map(perturb, initial["params"])

    bias: Any = {"router": initial["router"]} if "router" in initial else {}
    bias = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-0.5, 0.5, x.shape), x.dtype), bias)

    def apply(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return model.apply({**variables, **bias}, *args, **kwargs)

    @jax.jit
    def loss_and_grads(params: Any) -> Any:
        def loss(params: Any) -> Any:
            # A function that is no module's is for logits.
            value, metrics = loss_of(model)(params, apply, batch, jax.random.key(0))
            if isinstance(value, Mapping):
                value = sum(total / count for total, count in value.values())
            return value, metrics

        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.device_get((initial["params"], params, bias, loss_and_grads(params)))


def assert_same_as_plain_flax(
    program: Program, model: Transformer, make_batch: Callable[[], Batch]
) -> None:
    """Asserts equal initial bits, metrics and a step of SGD with a rate of 1, at every leaf."""
    initial, params, bias, ((_, expected), grads) = on_one_device(model, make_batch)
    state = program.init(jax.random.key(0))
    chex.assert_trees_all_equal(jax.device_get(state.params), initial)
    params, collections = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding),
        (params, bias),
        (state.params, state.collections),
    )
    before = jax.device_get(params)
    state = state.replace(params=params, collections=collections)
    state, metrics = program.train_step(state, make_batch())
    chex.assert_trees_all_equal(jax.device_get(state.collections), bias)
    for name, (total, count) in expected.items():
        assert metrics[name][0] / metrics[name][1] == pytest.approx(total / count, rel=1e-5), name
    found = jax.tree.map(lambda old, new: old - new, before, jax.device_get(state.params))
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(grads), strict=True
    ):
        name = jax.tree_util.keystr(path)
        error = np.abs(got - want).max() / np.abs(want).max()
        # What all keys share does not change a softmax: the rest is of sums that nearly cancel.
        assert error < (1e-4 if "['key']" in name else 2e-5), (name, error)
