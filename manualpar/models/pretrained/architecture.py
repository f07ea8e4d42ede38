"""Reads a model's `config.json` as fields of a `Transformer`.

A key for which a `Transformer` has no field is refused, unless its value is empty or the key does
not affect the model's results (`families.UNUSED_KEYS`). So the `Transformer` computes the same
function as the model's original code.

Version 5 of transformers writes `rope_parameters` and `layer_types`. Older versions write
`rope_theta`, `rope_scaling` and other keys. Both kinds of files are supported.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from manualpar.models import Transformer
from manualpar.models.flat_fields import flatten_fields, nest_fields
from manualpar.models.pretrained.decoded_files import quantization_of
from manualpar.models.pretrained.directory import CONFIG_FILE, model_directory
from manualpar.models.pretrained.expert_keys import read_experts, read_latent
from manualpar.models.pretrained.families import (
    ALIASES,
    FAMILIES,
    INERT_KEYS,
    UNSUPPORTED,
    UNUSED_KEYS,
    WRAPPERS,
)
from manualpar.models.pretrained.family import Family
from manualpar.models.pretrained.keys import LARGEST, Keys
from manualpar.models.pretrained.rotations import FULL, SLIDING, read_rotations
from manualpar.system.storage import GivenPath, user_path
from manualpar.system.storage.untrusted import read_object

# Names of activations: in `config.json` -> in `Transformer`.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "exact_gelu",
}
# Whose old files say `gelu` and mean its approximation.
GELU_IS_TANH = frozenset({"gemma"})
# The text model of a multimodal model whose `text_config` does not name it.
OF_WRAPPER = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "aya_vision": "cohere2",
}
NULLABLE = ("q_lora_rank",)  # Keys for which `null` is no default, but stands for 0.
DEEPEST = 10_000  # The most layers.


class Architecture(NamedTuple):
    """The contents of a `config.json`.

    Attributes:
      family: The value of `model_type`.
      wrapper: The `model_type` of the multimodal model around the text model; `""` for none.
      flat_fields: The fields of the `Transformer` by their flat names, as in configs.
    """

    family: str
    flat_fields: dict[str, Any]
    wrapper: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments of the `Transformer`."""
        return nest_fields(self.flat_fields)


def read_architecture(directory: GivenPath) -> Architecture:
    """Reads the `config.json` of a directory, which may be in a bucket.

    Raises:
      ValueError: The file is missing, is not a JSON object, or describes a model that `Transformer`
        does not support; the message names the key.
    """
    return parse_architecture(read_config(directory), where=str(user_path(directory) / CONFIG_FILE))


def read_config(directory: GivenPath) -> dict[str, Any]:
    """Reads the JSON object in the `config.json` of a directory.

    Raises:
      ValueError: The file is missing, or does not contain a JSON object.
    """
    directory = model_directory(directory, weights=False)
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory; expected a directory with {CONFIG_FILE} and "
            ".safetensors files."
        )
    try:
        return read_object(path, follow_links=True)
    except FileNotFoundError:
        raise ValueError(
            f"{directory} has no {CONFIG_FILE}; expected the directory of a model, as "
            "save_pretrained of transformers writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} {error}; expected the config of a model.") from None


