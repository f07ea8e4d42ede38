"""Mistakes in the files of a run: changed configs, checkpoints, manifests, results, profiles."""

import re
from pathlib import Path

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints import CheckpointError, Checkpoints, check_resumable
from manualpar.training.checkpoints.compatibility import ADDED
from manualpar.training.checkpoints.manifest import MANIFEST, DamagedError, read_manifest
from manualpar.training.monitoring.profiling import parse_profile
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.replicas import ReplicaSentinel
from tests.refused.table import check_refused, rows

SAVED = {
    "seed": 0,
    "data.source": "text",
    "model.hidden_size": 128,
    "model.dropout_rate": 0.0,
    "parallel.param_dtype": "",
    "training.num_steps": 100,
}
HERE = Path()


def resume(changes):
    current = SAVED | changes
    check_resumable(SAVED, {name: x for name, x in current.items() if x is not None})


def differences(*lines):
    listed = "".join(f"\n  {re.escape(line)}" for line in lines)
    return rf"^the config changes the model, the data or the optimizer of the run.*{listed}\Z"


def read_text(text):
    """Reads a manifest with this text; with `None` there is no file."""
    if text is not None:
        (HERE / MANIFEST).write_text(text)
    read_manifest(HERE)


def read_link(target):
    (HERE / "folder").mkdir()
    (HERE / "file").write_text("")
    (HERE / "7").symlink_to(target)
    read_manifest(HERE / "7" if target == "folder" else HERE / target)


def save(options):
    with Checkpoints(HERE) as checkpoints:
        checkpoints.save(None, None, **{"step": 1, "extra": {}, **options})


def list_steps_of_a_file(name):
    (HERE / name).write_text("")
    Checkpoints(HERE / name).steps()


def write_below_a_file(name):
    (HERE / name).write_text("")
    RunWriter(HERE / name / "run", config={})


def lay_out(make_layout):
    mesh = make_mesh({"data": 8})
    ReplicaSentinel(mesh, make_layout(mesh))


REFUSED = [
    *rows(
        "resume",
        resume,
        ({"seed": 1, "training.num_steps": 1}, differences("seed: 0 -> 1")),
        ({"optimizer.name": "lion"}, differences("optimizer.name: (absent) -> 'lion'")),
        ({"data.source": "tokens"}, differences("data.source: 'text' -> 'tokens'")),
        ({"data.path": "x"}, differences("data.path: (absent) -> 'x'")),
        ({"model.hidden_size": 256}, differences("model.hidden_size: 128 -> 256")),
        ({"model.dropout_rate": False}, differences("model.dropout_rate: 0.0 -> False")),
        (
            {"parallel.param_dtype": "bfloat16"},
            differences("parallel.param_dtype: '' -> 'bfloat16'"),
        ),
        (
            {"seed": 1, "model.hidden_size": 1, "data.source": None},
            differences(
                "data.source: 'text' -> (absent)", "model.hidden_size: 128 -> 1", "seed: 0 -> 1"
            ),
        ),
        ({**ADDED, "model.vocab_multiple": 4}, differences("model.vocab_multiple: 1 -> 4")),
    ),
    *rows(
        "Checkpoints",
        lambda options: Checkpoints(HERE, **options),
        *(
            ({"seconds": seconds}, r"seconds=.*, expected a positive, finite number")
            for seconds in (0.0, -1.0, float("inf"), float("nan"))
        ),
        *(
            ({name: value}, f"{name}={value}, expected an integer, at least")
            for name, value in (("keep", 0), ("keep", True), ("keep_every_steps", -1))
        ),
        ({"best_mode": "most"}, "best_mode='most', expected 'min' or 'max'"),
    ),
    *rows(
        "save",
        save,
        ({"extra": {"a": object()}}, TypeError, "expected values of JSON"),
        ({"step": -1}, "step=-1, expected an integer, at least 0"),
    ),
    *rows(
        "steps",
        list_steps_of_a_file,
        ("file", CheckpointError, "can't be listed: a part of the path is a file"),
    ),
    *rows(
        "manifest",
        read_text,
        (None, DamagedError, r"manifest\.json is missing"),
        *(
            (text, DamagedError, r"^manifest\.json is not as it was written: .")
            for text in (
                *("", "{}", "[]", "null", "1", '{"files": []}', " ", "{", "[" * 200_000),
                *('{"step": ' + "9" * 10_000 + "}", '{"a": NaN}'),
            )
        ),
    ),
    *rows(
        "a folder's manifest",
        read_link,
        ("folder", DamagedError, r"^it is a link, expected a folder$"),
        ("file", DamagedError, r"^it is a file, expected a folder$"),
    ),
    *rows(
        "results",
        write_below_a_file,
        ("file", WriteError, r"written: file/run: Not a directory; name another"),
    ),
    *rows(
        "results",
        lambda place: RunWriter(HERE, config={}, place=place, step=1),
        ({}, r"place is \{\}, expected the size in bytes of each of"),
    ),
    *rows(
        "profile",
        parse_profile,
        *(
            (text, r"^config.profile is '.*', expected .* such as '10:13'")
            for text in ("10", "0:3", "4:3", "-1:3", "a:b", "1:2:3", "10:13 ", "1.5:2")
        ),
    ),
    *rows(
        "a sentinel's layout",
        lay_out,
        (lambda mesh: {}, "layout is empty"),
        (
            lambda mesh: {"x": NamedSharding(mesh, P())},
            TypeError,
            r"layout has .* at 'x', expected a PartitionSpec",
        ),
        (lambda mesh: {"x": P("model")}, "model"),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(call, error, words)
