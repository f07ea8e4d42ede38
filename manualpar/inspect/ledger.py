"""The ledger: what a step sends and computes, read off the program before it has run.

Three readings of the same step stand side by side. The closed form of the strategy says what it
must send (`manualpar.inspect.formulas`); the jaxpr what was written, equation by equation
(`manualpar.inspect.walk`); the compiled program what XLA has made of it
(`manualpar.inspect.compiled`), with every difference between the last two by its name
(`manualpar.inspect.changes`).

All figures are those of one device and one step. Bytes are what it sends with ring algorithms, see
`manualpar.inspect.communication.ring_bytes`; operations are those of products, see
`manualpar.inspect.flops`.
"""

import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, TypeVar

import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, NamedSharding

from manualpar.core.program import Program
from manualpar.inspect.changes import Change, find_changes
from manualpar.inspect.communication import (
    Collective,
    as_number,
    bytes_by_axes,
    collective_reader,
    count_by_kind,
    total_bytes,
)
from manualpar.inspect.compiled import Compiled, read_compiled
from manualpar.inspect.flops import (
    Computation,
    Product,
    by_phase_and_module,
    product_reader,
    uncounted,
)
from manualpar.inspect.formulas import step_bytes
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.scopes import PHASES
from manualpar.inspect.walk import Around, Walk, equations

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a device sends, computes and holds in a step.

    Attributes:
      name: The strategy and the mode, or the name of the function.
      mesh: The sizes of the mesh axes; empty if the program names none.
      collectives: What the jaxpr sends.
      computations: The operations of products, by phase and module.
      predicted: The bytes over each axis, or tuple of axes, by the strategy's closed form; `None`
        where there is none.
      memory: What the step holds at its peak; `None` for a function, or where XLA chooses.
      compiled: What XLA has made of the step; `None` if it was not compiled.
      changes: What it has changed; its bytes are those of `collectives` and of all changes.
      notes: What was assumed or chosen to arrive at these figures.
    """

    name: str
    mesh: Mapping[str, int]
    collectives: tuple[Collective, ...]
    computations: tuple[Computation, ...]
    predicted: Mapping[tuple[str, ...], Fraction] | None = None
    memory: Memory | None = None
    compiled: Compiled | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> Fraction:
        """The bytes that the jaxpr sends."""
        return total_bytes(self.collectives)

    def bytes_by_axis(self) -> dict[tuple[str, ...], Fraction]:
        """The bytes over each axis, or tuple of axes as it is written."""
        return bytes_by_axes(self.collectives)

    def bytes_by_purpose(self) -> dict[str, Fraction]:
        """The bytes for each purpose."""
        return self._bytes_by(lambda collective: collective.purpose)

    def bytes_by_module(self) -> dict[str, Fraction]:
        """The bytes of each module or parameter, `""` for what belongs to none."""
        return self._bytes_by(lambda collective: collective.module)

    def counts(self) -> dict[str, int]:
        """How many collectives of each kind run."""
        return count_by_kind(self.collectives)

    @property
    def total_flops(self) -> int:
        """The operations of all phases."""
        return sum(computation.flops for computation in self.computations)

    def flops_by_phase(self) -> dict[str, int]:
        """The operations of each phase, of all four."""
        totals = dict.fromkeys(map(str, PHASES), 0)
        for computation in self.computations:
            totals[computation.phase] += computation.flops
        return totals

    def flops_by_module(self) -> dict[str, int]:
        """The operations of each module, all phases together."""
        totals: defaultdict[str, int] = defaultdict(int)
        for computation in self.computations:
            totals[computation.module] += computation.flops
        return dict(totals)

    def to_json(self) -> dict[str, Any]:
        """The ledger as JSON has it: axes joined with commas, whole numbers where they are."""
        by_axes = self.bytes_by_axis()
        return {
            "name": self.name,
            "mesh": dict(self.mesh),
            "bytes": {
                "total": as_number(self.total_bytes),
                "by_axes": {",".join(axes): as_number(sent) for axes, sent in by_axes.items()},
                "by_purpose": _as_numbers(self.bytes_by_purpose()),
                "by_module": _as_numbers(self.bytes_by_module()),
            },
            "counts": self.counts(),
            "collectives": [_collective_to_json(one) for one in self.collectives],
            "flops": {
                "total": self.total_flops,
                "by_phase": self.flops_by_phase(),
                "by_module": self.flops_by_module(),
            },
            "predicted_bytes": None if self.predicted is None else _predicted(self.predicted),
            "memory": None if self.memory is None else self.memory.to_json(),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
            "changes": [change.to_json() for change in self.changes],
            "notes": list(self.notes),
        }

    def _bytes_by(self, key: Callable[[Collective], str]) -> dict[str, Fraction]:
        totals: defaultdict[str, Fraction] = defaultdict(Fraction)
        for collective in self.collectives:
            totals[key(collective)] += collective.bytes_sent
        return dict(totals)


def ledger(
    program: Program | Callable[..., Any] | jax.stages.Traced,
    *abstract_args: Any,
    while_trips: int | None = None,
    compile: bool = False,
) -> Ledger:
    """Reads what a step sends, computes and holds, without running it.

    Args:
      program: A `Program`, whose `train_step` is read; or any function, jitted or not, ours or not,
        `jax.shard_map`s inside it or none; or what `jax.jit(f).trace(*args)` returns.
      *abstract_args: A function's arguments: arrays or, as no value is looked at, trees of
        `jax.ShapeDtypeStruct`s, with shardings if those matter. None with a program.
      while_trips: How many rounds to count of a `while` whose number is not known.
      compile: Whether to have XLA compile it too and to compare; it takes the devices of the mesh.

    Returns:
      The ledger.

    Raises:
      TypeError: What is given is no program and no function, or the arguments do not fit it.
      ValueError: Something in it cannot be counted: a `while` of unknown length, a collective whose
        bytes are not known here, axes that nothing binds; or it cannot be compiled here.
    """
    traced = _trace(program, abstract_args)
    ours = program if isinstance(program, Program) else None
    meshes: list[Any] = [ours.mesh] if ours else list(_meshes(program, traced, abstract_args))
    num_devices = max((math.prod(mesh.shape.values()) for mesh in meshes), default=1)
    root = _root(ours) if ours else ""

    readers = (collective_reader(root, ours.data_axes if ours else ()), product_reader())
    walk = Walk("ledger", readers, while_trips=while_trips)
    around = Around(sizes={}, times=1, scope="", spread=num_devices)
    collectives, products = walk.of_jaxpr(traced.jaxpr.jaxpr, around)
    notes = [*walk.notes, *_notes_on_products(traced.jaxpr.jaxpr, products, num_devices)]
    predicted, memory, more = _predict(ours) if ours else (None, None, [])
    result = Ledger(
        name=_name(program),
        mesh={axis: size for mesh in meshes for axis, size in mesh.shape.items()},
        collectives=collectives,
        computations=by_phase_and_module(products, root),
        predicted=predicted,
        memory=memory,
        notes=(*notes, *more),
    )
    if not compile:
        return result
    if ours and isinstance(meshes[0], AbstractMesh):
        raise ValueError(
            f"ledger: compile=True, and {result.name} is on an abstract mesh, of devices that "
            "nobody has; expected a mesh of devices. Build it on one of make_mesh, or leave "
            "compile=False."
        )
    compiled = read_compiled(traced.lower().compile())
    changes = find_changes(collectives, compiled.collectives, root=root)
    return dataclasses.replace(result, compiled=compiled, changes=changes)


def _trace(program: Any, args: tuple[Any, ...]) -> jax.stages.Traced:
    """A traced program; refuses what cannot be traced."""
    if isinstance(program, Program | jax.stages.Traced) and args:
        raise TypeError(
            f"ledger: {_name(program)} was given {len(args)} arguments, expected none: it knows "
            "its own. Leave them out."
        )
    if isinstance(program, jax.stages.Traced):
        return program
    if isinstance(program, Program):
        step: Any = program.train_step
        traced: jax.stages.Traced = step.trace(program.abstract_state, program.abstract_batch)
        return traced
    if not callable(program):
        raise TypeError(
            f"ledger: program is a {type(program).__name__}, expected a Program, a function with "
            "its abstract arguments, or what jax.jit(f).trace(*args) returns."
        )
    name, function = _name(program), program
    if not hasattr(program, "trace"):
        _check_arguments(name, program, args)
        function = jax.jit(program)
    try:
        traced = function.trace(*args)
    except NameError as error:
        if "unbound axis" not in str(error):
            raise
        raise ValueError(
            f"ledger: {name} communicates over a mesh axis that no jax.shard_map around it binds "
            f"({error}); expected the whole program. Give the function that shard_map returns, "
            "with global shapes."
        ) from error
    return traced


def _check_arguments(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuses arguments that a function does not take, or that are no arrays."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"ledger: {name}{signature} was given {len(args)} arguments: {error}; expected an "
            "abstract one for each, such as jax.ShapeDtypeStruct((8, 128), 'float32')."
        ) from error
    except ValueError:
        pass  # Some builtins have no signature; jax says what is wrong with their arguments.
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not is_array and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"ledger: {name} was given args{jax.tree_util.keystr(path)}={leaf!r}, expected an "
                "array or a jax.ShapeDtypeStruct(shape, dtype). Bind what is no array with "
                "functools.partial, or jit the function with static_argnums."
            )


def _meshes(program: Any, traced: jax.stages.Traced, args: tuple[Any, ...]) -> Iterator[Any]:
    """The meshes that a function names: its arguments', its shardings', those inside."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, traced.in_avals))]
    jaxpr = traced.jaxpr.jaxpr
    if not isinstance(program, jax.stages.Traced):
        jaxpr = _called(program, args)  # Which names the shardings that a jit was given.
    inside = []
    for eqn in equations(jaxpr):
        named = [eqn.params.get(name) for name in ("sharding", "in_shardings", "out_shardings")]
        shardings += jax.tree.leaves(named)
        inside += [eqn.params["mesh"]] if eqn.primitive.name == "shard_map" else []
    outside = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    yield from (mesh for mesh in dict.fromkeys([*outside, *inside]) if mesh.shape)


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Jaxpr:
    """The jaxpr of a call; arguments that are no arrays may be static and stay as they are."""
    is_static = [not all(hasattr(x, "shape") for x in jax.tree.leaves(arg)) for arg in args]

    def call(*arrays: Any) -> Any:
        given = iter(arrays)
        return function(
            *(arg if static else next(given) for arg, static in zip(args, is_static, strict=True))
        )

    arrays = [arg for arg, static in zip(args, is_static, strict=True) if not static]
    return jax.make_jaxpr(call)(*arrays).jaxpr


