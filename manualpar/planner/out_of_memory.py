"""Reads what XLA's TPU compiler says about a program that does not fit into HBM.

Its message has one of two forms. If it has placed all buffers and some are too much, it lists the
largest of them with their origins. If it sees before that nothing will do, it says only how much
would be needed and how much there is.
"""

import dataclasses
import re
from collections.abc import Iterator

from manualpar.inspect.provenance import compiled_scopes, module_of, phase_of

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
NUM_NAMED = 5
_SIZE = r"([\d.]+)([KMGTP]?)B?"
_PLACED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm. Exceeded hbm capacity by {_SIZE}\.")
_SEEN_BEFORE = re.compile(
    rf"total memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)
# A buffer is a paragraph: its size, then a line for each field, up to a ruler.
_BUFFER = re.compile(rf"^\s*\d+\. Size: {_SIZE}[ \t]*$((?:\n(?!.*=====).*)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer that the compiler names.

    Attributes:
      size: Its bytes.
      shape: Its shape as HLO writes it, "" if it has none.
      label: The compiler's name for it: an instruction, an argument, an output.
      scope: The scope of its operation, "" where that is not said.
    """

    size: int
    shape: str
    label: str
    scope: str

    def sentence(self) -> str:
        """A sentence for people: its size, and where it comes from."""
        shown = f"{_gib(self.size)} are {self.shape.partition('{')[0] or self.label}"
        if not self.scope:
            return f"{shown} ({self.label.partition(' = ')[0]})."
        scope, primitive = compiled_scopes(self.scope)[0], self.scope.rpartition("/")[2]
        module = module_of(scope, root="Transformer") or "no module"
        return f"{shown} of {module} ({phase_of(scope)}: {primitive})."


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """A program that does not fit; sizes are 0 where the message does not say them.

    Attributes:
      needed: The bytes that it needs on a chip.
      available: The bytes that there are.
      over: The bytes that are too much.
      buffers: The largest ones, as far as they are named.
      message: The beginning of the compiler's own message.
    """

    needed: int
    available: int
    over: int
    buffers: tuple[Buffer, ...]
    message: str

    def sentences(self) -> tuple[str, ...]:
        """Sentences for people: how much is too much, and the largest buffers."""
        if not self.needed:
            return (f"Does not fit, says the compiler: {self.message}",)
        is_small = self.over < 10 * UNITS["M"]
        over = f"{self.over / UNITS['K']:.0f} KiB" if is_small else _gib(self.over)
        first = (
            f"Does not fit: {over} a chip too much, {_gib(self.needed)} are needed and "
            f"{_gib(self.available)} are there."
        )
        if not self.buffers:
            named = "The compiler gave up before it placed buffers, so it names none of them."
            return (first, named)
        return (first, *(buffer.sentence() for buffer in self.buffers[:NUM_NAMED]))


def read_out_of_memory(message: str) -> OutOfMemory:
    """Reads the compiler's message.

    Args:
      message: The message of its `RESOURCE_EXHAUSTED`. If it has neither of the two forms, nothing
        is known but the message.

    Returns:
      What it says, the largest buffers first.
    """
    buffers = tuple(sorted(_buffers(message), key=lambda buffer: -buffer.size))
    needed = available = over = 0
    if placed := _PLACED.search(message):
        needed, available, over = (_bytes(*placed.group(i, i + 1)) for i in (1, 3, 5))
    elif seen := _SEEN_BEFORE.search(message):
        needed, available = (_bytes(*seen.group(i, i + 1)) for i in (1, 3))
        over = max(0, needed - available)
    return OutOfMemory(needed, available, over, buffers, " ".join(message.split())[:200])


def _buffers(message: str) -> Iterator[Buffer]:
    for found in _BUFFER.finditer(message):
        lines = (line.strip().partition(": ") for line in found[3].splitlines())
        fields = {name: value for name, _, value in lines}
        op_name = re.search(r'op_name="([^"]*)"', fields.get("Operator", ""))
        yield Buffer(
            size=_bytes(found[1], found[2]),
            shape=fields.get("Shape", ""),
            label=fields.get("XLA label", ""),
            scope=op_name[1] if op_name else "",
        )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])


def _gib(size: int) -> str:
    return f"{size / UNITS['G']:.2f} GiB"
