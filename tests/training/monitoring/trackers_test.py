"""Trackers write what a run reports with the services' own libraries, without a network."""

import json
import struct
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from manualpar.errors import UsageError
from manualpar.training.monitoring import trackers
from manualpar.training.monitoring.trackers import TRACKERS, start_tracker

BLOCK = 2**15
CONFIG = {"training.project": "a project", "optimizer.learning_rate": 0.5, "parallel.rules": ()}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def _records(path: Path) -> Iterator[bytes]:
    """Reads the file of an offline run, a log in LevelDB's format after 7 bytes of W&B's."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # The rest of a block is too small for a header.
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # A complete record, or the last part of one.
            yield record
            record = b""


def _wandb_losses(folder: Path) -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("run/wandb/offline-run-*/*.wandb")):
        for data in _records(path):
            items = wandb_internal_pb2.Record.FromString(data).history.item
            values = {x.key or x.nested_key[0]: json.loads(x.value_json) for x in items}
            if "eval/loss" in values:
                found.append((values["step"], values["eval/loss"]))
    return found


def _mlflow_losses(folder: Path) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("a project")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params["optimizer.learning_rate"] == "0.5"
    assert run.info.status == "FINISHED"
    return [(x.step, x.value) for x in client.get_metric_history(run.info.run_id, "eval/loss")]


def _trackio_losses(folder: Path) -> list[tuple[int, float]]:
    import sqlite3

    [path] = (folder / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    values = [(step, json.loads(metrics)) for step, metrics in rows]
    return [(step, found["eval/loss"]) for step, found in values if "eval/loss" in found]


READ = {"wandb": _wandb_losses, "mlflow": _mlflow_losses, "trackio": _trackio_losses}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", TRACKERS)
def test_a_service_has_what_was_reported_and_goes_on_in_the_same_run(name: str, tmp_path: Path):
    pytest.importorskip(name, reason="pip install -e '.[trackers]'")
    said: list[str] = []
    for steps in ((0, 5), (10,)):
        tracker = start_tracker(name, CONFIG, tmp_path / "run", say=said.append)
        for step in steps:
            tracker.on_metrics(step, "eval", {"loss": step / 2, "worst": float("nan")})
        tracker.on_end(None)
        time.sleep(1)  # W&B names the folder of an offline run by the second in which it begins.
    assert said == []
    assert READ[name](tmp_path) == [(0, 0.0), (5, 2.5), (10, 5.0)]
    identities = json.loads((tmp_path / "run" / "trackers.json").read_text())
    assert list(identities) == [name]


def test_a_service_that_fails_during_a_run_is_left_out_with_a_sentence(monkeypatch, tmp_path: Path):
    def fail(step, values):
        raise ConnectionError("no\nroute")

    ended: list[bool] = []
    monkeypatch.setattr(
        trackers, "TRACKERS", types.MappingProxyType({"x": lambda *_: ("id", fail, ended.append)})
    )
    said: list[str] = []
    tracker = start_tracker("x", CONFIG, tmp_path, say=said.append)
    for step in range(3):
        tracker.on_metrics(step, "train", {"loss": 1.0})
    tracker.on_end(None)
    assert said == ["x failed, and gets no more metrics of this run: no route"]
    assert ended == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'x'"), "'x', which is not installed .*pip install x"),
        (RuntimeError("no\nkey"), "'x', which cannot start: RuntimeError: no key"),
    ],
)
def test_a_service_that_cannot_start_is_refused(error, words, monkeypatch, tmp_path: Path):
    def start(*_):
        raise error

    monkeypatch.setattr(trackers, "TRACKERS", types.MappingProxyType({"x": start}))
    with pytest.raises(UsageError, match=words):
        start_tracker("x", CONFIG, tmp_path)
    assert not (tmp_path / "trackers.json").exists()
