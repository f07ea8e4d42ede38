"""Trains with a program: config, data, loss, optimizer, training loop, checkpoints and progress.

`fit` trains a model of one's own. `manualpar.core` does not import this package. So you can use the
package, copy parts of it, or write your own training loop. The package needs the extra `train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from manualpar.errors import TRAIN, require

if TYPE_CHECKING:
    from manualpar.training.fields import Fields
    from manualpar.training.fitting import Fit, fit
    from manualpar.training.hooks import Hook
    from manualpar.training.task import Task

require("manualpar.training", *TRAIN)

__all__ = ["Fields", "Fit", "Hook", "Task", "fit"]
# They are imported at their first use, because most modules of the package need none of them.
_MODULES = {
    "Fields": "fields",
    "Fit": "fitting",
    "Hook": "hooks",
    "Task": "task",
    "fit": "fitting",
}


def __getattr__(name: str) -> Any:
    """Imports a public name of this package."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
