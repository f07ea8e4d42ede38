"""Fields of Linen modules that mean something else where the model runs on a mesh.

A module's fields say how one device would run it. While one of its methods runs, some of them are
replaced here: see each interceptor, for `flax.linen.intercept_methods`.

- Initializers. When a model is applied, flax calls them once more, for the shapes. One that is
  annotated (`nn.with_partitioning`) then returns a box. `nn.DenseGeneral`, and so attention, calls
  it with the flattened shape of its kernel, unboxes the result and reshapes it. Where there is a
  mesh, the unboxing would constrain the sharding of the flattened array by names that are those of
  the kernel's dims. All annotations have been read by then, so initializers leave them out.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn


@contextlib.contextmanager
def replace_fields(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Gives fields of a module, which is frozen, other values for a while."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


@dataclasses.dataclass(frozen=True)
class _Unannotated:
    """An initializer without its annotation; equal to another of the same, for `nn.jit`."""

    initializer: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = self.initializer(*args, **kwargs)
        return x.value if isinstance(x, nn.Partitioned) else x


def leave_out_annotations(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Lets initializers, in fields whose names end in `init`, return arrays where they box them."""
    module = context.module
    names = [field.name for field in dataclasses.fields(module) if field.name.endswith("init")]
    found = {name: getattr(module, name, None) for name in names}
    plain = {name: _Unannotated(value) for name, value in found.items() if callable(value)}
    with replace_fields(module, plain):
        return next_fun(*args, **kwargs)
