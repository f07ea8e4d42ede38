"""The tables of options: what follows from an entry of `ProgramOptions`."""

import re
from pathlib import Path
from typing import Annotated, Literal, Required, TypedDict

import pytest

import manualpar as mp
from manualpar.core.model.options import (
    PROGRAM_OPTIONS,
    Option,
    check_options,
    explain_dtypes,
    explain_options,
    option_table,
    with_defaults,
)
from manualpar.strategies.registry import fields_of_options, values_of_options
from manualpar.strategies.shared_options import (
    PARAMETER_SHARDING,
    REPLICATED_SHARDING,
    STATE_SHARDING,
)

PAGE = Path(__file__).parents[3] / "docs" / "strategies.md"
ALL = {**PROGRAM_OPTIONS, **REPLICATED_SHARDING}


class Small(TypedDict, total=False):
    """Some options.

    Attributes:
      size: How many there are. More
        words.
      code: The code, over
        two lines.
      names: The names.
      whole: Whether it is whole.
    """

    size: Required[Annotated[int, Option(minimum=2, expected="2 or more", field="a.size")]]
    code: Annotated[Literal["x", "y"] | None, Option(field="a.code")]
    names: Annotated[tuple[str, ...], Option((), "a.names", expected="names")]
    whole: Annotated[bool, Option(True)]


TABLE = option_table(Small)


def test_an_entry_says_everything_of_an_option():
    assert [x.meaning for x in TABLE.values()] == [
        "How many there are.",
        "The code, over two lines.",
        "The names.",
        "Whether it is whole.",
    ]
    assert with_defaults({"size": 3}, TABLE) == {
        "size": 3, "code": None, "names": (), "whole": True
    }  # fmt: skip
    assert option_table(Small, beyond={"size": TABLE["size"]}).keys() == TABLE.keys() - {"size"}

    def builder():
        """Builds."""

    explain_options(builder, TABLE)
    assert builder.__doc__ == (
        "Builds.\n\nOptions:\n"
        "  size: int. How many there are.\n"
        "  code: 'x' | 'y' | None = None. The code, over two lines.\n"
        "  names: tuple[str, ...] = (). The names.\n"
        "  whole: bool = True. Whether it is whole."
    )


def test_a_config_has_the_fields_of_the_options_that_name_one():
    fields = fields_of_options(TABLE)
    assert [*fields] == ["size", "code", "names"]
    assert (fields["size"].kind, fields["size"].minimum) == (int, 2)
    assert (fields["code"].choices, fields["code"].default) == (("", "x", "y"), "")
    assert fields["names"].holds_names
    values = {"a.size": 4, "a.code": "", "a.names": ("head",), "b.other": 1}
    assert values_of_options(TABLE, values) == {"size": 4, "code": None, "names": ("head",)}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, TypeError, "build: size= is missing"),
        ({"size": 2, "codes": "x"}, TypeError, "'codes' is not an option.*did you mean 'code'"),
        ({"size": 1}, ValueError, "size=1, expected 2 or more"),
        ({"size": True}, ValueError, "size=True, expected 2 or more"),
        ({"size": 2, "code": "z"}, ValueError, "code='z', expected one of None, 'x', 'y'"),
        ({"size": 2, "names": ["head"]}, TypeError, r"names=\['head'\], expected names"),
        ({"size": 2, "names": (1,)}, TypeError, r"names=\(1,\), expected names"),
        ({"size": 2, "whole": 1}, ValueError, "whole=1, expected one of True, False"),
    ],
)
def test_what_an_entry_does_not_allow_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        check_options("build", options, TABLE)


@pytest.mark.parametrize("name", ALL)
def test_every_option_has_a_meaning_and_a_default_that_is_allowed(name):
    option = ALL[name]
    assert option.meaning.endswith(".")
    if not option.required:
        option.check("build", option.default)
    if option.field:
        field = fields_of_options(ALL)[name]
        assert field.allows(field.default)
        assert values_of_options(ALL, {option.field: field.default}) == {name: option.default}


@pytest.mark.parametrize(
    ("builder", "own"),
    [
        (mp.data_parallel, {}),
        (mp.zero, STATE_SHARDING),
        (mp.fsdp, PARAMETER_SHARDING),
        (mp.hsdp, REPLICATED_SHARDING),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_help_lists_the_options_of_a_builder(builder, own):
    listed = re.findall(r"^  (\w+): ", builder.__doc__.partition("\nOptions:\n")[2], re.MULTILINE)
    assert listed == [*PROGRAM_OPTIONS, *own]


@pytest.mark.parametrize("name", ALL)
def test_the_page_of_strategies_names_every_option(name):
    assert re.search(rf"`{name}\b", PAGE.read_text())


@pytest.mark.parametrize(
    ("said", "explained"),
    [
        ("requires equal dtypes, got bfloat16, float32", "fsdp: with gather_dtype='bfloat16'"),
        ("bfloat16[4]{V:stage} and float32[4]: the manual axis types do not match", "bfloat16"),
    ],
)
def test_only_errors_about_dtypes_are_explained_by_an_option_of_dtypes(said, explained):
    options = {"gather_dtype": "bfloat16", "param_dtype": None, "frozen_dtype": None}
    with pytest.raises(TypeError, match=f"^{explained}"), explain_dtypes("fsdp", options):
        raise TypeError(said)
