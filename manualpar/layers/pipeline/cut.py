"""Cuts a traced loss at its scan over layers: into pieces before, in and after the scan.

The user's model and loss function are written for one device. In the traced loss one `scan` runs
over parameters with layers stacked in dim 0. The loss is cut at this scan. Each piece has only the
equations that its results need:

- the *prefix* computes the input of the first layer,
- the *layers* are the body of the scan,
- the *sides* are the other values that all layers read, such as masks, angles and keys,
- and the *suffix* computes loss and metrics from the output of the last layer.

If two pieces need the same value, both compute it: for example a value that the layers and the
suffix read, or a tied embedding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.jaxprs import (
    CALLS,
    COMPOSITE,
    ELEMENTWISE,
    REMAT_PRIMITIVES,
    all_equations,
    expanded,
    has_effects,
    inner_jaxprs,
    run_equations,
    scan_sizes,
    without_names,
)

# The inputs of a traced loss by index. Constants of the loss follow as further inputs.
Inputs = Mapping[int, Any]


def find_stacked(jaxpr: ClosedJaxpr, paths: Sequence[str]) -> frozenset[str]:
    """Finds the paths of the parameters over which the scan over layers runs, along dim 0.

    Args:
      jaxpr: A traced loss. Its first inputs are the full parameters.
    """
    return frozenset(paths[i] for i in find_layer_scan(written_out(jaxpr)[0], paths).stacked)


def check_divides(length: int, num_stages: int, chunks: int) -> None:
    """Refuses a number of layers that cannot be divided equally among the chunks of all stages."""
    if length % (num_stages * chunks):
        expected = f"a multiple of the {num_stages} stages"
        if chunks > 1:
            expected += f" times chunks={chunks}"
        raise ValueError(
            f"pipeline: the model has {length} layers, expected {expected}, because all stages "
            "have the same number of layers. A group of layers in one iteration of the scan counts "
            "as one layer. Change the number of layers, the mesh or chunks."
        )


class LossPiece:
    """The part of a traced loss that computes some of its arrays.

    Attributes:
      reads: The indices of the program's inputs that the piece reads.
    """

    def __init__(
        self, program: Jaxpr, results: Sequence[Any], *, cut: Any, after_cut: bool = False
    ) -> None:
        """Keeps the equations of `program` that `results` need, without the equation `cut`.

        With `after_cut` the outputs of `cut` are further inputs, and the piece also keeps all
        equations with effects, such as prints.
        """
        invars = [*program.invars, *(cut.outvars if after_cut else ())]
        # An unused output of the cut equation is a DropVar, which cannot be an input.
        invars = [Var(v.aval) if isinstance(v, DropVar) else v for v in invars]
        jaxpr = program.replace(
            invars=invars,
            outvars=list(results),
            eqns=[
                eqn
                for eqn in program.eqns
                if eqn is not cut and (after_cut or not has_effects(eqn))
            ],
        )
        number = len(program.invars)
        are_kept = [False] * number + [True] * (len(invars) - number)
        self.jaxpr, are_read = dce_jaxpr(jaxpr, [True] * len(results), instantiate=are_kept)
        self.reads = tuple(i for i in range(number) if are_read[i])

    def __call__(self, inputs: Inputs, outputs: Sequence[Any] = ()) -> list[Any]:
        """Computes the results from the program's inputs and the `outputs` of the cut equation."""
        results = run_retyped(self.jaxpr, [*(inputs[i] for i in self.reads), *outputs])
        pairs: Any = zip(self.jaxpr.outvars, results, strict=True)
        return [x if isinstance(v, Var) else jnp.asarray(x, v.aval.dtype) for v, x in pairs]

    @property
    def permutes(self) -> bool:
        """Whether the piece contains a permute."""
        return permutes(self.jaxpr)


