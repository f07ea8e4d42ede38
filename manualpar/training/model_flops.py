"""Counts the model FLOPs per example of a training step, also if some parameters are frozen.

A task counts the FLOPs of training all parameters of a model, in closed form. A step with frozen
parameters does not compute their gradients, nor the gradients of activations before the first
trained parameter. Adapters add matrix products. So the closed form is multiplied by a ratio: the
FLOPs of this step, divided by the FLOPs of a step that trains all parameters of the task's model.
Both are counted in steps traced on one device. Recomputation in the backward pass is not counted.
"""

from fractions import Fraction
from typing import Any

import jax
import optax

from manualpar.core.model.carried_collections import CarryingApply
from manualpar.core.model.initialise import init_variables
from manualpar.core.model.interface import interface_of
from manualpar.core.parameters.placement import strip_boxes
from manualpar.core.parameters.trainable import combine, is_trained
from manualpar.core.program.program import Program
from manualpar.core.trees import path_name
from manualpar.inspect.flops import ProductReader
from manualpar.inspect.scope_parsing import phase_of
from manualpar.training.task import Task

# Positions of arguments of the traced loss: the trained parameters and the batch.
TRAINED, BATCH = 0, 1


def flops_of_example(task: Task, model: Any, program: Program) -> float | None:
    """Counts the FLOPs per example of a training step, without recomputation.

    The result is `None` if the task does not know them.

    Args:
      task: The task of the run.
      model: The task's model, with adapters if the run has any.
      program: The program of `model`.
    """
    if task.flops_per_example is None or all(place.trainable for _, place in program.parameters):
        return task.flops_per_example
    some = _products(model, task, program, program.model.trainable)
    # This also takes the gradient with respect to the batch, because the closed form counts the
    # gradients of float inputs.
    every = _products(task.model, task, program, ("*",), argnums=(TRAINED, BATCH))
    return task.flops_per_example * float(some / every)


def _products(
    model: Any,
    task: Task,
    program: Program,
    globs: tuple[str, ...],
    *,
    argnums: tuple[int, ...] = (TRAINED,),
) -> Fraction:
    """Counts the FLOPs of a step that computes gradients of the parameters that match `globs`.

    The step is traced on one device. `argnums` are the positions of the loss's arguments for which
    gradients are computed.
    """
    interface, batch = interface_of(model), program.abstract_batch
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(
        lambda key: strip_boxes(init_variables(interface, key, batch)["params"]), key
    )

    def part(is_wanted: bool) -> Any:
        def choose(path: Any, x: Any) -> Any:
            return x if is_trained(path_name(path), globs) is is_wanted else optax.MaskedNode()

        return jax.tree.map_with_path(choose, params)

    def loss(trained: Any, batch: Any, frozen: Any, collections: Any, key: jax.Array) -> Any:
        apply_fn = CarryingApply(interface, collections)
        return task.loss_fn(combine((trained, frozen)), apply_fn, batch, key)[0]

    collections = program.unpadded_state.collections
    grads = jax.grad(loss, argnums=argnums, allow_int=True)
    step = jax.make_jaxpr(grads)(part(True), batch, part(False), collections, key)
    found = ProductReader("flops_of_example").read(step.jaxpr)
    counted = (one.flops for one in found if phase_of(one.scope) != "recomputed")
    return sum(counted, start=Fraction(0))
