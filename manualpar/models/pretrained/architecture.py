"""Reads a model's `config.json` as fields of a `Transformer`.

A key for which a `Transformer` has no field is refused, unless its value is empty or the key does
not affect the model's results (`families.UNUSED_KEYS`). So the `Transformer` computes the same
function as the model's original code.

Version 5 of transformers writes `rope_parameters` and `layer_types`. Older versions write
`rope_theta`, `rope_scaling` and other keys. Both kinds of files are supported.
"""

import math
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from manualpar.models import Transformer
from manualpar.models.flat_fields import flatten_fields, nest_fields
from manualpar.models.pretrained.families import (
    ALIASES,
    DENSE_FIRST,
    FAMILIES,
    INERT_KEYS,
    UNSUPPORTED,
    UNUSED_KEYS,
    WRAPPERS,
)
from manualpar.models.pretrained.family import (
    FULL,
    LARGEST,
    ROPE_FIELDS,
    SLIDING,
    TWO_ROTATIONS,
    Family,
    Keys,
    is_float32,
    read_rotations,
    write_rotations,
)
from manualpar.models.pretrained.llama4 import read_experts_of_llama4
from manualpar.models.pretrained.tensor_files import (
    CONFIG_FILE,
    INDEX_FILE,
    has_tensors,
    model_directory,
    open_tensor_files,
    quantization_of,
)
from manualpar.models.transformer import size_of_head
from manualpar.system.storage import BucketPath, GivenPath, user_path
from manualpar.system.storage.untrusted import read_model_object

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
# The ends of the names of heads and embeddings, and the rows of them that are compared at once.
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
ROWS_AT_ONCE = 4096


class Architecture(NamedTuple):
    """The contents of a `config.json`.

    Attributes:
      family: The value of `model_type`.
      wrapper: The `model_type` of the multimodal model around the text model; `""` for none.
      flat_fields: The fields of the `Transformer` by their flat names, as in configs.
      is_untied: Whether the config ties the head to the embedding, but the files of the tensors
        have another head. Then `flat_fields` is that of an untied model, as in transformers.
    """

    family: str
    flat_fields: dict[str, Any]
    wrapper: str = ""
    is_untied: bool = False

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
    config, where = read_config(directory), str(user_path(directory) / CONFIG_FILE)
    architecture = parse_architecture(config, where=where)
    if not architecture.flat_fields.get("tied_head") or not (
        other := _other_head(directory, config)
    ):
        return architecture
    warnings.warn(
        f"{where} ties the head to the embedding, but {other[1]} is not {other[0]}: the model is "
        "read with a head of its own, as in transformers 5.",
        stacklevel=2,
    )
    fields = {**architecture.flat_fields, "tied_head": False}
    return architecture._replace(flat_fields=fields, is_untied=True)


