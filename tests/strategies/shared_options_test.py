"""A strategy gets the options that it names, and a model that is left whole is named."""

import flax.linen as nn
import optax
import pytest

from manualpar import fsdp, make_mesh
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.placement import Placement, replicate
from manualpar.strategies.shared_options import STATE_SHARDING, build_sharded
from tests.tiny import class_loss, make_batch


def shard_rows(parameter, axes, axis_size, *, min_weight_size):
    if parameter.shape[0] % axis_size or parameter.shape[0] < min_weight_size:
        return replicate(parameter, axes, axis_size)
    return Placement((axes[0], *parameter.names[1:]), "rows")


def by_rows(model, tx, loss_fn, **options):
    def strategy(min_weight_size):
        def place(*about):
            return shard_rows(*about, min_weight_size=min_weight_size)

        return Strategy("by_rows", place, lambda m, keep: CommCounts(uses=m, gathers=m, scatters=1))

    return build_sharded("by_rows", strategy, model, tx, loss_fn, options, STATE_SHARDING)


@pytest.fixture
def options(devices8):
    return {"mesh": make_mesh({"data": 4}, devices=devices8[:4]), "batch": make_batch()}


def build(builder, **options):
    return builder(nn.Dense(5), optax.sgd(0.1), class_loss, **options)


def test_a_strategy_gets_the_options_that_it_names(options):
    program = build(by_rows, min_weight_size=12, **options)
    assert [route.note for _, route in program.parameters] == ["", "rows"]
    with pytest.raises(TypeError, match=r"by_rows: 'pad' is not an option, expected some of .*min"):
        build(by_rows, pad=True, **options)


def test_a_model_below_the_default_is_named_once(options):
    words = "fsdp: 0 of 2 parameters are sharded, because the largest has 60 elements and min_weigh"
    with pytest.warns(UserWarning, match=words) as warned:
        build(fsdp, **options)
    assert [warning.filename for warning in warned] == [__file__]
    build(fsdp, min_weight_size=10_000, **options)
