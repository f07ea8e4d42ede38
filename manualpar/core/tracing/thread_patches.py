"""Replaces functions of other packages temporarily, and only in the calling thread.

Other threads keep the old functions. Contexts of several threads may overlap in any order.

These need such a replacement, because no hook of JAX or flax reaches them:

- `jax.lax.scan`, `while_loop`, `fori_loop`, `cond` and `switch`, see `varying_loops`. All five need
  it, in JAX 0.10 and in 0.12. JAX refuses their types while it traces them, so there is no jaxpr
  yet that could be rewritten. A jaxpr without these types cannot be made first, because layers and
  gathers read the types while they are traced.
- `unbox` of flax's boxes and of ours, see `loops`: a trace finds which parameters a branch reads.
- `flax.core.Scope.make_rng`, see `loops`: a trace that is thrown away must count no keys.
- `nn.Module.sow` and `perturb`, see `recording_sows`: only they know which values are sown.
- `nnx.Module.sow` and `perturb`, see `noting_earlier_sows` and `marking_sows`: an attribute does
  not tell who made it.
- `nnx.Variable.__setitem__`, see `assigning_tracers`. A model may assign to variables of any type,
  and to those that it makes itself, so a subclass of one type is not enough. Only for JAX 0.10.
- `nnx.Variable.set_value`, see `refusing_set_params`: a call may set a parameter of any type.
- The function with which `nnx.bridge.ToNNX` makes variables of Linen, see `boxes_in_linen`. Flax
  calls it by its name, and a bridge has no hook.
- JAX's checks of cuDNN, see `plans.compiler_worker`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Held while a function is put in place or put back, but not while one is called.
_LOCK = threading.Lock()


@contextlib.contextmanager
def replaced_in_thread(
    targets: Iterable[tuple[Any, str]], replacement: Callable[[str, Any], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces functions while the context is open.

    Args:
      targets: The class or module of each function, and the function's name in it.
      replacement: Returns the new function, given the name and the function that this thread calls
        until now.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(_replaced(owner, name, replacement))
        yield


@contextlib.contextmanager
def _replaced(
    owner: Any, name: str, replacement: Callable[[str, Any], Callable[..., Any]]
) -> Iterator[None]:
    with _LOCK:
        dispatcher = _Dispatcher.found(vars(owner)[name])
        if dispatcher is None:
            dispatcher = _Dispatcher(vars(owner)[name])
            setattr(owner, name, dispatcher.call)
        dispatcher.num_contexts += 1
    here = dispatcher.of_thread
    try:
        new = replacement(name, here.functions[-1])
        here.functions.append(new)
        try:
            yield
        finally:
            here.functions.remove(new)
    finally:
        with _LOCK:
            dispatcher.num_contexts -= 1
            # If other code has replaced the dispatcher since, its function stays, and the
            # dispatcher below it calls the original.
            if not dispatcher.num_contexts and vars(owner)[name] is dispatcher.call:
                setattr(owner, name, dispatcher.original)


class _OfThread(threading.local):
    """The functions of one target in each thread: the original, then the open replacements."""

    def __init__(self, original: Any) -> None:
        self.functions = [original]


class _Dispatcher:
    """Stands in a function's place while a thread replaces it; calls each thread's own function."""

    def __init__(self, original: Any) -> None:
        self.original, self.of_thread, self.num_contexts = original, _OfThread(original), 0

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.of_thread.functions[-1](*args, **kwargs)

        vars(call)["dispatcher"] = self
        self.call = call

    @staticmethod
    def found(function: Any) -> "_Dispatcher | None":
        """Returns the dispatcher whose `call` a function is, if any."""
        dispatcher = getattr(function, "dispatcher", None)
        # A wrapper by other code may have copied the attributes of `call`.
        return dispatcher if getattr(dispatcher, "call", None) is function else None
