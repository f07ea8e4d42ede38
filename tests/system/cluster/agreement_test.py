"""Several processes save together, restore together and come to the same verdict."""

import ast
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from manualpar.system.cluster.agreement import any_process, first_failure, from_first, gather
from manualpar.training.checkpoints import Checkpoints
from tests.paths import ROOT
from tests.system.cluster.processes import free_port, lines_of_ours
from tests.training.checkpoints.worker import shared_program, train


def test_one_process_agrees_with_itself():
    assert gather({"a": (1, None)}) == [{"a": [1, None]}]
    assert from_first([1, "x"]) == [1, "x"]
    assert not any_process(False)
    assert any_process(True)
    assert first_failure("") == ""
    assert first_failure("it failed") == "it failed"


def run_processes(folder, action, count):
    """What each process prints, line by line."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    arguments = [
        "-W",
        "error",
        "-m",
        "tests.training.checkpoints.worker",
        str(folder),
        action,
        address,
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments, str(count), str(index)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [lines_of_ours(out) for out, _ in outputs]


def losses_of(line, steps):
    assert line.startswith(f"{steps} [")
    return ast.literal_eval(line.removeprefix(f"{steps} "))


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_and_one(tmp_path):
    program = shared_program("fsdp")
    first, _ = train(program, program.init(jax.random.key(1)), range(3))
    expected = jax.device_get(first.params)
    _, expected_losses = train(program, first, range(3, 6))

    # Saved by two, and read by one.
    for lines in run_processes(tmp_path / "two", "save", 2):
        np.testing.assert_allclose(losses_of(lines[-1], [2, 3]), expected_losses, rtol=1e-5)
    with Checkpoints(tmp_path / "two") as checkpoints:
        restored = checkpoints.restore(program, report=pytest.fail)
        assert restored.extra == {"position": 3}
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
            jax.device_get(restored.state.params),
            expected,
        )
        exactly = jax.device_get(restored.state.params)
        # Saved by one, and read by two, by four.
        with Checkpoints(tmp_path / "one") as others:
            others.save(program, restored.state, step=3, extra={"position": 3})
        _, losses = train(program, restored.state, range(3, 6))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for count in (2, 4):
        for lines in run_processes(tmp_path / "one", "restore", count):
            np.testing.assert_allclose(losses_of(lines[-1], [3]), losses, rtol=1e-5)
    for lines in run_processes(tmp_path / "two", "restore", 2):
        np.testing.assert_allclose(losses_of(lines[-1], [2, 3]), losses, rtol=1e-5)
    with Checkpoints(tmp_path / "one") as checkpoints:
        again = checkpoints.restore(program, report=pytest.fail)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state.params), exactly)


@pytest.mark.slow
@pytest.mark.long
def test_damage_that_one_process_finds_stops_all(tmp_path):
    run_processes(tmp_path, "save", 2)
    victims = sorted((tmp_path / "3").rglob("_sharding")) + sorted((tmp_path / "3").rglob("d/*"))
    assert len(victims) > 2
    for victim in victims[:2]:
        data = victim.read_bytes()
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        outputs = run_processes(tmp_path, "restore", 2)
        for lines in outputs:
            assert f"3 is damaged: {victim.relative_to(tmp_path / '3')} is not as" in lines[0]
            assert "Going on from step 2" in lines[1]
        assert outputs[0] == outputs[1]
        victim.write_bytes(data)


AGREE = """
import sys
from manualpar import simulate_devices

simulate_devices(2)

from manualpar.system.cluster import initialize
from manualpar.system.cluster.agreement import any_process, failing_together
from manualpar.system.cluster.agreement import first_failure, from_first
from manualpar.system.storage import FolderError

address, process = sys.argv[1], int(sys.argv[2])
with initialize(coordinator_address=address, num_processes=3, process_id=process):
    print(from_first({"from": process, "text": "x" * (10 + process)}))
    print(any_process(False), any_process(process == 2))
    print([first_failure(""), first_failure("" if process == 0 else f"{process} failed")])
    with failing_together():
        pass
    for kind in (OSError, ValueError):
        try:
            with failing_together():
                if process == 1:
                    raise kind("no room")
        except (FolderError, OSError, ValueError) as error:
            print(isinstance(error, ValueError) and not isinstance(error, OSError), error)
    # Messages of one agreement must not reach another. Their lengths differ.
    for number in range(50):
        assert from_first("x" * (number % 7)) == "x" * (number % 7)
        assert any_process(process == number % 4) == (number % 4 < 3)
        failure = "failed" if process == number % 5 else ""
        assert first_failure(failure) == ("failed" if number % 5 < 3 else "")
"""


@pytest.mark.slow
def test_three_processes_make_the_same_decisions(processes):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", AGREE, address]
    started = [processes.start([*command, str(process)]) for process in range(3)]
    for process in started:
        assert process.wait() == 0, process.err
        assert lines_of_ours(process.out) == [
            "{'from': 0, 'text': 'xxxxxxxxxx'}",
            "False True",
            "['', '1 failed']",
            "False no room",
            "True no room",
        ]