def _notes_on_products(
    jaxpr: Jaxpr, products: Iterable[Product], num_devices: int
) -> Iterator[str]:
    """What was assumed to count operations."""
    spread = {product.spread for product in products if product.spread > 1 and product.flops}
    if spread:
        where = "on global arrays" if num_devices in spread else "along axes left to XLA"
        yield (
            f"FLOPs {where} are taken as spread evenly over {max(spread)} devices: where XLA "
            "computes the same on several, a device's are more"
        )
    if names := sorted(set(uncounted(equations(jaxpr)))):
        yield f"FLOPs of {', '.join(names)} are not known here and left out"


def _predict(
    program: Program,
) -> tuple[dict[tuple[str, ...], Fraction] | None, Memory | None, list[str]]:
    """The closed form and the memory, and why there are none where there are none."""
    notes: list[str] = []
    if program.mode != "manual":
        notes.append(
            f"mode={program.mode!r}: the compiler writes the collectives, so they stand in the "
            "compiled program only"
        )
    predicted = _unless_refused(lambda: step_bytes(program), "bytes in closed form", notes)
    return predicted, _unless_refused(lambda: step_memory(program), "memory", notes), notes


def _unless_refused(read: Callable[[], T], what: str, notes: list[str]) -> T | None:
    """A prediction; where there is none for a program, its reason is a note."""
    try:
        return read()
    except ValueError as error:
        notes.append(f"no {what}: {error}")
        return None


