"""Finds the names of this package in prose, and the entries of the reference that describe them.

In prose a name is a code span: a full name such as `manualpar.core.mesh`, or a public name that
means nothing else, such as `make_mesh`, `fsdp(...)` or `Program.train_step`.
"""

import functools
import html
import importlib
import inspect
import re
from collections.abc import Collection
from typing import Any

import manualpar
from docs.site.public_names import listed_names

_FULL = re.compile(r"manualpar(?:\.[A-Za-z_]\w*)+")
_SHORT = re.compile(r"([A-Za-z]\w*)((?:\.\w+)*)(\(.*\))?", re.DOTALL)
_FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_DEFINED = re.compile(r"^ *(?:class|def) (\w+)", re.MULTILINE)
# An element in which code stays as it is, or else a code span.
_CODE = re.compile(r"<(pre|a|autoref|h[1-6])\b.*?</\1>|<code>([^<]+)</code>", re.DOTALL)


def link_names(page: str, defined: Collection[str] = ()) -> str:
    """Makes every name in the HTML of a page a link that mkdocs-autorefs resolves.

    Args:
      page: The HTML of a page.
      defined: Names that the page's own code defines, which stay as they are.
    """

    def link(found: re.Match[str]) -> str:
        name = name_in(html.unescape(found[2]), defined) if found[2] else None
        entry = find_entry(name) if name else None
        return f'<autoref identifier="{entry}">{found[0]}</autoref>' if entry else found[0]

    return _CODE.sub(link, page)


def names_defined(markdown: str) -> set[str]:
    """Returns the names of the classes and functions that the code of a page defines."""
    return {name for block in _FENCE.findall(markdown) for name in _DEFINED.findall(block)}


def missing_names(markdown: str) -> list[str]:
    """Returns the names in the prose of a page that do not exist."""
    spans = _SPAN.findall(_FENCE.sub("", markdown))
    names = [name_in(span, names_defined(markdown)) for span in spans]
    return [name for name in names if name and find_entry(name) is None]


def name_in(code: str, defined: Collection[str] = ()) -> str | None:
    """Returns the full name that a code span begins with; `None` if it is not one of our names."""
    if full := _FULL.match(code):
        return full[0]
    short = _SHORT.fullmatch(code)
    if short is None or short[1] in defined or short[1] not in _short_names():
        return None
    is_word = short[1].islower() and "_" not in short[1]
    if is_word and (not short[3] or short[1] not in manualpar.__all__):
        return None  # `fsdp` is also a strategy's name in configs.
    return _short_names()[short[1]] + short[2]


@functools.cache
def _short_names() -> dict[str, str]:
    """Returns the full names of the public names that one class or function has alone."""
    full: dict[str, list[str]] = {}
    for _, names in listed_names():
        for name in names:
            full.setdefault(name.rpartition(".")[2], []).append(name)
    return {short: names[0] for short, names in full.items() if len(names) == 1}


@functools.cache
def find_entry(name: str) -> str | None:
    """Returns the id of the entry that describes a full name; `None` if the name does not exist.

    A constant or a field has no entry of its own; the entry of its module or class describes it.
    """
    thing: Any = manualpar
    entry = thing.__name__
    for part in name.split(".")[1:]:
        if thing is None:
            return None
        try:
            thing = _member(thing, part)
        except (AttributeError, ModuleNotFoundError):
            return None
        # What a module has imported is its attribute too.
        if inspect.ismodule(thing) and not f"{name}.".startswith(f"{thing.__name__}."):
            return None
        entry = _entry_of(thing) or entry
    return entry


def _member(thing: Any, name: str) -> Any:
    """Returns a member of a module or class; `None` for a field that only instances have."""
    if inspect.isclass(thing):
        fields = {
            field for base in thing.__mro__ for field in vars(base).get("__annotations__", ())
        }
        fields.update(re.findall(r"^ *(\w+)(?: \(.*\))?:", thing.__doc__ or "", re.MULTILINE))
        is_field = name in fields and not hasattr(thing, name)
        return None if is_field else inspect.getattr_static(thing, name)
    if hasattr(thing, name):
        return getattr(thing, name)
    if not inspect.ismodule(thing):
        raise AttributeError(name)
    return importlib.import_module(f"{thing.__name__}.{name}")


def _entry_of(thing: Any) -> str | None:
    """Returns the id of the entry of a module, class, function or property that has one."""
    if inspect.ismodule(thing):
        return thing.__name__
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    elif isinstance(thing, property):
        thing = thing.fget
    elif isinstance(thing, functools.cached_property):
        thing = thing.func
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if not hasattr(thing, "__qualname__") or not thing.__doc__:
        return None
    path = f"{thing.__module__}.{thing.__qualname__}"
    is_public = "._" not in path and "<" not in path
    return path if path.startswith("manualpar.") and is_public else None
