"""Reads and writes the `adapter_config.json` of the library peft.

A key that changes the function of the model, and for which `lora` has nothing, is refused by its
name. `USED` are the keys that are read, `UNUSED` the keys without effect on a trained adapter.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.errors import printable
from manualpar.models.pretrained.peft_experts import is_known
from manualpar.system.storage.untrusted import read_object

USED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"),
    "target_parameters",
)
# The tensors say which modules have adapters. The others concern training, or name files.
UNUSED = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "inference_mode", "eva_config", "qalora_group_size", "megatron_core"),
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
_PLAIN = re.compile(r"\^?[\w.]+\$?")


class PeftConfig(NamedTuple):
    """The numbers of an `adapter_config.json`.

    Attributes:
      alpha: The number over which the rank divides.
      rank_stabilized: Whether the square root of the rank divides instead.
      alphas: Other numbers for some modules, by the end of their names.
      parameters: The fused parameters of experts that have adapters, by the end of their names.
    """

    alpha: float
    rank_stabilized: bool
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()

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
    """Reads an `adapter_config.json`.

    Raises:
      ValueError: The file is missing or damaged, or has something that `lora` has not; the message
        names the key.
    """
    try:
        given = read_object(path, follow_links=True)
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
        raise refuse("lora_alpha", "a number above 0")
    rank = given.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < LARGEST:
        raise refuse("r", "a rank of at least 1")
    if not isinstance(given.get("use_rslora", False), bool):
        raise refuse("use_rslora", "true or false")
    alphas = given.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(map(_is_number, alphas.values())):
        raise refuse("alpha_pattern", "numbers above 0 by the names of modules")
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
    return PeftConfig(float(alpha), given.get("use_rslora", False), alphas, tuple(parameters))


def peft_config(
    ranks: Mapping[str, int],
    parameters: Mapping[str, int],
    alpha: float,
    base: str,
    *,
    rank_stabilized: bool,
) -> dict[str, Any]:
    """Makes an `adapter_config.json`.

    Args:
      ranks: The rank of each adapted module, by its name.
      parameters: The rank of each parameter for `target_parameters`, by its name.
      alpha: The number over which the rank divides.
      base: The name or the directory of the base model.
      rank_stabilized: Whether the square root of the rank divides instead.
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
        "lora_alpha": alpha,
        "use_rslora": rank_stabilized,
        "rank_pattern": {f"^{name}$": own for name, own in both.items() if own != rank},
        "target_modules": sorted(ranks) or None,
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "lora_dropout": 0.0,
    }


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
