"""Builds the programs of `random_programs` from their descriptions, see `random_options`."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax

import manualpar
from benchmarks.random_tasks import make_loss
from manualpar import Pipeline, make_mesh

BUILDERS: Mapping[str, Any] = {
    "data_parallel": manualpar.data_parallel,
    "zero1": functools.partial(manualpar.zero, stage=1),
    "zero2": functools.partial(manualpar.zero, stage=2),
    "fsdp": manualpar.fsdp,
    "hsdp": manualpar.hsdp,
}


def outer_optimizer(row: Mapping[str, Any]) -> Any:
    """Returns the outer optimizer of a description of a DiLoCo program."""
    if row["diloco"]["outer"] == "nesterov":
        return optax.sgd(0.7, momentum=0.9, nesterov=True)
    return optax.sgd(1.0)


def build_program(
    row: Mapping[str, Any],
    strategy: str,
    drawn: Mapping[str, Any],
    axes: Mapping[str, int],
    *,
    model: Any,
    tx: Any,
    batch: Any,
) -> Any:
    """Builds the program of a description.

    `strategy`, the options `drawn` and the mesh `axes` may differ from those of the description.
    """
    options: dict[str, Any] = {k: _tuples(v) for k, v in drawn.items() if v is not None}
    if "axis_aliases" in options:
        options["axis_aliases"] = {k: tuple(v) for k, v in drawn["axis_aliases"].items()}
    if row.get("trainable"):
        options["trainable"] = tuple(row["trainable"])
    if row.get("pipeline") and "stage" in axes:
        options["pipeline"] = Pipeline(**row["pipeline"])
    if row["mode"] != "manual":
        options["mode"] = row["mode"]
    mesh = make_mesh(axes)
    if row.get("typed_mesh"):
        types = (jax.sharding.AxisType.Explicit,) * len(axes)
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    options |= {"mesh": mesh, "batch": batch}
    arguments = model, tx, make_loss(row)
    if strategy != "diloco":
        return BUILDERS[strategy](*arguments, **options)
    own: dict[str, Any] = {k: v for k, v in row["diloco"].items() if k != "outer"}
    own |= {"inner": BUILDERS[own["inner"]], "outer_tx": outer_optimizer(row)}
    return manualpar.diloco(*arguments, **own | options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
