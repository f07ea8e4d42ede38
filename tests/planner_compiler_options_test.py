import pytest

from manualpar.planner.compiler_options import ASYNCHRONOUS, compiler_options
from manualpar.planner.hardware import CHIPS


def test_default_is_the_compilers_own() -> None:
    assert compiler_options("v5e") == {}
    assert compiler_options("h100") == {}


def test_every_tpu_has_options_to_overlap() -> None:
    for chip in CHIPS:
        if chip.is_tpu:
            options = compiler_options(chip.name, "asynchronous")
            assert any(name.startswith("xla_enable_async") for name in options)
    assert set(ASYNCHRONOUS) == {chip.name for chip in CHIPS if chip.is_tpu}


def test_other_options_win() -> None:
    name = "xla_enable_async_all_gather"
    found = compiler_options("v6e", "asynchronous", others={name: "false", "xla_more": "1"})
    assert found[name] == "false"
    assert found["xla_more"] == "1"
    assert ASYNCHRONOUS["v6e"][name] == "true"


def test_unknown_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="chip is 'h100', expected one of v4, v5e"):
        compiler_options("h100", "asynchronous")
    with pytest.raises(ValueError, match="overlap is 'none', expected one of 'default'"):
        compiler_options("v5e", "none")  # type: ignore[arg-type]
