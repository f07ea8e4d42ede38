"""In what the processes of a run differ, in sentences.

A fact is anything that has to be the same in every process: a field of the config, a version, the
fingerprint of the data. Its name is what a user knows it by, its value is text.
"""

from collections.abc import Mapping

# So many differences are told; the first few say what went wrong.
MAX_DIFFERENCES = 5
MAX_VALUE_CHARACTERS = 200
ABSENT = "absent"

Facts = Mapping[str, str]


class DisagreementError(ValueError):
    """The processes of a run differ in what has to be the same; each of them has this error."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(
            "the processes of this run differ, expected the same in all of them:\n"
            + "\n".join(f"  {line}" for line in differences)
        )


def describe_differences(facts: Mapping[int, Facts]) -> list[str]:
    """Compares what the processes say.

    Args:
      facts: The facts of each process, by its number.

    Returns:
      A sentence for each fact that differs, such as `config.seed is 42 in process 0 and 3 in
      process 1`, at most `MAX_DIFFERENCES` and one that counts the rest.
    """
    names = dict.fromkeys(name for process in sorted(facts) for name in facts[process])
    sentences = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process in sorted(facts):
            holders.setdefault(facts[process].get(name, ABSENT), []).append(process)
        if len(holders) > 1:
            parts = [
                f"{_shorten(value)} in {name_processes(who)}" for value, who in holders.items()
            ]
            sentences.append(f"{name} is {' and '.join(parts)}")
    if len(sentences) > MAX_DIFFERENCES:
        rest = len(sentences) - MAX_DIFFERENCES
        return [*sentences[:MAX_DIFFERENCES], f"and {rest} more"]
    return sentences


def name_processes(processes: list[int]) -> str:
    """Processes by their numbers: `process 1`, `processes 1, 3`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {', '.join(map(str, processes))}"


def _shorten(value: str) -> str:
    """A value that fits into a sentence."""
    return value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."
