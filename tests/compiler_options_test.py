import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import data_parallel, make_mesh
from manualpar.compiler_options import compiler_options
from manualpar.planner.hardware import CHIPS
from tests.program_test import Classifier, loss_fn, make_batch


def test_default_is_the_compilers_own():
    for chip in CHIPS:
        assert compiler_options(chip.device_kind) == {}


def test_which_chips_have_options_to_overlap():
    found = {chip.name: compiler_options(chip.device_kind, "asynchronous") for chip in CHIPS}
    assert {name for name, options in found.items() if options} == {"v5p", "v6e"}
    # The name by which jax knows a v5p.
    assert compiler_options("TPU v5", "asynchronous") == found["v5p"]
    assert all("sparse_core" in name or "_sc" in name for name in found["v6e"])


def test_other_options_win():
    name = "xla_enable_async_all_gather"
    found = compiler_options("TPU v5", "asynchronous", others={name: "false", "xla_more": "1"})
    assert found[name] == "false"
    assert found["xla_more"] == "1"
    assert compiler_options("TPU v5", "asynchronous")[name] == "true"


def test_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="overlap is 'none', expected one of 'default'"):
        compiler_options("TPU v5", "none")


def test_a_step_is_compiled_with_them(devices8):
    """An option that the compiler does not know is refused by it, so it has been handed over."""
    options = {"mesh": make_mesh({"data": 2}, devices8), "batch": make_batch()}
    program = data_parallel(
        Classifier(), optax.sgd(0.1), loss_fn, compiler_options={"xla_no_such": True}, **options
    )
    for step in (program.train_step, program.eval_step):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such"):
            step.lower(program.abstract_state, program.abstract_batch).compile()
    known = {"xla_cpu_enable_fast_math": False}
    program = data_parallel(
        Classifier(), optax.sgd(0.1), loss_fn, compiler_options=known, **options
    )
    state = program.init(jax.random.key(0))
    _, metrics = program.train_step(state, make_batch())
    assert jnp.isfinite(metrics["loss"][0])
    with pytest.raises(TypeError, match="compiler_options='fast', expected a dict of names and"):
        data_parallel(Classifier(), optax.sgd(0.1), loss_fn, compiler_options="fast", **options)