def parse_architecture(config: Mapping[str, Any], *, where: str = CONFIG_FILE) -> Architecture:
    """Converts a `config.json` to fields of a `Transformer`.

    Args:
      config: The JSON object.
      where: The name of the file in error messages.

    Raises:
      ValueError: See `read_architecture`.
    """
    config, wrapper = text_config(config)
    keys = Keys(config, where)
    try:
        quantization_of(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}.") from None
    keys.left.pop("quantization_config", None)
    name = keys.get("model_type", "")
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = f"one of {', '.join(map(repr, FAMILIES))}"
        if isinstance(name, str) and name in UNSUPPORTED:
            known += f"; these models have {UNSUPPORTED[name]}, which a Transformer lacks"
        raise keys.refuse("model_type", name, known)
    if family.prepare:
        family.prepare(keys)
    for key, value in family.must_be.items():
        if (found := keys.take(key, value)) != value and (found or value):
            raise keys.refuse(key, found, f"{value!r}, the only value that a Transformer supports")
    fields: dict[str, Any] = dict(family.fixed)
    if name == "qwen3_moe" and "num_local_experts" in keys.left:
        keys.left["num_experts"] = keys.left.pop("num_local_experts")
    if name == "deepseek_v2" and keys.get("topk_method", "greedy") == "greedy":
        keys.left |= {"n_group": 1, "topk_group": 1}  # They may be null, and have no effect.
    for key, field in family.keys.items():
        fields[field] = _value(keys, key, field, family)
    if "latent_rank" in fields:
        fields |= read_latent(keys, fields)
    fields["num_kv_heads"] = fields.get("num_kv_heads") or fields["num_heads"]
    fields["head_size"] = fields.get("head_size") or fields["hidden_size"] // fields["num_heads"]
    if not fields["head_size"]:
        heads = fields["num_heads"]
        raise keys.refuse(
            "hidden_size", fields["hidden_size"], f"at least 1 for each of {heads} heads"
        )
    if family.reciprocal:
        field = family.keys[family.reciprocal]
        fields[field] = 1 / fields[field]
    if family.scale_key:
        fields["attention_scale"] = fields["attention_scale"] ** -0.5
    activation = keys.take(family.activation_key, family.activation) or family.activation
    if family.activation_key != "hidden_act":
        keys.left.pop("hidden_act", None)  # The family's own key replaces `hidden_act`.
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise keys.refuse(
            family.activation_key, activation, f"one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    if name in GELU_IS_TANH and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # As transformers does for the first files.
    fields["activation"] = ACTIVATIONS[activation]
    if "num_experts" in fields:
        fields |= read_experts(keys, name, fields)
    fields |= _windows(keys, family, fields["num_layers"])
    fields |= family.read(keys, fields) if family.read else {}
    fields |= read_rotations(keys, name, fields)
    _warn_of_inert(keys, family, wrapper)
    for key, value in keys.left.items():
        if key not in UNUSED_KEYS and value not in (None, False, 0, "", [], {}):
            raise keys.refuse(
                key,
                value,
                f"no such key in a model of {name!r}: a Transformer has no field for it. If the "
                "key does not affect the model's results, delete it from the file",
            )
    return Architecture(name, fields, wrapper)


def text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Returns the config of the text model in a multimodal model, and the `model_type` around it.

    The config of a text model is returned as it is, with `""`.
    """
    wrapper, inner = config.get("model_type"), config.get("text_config")
    if not isinstance(wrapper, str) or wrapper not in WRAPPERS or not isinstance(inner, Mapping):
        return config, ""
    inner = {"model_type": OF_WRAPPER.get(wrapper, "llama"), **inner}
    for key in ("tie_word_embeddings", "torch_dtype", "dtype"):
        if key in config:
            inner.setdefault(key, config[key])
    return inner, wrapper


def _warn_of_inert(keys: Keys, family: Family, wrapper: str) -> None:
    """Warns of the keys that are ignored, each with the reason, and removes them."""
    reasons = {**INERT_KEYS, **family.ignored}
    found = {
        key: reasons[key]
        for key, value in keys.left.items()
        if key in reasons and value not in (None, False, 0, "", [], {})
    }
    lines = [f"{key} ({reason})" for key, reason in found.items()]
    if wrapper:
        lines.append(f"all of {wrapper!r} except its text model ({WRAPPERS[wrapper]})")
    for key in found:
        del keys.left[key]
    if lines:
        warnings.warn(f"{keys.where}: ignored {'; '.join(lines)}.", stacklevel=4)


def _value(keys: Keys, key: str, field: str, family: Family) -> Any:
    """Reads the value of `key`, which sets the field `field` of the `Transformer`."""
    default = DEFAULTS[field]
    value = keys.take(key, *([family.defaults[key]] if key in family.defaults else []))
    may_be_none = family.defaults.get(key, 0) is None or key in NULLABLE
    if value is None and (may_be_none or field in ("attention_soft_cap", "logit_soft_cap")):
        return 0.0 if isinstance(default, float) else 0
    if isinstance(default, bool):
        return keys.check(key, value, bool, lambda x: True, "true or false")
    if isinstance(default, float):
        return keys.check(key, value, float, lambda x: x > 0, "more than 0")
    # The code makes lists with an entry for each layer, so the number of layers must be bounded.
    most = DEEPEST if field == "num_layers" else LARGEST - 1
    return keys.check(key, value, int, lambda x: 0 < x <= most, f"an integer from 1 to {most:,}")


def _windows(keys: Keys, family: Family, num_layers: int) -> dict[str, Any]:
    """Reads the fields for sliding-window attention: the window, and the layers that use it."""
    pattern = keys.take("sliding_window_pattern", keys.take("_sliding_window_pattern", None))
    types = keys.take("layer_types", None)
    asked = keys.take("use_sliding_window", family.defaults.get("use_sliding_window", False))
    asked = keys.check("use_sliding_window", asked or False, bool, lambda x: True, "true or false")
    first = keys.take("max_window_layers", family.defaults.get("max_window_layers", 0)) or 0
    window = keys.get("sliding_window", 0)
    if family.windows != "none":
        window = keys.take("sliding_window", family.defaults.get("sliding_window"))
    window = window or 0
    keys.check("sliding_window", window, int, lambda x: 0 <= x < LARGEST, "a number of positions")
    every = pattern or family.window_every
    keys.check("sliding_window_pattern", every, int, lambda x: x == 0 or x > 1, "2 or more")
    kinds = [FULL] * num_layers
    if window and (family.windows == "all" or (family.windows == "all if asked" and asked)):
        kinds = [SLIDING] * num_layers
    elif family.windows == "last if asked" and asked and window:
        keys.check("max_window_layers", first, int, lambda x: 0 <= x < LARGEST, "a number")
        kinds = [SLIDING if index >= first else FULL for index in range(num_layers)]
    elif family.windows == "by turns":
        kinds = [FULL if (index + 1) % every == 0 else SLIDING for index in range(num_layers)]
    elif family.windows == "listed" and asked and types is None:
        raise keys.refuse(
            "use_sliding_window", asked, "False, or layer_types that list the layers with a window"
        )
    if types is not None:
        if family.windows in ("none", "all", "all if asked") and types != kinds:
            raise keys.refuse(
                "layer_types", types, f"the kinds that follow from sliding_window={window}"
            )
        kinds = types
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.refuse("layer_types", kinds, f"the kinds of {num_layers} layers")
    if all(kind == FULL for kind in kinds):
        return {"attention_window": 0, "global_every": 0}
    if not window:
        raise keys.refuse(
            "sliding_window", window, "the number of positions that sliding layers see"
        )
    if all(kind == SLIDING for kind in kinds):
        # If no layer is global, all layers are in one group that is too short for a global layer.
        every = max(every, num_layers + 1) if family.windows == "by turns" else 0
        return {"attention_window": window, "global_every": every}
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    turns = [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    if kinds != turns or every < 2:
        field = "layer_types" if types is not None else "max_window_layers"
        raise keys.refuse(
            field,
            first if types is None else kinds,
            f"layers that are all alike, or {FULL!r} for every n-th layer and {SLIDING!r} for the "
            "others",
        )
    return {"attention_window": window, "global_every": every}


# Flat name of a field of `Transformer` -> its default.
DEFAULTS = flatten_fields(Transformer())
