"""Converts the adapters of fused weights between one module and a module for each part.

Some families have several of our kernels in one weight, such as Phi-3's `qkv_proj` and GPT-2's
`c_attn`. Peft adapts such a weight as a whole: its parts have one `lora_A` `[r, in]`, and each has
some rows of `lora_B` `[out, r]`. So an adapter that is read becomes one for each part with the same
`lora_a`.

If the parts are trained, their `lora_a` differ. Then the adapter that is written has the sum of
their ranks: `lora_A` stacks theirs, and `lora_B` has the block of each part in its rows and its
ranks, and zeros elsewhere. The product is exactly that of the parts. If it is read again, each part
gets back its own rank, because a part has no use for ranks in which all of its rows are zeros.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

import numpy as np

from manualpar.models.pretrained.peft_places import PREFIX, Place


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
        for part in parts:
            own = up[list(part.rows)]
            used = own.any(0) if up.any() else np.ones(rank, bool)
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
    return ranks


def _names(module: str) -> tuple[str, str]:
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"
