"""Replaces functions of other packages during a call, only in the calling thread.

Other threads get the functions that they would have got without the call. Calls may overlap: the
first to begin may end first.
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
      targets: The class or module of each function, and its name there.
      replacement: Makes the new function from the name and the old function.
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
        # Another thread may have replaced a replacement. When that call ends, it also removes ended
        # replacements below its own.
        for owner, name in targets:
            while getattr(vars(owner)[name], "has_ended", False):
                setattr(owner, name, vars(owner)[name].__wrapped__)
