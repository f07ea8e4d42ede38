"""Imports a function of a user that a config names, as `module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def find_function(name: str) -> Callable[..., Any]:
    """Imports the function `module:function` of `config.model.name`.

    The current folder is searched too, but last.

    Raises:
      ValueError: There is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise ValueError(
            f"config.model.name is {name!r}, and there is no module {error.name!r} beside the "
            f"config, in {os.getcwd()} or in Python's path; run the command in its folder."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"config.model.name is {name!r}, and {module.__file__} has no function "
            f"{function_name!r}, expected one that takes the config and returns a Task."
        )
    return function
