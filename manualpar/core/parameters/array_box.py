"""A box that behaves like the array in it.

Modules usually ask for a parameter with `self.param`, which unboxes it. Some modules read the
parameter from the variables instead, for example to tie the weights of two layers:
`self.wte.variables["params"]["embedding"].T`. Such a module gets the box and uses it as an array.
An `ArrayBox` behaves like its unboxed value, so a parameter that gathers itself is gathered in this
case too.

Invariants: every use unboxes once; shape and dtype are known without unboxing; a box stays a pytree
whose leaf is the stored array, because flax's transformations need this. So `jax.tree.map` over a
box gets the stored array, not the parameter. `core.model.probe` refuses models with such code.
"""

import functools
from collections.abc import Iterator
from typing import Any

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

    Declare a subclass with `eq=False`: otherwise `==` compares boxes instead of their elements.

    Attributes:
      is_whole: Whether a loss reads the parameter. If so, `unbox()` also gathers over the axes over
        which modules compute with shards, see `core.model.whole_parameters`.

    Communication:
      Each use has the communication of `unbox()`.
    """

    is_whole: bool = flax.struct.field(default=False, pytree_node=False)

    def __jax_array__(self) -> jax.Array:
        """Unboxes the array for `jax.numpy`."""
        value: jax.Array = self.unbox()
        return value

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the array, such as `T`."""
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(jax.eval_shape(self.unbox) if name in OF_SHAPE else self.unbox(), name)

    def of_one_array(self) -> Any:
        """Returns an array, or a box whose only array is `value`, for code that keeps only that."""
        return self

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def _apply_operator(self, *args: Any, name: str) -> Any:
        return getattr(self.__jax_array__(), name)(*args)


for _name in (f"__{name}__" for name in _OPERATORS):
    setattr(ArrayBox, _name, functools.partialmethod(ArrayBox._apply_operator, name=_name))
