"""Laws that hold for every row of `cases.CASES`; add a row there for a new option."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.core.model.options import ProgramOptions
from manualpar.core.modes.strategy import MODES
from manualpar.core.trees import path_name
from manualpar.inspect import bytes_by_axes, parameter_collectives, step_bytes, trace_collectives
from manualpar.strategies.shared_options import REPLICATED_SHARDING
from manualpar.training.replicas import ReplicaSentinel
from tests.laws.cases import CASES, MANUAL_ONLY, Case, one_device
from tests.one_device import slow_unless


# The scope makes pytest run all laws of a row one after another, hence mostly in one process, which
# compiles the row's program once.
@pytest.fixture(
    scope="module",
    params=[slow_unless([], x) if x.slow else x for x in CASES],
    ids=str,
)
def case(request):
    return request.param


@functools.cache
def built(case_index: int) -> Any:
    """Builds the program of a row, only once for all laws."""
    return CASES[case_index].build()


@functools.cache
def stepped(case_index: int) -> Any:
    """Takes a step; returns the variables before it, the state after it, and the metrics."""
    program = built(case_index)
    state = program.init(jax.random.key(0))
    before = program.whole(state)
    return before, *program.train_step(state, CASES[case_index].batch)


def check_step(case: Case, program: Any, before: Any, state: Any, metrics: Any) -> None:
    """Compares a step's loss and gradients with one device; parameters must not change."""
    params = before["params"]
    collections = {name: tree for name, tree in before.items() if name != "params"}
    loss, expected = one_device(case.model, case.options.get("gather_dtype"))(params, collections)
    total, count = metrics["loss"]
    np.testing.assert_allclose(total / count, loss, rtol=max(case.tolerance, 1e-5))
    gradients = {
        path_name(path): g for path, g in jax.tree_util.tree_leaves_with_path(state.opt_state)
    }
    trained = [info for info, place in program.parameters if place.trainable]
    assert [*gradients] == [info.path for info in trained]
    after = program.whole(state)["params"]
    jax.tree.map(np.testing.assert_array_equal, after, params)
    named = {path_name(path): g for path, g in jax.tree_util.tree_leaves_with_path(expected)}
    largest = max(np.abs(np.asarray(g, np.float32)).max() for g in named.values())
    for info in trained:
        found = np.asarray(gradients[info.path], np.float32)
        own = tuple(map(slice, info.shape))
        g = np.asarray(named[info.path], np.float32)
        off = np.abs(found[own] - g).max()
        assert off <= case.tolerance * max(np.abs(g).max(), 0.01 * largest), info.path
        found = found.copy()
        found[own] = 0
        assert not found.any(), f"{info.path}: padding is not zero"


def test_a_step_has_the_loss_and_every_gradient_of_one_device(devices8, case):
    del devices8
    index = CASES.index(case)
    check_step(case, built(index), *stepped(index))


def test_a_step_sends_the_bytes_of_the_formula(devices8, case):
    del devices8
    program = built(CASES.index(case))
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sent = bytes_by_axes(parameter_collectives(trace_collectives(traced)))
    closed = {axes: n for axes, n in step_bytes(program).items() if n}
    sent = {axes: n for axes, n in sent.items() if n}
    if case.model == "split sequences":  # Attention also sends keys and values.
        sent = {axes: n for axes, n in sent.items() if axes in closed}
    if case.model == "normed":  # Batch norms also send statistics over this axis.
        assert all(sent[axes] > n for axes, n in closed.items())
    elif not program.strategy.reshard_after_forward:
        assert sent == closed
    else:  # The backward pass does not gather biases, because it does not need them.
        assert sent.keys() == closed.keys()
        assert all(closed[axes] / 2 <= n <= closed[axes] for axes, n in sent.items())


def test_copies_of_an_array_are_the_same_bits(devices8, case):
    del devices8
    program, (_, state, metrics) = built(CASES.index(case)), stepped(CASES.index(case))
    ReplicaSentinel(program.mesh, program.layout).check(state)
    pairs = zip(*map(jax.tree.leaves, (state, program.abstract_state)), strict=True)
    for x, abstract in pairs:
        assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
        assert x.sharding.is_equivalent_to(abstract.sharding, x.ndim)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(metrics))


def test_the_next_case_adopts_its_state(devices8, case):
    del devices8
    index = CASES.index(case)
    others = [i for i, x in enumerate(CASES) if x.state_type == case.state_type]
    target = built(others[(others.index(index) + 1) % len(others)])
    _, state, _ = stepped(index)
    adopted = target.adopt(state)
    back = built(index).adopt(adopted)
    # `local` has the residuals of error feedback, which become zero if their shapes change.
    leaves = zip(*(jax.tree.leaves(x.replace(local={})) for x in (state, back)), strict=True)
    for x, y in leaves:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*map(jax.random.key_data, (x, y)) if is_key else (x, y))


OTHER_MODES = [mode for mode in MODES if mode != "manual"]
# In other modes the batch is global, so the batch norm of `Normed` has no axis to name. In mode
# `explicit`, JAX's types refuse a `Transformer` with split sequences, see docs/limits.md.
IN_MODES = [
    (case, mode)
    for case in CASES
    for mode in OTHER_MODES
    if case.model != "normed" and (case.model, mode) != ("split sequences", "explicit")
]
FAST = [pair for pair in IN_MODES if pair[0].options.keys() & MANUAL_ONLY]


@pytest.mark.parametrize(("case", "mode"), [slow_unless(FAST, *pair) for pair in IN_MODES], ids=str)
def test_another_mode_is_the_same_step_or_is_refused(devices8, case, mode):
    del devices8
    if only := case.options.keys() & MANUAL_ONLY:
        with pytest.raises((TypeError, ValueError)) as refused:
            case.build(mode=mode)
        words = str(refused.value)
        assert "expected" in words
        assert mode in words
        assert any(name in words for name in only), words
        return
    program = case.build(mode=mode)
    state = program.init(jax.random.key(0))
    before = program.whole(state)
    check_step(case, program, before, *program.train_step(state, case.batch))


def test_every_option_has_a_row():
    rows = {name for case in CASES for name in case.options}
    given = {"mesh", "batch", "mode", "min_weight_size"}  # Every row sets these.
    given |= {"other_models"}  # Its laws are in `other_models_test`, because a step takes states.
    options = {*ProgramOptions.__annotations__, *REPLICATED_SHARDING}
    assert options - given == rows - {"stage", "replica_axis"}
