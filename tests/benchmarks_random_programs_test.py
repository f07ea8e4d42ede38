"""The random programs: drawn from a number alone, and a wrong one is noticed."""

import json

import jax
import optax
import pytest

from benchmarks.random_checks import Shared, run
from benchmarks.random_options import draw, features_of
from benchmarks.random_programs import run_all, sentence_class
from manualpar.core.program.program import Program
from manualpar.core.program.step import Step

TINY = {
    "number": -1,
    "model": "mlp",
    "data_seed": 3,
    "batch": 8,
    "length": 8,
    "loss": "masked",
    "loss_extras": {"decay": 0.01},
    "tx": "momentum",
    "ema": False,
    "fields": {"width": 8, "depth": 2, "norm": "none"},
    "strategy": "fsdp",
    "mode": "manual",
    "mesh": {"data": 4},
    "options": {"num_minibatches": 2, "min_weight_size": 1},
    "nan_at": False,
    "evaluates": True,
    "given": False,
}


@pytest.fixture(scope="module")
def shared():
    """What one device says, which these programs have in common."""
    return Shared()


def test_a_program_is_drawn_from_its_number_alone():
    rows = [draw(number) for number in range(400)]
    assert rows == [draw(number) for number in range(400)]
    assert rows == json.loads(json.dumps(rows))
    features = {feature for row in rows for feature in features_of(row)}
    assert features >= {
        *("LoRA", "int8 base", "packed", "plan", "split layers", "experts", "dropout", "int4"),
        *("diloco", "pipeline", "context", "NNX", "trip by checkpoint", "trip by adopt"),
    }
    assert [row["tx"] for row in rows[:4]] == [rows[0]["tx"]] * 4


def test_a_program_that_is_right_is_exact(devices8, shared):
    assert run(TINY, shared) == ("exact", "")


def altered(monkeypatch, alter):
    """Lets each training step give its optimizer other gradients."""
    gradients = Step.gradients

    def wrong(self, *args):
        grads, metrics, carried = gradients(self, *args)
        return alter(grads), metrics, carried

    monkeypatch.setattr(Step, "gradients", wrong)


@pytest.mark.parametrize(
    ("factor", "words"), [(2, "ratio 2, off 1 of its norm"), (1.001, "off 0.001 of its norm")]
)
def test_a_gradient_of_another_size_is_noticed(devices8, monkeypatch, shared, factor, words):
    altered(monkeypatch, lambda grads: jax.tree.map(lambda g: factor * g, grads))
    outcome, said = run(TINY, shared)
    assert outcome == "wrong"
    assert words in said


@pytest.mark.slow
@pytest.mark.parametrize("path", [("head", "bias"), ("layer_1", "up", "kernel")])
def test_a_leaf_whose_gradient_is_dropped_is_noticed(devices8, monkeypatch, shared, path):
    def drop(grads):
        return jax.tree_util.tree_map_with_path(
            lambda p, g: 0 * g if tuple(k.key for k in p) == path else g, grads
        )

    altered(monkeypatch, drop)
    outcome, words = run(TINY, shared)
    assert outcome == "wrong"
    assert f"{'/'.join(path)} ratio 0, off 1 of its norm" in words


@pytest.mark.slow
def test_other_initial_bits_are_noticed(devices8, monkeypatch, shared):
    whole = Program.whole

    def other(self, state):
        variables = whole(self, state)
        variables["params"]["head"]["kernel"] = variables["params"]["head"]["kernel"] * (1 + 1e-5)
        return variables

    monkeypatch.setattr(Program, "whole", other)
    outcome, words = run(TINY, shared)
    assert (outcome, words[:35]) == ("wrong", "init: head/kernel is not the same b")


@pytest.mark.slow
def test_an_update_that_is_off_is_noticed(devices8):
    shared = Shared()
    row = TINY | {"tx": "adamw"}
    assert run(row, shared) == ("exact", "")
    # On one device the same optimizer climbs.
    for name, made in shared.made.items():
        if name.startswith("update"):
            shared.made[name] = lambda g, *args, made=made: made(optax.tree.scale(-1, g), *args)
    outcome, words = run(row, shared)
    assert outcome == "wrong"
    assert "update: " in words


def test_what_the_package_refuses_is_no_crash(devices8):
    refused = run(TINY | {"options": {"num_minibatches": 3}}, Shared())
    assert refused[0] == "refused"
    assert sentence_class(refused[1]).startswith("num_minibatches=… does not divide")
    crash = run(TINY | {"fields": {"width": 0.5}}, Shared())
    assert crash[0] == "crash"


@pytest.mark.slow
def test_rows_come_from_other_processes_and_a_hang_is_one():
    rows = list(run_all([TINY], seconds=120, each=10))
    assert [row["outcome"] for row in rows] == ["exact"]
    rows = list(run_all([TINY | {"number": 5}, TINY], seconds=0.01, each=10))
    assert [row["outcome"] for row in rows] == ["hang", "hang"]
