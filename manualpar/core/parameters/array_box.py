"""A box that behaves like the array in it.

Modules usually ask for a parameter with `self.param`, which unboxes it. Some read it from the
variables instead, for instance to tie the weights of two layers:
`self.wte.variables["params"]["embedding"].T`. They get the box, and use it as an array. An
`ArrayBox` therefore answers as its unboxed value would, so that a parameter that gathers itself is
gathered there too.

Invariants: every use unboxes once, and is a use of its own; shape and dtype are known without
unboxing; a box stays a pytree whose leaf is what is stored, as flax's transformations need it. So
`jax.tree.map` still sees the stored array and not the parameter: the probe refuses such code.
"""

import functools
from collections.abc import Iterator
from typing import Any, Self

import flax.linen as nn
import flax.struct
import jax

# Attributes of an array that are known without gathering it.
OF_SHAPE = frozenset({"dtype", "ndim", "shape", "size"})
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = (
    *("neg", "pos", "abs", "getitem", "eq", "ne", "lt", "le", "gt", "ge"),
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
)


class ArrayBox(nn.Partitioned, eq=False):
    """A boxed parameter that may be used as the array that its `unbox()` returns.

    A subclass is declared with `eq=False`: a dataclass would compare boxes, and not their elements.

    Attributes:
      is_whole: Whether a loss reads it. Then `unbox()` also gathers what a module computes with in
        parts, see `whole_parameters`.

    Communication:
      That of `unbox()`, each time it is used.
    """

    is_whole: bool = flax.struct.field(default=False, pytree_node=False)

    def __jax_array__(self) -> jax.Array:
        """What `jax.numpy` computes with."""
        value: jax.Array = self.unbox()
        return value

    def __getattr__(self, name: str) -> Any:
        """The attributes of an array, such as `T`."""
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(jax.eval_shape(self.unbox) if name in OF_SHAPE else self.unbox(), name)

    def of_one_array(self) -> Self:
        """The box for code that carries nothing but `value` along."""
        return self

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def _apply_operator(self, *args: Any, name: str) -> Any:
        return getattr(self.__jax_array__(), name)(*args)


for _name in (f"__{name}__" for name in _OPERATORS):
    setattr(ArrayBox, _name, functools.partialmethod(ArrayBox._apply_operator, name=_name))
