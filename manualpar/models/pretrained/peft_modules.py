"""Names the modules of transformers that have the adapters of our parameters, and converts tensors.

The first section finds the module of each parameter. The others convert the adapters of weights
that are fused in transformers: those of experts, and weights such as Phi-3's `qkv_proj`. They open
no file, and need no device.
"""

import math
import re
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple

import numpy as np

from manualpar.models import Transformer
from manualpar.models.finetuning.lora import (
    DOWN,
    UP,
)
from manualpar.models.pretrained.architecture import (
    architecture_of,
    write_config,
)
from manualpar.models.pretrained.families import FAMILIES
from manualpar.models.pretrained.tensor_names import TensorPiece, pieces_of_transformer

# -------------------------------------------------------------------------------------------------
# Finds the module of transformers that has the adapter of each of our parameters.
#
# The rules that name the tensors of base parameters also name these modules, see `tensor_names`.


# What peft writes before the name of a module.
PREFIX = "base_model.model."
# What peft writes after the name of a module with DoRA.
MAGNITUDE_VECTOR = ".lora_magnitude_vector"
# What peft writes after the name of an embedding of which only some tokens' rows are trained.
TOKENS, DELTA = ".token_adapter.", "trainable_tokens_delta"
# The names of heads that may be tied to the embedding.
HEADS = ("lm_head", "embed_out")
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
    def magnitude(self) -> str:
        """The name of the tensor for `lora_magnitude`."""
        return f"{PREFIX}{self.module}{MAGNITUDE_VECTOR}"

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
      shapes: The shape of each parameter on one device, by its path.
      family: The `model_type` of the model in transformers; `""` for the first family that fits.
      refuse: Whether to refuse parameters without a module. Otherwise they are left out.
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
    """
    adapted = (name for name in tensors if ".lora_" in name)
    modules = {re.split(r"\.(?:lora|base_layer)", name)[0] for name in adapted}
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


def whole_pieces(
    model: Transformer, shapes: Mapping[str, tuple[int, ...]], family: str
) -> dict[str, list[TensorPiece]]:
    """Returns the tensors of the parameters that peft can store whole, by path.

    Weights that are fused in transformers are left out.
    """
    family = write_config(architecture_of(model), family=family)["model_type"]
    pieces = pieces_of_transformer(family, shapes, skip_unknown=True)
    return {
        path: of_path
        for path, of_path in pieces.items()
        if not is_fused(path) and not any(piece.within for piece in of_path)
    }


def module_of(piece: TensorPiece) -> str:
    """Returns the name of the module that has the tensor."""
    return piece.tensor.rpartition(".")[0]


def to_whole(piece: TensorPiece, x: np.ndarray, vocab_size: int) -> np.ndarray:
    """Converts one layer's parameter to the tensor in the file."""
    if "V" in piece.dims:
        x = np.take(x, range(vocab_size), axis=piece.dims.index("V"))
    order = [piece.dims.index(name) for names in piece.merged for name in names]
    return np.ascontiguousarray(x.transpose(order)).reshape(piece.tensor_shape(x.shape))


