"""The ledger: the collectives and operations of a step, read off the program before it has run.

The ledger describes the same step in three ways. Formulas predict the bytes
that the strategy has to send (`manualpar.inspect.expected_bytes`). The jaxpr shows the program
before XLA changes it (`manualpar.inspect.communication`, `manualpar.inspect.flops`). The compiled
program shows the step that runs (`manualpar.inspect.compiled`). `manualpar.inspect.xla_changes`
names every difference between the jaxpr and the compiled program.

All numbers are for one device and one step. Bytes are the bytes that a device sends with ring
algorithms, see `manualpar.inspect.communication.ring_bytes`. Operations are the floating point
operations of matrix products and convolutions.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, TypeVar

import flax.linen as nn
import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, NamedSharding

from manualpar.core.parameters.collectives import MixedPrecisionPolicy
from manualpar.core.program.program import Program
from manualpar.core.summary import Summarized
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.inspect.communication import (
    Around,
    Collective,
    as_number,
    bytes_by_axes,
    count_by_kind,
    read_stage,
    summed,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import Compiled, read_compiled
from manualpar.inspect.expected_bytes import matrix_functions, outer_step_bytes, step_bytes
from manualpar.inspect.flops import Computation, ProductReader, by_phase_and_module, uncounted
from manualpar.inspect.ledger_difference import LOW_PRECISION
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.scope_parsing import PHASES
from manualpar.inspect.xla_changes import Change, find_changes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class Ledger(Summarized):
    """The collectives, operations and memory of a device in a step.

    Attributes:
      name: The strategy and the mode, or the name of the function.
      mesh: The sizes of the mesh axes; empty if the program has no mesh.
      collectives: The collectives of the jaxpr.
      computations: The operations of products, by phase and module.
      predicted: The bytes over each axis, or tuple of axes, by the strategy's formula; `None`
        if there is no formula.
      memory: The memory of a device at the step's peak; `None` for a function, or if XLA chooses
        the arrays that a device holds.
      compiled: The compiled step; `None` if it was not compiled.
      changes: The changes that XLA made. The bytes of `collectives`, plus the bytes that every
        change adds or saves, are the bytes of `compiled`.
      notes: The assumptions and choices behind the numbers.
      stage: The pipeline stage of the device; `None` if there are no stages.
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
    stage: int | None = None

    def _summary(self) -> tuple[str, dict[str, str]]:
        mesh = "".join(f", {axis}={size}" for axis, size in self.mesh.items())
        counts, sent = self.counts().items(), self.bytes_by_axis().items()
        lines = {
            "collectives": ", ".join(f"{n} {kind}" for kind, n in counts) or "none",
            "bytes sent": ", ".join(f"{float(n):,.0f} over {','.join(axes)}" for axes, n in sent)
            or "none",
        }
        if codes := total_bytes(x for x in self.collectives if str(x.dtype).startswith("float8")):
            lines["bytes sent"] += f", {float(codes / self.total_bytes):.0%} of them in float8"
        if self.predicted is not None:
            lines["by formula"] = f"{float(sum(self.predicted.values())):,.0f}"
        if self.compiled:
            compiled = float(total_bytes(self.compiled.collectives))
            lines["compiled"] = f"{compiled:,.0f}, with {len(self.changes)} changes by XLA"
        lines["FLOPs"] = f"{self.total_flops:,}"
        for dtype, flops in self.flops_by_dtype().items():
            if dtype in LOW_PRECISION:
                lines["FLOPs"] += f", {flops / self.total_flops:.0%} of them in {dtype}"
        if self.memory:
            lines["bytes of memory"] = f"{self.memory.peak:,}"
        return f"Ledger({self.name}{mesh}), of a device in a step", lines

    @property
    def total_bytes(self) -> Fraction:
        """The bytes that the jaxpr sends."""
        return total_bytes(self.collectives)

    def bytes_by_axis(self) -> dict[tuple[str, ...], Fraction]:
        """Returns the bytes over each axis, or over each tuple of axes."""
        return bytes_by_axes(self.collectives)

    def bytes_by_purpose(self) -> dict[str, Fraction]:
        """Returns the bytes for each purpose."""
        return summed((one.purpose, one.bytes_sent) for one in self.collectives)

    def bytes_by_module(self) -> dict[str, Fraction]:
        """Returns the bytes of each module or parameter; `""` stands for no module."""
        return summed((one.module, one.bytes_sent) for one in self.collectives)

    def counts(self) -> dict[str, int]:
        """Returns how many collectives of each kind a step runs."""
        return count_by_kind(self.collectives)

    @property
    def total_flops(self) -> int:
        """The operations of all phases."""
        return sum(computation.flops for computation in self.computations)

    def flops_by_phase(self) -> dict[str, int]:
        """Returns the operations of each of the four phases."""
        none: dict[str, int] = dict.fromkeys(PHASES, 0)
        return none | summed((one.phase, one.flops) for one in self.computations)

    def flops_by_module(self) -> dict[str, int]:
        """Returns the operations of each module in all phases."""
        return summed((one.module, one.flops) for one in self.computations)

    def flops_by_dtype(self) -> dict[str, int]:
        """Returns the operations of products in each dtype: that of their widest operand."""
        return summed((one.dtype, one.flops) for one in self.computations)

    def _flops_by_dtype_and_module(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for one in self.computations:
            of_dtype = found.setdefault(one.dtype, {})
            of_dtype[one.module] = of_dtype.get(one.module, 0) + one.flops
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the ledger for JSON; a tuple of axes becomes a string with commas."""
        predicted = None  # No prediction. A prediction of 0 bytes has the total 0.
        if self.predicted is not None:
            total = as_number(sum(self.predicted.values(), Fraction(0)))
            predicted = {"total": total, "by_axes": _as_numbers(self.predicted)}
        return {
            "name": self.name,
            "mesh": dict(self.mesh),
            "stage": self.stage,
            "bytes": {
                "total": as_number(self.total_bytes),
                "by_axes": _as_numbers(self.bytes_by_axis()),
                "by_purpose": _as_numbers(self.bytes_by_purpose()),
                "by_module": _as_numbers(self.bytes_by_module()),
            },
            "counts": self.counts(),
            "collectives": [collective.to_json() for collective in self.collectives],
            "flops": {
                "total": self.total_flops,
                "by_phase": self.flops_by_phase(),
                "by_module": self.flops_by_module(),
                "by_dtype": self._flops_by_dtype_and_module(),
            },
            "predicted_bytes": predicted,
            "memory": self.memory and self.memory.to_json(),
            "compiled": self.compiled and self.compiled.to_json(),
            "changes": [change.to_json() for change in self.changes],
            "notes": list(self.notes),
        }


def ledger(
    program: Program | Callable[..., Any] | jax.stages.Traced,
    *abstract_args: Any,
    while_trips: int | None = None,
    stage: int | None = None,
    compile: bool = False,
) -> Ledger:
    """Reads what a step sends, computes and holds, without running it.

    Args:
      program: A `Program`, whose `train_step` is read; or any function, with or without `jax.jit`,
        `jax.shard_map` and this package; or the result of `jax.jit(f).trace(*args)`.
      *abstract_args: The function's arguments: trees of arrays or of `jax.ShapeDtypeStruct`s, with
        shardings if these matter. No value is read. A program takes no arguments.
      while_trips: The number of rounds to count for a `while` whose number of rounds is not known.
      stage: The stage of a pipeline to read; `None` for the stage that sends the most.
      compile: Whether to compile the step with XLA too, and to compare the compiled program with
        the jaxpr; this needs the devices of the mesh.

    Returns:
      The ledger.

    Raises:
      TypeError: `program` is no program and no function, or the arguments do not fit it.
      ValueError: Something in the program cannot be counted: a `while` of unknown length, a
        collective of unknown bytes, or axes that no `shard_map` binds. Or the stage does not exist.
        Or the program is to be compiled, but its mesh is abstract.
    """
    traced = _trace(program, abstract_args)
    jaxpr = traced.jaxpr.jaxpr
    ours = program if isinstance(program, Program) else None
    meshes: list[Any] = [ours.mesh] if ours else list(_meshes(program, traced, abstract_args))
    num_devices = max((math.prod(mesh.shape.values()) for mesh in meshes), default=1)
    around = Around(spread=num_devices)
    # Flax begins every scope with the model's name.
    apply_fn: Any = ours and ours.abstract_state.apply_fn
    owner = getattr(apply_fn, "__self__", None)
    inner = None if isinstance(owner, nn.Module) else getattr(owner, "module", None)
    root = type(inner if isinstance(inner, nn.Module) else owner).__name__ if ours else ""
    data_axes = ours.data_axes if ours else ()
    options: Any = {"root": root, "data_axes": data_axes, "while_trips": while_trips}
    sending, collectives = read_stage("ledger", jaxpr, around, stage=stage, **options)
    computing = ProductReader("ledger", while_trips=while_trips, stage=sending.stage)
    products = computing.read(jaxpr, around)
    notes = [*dict.fromkeys([*sending.notes, *computing.notes])]
    if spread := {product.spread for product in products if product.spread > 1 and product.flops}:
        where = "on global arrays" if num_devices in spread else "along axes left to XLA"
        notes.append(
            f"FLOPs {where} are assumed to be spread evenly over {max(spread)} devices; a device "
            "computes more if XLA repeats a computation on several devices"
        )
    if names := sorted(set(uncounted(all_equations(jaxpr)))):
        notes.append(f"FLOPs of {', '.join(names)} are unknown and not counted")
    if ours and ours.mode != "manual":
        notes.append(
            f"mode={ours.mode!r}: the compiler writes the collectives, so the jaxpr does not "
            "contain them"
        )
    if ours and (codes := describe_codes(ours.comm)):
        notes.append(f"sent quantized: {codes}")
    if ours and ours.mode == "manual":
        notes += _left_to_xla(ours, is_compiled=compile)
    if ours and ours.outer is not None:
        by_axes = outer_step_bytes(ours).items()
        sent_by_axes = ", ".join(
            f"{float(n):,.0f} bytes over {','.join(axes)}" for axes, n in by_axes
        )
        notes.append(
            f"an outer step follows every {ours.outer.every} steps; it sends {sent_by_axes}"
        )
    result = Ledger(
        name=_name(program),
        mesh={axis: size for mesh in meshes for axis, size in mesh.shape.items()},
        collectives=collectives,
        computations=by_phase_and_module(products, root),
        predicted=_unless_refused(
            functools.partial(step_bytes, stage=sending.stage), ours, "bytes by formula", notes
        ),
        memory=_unless_refused(step_memory, ours, "memory", notes),
        notes=tuple(notes),
        stage=sending.stage if sending.num_stages > 1 else None,
    )
    if not compile:
        return result
    if ours and isinstance(meshes[0], AbstractMesh):
        raise ValueError(
            f"ledger: compile=True, but {result.name} is on an abstract mesh, expected a mesh of "
            "devices. Build the program on a mesh of make_mesh, or leave compile=False."
        )
    compiled = read_compiled(traced.lower().compile(), stage=sending.stage)
    changes = find_changes(collectives, compiled.collectives, root=root)
    return dataclasses.replace(result, compiled=compiled, changes=changes)


def _left_to_xla(program: Program, *, is_compiled: bool) -> Iterator[str]:
    """Yields a note for each reason why XLA writes collectives of the optimizer's update."""
    functions = matrix_functions(program)
    reasons: dict[str, list[str]] = {}
    for path, reason in functions.left.items() if functions else ():
        reasons.setdefault(reason, []).append(path)
    where = "among the changes" if is_compiled else "only in the compiled program"
    for reason, paths in reasons.items():
        more = f" and {len(paths) - 2} others" if len(paths) > 2 else ""
        yield (
            f"the update of {', '.join(paths[:2])}{more} is left to XLA, because {reason}; what "
            f"XLA sends for it is {where}"
        )


def trace_outer_steps(program: Program) -> tuple[Collective, ...]:
    """Returns the collectives of a program's outer steps (DiLoCo); `()` if it has none."""
    steps = () if program.outer is None else program.outer.steps
    traced = (step.trace(program.abstract_state) for step in steps)
    return tuple(itertools.chain.from_iterable(map(trace_collectives, traced)))


def describe_codes(comm: MixedPrecisionPolicy) -> str:
    """Says which values are sent quantized; `""` if none are."""
    axes = f" over {','.join(comm.quantized_axes)}" if comm.quantized_axes else ""
    named = (
        ("gathered parameters", comm.gather.quantizer),
        (f"gradients{axes}", comm.reduce.quantizer),
    )
    parts = [f"{values} as codes of {code.name}" for values, code in named if code]
    return ", ".join(parts)


def _trace(program: Any, args: tuple[Any, ...]) -> jax.stages.Traced:
    """Traces a program or a function; refuses other objects."""
    if isinstance(program, Program | jax.stages.Traced) and args:
        raise TypeError(
            f"ledger: {_name(program)} was given {len(args)} arguments, expected none, because the "
            "program already has its arguments. Leave them out."
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
            "its abstract arguments, or the result of jax.jit(f).trace(*args)."
        )
    name = _name(program)
    if not hasattr(program, "lower"):
        _check_arguments(name, program, args)
    try:
        traced = trace_step(program, *args)
    except NameError as error:
        if "unbound axis" not in str(error):
            raise
        raise ValueError(
            f"ledger: {name} communicates over a mesh axis that no jax.shard_map around it binds "
            f"({error}); expected a function that contains the shard_map. Pass the function that "
            "jax.shard_map returns, and arguments of global shapes."
        ) from error
    return traced


def trace_step(step: Callable[..., Any], *abstract_args: Any) -> jax.stages.Traced:
    """Traces a step of any library, without running it.

    The jit of another library, such as Equinox's `filter_jit`, traces arrays only, and takes and
    returns trees with other leaves, such as a module's activation function. Here these leaves of
    the arguments keep their values, and those of the results are left out. What such a jit donates
    is not seen.

    Args:
      step: A function, jitted by JAX or by another library, or not jitted.
      *abstract_args: Its arguments: trees of arrays or of `jax.ShapeDtypeStruct`s, with
        shardings if these matter.

    Returns:
      The traced step, as of `jax.jit(step).trace(...)`.

    Communication:
      None.
    """
    if hasattr(step, "trace"):
        traced: jax.stages.Traced = step.trace(*abstract_args)
        return traced
    if not hasattr(step, "lower"):
        return jax.jit(step).trace(*abstract_args)
    of_arrays, arrays = _of_arrays(step, abstract_args)
    return jax.jit(of_arrays).trace(*arrays)


def _of_arrays(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Returns a function of the arrays in `args`, whose results are arrays, and these arrays."""
    leaves, tree = jax.tree.flatten(args)

    def of_arrays(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        filled = [next(given) if _is_array(x) else x for x in leaves]
        out = function(*jax.tree.unflatten(tree, filled))
        return [x for x in jax.tree.leaves(out) if _is_array(x)]

    return of_arrays, list(filter(_is_array, leaves))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _check_arguments(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuses arguments that do not fit the function's signature, or that are not arrays."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"ledger: {name}{signature} was given {len(args)} arguments: {error}; expected for "
            "each parameter an array or a jax.ShapeDtypeStruct((8, 128), 'float32')."
        ) from error
    except ValueError:
        pass  # Some builtins have no signature. For these jax raises the error.
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not _is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"ledger: {name} was given args{jax.tree_util.keystr(path)}={leaf!r}, expected an "
                "array or a jax.ShapeDtypeStruct(shape, dtype). Bind other values with "
                "functools.partial, or jit the function with static_argnums."
            )


def _meshes(program: Any, traced: jax.stages.Traced, args: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the meshes of a function's arguments, of its shardings, and of its `shard_map`s."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, traced.in_avals))]
    jaxpr = traced.jaxpr.jaxpr
    if not isinstance(program, jax.stages.Traced):
        jaxpr = _called(program, args)  # The jaxpr of the call contains the shardings of a `jit`.
    inside = []
    for eqn in all_equations(jaxpr):
        named = [eqn.params.get(name) for name in ("sharding", "in_shardings", "out_shardings")]
        shardings += jax.tree.leaves(named)
        inside += [eqn.params["mesh"]] if eqn.primitive.name == "shard_map" else []
    outside = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    yield from (mesh for mesh in dict.fromkeys([*outside, *inside]) if mesh.shape)


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Jaxpr:
    """Returns the jaxpr of `function(*args)`; only the arrays in `args` are traced."""
    of_arrays, arrays = _of_arrays(function, args)
    return jax.make_jaxpr(of_arrays)(*arrays).jaxpr


def _unless_refused(
    predict: Callable[[Program], T], program: Program | None, quantity: str, notes: list[str]
) -> T | None:
    """Returns `predict(program)`; after a `ValueError` returns `None`, and notes the reason.

    Returns `None` also if there is no program. `quantity` is the name of the prediction.
    """
    try:
        return predict(program) if program else None
    except ValueError as error:
        notes.append(f"no {quantity}: {error}")
        return None


def _name(program: Any) -> str:
    """Returns the name of a program or a function."""
    if isinstance(program, Program):
        return f"{program.strategy.name} {program.mode}"
    if isinstance(program, jax.stages.Traced):
        return program.fun_name
    function = getattr(program, "func", program)  # A functools.partial has the function as `func`.
    return str(getattr(function, "__name__", type(function).__name__))


def _as_numbers(sent: Mapping[Any, Fraction]) -> dict[str, int | float]:
    """Converts bytes by name or by tuple of axes for JSON."""
    return {
        name if isinstance(name, str) else ",".join(name): as_number(value)
        for name, value in sent.items()
    }
