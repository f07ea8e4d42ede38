"""Finds the scan over layers in a traced loss, and refuses programs that cannot be cut there."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.tracing.jaxprs import CALLS, inner_jaxprs, scan_sizes, without_names
from manualpar.layers.pipeline.per_layer_ops import keeps_layers


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
      paths: The paths of the parameters.

    Raises:
      ValueError: There is no such scan, or several, or the program cannot be cut there.
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
