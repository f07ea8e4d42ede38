"""The text of an optimised HLO module: its computations, and what calls what how often.

The text is the only public form of a compiled program. Its computations begin in the first column,
each instruction stands on a line further in: `name = shape opcode(operands), attributes`.

How often a loop runs XLA:CPU and XLA:GPU write at the loop. XLA:TPU does not, but a loop that
counts says it all the same: it begins with a constant, adds a constant, and goes on while it is
less than a third.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# A tuple's shape has spaces, none of them before a word and a parenthesis.
_INSTRUCTION = r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)"

# They hand a value on as it is.
_COPIES = frozenset({"copy", "bitcast", "opt-barrier"})


class Instruction(NamedTuple):
    """What a line of HLO says, but for its name.

    Attributes:
      shape: The shape of its result, as HLO writes it.
      opcode: What it does.
      operands: The names of what it does that to; of a constant its value.
      attributes: The rest of the line.
      is_root: Whether its result is that of its computation.
    """

    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """The name stack and primitive that it comes from, "" where XLA has kept none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """The computations that it runs, but for a loop's."""
        one = r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
        several = r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
        listed = ",".join(re.findall(several, self.attributes))
        return re.findall(one, self.attributes) + re.findall(r"[\w.\-]+", listed)

    @property
    def loop(self) -> tuple[str, str]:
        """The condition and the body of a `while`."""
        found = dict(re.findall(r"\b(body|condition)=%?([\w.\-]+)", self.attributes))
        return found["condition"], found["body"]


Computation = Mapping[str, Instruction]  # By name, in the order of the text.


class Module(NamedTuple):
    """A program: its computations by name, which one is run, and on how many devices."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse_module(text: str) -> Module:
    """Reads a module.

    Raises:
      ValueError: The text is not optimised HLO.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entries, current = [], ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = header[2]
            computations[current] = {}
            entries += [current] if header[1] else []
        elif current and (parts := re.match(_INSTRUCTION, line)):
            root, name, shape, opcode, operands, attributes = parts.groups()
            names = re.findall(r"[\w.\-]+", re.sub(r"/\*.*?\*/", "", operands))
            one = Instruction(shape, opcode, tuple(names), attributes, bool(root))
            computations[current][name] = one
    if len(entries) != 1:
        raise ValueError(
            f"compiled_collectives: the text has {len(entries)} ENTRY computations, expected the "
            "one of optimised HLO. Pass jax.jit(f).lower(*args).compile(), which a Lowered is not "
            "yet."
        )
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.splitlines()[0])
    return Module(computations, entries[0], math.prod(map(int, counts)))


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of the arrays in a shape, `f32[8,16]{1,0}` or a tuple of such."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of an array: HLO's dtypes carry their bits in their names, but for `pred`."""
    bits = re.match(r"[a-z]+(\d+)", dtype.replace("pred", "pred8"))
    return -(-math.prod(shape) * int(bits[1]) // 8) if bits else 0


def trip_count(module: Module, around: Computation, loop: Instruction) -> int | None:
    """How often the body of a loop runs, as far as the text says it.

    Args:
      module: The module.
      around: The computation that the loop is in.
      loop: A `while`.

    Returns:
      The number; `None` if XLA has written none, and the loop does not count from a constant to a
      constant by a constant.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition, body = (module.computations[name] for name in loop.loop)
    test = _root(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, end = (_origin(condition, name) for name in test.operands)
    if counter is None or counter.opcode != "get-tuple-element":
        return None
    index = _index(counter)
    begin = _element(around, _origin(around, loop.operands[0]), index)
    step = _increment(body, _element(body, _root(body), index), index)
    first, last = _integer(begin), _integer(end)
    if first is None or last is None or step is None or step < 1:
        return None
    return max(0, -((first - last) // step))


def _root(computation: Computation) -> Instruction | None:
    """What a computation results in."""
    return next((one for one in computation.values() if one.is_root), None)


def _origin(computation: Computation, name: str) -> Instruction | None:
    """The instruction of that name, or what it is a copy of."""
    found = computation.get(name)
    while found and found.opcode in _COPIES:
        found = computation.get(found.operands[0])
    return found


def _element(computation: Computation, given: Instruction | None, index: int) -> Instruction | None:
    """What stands in a tuple."""
    is_tuple = given is not None and given.opcode == "tuple"
    return _origin(computation, given.operands[index]) if given and is_tuple else None


def _index(element: Instruction) -> int:
    """Which element of a tuple is taken."""
    found = re.search(r"\bindex=(\d+)", element.attributes)
    return int(found[1]) if found else -1


def _integer(constant: Instruction | None) -> int | None:
    """The value of an integer constant."""
    if constant is None or constant.opcode != "constant" or len(constant.operands) != 1:
        return None
    return int(constant.operands[0]) if re.fullmatch(r"-?\d+", constant.operands[0]) else None


def _increment(body: Computation, step: Instruction | None, index: int) -> int | None:
    """What is added to the counter in each round, `None` if something else is done to it."""
    if step is None or step.opcode != "add":
        return None
    terms = list(_terms(body, step))
    numbers = [number for term in terms if (number := _integer(term)) is not None]
    counters = [
        term for term in terms if term.opcode == "get-tuple-element" and _index(term) == index
    ]
    return numbers[0] if len(numbers) == len(counters) == 1 else None


def _terms(computation: Computation, sum_: Instruction) -> Iterator[Instruction]:
    """What a sum consists of."""
    found = (_origin(computation, name) for name in sum_.operands)
    yield from (term for term in found if term is not None)
