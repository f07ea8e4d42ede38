"""A worker of a compiler that answers as a test says."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manualpar.plans import compiler_process
from manualpar.plans.compiler_worker import PROGRAM, RESULT

FACTS = {
    "compiler": "libtpu 0.0.42",
    "num_devices": 16,
    "name": "fsdp manual",
    "mesh": {"data": 16},
    "order": [],
    "links": "data: along xy",
    "places": [(0, x, y, 0) for x in range(4) for y in range(4)],
    "kernels": [],
    "options": {"xla_some": "true"},
    "why_options": "by the chip",
    "state": {"parameters": 400, "optimizer": 800, "batch": 30},
    "dtype": "bfloat16",
    "examples_per_step": 32,
    "tokens_per_example": 10,
    "flops_per_example": 1e9,
}


def answer(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any] | None, **more: Any) -> None:
    """Lets a worker give an answer, or `None`; what else it does is said by name."""

    def run(command: list[str], *, stderr: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-1])
        if more.get("is_slow"):
            raise subprocess.TimeoutExpired(command, 1)
        if result is not None:
            (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
        (folder / PROGRAM).write_text(more.get("text", ""), encoding="utf-8")
        stderr.write(more.get("stderr", ""))
        return subprocess.CompletedProcess(command, more.get("returncode", 0))

    monkeypatch.setattr(compiler_process.subprocess, "run", run)
