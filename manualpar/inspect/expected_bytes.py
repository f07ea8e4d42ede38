"""The bytes that a step sends for its parameters and gradients, in closed form.

A strategy gives the number of times that a step gathers a parameter, scatters its gradient and
gathers its new value (`manualpar.core.modes.strategy.CommCounts`). This module converts these
numbers to bytes. A parameter has `P` elements (padding included) of `b` bytes and is sharded over
`S` devices. For each of these collectives a device sends

    all-gather or reduce-scatter                                    b P (S - 1) / S
    all-reduce over the `R` groups that each store all shards       2 b (P / S) (R - 1) / R

The all-reduce happens once a step (`S = 1` under data parallelism). `b` belongs to the dtype that
is sent: `gather_dtype` for a gather, `reduce_dtype` (else `gather_dtype`) for a reduction, the
parameter's dtype for the gather of a new value. With `gather_code` or `reduce_code`, quantized
numbers are sent. If `c(n)` is the `quantized_bytes` of `n` numbers, a device then sends for each

    all-gather, or all-to-all in place of a reduce-scatter          c(P / S) (S - 1)
    all-to-all and all-gather in place of an all-reduce             2 c(P / S / R) (R - 1)

Each layer of a loop is quantized separately, and only if quantization saves bytes.

A frozen parameter costs only its gathers. They send the dtype in which the parameter is stored, if
this dtype is as narrow as `gather_dtype`, and otherwise `gather_dtype`. If no layer before a frozen
parameter's layer is trained, the backward pass does not need the parameter.

Over two axes of sizes `A, B` with `axis_by_axis`, a gather is one gather over `B` of `P / A`
elements and one gather over `A` of all elements: `b P (1 / A) (B - 1) / B + b P (A - 1) / A`. The
sum is the same as for one gather over both axes. Most of these bytes are sent over `A`, the major
axis.

The closed form assumes that each parameter is used once in a minibatch and needed in the backward
pass. The result is an upper bound if parameters are dropped after the forward pass, because biases
and the kernel of the first layer are not gathered again. A parameter that is used several times is
gathered for each use (only once, if it stays gathered). A replicated parameter costs the same for
any number of uses.

A parameter that is split (see `manualpar.core.parameters.split_parameter`) is not gathered over the
axes that split it, and `P` counts a device's part of it. If `N` devices share the `K` entries of a
dim (8 devices and 2 heads), `1 / K` of the parameter is gathered, and the gradient is summed in
each minibatch: `2 b P (N - 1) / N` over the axes that split the parameter.

In a pipeline `P` of a stacked parameter counts one stage's part.
`manualpar.inspect.pipeline_formulas` gives the number of uses by each stage. Gradients of
parameters that are not stacked are summed over the `N` stages once a step: `2 b (P / S) (N - 1) /
N`.

With `diloco` a step sends the same bytes as the step of one replica's program on the part of the
mesh for one replica. `outer_step_bytes` counts the bytes of the outer step.

The closed form does not count: collectives of split layers, of metrics, of example counts, and of
variables outside `params`; activations that stages send; collectives that the compiler inserts for
an optimizer that is not elementwise.
"""

from collections.abc import Iterable
from fractions import Fraction

import jax.numpy as jnp

from manualpar.core.mesh.axes import axes_size
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import (
    COLLECTIONS_SCOPE,
    COUNT_SCOPE,
    EXAMPLES_SCOPE,
    METRICS_SCOPE,
    NONFINITE_SCOPE,
    OUTER_SCOPE,
    purpose_of,
)
from manualpar.inspect.communication import Collective, bytes_by_axes
from manualpar.inspect.parameter_formulas import (
    ParameterForm,
    Uses,
    elements_on_device,
    mean_collectives,
)
from manualpar.inspect.pipeline_formulas import PipelineForm
from manualpar.inspect.scope_parsing import LAYER_SCOPES, OTHER

# Scopes of a step's collectives that are not for parameters or gradients.
OTHER_SCOPES = (
    METRICS_SCOPE,
    COUNT_SCOPE,
    COLLECTIONS_SCOPE,
    NONFINITE_SCOPE,
    EXAMPLES_SCOPE,
    *LAYER_SCOPES,
)


