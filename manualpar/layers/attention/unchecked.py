"""Functions that the check of varying axes cannot type, such as Pallas kernels.

Under `jax.shard_map(check_vma=True)` a Pallas kernel has to declare over which mesh axes its
results vary. Kernels that were written for one device, such as JAX's kernels, do not declare these
axes. `run_unchecked` runs such a function in a nested `shard_map` that splits nothing and checks
nothing, and types the results by hand. It is the only place in this package with `check_vma=False`.

The types are right, because on each device the function computes with only this device's values:

- It contains no collective and does not ask for the device's index. So its results can vary only
  over the axes over which an argument varies, and the results get this type. A function that names
  a mesh axis is refused.
- JAX never differentiates the nested `shard_map`. JAX's rule would sum or divide gradients, because
  without types it cannot tell which values vary. The forward and the backward pass have one nested
  `shard_map` each, and a `custom_vjp` around both connects them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes


def run_unchecked(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function of one device under a `shard_map` that checks types.

    Args:
      function: A function from arrays to arrays that names no mesh axis. Other values that it uses
        are constants.
      *args: Trees of this device's arrays. Integer arrays get no gradient.

    Returns:
      `function(*args)`, typed as varying over all axes over which an argument varies.

    Communication:
      None.

    Gradient:
      The gradient of `function`. A policy of `jax.checkpoint` sees the checkpoint names inside
      `function`.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function(*args)
    return _run(function, *cast_to_varying(args, varying_axes(args)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(function: Callable[..., Any], *args: Any) -> Any:
    return _nest(function, *args)


def _forward(function: Callable[..., Any], *args: Any) -> Any:
    return _nest(functools.partial(jax.vjp, function), *args)


def _backward(function: Callable[..., Any], vjp: Any, g: Any) -> Any:
    del function
    return _nest(_pull_back, vjp, g)


_run.defvjp(_forward, _backward)


def _pull_back(vjp: Any, g: jax.Array) -> Any:
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, vjp(g))


def _nest(function: Callable[..., Any], *args: Any) -> Any:
    def run(*args: Any) -> Any:
        args = jax.tree.map(_without_type, args)
        traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
        if traced.effects:
            raise ValueError(
                f"run_unchecked: the function has the effects {sorted(map(str, traced.effects))}, "
                "expected none: a collective in it would have a wrong gradient, because its types "
                "are not checked. Call collectives and axis_index outside of it."
            )
        leaves = jaxpr_as_fun(traced)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    everything = PartitionSpec()
    # Kernels do not declare over which axes their results vary. The module docstring says why
    # `check_vma=False` is right here.
    nested = jax.shard_map(run, in_specs=everything, out_specs=everything, check_vma=False)
    return cast_to_varying(nested(*args), varying_axes(args))


def _without_type(x: jax.Array) -> jax.Array:
    """Drops the varying axes from the type of an argument; the values stay the same.

    Inside a `shard_map` with `check_vma=False` the result of any operation has no varying axes, so
    the function applies two operations that cancel out.
    """
    return jax.lax.squeeze(jax.lax.expand_dims(x, (0,)), (0,))
