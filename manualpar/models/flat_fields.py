"""The flat names of the fields of a `Transformer`, such as `attention_window`.

Configs and the tables of model families name every field by one flat name. A `Transformer` has
groups, such as `attention=Attention(window=4096)`. The functions of this module convert flat names
to groups and back. For one more release, a `Transformer` also accepts flat names, and warns. After
that release remove `understand_flat_names`.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import flax.linen as nn

from manualpar.layers.attention.context import Context
from manualpar.layers.model_fields import find_fields, replace_in_groups
from manualpar.layers.moe.experts import Experts
from manualpar.models.layer_config import Attention, LowPrecision, Mlp, Norm, Scales, Split
from manualpar.models.rotary import Rotary

Model = TypeVar("Model", bound=nn.Module)
ModelClass = TypeVar("ModelClass", bound=type)

# The groups of a `Transformer`, with their defaults.
GROUPS: Mapping[str, Any] = {
    "attention": Attention(),
    "rotary": Rotary(),
    "norm": Norm(),
    "mlp": Mlp(),
    "scales": Scales(),
    "experts": Experts(),
    "split": Split(),
    "context": Context(),
    "low_precision": LowPrecision(),
}
# Flat name -> the field in a group.
FLAT = {
    name: field
    for group, default in GROUPS.items()
    for name, field in find_fields(type(default), (group,))
}


def nest_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a `Transformer` with groups in place of flat names.

    Args:
      fields: Arguments, some of them under flat names. If a group is given too, flat names replace
        fields of this group.
    """
    nested = {name: value for name, value in fields.items() if not _is_flat(name, value)}
    changes: dict[str, dict[tuple[str, ...], Any]] = {}
    for name in [name for name in fields if name not in nested]:
        (group, *path), value = FLAT[name].path, fields[name]
        is_none = FLAT[name].default is None and value == ""
        changes.setdefault(group, {})[tuple(path)] = None if is_none else value
    for group, changed in changes.items():
        nested[group] = replace_in_groups(nested.get(group, GROUPS[group]), changed)
    return nested


def with_fields(model: Model, **fields: Any) -> Model:
    """Returns a copy of a `Transformer` with other values of some fields, by their flat names.

    ```python
    with_fields(model, num_layers=2, attention_window=4096)
    ```
    """
    groups = {name: getattr(model, name) for name in GROUPS}
    return model.clone(**nest_fields(groups | fields))


def flatten_fields(model: Any) -> dict[str, Any]:
    """Returns the values of all fields of a `Transformer` by their flat names."""
    names = {field.name for field in dataclasses.fields(model)} - {*GROUPS, "parent", "name"}
    values = {name: _value(model, (name,)) for name in names}
    return values | {name: _value(model, field.path) for name, field in FLAT.items()}


def understand_flat_names(cls: ModelClass) -> ModelClass:
    """Makes a module class with all `GROUPS` accept flat names as arguments and as attributes.

    Every use of a flat name gives a warning. `attention` is both a flat name and a group. As an
    argument it may be either, but the attribute is always the group.
    """
    init: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def understanding_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if old := [name for name, value in kwargs.items() if _is_flat(name, value)]:
            kwargs = nest_fields(kwargs)
            changed = {FLAT[name].path[0] for name in old}
            now = ", ".join(f"{name}={kwargs[name]!r}" for name in GROUPS if name in changed)
            is_clone = inspect.stack(0)[1].function == "clone"
            _warn(f"{cls.__name__}: {', '.join(old)} became {now}", stacklevel=4 if is_clone else 3)
        init(self, *args, **kwargs)

    def reader(name: str) -> Any:
        def read(self: Any) -> Any:
            path = FLAT[name].path
            _warn(f"{cls.__name__}.{name} became {cls.__name__}.{'.'.join(path)}")
            return _value(self, path)

        return property(read)

    for name in FLAT.keys() - GROUPS.keys():
        setattr(cls, name, reader(name))
    cls.__init__ = understanding_init  # type: ignore[misc]
    return cls


def _is_flat(name: str, value: Any) -> bool:
    return name in FLAT and not (name in GROUPS and isinstance(value, type(GROUPS[name])))


def _value(model: Any, path: tuple[str, ...]) -> Any:
    value = functools.reduce(getattr, path, model)
    return "" if value is None else value


def _warn(what: str, *, stacklevel: int = 3) -> None:
    message = f"{what}; old names go with the next release."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
