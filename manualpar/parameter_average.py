"""A moving average of the parameters, kept in the optimizer's state.

After each update the average becomes `decay * average + (1 - decay) * parameters`. The average
begins with the initial parameters, so it can be used from the first step on. The averaged model is
often better than the last model (Polyak and Juditsky, 1992; Izmailov et al.,
https://arxiv.org/abs/1803.05407).

An average is a part of the optimizer's state, so it is sharded, saved and restored like Adam's
moments. The average is in float32 or wider, because with a decay of 0.999 bfloat16 would round the
changes to zero. Frozen parameters have no average.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manualpar.core.parameters.placement import is_masked
from manualpar.core.state.train_state import TrainState
from manualpar.core.trees import Grads, Params


class ParameterAverage(NamedTuple):
    """The part of an optimizer's state that `params_ema` adds.

    Attributes:
      ema: The average: a tree like the trained parameters, in float32 or wider.
    """

    ema: Any


def params_ema(decay: float) -> optax.GradientTransformation:
    """Makes an optimizer that averages parameters and passes updates through unchanged.

    ```python
    tx = optax.chain(optax.adamw(1e-4), params_ema(0.999))  # Last: it needs the final updates.
    ```

    Args:
      decay: The weight of the old average in an update, from 0 to less than 1.

    Returns:
      The transformation. Its state is a `ParameterAverage`, as large as the parameters in float32.

    Raises:
      ValueError: The decay is out of range.

    Communication:
      None: the average is sharded like the gradient.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"params_ema: decay={decay!r}, expected at least 0 and less than 1.")

    def init(params: Params) -> ParameterAverage:
        return ParameterAverage(jax.tree.map(lambda p: jnp.array(p, _dtype_of(p)), params))

    def update(updates: Grads, state: Any, params: Params = None) -> tuple[Any, ParameterAverage]:
        if params is None:
            raise ValueError("params_ema: update got no params; pass params= to tx.update.")
        new_params = optax.apply_updates(params, updates)
        new_params = jax.tree.map(lambda p: p.astype(_dtype_of(p)), new_params)
        return updates, ParameterAverage(optax.tree.update_moment(new_params, state.ema, decay, 1))

    return optax.GradientTransformation(init, update)


def ema_params(state: TrainState) -> TrainState:
    """Replaces a state's parameters by their average, to evaluate, export or serve.

    ```python
    metrics = program.eval_step(ema_params(state), batch)
    variables = program.whole(ema_params(state))
    ```

    Args:
      state: A state whose optimizer has a `params_ema`. It is neither donated nor changed.

    Returns:
      The state with parameters of the same dtypes and shardings. Frozen parameters and all other
      fields are the same arrays as in `state`.

    Raises:
      ValueError: The optimizer's state has no average, or more than one.

    Communication:
      None if parameters are sharded like their optimizer state. One all-gather of the average if
      parameters are replicated and their state is sharded.
    """
    leaves = jax.tree.leaves(state.opt_state, is_leaf=_is_average)
    found = [leaf for leaf in leaves if _is_average(leaf)]
    if len(found) != 1:
        raise ValueError(
            f"ema_params: the optimizer's state has {len(found)} averages of parameters, expected "
            "one. Make the optimizer with optax.chain(tx, params_ema(decay))."
        )
    is_frozen = [is_masked(x) for x in jax.tree.leaves(found[0].ema, is_leaf=is_masked)]
    params, structure = jax.tree.flatten(state.params)
    trained = [p for p, frozen in zip(params, is_frozen, strict=True) if not frozen]
    # `_as_parameters` is a module-level function, so JAX compiles it only once.
    averages = jax.jit(
        _as_parameters, static_argnums=1, out_shardings=tuple(p.sharding for p in trained)
    )(tuple(jax.tree.leaves(found[0].ema)), tuple((p.shape, p.dtype) for p in trained))
    rest = iter(averages)
    mixed = [p if frozen else next(rest) for p, frozen in zip(params, is_frozen, strict=True)]
    return state.replace(params=jax.tree.unflatten(structure, mixed))


def _as_parameters(averages: tuple[jax.Array, ...], types: Any) -> tuple[jax.Array, ...]:
    """Casts averages to the parameters' dtypes; removes padding that the parameters do not have."""
    return tuple(
        jax.lax.slice(x, [0] * x.ndim, shape).astype(dtype)
        for x, (shape, dtype) in zip(averages, types, strict=True)
    )


def _is_average(x: Any) -> bool:
    return isinstance(x, ParameterAverage)


def _dtype_of(x: Any) -> Any:
    """Returns the dtype of a parameter's average."""
    return jnp.promote_types(x.dtype, jnp.float32)
