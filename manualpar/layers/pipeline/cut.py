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

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Var
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.jaxprs import all_equations, has_effects, scan_sizes
from manualpar.layers.pipeline.layer_scan import find_layer_scan, written_out
from manualpar.layers.pipeline.per_layer_ops import for_fewer_layers
from manualpar.layers.pipeline.replay import run_retyped

# The inputs of a traced loss by index. Constants of the loss follow as further inputs.
Inputs = Mapping[int, Any]


def find_stacked(jaxpr: ClosedJaxpr, paths: Sequence[str]) -> frozenset[str]:
    """Finds the paths of the parameters over which the scan over layers runs, along dim 0.

    Args:
      jaxpr: A traced loss. Its first inputs are the full parameters.
      paths: The paths of these parameters.

    Raises:
      ValueError: No scan runs over parameters, or several do, or the layers cannot be divided among
        stages; the message says why.
    """
    return frozenset(paths[i] for i in find_layer_scan(written_out(jaxpr)[0], paths).stacked)


def check_divides(length: int, num_stages: int, chunks: int) -> None:
    """Refuses a number of layers that cannot be divided equally among the chunks of all stages.

    Raises:
      ValueError: `length` is not a multiple of `num_stages * chunks`.
    """
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
        """Cuts a traced loss whose first inputs are the full parameters at `paths`.

        Raises:
          ValueError: See `find_stacked`.
        """
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
          carry: The input of the first layer to run.
          first: The index of the first layer to run.

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
