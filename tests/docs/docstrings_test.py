"""Public functions describe all that they take; others only what a name does not say."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator

import pytest

from docs.site.public_names import find_object, listed_names
from tests.paths import ROOT

# Every function raises these for a user's mistake, and their messages describe it.
MISTAKES = {"ValueError", "TypeError", "UsageError"}
# A noun for the argument: no shape, value, number or second thought; or its use in messages.
NOUN = re.compile(r"[^`;,.\d]*(, (for|in) (error )?messages)?\.")
# Words that begin the description of a function or a switch, or state a unit or a condition.
TELLING = re.compile(
    r"^(Called|Returns|Makes|Whether|Applie[sd]|Computes|Runs|Raises|How|Which|Decides|Chooses|Loads"
    r"|Encodes|Copies|Traces|Pairs|Renders|Maps|Begins)\b"
    r"|\b(default|seconds?|bytes?|inches|fraction|cycles|must|may|same|each|if|not|without|only"
    r"|divides)\b"
)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _listed() -> frozenset[str]:
    """Returns the full paths of all functions and classes on the first page of the reference."""
    objects = [find_object(name) for _, names in listed_names() for name in names]
    objects += [base for each in objects if inspect.isclass(each) for base in each.__mro__]
    plain = [inspect.unwrap(each) if inspect.isfunction(each) else each for each in objects]
    return frozenset(f"{each.__module__}.{each.__qualname__}" for each in plain)


def _functions(path: str, node: ast.AST) -> Iterator[tuple[str, FunctionNode]]:
    """Yields all functions in the body of a module, a class or a function, with their paths."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | FunctionNode):
            own = f"{path}.{child.name}"
            if isinstance(child, FunctionNode):
                yield own, child
            yield from _functions(own, child)
        elif not isinstance(child, ast.expr):
            yield from _functions(path, child)


def _is_listed(path: str, listed: frozenset[str]) -> bool:
    private = re.search(r"\._[a-z]", path)
    parts = path.split(".")
    return not private and any(".".join(parts[:n]) in listed for n in range(len(parts), 1, -1))


def _section(docstring: str, name: str) -> dict[str, str]:
    """Returns the entries of a section of a docstring, by what they describe."""
    found = re.search(rf"(?ms)^{name}:\n(.*?)(?=^\S|\Z)", docstring)
    entries = re.findall(r"(?ms)^  (\S[^:]*): (.*?)(?=^  \S|\Z)", found[1]) if found else []
    return {key: " ".join(text.split()) for key, text in entries}


def _arguments(node: FunctionNode) -> set[str]:
    args = node.args
    named = {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    stars = {"*": args.vararg, "**": args.kwarg}
    return named.union(f"{star}{arg.arg}" for star, arg in stars.items() if arg) - {"self", "cls"}


def findings(module: str, source: str, listed: frozenset[str]) -> list[str]:
    """Finds arguments of listed functions without a description, and idle ones of others."""
    found = []
    for path, node in _functions(module, ast.parse(source)):
        docstring = ast.get_docstring(node) or ""
        described = _section(docstring, "Args")
        if _is_listed(path, listed):
            missing = _arguments(node) - {x for key in described for x in key.split(", ")}
            found += [f"{path} does not describe {name}" for name in sorted(missing) if described]
            continue
        for name, text in described.items():
            if NOUN.fullmatch(text) and not TELLING.search(text):
                found.append(f"{path}, {name}: leave it out, because the name says it")
        for errors in _section(docstring, "Raises"):
            if set(errors.split(", ")) <= MISTAKES:
                found.append(f"{path}, {errors}: leave it out, because its message says it")
    return found


def test_docstrings_describe_what_their_readers_need():
    found = []
    for file in sorted((ROOT / "manualpar").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found += findings(module, file.read_text(encoding="utf-8"), _listed())
    assert found == []


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("Args:\n  x: The array.", "m.f, x: leave it out, because the name says it"),
        ("Args:\n  x: The strategy's name, for messages.", "m.f, x: leave it out"),
        ("Raises:\n  ValueError: Wrong.", "m.f, ValueError: leave it out, because its message"),
        ("Args:\n  x: `[B, S]`.\n\nRaises:\n  HeldError: Another process has it.", None),
        ("Args:\n  x: Returns the rank of a module.", None),
        ("Args:\n  x: The time in seconds.", None),
    ],
)
def test_an_idle_line_is_noticed(section, says):
    text = section.replace("\n", "\n    ")
    source = f'def f(x: int, y: int) -> None:\n    """Does it.\n\n    {text}\n    """'
    found = findings("m", source, frozenset())
    assert [each[: len(says)] for each in found] == [says] if says else found == []
    of_public = findings("m", source, frozenset({"m.f"}))
    assert of_public == (["m.f does not describe y"] if "Args" in section else [])
