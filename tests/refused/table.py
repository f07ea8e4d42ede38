"""Tables of mistakes. A row is a call, the class of its error, and words of the message."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
import pytest

from manualpar import abstract_mesh, data_parallel, fsdp
from tests.tiny import BATCHES, Classifier, loss_fn


def rows(name: str, call: Callable[..., Any], *cases: Any, marks: Any = ()) -> Iterator[Any]:
    """Yields a row of the table for each case of one call.

    Args:
      name: The beginning of the rows' names.
      call: The function that must raise the error; it gets a case's argument.
      cases: A case is `(argument, words)` for a `ValueError`, or `(argument, error, words)`. The
        words are a regular expression for the message.
      marks: Pytest's marks of the rows.
    """
    for argument, *error, words in cases:
        label = f"{name}: {' '.join(re.findall(r'[A-Za-z0-9_]+', words)[:6])}"
        bound = functools.partial(call, argument)
        yield pytest.param(bound, *(error or [ValueError]), words, id=label, marks=marks)


def check_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    """Asserts that a call raises the error before XLA compiles anything."""
    compiled: list[str] = []

    def note(event: str, seconds: float, **more: str | int) -> None:
        del seconds
        if "backend_compile" in event:
            compiled.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with pytest.raises(error, match=words):
            call()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled, f"compiled before the refusal: {compiled}"


def build(model=None, builder=fsdp, *, tx=None, loss=loss_fn, axes=None, **options):
    """Builds a small program on an abstract mesh of eight devices, which need not exist."""
    if builder is not data_parallel:
        options.setdefault("min_weight_size", 1)
    options = {"mesh": abstract_mesh(axes or {"data": 8}, 8), "batch": BATCHES[0], **options}
    return builder(Classifier() if model is None else model, tx or optax.sgd(0.1), loss, **options)


def trace_on(mesh, function, specs, *args, out=None, check_vma=True):
    """Traces a function inside `shard_map`; nothing is compiled or run."""
    run = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out or specs, check_vma=check_vma
    )
    return jax.eval_shape(run, *args)
