"""The doctor's report names what is here, and says what would not run."""

import pytest

from manualpar.commands import doctor
from manualpar.commands.doctor import main
from tests.paths import ROOT

CONFIG = f"--config={ROOT / 'configs' / 'fsdp.py'}"


def _report(capsys, *arguments: str) -> tuple[int, dict[str, str], str]:
    code = main(["doctor", *arguments])
    printed = capsys.readouterr()
    lines = (line.split(":", 1) for line in printed.out.splitlines())
    return code, {name: value.strip() for name, value in lines}, printed.err


@pytest.mark.slow
def test_a_report_of_a_config_that_runs(capsys, monkeypatch):
    monkeypatch.setenv("JAX_SOME_TOKEN", "very-secret")
    monkeypatch.setenv("XLA_SOME_SETTING", "17")
    code, facts, _ = _report(capsys, CONFIG)
    assert code == 0
    assert facts["devices"] == "8 of cpu (cpu)"
    assert facts["a step over all devices"].startswith("right")
    assert facts["mesh"] == "data=8 on 8 simulated cpu devices"
    assert facts["would run"].startswith("yes")
    assert facts["jax"].startswith("0.")
    assert "orbax-checkpoint 0." in facts["extra train"]
    assert facts["JAX_SOME_TOKEN"] == "(set)"
    assert facts["XLA_SOME_SETTING"] == "17"


def test_a_config_that_does_not_run_is_said_to_and_so_is_a_wrong_step(capsys, monkeypatch):
    def wrong(*args, **kwargs):
        raise AssertionError("layers_0/kernel: off by 1.0")

    monkeypatch.setattr(doctor, "assert_same_as_one_device", wrong)
    code, facts, _ = _report(capsys, CONFIG, "--config.data.batch_size=3")
    assert code == 2
    assert facts["a step over all devices"].startswith("fails: layers_0/kernel: off by 1.0")
    assert facts["would run"].startswith("no: config.data.batch_size is 3, expected a multiple")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--confg=a.py", "'--confg=a.py' is not understood, expected a config or no argument"),
        ("--config.data.batch_size=3", "=3' is not understood, expected a config or no argument"),
        ("--config=a.py", "no such file"),
    ],
)
def test_a_mistake_is_a_sentence(capsys, argument, expected):
    code, facts, error = _report(capsys, argument)
    assert (code, facts) == (2, {})
    assert expected in error