def _root(program: Program) -> str:
    """The name of the model, with which flax begins the scope of all that it does."""
    apply_fn: Any = program.abstract_state.apply_fn
    return type(apply_fn.__self__).__name__


def _name(program: Any) -> str:
    """What a program or a function is called."""
    if isinstance(program, Program):
        return f"{program.strategy.name} {program.mode}"
    if isinstance(program, jax.stages.Traced):
        return program.fun_name
    function = getattr(program, "func", program)  # Of a functools.partial.
    return str(getattr(function, "__name__", type(function).__name__))


def _as_numbers(totals: Mapping[str, Fraction]) -> dict[str, int | float]:
    return {name: as_number(value) for name, value in totals.items()}


def _predicted(predicted: Mapping[tuple[str, ...], Fraction]) -> dict[str, Any]:
    by_axes = {",".join(axes): as_number(sent) for axes, sent in predicted.items()}
    return {"total": as_number(sum(predicted.values(), Fraction(0))), "by_axes": by_axes}


def _collective_to_json(collective: Collective) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "axes": ",".join(collective.axes),
        "axis_size": collective.axis_size,
        "shape": list(collective.shape),
        "dtype": str(collective.dtype),
        "times": collective.times,
        "bytes": as_number(collective.bytes_sent),
        "purpose": collective.purpose,
        "module": collective.module,
        "phase": collective.phase,
        "scope": collective.scope,
    }