def from_whole(piece: TensorPiece, x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Converts a tensor in the file to one layer's parameter, of these sizes."""
    size_of = dict(zip(piece.dims, sizes, strict=True))
    flat = [name for names in piece.merged for name in names]
    return x.reshape([size_of[name] for name in flat]).transpose(
        [flat.index(name) for name in piece.dims]
    )


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


# -------------------------------------------------------------------------------------------------
# Converts the adapters of experts between a module for each weight and fused parameters.
#
# Transformers 5 has the weights of all `E` experts of a layer in two parameters: `gate_up_proj`,
# whose outputs are those of all gates and then those of all up-projections, and `down_proj`. The
# option `target_parameters` of peft adapts such a parameter. Its `lora_A` is `[(E r), in]`, and
# its `lora_B` is `[out, (r E)]`. If both have an adapter, that of `gate_up_proj` is in
# `base_layer`.
#
# Our experts have an adapter for each of the three weights. An adapter that is read for
# `gate_up_proj` becomes two adapters with the same `lora_a`. Two adapters that are written for it
# become one, whose rank is the sum of their ranks, or their rank if both have the same `lora_a`.
# If it is read again, each of the two gets back its own rank, because the other entries are zeros.


GATE_UP, DOWN_PROJ = "gate_up_proj", "down_proj"
# The names of our parameters.
WEIGHTS = ("gate", "up", "down")
_EXPERT = re.compile(r"(?P<layer>.*)\.(mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\.\w+")


class _Layer(NamedTuple):
    """The experts of a layer.

    Attributes:
      module: The module of all experts in transformers.
      gates: The module of each expert's gate.
      ups: The module of each expert's up-projection.
      downs: The module of each expert's down-projection.
    """

    module: str
    gates: list[str]
    ups: list[str]
    downs: list[str]

    @property
    def parameters(self) -> dict[str, list[list[str]]]:
        """The modules of each part of each fused parameter, by the parameter's name."""
        return {GATE_UP: [self.gates, self.ups], DOWN_PROJ: [self.downs]}

    def names(self, parameter: str, *, is_inner: bool) -> tuple[str, str]:
        """Returns the names of the tensors `lora_A` and `lora_B` of a parameter."""
        inner = ".base_layer" if is_inner else ""
        first, last = (f"{PREFIX}{self.module}{inner}.lora_{x}.weight" for x in "AB")
        return first, last


def is_known(parameter: str) -> bool:
    """Returns whether a name in `target_parameters` may be that of a parameter that we have."""
    return parameter.endswith(("experts.gate_up_proj", "experts.down_proj", ".weight"))


def weights_to_name(modules: Iterable[str]) -> list[str]:
    """Returns the modules of a model with experts whose weights go to `target_parameters`.

    Peft takes every module with the name of an expert's weight, such as `mlp.down_proj` in a dense
    layer, for the fused experts if `target_modules` has it. The adapter of the parameter `weight`
    of such a module has the same tensors and the same product.
    """
    names = ("gate_proj", "up_proj", DOWN_PROJ)
    return [module for module in modules if module.rpartition(".")[2] in names]


def is_fused(path: str) -> bool:
    """Returns whether the parameter at a path is a part of a fused parameter in transformers."""
    return path.endswith(tuple(f"experts/{name}" for name in WEIGHTS))


def modules_of_experts(places: Mapping[str, Sequence[Place]]) -> dict[str, list[str]]:
    """Returns the modules of the weights of experts, by the paths of our parameters."""
    return {
        path: [place.module for place in of_path]
        for path, of_path in places.items()
        if is_fused(path)
    }


def split_experts(
    tensors: MutableMapping[str, np.ndarray],
    modules: Mapping[str, Sequence[str]],
    targets: Callable[[str], bool],
    scale: Callable[[str, int], float],
) -> list[str]:
    """Replaces the tensors of fused experts by those of a module for each expert.

    Args:
      tensors: The tensors in a file, by name.
      modules: The modules of our parameters, by the parameters' paths.
      targets: Returns whether `target_parameters` has the parameter with a name.
      scale: Returns the factor of the product in the module with a name and this rank.

    Returns:
      The names of tensors that do not fit the experts, each with the reason.
    """
    wrong = []
    for layer in _layers(modules):
        fused = {
            name: parts
            for name, parts in layer.parameters.items()
            if targets(f"{layer.module}.{name}")
        }
        for name, parts in fused.items():
            keys = layer.names(name, is_inner=name == GATE_UP and len(fused) > 1)
            if any(key not in tensors for key in keys):
                continue  # The caller refuses one of the two, because it is left over.
            down, up = (tensors[key] for key in keys)
            experts = len(layer.downs)
            rank = len(down) // experts
            if len(down) != rank * experts or up.shape[1] != len(down) or len(up) % len(parts):
                wrong.append(f"{keys[0]} and lora_B have {down.shape} and {up.shape}")
                continue
            del tensors[keys[0]], tensors[keys[1]]
            lora_a = down.reshape(experts, rank, -1)
            halves = np.split(up.reshape(len(up), rank, experts), len(parts))
            for part, lora_b in zip(parts, halves, strict=True):
                used = lora_b.any((0, 2)) if up.any() else np.ones(rank, bool)
                if not used.any():
                    continue
                factor = scale(f"{layer.module}.{name}", rank) / scale(part[0], int(used.sum()))
                for number, module in enumerate(part):
                    tensors[f"{PREFIX}{module}.lora_A.weight"] = lora_a[number, used]
                    tensors[f"{PREFIX}{module}.lora_B.weight"] = lora_b[:, used, number] * factor
    return wrong


def join_experts(
    tensors: MutableMapping[str, np.ndarray],
    modules: Mapping[str, Sequence[str]],
    scale: Callable[[int], float],
) -> dict[str, int]:
    """Replaces the tensors of a module for each expert by those of fused experts.

    Args:
      tensors: The tensors of adapters, by name.
      modules: The modules of our parameters, by the parameters' paths.
      scale: Returns the factor of the product of an adapter with this rank.

    Returns:
      The rank of each fused parameter with an adapter, by its name.
    """
    ranks = {}
    for layer in _layers(modules):
        made: dict[str, tuple[Any, Any]] = {}
        for name, parts in layer.parameters.items():
            stacks = [_stacked(tensors, part) for part in parts]
            if any(stack is not None for stack in stacks):
                made[name] = _joined(stacks, scale)
        for name, (down, up) in made.items():
            keys = layer.names(name, is_inner=name == GATE_UP and len(made) > 1)
            experts, rank, _ = down.shape
            tensors[keys[0]] = np.ascontiguousarray(down.reshape(experts * rank, -1))
            tensors[keys[1]] = np.ascontiguousarray(up.transpose(1, 2, 0).reshape(up.shape[1], -1))
            ranks[f"{layer.module}.{name}"] = rank
    return ranks


def _layers(modules: Mapping[str, Sequence[str]]) -> list[_Layer]:
    """Returns the layers with experts; the modules of a weight are in the order of experts."""
    layers: dict[str, _Layer] = {}
    for path, names in modules.items():
        for name in names:
            found = _EXPERT.fullmatch(name)
            assert found is not None
            module = f"{found['layer']}.mlp.experts"
            layer = layers.setdefault(module, _Layer(module, [], [], []))
            parts = dict(zip(WEIGHTS, (layer.gates, layer.ups, layer.downs), strict=True))
            parts[path.rpartition("/")[2]].append(name)
    return list(layers.values())


def _stacked(
    tensors: MutableMapping[str, np.ndarray], modules: list[str]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Takes the adapters of modules out of `tensors`: `[E, r, in]` and `[E, out, r]`."""
    names = [[f"{PREFIX}{module}.lora_{x}.weight" for module in modules] for x in "AB"]
    if any(name not in tensors for name in (*names[0], *names[1])):
        return None
    down, up = (np.stack([tensors.pop(name) for name in each]) for each in names)
    return down, up


def _joined(
    stacks: list[tuple[np.ndarray, np.ndarray] | None], scale: Callable[[int], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Joins the adapters of the parts of a parameter, whose outputs follow each other.

    A part without an adapter has as many outputs as the other one.
    """
    given = [stack for stack in stacks if stack is not None]
    first, outputs = given[0][0], given[0][1].shape[1]
    experts = len(first)
    if len(given) == len(stacks) and all(np.array_equal(first, down) for down, _ in given):
        return first, np.concatenate([up for _, up in given], 1)
    down = np.concatenate([down for down, _ in given], 1)
    rank, at = down.shape[1], 0
    up = np.zeros((experts, outputs * len(stacks), rank), down.dtype)
    for number, stack in enumerate(stacks):
        if stack is not None:
            own = stack[1].shape[2]
            rows = slice(number * outputs, (number + 1) * outputs)
            up[:, rows, at : at + own] = stack[1] * (scale(own) / scale(rank))
            at += own
    return down, up


# -------------------------------------------------------------------------------------------------
# Converts the adapters of fused weights between one module and a module for each part.
#
# Some families have several of our kernels in one weight, such as Phi-3's `qkv_proj` and GPT-2's
# `c_attn`. Peft adapts such a weight as a whole: its parts have one `lora_A` `[r, in]`, and each
# has some rows of `lora_B` `[out, r]`. So an adapter that is read becomes one for each part with
# the same `lora_a`.
#
# If the parts are trained, their `lora_a` differ. Then the adapter that is written has the sum of
# their ranks: `lora_A` stacks theirs, and `lora_B` has the block of each part in its rows and its
# ranks, and zeros elsewhere. The product is exactly that of the parts. If it is read again, each
# part gets back its own rank, because a part has no use for ranks in which all of its rows are
# zeros.


def fused_modules(places: Mapping[str, Iterable[Place]]) -> dict[str, list[Place]]:
    """Returns the parts of each fused module; `places` are those of all parameters of a model."""
    found: dict[str, list[Place]] = {}
    for of_path in places.values():
        for place in of_path:
            if place.fused:
                found.setdefault(place.fused, []).append(place)
    return found


def split_fused(
    tensors: MutableMapping[str, np.ndarray],
    modules: Mapping[str, Sequence[Place]],
    scale: Callable[[str, int], float],
) -> list[str]:
    """Replaces the tensors of fused modules by those of each part; an unused part has rank 0.

    Args:
      tensors: The tensors in a file, by name.
      modules: The parts of each fused module.
      scale: Returns the factor of the product in the module with a name and this rank.

    Returns:
      The tensors that do not fit their module, each with the reason.
    """
    wrong = []
    for module, parts in modules.items():
        keys = _names(module)
        if any(key not in tensors for key in keys):
            continue  # The caller refuses one of the two, because it is left over.
        down, up = (tensors.pop(key) for key in keys)
        rank, outputs = len(down), sum(len(part.rows) for part in parts)
        if not rank or up.shape != (outputs, rank):
            wrong.append(f"{keys[1]} has the shape {list(up.shape)}, expected {[outputs, rank]}")
            continue
        magnitude = tensors.pop(f"{PREFIX}{module}{MAGNITUDE_VECTOR}", None)
        if magnitude is not None and magnitude.shape != (outputs,):
            wrong.append(f"{module}{MAGNITUDE_VECTOR} has the shape {list(magnitude.shape)}")
            continue
        for part in parts:
            own = up[list(part.rows)]
            used: np.ndarray = np.asarray(own.any(0)) if up.any() else np.ones(rank, bool)
            if magnitude is not None:
                tensors[part.magnitude] = magnitude[list(part.rows)]
                used[0] |= not used.any()  # The part has an adapter, because it has magnitudes.
            if used.any():
                own = own * (scale(module, rank) / scale(part.module, int(used.sum())))
            tensors[part.names[0]], tensors[part.names[1]] = down[used], own[:, used]
    return wrong


def join_fused(
    tensors: MutableMapping[str, np.ndarray],
    modules: Mapping[str, Sequence[Place]],
    scale: Callable[[int], float],
) -> dict[str, int]:
    """Replaces the tensors of each part by those of fused modules.

    Args:
      tensors: The tensors of adapters, by name.
      modules: The parts of each fused module.
      scale: Returns the factor of the product of an adapter with this rank.

    Returns:
      The rank of each fused module with an adapter.
    """
    ranks = {}
    for module, parts in modules.items():
        magnitudes = [(part, tensors.pop(part.magnitude, None)) for part in parts]
        given = [
            (list(part.rows), tensors.pop(part.names[0]), tensors.pop(part.names[1]))
            for part in parts
            if part.names[0] in tensors
        ]
        if not given:
            continue
        first = given[0][1]
        is_shared = all(np.array_equal(first, down) for _, down, _ in given)
        down = first if is_shared else np.concatenate([down for _, down, _ in given])
        up = np.zeros((sum(len(part.rows) for part in parts), len(down)), first.dtype)
        at = 0
        for rows, _, own in given:
            rank = own.shape[1]
            up[rows, at : at + rank] = own * (scale(rank) / scale(len(down)))
            at += 0 if is_shared else rank
        tensors.update(zip(_names(module), (down, up), strict=True))
        ranks[module] = len(down)
        without = [part.module for part, magnitude in magnitudes if magnitude is None]
        if len(without) == len(parts):
            continue
        if without:
            raise ValueError(
                f"peft: {', '.join(without)} has no adapter, expected one with magnitudes in each "
                f"part of {module}, which is one weight in transformers. Adapt all parts, or merge "
                "with merge_lora or export_hf."
            )
        lengths = np.zeros(len(up), first.dtype)
        for part, magnitude in magnitudes:
            lengths[list(part.rows)] = magnitude
        tensors[f"{PREFIX}{module}{MAGNITUDE_VECTOR}"] = lengths
    return ranks


def _names(module: str) -> tuple[str, str]:
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"
