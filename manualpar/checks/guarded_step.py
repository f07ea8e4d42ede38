"""Guards jitted steps: refuses unusable arrays, and limits how far CPU devices run ahead.

A train step donates its state, so that the returned state can use the same memory. A user may pass
the old state again, for example by running a notebook's cell twice. Then JAX gets deleted arrays.
On several simulated devices this ends the process without a Python error.

XLA's CPU client runs at most 32 computations at a time. A simulated device may run more than 32
computations ahead of another. Then the faster device waits in a collective for a device that cannot
start, and XLA aborts the process after 40 seconds. This also happens with plain `jax.jit`, if a
loop calls a collective and fetches no result. Accelerators and a single device have no such limit,
so their steps do not wait.
"""

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.mesh_context import JittedOutsideMesh, no_mesh
from manualpar.core.mesh.splitting import shapes_of_batch
from manualpar.core.program.program import JittedSteps, Program
from manualpar.core.program.state_arrays import check_alive, is_deleted
from manualpar.core.state.metrics import UNEVEN
from manualpar.core.state.train_state import TrainState, is_key
from manualpar.core.trees import Batch, path_name
from manualpar.errors import list_some

MAX_STEPS_AHEAD = 8
# The rounding of a loss in float32, relative to the loss, with room for sums of many examples.
MOST_UNEVEN = 1e-4


