"""The public names and the config fields of the latest release, which the next release keeps.

    python -m tests.house.released > tests/house/released.json

writes those of the code as it is: run it for each release.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

import manualpar
from manualpar.strategies import strategy_kinds
from manualpar.training.config import FIELDS, MODEL_FIELDS
from tests.paths import ROOT

FILE = ROOT / "tests" / "house" / "released.json"


def read() -> dict[str, Any]:
    """Returns the version, the names by package, and the fields of the latest release."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def public_names() -> dict[str, list[str]]:
    """Returns what `__all__` of each package says, without importing the packages."""
    found = {}
    for path in sorted((ROOT / "manualpar").rglob("__init__.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                package = ".".join(path.parent.relative_to(ROOT).parts)
                found[package] = sorted(ast.literal_eval(node.value))
    return found


def config_fields() -> list[str]:
    """Returns the names of all fields of all models and strategies."""
    groups: list[Mapping[str, Any]] = [FIELDS, *MODEL_FIELDS.values()]
    own = {f"parallel.{name}" for kind in strategy_kinds().values() for name in kind.fields}
    return sorted(own.union(*groups))


if __name__ == "__main__":
    now = {
        "version": manualpar.__version__,
        "names": public_names(),
        "fields": config_fields(),
    }
    print(json.dumps(now, indent=1))
