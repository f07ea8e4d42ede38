"""The doctor's report names what is here, and says what would not run."""

import importlib
import importlib.metadata
import re
import subprocess

import pytest

from manualpar.commands import doctor
from manualpar.commands import doctor as module
from manualpar.commands.doctor import main, software_facts
from manualpar.layers.attention import attention
from manualpar.system.cluster import this_host
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


def test_attention_that_differs_from_plain_jax_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "ATTENTION_CASES", {"documents": {"documents": True}})
    assert doctor._try_attention().value.startswith("right")

    def wrong_with_documents(query, key, value, documents, **options):
        if not options["kind"]:
            documents = None
        return attention(query, key, value, documents, **options)

    layers = importlib.import_module("manualpar.layers.attention")
    monkeypatch.setattr(layers, "attention", wrong_with_documents)
    fact = doctor._try_attention()
    assert fact.is_wrong
    assert re.search(r"differ by more than 0.02 of their size for documents \(\d\.", fact.value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--confg=a.py", "'--confg=a.py' is not understood, expected a config or no argument"),
        ("--clustr", "expected a config or no argument; the nearest one is --cluster."),
        ("--config.data.batch_size=3", "=3' is not understood, expected a config or no argument"),
        ("--config=a.py", "no such file"),
    ],
)
def test_a_mistake_is_a_sentence(capsys, argument, expected):
    code, facts, error = _report(capsys, argument)
    assert (code, facts) == (2, {})
    assert expected in error


# -------------------------------------------------------------------------------------------------
# The doctor's facts about NVIDIA's software, with packages and drivers that are not there.


WHOLE = {
    "jax-cuda12-plugin": "0.10.2",
    "jax-cuda12-pjrt": "0.10.2",
    "nvidia-nccl-cu12": "2.27.3",
    "nvidia-cudnn-cu12": "9.10.2.21",
}
CUDA13 = {name.replace("12", "13"): version for name, version in WHOLE.items()}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that gives this machine packages and a driver, and returns the facts."""

    def facts(packages, driver="", *, platforms=""):
        versions = {"jaxlib": "0.10.2", **packages}

        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        def run(command, **options):
            return subprocess.CompletedProcess(command, 0, f"{driver}\n" * 8)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(module.shutil, "which", lambda name: driver and "nvidia-smi")
        monkeypatch.setattr(this_host, "NVIDIA_DRIVER", tmp_path / "version")
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        return list(module.nvidia_facts())

    return facts


def test_a_machine_without_gpus_has_no_facts(machine):
    assert machine({}) == []


@pytest.mark.parametrize("packages", [WHOLE, CUDA13])
def test_everything_is_there_and_fits(machine, packages):
    found = machine(packages, "580.95.05")
    shown = {"NVIDIA driver": "580.95.05", **packages}
    assert found == [(name, version, False) for name, version in shown.items()]


@pytest.mark.parametrize(
    ("packages", "driver", "name", "words"),
    [
        ({}, "580.95.05", "missing for GPUs", "no jax-cuda13-plugin: .* pip install 'jax.cuda13.'"),
        ({}, "535.1", "missing for GPUs", "no jax-cuda12-plugin: JAX cannot use the GPUs"),
        (
            {**WHOLE, "jax-cuda12-plugin": "0.9.1"},
            "580.95.05",
            "does not fit",
            "jax-cuda12-plugin is 0.9.1 and jaxlib is 0.10.2, expected the same version",
        ),
        (
            {name: x for name, x in WHOLE.items() if "pjrt" not in name},
            "580.95.05",
            "does not fit",
            "jax-cuda12-pjrt is missing",
        ),
        (CUDA13, "535.104.05", "does not fit", "version 535, expected at least 580 for CUDA 13"),
        (WHOLE | CUDA13, "580.95.05", "does not fit", "plugins for CUDA 12 and 13"),
    ],
)
def test_what_keeps_jax_from_the_gpus_is_said(machine, packages, driver, name, words):
    (wrong,) = [fact for fact in machine(packages, driver) if fact[2]]
    assert wrong[0] == name
    assert re.search(words, wrong[1])
    assert not any(is_wrong for *_, is_wrong in machine(packages, driver, platforms="cpu"))


def test_a_library_of_the_system_may_take_the_place_of_a_package(machine):
    packages = {name: x for name, x in WHOLE.items() if "nccl" not in name}
    *_, last = machine(packages, "580.95.05")
    assert last[:2] == (
        "missing for GPUs",
        "nvidia-nccl-cu12: JAX needs the system's library, or pip install 'jax[cuda12]'",
    )
    assert last[2] is False


def test_the_driver_is_read_without_nvidia_smi(machine, tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    assert machine(WHOLE)[0] == ("NVIDIA driver", "570.86.15", False)


def test_a_version_with_a_suffix_fits(machine):
    found = machine({**WHOLE, "jax-cuda12-pjrt": "0.10.2.dev1"}, "580.95.05")
    assert not any(is_wrong for *_, is_wrong in found)


def test_without_a_driver_the_compiler_may_be_there_alone(machine):
    assert machine({"jax-cuda12-pjrt": "0.10.2"}) == [
        ("NVIDIA driver", "not found, so JAX cannot use a GPU here", False),
        ("jax-cuda12-pjrt", "0.10.2", False),
    ]


def test_the_doctor_reports_the_facts(machine):
    machine({**WHOLE, "jax-cuda12-pjrt": "0.9.0"}, "580.95.05")
    (wrong,) = [fact for fact in software_facts() if fact.is_wrong]
    assert wrong.value.startswith("jax-cuda12-pjrt is 0.9.0 and jaxlib is 0.10.2")


def test_the_doctor_lists_every_extra(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: f"version of {package}")
    facts = {fact.name: fact.value for fact in software_facts()}
    provided = importlib.metadata.metadata("manualpar").get_all("Provides-Extra")
    composed = {"dev", "planner"}  # Of other extras alone.
    assert {f"extra {extra}" for extra in {*provided} - composed} <= set(facts)
    assert "orbax-checkpoint version of orbax-checkpoint" in facts["extra train"]
    assert "libtpu version of libtpu" in facts["extra tpu"]