def step_bytes(program: Program, *, stage: int | None = None) -> dict[tuple[str, ...], Fraction]:
    """Predicts the bytes that a device sends in a step for parameters and gradients.

    Args:
      program: The program. In modes `auto` and `explicit` the prediction holds for the program that
        the compiler is asked for; the compiler may make another program.
      stage: The stage of a pipeline; `None` for the stage that sends the most.

    Returns:
      The bytes over each axis, or tuple of axes. In mode `manual` these bytes equal `bytes_by_axes`
      of the traced program, or are an upper bound if parameters are gathered again in the backward
      pass.

    Raises:
      ValueError: The mode is `auto-unconstrained`, in which the compiler may send activations
        instead; or a parameter is sharded over data axes in two dimensions.
    """
    if program.mode == "auto-unconstrained":
        raise ValueError(
            "step_bytes: program has mode='auto-unconstrained', expected 'manual', 'auto' or "
            "'explicit', because in this mode the compiler chooses the collectives. Read them with "
            "compiled_collectives."
        )
    if program.outer is not None:
        program = program.outer.inner
    if program.pipeline is None:
        m = program.num_minibatches
        sends = (program.strategy.sends(m, place.keep) for _, place in program.parameters)
        return _of_stage(program, (Uses(one, backward=m) for one in sends))
    form = PipelineForm(program)
    stages = form.stages(stage)
    sent = [_of_stage(program, form.uses(one)) for one in stages]
    return max(sent, key=lambda by_axes: sum(by_axes.values()))


def _of_stage(program: Program, uses: Iterable[Uses]) -> dict[tuple[str, ...], Fraction]:
    """Sums the bytes that a device sends for all parameters, given the uses of each parameter."""
    return bytes_by_axes(
        x
        for (info, place), used in zip(program.parameters, uses, strict=True)
        for x in ParameterForm(program, info, place).collectives(used)
    )


def total_step_bytes(program: Program, *, stage: int | None = None) -> Fraction:
    """Returns the sum of `step_bytes` over all axes."""
    return sum(step_bytes(program, stage=stage).values(), Fraction(0))


def outer_step_bytes(
    program: Program, *, fragment: int | None = None
) -> dict[tuple[str, ...], Fraction]:
    """Predicts the bytes that a device sends for parameters in outer steps.

    A trained parameter has `P` elements, and its optimizer state is sharded over `S` devices. For
    the mean difference of `R` replicas from this parameter a device sends `2 b (P / S) (R - 1) / R`
    bytes; or, quantized, `2 c(P / S / R) (R - 1)`, if this is less. If the parameter itself is
    replicated within a replica, its new value is gathered there: `b P (S - 1) / S`.

    Args:
      program: The program that `diloco` returns.
      fragment: The fragment that is exchanged; `None` for all fragments, each once.

    Returns:
      The bytes over each axis, or tuple of axes. `bytes_by_axes` of the traced `outer_step` gives
      the same bytes, plus 4 bytes for the number of examples, plus the bytes of collections.

    Raises:
      ValueError: The program has no outer steps.
    """
    outer = program.outer
    if outer is None:
        raise ValueError(
            f"outer_step_bytes: program of {program.strategy.name} has no outer steps, expected "
            "one of diloco. step_bytes predicts what its steps send."
        )
    sent: list[Collective] = []
    axes, comm = outer.replica_axes, outer.comm
    size = axes_size(program.mesh, axes)
    for (info, place), its_fragment in zip(program.parameters, outer.fragments, strict=True):
        if its_fragment is None or fragment not in (None, its_fragment):
            continue
        shard = elements_on_device(program, info, place.sharded_names, place.padding)
        dtype = jnp.dtype(comm.reduce.dtype or info.dtype)
        sent += mean_collectives(comm, shard, dtype, axes, size, OUTER_SCOPE)
        form = ParameterForm(program, info, place)
        sent += (x for x in form.new_gathers(1) if x.axis_size > 1)
    return bytes_by_axes(sent)


def of_parameters(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Returns the collectives of a traced step that `step_bytes` predicts.

    Collectives of metrics, of collections and of layers are left out. A collective that this
    package did not write is included, so that the traced step then differs from the prediction. It
    is left out if it is known to run over no data axis.
    """
    return tuple(x for x in collectives if is_of_parameters(x.scope, x.purpose))


def is_of_parameters(scope: str, purpose: str) -> bool:
    """Returns whether `step_bytes` predicts the collective of this scope and purpose."""
    if purpose_of(scope) is None:
        return purpose == OTHER
    return purpose not in OTHER_SCOPES
