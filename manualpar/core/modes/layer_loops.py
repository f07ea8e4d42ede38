"""Chooses how the layers of a model run, and what their backward pass computes again.

Autodiff stacks every residual of a `jax.lax.scan` over layers: float32 copies that norms and
rotations make, gates, and masks. In a program without the loop XLA drops most of them, because it
fuses elementwise operations with the operations that read their results. So a loop takes twice the
memory of the same layers one after another, and the time to write and read it. There are two mends.
The *policy* `dots` saves only the results of products and of attention, and the backward pass
computes elementwise operations again. And a loop can be *unrolled*: its layers run one after
another, on slices of the stacked parameters. Each layer is then a call of one jitted function,
which JAX traces and differentiates once.

`LayerLoops.choose` takes the first of `CHOICES` that fits into the device's memory. It decides
about *marked* layers, and, if the program's option `remat` is `"auto"`, about all loops that run
over parameters and have no checkpoint of their own. `AUTO` and `AUTO_WRITTEN_OUT` are the marks: a
`Transformer` with `remat="auto"` gives them to `nn.remat` as policies. In a program of JAX alone
they are policies like others.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.extend.core import Literal as Constant
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.mesh import count_hosts
from manualpar.core.tracing.jaxprs import CALLS, REMAT_PRIMITIVES, inner_jaxprs, scan_sizes

__all__ = [
    "AUTO",
    "AUTO_WRITTEN_OUT",
    "CHOICES",
    "REMAT_POLICIES",
    "LayerChoice",
    "Remat",
    "planned_memory",
]

Remat = Literal["model", "auto"]
# The checkpoint name of attention's result, for rematerialisation policies.
ATTENDED = "attended"
# Remat policy -> the values that a layer saves for its backward pass. `dots` saves the results of
# products with weights. It does not save the scores of attention, which are the largest arrays: the
# product of queries and keys has batch dimensions. `dots` and `full` also save the result of
# attention, so that it need not be recomputed from scores.
_KEPT = jax.checkpoint_policies.save_only_these_names(ATTENDED)
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KEPT
    ),
    "full": _KEPT,
}


def AUTO(*args: Any, **params: Any) -> Any:  # noqa: N802
    """Marks a layer in a loop; as a policy it is `dots`."""
    return REMAT_POLICIES["dots"](*args, **params)


def AUTO_WRITTEN_OUT(*_: Any, **__: Any) -> bool:  # noqa: N802
    """Marks a layer outside of loops; as a policy it saves everything."""
    return True


MARKS = (AUTO, AUTO_WRITTEN_OUT)


class LayerChoice(NamedTuple):
    """How layers run.

    Attributes:
      remat: A key of `REMAT_POLICIES`.
      unrolled: Whether loops are unrolled.
      why: The reason, in words.
    """

    remat: str
    unrolled: bool
    why: str = ""

    def __str__(self) -> str:
        how = "loops over layers unrolled" if self.unrolled else "loops over layers as they are"
        return f"{how}, remat {self.remat} ({self.why})"


# From the fastest to the one that keeps least. Compiled for an H200, 24 layers of 2,048 on 8 x
# 2,048 tokens take 253 ms and 27 GiB of temporaries; 276 ms and 23 GiB; and 314 ms and 9 GiB. The
# loop without remat would take 303 ms and 61 GiB. Compiled for TPUs with FSDP, eight layers of
# 2,048 on one sequence a chip take 104.0 ms with `dots` and 107.2 without remat on `v5e:4x4`; on
# `v6e:4x4` they take 35.9 and 40.2.
#
# Between hosts of GPUs loops are not unrolled if mode `manual` gathers early in a loop
# (`BUFFERING`). There XLA plans with estimates of its own, by which it hides little of what an
# unrolled program gathers: compiled for `h100:4x8`, a step with FSDP takes 23.5 ms unrolled and
# 20.7 with `dots`, and 18.7 and 20.6 on `h100:8`. In mode `auto`, without this option, it is 24.1
# and 30.6 on `h100:4x8`.
CHOICES = {
    "gpu": (LayerChoice("none", True), LayerChoice("dots", False), LayerChoice("full", False)),
    "tpu": (LayerChoice("dots", False), LayerChoice("full", False)),
}
# The most equations of unrolled layers.
MOST_EQUATIONS = 20_000
SHARE = 0.92  # Of the memory, because the estimate leaves out fragments and small arrays.


_planned: contextvars.ContextVar[int] = contextvars.ContextVar("_planned", default=0)


@contextlib.contextmanager
def planned_memory(memory_bytes: int) -> Iterator[None]:
    """Builds programs for devices with this memory, which this process need not have."""
    token = _planned.set(memory_bytes)
    try:
        yield
    finally:
        _planned.reset(token)


def memory_of(mesh: Mesh | AbstractMesh) -> int:
    """Returns the memory of a device that programs can use, in whole GiB; 0 if it is not known.

    Processes must choose the same, so the few bytes by which their devices differ are left out.
    """
    if planned := _planned.get():
        return planned
    here = [] if isinstance(mesh, AbstractMesh) else [*mesh.local_devices]
    if not here or here[0] not in jax.local_devices():
        return 0
    limit: int = (here[0].memory_stats() or {}).get("bytes_limit", 0)
    return limit // 2**30 * 2**30


BUFFERING = "xla_gpu_enable_while_loop_double_buffering"


def hosts_of(mesh: Mesh | AbstractMesh, compiler_options: Collection[str]) -> int:
    """Returns the number of hosts of the devices of a program in mode `manual`; see `LayerLoops`.

    A plan without devices counts eight GPUs a host, and the options are those that runs choose.
    """
    if isinstance(mesh, AbstractMesh):
        return -(-mesh.size // 8)
    return count_hosts(mesh) if BUFFERING in compiler_options else 1


class _Layers(NamedTuple):
    """A loop over layers, or one layer that is written out.

    Attributes:
      kept: The bytes that all its layers keep for the backward pass, for each of `REMAT_POLICIES`;
        for `none` without the results of elementwise operations, which XLA fuses.
      working: The bytes that one layer needs while it runs.
      equations: The equations of the unrolled layers; 0 for a layer that is written out.
    """

    kept: Mapping[str, int]
    working: int
    equations: int


@dataclasses.dataclass(frozen=True)
class LayerLoops:
    """What a program's choice of `LayerChoice` depends on.

    Attributes:
      option: The program's option `remat`.
      platform: The platform of the devices.
      memory_bytes: The memory of a device that programs can use; 0 if it is not known.
      held_bytes: The bytes that the state takes on a device.
      gradient_bytes: The bytes of the gradients. A loop begins its backward pass with zeros for all
        of them. Unrolled layers make theirs one after the other, while the values that the layers
        kept are freed, so the two are not held together.
      parts: The number of devices that the arrays of a traced loss are divided over.
      hosts: The number of hosts of the devices; 1 if loops would not gather early.
      made: The choices that were made; the first holds for the program.
    """

    option: Remat = "model"
    platform: str = ""
    memory_bytes: int = 0
    held_bytes: int = 0
    gradient_bytes: int = 0
    parts: int = 1
    hosts: int = 1
    made: list[LayerChoice] = dataclasses.field(default_factory=list, compare=False)

    @property
    def changes_layers(self) -> bool:
        """Whether layers may run in another way than the model says."""
        return self.platform in CHOICES

    @property
    def choice(self) -> LayerChoice | None:
        """The choice for the program; `None` if its layers run as the model says."""
        return self.made[0] if self.made else None

    def choose(self, jaxpr: Jaxpr, num_params: int) -> "ChosenLayers":
        """Chooses for the layers of a traced loss, whose first inputs are the parameters."""
        if not self.changes_layers:  # On a CPU nothing is gained, so marks are taken off.
            return ChosenLayers(LayerChoice("none", False), frozenset())
        loops = frozenset(self._found(jaxpr, num_params)) if self.option == "auto" else frozenset()
        layers = list(_layers(jaxpr, loops))
        if layers and not self.made:
            outside = sum(_bytes(v) for eqn in jaxpr.eqns if _is_product(eqn) for v in eqn.outvars)
            self.made.append(self._first_that_fits(layers, outside))
        return ChosenLayers(self.choice, loops)

    def _found(self, jaxpr: Jaxpr, num_params: int) -> Iterator[int]:
        """Yields the identities of the scans over parameters that have no checkpoint."""
        yield from _scans_over(jaxpr, set(jaxpr.invars[:num_params]))

    def _first_that_fits(self, layers: Sequence[_Layers], outside: int) -> LayerChoice:
        choices = CHOICES[self.platform]
        if not self.memory_bytes:
            choice = next(x for x in choices if not x.unrolled)
            return choice._replace(why="the memory of the devices is not known")
        fixed = self.held_bytes + (2 * outside + 2 * max(x.working for x in layers)) / self.parts
        equations = sum(x.equations for x in layers)
        passed = ""
        for choice in choices:
            kept = sum(x.kept[choice.remat] for x in layers) / self.parts
            both = max if choice.unrolled else sum
            needed = fixed + both((kept, self.gradient_bytes))
            why = f"about {needed / 2**30:.1f} of {self.memory_bytes / 2**30:.1f} GiB{passed}"
            if choice.unrolled and equations and self.hosts > 1:
                passed = f"; unrolled, gathers between {self.hosts} hosts would be exposed"
            elif choice.unrolled and equations > MOST_EQUATIONS:
                passed = f"; unrolled, {equations:,} equations would compile for long"
            elif needed <= SHARE * self.memory_bytes:
                break
        return choice._replace(why=why)


class ChosenLayers(NamedTuple):
    """A choice, and what it is for.

    Attributes:
      choice: The choice; `None` if nothing is changed.
      loops: The identities of equations: scans without a mark that the choice is also for.
    """

    choice: LayerChoice | None = None
    loops: frozenset[int] = frozenset()

    def changes(self, eqn: Any) -> bool:
        """Returns whether the choice changes an equation, or one inside it."""
        return self.choice is not None and (
            id(eqn) in self.loops
            or is_marked(eqn)
            or any(self.changes(inside) for _, inner in inner_jaxprs(eqn) for inside in inner.eqns)
        )

    def unrolls(self, eqn: Any) -> bool:
        """Returns whether a scan is unrolled."""
        if self.choice is None or not self.choice.unrolled:
            return False
        return id(eqn) in self.loops or any(map(is_marked, _called(eqn.params["jaxpr"].jaxpr)))


def is_marked(eqn: Any) -> bool:
    """Returns whether an equation is a checkpoint with one of `MARKS`."""
    return eqn.primitive.name in REMAT_PRIMITIVES and eqn.params["policy"] in MARKS


def unrolled_scan(
    layer: Callable[..., Sequence[Any]], params: Mapping[str, Any], args: Sequence[Any]
) -> list[Any]:
    """Runs a scan's layers one after another, as calls of one jitted function.

    The parts of the stacked arrays are the results of one `split`, whose gradient is one
    concatenation. The gradients of slices would be padded with zeros and added.

    A first layer has a function of its own, because its input may have no gradient, as data have
    none. JAX traces the forward rule of a `custom_vjp` again for such an input, and in one jitted
    function both traces would share a record of the residuals. With several carried values it may
    take as many layers until all of them have gradients.
    """
    first, size = scan_sizes(params)
    length, called = params["length"], jax.jit(_copied(layer))
    apart = {index: jax.jit(_copied(layer)) for index in range(min(size, length))}
    consts, carry, stacked = args[:first], [*args[first:][:size]], args[first + size :]
    parts = [_entries(x, length) for x in stacked]
    results: list[Any] = [None] * length
    for turn in range(length):
        index = length - 1 - turn if params["reverse"] else turn
        out = apart.get(turn, called)(*consts, *carry, *(entries[index] for entries in parts))
        carry, results[index] = [*out[:size]], out[size:]
    return [*carry, *(jax.numpy.stack(ys) for ys in zip(*results, strict=True))]


def _copied(layer: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Returns another function, because JAX knows a traced function by its identity."""

    def run_layer(*args: Any) -> Sequence[Any]:
        return layer(*args)

    return run_layer


