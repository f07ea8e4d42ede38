"""Mutation test of the schedules of pipelines: each operation is got wrong in turn.

python -m benchmarks.schedule_mutations [--only TEXT] [--list]

`mutations` does this to collectives. Here the mutants are of `MODULES`, which are plain Python: a
condition is negated, a comparison is another one, a number is one more, a plus is a minus, and what
is raised is not. A mutant is killed if one of `TESTS` fails, or if they compute for half a minute.
Mutants that do the same are in `EQUIVALENT`, with the reason.
"""

import argparse
import ast
import copy
import functools
import importlib
import os
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "manualpar.layers.pipeline"
MODULES = ("schedule_table", "schedule_check", "schedules")  # Each imports those before it.
TESTS = ("tests/pipeline_schedule_check_test.py", "tests/pipeline_schedules_test.py")
TIMEOUT = 30  # Seconds of computing.
OTHER: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
# By the beginning of the name.
EQUIVALENT: dict[str, str] = {}


class Mutation(NamedTuple):
    """A part of a module's source from one byte to another, and what stands there instead."""

    module: str
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """Such as `schedules:12: a < b -> a <= b`."""
        return f"{self.module}:{self.line}: {self.old} -> {self.new}"


def find_mutations(module: str, source: str) -> Iterator[Mutation]:
    """All mutations of the functions of a module."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    statements = [statement for function in functions for statement in function.body]
    for node in (node for statement in statements for node in ast.walk(statement)):
        for old, new in _mutate(node):
            assert old.end_lineno is not None
            assert old.end_col_offset is not None
            yield Mutation(
                module,
                old.lineno,
                starts[old.lineno - 1] + old.col_offset,
                starts[old.end_lineno - 1] + old.end_col_offset,
                ast.unparse(old),
                new if isinstance(old, ast.stmt) else f"({new})",
            )


def _mutate(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The parts of a node that are got wrong, and how they are written then."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, f"not ({ast.unparse(node.test)})"
    elif isinstance(node, ast.comprehension):
        yield from ((test, f"not ({ast.unparse(test)})") for test in node.ifs)
    elif isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            if type(op) in OTHER:
                other = copy.deepcopy(node)
                other.ops[index] = OTHER[type(op)]()
                yield node, ast.unparse(other)
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        other_sum = copy.deepcopy(node)
        other_sum.op = OTHER[type(node.op)]()
        yield node, ast.unparse(other_sum)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
    elif isinstance(node, ast.Raise):
        yield node, "pass"


def find_tests() -> Iterator[tuple[str, Callable[[], None]]]:
    """The names of all tests, with their parameters, and the tests, from fresh modules."""
    for path in map(Path, TESTS):
        tests = runpy.run_path(str(ROOT / path))
        for name, test in tests.items():
            if name.startswith("test_"):
                marks = getattr(test, "pytestmark", [])
                parameters = [mark.args for mark in marks if mark.name == "parametrize"]
                assert len(parameters) < 2
                for names, several in parameters or [((), ((),))]:
                    for values in several:
                        given = (values,) if isinstance(names, str) else values
                        yield f"{path.stem}::{name}", functools.partial(test, *given)


def run_tests(sources: Mapping[str, str]) -> str:
    """The first test that fails with such sources of the modules; `""` if none does.

    The tests run in a child, in which nothing has to be imported again.
    """
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as pipe:
            failed = pipe.read()
        _, status = os.waitpid(child, 0)
        return "timeout" if os.WIFSIGNALED(status) else failed
    signal.setitimer(signal.ITIMER_VIRTUAL, TIMEOUT)  # Ends the child by a signal.
    failed = "import"
    try:
        for module_name in MODULES:
            module = importlib.import_module(f"{PACKAGE}.{module_name}")
            exec(compile(sources[module_name], str(module.__file__), "exec"), module.__dict__)
        for name, test in find_tests():
            failed = name
            test()
        failed = ""
    except BaseException:  # `pytest.raises` fails with one that is no `Exception`.
        pass
    os.write(writing, failed.encode())
    os._exit(0)


def main() -> None:
    """Runs the mutants and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run mutants with this in their name")
    parser.add_argument("--list", action="store_true", help="list the mutants and end")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    folder = ROOT.joinpath(*PACKAGE.split("."))
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    found = [m for name, source in sources.items() for m in find_mutations(name, source)]
    if not arguments.list and (failed := run_tests(sources)):
        sys.exit(f"{failed} fails without a mutation")
    outcomes: Counter[str] = Counter()
    for mutant in found:
        if arguments.only not in mutant.name:
            continue
        same = [why for name, why in EQUIVALENT.items() if name in mutant.name]
        if arguments.list or same:
            print(mutant.name, *(f"(the same: {why})" for why in same))
            continue
        source = sources[mutant.module].encode()
        changed = source[: mutant.start] + mutant.new.encode() + source[mutant.end :]
        killer = run_tests({**sources, mutant.module: changed.decode()})
        print("killed  " if killer else "SURVIVED", mutant.name, killer, flush=True)
        outcomes[killer or "survived"] += 1
    killed = outcomes.total() - outcomes["survived"]
    print(f"killed {killed} of {outcomes.total()}")
    for name, number in outcomes.most_common():
        print(f"{number:5} {name}")


if __name__ == "__main__":
    main()
