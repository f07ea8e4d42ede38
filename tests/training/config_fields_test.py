"""Every config field has a meaning, and the same field has only one."""

import ast
import json

import pytest

from manualpar.strategies import BUILT_IN, Field
from manualpar.training.config import fields_of
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS
from tests.paths import ROOT

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


FIELDS_FILE = ROOT / "manualpar" / "training" / "fields.py"
HEAD = '''"""The fields of a config by their dotted names, for editors and type checkers.

Written from the tables of fields: `python -m tests.training.config_fields_test` writes it anew.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Fields = TypedDict(
    "Fields",
    {
'''
TAIL = """    },
    total=False,
)
'''Values of config fields by dotted name, all of them optional, see `fit`.'''
# The site reads the string above, and `help` reads this one.
Fields.__doc__ = "Values of config fields by dotted name, all of them optional, see `fit`."
"""


def _type_of(name: str, field: Field) -> str:
    if name == "parallel.strategy":
        return "str"  # Users register more.
    if field.kind is dict:
        return "Mapping[str, Any]"
    if field.kind is tuple:
        named = "str" if field.holds_names else "Any"
        return f"tuple[{'float' if field.holds_numbers else named}, ...]"
    if field.choices:
        choices = ", ".join(map(json.dumps, field.choices))
        return f"Literal[{choices}{',' * (len(choices) > 60)}]"  # A comma at the end breaks lines.
    return field.kind.__name__


def _fields_file() -> str:
    fields = FIELDS | {name: field for of in MODEL_FIELDS.values() for name, field in of.items()}
    for kind in BUILT_IN:
        fields |= {f"parallel.{name}": field for name, field in kind.fields.items()}
    lines = [f"        {json.dumps(name)}: {_type_of(name, x)},\n" for name, x in fields.items()]
    return HEAD + "".join(lines) + TAIL


def test_the_file_of_fields_is_that_of_the_tables():
    def read(text):
        return ast.dump(ast.parse(text))

    assert read(FIELDS_FILE.read_text()) == read(_fields_file()), "write it, see its docstring"


if __name__ == "__main__":
    FIELDS_FILE.write_text(_fields_file())
