"""The run in a workdir, on whatever devices there are: to export its state, or to generate with it.

The config is that of the newest checkpoint. How the work was split does not matter, because a state
can be restored on any mesh: here every parameter is sharded over all devices.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_collections

from manualpar.checkpoints import Restored
from manualpar.checkpoints.retention import list_steps
from manualpar.checkpoints.saved_state import read_extra
from manualpar.strategies.fsdp import KIND as FSDP
from manualpar.training.config import complete_config
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.workdir import FOLDER, open_checkpoints
from manualpar.usage import UsageError

# Every parameter over all devices, and nothing else.
SPLITS: dict[str, Any] = {
    "strategy": FSDP.name,
    "mode": "manual",
    "mesh": {"data": -1},
    "mesh_order": (),
    "axis_by_axis": False,
    "rules": (),
    "sequence": False,
    "layer_overlap": "none",
    "pad": True,
}


def saved_config(workdir: Path) -> ml_collections.ConfigDict:
    """The config of the newest checkpoint in a workdir, complete and locked.

    Raises:
      UsageError: There is no checkpoint, or none with a config.
    """
    steps = list_steps(workdir / FOLDER)
    if not steps:
        raise UsageError(f"--workdir={workdir} holds no checkpoint, expected the folder of a run.")
    try:
        saved = read_extra(workdir / FOLDER / str(steps[-1]))["config"]
        return complete_config(ml_collections.ConfigDict(_with_tuples(saved)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--workdir={workdir}: the checkpoint of step {steps[-1]} has no config of a run "
            f"({error}), expected one that a training command saved."
        ) from error


def prepare_saved(config: ml_collections.ConfigDict) -> Experiment:
    """The experiment of a saved config on all devices of now, its parameters sharded over them.

    Raises:
      ValueError: The config is damaged, or its data is gone.
    """
    config = config.copy_and_resolve_references().unlock()
    for name, value in SPLITS.items():
        if name in config.parallel:
            config.parallel[name] = ml_collections.ConfigDict(value) if name == "mesh" else value
    if config.model.get("from_hf"):
        config.model.from_hf = ""  # The fields say it all, and the directory may be gone.
    config.optimizer.num_minibatches = 1
    config.data.batch_size = jax.device_count()
    return prepare(config.lock())


def restore_saved(
    experiment: Experiment, workdir: Path, *, report: Callable[[str], None] = print
) -> Restored:
    """The newest checkpoint of a workdir, as an experiment of `prepare_saved` holds it.

    Raises:
      CheckpointError: It is damaged.
    """
    with open_checkpoints(experiment.config, workdir) as checkpoints:
        return checkpoints.restore(experiment.program, report=report)


def _with_tuples(value: Any) -> Any:
    """What JSON says, with tuples in place of lists, which configs do not have."""
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
