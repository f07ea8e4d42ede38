import dataclasses
import json
import re

import jax
import numpy as np
import optax
import pytest

from benchmarks import notebook_way, scaling, step_time
from benchmarks.compiled_steps import CompiledStep, mean_loss, of_program
from benchmarks.plain_step import plain_step
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.workloads import NAMES, make_workload
from manualpar import data_parallel, make_mesh


@pytest.fixture(scope="module")
def rows(devices8):
    workload = make_workload("classifier", is_tiny=True)
    return step_time.measure(
        workload,
        ["manual", "notebook", "one device"],
        num_devices=4,
        seconds=1e-6,
        rounds=2,
        report=lambda text: None,
    )


@pytest.mark.slow
def test_the_same_training_whoever_wrote_it(rows):
    found, num_steps = rows
    assert num_steps == 1
    assert [row.program for row in found] == ["manual", "notebook", "one device"]
    assert all(row.loss_difference < 1e-5 for row in found)
    assert found[-1].loss_difference == 0
    assert all(len(row.seconds) == 2 and min(row.seconds) > 0 for row in found)
    assert found[0].ratio == found[0].processor_ratio == (1, 1, 1)
    assert all(len(row.processor) == 2 and min(row.processor) > 0 for row in found)


@pytest.mark.slow
def test_what_is_counted_is_what_is_written(rows):
    manual, notebook, one = rows[0]
    # On 4 devices the whole of 784 x 32 + 32 and 32 x 10 parameters; 10 biases are replicated.
    sharded, replicated = 4 * (784 * 32 + 32 + 32 * 10), 4 * 10
    minibatches = 4
    gathered = sharded * 3 // 4
    formula = 3 * minibatches * gathered + 2 * replicated * 3 // 4
    assert manual.formula == formula
    # Neither the biases nor the first kernel are gathered again; metrics are 6 floats, a count 1.
    assert (
        manual.traced == formula - minibatches * 3 * 4 * (784 * 32 + 32) // 4 + 2 * 7 * 4 * 3 // 4
    )
    for row in (manual, notebook):
        # Adam and the schedule count steps.
        assert row.step.counts.state == 3 * (sharded // 4 + replicated) + 2 * 4
    assert one.step.counts.sent == 0
    assert not one.step.counts.collectives
    # The notebook synchronises every metric by itself: XLA sees so many more.
    assert notebook.traced is notebook.formula is one.traced is None


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_another_training_is_refused(wrong, devices8, monkeypatch):
    class Step:
        def __init__(self, loss):
            self.losses = lambda steps: [1.0, loss]

    workload = make_workload("classifier", is_tiny=True)
    steps = {"manual": Step(wrong), "one device": Step(1.0)}
    monkeypatch.setattr(step_time, "compile_all", lambda *args, **options: (steps, {}))
    with pytest.raises(RuntimeError, match="it is not the same computation"):
        step_time.measure(
            workload,
            ["manual", "one device"],
            num_devices=2,
            seconds=1e-6,
            rounds=1,
            report=lambda text: None,
        )


@pytest.mark.slow
def test_the_report(rows, tmp_path):
    workload, output = make_workload("classifier", is_tiny=True), tmp_path / "report.md"
    output.write_text("# Benchmarks\n\ntext\n")
    conditions = note_conditions("benchmarks.step_time", ["--tiny"])
    lines = [
        *step_time.introduction(conditions, 4),
        *step_time.report_workload(workload, rows[0], num_steps=rows[1]),
    ]
    data = {"workloads": [step_time._plain(workload, *rows)]}
    write_results(
        conditions, lines=lines, data=data, output=output, json_output=tmp_path / "report.json"
    )
    text = output.read_text()
    assert text.startswith("# Benchmarks\n\ntext\n\n## A step against XLA's own")
    assert "`python -m benchmarks.step_time --tiny`" in text
    assert f"jax {jax.__version__}" in text
    assert re.search(r"\| notebook \| [\d.]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \|", text)
    assert "nan" not in text
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["conditions"]["versions"]["jax"] == jax.__version__
    (first, *_) = read["workloads"][0]["rows"]
    assert first["program"] == "manual"
    assert first["counts"]["collectives"]["all_gather"] > 0
    assert first["ratio_to_manual"] == {"median": 1, "low": 1, "high": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mlp" else pytest.mark.slow) for n in NAMES]
)
def test_the_notebooks_model_is_the_workloads(name, devices8):
    workload = make_workload(name, is_tiny=True)
    params = workload.model.init(jax.random.key(0), workload.batch.inputs[:1], train=False)[
        "params"
    ]
    model, renamed = notebook_way._rewrite(workload, params)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    inputs = jax.numpy.asarray(workload.batch.inputs[:2])
    apply = jax.shard_map(
        lambda params, x: model.apply({"params": params}, x, train=True),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=True,
    )
    expected = workload.model.apply({"params": params}, inputs, train=False)
    np.testing.assert_allclose(apply(renamed, inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_workload_nobody_knows():
    with pytest.raises(ValueError, match="expected one of classifier, lm, lm-scanned, mlp"):
        make_workload("lms")


@pytest.mark.slow
def test_a_plain_step_is_the_programs(devices8):
    workload = make_workload("mlp", is_tiny=True)
    jitted, make_state = plain_step(workload)
    batch, state = jax.device_put(workload.batch, jax.devices()[0]), make_state()
    plain = CompiledStep(jitted, state, batch, parts=state, read_loss=mean_loss)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    program = data_parallel(
        workload.model,
        workload.tx,
        workload.loss_fn,
        mesh=mesh,
        batch=workload.abstract_batch,
        mode="auto",
    )
    ours = of_program(program, workload.batch)
    np.testing.assert_allclose(plain.losses(3), ours.losses(3), rtol=1e-5)
    assert plain.counts.state == ours.counts.state
    assert not plain.counts.collectives


@pytest.mark.slow
def test_a_scanned_model_does_not_grow(devices8):
    found = scaling.measure_depths([2, 3], [2], is_tiny=True, is_compiled=False)
    assert scaling.growing(found) == []
    unrolled = [each.lowered for each in found if not each.is_scanned]
    assert len(unrolled) == 2
    assert unrolled[0] < unrolled[1]
    text = "\n".join(scaling.report_depths(found))
    assert "The program of a scanned model does not grow with its depth." in text
    # As if what is unrolled were called scanned.
    wrong = [dataclasses.replace(each, is_scanned=True) for each in found]
    (first, *_) = scaling.growing(wrong)
    assert "expected no more for a deeper one" in first


@pytest.mark.slow
def test_points_of_scaling(devices8, tmp_path):
    points = scaling.measure_scaling("mlp", ["fsdp"], [1, 2], seconds=1e-6, rounds=1, is_tiny=True)
    assert [(p.scaling, p.devices, p.batch_size) for p in points] == [
        ("strong", 1, 32),
        ("strong", 2, 32),
        ("weak", 1, 16),
        ("weak", 2, 32),
    ]
    one, two = points[:2]
    assert one.traced == one.formula == 0
    assert 0 < two.traced <= two.formula + 100  # Metrics and counts are not in the formula.
    assert two.counts.state < one.counts.state
    text = "\n".join(scaling.report_scaling("mlp", points, is_tiny=True))
    assert text.count("| strong, fsdp |") == text.count("| weak, fsdp |") == 2


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (step_time.main, ["--rounds=0"], "--rounds is 0, expected at least 1"),
        (scaling.main, ["--devices", "0", "1"], "expected to be 1 or more"),
    ],
)
def test_a_mistake_is_a_sentence(main, argv, message, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err


def test_conditions_say_what_is_installed():
    conditions = note_conditions("benchmarks.step_time", [])
    assert isinstance(conditions, Conditions)
    assert conditions.versions["optax"] == optax.__version__
    assert conditions.cores >= 1
    assert "load" in conditions.sentence()
