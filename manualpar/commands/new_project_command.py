"""Writes a small project of one's own: model, loss, data, config, command and test.

manualpar new my_project        # then: cd my_project; python train.py
"""

import re
from collections.abc import Sequence
from pathlib import Path

from manualpar.errors import MODULES, TRAIN, USAGE_EXIT_CODE, UsageError, print_error
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.system.storage.untrusted import write_file

TEMPLATE = Path(__file__).parent / "new_project"


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`; returns the exit code."""
    usage = (__doc__ or "").replace("manualpar new", "{program}")
    folder = Flag("The folder, new or empty.", Path, is_argument=True, is_required=True)
    flags = parse_flags(argv, usage, {"folder": folder})
    try:
        names = write_project(flags.folder)
    except UsageError as error:
        print_error(error)
        return USAGE_EXIT_CODE
    print(f"{flags.folder}: {', '.join(names)}")
    needed = " ".join([*(MODULES[module][1] for module in TRAIN), "pytest"])
    print(f"it needs: pip install {needed}")
    print(f"next: cd {flags.folder}; python train.py; python -m pytest")
    return 0


def write_project(folder: Path) -> list[str]:
    """Writes the project into a folder, and returns the names of its files."""
    if not re.search(r"\w", folder.absolute().name):
        raise UsageError(f"{str(folder)!r} is no folder's name, expected one such as my_project.")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not empty; name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(path for path in TEMPLATE.iterdir() if path.is_file())
        for path in files:
            text = path.read_text(encoding="utf-8").replace("{name}", folder.absolute().name)
            write_file(folder / path.name, text)
    except OSError as error:
        raise UsageError(f"the project cannot be written: {error}; name another folder.") from error
    return [path.name for path in files]
