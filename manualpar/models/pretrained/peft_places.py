"""Finds the module of transformers that has the adapter of each of our parameters.

The rules that name the tensors of base parameters also name these modules, see `tensor_names`.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from manualpar.models import Transformer
from manualpar.models.finetuning.adapted_parameter import DOWN, UP
from manualpar.models.pretrained.families import FAMILIES
from manualpar.models.pretrained.model_config import architecture_of, write_config
from manualpar.models.pretrained.tensor_names import TensorPiece, pieces_of_transformer

# What peft writes before the name of a module.
PREFIX = "base_model.model."
TABLES = ("embedding", "head")


class Place(NamedTuple):
    """A module in transformers; its adapter is a part of the adapter of one of our parameters.

    Attributes:
      module: The module's name; for a part of a fused weight, with the name of our layer.
      piece: The tensor of the module's weight, without the other parts of a fused weight.
      inputs: The number of input dims.
      fused: The name of the module with the fused weight; `""` for other modules.
      rows: The outputs of the fused weight that this part has.
    """

    module: str
    piece: TensorPiece
    inputs: int
    fused: str = ""
    rows: tuple[int, ...] = ()

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
        elif any(not piece.tensor.endswith(".weight") for piece in of_path):
            why = f"it is no weight of a layer in a model of {family!r}"
        if why and refuse:
            raise ValueError(
                f"peft: the parameter {path!r} has an adapter, expected none, because {why}. Merge "
                "it with merge_lora or export_hf, or keep it with save_adapters."
            )
        if not why:
            found[path] = [_place(path, piece, shapes[path]) for piece in of_path]
    return found


def find_family(
    model: Transformer, shapes: Mapping[str, tuple[int, ...]], tensors: Collection[str]
) -> str:
    """Returns the family whose modules have the names of most of the tensors in a file of peft.

    Families that differ only in the names of their modules, such as Llama and Phi-3, can describe
    the same model. Of families that fit equally well the first is returned.

    Raises:
      ValueError: No family fits the model.
    """
    modules = {re.split(r"\.(?:lora|base_layer)", name)[0] for name in tensors}
    best, fewest = "", len(modules) + 1
    paths = list(filter(may_have_place, shapes))
    for family in FAMILIES:
        try:
            places = find_places(model, shapes, paths, family=family)
        except ValueError:
            continue
        known = {
            f"{PREFIX}{place.fused or place.module}" for each in places.values() for place in each
        }
        if len(modules - known) < fewest:
            best, fewest = family, len(modules - known)
        if not fewest:
            break
    return best or str(write_config(architecture_of(model))["model_type"])


def _place(path: str, piece: TensorPiece, shape: tuple[int, ...]) -> Place:
    module = piece.tensor.removesuffix(".weight")
    if piece.within:
        dim, first, number = piece.within
        sizes = dict(zip(piece.dims, shape[len(piece.entry) :], strict=True))
        names = next(names for names in piece.merged if dim in names)
        outputs = np.arange(math.prod(sizes.get(name, 1) for name in names if name != dim) * number)
        outputs = outputs.reshape([number if name == dim else sizes[name] for name in names])
        own = range(first, first + sizes.get(dim, 1))
        rows = outputs.take(own, names.index(dim)).ravel().tolist()
        merged = tuple(tuple(x for x in each if x in piece.dims) for each in piece.merged)
        plain = _place(path, piece._replace(merged=merged, within=()), shape)
        name = path.split("/")[-2]
        return plain._replace(module=f"{module}.{name}", fused=module, rows=tuple(rows))
    if path in TABLES:
        return Place(module, piece, 1)
    # The input dims are a kernel's first, and the second dim of most weights.
    ins = next(x for x in reversed(piece.merged) if sorted(x) == sorted(piece.dims[: len(x)]))
    return Place(module, piece, len(ins))