class GuardedStep(JittedOutsideMesh):
    """A jitted step that refuses donated arrays, and waits for earlier steps on simulated devices.

    A `GuardedStep` is called like the step. The step returns `metrics`, or a tuple
    `(state, metrics)`.

    Checking a state takes 0.4 us for each array. A training loop does not spend this time: if the
    last call took or returned the same state, only the state's step counter is checked. A leaf that
    a user has set is placed like the leaf that it replaces, because JAX would compile the step
    again for another placement.

    Attributes:
      jitted: The jitted step without waiting and without checks.
      is_limited: Whether a call waits for the step that is `MAX_STEPS_AHEAD` calls older.
    """

    def __init__(
        self,
        name: str,
        step: Any,
        mesh: Mesh,
        check_state: Callable[[Any], None] = lambda state: None,
        abstract: TrainState | None = None,
        abstract_others: Any = None,
    ) -> None:
        """Wraps a step.

        Args:
          check_state: Raises an error for a state that does not fit the program.
          abstract: The abstract state with shardings, to place leaves that a user has set.
          abstract_others: The abstract variables of other models, by name and collection.
        """
        super().__init__(step, abstract_others)
        self.is_limited = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._name, self._check_state, self._abstract = name, check_state, abstract
        self._is_first = True
        self._mesh = mesh
        self._devices = frozenset(mesh.devices.flat)
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        # A weak reference, because a strong reference would keep the state's memory allocated.
        self._known: Any = lambda: None

    def __call__(self, state: Any, batch: Batch, **others: Any) -> Any:
        """Checks the state and the batch, and calls the step.

        `others` are the states of other models by name, see the option `other_models`.
        """
        is_state = isinstance(state, TrainState)
        if not is_state or state is not self._known() or is_deleted(state.step):
            check_alive(self._name, state=state)
            self._check_state(state)
            if is_state and self._abstract is not None:
                state = _with_placed_leaves(state, self._abstract)
        check_alive(self._name, batch=batch)
        batch = self._on_mesh(batch)
        more = (self._variables(state, others),) if others or self._abstract_others else ()
        try:
            with no_mesh():
                out = self.jitted(state, batch, *more)
        except TypeError:
            shapes_of_batch(f"{self._name}: batch", batch)  # Raises if a leaf is not an array.
            raise
        new, metrics = out if isinstance(out, tuple) else (state, out)
        if isinstance(metrics, dict) and (uneven := metrics.pop(UNEVEN, None)) is not None:
            self._check_first(uneven[0])
        if is_state:
            self._known = weakref.ref(new)
        if self.is_limited:
            self._wait_for_earlier(jax.tree.leaves(metrics)[0])
        return out

    def _variables(self, state: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables of other models, by name and collection, from their states."""
        wanted, variables = self._abstract_others or {}, {}
        if unknown := others.keys() - wanted.keys():
            raise TypeError(
                f"{self._name}: got {sorted(unknown)}, expected {sorted(wanted) or 'no state'} "
                "beside the state and the batch. Name the models in the option other_models."
            )
        for name, abstract in wanted.items():
            said, given = f"{self._name}: {name}", others.get(name)
            if isinstance(given, TrainState):
                given = {"params": given.params, **given.collections}
            if not isinstance(given, Mapping) or "params" not in given:
                raise TypeError(
                    f"{said} is {'not given' if given is None else f'a {type(given).__name__}'}, "
                    f"expected the state of that model: {self._name}(state, batch, {name}=its_state"
                    "), or its variables {'params': ...} with the shardings of "
                    f"program.abstract_others[{name!r}]."
                )
            found = {collection: given.get(collection, {}) for collection in abstract}
            check_alive(self._name, **{name: found})
            lines = _differences(abstract, found, check_dtype=True)
            structure: Any = jax.tree.structure(abstract)
            if lines or structure != jax.tree.structure(found):
                raise ValueError(
                    f"{said} does not fit: {'; '.join(list_some(lines or ['another structure']))}. "
                    "Build its program with the same options (strategy, mesh, min_weight_size), or "
                    f"give that program in other_models={{{name!r}: program}}."
                )
            variables[name] = found
        own = {id(x) for x in jax.tree.leaves(state) if isinstance(x, jax.Array)}
        for name, tree in variables.items():
            if self._name == "train_step" and any(id(x) in own for x in jax.tree.leaves(tree)):
                raise ValueError(
                    f"{self._name}: {name} has arrays of the state itself, expected other arrays, "
                    "because a train step donates its state. Pass a copy, "
                    f"{name}=jax.tree.map(jnp.copy, its_state)."
                )
        return variables

    def _on_mesh(self, batch: Batch) -> Batch:
        """Moves arrays that were put on other devices; refuses integers that become others."""
        if not any(map(self._is_elsewhere, leaves := jax.tree.leaves(batch))):
            if any(isinstance(x, np.ndarray | np.generic) for x in leaves):
                check_integers(f"{self._name}: batch", batch)
            return batch
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def move(path: Any, x: Any) -> Any:
            if not self._is_elsewhere(x):
                return x
            if jax.process_count() > 1:
                raise ValueError(
                    f"{self._name}: batch{jax.tree_util.keystr(path)} is on "
                    f"{_show_sharding(x.sharding)}, expected the {len(self._devices)} devices of "
                    "the program's mesh. Use jax.make_array_from_process_local_data("
                    "program.batch_sharding, rows)."
                )
            return jax.device_put(x, everywhere)

        return jax.tree.map_with_path(move, batch)

    def _is_elsewhere(self, x: Any) -> bool:
        """Returns whether a leaf was put on other devices than those of the mesh."""
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
            return False
        return x.sharding.device_set != self._devices

    def _check_first(self, off: Any) -> None:
        """Refuses a loss in its first step if shares cannot be combined by one count."""
        if not self._is_first or isinstance(off, jax.core.Tracer):
            return
        self._is_first = False
        if (part := float(off)) > MOST_UNEVEN:
            raise ValueError(
                f"loss_fn: on the first batch the loss over all examples is off by {part:.2%}, "
                "because the loss is the mean over the count of metrics['loss'] plus a part with "
                "another divisor, and the shares of the batch have different counts. Return the "
                "parts as terms: {'loss': (sum, count), 'other': (its_sum, its_count)}, metrics."
            )

    def _wait_for_earlier(self, metric: Any) -> None:
        if isinstance(metric, jax.core.Tracer):  # Nothing runs while the step is being traced.
            return
        self._in_flight.append(metric)
        if len(self._in_flight) > MAX_STEPS_AHEAD:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():  # The caller may have donated this metric.
                oldest.block_until_ready()


def guard_steps(program: Program) -> Program:
    """Guards the steps of a program."""
    return dataclasses.replace(
        program,
        train_step=guard("train_step", program.train_step, program),
        eval_step=guard("eval_step", program.eval_step, program),
    )


def guard(name: str, step: Any, made_for: Program | JittedSteps) -> Any:
    """Guards a jitted step; a step on an abstract mesh, which can only be traced, stays as it is.

    `name` begins the step's errors, and `made_for` has the mesh and the abstract arrays that the
    step was jitted for.
    """
    if isinstance(made_for.mesh, AbstractMesh):
        return step
    return GuardedStep(
        name,
        step.jitted,
        made_for.mesh,
        functools.partial(check_state, name, made_for.abstract_state),
        made_for.abstract_state,
        abstract_others=made_for.abstract_others,
    )


def check_integers(name: str, tree: Any) -> None:
    """Refuses integers that do not fit the 32 bits that JAX gives them by default."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu" or not x.size:
            continue
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if dtype.itemsize == x.dtype.itemsize:
            continue
        limits, found = np.iinfo(dtype), (int(x.min()), int(x.max()))
        if found[0] < limits.min or found[1] > limits.max:
            value = found[1] if found[1] > limits.max else found[0]
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has the {x.dtype} {value}, expected integers "
                f"that fit {dtype}, which JAX makes of them. Leave the field out; or map its "
                "values to smaller numbers, such as by np.unique(x, return_inverse=True); or set "
                "jax.config.update('jax_enable_x64', True)."
            )


