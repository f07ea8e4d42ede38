"""The benchmark of accelerators, tried on a CPU: its rows, its refusals, and what it writes."""

import argparse
import dataclasses
import faulthandler
import importlib.util
import json
import os
import re
import sys
import types

import jax
import numpy as np
import pytest

from benchmarks import gpu, gpu_bandwidth, gpu_layouts, gpu_report, gpu_steps
from benchmarks.compiled_steps import Counts
from benchmarks.gpu_rows import Row, _where, run_row
from benchmarks.results import note_conditions
from benchmarks.turns import Estimate
from manualpar import make_mesh
from manualpar.inspect import compiled_collectives

MACHINE = {
    "kind": "cpu",
    "platform": "cpu",
    "devices": 8,
    "used": 8,
    "processes": 1,
    "process": 0,
    "memory": 0,
}
COUNTS = Counts(
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


def _options(*flags, **changes):
    return argparse.Namespace(**vars(gpu.parse(["--tiny", *flags])) | changes)


def _page(rows, machine=MACHINE, suite="", **changes):
    conditions = note_conditions("benchmarks.gpu", [])
    compared = gpu_steps.compare_rows(rows)
    return "\n".join(gpu_report.page(conditions, _options(**changes), machine, compared, suite))


@pytest.mark.slow
def test_the_command_runs_on_simulated_devices(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    flags = ["--tiny", "--rounds=1", "--chip=h100", "--rows=^(ppermute|manual fsdp|PyTorch.*)$"]
    paths = [f"--output={tmp_path / 'gpu.md'}", f"--json={tmp_path / 'gpu.json'}"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu.main([*flags, *paths]) == 0
    data, shown = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == ["ppermute", "manual fsdp", gpu_steps.AGAIN, gpu_steps.TORCH]
    assert data["devices"] == data["used"] == 2
    assert rows["ppermute"]["bandwidths"][0][1] > 0
    step = rows["manual fsdp"]
    assert step["planned"]["topology"] == "h100:2"
    assert step["compiled"] > step["counts"]["state"]
    assert step["losses"] == pytest.approx(rows[gpu_steps.AGAIN]["losses"])
    assert "There is no accelerator here" in shown
    assert "| manual fsdp |" in shown
    assert "PyTorch is not installed; pip install 'manualpar[torch,train]'" in shown


@pytest.mark.slow
def test_each_device_may_have_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    flags = ["--tiny", "--rounds=1", "--processes=gpu", "--no-torch", "--rows=^ppermute$"]
    assert gpu.main([*flags, f"--output={tmp_path / 'a'}", f"--json={tmp_path / 'b'}"]) == 0
    (row,) = json.loads((tmp_path / "b").read_text())["rows"]
    assert [size for size, _ in row["bandwidths"]] == gpu.TINY["sizes"]
    assert "each device in a process of its own" in (tmp_path / "a").read_text()


def _with_rows(monkeypatch, machine, rows):
    """Lets the command find rows in a dict, by name; returns the names in the order of running."""
    ran = []

    def run(name, command, *, limit, environment):
        ran.append(name)
        if name == gpu.MACHINE:
            return Row(name, facts=machine)
        return rows.get(name, Row(name, (1.0,), losses=(5.0,)))

    monkeypatch.setattr(gpu, "run_row", run)
    return ran


def test_results_are_written_after_each_row(tmp_path, monkeypatch, capsys):
    path = tmp_path / "gpu.json"
    crashed = Row("auto fsdp", problem="its process ended with -6")
    ran = _with_rows(monkeypatch, MACHINE, {"auto fsdp": crashed})
    written = []
    write = gpu.write_results

    def noted(*args, **more):
        write(*args, **more)
        written.append([row["name"] for row in json.loads(path.read_text())["rows"]])

    monkeypatch.setattr(gpu, "write_results", noted)
    flags = ["--tiny", "--no-torch", f"--json={path}", f"--output={tmp_path / 'gpu.md'}"]
    assert gpu.main([*flags, "--rows=^(all-gather|manual fsdp|auto fsdp|manual zero)$"]) == 0
    rows = ["all-gather", "manual fsdp", "auto fsdp", "manual zero", gpu_steps.AGAIN]
    assert written[:5] == [rows[:number] for number in range(1, 6)]
    assert ran == [gpu.MACHINE, *rows[:4], "manual fsdp"]
    assert "auto fsdp: its process ended with -6" in (tmp_path / "gpu.md").read_text()


def test_only_the_first_process_of_a_cluster_writes(tmp_path, monkeypatch):
    _with_rows(monkeypatch, {**MACHINE, "processes": 2, "process": 1}, {})
    flags = ["--tiny", "--rows=^(manual fsdp|PyTorch.*)$", f"--json={tmp_path / 'gpu.json'}"]
    assert gpu.main([*flags, f"--output={tmp_path / 'gpu.md'}"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_rows_are_layouts_in_modes_and_collectives():
    names = gpu.row_names(_options(), 8)
    for layout in gpu_layouts.LAYOUTS:
        for mode in ("manual", "auto", "explicit"):
            assert {f"{mode} {layout}", f"{mode} {layout}{gpu_layouts.OURS}"} <= set(names)
    assert {"manual pipeline", "manual codes", *gpu_bandwidth.COLLECTIVES} <= set(names)
    alone = gpu.row_names(_options(), 1)
    assert alone[0] == gpu_steps.PLAIN
    assert "manual hsdp" not in alone
    assert "all-gather" not in alone


@pytest.mark.parametrize(
    ("name", "devices", "axes"),
    [
        ("manual fsdp", 8, {"data": 8}),
        ("manual hsdp", 8, {"replica": 2, "data": 4}),
        ("auto tp", 8, {"data": 2, "model": 4}),
        ("manual pipeline", 2, {"data": 1, "stage": 2}),
        ("manual experts", 6, {"data": 3, "expert": 2}),
    ],
)
def test_meshes_fill_the_devices(name, devices, axes):
    assert gpu_layouts.mesh_of(gpu_layouts.CONTENDERS[name], devices) == axes


def test_an_odd_number_of_devices_has_no_second_axis():
    with pytest.raises(ValueError, match="devices is 3, expected an even number for 'model'"):
        gpu_layouts.mesh_of(gpu_layouts.CONTENDERS["manual tp"], 3)


@pytest.mark.parametrize("kind", gpu_bandwidth.COLLECTIVES)
def test_collectives_do_what_they_are_called(kind, devices8):
    mesh = make_mesh({"data": 4}, devices8[:4])
    x = np.arange(16.0).reshape(4, 4)
    expected = {
        "all-gather": np.tile(x.ravel(), (4, 1)),
        "reduce-scatter": x.sum(0)[:, None],
        "all-reduce": x.sum(0)[None],
        "all-to-all": x,  # Its columns are sharded in place of its rows.
        "ppermute": np.roll(x, 1, 0),
    }
    run = gpu_bandwidth.collective(kind, mesh)
    given = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data")))
    np.testing.assert_array_equal(run(given), expected[kind])
    compiled = compiled_collectives(run.lower(given).compile())
    assert [one.kind for one in compiled] == [kind.replace("-", "_").replace("pp", "p")]


def test_bandwidth_is_that_of_the_bytes_on_the_links():
    speeds = {kind: gpu_bandwidth.bytes_per_second(kind, 800, 2.0, 8) for kind in ("all-reduce",)}
    assert speeds == {"all-reduce": 700.0}
    assert gpu_bandwidth.bytes_per_second("ppermute", 800, 2.0, 8) == 400.0
    shown = _page([Row("ppermute", bandwidths=((8 * 10**9, 2.0),))])
    assert "| 8,000,000,000 | 4.00 (2,000,000) |" in shown


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 96GB HBM2e", "h100-500w"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("cpu", None),
    ],
)
def test_the_chip_is_found(kind, name):
    chip = gpu_layouts.find_chip(kind)
    assert (chip and chip.name) == name
    assert gpu_layouts.find_chip("cpu", "h200").name == "h200"


def test_the_page_shows_the_plan_beside_the_measurement():
    planned = {"topology": "h100:8", "seconds": 0.5, "bytes": 2**20}
    row = Row("manual fsdp", (1.0,), memory=3 * 2**20, compiled=2 * 2**20, planned=planned)
    ours = dataclasses.replace(row, name=f"manual fsdp{gpu_layouts.OURS}", options="xla_a=True")
    shown = _page([row, ours, Row("manual tp", problem="too slow")], suite="Tests: 5 passed")
    assert "| manual fsdp | 1000.00 | 1 | 500.00 | 2.00 | 128 |  | 3.0 | 2.0 | 1.0 |" in shown
    assert "The plan is the roofline's for h100:8" in shown
    assert "- manual fsdp: xla_a=True" in shown
    assert "- manual tp: too slow." in shown
    assert shown.rstrip().endswith("Tests: 5 passed")


def test_without_an_accelerator_there_is_a_sentence(monkeypatch, capsys):
    _with_rows(monkeypatch, MACHINE, {})
    assert gpu.main(["--no-torch"]) == 2
    assert "no accelerator here, only CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--devices=9"], "--devices is 9, expected 1 to 8"),
        (["--devices=4", "--processes=gpu"], "expected all devices"),
    ],
)
def test_devices_are_refused(flags, words, monkeypatch, capsys):
    _with_rows(monkeypatch, MACHINE, {})
    assert gpu.main(["--tiny", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--remat=full", "--remat is full, expected auto or none"),
        ("--rounds=0", "--rounds is 0, expected 1 or more"),
        ("--limit=0", "--limit is 0, expected a positive number"),
        ("--rows=(", "expected a regular expression"),
    ],
)
def test_flags_are_refused(flag, words, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", flag])
    assert words in capsys.readouterr().err


def test_what_is_above_two_percent_is_said():
    plain = Row(gpu.PLAIN, (1.0,), Estimate(1, 1, 1), COUNTS)

    def manual(**changes):
        changed = dataclasses.replace(COUNTS, **changes)
        return dataclasses.replace(plain, name="manual dp", counts=changed)

    # XLA:CPU keeps all-reduces of one device, which types ask for.
    kept = [plain, manual(temporaries=1021, collectives={"all_reduce": 2})]
    assert gpu.excesses(kept, MACHINE) == []
    fsdp = dataclasses.replace(kept[1], name="manual fsdp")
    above = ["manual fsdp: temporaries are 1.021 of plain jit's."]
    assert gpu.excesses([plain, fsdp], MACHINE) == above
    assert "Held against plain jit: manual fsdp, manual fsdp, kept. Nothing" in _page(kept)
    on_gpu = {**MACHINE, "platform": "gpu"}
    # XLA counts no operations of a call to cuBLAS.
    assert gpu.excesses([plain, manual(flops=1194.0, accessed=900.0)], on_gpu) == []
    above = gpu.excesses([plain, manual(temporaries=1021, collectives={"all_reduce": 2})], on_gpu)
    assert above == [
        "manual dp: temporaries are 1.021 of plain jit's.",
        "manual dp: 2 collectives of one device are compiled.",
    ]
    assert gpu.excesses([manual(temporaries=1021)], on_gpu) == []  # Nothing to hold it against.


def test_losses_are_compared_with_the_same_model():
    rows = [
        Row("manual fsdp", (2.0,), losses=(5.0,)),
        Row("auto fsdp", (3.0,), losses=(6.0,)),
        Row("manual experts", (3.0,), losses=(7.0,)),
        Row("auto experts", (3.0,), losses=(7.01,)),
    ]
    found = gpu_steps.compare_rows(rows)
    assert [row.problem for row in found] == [
        "",
        "not the same training: its losses are [6.0], those of manual fsdp [5.0]",
        "",
        "",
    ]
    assert [row.ratio.median for row in found] == [1, 1.5, 1.5, 1.5]


def test_an_error_of_a_step_is_a_row(monkeypatch):
    def fail(*args):
        raise RuntimeError("process 0 of w has ended:\nTraceback\nOutOfMemoryError: too much\n")

    monkeypatch.setattr(gpu, "measure_torch", fail)
    row = gpu.measure_row(_options(), gpu_steps.TORCH)
    assert row == Row(gpu_steps.TORCH, problem="OutOfMemoryError: too much")


# Writes a row, and then does what its first argument says.
ROW = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[1] == "hang":
    time.sleep(600)
if sys.argv[1] == "crash":
    os.kill(os.getpid(), signal.SIGABRT)
from benchmarks.gpu_rows import UNFINISHED, Row
row = Row("a row", (1.0,), bandwidths=((8, 0.5),))
if sys.argv[1] == "fail":
    Row("a row", facts={"a": 1}, problem=UNFINISHED).write(Path(sys.argv[3]))
    raise ValueError("no such thing")
row.write(Path(sys.argv[3]))
"""

FAILED = "its process ended with 1: ValueError: no such thing"


@pytest.mark.parametrize(
    ("does", "row"),
    [
        ("end", Row("a row", (1.0,), bandwidths=((8, 0.5),))),
        ("hang", Row("a row", problem="ended, because it took longer than 3 s")),
        ("crash", Row("a row", problem="its process ended with -6")),
        ("fail", Row("a row", facts={"a": 1}, problem=FAILED)),
    ],
)
def test_a_row_that_hangs_or_crashes_has_its_reason(does, row):
    limit = 3.0 if does == "hang" else 300.0
    command = [sys.executable, "-c", ROW, does]
    environment = {**os.environ, "PYTHONPATH": str(gpu.ROOT)}
    assert run_row("a row", command, limit=limit, environment=environment) == row


def test_a_row_that_hangs_says_where(tmp_path):
    path = tmp_path / "said"

    def hang(file):
        faulthandler.dump_traceback(file)

    with path.open("w") as file:
        hang(file)
    assert re.fullmatch(r", in hang \(benchmarks/gpu_test\.py:\d+\)", _where(path.read_text()))
    assert _where("ValueError: no such thing") == ""


def test_the_batch_fills_the_memory(monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000})
    monkeypatch.setattr(gpu_steps.jax, "local_devices", lambda: [device])
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
    said = gpu.run_suite(
        [str(path), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)], "cpu", limit=600.0
    )
    assert said.startswith("Tests: 1 failed, 1 passed")
    assert "FAILED" in said
    assert "test_no" in said
