"""Describes in sentences how the processes of a run differ.

A fact has to be the same in every process: a field of the config, a version, the fingerprint of the
data. Users know the name of a fact; the value of a fact is text.
"""

import os
from collections.abc import Mapping

from manualpar.core.state.state_arrays import list_some

MAX_VALUE_CHARACTERS = 200

Facts = Mapping[str, str]


class DisagreementError(ValueError):
    """The processes of a run differ in their facts; every process raises this error."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(
            "the processes of this run differ, expected the same in all of them:\n"
            + "\n".join(f"  {line}" for line in differences)
        )


def describe_differences(facts: Mapping[int, Facts]) -> list[str]:
    """Compares the facts of the processes, given by process number.

    Each difference is a sentence such as `config.seed is 42 in process 0 and 3 in process 1`. If
    there are many, the last sentence counts the rest.
    """
    sentences = []
    for name in dict.fromkeys(name for process in sorted(facts) for name in facts[process]):
        holders: dict[str, list[int]] = {}
        for process in sorted(facts):
            holders.setdefault(facts[process].get(name, "absent"), []).append(process)
        if len(holders) > 1:
            parts = [f"{_shorten(value)} in {name_processes(p)}" for value, p in holders.items()]
            sentences.append(f"{name} is {' and '.join(parts)}")
    return list_some(sentences)


def announce(sentence: str) -> None:
    """Writes a sentence to standard error, without Python's buffers and their locks."""
    os.write(2, f"{sentence}\n".encode(errors="backslashreplace"))


def name_processes(processes: list[int]) -> str:
    """Formats the numbers of processes: `process 1`, `processes 1, 3`."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."
