"""Reads a model's `config.json` as fields of a `Transformer`.

A key for which a `Transformer` has no field is refused, unless its value is empty or the key does
not affect the model's results (`families.UNUSED_KEYS`). So the `Transformer` computes the same
function as the model's original code.

Version 5 of transformers writes `rope_parameters` and `layer_types`. Older versions write
`rope_theta`, `rope_scaling` and other keys. Both kinds of files are supported.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manualpar.errors import printable
from manualpar.models import Transformer
from manualpar.models.flat_fields import flatten_fields, nest_fields
from manualpar.models.pretrained.decoded_files import quantization_of
from manualpar.models.pretrained.directory import CONFIG_FILE, model_directory
from manualpar.models.pretrained.families import (
    ALIASES,
    DENSE_FIRST,
    FAMILIES,
    UNUSED_KEYS,
    Family,
)
from manualpar.system.storage import GivenPath, user_path
from manualpar.system.storage.untrusted import read_object

# The kinds of layers in `layer_types`: layers without a window, and layers with a window.
FULL, SLIDING = "full_attention", "sliding_attention"
# Names of activations: in `config.json` -> in `Transformer`.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
# The default of `rope_theta` by family; 10,000 for all other families.
ROPE_BASE = {"mixtral": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0}
ROPE_FACTORS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_length",
}
# Families with experts in all layers, and no keys for dense layers.
WITHOUT_DENSE_LAYERS = ("mixtral", "gpt_oss")
NULLABLE = ("q_lora_rank",)  # Keys for which `null` is no default, but stands for 0.
LARGEST = 2**31  # Every size in a config must be smaller, and `num_layers` at most `DEEPEST`.
DEEPEST = 10_000


class Architecture(NamedTuple):
    """The contents of a `config.json`.

    Attributes:
      family: The value of `model_type`.
      flat_fields: The fields of the `Transformer` by their flat names, as in configs.
    """

    family: str
    flat_fields: dict[str, Any]

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
    keys = _Keys(config, where)
    try:
        quantization_of(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}.") from None
    keys.left.pop("quantization_config", None)
    name = keys.get("model_type", "")
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise keys.refuse("model_type", name, f"one of {', '.join(map(repr, FAMILIES))}")
    for key, value in family.must_be.items():
        if (found := keys.take(key, value)) != value and (found or value):
            raise keys.refuse(key, found, f"{value!r}, the only value that a Transformer supports")
    fields: dict[str, Any] = dict(family.fixed)
    if name == "qwen3_moe" and "num_local_experts" in keys.left:
        keys.left["num_experts"] = keys.left.pop("num_local_experts")
    if name == "deepseek_v2":
        _read_groups_of_v2(keys)
    for key, field in family.keys.items():
        fields[field] = _value(keys, key, field, family)
    if "latent_rank" in fields:
        fields |= _latent(keys, fields)
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    fields["head_size"] = fields["head_size"] or fields["hidden_size"] // fields["num_heads"]
    if not fields["head_size"]:
        heads = fields["num_heads"]
        raise keys.refuse(
            "hidden_size", fields["hidden_size"], f"at least 1 for each of {heads} heads"
        )
    if "query_pre_attn_scalar" in family.keys:
        fields["attention_scale"] = fields["attention_scale"] ** -0.5
    activation = keys.take(family.activation_key, next(iter(ACTIVATIONS)))
    if family.activation_key != "hidden_act":
        activation = activation or "gelu_pytorch_tanh"
        keys.left.pop("hidden_act", None)  # The family's own key replaces `hidden_act`.
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise keys.refuse(
            family.activation_key, activation, f"one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    fields["activation"] = ACTIVATIONS[activation]
    if "num_experts" in fields:
        fields |= _experts(keys, name, fields)
    fields |= _windows(keys, family, fields["num_layers"])
    fields |= _rotations(keys, name, has_windows=bool(fields.get("global_every")))
    for key, value in keys.left.items():
        if key not in UNUSED_KEYS and value not in (None, False, 0, "", [], {}):
            raise keys.refuse(
                key,
                value,
                f"no such key in a model of {name!r}: a Transformer has no field for it. If the "
                "key does not affect the model's results, delete it from the file",
            )
    return Architecture(name, fields)


def _value(keys: "_Keys", key: str, field: str, family: Family) -> Any:
    """Reads the value of `key`, which sets the field `field` of the `Transformer`."""
    default = DEFAULTS[field]
    value = keys.take(key, *([family.defaults[key]] if key in family.defaults else []))
    if value is None and (family.defaults.get(key, 0) is None or key in NULLABLE):
        return 0.0 if isinstance(default, float) else 0
    if isinstance(default, bool):
        return keys.check(key, value, bool, lambda x: True, "true or false")
    if isinstance(default, float):
        return keys.check(key, value, float, lambda x: x > 0, "more than 0")
    # The code makes lists with an entry for each layer, so the number of layers must be bounded.
    most = DEEPEST if field == "num_layers" else LARGEST - 1
    return keys.check(key, value, int, lambda x: 0 < x <= most, f"an integer from 1 to {most:,}")


def _experts(keys: "_Keys", family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields for dense layers and shared experts in a model with experts."""
    if fields.get("normalize_gates") and fields["experts_per_token"] == 1:
        raise keys.refuse(
            "num_experts_per_tok", 1, "at least 2, because one normalized gate is always 1"
        )
    if family == "gpt_oss":  # Two keys of OpenAI's own code.
        keys.left.pop("initial_context_length", None)
        top_k = fields["experts_per_token"]
        if (given := keys.take("experts_per_token", top_k)) != top_k:
            raise keys.refuse("experts_per_token", given, f"num_experts_per_tok={top_k}")
    if family in WITHOUT_DENSE_LAYERS:
        return {}
    size = keys.take("intermediate_size", fields["mlp_size"])
    num_layers, more = fields["num_layers"], dict[str, Any]()
    if family in DENSE_FIRST:
        default, default_shared = DENSE_FIRST[family]
        dense = keys.take("first_k_dense_replace", default)
        fits = "fewer than all layers"
        keys.check("first_k_dense_replace", dense, int, lambda x: 0 <= x < num_layers, fits)
        shared = keys.take("n_shared_experts", default_shared)
        shared = 0 if shared is None else shared
        keys.check("n_shared_experts", shared, int, lambda x: 0 <= x < LARGEST, "0 or more")
        more["shared_experts_size"] = shared * fields["mlp_size"]
    else:
        dense, more["experts_every"] = _dense_layers_of_qwen(keys, num_layers)
    are_dense = dense or more.get("experts_every", 1) > 1
    if are_dense:
        keys.check("intermediate_size", size, int, lambda x: 0 < x < LARGEST, "1 or more")
    return more | {"dense_layers": dense, "dense_mlp_size": size if are_dense else 0}


