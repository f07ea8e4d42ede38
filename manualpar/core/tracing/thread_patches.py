"""Replaces functions of other packages temporarily, and only in the calling thread.

Other threads keep the old functions. Replacements by several threads may overlap: the one that
begins first may also end first.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced_in_thread(
    targets: Iterable[tuple[Any, str]], replacement: Callable[[str, Any], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces functions while the context is open.

    Args:
      targets: The class or module of each function, and the function's name in it.
      replacement: Returns the new function, given the name and the old function.
    """
    thread, targets = threading.get_ident(), list(targets)

    def in_thread(name: str, old: Any) -> Any:
        new = replacement(name, old)

        @functools.wraps(old)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else old)(*args, **kwargs)

        vars(call)["has_ended"] = False
        return call

    calls = [in_thread(name, vars(owner)[name]) for owner, name in targets]
    for (owner, name), call in zip(targets, calls, strict=True):
        setattr(owner, name, call)
    try:
        yield
    finally:
        for call in calls:
            vars(call)["has_ended"] = True
        # Another thread may have replaced this replacement. When the context of that thread ends,
        # the thread removes its own replacement, and all replacements below it that have ended.
        for owner, name in targets:
            while getattr(vars(owner)[name], "has_ended", False):
                setattr(owner, name, vars(owner)[name].__wrapped__)
