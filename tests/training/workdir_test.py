"""What a run goes on from is what its checkpoint says, whatever else lies in the folder."""

import dataclasses
import json
import types

import pytest

from manualpar.errors import UsageError
from manualpar.training.checkpoints import CheckpointError, Restored
from manualpar.training.config import load_config
from manualpar.training.workdir import check_continues, check_folder, restore
from tests.paths import ROOT

CONFIG = ROOT / "configs" / "fsdp.py"


def config_with(**changes):
    config = load_config(CONFIG)
    with config.unlocked():
        for name, value in changes.items():
            config.update_from_flattened_dict({name.replace("__", "."): value})
    return config


def put_config(workdir, config):
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))


def put_checkpoint(workdir, config, step=20):
    """As much of a checkpoint as is looked at before there are devices."""
    folder = workdir / "checkpoints" / str(step) / "extra"
    folder.mkdir(parents=True)
    extra = {"position": 640} | ({} if config is None else {"config": config.to_dict()})
    (folder / "metadata").write_text(json.dumps(extra).replace("640", "NaN"))


def test_the_checkpoint_has_the_config_where_the_file_is_gone(tmp_path):
    put_checkpoint(tmp_path, config_with())
    assert check_folder(config_with(), tmp_path) == []
    assert check_folder(config_with(training__num_steps=7), tmp_path) == [
        "changed since the run began: training.num_steps: 1000 -> 7"
    ]
    with pytest.raises(ValueError, match=r"holds another run: the config ch[^$]*  seed: 42 -> 9$"):
        check_folder(config_with(seed=9, model__dropout_rate=0.5), tmp_path)


def test_the_newest_checkpoint_counts(tmp_path):
    put_checkpoint(tmp_path, config_with(seed=1), step=9)
    put_checkpoint(tmp_path, config_with(seed=2), step=10)
    assert check_continues(config_with(seed=2), tmp_path) == []


def test_where_the_file_is_of_another_run_the_checkpoint_counts(tmp_path):
    put_checkpoint(tmp_path, config_with())
    put_config(tmp_path, config_with(seed=9))
    note = "config.json there is from another run than the newest checkpoint"
    assert check_continues(config_with(), tmp_path) == [f"{note}; the checkpoint's config is used"]
    counts = rf"  seed: 42 -> 9\n{note}; the checkpoint's config is compared\."
    with pytest.raises(ValueError, match=counts):
        check_continues(config_with(seed=9), tmp_path)


def test_a_file_that_a_resume_has_changed_is_of_the_same_run(tmp_path):
    put_checkpoint(tmp_path, config_with())
    put_config(tmp_path, config_with(training__num_steps=7))
    assert check_continues(config_with(), tmp_path) == []


@pytest.mark.parametrize("damage", ["old", "cut", "deep", "a link", "a list"])
def test_a_checkpoint_without_a_config_leaves_it_to_the_file(tmp_path, damage):
    put_checkpoint(tmp_path, None if damage == "old" else config_with(seed=1))
    folder = tmp_path / "checkpoints" / "20"
    path = folder / "extra" / "metadata"
    if damage == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif damage != "old":
        texts = {"cut": path.read_text()[:50], "deep": "[" * 100_000, "a list": "[1]"}
        path.write_text(texts[damage])
    assert check_continues(config_with(), tmp_path) == []
    put_config(tmp_path, config_with())
    with pytest.raises(ValueError, match="seed: 42 -> 9"):
        check_continues(config_with(seed=9), tmp_path)


def test_something_in_the_way_of_a_checkpoint_is_said_before_the_run_begins(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "20.unfinished").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"/20\.unfinished is a link, but a save has to create"):
        check_folder(config_with(checkpoint__every_steps=10), tmp_path)


EXTRA = {
    "position": 640,
    "data": "abc",
    "recorder": {"totals": {"train": {"loss": [1.0, 2]}}, "latest": {}, "skipped": 0},
    "files": {"metrics.jsonl": 3, "throughput.jsonl": 0},
}


def restored_with(tmp_path, extra, **changes):
    """What `restore` makes of a checkpoint with such an `extra`."""
    checkpoints = types.SimpleNamespace(
        restore=lambda *_, **__: Restored(20, state=None, extra=extra)
    )
    dataset = types.SimpleNamespace(fingerprint="abc", train=None)
    experiment = types.SimpleNamespace(
        program=None, config=config_with(**changes), task=types.SimpleNamespace(dataset=dataset)
    )
    return restore(checkpoints, experiment, tmp_path, report=print)


def test_a_whole_checkpoint_is_compared_again(tmp_path):
    extra = EXTRA | {"config": json.loads(json.dumps(config_with().to_dict()))}
    assert restored_with(tmp_path, extra).step == 20
    assert restored_with(tmp_path, EXTRA, seed=9).step == 20, "an old one says nothing of it"
    assert dataclasses.is_dataclass(restored_with(tmp_path, extra, training__num_steps=7))
    with pytest.raises(UsageError, match=r"holds another run[^$]*seed: 42 -> 9"):
        restored_with(tmp_path, extra, seed=9)
    with pytest.raises(CheckpointError, match="was saved with other data"):
        restored_with(tmp_path, extra | {"data": "def"})


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "abc"},
        {"position": -1},
        {"position": True},
        {"position": 10**40},
        {"position": None},
        {"files": {}},
        {"files": []},
        {"files": {"metrics.jsonl": 3.5, "throughput.jsonl": 0}},
        {"files": {"metrics.jsonl": 10**40, "throughput.jsonl": 0}},
        {"recorder": None},
        {"recorder": {"totals": {}, "latest": {}}},
        {"recorder": {"totals": {"train": {"loss": [1]}}, "latest": {}, "skipped": 0}},
        {"recorder": {"totals": {}, "latest": {"eval": {"loss": "x"}}, "skipped": 0}},
        {"recorder": {"totals": [], "latest": {}, "skipped": 0}},
        {"data": 3},
        {"config": [1]},
        {"config": {"a": eval("[" * 90 + "]" * 90)}},
    ],
)
def test_what_no_run_saves_is_refused(tmp_path, changes):
    with pytest.raises(CheckpointError, match="of step 20 does not hold the JSON that a run saves"):
        restored_with(tmp_path, EXTRA | changes)
    missing = {name: value for name, value in EXTRA.items() if name not in changes}
    if len(missing) < len(EXTRA):
        with pytest.raises(CheckpointError, match="does not hold the JSON that a run saves"):
            restored_with(tmp_path, missing)
