"""Trackers: services that draw the metrics of runs, Weights & Biases, MLflow and trackio.

A tracker is a hook of `manualpar.training.hooks`, without a base class. Only process 0 has
trackers. Each is the client library of its service, and reads that library's own environment
variables, such as `WANDB_MODE=offline` and `MLFLOW_TRACKING_URI`. A metric has the name
`<split>/<name>`, as in TensorBoard. The file `trackers.json` in a run's folder has the run's name
in each service, so that a run that resumes goes on there.
"""

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manualpar.errors import UsageError
from manualpar.system.storage.durable_files import replace_file
from manualpar.system.storage.untrusted import read_object

IDS_FILE = "trackers.json"
MLFLOW_BATCH = 100  # The most parameters that MLflow takes in a request.


class _Tracker:
    """Sends reports with `log(step, values)`, and `end(succeeded)` ends the run.

    If the service fails later, the training goes on without it.
    """

    def __init__(
        self,
        name: str,
        log: Callable[[int, dict[str, float]], Any],
        end: Callable[[bool], Any],
        say: Callable[[str], None],
    ) -> None:
        self._name, self._log, self._end, self._say = name, log, end, say
        self._works = True

    def on_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Sends the numbers of a report."""
        finite = {f"{split}/{key}": x for key, x in values.items() if math.isfinite(x)}
        self._try(lambda: self._log(step, finite))

    def on_end(self, error: BaseException | None) -> None:
        """Ends the run of the service."""
        self._try(lambda: self._end(error is None))

    def _try(self, send: Callable[[], Any]) -> None:
        if not self._works:
            return
        try:
            send()
        except Exception as error:  # A service must not end a training.
            self._works = False
            reason = " ".join(str(error).split())
            self._say(f"{self._name} failed, and gets no more metrics of this run: {reason}")


def start_trackers(
    config: Mapping[str, Any], folder: Path, *, say: Callable[[str], None] = print
) -> list[_Tracker]:
    """Starts the trackers in `training.trackers`, see `start_tracker`.

    If one cannot start, the others are ended.
    """
    started: list[_Tracker] = []
    try:
        for name in config["training.trackers"]:
            started.append(start_tracker(name, config, folder, say=say))
    except UsageError as error:
        for tracker in started:
            tracker.on_end(error)
        raise
    return started


def start_tracker(
    name: str, config: Any, folder: Path, *, say: Callable[[str], None] = print
) -> _Tracker:
    """Starts or resumes a run of a service.

    Args:
      name: A name in `TRACKERS`.
      config: The flat config of the run by dotted name, with `training.project`.
      say: Called with a sentence if the service fails.
    """
    ids = read_object(folder / IDS_FILE) if (folder / IDS_FILE).exists() else {}
    try:
        identity, log, end = TRACKERS[name](config, folder, ids.get(name))
    except ImportError as error:
        raise UsageError(
            f"config.training.trackers has {name!r}, which is not installed ({error}): "
            f"pip install {name}, or 'manualpar[trackers]'."
        ) from error
    except Exception as error:  # Whatever the library raises.
        reason = " ".join(str(error).split())
        raise UsageError(
            f"config.training.trackers has {name!r}, which cannot start: {type(error).__name__}: "
            f"{reason}"
        ) from error
    if ids.get(name) != identity:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / IDS_FILE, json.dumps({**ids, name: identity}, indent=2) + "\n")
    return _Tracker(name, log, end, say)


def _wandb(config: Any, folder: Path, identity: str | None) -> tuple[str, Any, Any]:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    identity = identity or secrets.token_hex(4)
    run = wandb.init(
        project=config["training.project"],
        id=identity,
        name=_title(folder),
        config=config,
        dir=str(folder),
        resume="allow",
    )
    # The steps of W&B only rise, but a run that resumes repeats the steps after its checkpoint.
    run.define_metric("*", step_metric="step")
    return (
        identity,
        lambda step, values: run.log({**values, "step": step}),
        lambda succeeded: run.finish(exit_code=0 if succeeded else 1),
    )


def _mlflow(config: Any, folder: Path, identity: str | None) -> tuple[str, Any, Any]:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client, project = MlflowClient(), config["training.project"]
    if identity is None:
        there = client.get_experiment_by_name(project)
        parent = there.experiment_id if there else client.create_experiment(project)
        identity = client.create_run(parent, run_name=_title(folder)).info.run_id
        params = [Param(key, str(value)) for key, value in config.items()]
        for start in range(0, len(params), MLFLOW_BATCH):
            client.log_batch(identity, params=params[start : start + MLFLOW_BATCH])
    else:
        client.update_run(identity, status="RUNNING")

    def log(step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        client.log_batch(identity, metrics=metrics)

    def end(succeeded: bool) -> None:
        client.set_terminated(identity, "FINISHED" if succeeded else "FAILED")

    return identity, log, end


def _trackio(config: Any, folder: Path, identity: str | None) -> tuple[str, Any, Any]:
    import trackio

    identity = identity or f"{_title(folder)}-{secrets.token_hex(2)}"
    run = trackio.init(
        project=config["training.project"], name=identity, config=config, resume="allow"
    )
    return identity, lambda step, values: run.log(values, step=step), lambda succeeded: run.finish()


def _title(folder: Path) -> str:
    """Returns the last two parts of a folder's path, such as `fsdp-001`."""
    return "-".join(folder.absolute().parts[-2:])


# Starts a run from (config, folder, identity or `None`); returns its identity, `log` and `end`.
TRACKERS: Mapping[str, Callable[[Any, Path, str | None], tuple[str, Any, Any]]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
