import json
import os
import sys

import jax
import numpy as np
import pytest

from manualpar.system.cluster import initialize
from tests.system.cluster.processes import free_port


def result_of(processes, count, path, **options):
    started = processes.start_workers(count, out=str(path), **options)
    for process in started:
        assert process.wait() == 0, process.err
        assert process.out.splitlines()[-1] == "finished"
    with np.load(path) as result:
        return dict(result), started


def assert_equal_results(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_two_processes_train_as_one_does(processes, tmp_path):
    options = {"strategy": "hsdp", "mesh": {"replica": 2, "data": -1}, "steps": 4}
    one, _ = result_of(processes, 1, tmp_path / "one.npz", devices=4, **options)
    two, started = result_of(processes, 2, tmp_path / "two.npz", devices=2, **options)
    assert len(one["losses"]) == 4
    assert_equal_results(two, one)
    assert "links 2 hosts; replica: across hosts, data: within a host\n" in started[1].out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "links"),
    [
        ("dp", {"data": -1}, "data: 2 within a host x 4 across"),
        ("fsdp", {"data": -1}, "data: 2 within a host x 4 across"),
        (
            "hsdp",
            {"data": -1, "replica": 2},
            "data: 2 within a host x 2 across, replica: across hosts",
        ),
        ("hsdp", {"replica": -1, "data": 2}, "replica: across hosts, data: within a host"),
    ],
)
def test_four_processes_train_as_one_does(processes, tmp_path, strategy, mesh, links):
    options = {"strategy": strategy, "mesh": mesh, "steps": 4}
    one, _ = result_of(processes, 1, tmp_path / "one.npz", devices=8, **options)
    four, started = result_of(processes, 4, tmp_path / "four.npz", devices=2, **options)
    assert_equal_results(four, one)
    assert f"links 4 hosts; {links}\n" in started[3].out


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_processes_meet_under_any_name_of_this_host(processes, host):
    options = json.dumps({"strategy": "dp", "mesh": {"data": -1}, "steps": 1, "devices": 1})
    port = free_port()
    started = [
        processes.start(
            [sys.executable, "-m", "tests.system.cluster.worker", options],
            MANUALPAR_COORDINATOR_ADDRESS=f"{host}:{port}",
            MANUALPAR_NUM_PROCESSES="2",
            MANUALPAR_PROCESS_ID=str(process),
        )
        for process in range(2)
    ]
    for process in started:
        assert process.wait() == 0, process.err
        assert "MANUALPAR_TOKEN" not in process.err


@pytest.mark.slow
def test_processes_meet_where_jax_finds_the_coordinator(processes):
    """As in Slurm, whose variables are all that JAX looks at."""
    options = json.dumps({"strategy": "dp", "mesh": {"data": -1}, "steps": 1, "devices": 1})
    started = [
        processes.start(
            [sys.executable, "-m", "tests.system.cluster.worker", options],
            SLURM_JOB_ID=str(os.getpid()),  # The port depends on it.
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_PROCID=str(process),
            SLURM_LOCALID=str(process),
            SLURM_STEP_NUM_NODES="1",
        )
        for process in range(2)
    ]
    for process in started:
        assert process.wait() == 0, process.err
        assert process.out.splitlines()[-1] == "finished"


@pytest.mark.slow
def test_a_mesh_that_leaves_a_process_out_is_refused(processes):
    started = processes.start_workers(2, strategy="dp", mesh={"data": 2}, steps=1)
    assert {process.wait() for process in started} == {1, 4} or all(
        process.popen.returncode == 1 for process in started
    )
    assert "none of them in process 1; expected devices of every process" in started[1].err


def test_without_a_cluster_a_process_is_alone():
    cluster = initialize(environment={})
    assert (cluster.process_id, cluster.num_processes, cluster.is_main) == (0, 1, True)
    assert not jax.distributed.is_initialized()
    assert not initialize(num_processes=1, environment={}).should_stop(1)
