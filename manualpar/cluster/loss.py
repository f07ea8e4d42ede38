"""Who was lost, and how it showed."""

import dataclasses
from typing import Any, Self

CLOSED = "its connection closed"


@dataclasses.dataclass(frozen=True)
class Loss:
    """A process that the others cannot go on without.

    Attributes:
      process: Its number; `None` where it is one of them, and nobody knows which.
      host: The name of its host; empty where that is not known.
      pid: Its process id there, 0 where that is not known.
      reason: How it showed.
      is_failure: Whether it said itself that it failed, `reason` being its error.
    """

    process: int | None
    host: str
    pid: int
    reason: str
    is_failure: bool = False

    def __str__(self) -> str:
        if self.process is None:
            return f"the processes stand still: {self.reason}"
        where = f" on {self.host} (pid {self.pid})" if self.host else ""
        what = "failed" if self.is_failure else "was lost"
        return f"process {self.process}{where} {what}: {self.reason}"

    def to_message(self) -> dict[str, Any]:
        """The message that tells of it."""
        return {"kind": "lost", **dataclasses.asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """The loss that a message tells of."""
        return cls(**{field.name: message[field.name] for field in dataclasses.fields(cls)})


def describe_silence(seconds: float) -> str:
    """How it shows that a process is stopped, or the network between broken."""
    return f"it has been silent for {seconds:g} s"
