import dataclasses

import pytest

from manualpar.commands.command_line import parse_command_line
from manualpar.system.cluster.facts import describe_differences
from manualpar.training.agreement import experiment_facts
from manualpar.training.agreement import run_facts as facts_of_run
from manualpar.training.experiment import prepare
from tests.runs.small_runs import CONFIG, arguments


def command(*more, workdir="runs/x"):
    return parse_command_line(["program", *arguments(workdir, *more)], default_config=CONFIG)


def run_facts(line):
    return facts_of_run(line.config, line.flags.workdir, files=[line.config_path])


def differences(one, other):
    return describe_differences({0: one, 1: other})


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--config.seed=3", "config.seed is 42 in process 0 and 3 in process 1"),
        (
            "--config.optimizer.learning_rate=1e-5",
            "config.optimizer.learning_rate is 0.003 in process 0 and 1e-05 in process 1",
        ),
        (
            "--config.parallel.mesh={'data': 4}",
            'config.parallel.mesh is {"data": -1} in process 0 and {"data": 4} in process 1',
        ),
        (
            "--config.training.num_steps=60",
            "config.training.num_steps is 40 in process 0 and 60 in process 1",
        ),
        (
            "--config.checkpoint.every_steps=30",
            "config.checkpoint.every_steps is 4 in process 0 and 30 in process 1",
        ),
    ],
)
def test_a_field_that_differs_is_named(flag, sentence):
    assert differences(run_facts(command()), run_facts(command(flag))) == [sentence]


@pytest.mark.parametrize(
    "flag",
    [
        "--config.watch.stall_seconds=5",
        "--config.watch.lost_seconds=5",
        "--config.profile=2:3",
        "--config.data.prefetch=5",
        "--config.debug.draw_sharding=all",
        "--process_id=1",
    ],
)
def test_what_may_differ_is_left_out(flag):
    more = ("--process_id=0",) if "process" in flag else ()
    assert differences(run_facts(command(*more)), run_facts(command(flag))) == []


def test_another_folder_is_named():
    others = run_facts(command(workdir="runs/y"))
    assert differences(run_facts(command()), others) == [
        "--workdir is runs/x in process 0 and runs/y in process 1"
    ]


def test_versions_and_settings_are_named(monkeypatch):
    expected = run_facts(command())
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"{package} 0")
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "99", "1"))
    found = " ".join(differences(expected, run_facts(command()))[:2])
    assert "Python is 3." in found
    assert "3.99 in process 1" in found
    assert "manualpar 0 in process 1" in found


def test_the_data_the_mesh_and_the_state_are_named(devices8):
    small = ("--config.parallel.strategy=dp", "--config.training.eval_every_steps=0")
    config = command(*small).config
    experiment = prepare(config, devices=devices8)
    expected = experiment_facts(experiment)
    assert differences(expected, experiment_facts(prepare(config, devices=devices8))) == []

    other = experiment_facts(prepare(config, devices=devices8[:4]))
    assert differences(expected, other) == [
        'the mesh is {"data": 8} in process 0 and {"data": 4} in process 1'
    ]
    # The same shapes with other numbers in them.
    task = experiment.task
    train = dataclasses.replace(task.dataset.train, inputs=task.dataset.train.inputs + 1)
    dataset = dataclasses.replace(task.dataset, train=train, fingerprint="other")
    changed = experiment._replace(task=dataclasses.replace(task, dataset=dataset))
    found = differences(expected, experiment_facts(changed))
    assert [sentence.split(" is ")[0] for sentence in found] == [
        "the data's fingerprint",
        "the hash of the first examples",
    ]