class Cut:
    """A traced loss in pieces.

    Attributes:
      length: The number of layers, `L`.
      stacked: The indices of the parameters that the scan runs over.
      constants: The loss's constants by index.
      results: For each result of the loss, the index of the input that the loss returns unchanged,
        or `None` for a computed result.
      carry: The types of the scan's carry: the activations between layers.
      ys: The types of the scan's stacked outputs, `[L, ...]`.
      prefix: Computes the input of the first layer.
      sides: Computes the arrays that all layers read, followed by the arrays `[L, ...]` that the
        scan runs over and that are not parameters.
      suffix: Computes the loss's results; the outputs of the scan are further inputs.
    """

    def __init__(self, closed: ClosedJaxpr, paths: Sequence[str]) -> None:
        """Cuts a traced loss whose first inputs are the full parameters at `paths`."""
        program, constants = written_out(closed)
        found = find_layer_scan(program, paths)
        scan, params = found.eqn, found.eqn.params
        first, size = scan_sizes(params)
        operands = scan.invars
        consts, carry, xs = operands[:first], operands[first:][:size], operands[first + size :]
        pairs = list(zip(xs, found.weights, strict=True))
        self.length = params["length"]
        self.stacked = tuple(sorted(found.stacked))
        self.constants = dict(enumerate(constants, start=len(closed.jaxpr.invars)))
        inputs = {v: i for i, v in enumerate(program.invars)}
        self.results = [inputs.get(v) if isinstance(v, Var) else None for v in program.outvars]
        self.carry = [jax.eval_shape(lambda x: x, v.aval) for v in carry]
        self.ys = [jax.eval_shape(lambda x: x, v.aval) for v in scan.outvars[size:]]
        self.prefix = LossPiece(program, carry, cut=scan)
        scanned = [v for v, is_weight in pairs if not is_weight]
        self.sides = LossPiece(program, [*consts, *scanned], cut=scan)
        self.suffix = LossPiece(program, program.outvars, cut=scan, after_cut=True)
        self._weights = LossPiece(program, [v for v, is_weight in pairs if is_weight], cut=scan)
        self._layers = found

    @property
    def side_params(self) -> frozenset[int]:
        """The indices of the inputs that the layers read, except the inputs in `stacked`."""
        return frozenset((*self.sides.reads, *self._weights.reads)) - set(self.stacked)

    @property
    def layers_permute(self) -> bool:
        """Whether the layers, or the computations of their inputs, contain a permute."""
        body = self._layers.eqn.params["jaxpr"].jaxpr
        return self.sides.permutes or self._weights.permutes or permutes(body)

    def run_layers(
        self, inputs: Inputs, carry: Sequence[Any], first: Any
    ) -> tuple[list[Any], list[Any]]:
        """Runs some of the layers.

        Args:
          inputs: The inputs that layers read; stacked parameters contain only the layers to run,
            `[k, ...]`.

        Returns:
          The output of the last layer, and the stacked outputs of all layers that run, `[k, ...]`.
        """
        params, fewer = self._layers.eqn.params, len(inputs[self.stacked[0]])
        num_consts, num_carry = scan_sizes(params)
        sides = self.sides(inputs)
        consts, scanned = sides[:num_consts], iter(sides[num_consts:])
        weights = iter(self._run_weights(inputs, fewer))
        xs = [
            next(weights)
            if is_weight
            else jax.lax.dynamic_slice_in_dim(next(scanned), first, fewer)
            for is_weight in self._layers.weights
        ]
        body = params["jaxpr"]

        def layer(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out = run_retyped(body.jaxpr, [*consts, *carry, *xs], body.consts)
            axes = map(varying_axes, carry)
            return list(map(cast_to_varying, out[:num_carry], axes)), out[num_carry:]

        return jax.lax.scan(layer, list(carry), xs, unroll=min(params["unroll"], fewer))

    def _run_weights(self, inputs: Inputs, fewer: int) -> list[Any]:
        """Computes, for `fewer` layers, the arrays of the scan that are made from parameters."""
        jaxpr, reads = self._weights.jaxpr, self._weights.reads
        stacked = {v for v, i in zip(jaxpr.invars, reads, strict=True) if i in self.stacked}
        eqns = []
        for eqn in jaxpr.eqns:
            if not stacked.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
                stacked.update(eqn.outvars)
                eqn = for_fewer_layers(eqn, self.length, fewer) or eqn
            eqns.append(eqn)
        return run_retyped(jaxpr.replace(eqns=eqns), [inputs[i] for i in reads])


def permutes(jaxpr: Jaxpr) -> bool:
    """Returns whether a program contains a permute."""
    return any(eqn.primitive.name == "ppermute" for eqn in all_equations(jaxpr))


# -------------------------------------------------------------------------------------------------
# Operations on stacked parameters that treat every layer separately.
#
# A model may cast or scale a parameter before the scan over layers. A stage of a pipeline has some
# of the layers, and applies these operations only to its layers. The result is the same only if an
# operation treats every entry of dim 0 (every layer) separately.


# These operations treat every element in the same way.
_ELEMENTWISE = ELEMENTWISE | {"psum", "psum_invariant", "pvary"}
_GATHERS = frozenset({"all_gather", "all_gather_invariant"})


def keeps_layers(eqn: Any, stacked: Sequence[bool], length: int) -> bool:
    """Returns whether an equation treats each layer (dim 0 of its operands) separately.

    Args:
      stacked: For each operand, whether its dim 0 is the layers.
    """
    name = eqn.primitive.name
    if any(
        not is_stacked and v.aval.shape for v, is_stacked in zip(eqn.invars, stacked, strict=True)
    ):
        return False
    return (
        name in _ELEMENTWISE
        or (name in _GATHERS and eqn.params["all_gather_dimension"] != 0)
        or for_fewer_layers(eqn, length, length) is not None
    )


def for_fewer_layers(eqn: Any, length: int, fewer: int) -> Any:
    """Changes an equation for `length` layers into an equation for `fewer` layers.

    Returns `None` for primitives other than slices, reshapes, broadcasts, transposes, `rev` and
    `squeeze`, and for equations that change dim 0.
    """
    name, params = eqn.primitive.name, eqn.params

    def shortened(field: str) -> Any:
        sizes = params[field]
        return eqn.replace(params={**params, field: (fewer, *sizes[1:])})

    if name == "slice":
        strides = params["strides"] or (1,)
        is_whole = (params["start_indices"][0], params["limit_indices"][0]) == (0, length)
        return shortened("limit_indices") if is_whole and strides[0] == 1 else None
    if name == "reshape" and params["dimensions"] is None:
        return shortened("new_sizes") if params["new_sizes"][:1] == (length,) else None
    if name == "broadcast_in_dim":
        is_kept = params["broadcast_dimensions"][:1] == (0,) and params["shape"][0] == length
        return shortened("shape") if is_kept else None
    if name == "transpose":
        return eqn if params["permutation"][0] == 0 else None
    if name in ("rev", "squeeze"):
        return eqn if 0 not in params["dimensions"] else None
    return None


# -------------------------------------------------------------------------------------------------
# Finds the scan over layers in a traced loss, and refuses programs that cannot be cut there.


class LayerScan(NamedTuple):
    """The scan over layers.

    Attributes:
      eqn: The equation of the scan.
      stacked: The indices of the parameters that the scan runs over.
      weights: For each array that the scan runs over, whether it is computed from parameters.
    """

    eqn: Any
    stacked: frozenset[int]
    weights: tuple[bool, ...]


def written_out(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Inlines all calls of a program and removes the equations that its results do not need.

    Returns:
      The program, and the values of its constants, which are the program's last inputs.
    """
    eqns, outvars, constants = _inline(closed, list(closed.jaxpr.invars), "")
    invars = [*closed.jaxpr.invars, *constants]
    jaxpr = closed.jaxpr.replace(
        constvars=(),
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        debug_info=without_names(closed.jaxpr),
    )
    return dce_jaxpr(jaxpr, [True] * len(outvars), instantiate=True)[0], list(constants.values())


def _inline(
    closed: ClosedJaxpr, operands: Sequence[Any], scope: Any
) -> tuple[list[Any], list[Any], dict[Var, Any]]:
    """Inlines a program on operands: returns its equations, its results, and its constants.

    All variables are new, because two calls of a function share one traced program.
    """
    constants = {
        Var(v.aval): value for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
    }
    names: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, constants, strict=True))
    names |= dict(zip(closed.jaxpr.invars, operands, strict=True))

    def renamed(variable: Any) -> Any:
        return variable if isinstance(variable, Literal) else names[variable]

    eqns = []
    for eqn in closed.jaxpr.eqns:
        source = eqn.source_info
        if scope:
            source = source.replace(name_stack=scope + source.name_stack)
        invars = [renamed(v) for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner, outvars, more = _inline(eqn.params["jaxpr"], invars, source.name_stack)
            eqns += inner
            constants |= more
            names |= dict(zip(eqn.outvars, outvars, strict=True))
            continue
        names |= {v: Var(v.aval) for v in eqn.outvars if not isinstance(v, DropVar)}
        outvars = [v if isinstance(v, DropVar) else names[v] for v in eqn.outvars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))
    return eqns, [renamed(v) for v in closed.jaxpr.outvars], constants


def find_layer_scan(jaxpr: Jaxpr, paths: Sequence[str]) -> LayerScan:
    """Finds the scan that runs over parameters.

    Args:
      jaxpr: A program that `written_out` returned. Its first inputs are the parameters.
    """
    params = jaxpr.invars[: len(paths)]
    walk = _Walk(jaxpr, {v: frozenset({i}) for i, v in enumerate(params) if _has_dims(v)})
    if len(walk.scans) > 1:
        lengths = " and ".join(
            f"{eqn.params['length']} layers ({_list_paths(paths, found)})"
            for eqn, found in walk.scans
        )
        raise ValueError(
            f"pipeline: {len(walk.scans)} scans run over parameters, of {lengths}; expected one, "
            "whose layers are divided into stages. Write all layers in one scan, or the smaller "
            "stack without a scan."
        )
    if not walk.scans:
        raise ValueError(_why_none(jaxpr, walk, paths))
    eqn, stacked = walk.scans[0]
    params, first = eqn.params, sum(scan_sizes(eqn.params))
    layers = f"pipeline: the scan over {params['length']} layers ({_list_paths(paths, stacked)})"
    if params["reverse"]:
        raise ValueError(f"{layers} runs backwards, expected reverse=False.")
    if not scan_sizes(params)[1]:
        raise ValueError(f"{layers} passes nothing from layer to layer, expected activations.")
    for index, reader in walk.reads:
        if index in stacked:
            raise ValueError(
                f"pipeline: parameter {paths[index]!r} has a layer in each entry of dim 0, and is "
                f"read by {reader} outside of the scan over layers; expected only the scan to read "
                "it, because each stage has only the parameters of its layers. For a penalty on "
                "weights use the optimizer, such as optax.add_decayed_weights."
            )
    return LayerScan(eqn, stacked, tuple(bool(walk.origin(v)) for v in eqn.invars[first:]))


class _Walk:
    """Walks through a program, and follows the arrays that have a layer in each entry of dim 0.

    Attributes:
      scans: The scans over parameters, each with the indices of the parameters that it runs over.
      reads: Other uses of parameters: (index of the parameter, description of its reader).
    """

    def __init__(self, jaxpr: Jaxpr, origins: Mapping[Var, frozenset[int]]) -> None:
        self._origins = dict(origins)
        self.scans: list[tuple[Any, frozenset[int]]] = []
        self.reads: list[tuple[int, str]] = []
        for eqn in jaxpr.eqns:
            self._visit(eqn)
        for v in jaxpr.outvars:
            self.reads += [(i, "the caller, as a result of the loss") for i in self.origin(v)]

    def origin(self, variable: Any) -> frozenset[int]:
        """Returns the parameters, by index, from which a variable is computed layer by layer."""
        found = None if isinstance(variable, Literal) else self._origins.get(variable)
        return found or frozenset()

    def _visit(self, eqn: Any) -> None:
        origins = [self.origin(v) for v in eqn.invars]
        made_of = frozenset[int]().union(*origins)
        if not made_of:
            return
        used = origins
        if eqn.primitive.name == "scan":
            first = sum(scan_sizes(eqn.params))
            used = origins[:first]
            if found := frozenset[int]().union(*origins[first:]):
                self.scans.append((eqn, found))
        elif _keeps_layers(eqn, origins):
            self._origins |= dict.fromkeys(eqn.outvars, made_of)
            return
        where = str(eqn.source_info.name_stack)
        reader = f"{eqn.primitive.name} ({where})" if where else f"{eqn.primitive.name}"
        self.reads += [(i, reader) for params in used for i in sorted(params)]


def _keeps_layers(eqn: Any, origins: Sequence[frozenset[int]]) -> bool:
    """Returns whether an equation treats each layer of parameters separately."""
    lengths = {v.aval.shape[0] for v, found in zip(eqn.invars, origins, strict=True) if found}
    return len(lengths) == 1 and keeps_layers(eqn, [bool(x) for x in origins], lengths.pop())


def _why_none(jaxpr: Jaxpr, walk: _Walk, paths: Sequence[str]) -> str:
    """Returns the message of the error if no scan over parameters is found."""
    for eqn in jaxpr.eqns:
        for scan, _ in _scans_inside(eqn, [walk.origin(v) for v in eqn.invars]):
            return (
                f"pipeline: the scan over {scan.params['length']} layers is inside of a "
                f"{eqn.primitive.name} ({eqn.source_info.name_stack}), expected nothing but "
                "jax.jit around it. Apply nn.remat, jax.checkpoint and functions with a gradient "
                "of their own to a layer and not to the model, and call the model once, outside of "
                "loops and branches."
            )
    return (
        "pipeline: no scan runs over parameters, expected one, over parameters with a layer in "
        "each entry of dim 0. Write the layers as nn.scan(Layer, variable_axes={'params': 0}, "
        "split_rngs={'params': True}, length=...), or as nnx.scan over a module made by nnx.vmap. "
        f"The model's parameters are {_list_paths(paths, range(len(paths)))}."
    )


def _scans_inside(
    eqn: Any, origins: Sequence[frozenset[int]]
) -> Iterator[tuple[Any, frozenset[int]]]:
    """Yields the scans over parameters in the inner programs of an equation."""
    if not any(origins):
        return
    for _, inner in inner_jaxprs(eqn):
        number = min(len(inner.invars), len(origins))  # The condition is not an input of a branch.
        known = zip(inner.invars[-number:], origins[-number:], strict=True)
        walk = _Walk(inner, {v: found for v, found in known if found and _has_dims(v)})
        yield from walk.scans
        for nested in inner.eqns:
            yield from _scans_inside(nested, [walk.origin(v) for v in nested.invars])


def _has_dims(variable: Any) -> bool:
    return bool(variable.aval.shape)


def _list_paths(paths: Sequence[str], which: Iterable[int]) -> str:
    """Lists up to three of the paths at the indices `which`."""
    names = [repr(paths[i]) for i in sorted(which)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -------------------------------------------------------------------------------------------------
# Runs traced programs on arrays that vary over more mesh axes than when they were traced.
#
# For example, in the user's loss a layer's index is the same on all devices. In a pipeline the
# index differs between stages, because each stage has different layers. The types in the traced
# program would then be wrong. So the equations of the program are traced again, with the types of
# the arrays.


def run_retyped(jaxpr: Jaxpr, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """Runs a program on arguments that may vary over more axes than the program's traced inputs."""
    if not _are_wider(jaxpr.invars, args):
        return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if _are_wider(eqn.invars, operands):
            with jax.named_scope(str(eqn.source_info.name_stack)):
                out = _run_wider(jaxpr, eqn, operands)
        else:
            out = run_equations(jaxpr, [eqn], eqn.invars, eqn.outvars, operands)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _are_wider(variables: Sequence[Any], values: Sequence[Any]) -> bool:
    """Returns whether an array varies over an axis over which its traced variable does not."""
    return any(
        not isinstance(v, Literal) and varying_axes(x) - v.aval.mat.varying
        for v, x in zip(variables, values, strict=True)
    )


def _run_wider(jaxpr: Jaxpr, eqn: Any, operands: list[Any]) -> list[Any]:
    """Runs an equation on operands that vary over more axes than the traced operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "pvary":
        return [cast_to_varying(x, params["axes"]) for x in operands]
    if name == COMPOSITE:
        return _function(expanded(eqn))(*operands)
    if name in CALLS:
        return _function(params["jaxpr"])(*operands)
    if name == "cond":
        return _run_branches(list(map(_function, params["branches"])), operands)
    if name == "scan":
        return _run_scan(params, operands)
    if name in REMAT_PRIMITIVES:
        run = jax.checkpoint(
            lambda *args: run_retyped(params["jaxpr"], args),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return list(run(*operands))
    if any(inner_jaxprs(eqn)):
        raise ValueError(
            "pipeline: a value that differs between layers, and not between examples, goes into a "
            f"{name} ({eqn.source_info.name_stack}), expected no such value, because the code "
            "inside was traced with a type that is equal on all stages. Add an activation times "
            "zero to the value."
        )
    operands = cast_to_varying(operands, varying_axes(operands))
    variables = [Var(jax.typeof(x)) for x in operands]  # A literal becomes a variable too.
    eqn = eqn.replace(invars=variables)
    return run_equations(jaxpr, [eqn], variables, eqn.outvars, operands)


def _function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    return lambda *args: run_retyped(closed.jaxpr, args, closed.consts)


def _run_branches(branches: list[Callable[..., list[Any]]], operands: list[Any]) -> list[Any]:
    index, *args = operands
    types = [jax.eval_shape(branch, *args) for branch in branches]
    axes = [varying_axes(of_branches) for of_branches in zip(*types, strict=True)]

    def typed(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda *args: list(map(cast_to_varying, branch(*args), axes))

    return list(jax.lax.switch(index, list(map(typed, branches)), *args))


def _run_scan(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    first, size = scan_sizes(params)
    consts, carry, xs = operands[:first], operands[first:][:size], operands[first + size :]
    number, body = len(carry), _function(params["jaxpr"])

    def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*consts, *carry, *xs)
        axes = map(varying_axes, carry)
        return list(map(cast_to_varying, out[:number], axes)), out[number:]

    slices = [jax.eval_shape(lambda x: x[0], x) for x in xs]
    for _ in carry:  # A carry must keep its type. Each round can only add axes to the type.
        types, _ = jax.eval_shape(iteration, carry, slices)
        carry = [cast_to_varying(x, varying_axes(t)) for x, t in zip(carry, types, strict=True)]
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    end, ys = jax.lax.scan(iteration, carry, xs, **options)
    return [*end, *ys]
