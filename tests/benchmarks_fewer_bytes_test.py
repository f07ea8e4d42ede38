"""Which runs the benchmark of fewer bytes still takes, what it makes of them, and a run of it."""

import pytest

from benchmarks import coded_bytes, fewer_bytes
from benchmarks.coded_bytes import HEADER
from benchmarks.fewer_bytes import CONFIGS, VARIANTS, read_results, run_all, variant_config
from benchmarks.fewer_bytes_results import draw_losses, outcomes
from benchmarks.memory_and_collectives import ScannedClassifier

DIGITS = ("digits",)


@pytest.fixture
def measured(monkeypatch):
    """The runs that are taken, in their order; none of them trains."""
    runs = []

    def measure(task, name, seed, config):
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append((task, name, seed))
        steps, loss = config.training.num_steps, 1 + seed + len(name)
        return {"task": task, "variant": name, "seed": seed, "steps": steps, "loss": loss} | {
            "bytes": 2**20,
            "slow_bytes": 2**10,
            "seconds": 2.0,
        }

    monkeypatch.setattr(fewer_bytes, "measure", measure)
    return runs


def test_it_goes_on_where_it_was_interrupted_and_ends_a_seed_before_the_next(
    measured, tmp_path, capsys
):
    results, names = tmp_path / "results.jsonl", ("exact", "int8 weights")
    with pytest.raises(KeyboardInterrupt):
        run_all(DIGITS, names, range(2), 50, results)
    assert measured == [("digits", name, 0) for name in names] + [("digits", "exact", 1)]
    measured.clear()
    run_all(DIGITS, names, range(2), 50, results)
    assert measured == [("digits", "int8 weights", 1)]
    assert "1/1 digits 'int8 weights' seed 1" in capsys.readouterr().out
    measured.clear()
    run_all(DIGITS, names, range(1), 100, results)
    assert len(measured) == 2, "other steps are other runs"
    assert [line["steps"] for line in read_results(results)] == [50] * 4 + [100] * 2


def test_differences_are_of_equal_seeds(tmp_path):
    lines = [
        {"task": "lm", "variant": name, "seed": seed, "steps": 50, "loss": loss}
        | {"bytes": 2048, "slow_bytes": 1024}
        for name, losses in (("int8 weights", (2.5, 1.75, 3.0)), ("exact", (2.0, 1.5)))
        for seed, loss in enumerate(losses)
    ]
    exact, coded = outcomes(lines, "lm", 50)
    assert list(coded.differences) == [0.5, 0.25]
    assert coded.cells() == [
        "int8 weights",
        "2 KiB",
        "1 KiB",
        "2.4167 ± 0.6292",
        "+0.3750 ± 0.1768",
        "3",
    ]
    assert exact.cells()[-2:] == ["-", "2"]
    assert not outcomes(lines, "lm", 100)
    draw_losses(lines, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_steps_that_replicas_take_alone_must_not_be_lost(measured, tmp_path):
    name = "DiLoCo every 50, average"
    with pytest.raises(ValueError, match="--steps is 70, expected a multiple of 50 for 'DiLoCo"):
        run_all(DIGITS, [name], range(1), 70, tmp_path / "results.jsonl")
    assert not measured


@pytest.mark.parametrize("task", CONFIGS)
def test_every_variant_is_a_config(task):
    for variant in VARIANTS.values():
        config = variant_config(task, variant, 0)
        assert all(
            config.parallel[name] == value for name, value in variant.items() if name != "mesh"
        )


@pytest.mark.slow
def test_secondary_shards_change_no_bit(devices8, tmp_path):
    del devices8
    results = tmp_path / "results.jsonl"
    run_all(DIGITS, ("exact", "secondary shards"), range(1), 10, results)
    exact, secondary = read_results(results)
    assert exact["loss"] == secondary["loss"]
    assert exact["bytes"] - secondary["bytes"] == exact["slow_bytes"] - secondary["slow_bytes"] > 0


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("strategy", ["fsdp, secondary shards", "dp"])
def test_what_is_compiled_sends_what_was_traced(devices8, strategy):
    del devices8
    model = ScannedClassifier(num_layers=2, width=128)
    codes = {"gather_code": "int8" if strategy != "dp" else None, "reduce_code": "int4"}
    exact = coded_bytes.measure(strategy, model=model)
    coded = coded_bytes.measure(strategy, model=model, **codes)
    assert (exact.traced, coded.traced) == (exact.compiled, coded.compiled)
    assert coded.slow < 0.4 * exact.slow
    assert len(coded.cells()) == len(HEADER)
