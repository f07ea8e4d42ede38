"""Converts the adapters of experts between a module for each weight and fused parameters.

Transformers 5 has the weights of all `E` experts of a layer in two parameters: `gate_up_proj`,
whose outputs are those of all gates and then those of all up-projections, and `down_proj`. The
option `target_parameters` of peft adapts such a parameter. Its `lora_A` is `[(E r), in]`, and its
`lora_B` is `[out, (r E)]`. If both have an adapter, that of `gate_up_proj` is in `base_layer`.

Our experts have an adapter for each of the three weights. An adapter that is read for
`gate_up_proj` becomes two adapters with the same `lora_a`. Two adapters that are written for it
become one, whose rank is the sum of their ranks, or their rank if both have the same `lora_a`. If
it is read again, each of the two gets back its own rank, because the other entries are zeros.
"""

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from manualpar.models.pretrained.peft_places import PREFIX, Place

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
