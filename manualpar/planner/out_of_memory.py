"""What XLA's TPU compiler says of a program that does not fit into HBM, in numbers.

It says so in one of two forms. Where it has placed all buffers and some are too much, it lists the
largest of them with what they are made from. Where it sees before that nothing will do, it says no
more than how much would be needed and how much there is: of that it does not know the parts.
"""

import dataclasses
import re
from collections.abc import Iterator

from manualpar.inspect.scopes import compiled_scopes, module_of, phase_of

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
NUM_NAMED = 5
_SIZE = r"([\d.]+)([KMGTP]?)B?"
_PLACED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm. Exceeded hbm capacity by {_SIZE}\.")
_SEEN_BEFORE = re.compile(
    rf"total memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)
_BUFFER = re.compile(rf"^\s*\d+\. Size: {_SIZE}\s*$")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer that the compiler names.

    Attributes:
      size: Its bytes.
      shape: Its shape as HLO writes it, "" if it has none.
      label: What it is to the compiler: an instruction, an argument, an output.
      scope: Where it comes from, "" where that is not said.
    """

    size: int
    shape: str
    label: str
    scope: str

    def sentence(self) -> str:
        """What to say of it."""
        what = self.shape.partition("{")[0] or self.label
        if not self.scope:
            return f"{_gib(self.size)} are {what} ({self.label.partition(' = ')[0]})."
        scope = compiled_scopes(self.scope)[0]
        module = module_of(scope, root="Transformer") or "no module"
        how = f"{phase_of(scope)}: {_primitive(self.scope)}"
        return f"{_gib(self.size)} are {what} of {module} ({how})."


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """A program that does not fit.

    Attributes:
      needed: The bytes that it needs on a chip, 0 where the message does not say.
      available: The bytes that there are, likewise.
      over: How much is too much, likewise.
      buffers: The largest ones, as far as they are named.
      message: The beginning of the compiler's own message.
    """

    needed: int
    available: int
    over: int
    buffers: tuple[Buffer, ...]
    message: str

    def sentences(self) -> tuple[str, ...]:
        """What to say of it: how much is too much, and the largest buffers."""
        if not self.needed:
            return (f"Does not fit, says the compiler: {self.message}",)
        over = (
            _gib(self.over) if self.over >= UNITS["M"] * 10 else f"{self.over / UNITS['K']:.0f} KiB"
        )
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
      message: The message of its `RESOURCE_EXHAUSTED`, in one of the forms above; of another one
        nothing is known but itself.

    Returns:
      What it says, the largest buffers first.
    """
    buffers = tuple(sorted(_buffers(message), key=lambda buffer: -buffer.size))
    short = " ".join(message.split())[:200]
    if placed := _PLACED.search(message):
        sizes = placed.groups()
        needed, available, over = (_bytes(*sizes[i : i + 2]) for i in (0, 2, 4))
        return OutOfMemory(needed, available, over, buffers, short)
    if seen := _SEEN_BEFORE.search(message):
        needed, available = _bytes(*seen.groups()[:2]), _bytes(*seen.groups()[2:])
        return OutOfMemory(needed, available, max(0, needed - available), buffers, short)
    return OutOfMemory(0, 0, 0, buffers, short)


def _buffers(message: str) -> Iterator[Buffer]:
    """The buffers that are listed, each a paragraph with a field a line."""
    lines = message.splitlines()
    for index, line in enumerate(lines):
        if size := _BUFFER.match(line):
            fields: dict[str, str] = {}
            for field in lines[index + 1 :]:
                if "=====" in field:
                    break
                name, _, value = field.strip().partition(": ")
                fields[name] = value
            op_name = re.search(r'op_name="([^"]*)"', fields.get("Operator", ""))
            yield Buffer(
                size=_bytes(*size.groups()),
                shape=fields.get("Shape", ""),
                label=fields.get("XLA label", ""),
                scope=op_name[1] if op_name else "",
            )


def _bytes(number: str, unit: str) -> int:
    """The bytes of a size such as `15.75G`."""
    return round(float(number) * UNITS[unit])


def _gib(size: int) -> str:
    """Bytes for people to read."""
    return f"{size / UNITS['G']:.2f} GiB"


def _primitive(op_name: str) -> str:
    """The primitive at the end of an `op_name`."""
    return op_name.rpartition("/")[2]
