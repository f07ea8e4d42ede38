"""Finds the module of transformers that has the adapter of each of our parameters.

The rules that name the tensors of base parameters also name these modules, see `tensor_names`.
"""

import collections
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from manualpar.models import Transformer
from manualpar.models.finetuning.adapted_parameter import DOWN, UP
from manualpar.models.pretrained.model_config import architecture_of, write_config
from manualpar.models.pretrained.tensor_names import TensorPiece, pieces_of_transformer

# What peft writes before the name of a module.
PREFIX = "base_model.model."
TABLES = ("embedding", "head")


class Place(NamedTuple):
    """A module in transformers; its adapter is a part of the adapter of one of our parameters.

    Attributes:
      module: The module's name.
      piece: The tensor of the module's weight.
      inputs: The number of input dims.
    """

    module: str
    piece: TensorPiece
    inputs: int

    @property
    def names(self) -> tuple[str, str]:
        """The names of the tensors for `lora_a` and `lora_b`."""
        kind = ("lora_embedding_A", "lora_embedding_B")
        kind = kind if self._is_embedding else ("lora_A.weight", "lora_B.weight")
        return f"{PREFIX}{self.module}.{kind[0]}", f"{PREFIX}{self.module}.{kind[1]}"

    @property
    def _is_embedding(self) -> bool:
        return self.piece.dims[0] == "V"

    def dims(self, part: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the dims of `lora_a` or `lora_b` without the rank: in order here, and in peft."""
        ins, outs = self.piece.dims[: self.inputs], self.piece.dims[self.inputs :]
        own = ins if part == DOWN else outs
        return own, next(names for names in self.piece.merged if sorted(names) == sorted(own))

    def to_peft(self, part: str, x: np.ndarray) -> np.ndarray:
        """Converts one layer's `lora_a` or `lora_b` to the matrix in the file."""
        own, theirs = self.dims(part)
        order = [own.index(name) + (part == UP) for name in theirs]
        rank = x.ndim - 1 if part == DOWN else 0
        x = x.transpose(rank, *order).reshape(x.shape[rank], -1)
        return np.ascontiguousarray(x if part == DOWN else x.T)

    def from_peft(self, part: str, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Converts a matrix in the file to one layer's `lora_a` or `lora_b`."""
        own, theirs = self.dims(part)
        x = x if part == DOWN else x.T
        x = x.reshape(x.shape[0], *(sizes[name] for name in theirs))
        order = [theirs.index(name) + 1 for name in own]
        return x.transpose(*order, 0) if part == DOWN else x.transpose(0, *order)


def may_have_place(path: str) -> bool:
    """Returns whether the parameter at a path may have an adapter in files of peft."""
    return path.endswith("/kernel") or path in TABLES or "/experts/" in f"/{path}"


def find_places(
    model: Transformer,
    shapes: Mapping[str, tuple[int, ...]],
    paths: Collection[str],
    *,
    family: str = "",
    refuse: bool = False,
) -> dict[str, list[Place]]:
    """Returns the modules of the parameters at `paths`.

    The modules of experts are those of earlier versions of transformers, with a module for each
    weight of each expert.

    Args:
      model: The model.
      shapes: The shape of each parameter on one device, by its path.
      paths: The paths of parameters with adapters.
      family: The `model_type` of the model in transformers; `""` for the first family that fits.
      refuse: Whether to refuse parameters without a module. Otherwise they are left out.

    Raises:
      ValueError: A parameter has no module, and `refuse` is set; or no family fits the model.
    """
    family = write_config(architecture_of(model), family=family)["model_type"]
    pieces = pieces_of_transformer(family, shapes, skip_unknown=True)
    uses = collections.Counter(x.tensor for of_path in pieces.values() for x in of_path)
    found: dict[str, list[Place]] = {}
    for path in paths:
        of_path = pieces.get(path, [])
        why = ""
        if path.endswith("experts/router"):
            why = "routers are no layers in transformers"
        elif path == "embedding" and model.tied_head:
            why = "the embedding is also the head, and peft adapts only one of the two"
        elif not of_path or not may_have_place(path):
            why = f"it has no module of its own in a model of {family!r}"
        elif any(uses[piece.tensor] > 1 for piece in of_path):
            why = "peft adapts the fused weight, of which it is a part, as a whole"
        elif any(not piece.tensor.endswith(".weight") for piece in of_path):
            why = f"it is no weight of a layer in a model of {family!r}"
        if why and refuse:
            raise ValueError(
                f"peft: the parameter {path!r} has an adapter, expected none, because {why}. Merge "
                "it with merge_lora or export_hf, or keep it with save_adapters."
            )
        if not why:
            found[path] = [_place(path, piece) for piece in of_path]
    return found


def _place(path: str, piece: TensorPiece) -> Place:
    module = piece.tensor.removesuffix(".weight")
    if path in TABLES:
        return Place(module, piece, 1)
    # The input dims are a kernel's first, and the second dim of most weights.
    first = next(x for x in reversed(piece.merged) if sorted(x) == sorted(piece.dims[: len(x)]))
    return Place(module, piece, len(first))
