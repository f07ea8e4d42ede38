"""Every config field has a meaning, and the same field has only one."""

import pytest

from manualpar.strategies import BUILT_IN
from manualpar.training.config import fields_of
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS

TABLES = {"every config": FIELDS, **MODEL_FIELDS, **{kind.name: kind.fields for kind in BUILT_IN}}


@pytest.mark.parametrize("table", TABLES)
def test_the_meaning_of_a_field_is_one_line(table):
    meanings = {name: field.meaning for name, field in TABLES[table].items()}
    wrong = {
        name: meaning
        for name, meaning in meanings.items()
        if "\n" in meaning or not meaning.endswith(".") or not meaning[0].isupper()
    }
    assert not wrong


def test_a_meaning_is_the_first_sentence_of_a_docstring():
    fields = fields_of({"model": {"name": "transformer"}, "parallel": {"strategy": "diloco"}})
    assert fields["model.num_layers"].meaning == "The number of layers, `L`."
    assert fields["model.rope_base"].meaning.startswith("The base of the rotary frequencies")
    assert fields["parallel.every"].meaning == "The number of inner steps between two outer steps."
    assert fields["parallel.strategy"].choices
    assert fields["parallel.strategy"].meaning
