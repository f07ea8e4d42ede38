import dataclasses
import importlib.util
import json
import os

import jax
import numpy as np
import pytest

from benchmarks import gpu, torch_fsdp, torch_parts
from benchmarks.process_group import ProcessGroup
from benchmarks.results import note_conditions
from benchmarks.turns import Estimate
from benchmarks.workloads import make_workload
from tests.benchmarks_echo_worker import SIZE

WORKER = "tests.benchmarks_echo_worker"


def test_every_process_answers_for_itself():
    with ProcessGroup(WORKER, {"word": "w"}, num_processes=2) as group:
        answers = group.ask("echo", number=3)
        assert [answer["process"] for answer in answers] == [0, 1]
        assert all(answer["word"] == "w" and answer["number"] == 3 for answer in answers)
        ours = sorted(os.sched_getaffinity(0))
        # Several have a core each as far as there are enough.
        assert [answer["cores"] for answer in answers] == [[ours[0]], [ours[1 % len(ours)]]]
        held = group.ask("hold")[0]
        assert held["held"] >= held["before"] + SIZE * 0.9
        assert held["after"] <= held["held"] - SIZE * 0.9


def test_a_process_that_fails_says_why():
    message = "(?s)process 1 of tests.benchmarks_echo_worker has ended.*ValueError: this one fails"
    with (
        pytest.raises(RuntimeError, match=message),
        ProcessGroup(WORKER, {"word": "w"}, num_processes=2) as group,
    ):
        group.ask("fail")


@pytest.mark.parametrize("main", [torch_fsdp.main, torch_parts.main, gpu.main])
def test_without_pytorch_there_is_a_sentence_with_the_command(main, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "PyTorch is not installed; pip install 'manualpar[torch,train]'" in error


def test_other_losses_are_refused():
    torch_fsdp.check_losses({"a": [2.0, 1.0], "b": [2.0001, 1.0]})
    with pytest.raises(RuntimeError, match=r"the losses of b are .* expected those of a"):
        torch_fsdp.check_losses({"a": [2.0, 1.0], "b": [2.0, 1.01]})
    with pytest.raises(RuntimeError, match="losses of b"):
        torch_fsdp.check_losses({"a": [2.0, 1.0], "b": [2.0, float("nan")]})


class Group:
    """Two processes whose step takes a second and 1,000 bytes, their block 70 bytes more."""

    def ask(self, task, steps):
        answer = {"seconds": 1.0 * steps, "processor": 0.5 * steps, "loopback": 1000 * steps + 70}
        return [answer, {**answer, "seconds": 2.0 * steps}]


def test_bytes_are_those_of_a_step_and_a_process():
    sent, processor = [], []
    block = torch_fsdp._counting(Group(), sent, processor)
    assert block(5) == 10
    assert sent == [500]
    assert processor == [1.0]


ROW = torch_fsdp.Row(
    name="PyTorch FSDP2",
    num_processes=2,
    losses=(2.0, 1.0),
    seconds=(0.1, 0.3, 0.2),
    ratio=Estimate(1, 1, 1),
    processor=(0.2, 0.4, 0.3),
    processor_ratio=Estimate(1, 1, 1),
    imported=2**20,
    highest=4 * 2**20,
    peak=3 * 2**20,
    sent=(1024.0, 2048.0, 2048.0),
    counts={"collectives": {"c10d._allgather_base_": 7}},
)


def test_the_report_of_processes():
    other = dataclasses.replace(
        ROW,
        name="manualpar",
        ratio=Estimate(0.5, 0.4, 0.6),
        processor_ratio=Estimate(0.25, 0.2, 0.3),
        losses=(2.0, 1.25),
        counts={"compiled": {"all_gather": 3}, "compiled_bytes": 512, "traced_bytes": 1024},
    )
    text = "\n".join(torch_fsdp.report_processes(2, [ROW, other], steps=4))
    assert "3 rounds of blocks of 4 steps" in text
    assert "differ by at most 2.5e-01" in text
    assert (
        "| PyTorch FSDP2 | 2 | 200.0 | 1 | 300.0 | 1 | 3.0 | 2.0 | 4.0 | 2.0 |  |  "
        "| 7 _allgather_base_ |" in text
    )
    assert (
        "| manualpar | 2 | 200.0 | 0.500 (0.400 to 0.600) | 300.0 | 0.250 (0.200 to 0.300) "
        "| 3.0 | 2.0 | 4.0 | 2.0 | 0.5 |" in text
    )
    json.dumps(torch_fsdp._plain(ROW))
    words = torch_fsdp.introduction(note_conditions("benchmarks.torch_fsdp", []), is_tiny=True)
    assert "transformer, 2 layers of 32" in "\n".join(words)


def test_pytorchs_transformer_is_ours(tmp_path):
    torch = pytest.importorskip("torch")
    from benchmarks.torch_transformer import TorchTransformer, load

    path = tmp_path / "given.npz"
    shape = torch_fsdp.write_files(path, is_tiny=True)
    with np.load(path) as arrays:
        params = {name: arrays[name] for name in arrays.files if not name.startswith("batch.")}
    theirs = TorchTransformer(shape)
    load(theirs, params)
    workload = make_workload("lm", is_tiny=True)
    variables = workload.model.init(jax.random.key(0), workload.batch.inputs[:1])
    inputs = np.asarray(workload.batch.inputs)
    logits = workload.model.apply(variables, jax.numpy.asarray(inputs))
    with torch.no_grad():
        found = theirs(torch.from_numpy(inputs).long()).numpy()
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="are left over"):
        load(theirs, {**params, "more": params["head"]})


@pytest.mark.slow
def test_both_train_alike_in_two_processes(tmp_path):
    pytest.importorskip("torch")
    output = tmp_path / "report.json"
    argv = ["--tiny", "--processes=2", "--rounds=1", "--steps=2", f"--json={output}"]
    torch_fsdp.main([*argv, "--contenders", "manualpar"])
    (run,) = json.loads(output.read_text())["runs"]
    theirs, ours = run["rows"]
    assert theirs["counts"]["collectives"]
    # What runs is what was compiled, and the kernel counts a little more than that.
    assert ours["counts"]["compiled_bytes"] < ours["sent"][0] < 2 * ours["counts"]["compiled_bytes"]
    assert min(theirs["peak"], ours["peak"]) > 2**24
