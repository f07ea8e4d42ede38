"""Applies the optimizer's update in a step, to global arrays.

An optimizer gets parameters, gradients and its state as on one device: global arrays without
padding. So the norms, means and matrices that it computes are the same as on one device.
Parameters, gradients and state have equal shardings, so an elementwise optimizer needs no
collectives. In mode `manual` an optimizer that multiplies matrices, such as Muon, runs on whole
matrices, see `manualpar.core.program.whole_matrices`. XLA inserts the collectives that any other
optimizer needs.

With ZeRO-1 and -2 parameters are replicated between steps, and the optimizer's state is sharded.
These parameters are sliced before the update and gathered after it. The slicing sends nothing.
Padding is removed before the update and added again after it.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.core.modes.mode import Mode
from manualpar.core.parameters.placement import (
    Placement,
    like_params,
    map_in_scopes,
    map_padded,
    param_specs,
    state_specs,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf
from manualpar.core.program.whole_matrices import (
    MatrixFunctions,
    MatrixParameter,
    has_matrices,
)
from manualpar.core.summary import Summarized, leaf_types
from manualpar.core.tracing.scopes import OPTIMIZER_SCOPE
from manualpar.core.trees import Grads, Infos, OptState, Params, Placements, path_name

# An optimizer, or a function that makes it from the tree of the parameters' `ParameterInfo`s.
Optimizer: TypeAlias = optax.GradientTransformation | Callable[[Any], optax.GradientTransformation]

# Python's words, and those of the line search of L-BFGS.
_REFUSED = re.compile(
    r"(?:got an unexpected keyword argument |not consumed by `value_fn`: \[)'(\w+)'"
)


@dataclasses.dataclass(frozen=True, repr=False)
class Update(Summarized):
    """The optimizer's part of a step.

    Attributes:
      mode: Decides whether this package or XLA writes the collectives.
      placements: The tree of parameters with a `ParameterSharding` at each leaf.
      opt_padding: The padding of each leaf of the optimizer's state.
      norm_metrics: Whether to compute norms of the gradient, the update and the parameters.
    """

    mode: Mode
    placements: Placements
    opt_padding: tuple[tuple[int, ...], ...]
    norm_metrics: bool = False

    def __call__(
        self,
        tx: optax.GradientTransformation,
        params: Params,
        grads: Grads,
        *,
        opt_state: OptState,
        value: jax.Array,
        value_and_grad: Callable[[Any], tuple[jax.Array, Any]],
        collections: Any = None,
        is_applied: jax.Array | None = None,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Updates the parameters.

        Args:
          tx: The optimizer. It gets extra arguments if it accepts them: optax's `value`, `grad`,
            and `value_fn`, a differentiable function of parameters that evaluates the same batch;
            and `collections`.
          grads: The global gradients, in the specs of the optimizer's state.
          value: The global loss, `[]`.
          collections: The model's collections after the step, such as `batch_stats`.
          value_and_grad: Computes the loss and the gradients at other parameters; both have the
            specs of `params` and `grads`.
          is_applied: `bool[]`, the same on all devices. If it is false, parameters and state are
            returned unchanged, bit for bit. If it is `None`, they are always updated.

        Returns:
          The parameters and the state in the specs in which they are stored, and norms by name.

        Communication:
          One all-gather for each parameter that is replicated while its state is sharded. Two
          all-to-alls for each group of matrices, see `whole_matrices`. The compiler adds
          collectives if the rest of the optimizer is not elementwise.
        """
        with jax.named_scope(OPTIMIZER_SCOPE):
            params = self._map(self._shard, params)
            grads = self._map(lambda place, g: unpad_leaf(g, place.padding), grads)
            before = opt_state = map_padded(unpad_leaf, opt_state, self.opt_padding)

            def evaluate(params: Params) -> tuple[jax.Array, Any]:
                value, grads = value_and_grad(self._store(params))
                return value, self._map(lambda place, g: unpad_leaf(g, place.padding), grads)

            value_fn = _with_gradient(evaluate)
            offered = {"value": value, "grad": grads, "value_fn": value_fn}
            if collections:
                offered["collections"] = collections
            updates, opt_state = self._run_optimizer(tx, (grads, opt_state, params), offered)
            _check_state(before, opt_state)
            with explain_optimizer("adding its updates to the parameters"):
                new_params = optax.apply_updates(params, updates)
            if is_applied is not None:
                # Selects before parameters are gathered, so that only a shard of each is read.
                select = functools.partial(jax.lax.select, is_applied)
                new_params = jax.tree.map(select, new_params, params)
                opt_state = jax.tree.map(select, opt_state, before)
            norms = {}
            if self.norm_metrics:
                norms["gradient_norm"] = global_norm(grads)
                norms["update_norm"] = global_norm(updates)
                norms["parameter_norm"] = global_norm(new_params)
            opt_state = map_padded(pad_leaf, opt_state, self.opt_padding)
            return self._store(new_params), opt_state, norms

    def _run_optimizer(
        self, tx: optax.GradientTransformation, args: tuple[Any, ...], offered: dict[str, Any]
    ) -> Any:
        """Returns the updates and the new state, from the gradients, the state and parameters."""

        def update(grads: Grads, state: Any, params: Params) -> tuple[Any, Any]:
            return _updates(tx, grads, state, params, {**offered, "grad": grads})

        if not self.mode.writes_collectives:
            return update(*args)
        closed, out = jax.make_jaxpr(update, return_shape=True)(*args)
        run = jaxpr_as_fun(closed)
        if has_matrices(closed.jaxpr) and (functions := self._search(closed, args)).groups:
            run = functions.run
        return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves(args)))

    def matrix_functions(
        self,
        tx: optax.GradientTransformation,
        params: Params,
        opt_state: OptState,
        collections: Any,
    ) -> MatrixFunctions:
        """Finds the matrix functions of an optimizer, without a step.

        Parameters (the trained ones) and state are shapes without padding. `collections` are the
        shapes of the model's collections.
        """
        zeros = _with_gradient(lambda params: (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)))

        def update(grads: Grads, state: Any, params: Params) -> tuple[Any, Any]:
            offered = {"value": jnp.zeros(()), "grad": grads, "value_fn": zeros}
            if collections:
                offered["collections"] = jax.tree.map(jnp.zeros_like, collections)
            return _updates(tx, grads, state, params, offered)

        args = params, opt_state, params
        return self._search(jax.make_jaxpr(update)(*args), args)

    def _search(self, closed: ClosedJaxpr, args: tuple[Any, ...]) -> MatrixFunctions:
        """Searches the matrix functions in the trace of an update of `(grads, state, params)`."""
        _, state, params = args
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        places = jax.tree.leaves(self.placements)
        parameters = [
            MatrixParameter.of(path_name(path), x, place)
            for (path, x), place in zip(leaves, places, strict=True)
        ]
        index = jax.tree.unflatten(tree, range(len(leaves)))
        owners = jax.tree.leaves((index, like_params(state, params, index, -1), index))
        of = [owner if owner >= 0 else None for owner in owners]
        return MatrixFunctions(closed, of, parameters, self.mode)

    def _shard(self, place: Placement, x: jax.Array) -> jax.Array:
        """Slices a replicated parameter like its optimizer state, and removes padding."""
        if place.state_names is not None:
            x = self._constrain(pad_leaf(x, place.padding), place.state_spec)
        return unpad_leaf(x, place.padding)

    def _store(self, params: Params) -> Any:
        """Pads updated parameters, and gathers the parameters that are stored replicated."""
        params = self._map(lambda place, x: pad_leaf(x, place.padding), params)
        specs = state_specs(self.placements)
        if specs == param_specs(self.placements):
            return params
        params = jax.tree.map(self._constrain, params, specs)
        return self.mode.replicate(self.placements, params)

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mode.mesh, spec))

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Maps `function(placement, *leaves)` over trees with the structure of the parameters."""
        return map_in_scopes(function, self.placements, *trees)


def is_optimizer(tx: Any) -> bool:
    """Returns whether an object has the two functions of an optimizer of optax."""
    return hasattr(tx, "init") and hasattr(tx, "update")


def optimizer_for(tx: Optimizer, parameters: Infos) -> optax.GradientTransformation:
    """Returns an optimizer; calls `tx` with the parameters if it is a function that makes one."""
    made: Any = tx if is_optimizer(tx) or not callable(tx) else tx(parameters)
    if not is_optimizer(made):
        raise TypeError(
            f"tx: the function {tx!r} returned {made!r}, expected an optax.GradientTransformation."
        )
    return made


def global_norm(tree: Any) -> jax.Array:
    """Returns the Euclidean norm of a tree of global arrays, `float32[]`."""
    squares = [jnp.square(jnp.abs(x).astype(jnp.float32)).sum() for x in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.stack(squares).sum())


def _check_state(before: Any, after: Any) -> None:
    """Refuses an optimizer that changes the structure, shapes or dtypes of its state."""
    old, new = leaf_types(before), leaf_types(after)
    if old != new:
        changed = sorted(set(old.items()) ^ set(new.items()))
        raise ValueError(
            f"tx: its update changes the structure of its state: {changed}, expected arrays of the "
            "same shapes and dtypes before and after, so that a step can be repeated. Leave out "
            "the part of tx that does this."
        )


def _updates(
    tx: optax.GradientTransformation,
    grads: Grads,
    state: Any,
    params: Params,
    offered: dict[str, Any],
) -> tuple[Any, Any]:
    """Calls the optimizer with the extra arguments that all of its parts accept.

    `optax.chain` passes all its arguments to each part. A part such as `optax.contrib.sam` may
    refuse an argument, and only a call shows this. So this function removes a refused argument and
    calls the optimizer again.
    """
    parameters = inspect.signature(tx.update).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = {name: value for name, value in offered.items() if takes_all or name in parameters}
    while True:
        lost = offered.keys() - taken if takes_all else ()
        with explain_optimizer("its update", offered, lost=lost):
            try:
                updates, state = tx.update(grads, state, params, **taken)
            except TypeError as error:
                refused = _REFUSED.search(str(error))
                if refused is None or refused[1] not in taken:
                    raise
                del taken[refused[1]]
            else:
                return updates, state


@contextlib.contextmanager
def explain_optimizer(
    step: str, offered: Iterable[str] = (), *, lost: Collection[str] = ()
) -> Iterator[None]:
    """Explains an error of an optimizer that needs an argument it does not get.

    Args:
      step: The call of the optimizer, for the message, such as `its init`.
      offered: The extra arguments that the optimizer may get.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        more = f", and optionally {', '.join(offered)}" if offered else ""
        but = f" (another part of the optimizer refuses {sorted(lost)})" if lost else ""
        raise kind(
            f"tx: {step} raises {type(error).__name__} ({first_line}), expected an optimizer that "
            "needs only the parameters and the gradient of the global batch"
            f"{more}{but}. Leave out the part that needs more, or wrap it and pass the argument."
        ) from error


def _with_gradient(value_and_grad: Callable[[Any], tuple[Any, Any]]) -> Any:
    """Makes a differentiable function of parameters from one that returns value and gradient."""
    function = jax.custom_vjp(lambda params: value_and_grad(params)[0])
    function.defvjp(value_and_grad, lambda grads, g: (jax.tree.map(lambda x: x * g, grads),))
    return function
