"""Reads the TPU compiler's message about a program that does not fit into HBM.

The message has one of two forms. If the compiler has placed all buffers and they exceed HBM, the
message lists the largest buffers with their origins. If the compiler finds earlier that no
placement will fit, the message gives only the needed and the available bytes.
"""

import re
from typing import NamedTuple

from manualpar.inspect.scope_parsing import compiled_scopes, module_of, phase_of

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
NUM_NAMED = 5  # Buffers that the sentences name.
_SIZE = r"([\d.]+)([KMGTP]?)B?"
_PLACED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm. Exceeded hbm capacity by {_SIZE}\.")
_SEEN_BEFORE = re.compile(
    rf"total memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)
# A buffer is a paragraph: its size, then a line for each field, up to a line of `=====`.
_BUFFER = re.compile(rf"^\s*\d+\. Size: {_SIZE}[ \t]*$((?:\n(?!.*=====).*)*)", re.MULTILINE)


class OutOfMemory(NamedTuple):
    """The bytes that a program needs on a chip, and the available bytes; 0 if not known.

    `sentences` says how many bytes are missing, and names the largest buffers.
    """

    needed: int
    available: int
    sentences: tuple[str, ...]


def read_out_of_memory(message: str) -> OutOfMemory:
    """Parses the message of the compiler's `RESOURCE_EXHAUSTED`."""
    needed = available = over = 0
    if placed := _PLACED.search(message):
        needed, available, over = (_bytes(*placed.group(i, i + 1)) for i in (1, 3, 5))
    elif seen := _SEEN_BEFORE.search(message):
        needed, available = (_bytes(*seen.group(i, i + 1)) for i in (1, 3))
        over = max(0, needed - available)
    if not needed:
        words = " ".join(message.split())[:200]
        return OutOfMemory(needed, available, (f"Does not fit. The compiler reports: {words}",))
    is_small = over < 10 * UNITS["M"]
    missing = f"{over / UNITS['K']:.0f} KiB" if is_small else _gib(over)
    first = (
        f"Does not fit: a chip needs {_gib(needed)} and has {_gib(available)}, which is {missing} "
        "too little."
    )
    buffers = [(_bytes(*found.group(1, 2)), found[3]) for found in _BUFFER.finditer(message)]
    buffers.sort(key=lambda buffer: -buffer[0])
    named = [_describe(size, fields) for size, fields in buffers[:NUM_NAMED]]
    no_buffers = "The compiler stopped before it placed buffers, so it names none of them."
    return OutOfMemory(needed, available, (first, *(named or [no_buffers])))


def _describe(size: int, paragraph: str) -> str:
    """Describes a buffer: its bytes, its shape, and the module and operation that made it."""
    lines = (line.strip().partition(": ") for line in paragraph.splitlines())
    fields = {name: value for name, _, value in lines}
    label = fields.get("XLA label", "")
    described = f"{_gib(size)} are {fields.get('Shape', '').partition('{')[0] or label}"
    op_name = re.search(r'op_name="([^"]+)"', fields.get("Operator", ""))
    if not op_name:
        return f"{described} ({label.partition(' = ')[0]})."
    scope, primitive = compiled_scopes(op_name[1])[0], op_name[1].rpartition("/")[2]
    module = module_of(scope, root="Transformer") or "no module"
    return f"{described} of {module} ({phase_of(scope)}: {primitive})."


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])


def _gib(size: int) -> str:
    return f"{size / UNITS['G']:.2f} GiB"
