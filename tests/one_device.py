"""What every program must agree with: plain flax and optax on one device, none of this package."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import Batch, Program, TrainState


def name_of(parameter: Any) -> str:
    """A parameter's part of a test's name, the same in every process that collects the test."""
    if isinstance(parameter, nn.Module):
        return type(parameter).__name__
    return getattr(parameter, "__name__", None) or str(parameter)


def slow_unless(fast: Collection[tuple[Any, ...]], *case: Any) -> Any:
    """A case of a sweep, which is `slow` if it is not one of the fast ones."""
    return pytest.param(*case, marks=() if case in fast else pytest.mark.slow)


class Trained(NamedTuple):
    """Parameters before and after, other collections after, and the loss at every step."""

    initial: Any
    params: Any
    collections: Any
    losses: jax.Array


def train_on_one_device(
    model: nn.Module,
    tx: optax.GradientTransformation,
    batches: Sequence[Batch],
    loss_fn: Callable[..., Any],
    **init_args: Any,
) -> Trained:
    """Trains a model from the key that `train_program` starts from.

    Collections that the loss asks for with `mutable=` are not handed in, as one writes it by hand.
    """
    init_rng, rng = jax.random.split(jax.random.key(0))
    init = jax.jit(lambda key, x: model.init({"params": key}, x, **init_args))
    others = init(init_rng, batches[0].inputs)
    initial = params = others.pop("params")
    opt_state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, opt_state: Any, others: Any, batch: Batch) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            updated = others

            def apply_fn(variables: Any, *args: Any, mutable: Any = (), **kwargs: Any) -> Any:
                nonlocal updated
                kept = {name: tree for name, tree in others.items() if name not in mutable}
                variables = {**kept, **variables}
                out, updates = model.apply(variables, *args, mutable=[*kept, *mutable], **kwargs)
                updated = {name: updates.get(name, tree) for name, tree in others.items()}
                return (out, updates) if mutable else out

            value, _ = loss_fn(params, apply_fn, batch, rng)
            return value, updated

        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, others, value

    losses = []
    for batch in batches:
        params, opt_state, others, value = step(params, opt_state, others, batch)
        losses.append(value)
    trained = Trained(initial, params, others, jnp.stack(losses))
    return jax.device_get(trained)


@functools.cache
def _value_and_grad(mean_loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(mean_loss))


def optimize_on_one_device(
    tx: optax.GradientTransformation,
    params: Any,
    batches: Sequence[Batch],
    mean_loss: Callable[[Any, Batch], jax.Array],
) -> tuple[Any, Any, jax.Array]:
    """Takes a step for each batch, and hands the optimizer all that one of optax's may ask for.

    Returns the parameters, the optimizer's state and the loss at every step. The gradient is
    compiled once for all the optimizers that a loss is tried with.
    """

    @jax.jit
    def update(params: Any, opt_state: Any, value: jax.Array, grad: Any, batch: Batch) -> Any:
        value_fn = functools.partial(mean_loss, batch=batch)
        update_fn = optax.with_extra_args_support(tx).update
        updates, opt_state = update_fn(
            grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    losses = []
    opt_state = jax.jit(tx.init)(params)
    for batch in batches:
        value, grad = _value_and_grad(mean_loss)(params, batch)
        params, opt_state = update(params, opt_state, value, grad, batch)
        losses.append(value)
    return params, opt_state, jnp.stack(losses)


def train_program(program: Program, batches: Sequence[Batch]) -> tuple[TrainState, jax.Array]:
    """Trains a program; returns its state and the loss at every step."""
    state = program.init(jax.random.key(0))
    losses = []
    for batch in batches:
        state, metrics = program.train_step(state, batch)
        losses.append(metrics["loss"][0] / metrics["loss"][1])
    return state, jnp.stack(losses)


def slow(*args):
    return pytest.param(*args, marks=pytest.mark.slow)
