"""Training some parameters: the others stay, and cost neither gradient nor state."""

import fnmatch
import itertools

import chex
import jax
import numpy as np
import optax
import pytest

from manualpar.core.strategy import MODES
from manualpar.guards.replicas import ReplicaSentinel
from manualpar.sharding.layout import path_name
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.program_test import BATCHES, TOLERANCE, Classifier, loss_fn
from tests.strategies_test import STRATEGIES, build, own_shapes

GLOBS = ("output_dense/*", "*/bias")


def is_trained(path, globs=GLOBS):
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def make_tx():
    """An optimizer that looks at all that it is given, and decays what it may."""
    steps = optax.sgd(0.5, momentum=0.9)
    return optax.chain(optax.clip_by_global_norm(0.05), optax.add_decayed_weights(0.01), steps)


def some(tx, globs=GLOBS):
    """The optimizer for one device that sees what is trained and nothing else."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: is_trained(path_name(path), globs), params
        )

    return optax.multi_transform({True: tx, False: optax.set_to_zero()}, labels)


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Classifier(), some(make_tx()), BATCHES, loss_fn, train=False)


def frozen_arrays(program, params):
    """The parameters that are not trained, on the host."""
    leaves = zip(program.parameters, jax.tree.leaves(params), strict=True)
    return [np.asarray(x) for (info, _), x in leaves if not is_trained(info.path)]


FAST = {("fsdp, pad", "manual")}


@pytest.mark.parametrize(
    ("name", "mode"), [slow_unless(FAST, *pair) for pair in itertools.product(STRATEGIES, MODES)]
)
def test_steps_equal_those_of_one_device(devices8, reference, name, mode):
    options = {"num_minibatches": 2, "use_scan": True, "nonfinite": "skip"}
    program = build(name, devices8, tx=make_tx(), mode=mode, trainable=GLOBS, **options)
    before = frozen_arrays(program, program.init(jax.random.key(0)).params)
    state, losses = train_program(program, BATCHES)
    np.testing.assert_allclose(losses, reference.losses, **TOLERANCE)
    params = own_shapes(program, state.params)
    chex.assert_trees_all_close(params, reference.params, **TOLERANCE)
    ReplicaSentinel(program.mesh, program.layout).check(state)
    assert len(before) == 2
    chex.assert_trees_all_equal(before, frozen_arrays(program, state.params))


def test_choices_that_choose_nothing_are_refused(devices8):
    with pytest.raises(ValueError, match=r"'output/\*'.*fits no parameter.*'output_dense/"):
        build("fsdp", devices8, trainable=("*/bias", "output/*"))
    for globs in ("*/bias", (), ("*/bias", 3)):
        with pytest.raises(TypeError, match="expected a tuple of one or more globs"):
            build("fsdp", devices8, trainable=globs)
    with pytest.raises(ValueError, match="frozen_dtype='bfloat16', expected None"):
        build("fsdp", devices8, frozen_dtype="bfloat16")
