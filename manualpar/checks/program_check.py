"""Refuses programs that could compute wrong results, or hang, without an error."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from manualpar.checks.collectives_check import check_traced_steps, gathers_parameters
from manualpar.checks.context_check import check_context
from manualpar.checks.trainable_check import check_trainable
from manualpar.core.mesh.mesh_context import with_auto_axes
from manualpar.core.mesh.splitting import shapes_of_batch
from manualpar.core.program.program import Program


def check_program(program: Program) -> None:
    """Refuses a program whose model, options or traced steps are wrong; compiles nothing."""
    name, step = program.strategy.name, program.step
    batch = shapes_of_batch(f"{name}: batch", program.abstract_batch)
    check_context(name, program.model, batch, program.roles)
    check_trainable(name, program.model)

    def trace(function: Any) -> Any:
        others = (program.abstract_others,) if program.abstract_others else ()
        return function.trace(program.abstract_state, program.abstract_batch, *others).jaxpr

    train, evaluate = trace(program.train_step), trace(program.eval_step)
    loss = None
    if gathers_parameters(train) and not step.checks_loss:
        loss_only = with_auto_axes(step.loss_only, mesh=program.mesh, out_specs=PartitionSpec())
        loss = trace(jax.jit(loss_only))
    check_traced_steps(name, train, evaluate, loss, data_axes=program.data_axes)
