"""The table of attention on TPUs, without the compiler."""

import jax
import pytest

from benchmarks import attention


def test_each_kind_has_a_row_and_what_does_not_fit_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        attention,
        "compile_layer",
        lambda args, name, length, kind: (
            "Does not fit: 1 GiB too little." if kind == "xla" else (2.0**21, 0.25, 0.125, 1)
        ),
    )
    for name in attention.ENVIRONMENT:
        monkeypatch.setenv(name, "")
    platforms = jax.config.values["jax_platforms"]
    arguments = ["--topologies", "v5e:2x2", "--lengths", "2048", "--kinds", "splash", "xla"]
    assert attention.main(arguments) == 0
    jax.config.update("jax_platforms", platforms)
    lines = capsys.readouterr().out.splitlines()
    assert "| v5e:2x2 | 2,048 | splash | 2 | 250.00 | 125.00 | 1 |" in lines
    assert lines[-1].startswith("| v5e:2x2 | 2,048 | xla | Does not fit: 1 GiB")
    assert lines[-1].count("|") == len(attention.HEADER) + 1
