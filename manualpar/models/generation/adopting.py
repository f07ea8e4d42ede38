"""Programs that can generate, for programs that cannot.

A program with stages or a context axis divides one token's layers or positions, and in the modes
`auto` and `explicit` XLA writes the collectives. The steps of generation need a program in mode
manual, on a mesh of data, expert and model axes. Such a program is built on the same devices, and
takes the parameters of each state.
"""

import dataclasses
import math
import warnings
import weakref
from typing import Any

import jax
import optax

from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import Batch, TrainState
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.strategies import FSDP


def obstacle(program: Program) -> str:
    """Returns why a program's own steps cannot generate; "" if they can."""
    roles = program.roles
    if not program.step.mode.writes_collectives:
        return f"the program's mode is {program.mode!r}"
    for kind, axes in (("stage", roles.stage_axes), ("context", (roles.context_axis or "",))):
        if any(axes):
            return f"the program's mesh has the {kind} axis {axes[0]!r}"
    return ""


class Adopter:
    """Takes the states of one program for another program, which generates.

    Attributes:
      program: The program that generates: the given program if it can.
    """

    def __init__(self, program: Program) -> None:
        """Builds a program that generates if `program` cannot, and says so in a warning."""
        self.program = program
        self._latest: tuple[Any, TrainState] | None = None
        self._is_other = False
        model = program.model.interface.module
        why = obstacle(program)
        if not why or not isinstance(model, Transformer):
            return
        self.program, self._is_other = _generating(program, model), True
        axes = ", ".join(f"{axis}={size}" for axis, size in self.program.mesh.shape.items())
        warnings.warn(
            f"generate: {why}, so a program of fsdp in mode 'manual' on the mesh {axes} generates, "
            "and takes the parameters of each state.",
            stacklevel=3,
        )

    def adopt(self, state: TrainState) -> TrainState:
        """Returns a state for `program`; the latest state's parameters are kept.

        Communication:
          None for a program that generates itself; otherwise that of `Program.init_from`.
        """
        if not self._is_other:
            return state
        leaf = jax.tree.leaves(state.params)[0]
        if self._latest is None or self._latest[0]() is not leaf:
            variables = {"params": state.params, **state.collections}
            self._latest = weakref.ref(leaf), self.program.init_from(variables)
        return self._latest[1]


def _generating(program: Program, model: Transformer) -> Program:
    shape = program.mesh.shape
    split, expert = (
        axis if axis and axis in shape else None for axis in (model.split.axis, model.experts.axis)
    )
    kept = {axis: shape[axis] for axis in (expert, split) if axis}
    data = next(name for name in ("data", "examples", "rows") if name not in kept)
    devices = program.mesh.devices.ravel().tolist()
    axes = {data: len(devices) // math.prod(kept.values()), **kept}
    plain = model.clone(
        split=dataclasses.replace(model.split, axis=split),
        context=dataclasses.replace(model.context, axis=None),
        experts=dataclasses.replace(model.experts, axis=expert),
    )
    tokens = jax.ShapeDtypeStruct((len(devices), 16), "int32")
    loss = mixture_of_experts_loss if model.experts.num_experts else language_model_loss
    return FSDP.builder(
        plain,
        optax.identity(),
        loss,
        mesh=make_mesh(axes, devices),
        batch=Batch(tokens, tokens),
        axis_name=(data, expert) if expert else (data,),
        pad=True,
    )