def _entries(x: jax.Array, length: int) -> list[jax.Array]:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # A key, which has no gradient.
        return [jax.lax.index_in_dim(x, index, keepdims=False) for index in range(length)]
    return [jax.lax.squeeze(part, (0,)) for part in jax.lax.split(x, (1,) * length)]


def _layers(jaxpr: Jaxpr, loops: frozenset[int]) -> Iterator[_Layers]:
    """Yields the loops and layers of a program that are marked or among `loops`."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            if id(eqn) in loops or any(map(is_marked, _called(body))):
                first, size = scan_sizes(eqn.params)
                carried = body.invars[first : first + size]
                yield _measure(body, carried, eqn.params["length"], in_loop=True)
                continue
        if is_marked(eqn):
            body = eqn.params["jaxpr"]
            yield _measure(body, body.invars, 1, in_loop=False)
            continue
        for _, inner in inner_jaxprs(eqn):
            yield from _layers(inner, loops)


def _measure(body: Jaxpr, activations: Iterable[Any], times: int, *, in_loop: bool) -> _Layers:
    walk = _Walk(body, activations)
    carried, products = sum(map(_bytes, activations)), sum(walk.results.values())
    operands = sum(size for v, size in walk.operands.items() if v not in walk.results)
    kept = {
        "full": times * (carried + walk.attended),
        "dots": times * (carried + products),
        "none": times * (carried + products + operands),
    }
    return _Layers(kept, products + operands, times * walk.equations * in_loop)


class _Walk:
    """Walks through a layer, and measures what its backward pass reads.

    Attributes:
      results: The bytes of the result of each product and each kernel.
      operands: The bytes of each activation that is an operand of one of them.
      attended: The bytes of the results of kernels and loops, such as attention.
      equations: The number of equations.
    """

    def __init__(self, body: Jaxpr, activations: Iterable[Any]) -> None:
        self.results: dict[Any, int] = {}
        self.operands: dict[Any, int] = {}
        self.attended = self.equations = 0
        self._sources: dict[Any, Any] = {v: v for v in activations}
        self._visit(body)

    def _visit(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            read = [self._sources.get(v) for v in eqn.invars if not isinstance(v, Constant)]
            sources = list(filter(None, read))
            if inner := _body_of_call(eqn):
                # The weights of a call are weights inside too.
                pairs = list(zip(inner.invars, eqn.invars, strict=True))
                known = {a: b for a, b in pairs if not isinstance(b, Constant)}
                self._sources |= {a: s for a, b in known.items() if (s := self._sources.get(b))}
                self._visit(inner)
                made = zip(eqn.outvars, inner.outvars, strict=True)
                known = {a: b for a, b in made if not isinstance(b, Constant)}
                self._sources |= {a: s for a, b in known.items() if (s := self._sources.get(b))}
                continue
            self.equations += 1 + sum(len(x.eqns) for _, x in inner_jaxprs(eqn))
            if not sources:
                continue
            is_product, is_kernel = _is_product(eqn), _is_kernel(eqn)
            if is_product or is_kernel:
                self.operands |= {v: _bytes(v) for v in sources}
                self.results |= {v: _bytes(v) for v in eqn.outvars}
                self.attended += sum(map(_bytes, eqn.outvars)) * is_kernel
            moves = eqn.primitive.name in _MOVES and _bytes(eqn.outvars[0]) == _bytes(sources[0])
            self._sources |= {v: sources[0] if moves else v for v in eqn.outvars}


# An array that one of these makes is the same array in another shape.
_MOVES = frozenset({"copy", "name", "pvary", "reshape", "squeeze", "transpose"})
_PRODUCTS = frozenset({"conv_general_dilated", "ragged_dot", "ragged_dot_general"})
_KERNELS = ("custom_vjp_call", "pallas_call", "scan", "while", "cond", "custom_partitioning")


def _is_product(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in _PRODUCTS
    return not any(eqn.params["dimension_numbers"][1])


def _is_kernel(eqn: Any) -> bool:
    return eqn.primitive.name.startswith(_KERNELS)


def _body_of_call(eqn: Any) -> Jaxpr | None:
    if eqn.primitive.name in CALLS:
        inner: Jaxpr = eqn.params["jaxpr"].jaxpr
        return inner
    return eqn.params["jaxpr"] if eqn.primitive.name in REMAT_PRIMITIVES else None


def _called(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program, and those of calls in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name in CALLS:
            yield from _called(eqn.params["jaxpr"].jaxpr)


def _scans_over(jaxpr: Jaxpr, weights: set[Any]) -> Iterator[int]:
    """Yields the identities of scans over `weights` that have no checkpoint."""
    known = set(weights)
    for eqn in jaxpr.eqns:
        read = [not isinstance(v, Constant) and v in known for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner = eqn.params["jaxpr"].jaxpr
            inside = {v for v, yes in zip(inner.invars, read, strict=True) if yes}
            yield from _scans_over(inner, inside)
        elif eqn.primitive.name == "scan":
            first, size = scan_sizes(eqn.params)
            body = eqn.params["jaxpr"].jaxpr
            if size and any(read[first + size :]) and not _has_checkpoint(body):
                yield id(eqn)
        elif len(eqn.invars) == 1 and all(read):
            known.update(eqn.outvars)


def _has_checkpoint(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in REMAT_PRIMITIVES
        or any(_has_checkpoint(inner) for _, inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _bytes(variable: Any) -> int:
    aval = variable.aval
    if not hasattr(aval, "shape") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize
