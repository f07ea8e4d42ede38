"""Writes and reads LoRA adapters in the format of the library peft.

A directory has `adapter_config.json` and `adapter_model.safetensors`, with two matrices for each
adapted module of the model in transformers: `lora_A` `[r, in]` and `lora_B` `[out, r]`, or
`lora_embedding_A` and `lora_embedding_B` for an embedding. With DoRA a module also has a
`lora_magnitude_vector` `[out]`. Modules that are trained as a whole (`modules_to_save`), and an
embedding and a head that have got rows for new tokens, have the tensors of the base model.

The tensors decide which modules have an adapter, and its rank. Modules of stacked layers may
differ: adapters are padded with zeros to the largest rank of the stack, and a layer without an
adapter gets zeros. Peft may scale the products of some modules by other factors (`alpha_pattern`).
Then `lora_b` is multiplied by the quotient of the factors, so that the products are the same.

Everything else that peft can write changes the model in other ways and is refused by its name.
"""

import dataclasses
import json
import math
import re
import warnings
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType

from manualpar.checks.guarded_step import check_state
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import (
    Leaf,
    plain_leaves,
    read_unpadded,
    variable_leaves,
    variables_of,
)
from manualpar.core.state.train_state import TrainState
from manualpar.errors import list_some, printable, require
from manualpar.layers.attention.causal_attention import Device, planned_device
from manualpar.models import Transformer
from manualpar.models.finetuning.adapter_files import (
    lora_interface,
    new_folder,
    parameter_path,
    read_adapters,
    replace_adapters,
    write_folder,
)
from manualpar.models.finetuning.lora import (
    DOWN,
    MAGNITUDE,
    UP,
    LowRankModel,
    adapted_path,
    is_adapter,
    lora,
)
from manualpar.models.finetuning.quantized import QuantizedModel
from manualpar.models.pretrained.architecture import (
    architecture_of,
    read_architecture,
    write_config,
)
from manualpar.models.pretrained.families import FAMILIES
from manualpar.models.pretrained.family import is_float32
from manualpar.models.pretrained.tensor_files import CONFIG_FILE as MODEL_CONFIG_FILE
from manualpar.models.pretrained.tensor_files import DTYPES, read_header, read_slice
from manualpar.models.pretrained.tensor_names import TensorPiece, pieces_of_transformer
from manualpar.models.pretrained.tensor_sources import transformer_of
from manualpar.system.storage import GivenPath, local_path
from manualpar.system.storage.untrusted import model_file, open_tensors, read_model_object

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
# Reads and writes the `adapter_config.json` of the library peft.
#
# A key that changes the function of the model, and for which `lora` has nothing, is refused by its
# name. `USED` are the keys that are read, `UNUSED` the keys without effect on a trained adapter.


USED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"),
    *("target_parameters", "lora_dropout", "use_dora", "modules_to_save", "ensure_weight_tying"),
    "trainable_token_indices",
)
# The tensors say which modules have adapters. The others concern training, or name files.
UNUSED = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("inference_mode", "eva_config", "qalora_group_size", "megatron_core"),
        *("base_model_name_or_path", "revision", "auto_mapping", "task_type", "peft_version"),
        *("fan_in_fan_out", "runtime_config"),  # The first is how the base stores the weight.
    }
)
# Keys with a value that means the same as none.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Others change the base model when an adapter begins.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
EMPTY: tuple[Any, ...] = (None, False, "", [], {})
LARGEST = 2**20
NUMBER = "a number above 0 that float32 represents"
_PLAIN = re.compile(r"\^?[\w.]+\$?")


class PeftConfig(NamedTuple):
    """The numbers of an `adapter_config.json`.

    Attributes:
      alpha: The number over which the rank divides.
      rank_stabilized: Whether the square root of the rank divides instead.
      alphas: Other numbers for some modules, by the end of their names.
      parameters: The fused parameters of experts that have adapters, by the end of their names.
      dropout: The share of the inputs that is dropped in training.
      has_magnitudes: Whether the adapters have magnitudes (DoRA).
      modules: The modules that are trained as a whole, by the end of their names.
      is_tied: Whether a head that is tied to the embedding is trained as the embedding is.
      tokens: The tokens whose rows are trained, by the end of a module's name; `""` stands for the
        embedding.
    """

    alpha: float
    rank_stabilized: bool
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()
    dropout: float = 0.0
    has_magnitudes: bool = False
    modules: tuple[str, ...] = ()
    is_tied: bool = False
    tokens: Mapping[str, tuple[int, ...]] = {}

    def tokens_of(self, module: str, *, is_embedding: bool) -> tuple[int, ...]:
        """Returns the tokens whose rows of an embedding or a head are trained."""
        for name, tokens in self.tokens.items():
            if module.endswith(name) if name else is_embedding:
                return tokens
        return ()

    def trains(self, module: str) -> bool:
        """Returns whether the module with this name is trained as a whole."""
        parts = module.split(".")
        around = (".".join(parts[: number + 1]) for number in range(len(parts)))
        return any(name.endswith(self.modules) for name in around)

    def targets(self, parameter: str) -> bool:
        """Returns whether the fused parameter with this name has an adapter."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.parameters)

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of the product in a module whose adapter has this rank."""
        alpha = self.alpha
        for key, value in self.alphas.items():
            name = key.strip("^$")
            if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
                alpha = value
                break
        return alpha / (rank**0.5 if self.rank_stabilized else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Reads an `adapter_config.json`."""
    try:
        given = read_model_object(path, path.parent)
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} has no {path.name}, expected a directory of peft."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} {printable(error)}; expected the config of peft.") from None

    def refuse(key: str, expected: str) -> ValueError:
        return ValueError(
            f"{path}: {printable(key)} is {given.get(key)!r:.100}, expected {expected}."
        )

    if given.get("peft_type") != "LORA":
        raise refuse("peft_type", "'LORA'")
    alpha: Any = given.get("lora_alpha")
    if not _is_number(alpha):
        raise refuse("lora_alpha", NUMBER)
    rank = given.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < LARGEST:
        raise refuse("r", "a rank of at least 1")
    for key in ("use_rslora", "use_dora", "ensure_weight_tying"):
        if not isinstance(given.get(key, False), bool):
            raise refuse(key, "true or false")
    dropout = given.get("lora_dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise refuse("lora_dropout", "a number from 0 to below 1")
    modules = given.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(x, str) and x for x in modules):
        raise refuse("modules_to_save", "names of modules")
    tokens = given.get("trainable_token_indices") or {}
    tokens = {"": tokens} if isinstance(tokens, list) else tokens
    if not isinstance(tokens, dict) or not all(map(_are_tokens, tokens.values())):
        raise refuse("trainable_token_indices", "tokens, or a dict of them by module")
    alphas = given.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(map(_is_number, alphas.values())):
        raise refuse("alpha_pattern", f"{NUMBER} for the name of each module")
    if not all(map(_PLAIN.fullmatch, alphas)):
        raise refuse("alpha_pattern", "names of modules, not regular expressions")
    parameters = given.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(
        isinstance(name, str) and is_known(name) for name in parameters
    ):
        raise refuse(
            "target_parameters",
            "names that end with experts.gate_up_proj, experts.down_proj or .weight",
        )
    for key, value in given.items():
        if key in USED or key in UNUSED or value in (*EMPTY, *HARMLESS.get(key, ())):
            continue
        raise refuse(key, "nothing, because lora has no such option")
    return PeftConfig(
        float(alpha),
        given.get("use_rslora", False),
        alphas,
        tuple(parameters),
        dropout=float(dropout),
        has_magnitudes=given.get("use_dora", False),
        modules=tuple(modules),
        is_tied=given.get("ensure_weight_tying", False),
        tokens={name: tuple(x) for name, x in tokens.items()},
    )


def peft_config(
    ranks: Mapping[str, int],
    parameters: Mapping[str, int],
    model: LowRankModel,
    base: str,
    *,
    modules: Collection[str],
    is_tied: bool,
) -> dict[str, Any]:
    """Makes an `adapter_config.json`.

    Args:
      ranks: The rank of each adapted module, by its name.
      parameters: The rank of each parameter for `target_parameters`, by its name.
      modules: The modules that are trained as a whole.
      is_tied: Whether one of them is an embedding that is also the head.
    """
    both = {**ranks, **parameters}
    # Peft warns of a pattern that matches parameters and no module, and still applies it.
    rank = max((parameters or ranks).values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": model.alpha,
        "use_rslora": model.rank_stabilized,
        "rank_pattern": {f"^{name}$": own for name, own in both.items() if own != rank},
        "target_modules": sorted(ranks) or None,
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "lora_dropout": model.dropout,
        "use_dora": model.magnitudes,
        "modules_to_save": sorted(modules) or None,
        **({"ensure_weight_tying": True} if is_tied else {}),
    }


def _are_tokens(x: Any) -> bool:
    """Returns whether `x` is a list of different tokens."""
    if not isinstance(x, list) or not x or any(type(token) is not int for token in x):
        return False
    return min(x) >= 0 and len({*x}) == len(x)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and x > 0 and is_float32(x)


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
            used = own.any(0) if up.any() else np.ones(rank, bool)
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


# -------------------------------------------------------------------------------------------------


CONFIG_FILE, ARRAYS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"


def export_peft(
    program: Program, state: TrainState, directory: GivenPath, *, base: str = ""
) -> Path:
    """Writes the adapters of a state for the library peft, without the base model.

    ```python
    export_peft(program, state, "adapters/mine", base="models/llama")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapters/mine")
    ```

    Args:
      program: A program of a `Transformer` with adapters, see `lora`.
      state: The program's state; not donated.
      directory: The folder to make. It must not exist.
      base: The directory or the name of the base model, for `base_model_name_or_path`. The config
        in a directory decides how the modules are named.

    Returns:
      The folder.

    Raises:
      ValueError: The model has no adapters, or adapters that peft has no tensors for; or the
        folder exists already. Nothing has been written.
      OSError: The files cannot be written; no folder has been made.

    Communication:
      With several processes an all-gather for each adapter; with one process none.
    """
    require("export_peft", "safetensors")
    from safetensors.numpy import save

    model = lora_interface("export_peft", program).low_rank
    check_state("export_peft", program.abstract_state, state)
    target = new_folder("export_peft", directory)
    is_directory = bool(base) and (Path(base) / MODEL_CONFIG_FILE).is_file()
    family = read_architecture(base).family if is_directory else ""
    places, of_model = _places_of(program, family)
    vocab_size = transformer_of(program).vocab_size
    adapters = read_adapters("export_peft", program, state)
    base_size = read_architecture(base).fields["vocab_size"] if is_directory else vocab_size
    values, modules = _whole_tensors(program, state, family, set(adapters), base_size != vocab_size)
    for path, own in adapters.items():
        part = DOWN if path.endswith(DOWN) else UP
        for place in places[adapted_path(path)] if is_adapter(path) else ():
            one = own[place.piece.entry]
            if path.endswith(MAGNITUDE):
                values[place.magnitude] = place.to_peft(UP, one[None])[:, 0].copy()
                continue
            if "V" in (dims := place.dims(part)[0]):
                one = np.take(one, range(vocab_size), axis=dims.index("V") + (part == UP))
            values[place.names[part == UP]] = place.to_peft(part, one)
    is_tied = transformer_of(program).tied_head and "embedding" in adapters
    fused = join_experts(values, modules_of_experts(of_model), model.scale)
    ranks = join_fused(values, fused_modules(of_model), model.scale)
    ranks |= {
        place.module: len(values[place.names[0]])
        for of_path in places.values()
        for place in of_path
        if place.names[0] in values
    }
    if transformer_of(program).experts.num_experts:
        for module in weights_to_name(ranks):
            fused[f"{module}.weight"] = ranks.pop(module)

    def make_files() -> dict[str, bytes]:
        config = peft_config(ranks, fused, model, base, modules=modules, is_tied=is_tied)
        return {
            ARRAYS_FILE: save(values, metadata={"format": "pt"}),
            CONFIG_FILE: json.dumps(config, indent=2).encode() + b"\n",
        }

    write_folder("export_peft", target, make_files)
    return target


def _whole_tensors(
    program: Program, state: TrainState, family: str, saved: Collection[str], is_resized: bool
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the tensors of modules that are saved whole, by name, and the trained modules.

    Like peft it adds the embedding and the head if the base model has fewer tokens.
    """
    model, arrays = transformer_of(program), jax.tree.leaves(variables_of(state))
    pieces = whole_pieces(model, _shapes_of(program), family)
    if unknown := sorted(x for x in saved if not is_adapter(x) and x not in pieces):
        raise ValueError(
            f"peft: save names {', '.join(list_some(unknown))}, expected parameters that are "
            "weights of their own in transformers. Keep them with save_adapters or export_hf."
        )
    modules = {module_of(piece) for path in saved if path in pieces for piece in pieces[path]}
    values = {}
    for leaf, x in zip(variable_leaves(program), arrays, strict=True):
        path = parameter_path(leaf)
        of_path = pieces.get(path, []) if leaf.keys[0] == "params" else []
        wanted = [
            piece
            for piece in of_path
            if module_of(piece) in modules or (is_resized and path in TABLES)
        ]
        whole = read_unpadded("export_peft", leaf, x).astype(np.float32) if wanted else None
        for piece in wanted:
            assert whole is not None
            values[PREFIX + piece.tensor] = to_whole(piece, whole[piece.entry], model.vocab_size)
            if path == "embedding" and model.tied_head:
                values[f"{PREFIX}{HEADS[0]}.weight"] = values[PREFIX + piece.tensor].copy()
    return values, sorted(modules)


def lora_of_peft(model: Any, directory: GivenPath) -> LowRankModel:
    """Adds the adapters of a directory of peft to a model; `load_peft` loads their values.

    ```python
    model = lora_of_peft(Transformer(**read_architecture("models/llama").fields), "adapters/mine")
    state = load_hf(program, "models/llama", missing="init")
    state = load_peft(program, state, "adapters/mine")
    ```

    Args:
      model: A `Transformer`, or the result of `quantized` of one.
      directory: A directory that `save_pretrained` of peft or `export_peft` wrote.

    Raises:
      TypeError: The model is another one.
      ValueError: The files are damaged, or have something that `lora` has not; the message names
        it.
    """
    base: Any = model.model if isinstance(model, QuantizedModel) else model
    if not isinstance(base, Transformer):
        raise TypeError(
            f"lora_of_peft: model is a {type(base).__name__}, expected a Transformer or quantized "
            "of one."
        )
    source = local_path(directory, "lora_of_peft: directory")
    config, tensors = read_peft_config(source / CONFIG_FILE), _read(source)
    shapes = _initial_shapes(base)
    family = find_family(base, shapes, tensors)
    pieces = whole_pieces(base, shapes, family)
    number = _rows_of(tensors, module_of(pieces["embedding"][0]))
    if number > base.vocab_size:  # The adapters come with new tokens.
        base = base.clone(vocab_size=number)
        model = (
            dataclasses.replace(model, model=base) if isinstance(model, QuantizedModel) else base
        )
        shapes = _initial_shapes(base)
    places = find_places(base, shapes, list(filter(may_have_place, shapes)), family=family)
    wrong = _split_adapters(tensors, config, places)
    whole, lines = _take_whole(tensors, config, pieces, is_tied=base.tied_head)
    wrong += lines
    targets: dict[str, int] = {}
    for path, of_path in places.items():
        found = [tensors[place.names[0]] for place in of_path if place.names[0] in tensors]
        if rank := max((len(x) for x in found), default=0):
            targets[path.removesuffix("/kernel")] = rank
        if config.has_magnitudes and 0 < len(found) < len(of_path):
            wrong.append(
                f"DoRA in {len(found)} of {len(of_path)} stacked layers of {path}, which needs "
                "scan_layers=False"
            )
    if left := wrong + _left_over(tensors, places, config):
        raise ValueError(
            f"{source} has {', '.join(list_some(left))}; expected LoRA adapters of the layers, "
            "the experts, the untied embedding or the head of the model, magnitudes (DoRA) only of "
            "layers, and modules_to_save."
        )
    if some := sorted(path for path, own in whole.items() if own.tokens):
        warnings.warn(
            f"lora_of_peft: {source} has trainable_token_indices; if these adapters are trained "
            f"further, all rows of {' and '.join(some)} are trained, not only those of the tokens.",
            stacklevel=2,
        )
    if not targets:
        raise ValueError(
            f"{source} has no adapters of this model, expected tensors such as lora_A."
        )
    return lora(
        model,
        targets,
        alpha=config.alpha,
        rank_stabilized=config.rank_stabilized,
        dropout=config.dropout,
        magnitudes=config.has_magnitudes,
        save=sorted(
            path
            for path, own in whole.items()
            if own.tokens or any(config.trains(module_of(x)) for x in pieces[path])
        ),
    )


def _initial_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    # Nothing here asks JAX for its devices, which a command chooses later.
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with planned_device(Device("cpu")), jax.sharding.use_abstract_mesh(mesh):
        variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), tokens)
    params = flatten_dict(nn.meta.unbox(variables["params"]), sep="/")
    return {path: x.shape for path, x in params.items()}


class _Whole(NamedTuple):
    """What a file has of a parameter that is stored whole.

    Attributes:
      tensors: The tensor of each piece; empty if the file has only some tokens' rows.
      tokens: The tokens whose rows are trained (`trainable_token_indices`).
      rows: The rows of these tokens, `[tokens, D]`.
    """

    tensors: list[np.ndarray]
    tokens: tuple[int, ...] = ()
    rows: np.ndarray | None = None


def _rows_of(tensors: Mapping[str, np.ndarray], module: str) -> int:
    """Returns the number of rows of a module that is stored whole; 0 if it is not."""
    names = (f"{PREFIX}{module}{end}" for end in (".weight", f"{TOKENS}base_layer.weight"))
    return max((len(tensors[name]) for name in names if name in tensors), default=0)


def _take_whole(
    tensors: MutableMapping[str, np.ndarray],
    config: PeftConfig,
    pieces: Mapping[str, Sequence[TensorPiece]],
    *,
    is_tied: bool,
) -> tuple[dict[str, _Whole], list[str]]:
    """Takes the tensors of whole modules out of those of a file.

    Returns:
      What the file has, by the paths of our parameters, and what does not fit.
    """
    found: dict[str, _Whole] = {}
    wrong = []
    for path, of_path in pieces.items():
        modules = [module_of(piece) for piece in of_path]
        heads = HEADS if is_tied and path == "embedding" else ()
        for module in (*modules, *heads):
            _simplify(tensors, f"{PREFIX}{module}")
        key = f"{PREFIX}{modules[0]}{TOKENS}{DELTA}"
        rows = tensors.pop(key, None) if path in TABLES else None
        tokens = config.tokens_of(modules[0], is_embedding=path == "embedding")
        if rows is not None and (len(rows) != len(tokens) or rows.ndim != 2):
            wrong.append(f"{key} of the shape {list(rows.shape)} for {len(tokens)} tokens")
            continue
        names = [PREFIX + piece.tensor for piece in of_path]
        own = [tensors[name] for name in names if name in tensors]
        is_trained = any(map(config.trains, modules))
        # A resized embedding is stored, but not trained.
        if not (is_trained or path in TABLES) or (not own and rows is None):
            continue
        if 0 < len(own) < len(names):
            wrong.append(f"{len(own)} of the {len(names)} stacked layers of {path}")
        for name in names:
            tensors.pop(name, None)
        found[path] = _Whole(own, tokens if rows is not None else (), rows)
        copies = [tensors.pop(f"{PREFIX}{head}.weight", None) for head in heads]
        more = [tensors.pop(f"{PREFIX}{head}{TOKENS}{DELTA}", None) for head in heads]
        is_other = any(x is not None and not np.array_equal(x, own[0]) for x in copies if own)
        is_other |= any(x is not None and not np.array_equal(x, rows) for x in more)
        is_alone = is_trained and not config.is_tied and not any(x is not None for x in copies)
        if heads and (is_other or is_alone):
            wrong.append(
                "an embedding without its head, although the model ties them (train it with "
                "ensure_weight_tying=True)"
            )
    return found, wrong


def _simplify(tensors: MutableMapping[str, np.ndarray], module: str) -> None:
    """Takes away the copies of a module's weight that peft writes if the embedding was resized."""
    if (name := f"{module}.weight") in tensors:
        for kind in ("original_module", "modules_to_save"):
            tensors.pop(f"{module}.{kind}.weight", None)
    base = tensors.pop(f"{module}{TOKENS}base_layer.weight", None)
    if base is not None:
        tensors[name] = base


def load_peft(program: Program, state: TrainState, directory: GivenPath) -> TrainState:
    """Loads adapters that peft or `export_peft` has written, and returns the new state.

    Args:
      program: A program of a model with these adapters, such as `lora_of_peft` makes.
      state: The program's state; not donated. Only what the files have is replaced.
      directory: The directory of the adapters.

    Raises:
      ValueError: The files are damaged, have something that `lora` has not, or do not fit the
        program's adapters. The message names it, and nothing has been loaded.

    Communication:
      None. Each device receives its shard.
    """
    model = lora_interface("load_peft", program).low_rank
    check_state("load_peft", program.abstract_state, state)
    source = local_path(directory, "load_peft: directory")
    config, tensors = read_peft_config(source / CONFIG_FILE), _read(source)
    vocab_size = transformer_of(program).vocab_size
    family = find_family(transformer_of(program), _shapes_of(program), tensors)
    places, of_model = _places_of(program, family)
    lines = _split_adapters(tensors, config, of_model)
    pieces = whole_pieces(transformer_of(program), _shapes_of(program), family)
    is_tied = transformer_of(program).tied_head
    whole, more = _take_whole(tensors, config, pieces, is_tied=is_tied)
    lines += more
    leaves, arrays = variable_leaves(program), jax.tree.leaves(variables_of(state))
    by_path = {parameter_path(leaf): (leaf, x) for leaf, x in zip(leaves, arrays, strict=True)}
    values: dict[str, np.ndarray] = {}
    lines += [f"{name} is left over" for name in _left_over(tensors, places, config)]
    for path in whole.keys() - by_path.keys():
        lines.append(f"{path} is whole, and in codes here")
    for path, (leaf, array) in by_path.items():
        if path in whole:
            values[path], more = _filled(leaf, array, whole[path], pieces[path], vocab_size)
            lines += more
        elif path not in whole and not is_adapter(path) and model.saves(path):
            lines.append(f"{path} is missing")
        if not is_adapter(path):
            continue
        of_path = places[adapted_path(path)]
        own = [place for place in of_path if not tensors.keys().isdisjoint(place.names)]
        if not own:
            lines.append(f"{of_path[0].names[path.endswith(UP)]} is missing")
        values[path] = np.zeros(leaf.shape, np.float32)
        if path.endswith(MAGNITUDE):
            for place in of_path:
                lines += _fill_magnitude(values[path][place.piece.entry], place, tensors)
            continue
        for place in own:
            where = values[path][place.piece.entry]
            wrong = list(_fill(where, path, place, tensors, vocab_size))
            lines += wrong
            if path.endswith(UP) and not wrong and (rank := tensors[place.names[1]].shape[1]):
                with _overflow_is_infinite():
                    where *= config.scale(place.module, rank) / model.scale(where.shape[0])
    for path, (place, *_) in places.items():
        copy = tensors.get(f"{PREFIX}{place.module}.base_layer.weight")
        if copy is not None and path in by_path:
            x = read_unpadded("load_peft", *by_path[path])
            x = x[:vocab_size] if path == "embedding" else x[:, :vocab_size].T
            if copy.shape != x.shape or (copy.astype(x.dtype) != x).any():
                lines.append(f"{place.module}.base_layer.weight is another {path} than the base's")
    if lines:
        raise ValueError(
            f"load_peft: the adapters in {source} are not the program's: "
            f"{'; '.join(list_some(lines))}. Make the model with lora_of_peft."
        )
    return replace_adapters("load_peft", program, state, values)


def _filled(
    leaf: Leaf, x: jax.Array, whole: _Whole, pieces: Sequence[TensorPiece], vocab_size: int
) -> tuple[np.ndarray, list[str]]:
    """Makes a parameter from the tensors of a file; returns also what does not fit."""
    value, wrong = np.zeros(leaf.shape, np.float32), []
    if not whole.tensors:
        value = read_unpadded("load_peft", leaf, x).astype(np.float32)
    for piece, tensor in zip(pieces, whole.tensors, strict=False):
        where = value[piece.entry]
        sizes = tuple(
            vocab_size if name == "V" else size
            for name, size in zip(piece.dims, where.shape, strict=True)
        )
        if tensor.shape != (expected := piece.tensor_shape(sizes)):
            wrong.append(
                f"{piece.tensor} has the shape {list(tensor.shape)}, expected {list(expected)}"
            )
            continue
        where[tuple(map(slice, sizes))] = from_whole(piece, tensor, sizes)
    if whole.rows is not None:
        rows = value if pieces[0].dims[0] == "V" else value.T
        if max(whole.tokens) >= vocab_size or whole.rows.shape[1] != rows.shape[1]:
            wrong.append(
                f"{pieces[0].tensor} has rows of the shape {list(whole.rows.shape)} for tokens up "
                f"to {max(whole.tokens)}, expected {rows.shape[1]} features and tokens below "
                f"{vocab_size}"
            )
        else:
            rows[list(whole.tokens)] = whole.rows
    return value, wrong


def _fill_magnitude(
    where: np.ndarray, place: Place, tensors: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Copies a tensor to `where`, one layer's `lora_magnitude`; yields what does not fit."""
    x = tensors.get(place.magnitude)
    if x is None or x.shape != (where.size,):
        got = "is missing" if x is None else f"has the shape {list(x.shape)}"
        yield f"{place.magnitude} {got}, expected {[where.size]}"
        return
    sizes = dict(zip(place.dims(UP)[0], where.shape, strict=True))
    where[...] = place.from_peft(UP, x[:, None], sizes)[0]


def _fill(
    where: np.ndarray, path: str, place: Place, tensors: Mapping[str, np.ndarray], vocab_size: int
) -> Iterator[str]:
    """Copies a tensor to `where`, one layer's `lora_a` or `lora_b`; yields what does not fit."""
    part = DOWN if path.endswith(DOWN) else UP
    name = place.names[part == UP]
    if name not in tensors:
        yield f"{name} is missing"
        return
    x, own = tensors[name], place.dims(part)[0]
    sizes = where.shape[:-1] if part == DOWN else where.shape[1:]
    sizes = tuple(vocab_size if dim == "V" else size for dim, size in zip(own, sizes, strict=True))
    most = where.shape[-1] if part == DOWN else where.shape[0]
    rank, features = x.shape if part == DOWN else x.shape[::-1]
    other = tensors.get(place.names[part == DOWN])
    is_unlike = other is not None and other.shape[part == DOWN] != rank
    if features != math.prod(sizes) or rank > most or is_unlike:
        yield f"{name} has the shape {list(x.shape)}, expected rank {most} and {math.prod(sizes)}"
        return
    one = place.from_peft(part, x, dict(zip(own, sizes, strict=True)))
    where[tuple(map(slice, one.shape))] = one


def _shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a program without adapters, before quantization."""
    plain, _ = plain_leaves(program, variable_leaves(program))
    shapes = {parameter_path(leaf): leaf.shape for leaf in plain}
    return {path: shape for path, shape in shapes.items() if not is_adapter(path)}


def _places_of(
    program: Program, family: str
) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Returns the modules of each adapted parameter of a program by path, and of all parameters."""
    names = map(parameter_path, variable_leaves(program))
    adapted = {adapted_path(path) for path in names if is_adapter(path)}
    shapes, model = _shapes_of(program), transformer_of(program)
    places = find_places(model, shapes, adapted, family=family, refuse=True)
    return places, find_places(model, shapes, list(filter(may_have_place, shapes)), family=family)


def _split_adapters(
    tensors: dict[str, np.ndarray], config: PeftConfig, places: Mapping[str, Sequence[Place]]
) -> list[str]:
    """Splits the adapters of fused weights and of fused experts in `tensors`.

    `places` has the modules of all parameters of the model.

    Returns:
      Descriptions of fused tensors that do not fit the model.
    """
    experts = modules_of_experts(places)
    with _overflow_is_infinite():
        wrong = split_experts(tensors, experts, config.targets, config.scale)
        return wrong + split_fused(tensors, fused_modules(places), config.scale)


def _overflow_is_infinite() -> np.errstate:
    """Prevents warnings of numbers that overflow, because `replace_adapters` refuses infinity."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")


def _left_over(
    tensors: Mapping[str, np.ndarray], places: Mapping[str, Sequence[Place]], config: PeftConfig
) -> list[str]:
    """Returns the names of tensors that the adapters of the modules in `places` do not have."""
    known = {
        name
        for path, of_path in places.items()
        for place in of_path
        for name in (
            *place.names,
            f"{PREFIX}{place.module}.base_layer.weight",
            *([place.magnitude] if config.has_magnitudes and path.endswith("/kernel") else []),
        )
    }
    used = {name for name, x in tensors.items() if x.size}
    return sorted(printable(name) for name in used - known)


def _read(directory: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of an adapter in float32."""
    require("load_peft", "safetensors")
    import safetensors

    path, found = directory / ARRAYS_FILE, {}
    try:
        real = model_file(path, directory)
        file, _ = open_tensors(real)
        with file, safetensors.safe_open(real, framework="np", backend="pread"):
            for name, place in read_header(file).items():
                is_matrix = ".lora_" in name and not name.endswith(MAGNITUDE_VECTOR)
                dims = (2,) if is_matrix else (1, 2)
                if place.dtype not in DTYPES.values() or len(place.shape) not in dims:
                    raise ValueError(
                        f"has {printable(name)} of {place.dtype} with {len(place.shape)} dims, "
                        f"expected {'matrices' if is_matrix else 'a matrix or a vector'} of floats"
                    )
                whole = tuple(map(slice, place.shape))
                x = read_slice(file.fileno(), place, whole, jnp.dtype(place.dtype))
                with _overflow_is_infinite():
                    found[name] = x.astype(np.float32)
                if not np.isfinite(found[name]).all():
                    raise ValueError(
                        f"has {printable(name)} with NaN or infinity, expected finite numbers; "
                        "the file is damaged, or its training has diverged"
                    )
    except FileNotFoundError:
        pickled = " Pickled adapters are not unpickled." if (directory / PICKLED).exists() else ""
        raise ValueError(
            f"{directory} has no {ARRAYS_FILE}, expected a directory of peft.{pickled}"
        ) from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} {printable(error)}.") from None
    return found