def check_state(function: str, abstract: TrainState, state: Any) -> None:
    """Refuses a state whose shapes or shardings differ from the program's, before JAX reads it.

    The sharding is not checked for a tracer, or for an array that is not committed to a device,
    because JAX places such an array itself.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{function}: state is a {type(state).__name__}, expected a state of this program: the "
            "result of program.init or of the last step."
        )
    lines = _differences(abstract, state)
    structure: Any = jax.tree.structure(abstract)
    if not lines and structure != jax.tree.structure(state):
        lines = ["it belongs to another model or optimizer"]
    if lines:
        raise ValueError(
            f"{function}: the state is from another program, or has other shardings: "
            f"{'; '.join(list_some(lines))}. Convert another program's state with "
            "program.adopt(state), or make a state of any parameters with "
            "program.init_from(params)."
        )


def _differences(abstract: Any, tree: Any, *, check_dtype: bool = False) -> list[str]:
    """Returns a clause for each leaf that is missing, unknown, of another shape or sharding."""
    wanted = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(abstract)}
    found = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    lines = [f"{name} is missing" for name in wanted if name not in found]
    for name, x in found.items():
        if name not in wanted:
            lines.append(f"{name} is not in this program's states")
        elif np.shape(x) != wanted[name].shape:
            lines.append(f"{name} has shape {np.shape(x)}, expected {wanted[name].shape}")
        elif check_dtype and x.dtype != wanted[name].dtype:
            lines.append(f"{name} is {x.dtype}, expected {wanted[name].dtype}")
        elif not _has_sharding(x, wanted[name].sharding):
            got, expected = map(_show_sharding, (x.sharding, wanted[name].sharding))
            lines.append(f"{name} has sharding {got}, expected {expected}")
    return lines


def _with_placed_leaves(state: TrainState, abstract: TrainState) -> TrainState:
    """Places leaves that a user has set; returns `state` itself if there are none."""
    leaves, structure = jax.tree.flatten(state)
    placed = list(map(_placed, leaves, jax.tree.leaves(abstract)))
    if all(x is old for x, old in zip(placed, leaves, strict=True)):
        return state
    made: TrainState = jax.tree.unflatten(structure, placed)
    return made


def _placed(x: Any, abstract: Any) -> Any:
    """Returns a leaf of a state as an array on the program's devices, of the program's type."""
    if isinstance(x, jax.core.Tracer):
        return x
    if isinstance(x, jax.Array):
        is_weak = getattr(x, "weak_type", False)  # Keys have no such attribute.
        if (x.committed and not is_weak) or not x.is_fully_addressable:
            return x
        # A copy, because the step donates it, and the user may set the same array again.
        value = x if is_key(x) else np.array(x)
    else:
        value = np.asarray(x)
        if not np.can_cast(value.dtype, abstract.dtype, "same_kind"):
            return x
        value = value.astype(abstract.dtype)
    return jax.device_put(value, abstract.sharding)


def _show_sharding(sharding: Any) -> str:
    """Formats a sharding for an error message: `P('data',) over 8 devices`."""
    count = len(sharding.device_set)
    return f"{getattr(sharding, 'spec', 'replicated')} over {count} device{'s' * (count > 1)}"


def _has_sharding(x: Any, sharding: Any) -> bool:
    """Returns whether an array has this sharding, or JAX can still give it this sharding."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
        return True
    if x.sharding.device_set != sharding.device_set:
        return False
    return len(sharding.device_set) == 1 or x.sharding.is_equivalent_to(sharding, x.ndim)