def _other_head(directory: GivenPath, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the names of an embedding and of a head with other values; `None` if they are equal.

    `None` too if one of them is missing, as in most files of models whose head is tied.
    """
    local = model_directory(directory, weights=False)
    index: Any = None
    if os.path.lexists(local / INDEX_FILE):
        index = read_model_object(local / INDEX_FILE, local).get("weight_map")
        if not isinstance(index, dict) or not any(_is_outside(name, HEADS) for name in index):
            return None
    if isinstance(user_path(directory), BucketPath):
        local = model_directory(directory)
    # A folder may have no tensors, or an index without all of its files. `load_hf` says so.
    files_there = [os.path.lexists(local / str(name)) for name in set((index or {}).values())]
    if not has_tensors(local) or not all(files_there):
        return None
    files = open_tensor_files(local, quantization_of(text_config(config)[0]))
    heads = [name for name in files.shapes if _is_outside(name, HEADS)]
    embeddings = [name for name in files.shapes if _is_outside(name, EMBEDDINGS)]
    if not heads or not embeddings:
        return None
    pair = min(embeddings, key=len), min(heads, key=len)
    shape = files.shapes[pair[0]]
    if files.shapes[pair[1]] != shape:
        return pair
    for first in range(0, shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        embedding, head = (
            np.asarray(files.read(name, (rows, slice(0, shape[1]))), np.float32) for name in pair
        )
        if not np.array_equal(embedding, head):
            return pair
    return None


def _is_outside(tensor: str, ends: tuple[str, ...]) -> bool:
    """Returns whether a tensor outside of the layers has one of the names."""
    return tensor.endswith(ends) and ".layers." not in tensor


def read_config(directory: GivenPath) -> dict[str, Any]:
    """Reads the JSON object in the `config.json` of a directory."""
    directory = model_directory(directory, weights=False)
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory; expected a directory with {CONFIG_FILE} and "
            ".safetensors files."
        )
    try:
        return read_model_object(path, directory)
    except FileNotFoundError:
        raise ValueError(
            f"{directory} has no {CONFIG_FILE}; expected the directory of a model, as "
            "save_pretrained of transformers writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} {error}; expected the config of a model.") from None


def parse_architecture(config: Mapping[str, Any], *, where: str = CONFIG_FILE) -> Architecture:
    """Converts a `config.json` to fields of a `Transformer`."""
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
    for field, value in fields.items():
        # A product or a quotient of allowed numbers may still be too large.
        if isinstance(value, float) and not is_float32(value):
            raise ValueError(
                f"{where}: the model would have {field}={value!r}, expected a number that float32 "
                "represents; correct the keys from which it is computed."
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


# -------------------------------------------------------------------------------------------------
# Reads and writes the keys of a `config.json` for experts and for latent attention.


# Families with experts in all layers, and no keys for dense layers.
WITHOUT_DENSE_LAYERS = ("mixtral", "gpt_oss")


# The keys, of several versions, with the number of layers that predict more than the next token.
MORE_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def predicts_more(tensor: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a tensor belongs to a layer that predicts more than the next token.

    Files of DeepSeek-V3 and GLM-4.5 have such layers after the model's own layers.
    """
    found, number = _LAYER.match(tensor), config.get("num_hidden_layers")
    more = next((config[key] for key in MORE_LAYERS if config.get(key)), 0)
    if not found or type(number) is not int or type(more) is not int:
        return False
    return number <= int(found[1]) < number + more


def read_experts(keys: Keys, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields for dense layers and shared experts in a model with experts."""
    if fields.get("normalize_gates") and fields["experts_per_token"] == 1:
        raise keys.refuse(
            "num_experts_per_tok", 1, "at least 2, because one normalized gate is always 1"
        )
    if family == "deepseek_v2":
        method = keys.take("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise keys.refuse("topk_method", method, "'greedy' or 'group_limited_greedy'")
    if family == "gpt_oss":  # Two keys of OpenAI's own code.
        keys.left.pop("initial_context_length", None)
        top_k = fields["experts_per_token"]
        if (given := keys.take("experts_per_token", top_k)) != top_k:
            raise keys.refuse("experts_per_token", given, f"num_experts_per_tok={top_k}")
    if family == "llama4_text":
        return read_experts_of_llama4(keys, fields)
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


def _dense_layers_of_qwen(keys: Keys, num_layers: int) -> tuple[int, int]:
    """Reads how many layers at the beginning have no experts, and the distance of the others."""
    only, step = keys.take("mlp_only_layers", []) or [], keys.take("decoder_sparse_step", 1)
    keys.check("decoder_sparse_step", step, int, lambda x: x > 0, "1 or more")
    if not isinstance(only, list):
        raise keys.refuse("mlp_only_layers", only, "a list of layers")
    sparse = [i for i in range(num_layers) if i not in only and (i + 1) % step == 0]
    if not sparse and step > num_layers:
        raise keys.refuse("decoder_sparse_step", step, f"up to num_hidden_layers={num_layers}")
    if not sparse:
        raise keys.refuse("mlp_only_layers", only, "a layer that has experts")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else min(step, sparse[0] + 1)
    dense = sparse[0] // every * every
    if sparse != list(range(dense + every - 1, num_layers, every)):
        raise keys.refuse(
            "mlp_only_layers",
            only,
            "the first layers, such as [0, 1], and then experts in every n-th layer",
        )
    return dense, every


def read_latent(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
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


def write_experts(name: str, fields: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Adds the keys of a family for experts and for latent attention to a config."""
    dense = fields.get("dense_layers", 0)
    if name in DENSE_FIRST:
        config["first_k_dense_replace"] = dense
        config["n_shared_experts"] = fields.get("shared_experts_size", 0) // fields["mlp_size"]
    elif "moe_intermediate_size" in config:
        config["mlp_only_layers"] = list(range(dense))
        config["decoder_sparse_step"] = fields["experts_every"]
    if name == "deepseek_v2":
        grouped = fields["expert_groups"] > 1
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    if "kv_lora_rank" in config:
        size = fields["head_size"]
        config["qk_nope_head_dim"] = size - fields["latent_rotary_size"]
        config["q_lora_rank"] = fields["latent_query_rank"] or None
        if fields["rope_scaling"] == "yarn" and (log := math.log(fields["rope_factor"])):
            mscale = (fields["attention_scale"] * size**0.5) ** 0.5
            config["rope_scaling"]["mscale_all_dim"] = round((mscale - 1) / (0.1 * log), 6)
    if name == "gpt_oss" and not fields["rope_scaling"]:
        # Without this object transformers would scale rotations.
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_base"]}


# -------------------------------------------------------------------------------------------------
# Writes the `config.json` of a `Transformer` for other programs.
#
# For each family, a config is written, read again, and compared with the model field by field. The
# first family without a difference is chosen, so that no field is lost. A model that fits no
# family is refused. The config has the keys of transformers 4, because all versions of
# transformers read these keys.


# The flat names of the fields that a config describes. The other fields only choose how the same
# function is computed.
SAID = frozenset(
    {
        *(
            field
            for family in FAMILIES.values()
            for field in (*family.keys.values(), *family.fixed)
        ),
        *ROPE_FIELDS,
        *("rope_base", "rope_scaling", "local_rope_base", "attention_window", "global_every"),
        *("rotary_features", "rotary_interleaved", "rope_scales_local"),
        *("attention_scale", "activation", "dense_layers", "dense_mlp_size", "shared_experts_size"),
        "experts_every",
        *("num_kv_heads", "head_size", "learned_positions", "unrotated_global"),
        *("norm_kind", "norm_bias", "pre_norms", "shared_norm", "gated_mlp", "mlp_bias"),
        *("parallel_mlp", "attention_out_bias", "wide_query_key_norm"),
        *("embedding_scale", "residual_scale", "logit_scale"),
    }
) - {"capacity_factor"}


def architecture_of(model: Transformer) -> dict[str, Any]:
    """Returns the fields that `config.json` describes, by their flat names.

    Each 0 that means a default is replaced by the default.
    """
    attention, rotary = model.attention, model.rotary
    scaling = rotary.scaling
    has_amplitude = scaling.kind in ("yarn", "longrope")
    fields = {name: value for name, value in flatten_fields(model).items() if name in SAID}
    return fields | {
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_size": size_of_head(model),
        "attention_scale": attention.scale or size_of_head(model) ** -0.5,
        "rope_attention_factor": scaling.amplitude if has_amplitude else 0.0,
        "rotary_features": rotary.features % size_of_head(model),
        "local_rope_base": (attention.global_every and (rotary.local_base or rotary.base)) or 0.0,
    }


def complete_fields(architecture: Architecture) -> dict[str, Any]:
    """Returns the fields of an `Architecture`, and the defaults of the fields that it lacks."""
    return architecture_of(Transformer(**architecture.fields))


def write_config(fields: Mapping[str, Any], *, family: str = "") -> dict[str, Any]:
    """Makes the `config.json` of a model.

    Args:
      fields: The result of `architecture_of`.
      family: The family to write the config for; `""` for the first family that fits the fields.
    """
    why = []
    for name in [family] if family else FAMILIES:
        config = _write(name, fields)
        try:
            found = complete_fields(parse_architecture(config))
        except ValueError as error:
            why.append(f"{name}: {error}")
            continue
        different = [key for key, value in fields.items() if found.get(key) != value]
        if not different:
            return config
        why.append(f"{name} has another {' and '.join(different)}")
    raise ValueError(
        f"export_hf: no model family describes this Transformer ({'; '.join(why)}); expected the "
        f"fields of one of {', '.join(FAMILIES)}."
    )


def _write(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Writes fields as the config of a family; leaves out fields without a key in the family."""
    family = FAMILIES[name]
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": name}
    # Without these keys classes of transformers assume the tokens of their published models.
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config |= {key: fields[field] for key, field in family.keys.items()}
    if family.reciprocal:
        config[family.reciprocal] = _plain(1 / fields[family.keys[family.reciprocal]])
    config |= family.must_be
    if family.scale_key:
        config[family.scale_key] = _plain(fields["attention_scale"] ** -2.0)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            config[key] = config[key] or None
    if name != "gpt2":
        config["intermediate_size"] = fields.get("dense_mlp_size") or fields["mlp_size"]
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs != "gelu_new"}
    if ACTIVATIONS[family.activation] == fields["activation"]:
        config[family.activation_key] = family.activation
    else:
        config[family.activation_key] = names[fields["activation"]]
    layers, window = fields["num_layers"], fields["attention_window"]
    every = fields["global_every"]
    if family.windows != "none":
        config["sliding_window"] = window or None
    if family.windows in ("all if asked", "last if asked", "listed") and window:
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    if family.windows in ("last if asked", "by turns", "listed"):
        is_full = [not window or (every and (i + 1) % every == 0) for i in range(layers)]
        config["layer_types"] = [FULL if full else SLIDING for full in is_full]
    if name in TWO_ROTATIONS and every:
        config["sliding_window_pattern"] = every
        config["rope_local_base_freq"] = fields["local_rope_base"]
    config |= write_rotations(fields)
    write_experts(name, fields, config)
    return config | (family.write(fields) if family.write else {})


def _plain(x: float) -> int | float:
    """Returns the number that was written: without the rounding of a reciprocal or a root."""
    near = round(x, 6)
    near = near if abs(x - near) < 1e-9 * abs(x) + 1e-9 else x
    return int(near) if near == int(near) else near
