"""A mistake is one sentence, which says where the user's own code raised it."""

import jax
import numpy as np
import pytest

from manualpar import make_mesh
from manualpar.errors import describe_mistake, suggest
from manualpar.training.config_fields import FIELDS


def of(function):
    with pytest.raises(ValueError, match=r"\S") as raised:
        function()
    return describe_mistake(raised.value)


def fails():
    _rows, _columns = (1,)


def noted():
    try:
        fails()
    except ValueError as error:
        error.add_note("raised by place")
        raise


def test_the_users_own_line_is_named():
    where = rf"{__file__}:{fails.__code__.co_firstlineno + 1}, in fails"
    assert of(fails) == f"not enough values to unpack (expected 2, got 1) ({where})"
    assert of(noted).endswith(f"(raised by place; {where})")


def test_so_is_the_line_that_a_library_was_called_from():
    assert of(lambda: np.zeros(3).reshape(2)).endswith("in <lambda>)")
    assert of(lambda: jax.jit(lambda: fails())()).endswith("in fails)")


def test_what_the_package_refuses_needs_no_line():
    sentence = of(lambda: make_mesh({"data": 0}))
    assert __file__ not in sentence


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("optimiser.warmup", "optimizer.warmup_steps"),
        ("model.batch_size", "data.batch_size"),
        ("parallel.weight_decay", "optimizer.weight_decay"),
        ("sed", "seed"),
    ],
)
def test_the_nearest_name_is_found_by_its_last_part_too(name, expected):
    assert suggest(name, FIELDS) == f"; the nearest one is {expected!r}"


def test_a_name_is_suggested_only_if_it_is_near():
    assert suggest("zzz", FIELDS) == suggest("zzz", ()) == ""
    assert suggest("zzz", FIELDS, otherwise="; all are listed") == "; all are listed"