def _dense_layers_of_qwen(keys: "_Keys", num_layers: int) -> tuple[int, int]:
    """Reads how many layers at the beginning have no experts, and the distance of the others."""
    only, step = keys.take("mlp_only_layers", []) or [], keys.take("decoder_sparse_step", 1)
    keys.check("decoder_sparse_step", step, int, lambda x: x > 0, "1 or more")
    if not isinstance(only, list):
        raise keys.refuse("mlp_only_layers", only, "a list of layers")
    sparse = [i for i in range(num_layers) if i not in only and (i + 1) % step == 0]
    if not sparse:
        raise keys.refuse("decoder_sparse_step", step, "a layer with experts")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else min(step, sparse[0] + 1)
    dense = sparse[0] // every * every
    if sparse != list(range(dense + every - 1, num_layers, every)):
        raise keys.refuse(
            "mlp_only_layers",
            only,
            "the first layers, such as [0, 1], and then experts in every n-th layer",
        )
    return dense, every


def _latent(keys: "_Keys", fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the size of heads with latent attention, and YaRN's factor of its scores."""
    for key in ("head_dim", "qk_head_dim"):
        keys.left.pop(key, None)  # Sums of other keys, which transformers writes.
    size = keys.take("qk_nope_head_dim", 128)
    keys.check("qk_nope_head_dim", size, int, lambda x: 0 < x < LARGEST, "1 or more")
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"] or fields["num_heads"]
    if kv_heads != heads:
        raise keys.refuse("num_key_value_heads", kv_heads, f"num_attention_heads={heads}")
    size += fields["latent_rotary_size"]
    given = keys.get("rope_parameters", None) or keys.get("rope_scaling", None) or {}
    mscale = 1.0
    if isinstance(given, dict) and given.get("rope_type", given.get("type", "default")) == "yarn":
        all_dims, factor = given.get("mscale_all_dim") or 0.0, given.get("factor", 1.0)
        keys.check("rope_scaling.mscale_all_dim", all_dims, float, lambda x: x >= 0, "0 or more")
        keys.check("rope_scaling.factor", factor, float, lambda x: x >= 1, "1 or more")
        mscale = 0.1 * all_dims * math.log(factor) + 1.0
    return {"head_size": size, "attention_scale": size**-0.5 * mscale**2}


def _read_groups_of_v2(keys: "_Keys") -> None:
    """Replaces the keys by which DeepSeek-V2 chooses groups of experts with those of V3."""
    method = keys.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.refuse("topk_method", method, "'greedy' or 'group_limited_greedy'")
    if method == "greedy":
        keys.left |= {"n_group": 1, "topk_group": 1}


def _windows(keys: "_Keys", family: Family, num_layers: int) -> dict[str, Any]:
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


def _rotations(keys: "_Keys", family: str, *, has_windows: bool) -> dict[str, Any]:
    """Reads the fields for rotary position embeddings."""
    both = keys.take("rope_parameters", None) or {}
    scaling = keys.take("rope_scaling", None) or {}
    base = keys.take("rope_theta", None) or ROPE_BASE.get(family, 10_000.0)
    local_base = keys.take("rope_local_base_freq", None) or 10_000.0
    partial = keys.take("partial_rotary_factor", 1.0)
    for key, value in (("rope_parameters", both), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise keys.refuse(key, value, "an object")
    if FULL in both or SLIDING in both:
        local = _rotation(keys, both.get(SLIDING) or {}, local_base)
        fields = _rotation(keys, both.get(FULL) or {}, base)
        local_base = local["rope_base"]
        if "rope_scaling" in local:
            raise keys.refuse("rope_parameters", both, f"no scaling of {SLIDING!r}")
    else:
        fields = _rotation(keys, both or scaling, base)
    if partial != 1:
        raise keys.refuse("partial_rotary_factor", partial, "1: all features of a head are rotated")
    if has_windows and family != "gemma3_text" and "rope_scaling" in fields:
        raise keys.refuse("rope_scaling", scaling or both, "none with layers of two kinds")
    if has_windows and family == "gemma3_text":
        local_base = keys.check(
            "rope_local_base_freq", local_base, float, lambda x: x > 1, "above 1"
        )
        fields["local_rope_base"] = local_base
    return fields


def _rotation(keys: "_Keys", given: Any, base: Any) -> dict[str, Any]:
    """Reads the rotary fields from one object, which is `rope_parameters` or `rope_scaling`."""
    if not isinstance(given, dict):
        raise keys.refuse("rope_parameters", given, "an object")
    given = dict(given)
    base = given.pop("rope_theta", None) or base
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    kind = kinds[0] if kinds else "default"
    keys.check("rope_theta", base, float, lambda x: x > 1, "more than 1")
    fields: dict[str, Any] = {"rope_base": float(base)}
    if (partial := given.pop("partial_rotary_factor", 1.0)) != 1:
        raise keys.refuse("partial_rotary_factor", partial, "1: all features of a head are rotated")
    if kind not in ("default", "linear", "llama3"):
        raise keys.refuse("rope_type", kind, "'default', 'linear' or 'llama3'")
    if kind == "default":
        return fields
    fields["rope_scaling"] = kind
    names = list(ROPE_FACTORS) if kind == "llama3" else ["factor"]
    for name in names:
        value = given.pop(name, None)
        keys.check(f"rope_scaling.{name}", value, float, lambda x: x > 0, "more than 0")
        fields[ROPE_FACTORS[name]] = int(value) if name.startswith("original") else float(value)
    # With `linear` scaling this key has no effect; with `llama3` it has been read above.
    given.pop("original_max_position_embeddings", None)
    if given:
        raise keys.refuse("rope_scaling", given, f"no other keys for the type {kind!r}")
    return fields


class _Keys:
    """The keys of a `config.json` that have not been read yet."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.left, self.where, self._all = dict(config), where, config

    def get(self, key: str, default: Any) -> Any:
        return self.left.get(key, default)

    def take(self, key: str, *default: Any) -> Any:
        if key not in self.left and not default:
            raise ValueError(f"{self.where} has no {key}, expected a number.")
        return self.left.pop(key, *default)

    def refuse(self, key: str, got: Any, expected: str) -> ValueError:
        shown = repr(got)
        shown = shown if len(shown) < 200 else f"{shown[:200]}..."
        return ValueError(f"{self.where}: {printable(key)} is {shown}, expected {expected}.")

    def check(
        self, key: str, value: Any, kind: type, allows: Callable[[Any], bool], expected: str
    ) -> Any:
        kinds = (int, float) if kind is float else kind
        is_of_kind = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
        # Refuses infinity, NaN, and integers that are too large for a float.
        if not is_of_kind or not abs(value) <= sys.float_info.max or not allows(value):
            raise self.refuse(key, value, expected)
        return kind(value)


# Flat name of a field of `Transformer` -> its default.
DEFAULTS = flatten_fields(Transformer())
