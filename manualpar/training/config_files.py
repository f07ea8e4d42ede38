"""Finds config files by their names; the package brings the configs of its repository with it.

A config has a name, such as `fsdp_lm` or `plan/llama3_8b`, or is a file of one's own, such as
`my_config.py`. In the repository the package's configs are in `configs/`. A wheel has them in
`manualpar/configs/`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from manualpar.errors import UsageError, nearest

PACKAGE = Path(__file__).parents[1]


def config_folder() -> Path:
    """Returns the folder with the configs of the package."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def find_config(text: str) -> Path:
    """Returns the file of a config, given its name or a path that ends in `.py`.

    The file of a path may be missing; `load_config` refuses it.

    Raises:
      UsageError: There is no config of this name.
    """
    if Path(text).suffix:
        return Path(text)
    names = dict(named_configs())
    if text not in names:
        raise UsageError(
            f"--config={text}: there is no config of this name; the nearest one is "
            f"{nearest(text, names)!r}, and `manualpar configs` lists all. A file of your own ends "
            "in .py."
        )
    return names[text]


def named_configs() -> Iterator[tuple[str, Path]]:
    """Yields the name and the file of each config of the package, in the order of their names."""
    folder = config_folder()
    files = (path for path in folder.rglob("*.py") if path.name != "__init__.py")
    for path in sorted(files, key=lambda path: (len(path.parts), path)):
        yield path.relative_to(folder).with_suffix("").as_posix(), path


def first_sentence(path: Path) -> str:
    """Returns the first line of a config's docstring; the file is not executed."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
