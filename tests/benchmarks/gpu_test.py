"""The benchmark of accelerators, tried on a CPU: its rows, its refusals, and what it writes."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from fractions import Fraction

import jax
import numpy as np
import pytest

from benchmarks import gpu, gpu_steps
from benchmarks.compiled_steps import Counts
from benchmarks.gpu_rows import LOG_VARIABLE, Row, RowLog, watch
from benchmarks.turns import Estimate

HAS_TORCH = importlib.util.find_spec("torch") is not None
ROWS = ("manual fsdp", gpu_steps.LOGITS, "manual fsdp, attention cudnn")


@pytest.fixture(autouse=True)
def measuring(tmp_path, monkeypatch):
    """The command measures here, in place of a process that it would start."""
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "rows.jsonl"))


def _options(**changes):
    defaults = vars(gpu._parser().parse_args([])) | gpu.TINY | {"torch": False}
    return argparse.Namespace(**defaults | changes)


@pytest.mark.slow
def test_the_command_runs_on_a_cpu(devices8, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    torch_flag = "--torch" if HAS_TORCH else "--no-torch"
    command = ["--tiny", "--rounds=1", torch_flag, f"--json={path}", "--contenders", *ROWS]
    assert gpu.main(command) == 0  # An axis of one device costs nothing.
    shown, data = capsys.readouterr().out, json.loads(path.read_text())
    rows = {row["name"]: row for row in data["rows"]}
    torch = [gpu_steps.TORCH] if HAS_TORCH else []
    assert list(rows) == [gpu_steps.PLAIN, *ROWS, gpu_steps.AGAIN, *torch]
    assert rows[ROWS[0]]["losses"]
    assert shown.count("| manual fsdp") == 3
    assert "because there is no accelerator" in shown
    assert rows[gpu_steps.PLAIN]["ratio"]["median"] == 1
    assert rows[ROWS[0]]["mfu"] is None  # Nobody knows the peak of a CPU.
    assert rows[ROWS[2]]["problem"]
    assert not rows[ROWS[2]]["seconds"]
    same = [rows[name]["counts"]["state"] for name in (gpu_steps.PLAIN, *ROWS[:2])]
    assert len(set(same)) == 1
    assert data["excesses"] == gpu.excesses(
        [
            gpu.Row(name, counts=row["counts"] and Counts(**row["counts"]))
            for name, row in rows.items()
        ]
    )


def test_without_an_accelerator_there_is_a_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--no-torch"])
    assert ended.value.code == 2
    assert "no accelerator here, only CPUs" in " ".join(capsys.readouterr().err.split())


def test_pytorch_computes_nothing_again(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", "--remat=full"])
    assert "--remat is full, expected none" in capsys.readouterr().err


def test_without_pytorch_there_is_a_sentence_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--tiny"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "PyTorch is not installed. Run pip install 'manualpar[torch,train]'" in error


@pytest.mark.parametrize("flag", ["--devices=9", "--devices=0", "--rounds=0"])
def test_devices_and_rounds_are_refused(flag, devices8, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", "--no-torch", flag])
    assert f"{flag.replace('=', ' is ')}, expected 1 to" in capsys.readouterr().err


def test_what_is_above_two_percent_is_said(monkeypatch):
    counts = Counts(
        state=1,
        temporaries=1000,
        sent=0,
        collectives={},
        flops=1000.0,
        accessed=1000.0,
        instructions=1,
        lowered=1,
        compile_seconds=0.0,
    )
    plain = gpu.Row(gpu.PLAIN, (1.0,), Estimate(1, 1, 1), counts)

    def manual(**changes):
        changed = dataclasses.replace(counts, **changes)
        return dataclasses.replace(plain, name="manual dp", counts=changed)

    # XLA:CPU keeps all-reduces of one device, which types ask for.
    kept = [plain, manual(temporaries=1021, collectives={"all_reduce": 2})]
    assert gpu.excesses(kept) == []
    fsdp = dataclasses.replace(kept[1], name="manual fsdp")
    assert gpu.excesses([plain, fsdp]) == ["manual fsdp: temporaries are 1.021 of plain jit's."]
    assert "Held against plain jit here: manual fsdp and manual fsdp, kept. Nothing" in "".join(
        gpu.report_rows("a model", kept, tokens=512)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert gpu.excesses([plain, manual(flops=1020.0, accessed=900.0)]) == []
    above = gpu.excesses([plain, manual(temporaries=1021, collectives={"all_reduce": 2})])
    assert above == [
        "manual dp: temporaries are 1.021 of plain jit's.",
        "manual dp: 2 collectives of one device are compiled.",
    ]
    assert gpu.excesses([manual(temporaries=1021)]) == []  # Nothing to hold it against.
    refused = gpu.Row("manual fsdp, attention cudnn", problem="no GPU")
    text = "\n".join(gpu.report_rows("a model", [plain, refused, manual()], tokens=512))
    assert "| plain jit | 1000.00 | 1 | 512 |" in text
    assert "manual fsdp, attention cudnn: no GPU" in text
    assert "Nothing is above 2%." in text


def test_one_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def measure(options, workload, name):
        if "attention" in name:
            raise ValueError("it cannot run\nTraceback of no interest")
        return Row(name, (1.0,), losses=(6.0 if "kept" in name else 5.0,))

    def fail(*args):
        raise RuntimeError("process 0 of w has ended:\nTraceback\nOutOfMemoryError: too much\n")

    monkeypatch.setattr(gpu_steps, "_measure", measure)
    monkeypatch.setattr(gpu_steps, "_measure_torch", fail)
    options, said = _options(torch=True, rounds=1), []
    workload = gpu_steps.make_model_workload(options, 1)
    kept, log = [], RowLog(tmp_path / "rows")
    # By a process before this one.
    counts = Counts(1, 2, Fraction(3, 2), {"all_reduce": 1}, 4.0, 5.0, 6, 7, 8.0)
    log.end(Row("manual dp", (2.0,), counts=counts, losses=(5.0,)))
    found = gpu_steps.measure(
        options, workload, tmp_path / "f", said.append, log=log, keep=kept.append
    )
    rows = {row.name: row for row in found}
    assert rows[gpu_steps.TORCH].problem == "OutOfMemoryError: too much"
    assert rows["manual fsdp, attention cudnn"].problem == "it cannot run"
    assert rows[gpu_steps.AGAIN].seconds == rows[gpu_steps.PLAIN].seconds == (1.0,)
    assert f"{gpu_steps.PLAIN}: 1000.00 ms a step" in said  # At once, should a later one crash.
    assert not any(text.startswith("manual dp") for text in said)
    assert rows["manual dp"].ratio.median == 2
    assert rows["manual fsdp, kept"].problem == (
        "not the same training: its losses are [6.0], those of manual dp [5.0]"
    )
    assert [len(some) for some in kept] == list(range(2, len(rows) + 1))
    assert RowLog.read(log.path) == log
    shown = "\n".join(gpu.report_rows("a model", found, tokens=512))
    assert "manual fsdp, kept: not the same training" in shown


# Measures three rows, the second of which hangs and the third of which crashes.
HANGS = """
import json, os, signal, sys, time
path = os.environ["BENCHMARKS_GPU_ROWS"]
row = dict(name="", seconds=[1.0], ratio=None, counts=None, memory=None, mfu=None, losses=[],
           problem="")
