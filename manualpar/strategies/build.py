"""Builds checked programs: what every strategy's builder calls."""

from collections.abc import Mapping
from typing import Any, Unpack, cast

from manualpar.checks.guarded_step import guard_steps
from manualpar.checks.program_check import check_program
from manualpar.core.mesh.mesh_context import explain_shardings, no_mesh
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import (
    PROGRAM_OPTIONS,
    ProgramOptions,
    check_options,
    explain_dtypes,
    with_defaults,
)
from manualpar.core.modes.strategy import Strategy
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program, Quantization, make_program
from manualpar.quantization.gradient_rounding import gradient_rounding
from manualpar.quantization.quantized_collectives import make_quantizer

QUANTIZATION = Quantization(make_quantizer, gradient_rounding)


def build_program(
    strategy: Strategy,
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds a program. Every strategy's builder, such as `manualpar.fsdp`, calls it.

    Args:
      model: The model, written for one device, see `manualpar.core.model.interface`.
      tx: An optax optimizer, or a function that makes one from the tree of the parameters'
        `ParameterInfo`s, see `manualpar.muon_dims`.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`. `loss` is the mean over
        the examples of `batch`, and `metrics` has pairs `{"loss": (sum, count), ...}`, see
        `accumulate_gradients`. `rng` differs between devices, minibatches and steps.
      **options: `mesh`, `batch` and more, see `ProgramOptions`.

    Returns:
      The program, traced but not compiled. No device has been used.
      `inspect.layout_table(program)` shows each parameter's sharding, or why it is replicated.
    """
    check_options(strategy.name, options, PROGRAM_OPTIONS)
    return build_checked(strategy, model, tx, loss_fn, options)


def build_checked(
    strategy: Strategy,
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    options: Mapping[str, Any],
) -> Program:
    """Builds a program with options that `check_options` has checked; see `build_program`."""
    complete = cast(ProgramOptions, with_defaults(options, PROGRAM_OPTIONS))
    with (
        no_mesh(),
        explain_shardings(strategy.name, complete["mode"]),
        explain_dtypes(strategy.name, complete),
    ):
        program = make_program(strategy, model, tx, loss_fn, complete, QUANTIZATION)
        check_program(program)
    return guard_steps(program)
