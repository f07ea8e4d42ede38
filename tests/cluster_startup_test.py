import contextlib

import numpy as np
import pytest

from tests.cluster_processes import Processes


@pytest.fixture
def processes(tmp_path):
    with contextlib.closing(Processes(tmp_path / "processes")) as processes:
        (tmp_path / "processes").mkdir()
        yield processes


def result_of(processes, count, path, **options):
    started = processes.start_workers(count, out=str(path), **options)
    for process in started:
        assert process.wait() == 0, process.err
        assert process.out.splitlines()[-1] == "finished"
    with np.load(path) as result:
        return dict(result), started


def test_two_processes_train_as_one_does(processes, tmp_path):
    options = {"strategy": "hsdp", "mesh": {"replica": 2, "data": -1}, "steps": 4}
    one, _ = result_of(processes, 1, tmp_path / "one.npz", devices=4, **options)
    two, started = result_of(processes, 2, tmp_path / "two.npz", devices=2, **options)
    assert "hosts 2 hosts: replica across, data within" in started[1].out
    assert one.keys() == two.keys()
    assert len(one["losses"]) == 4
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
