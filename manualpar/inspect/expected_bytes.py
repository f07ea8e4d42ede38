"""Computes the bytes that a step sends for its parameters and gradients, without a trace.

A strategy gives three counts for each parameter: how often a step gathers it, scatters its gradient
and gathers its new value (`manualpar.core.modes.strategy.CommCounts`). This module converts the
counts to bytes. A parameter has `P` elements (padding included) of `b` bytes and is sharded over
`S` devices. For each collective a device sends

    all-gather or reduce-scatter                                    b P (S - 1) / S
    all-reduce over the `R` groups that each store all shards       2 b (P / S) (R - 1) / R

The all-reduce of the gradient runs once a step (`S = 1` under data parallelism). `b` is the size of
the dtype that is sent: `gather_dtype` for a gather, `reduce_dtype` (else `gather_dtype`) for a
reduction, the parameter's dtype for the gather of a new value. With `gather_code` or `reduce_code`
devices send quantized numbers. `n` numbers then take `c(n)` bytes
(`manualpar.core.parameters.block_quantization.quantized_bytes`), and a device sends for each

    all-gather, or all-to-all in place of a reduce-scatter          c(P / S) (S - 1)
    all-to-all and all-gather in place of an all-reduce             2 c(P / S / R) (R - 1)

Each layer of a loop is quantized separately, and only if quantization saves bytes.

For a frozen parameter a step sends only gathers. They send the dtype in which the parameter is
stored, if this dtype is as narrow as `gather_dtype`, and otherwise `gather_dtype`. If no layer
before a frozen parameter's layer is trained, the backward pass does not gather the parameter.

If the option `axis_by_axis` is set and a parameter is sharded over two axes of sizes `A, B`, its
gather is one gather over `B` of `P / A` elements and then one over `A` of all elements:
`b P (1 / A) (B - 1) / B + b P (A - 1) / A`. The sum is the same as for one gather over both axes.
Most of these bytes are sent over `A`, the major axis.

The formulas assume that a minibatch uses each parameter once, and that the backward pass needs the
parameter. If parameters are dropped after the forward pass, the result is an upper bound, because
the step gathers neither biases nor the kernel of the first layer again. A parameter with several
uses is gathered for each use (only once, if it stays gathered). For a replicated parameter the
number of uses does not matter.

A layer may compute with its own part of a parameter (see
`manualpar.core.parameters.split_parameter`). Such a split parameter is not gathered over the axes
that split it, and `P` counts a device's part. If `N` devices share the `K` entries of a dim (8
devices and 2 heads), `1 / K` of the parameter is gathered, and the gradient is summed in each
minibatch: `2 b P (N - 1) / N` over the axes that split the parameter.

In a pipeline `P` of a stacked parameter counts one stage's part.
`manualpar.inspect.pipeline_formulas` counts the uses by each stage. Gradients of parameters that
are not stacked are summed over the `N` stages once a step: `2 b (P / S) (N - 1) / N`.

Under `diloco` the replicas train separately. A step sends the bytes of one replica's program on
that replica's part of the mesh. `outer_step_bytes` counts the bytes of the outer step.

The formulas do not count: collectives of split layers, of metrics, of example counts, and of
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

# The scopes of collectives that `step_bytes` does not count.
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
      program: The program. In modes `auto` and `explicit` the prediction holds if the compiler
        gathers and scatters as its sharding constraints ask.
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

    An outer step averages, over `R` replicas, how much each replica's parameters differ from the
    common parameters. A trained parameter has `P` elements, and its optimizer state is sharded over
    `S` devices. For its average a device sends `2 b (P / S) (R - 1) / R` bytes, or, quantized,
    `2 c(P / S / R) (R - 1)` if this is less. If only the optimizer state is sharded over the `S`
    devices, they then gather the new parameter: `b P (S - 1) / S`.

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

    Collectives of metrics, of collections and of layers are left out. A collective from other code
    than this package is included, unless it is known to run over no data axis. If there is one, the
    traced step therefore sends more than `step_bytes` predicts.
    """
    return tuple(x for x in collectives if is_of_parameters(x.scope, x.purpose))


def is_of_parameters(scope: str, purpose: str) -> bool:
    """Returns whether `step_bytes` predicts the collective of this scope and purpose."""
    if purpose_of(scope) is None:
        return purpose == OTHER
    return purpose not in OTHER_SCOPES