there = open(path).read() if os.path.exists(path) else ""
def put(entry):
    with open(path, "a") as file:
        file.write(json.dumps(entry) + chr(10))
for name in ("first", "hangs", "crashes", "last"):
    if f'"name": "{name}"' in there:
        continue
    put({"begun": name})
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGABRT)
    put({"row": row | {"name": name}})
"""


def test_a_row_that_hangs_or_crashes_is_recorded_and_the_rest_goes_on(tmp_path):
    path, said = tmp_path / "watched.jsonl", []
    code = watch([sys.executable, "-c", HANGS], path, seconds=1.0, report=said.append)
    assert code == 1
    log = RowLog.read(path)
    assert {name: row.problem for name, row in log.rows.items()} == {
        "first": "",
        "hangs": "ended, because it took longer than 1 s",
        "crashes": "its process ended with -6",
        "last": "",
    }
    assert log.rows["last"].seconds == (1.0,)
    assert [sentence.partition(":")[0] for sentence in said] == ["hangs", "crashes"]


def test_the_batch_fills_the_memory(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 1000}

    monkeypatch.setattr(gpu_steps.jax, "devices", lambda: [Device()])
    monkeypatch.setattr(gpu_steps, "_need", lambda options, size: 100 + 20 * size)
    largest = gpu_steps.largest_batch
    assert largest(argparse.Namespace(memory_share=0.5, devices=1)) == 16  # 420 of 500 bytes.
    assert largest(argparse.Namespace(memory_share=0.5, devices=2)) == 16
    with pytest.raises(ValueError, match="one sequence does not fit"):
        largest(argparse.Namespace(memory_share=0.1, devices=1))


def test_a_device_that_does_not_say_how_much_memory_it_has():
    with pytest.raises(ValueError, match="does not report its memory"):
        gpu_steps.largest_batch(_options())


def test_parameters_are_named_layer_by_layer():
    options = _options(vocab_size=16, hidden_size=8, heads=1, mlp_size=8)
    scanned = gpu_steps.first_parameters(gpu_steps.make_model_workload(options, 1))
    model = gpu_steps.make_model_workload(options, 1).model.clone(scan_layers=False)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(shapes)
    }
    assert {name: x.shape for name, x in scanned.items()} == expected


def test_pytorchs_transformer_is_ours():
    torch = pytest.importorskip("torch")
    from benchmarks.torch_transformer import TorchTransformer, load

    workload = gpu_steps.make_model_workload(_options(), 2)
    model, first = workload.model, gpu_steps.first_parameters(workload)
    params = {name: np.array(x) for name, x in first.items()}  # PyTorch wants to write to them.
    theirs = TorchTransformer(gpu_steps.shape_of(model))
    load(theirs, params)
    inputs = np.asarray(workload.batch.inputs)
    variables = model.init(jax.random.split(jax.random.key(0))[0], inputs[:1])
    with torch.no_grad():
        found = theirs(torch.from_numpy(inputs).long()).numpy()
    np.testing.assert_allclose(found, model.apply(variables, inputs), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="are left over"):
        load(theirs, {**params, "more": params["head"]})


@pytest.mark.slow
def test_tests_run_in_a_process_of_their_own(tmp_path):
    path = tmp_path / "a_test.py"
    path.write_text("def test_yes():\n    pass\n\n\ndef test_no():\n    assert False\n")
    said = gpu.run_suite([str(path), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)])
    assert said.startswith("Tests: 1 failed, 1 passed")
    assert "FAILED" in said
    assert "test_no" in said
