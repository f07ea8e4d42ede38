"""Loads the run of a workdir on any devices, to export its state or to generate with it.

The newest checkpoint gives the config. The parallelism of the run does not matter, because a state
can be restored on any mesh. Here every parameter is sharded over the data axis. If the run averages
its parameters, the average is loaded, because evaluations used it too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections

from manualpar.core.program.parameter_average import ema_params
from manualpar.errors import UsageError
from manualpar.strategies import FSDP, strategy_kinds
from manualpar.strategies.fields import fields_of_manual_mode
from manualpar.system.storage import AnyPath
from manualpar.training.checkpoints import Restored
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.saved_state import read_extra
from manualpar.training.config import complete_config
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.workdir import FOLDER, open_checkpoints

# Values of `config.parallel`: every parameter is sharded, and communication is exact.
SPLITS: dict[str, Any] = {
    "strategy": FSDP.name,
    "mode": "manual",
    "mesh_order": (),
    "regather_axes": (),
    **{name.removeprefix("parallel."): x for name, x in fields_of_manual_mode().items()},
    "rules": (),
    "sequence": False,
    "layer_overlap": "none",
    "pad": True,
}


def saved_config(workdir: AnyPath) -> ml_collections.ConfigDict:
    """Reads the config of the newest checkpoint of a language model, complete and locked.

    Raises:
      UsageError: There is no checkpoint, it has no config, or its model is no language model.
    """
    steps = open_folder(workdir / FOLDER).steps()
    if not steps:
        raise UsageError(f"--workdir={workdir} holds no checkpoint, expected the folder of a run.")
    try:
        saved = read_extra(workdir / FOLDER / str(steps[-1]))["config"]
        config = complete_config(ml_collections.ConfigDict(_with_tuples(saved)))
        name = config.model.name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--workdir={workdir}: the checkpoint of step {steps[-1]} has no config of a run "
            f"({error}), expected one that a training command saved."
        ) from error
    if name != "transformer":
        raise UsageError(
            f"--workdir={workdir} holds a run of config.model.name={name!r}, expected "
            "'transformer', a language model."
        )
    return config


def prepare_saved(
    config: ml_collections.ConfigDict, mesh: Mapping[str, int] | None = None
) -> Experiment:
    """Prepares the experiment of a saved config on all devices that JAX has now.

    Args:
      config: The config from `saved_config`.
      mesh: The axes of the mesh; `None` for all devices along `data`.

    Raises:
      ValueError: The config is damaged or does not fit the mesh, or the run's data is missing.
    """
    config = config.copy_and_resolve_references().unlock()
    kind = strategy_kinds().get(config.parallel.strategy, FSDP)
    # Only DiLoCo can load a state with DiLoCo's replicas. So the strategy stays, with one replica.
    strategy_fields = {} if kind.is_exact else {"strategy": kind.name, "inner": FSDP.name}
    for name, value in (SPLITS | strategy_fields).items():
        if name in config.parallel:
            config.parallel[name] = value
    axes = dict(mesh or {"data": -1})
    config.parallel.mesh = ml_collections.ConfigDict(
        axes if kind.is_exact else {"replica": 1, **axes}
    )
    if config.model.get("from_hf"):
        config.model.from_hf = ""  # The saved fields are complete. The directory may be missing.
    config.optimizer.num_minibatches = 1
    config.data.batch_size = jax.device_count()
    if "sample" in config:
        config.sample.num_tokens = 0
    return prepare(config.lock())


def restore_saved(
    experiment: Experiment, workdir: AnyPath, *, report: Callable[[str], None] = print
) -> Restored:
    """Restores the newest checkpoint of a workdir, for the experiment of `prepare_saved`.

    Raises:
      CheckpointError: The checkpoint is damaged.
    """
    with open_checkpoints(experiment.config, workdir) as checkpoints:
        restored = checkpoints.restore(experiment.program, report=report)
    if not experiment.config.optimizer.ema_decay:
        return restored
    return dataclasses.replace(restored, state=ema_params(restored.state))


def _with_tuples(value: Any) -> Any:
    """Converts the lists of a JSON value to tuples, because configs have no lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
