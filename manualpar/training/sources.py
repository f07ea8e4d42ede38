"""Hashes of a user's sources, which must be equal in all processes of a run."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from manualpar.errors import LIBRARIES
from manualpar.system.cluster.facts import Facts
from manualpar.system.cluster.software import PACKAGE, hash_files


def source_facts(*modules: str, files: Iterable[Path] = ()) -> Facts:
    """Hashes the sources of the running script, of modules and of files, without this package.

    Args:
      *modules: Names of modules. If a module is in a package, all files of the package count. A
        module that is not loaded, or is an installed library, does not count.
      files: Files of Python, and with each of them the loaded modules of its folder.

    Returns:
      A hash by the name of each source.
    """
    facts = {}
    given = [path.absolute() for path in files]
    folders = {path.parent for path in given}
    loaded = {name: _file_of(name) for name in list(sys.modules)}
    named = [path for name in ("__main__", *modules) for path in _sources(name)]
    beside = [path for path in loaded.values() if path and path.parent in folders]
    for path in dict.fromkeys([*given, *named, *beside]):
        if not path.is_relative_to(PACKAGE):
            facts[f"the hash of {path.parent.name}/{path.name}"] = hash_files([path])
    return facts


def _sources(module: str) -> Iterator[Path]:
    package = getattr(sys.modules.get(module), "__package__", "") or ""
    root = _file_of(package.partition(".")[0])
    if root and root.name == "__init__.py":
        yield from sorted(root.parent.rglob("*.py"))
    elif path := _file_of(module):
        yield path


def _file_of(module: str) -> Path | None:
    """Returns the Python file of a loaded module; `None` for libraries and what has no file."""
    name = getattr(sys.modules.get(module), "__file__", None)
    path = Path(name).absolute() if isinstance(name, str) else None
    if path is None or path.suffix != ".py" or not path.is_file():
        return None
    return None if any(path.is_relative_to(folder) for folder in LIBRARIES) else path
