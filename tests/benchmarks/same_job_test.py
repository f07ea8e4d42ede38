"""The lines of the same job: what counts as a line, and which outcomes are refused."""

import ast

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from benchmarks.same_job import __main__ as same_job
from benchmarks.same_job import job
from benchmarks.same_job.__main__ import Outcome, check, count_lines, read_outcome, train
from manualpar.inspect import ledger

SOURCE = '''"""A docstring
of two lines."""

import sys  # A comment.


def f(x):
    """Another."""
    # Only a comment.
    job.show(x)  # not counted
    return [
        x,
    ], "a string"
'''


def test_lines_of_code_count_and_nothing_else(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    assert count_lines(path) == 5  # import, def, and three of `return`.


WHOLE = Outcome({("train", 8): 2.0, ("train", 24): 1.0, ("train", 48): 0.4, ("eval", 48): 1}, 0.125)
FIRST = Outcome({("train", 8): 2.0, ("train", 24): 1.0, ("eval", 24): 1.1}, 0.125)
SECOND = Outcome({("train", 48): 0.4, ("eval", 48): 1}, 0.125)


def test_a_job_that_trains_and_resumes_is_accepted():
    check("x", FIRST, SECOND, WHOLE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"whole": Outcome(WHOLE.losses | {("train", 48): 1.9}, 0.125)}, "the loss does not fall"),
        ({"second": Outcome(SECOND.losses, 1.0)}, "a device holds 1.0 of the state"),
        ({"second": Outcome({("train", 8): 2.0} | SECOND.losses, 0.125)}, "does not go on"),
        (
            {"second": Outcome({("train", 48): 0.5, ("eval", 48): 1}, 0.125)},
            r"an interrupted training is another: \{\('train', 48\): \(0.4, 0.5\)\}",
        ),
    ],
)
def test_an_outcome_that_is_not_the_job_is_refused(changed, message):
    with pytest.raises(SystemExit, match=f"x: .*{message}"):
        check("x", **{"first": FIRST, "second": SECOND, "whole": WHOLE, **changed})


def test_the_output_of_every_script_is_read():
    text = (
        "step  8/48  train  loss 1.9705  accuracy 0.2910  604 examples/s\n"
        "step 48 eval accuracy 0.65  loss 0.9\na device holds 0.125 of the state\n"
    )
    assert read_outcome(text) == Outcome({("train", 8): 1.9705, ("eval", 48): 0.9}, 0.125)


@pytest.mark.parametrize("name", ["manualpar", "flax"])
def test_all_products_of_a_script_are_in_bfloat16(name):
    source = ast.parse((same_job.FOLDER / f"with_{name}.py").read_text())
    models = [part for part in source.body if isinstance(part, ast.ClassDef)]
    exec(compile(ast.Module(models, []), name, "exec"), made := {"nn": nn, "jnp": jnp, "job": job})
    x = jnp.zeros((job.BATCH, job.FEATURES))
    model = made["Classifier"]()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    products = ledger(jax.jit(model.apply).trace(params, x)).to_json()["flops"]
    assert products["by_dtype"].keys() == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manualpar", "flax"])
def test_a_script_trains_and_goes_on(tmp_path, name):
    path = same_job.FOLDER / f"with_{name}.py"
    first = train(path, str(tmp_path), 8)
    second = train(path, str(tmp_path), 16)
    assert first.share == second.share == 0.125
    assert min(step for _, step in second.losses) == 16
    assert second.losses["train", 16] < first.losses["train", 8]
