"""The form of the tables of model families, see `manualpar.models.pretrained.families`."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from manualpar.errors import printable
from manualpar.models.rotary import RotaryKind, RotaryScaling

# -------------------------------------------------------------------------------------------------
# The keys of a `config.json`, which are read one by one, and the errors that name them.


LARGEST = 2**31  # Every size in a config must be smaller.
# Python's numbers, because they can be compared with integers of any length.
SMALLEST_FLOAT, LARGEST_FLOAT = map(float, (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def is_float32(x: float) -> bool:
    """Returns whether a number is 0, or a normal number in float32, in which models compute.

    NaN and infinity are none. A smaller number would become 0, and a larger one infinity.
    """
    return x == 0 or SMALLEST_FLOAT <= abs(x) <= LARGEST_FLOAT


class Keys:
    """The keys of a `config.json` that have not been read yet."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.left, self.where = dict(config), where

    def get(self, key: str, default: Any) -> Any:
        """Returns the value of a key, which stays unread."""
        return self.left.get(key, default)

    def take(self, key: str, *default: Any) -> Any:
        """Reads a key; without a default the key is required."""
        if key not in self.left and not default:
            raise ValueError(f"{self.where} has no {key}, expected a number.")
        return self.left.pop(key, *default)

    def refuse(self, key: str, got: Any, expected: str) -> ValueError:
        """Returns the error for a value that is not supported."""
        shown = repr(got)
        shown = shown if len(shown) < 200 else f"{shown[:200]}..."
        return ValueError(f"{self.where}: {printable(key)} is {shown}, expected {expected}.")

    def check(
        self, key: str, value: Any, kind: type, allows: Callable[[Any], bool], expected: str
    ) -> Any:
        """Returns a value as `kind`, and refuses a value of another type or out of range."""
        kinds = (int, float) if kind is float else kind
        is_of_kind = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
        if not is_of_kind or not is_float32(value) or not allows(value):
            raise self.refuse(key, value, expected)
        return kind(value)


# -------------------------------------------------------------------------------------------------


# The layers with sliding-window attention if the config has no `layer_types`. "all if asked": all
# layers if `use_sliding_window` is true. "last if asked": if it is true, all layers except the
# first `max_window_layers`. "by turns": all layers except every n-th. "listed": there must be
# `layer_types`.
Windows = Literal["none", "all", "all if asked", "last if asked", "by turns", "listed"]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, and the meaning of the keys in its `config.json`.

    Attributes:
      class_name: The name of the class in transformers, for the key `architectures`.
      keys: The keys of `config.json`, each with the field of the `Transformer` that it sets.
      fixed: The fields that have the same value in all models of the family.
      defaults: The default of each optional key in `keys`. All other keys in `keys` are required.
      must_be: Optional keys for which a `Transformer` supports only the given value.
      windows: How the config chooses the layers with sliding-window attention.
      window_every: The default length of a group of layers whose last layer is global, for
        `windows="by turns"`.
      activation_key: The key that names the MLP's activation.
      activation: The default of `activation_key`.
      scale_key: The key whose value `x` gives the scale of attention, `x ** -0.5`.
      reciprocal: The key whose field has the reciprocal of its value.
      ignored: Keys that transformers stores and does not apply, each with the reason. A value is
        ignored with a warning, and no such value is written.
      prepare: Refuses or rewrites keys before all others are read.
      read: Reads keys that need code, after the other fields have been read.
      write: Returns the keys of `read`.
    """

    class_name: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    must_be: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    windows: Windows = "none"
    window_every: int = 0
    activation_key: str = "hidden_act"
    activation: str = "silu"
    scale_key: str = ""
    reciprocal: str = ""
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Keys], None] | None = None
    read: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] | None = None
    write: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


SIZES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "mlp_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_size",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied_head",
}
EXPERT_SIZES: Mapping[str, str] = {
    **{key: field for key, field in SIZES.items() if key != "intermediate_size"},
    "moe_intermediate_size": "mlp_size",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalize_gates",
}
COMMON: Mapping[str, Any] = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
NO_BIAS: Mapping[str, Any] = {"attention_bias": False}
# In all families with experts, an expert computes all tokens that are routed to it.
EXPERTS: Mapping[str, Any] = {"capacity_factor": 0.0}
GEMMA: Mapping[str, Any] = {
    "norm_offset": True,
    "post_norms": True,
    "scale_embedding": True,
}


# -------------------------------------------------------------------------------------------------
# Reads and writes the keys of a `config.json` for rotary positions.
#
# Version 5 of transformers writes `rope_parameters`; older versions write `rope_theta`,
# `rope_scaling` and `partial_rotary_factor`. Both kinds of files are read, and the older keys are
# written, because all versions read them.


# The kinds of layers in `layer_types`: layers without a window, and layers with a window.
FULL, SLIDING = "full_attention", "sliding_attention"
# The default of `rope_theta` by family; 10,000 for all other families.
ROPE_BASE = {
    "mixtral": 1e6,
    "gemma3_text": 1e6,
    "olmo3": 5e5,
    "smollm3": 2e6,
    "cohere": 5e5,
    "gpt_oss": 150_000.0,
    "llama4_text": 5e5,
}
# The families whose layers with a window have a rotation of their own, without scaling.
TWO_ROTATIONS = frozenset({"gemma3_text", "olmo3"})
# The families that rotate only some features, with the default of `partial_rotary_factor`.
PARTIAL: Mapping[str, float] = {
    "phi3": 1.0,
    "glm": 0.5,
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "gpt_neox": 0.25,
}
# The families whose pairs are neighbours, see `Rotary.interleaved`.
INTERLEAVED = frozenset({"glm", "glm4", "cohere", "cohere2"})
ORIGINAL = "original_max_position_embeddings"
# Kind of scaling -> the keys that describe it, each with the flat name of its field.
SCALINGS: Mapping[RotaryKind, Mapping[str, str]] = {
    "linear": {"factor": "rope_factor"},
    "proportional": {"factor": "rope_factor"},
    "dynamic": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        ORIGINAL: "rope_original_length",
    },
    "yarn": {
        "factor": "rope_factor",
        "beta_slow": "rope_low_factor",
        "beta_fast": "rope_high_factor",
        ORIGINAL: "rope_original_length",
        "attention_factor": "rope_attention_factor",
        "truncate": "rope_truncate",
    },
    "longrope": {
        "short_factor": "rope_short_factors",
        "long_factor": "rope_long_factors",
        "factor": "rope_factor",
        ORIGINAL: "rope_original_length",
        "attention_factor": "rope_attention_factor",
    },
}
ROPE_FIELDS = frozenset(field for fields in SCALINGS.values() for field in fields.values())
# Optional keys, each with its default; the other keys of a kind are required.
OPTIONAL: Mapping[str, Any] = {
    "beta_slow": 1.0,
    "beta_fast": 32.0,
    "attention_factor": 0.0,
    "truncate": True,
}
# What transformers assumes for gpt-oss without any keys.
GPT_OSS_SCALING = {"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL: 4096}
OLD_NAMES = {"su": "longrope"}  # Of the first files of Phi-3.


def read_rotations(keys: Keys, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields for rotary positions; `fields` are the fields that have been read."""
    if fields.get("learned_positions"):
        return {}
    both = keys.take("rope_parameters", None) or {}
    scaling = keys.take("rope_scaling", None) or {}
    base = keys.take("rope_theta", None) or ROPE_BASE.get(family, 10_000.0)
    local_base = keys.take("rope_local_base_freq", None) or (
        10_000.0 if family == "gemma3_text" else base
    )
    partial = keys.take("partial_rotary_factor", None)
    original = keys.take(ORIGINAL, None)
    has_windows = bool(fields.get("global_every"))
    if family == "gpt_oss" and not both and not scaling:
        scaling = GPT_OSS_SCALING
    for key, value in (("rope_parameters", both), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise keys.refuse(key, value, "an object")
    defaults = {"rope_theta": base, ORIGINAL: original, "partial_rotary_factor": partial}
    size = fields["head_size"]
    if FULL in both or SLIDING in both:
        local = _rotation(
            keys, family, both.get(SLIDING) or {}, {**defaults, "rope_theta": local_base}, size
        )
        found = _rotation(keys, family, both.get(FULL) or {}, defaults, size)
        local_base = local["rope_base"]
        if "rope_scaling" in local:
            raise keys.refuse("rope_parameters", both, f"no scaling of {SLIDING!r}")
        if local.get("rotary_features") != found.get("rotary_features"):
            raise keys.refuse("rope_parameters", both, "one partial_rotary_factor for all layers")
    else:
        found = _rotation(keys, family, both or scaling, defaults, size)
    of_one = family not in TWO_ROTATIONS and not fields.get("unrotated_global")
    if family == "gpt_oss":
        found["rope_scales_local"] = has_windows and "rope_scaling" in found
    elif has_windows and of_one and "rope_scaling" in found:
        raise keys.refuse("rope_scaling", scaling or both, "none with layers of two kinds")
    if has_windows and family in TWO_ROTATIONS:
        local_base = keys.check(
            "rope_local_base_freq", local_base, float, lambda x: x > 1, "above 1"
        )
        found["local_rope_base"] = local_base
    if family in INTERLEAVED:
        found["rotary_interleaved"] = True
    return found


def _rotation(
    keys: Keys, family: str, given: Any, defaults: Mapping[str, Any], size: int
) -> dict[str, Any]:
    """Reads the rotary fields from one object, which is `rope_parameters` or `rope_scaling`."""
    if not isinstance(given, dict):
        raise keys.refuse("rope_parameters", given, "an object")
    given = dict(given)
    base = given.pop("rope_theta", None) or defaults["rope_theta"]
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    kind = kinds[0] if kinds else "default"
    kind = OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    keys.check("rope_theta", base, float, lambda x: x > 1, "more than 1")
    fields: dict[str, Any] = {"rope_base": float(base)}
    fields |= _partial(keys, family, given, defaults, size)
    if kind == "default":
        return fields
    if not isinstance(kind, str) or kind not in SCALINGS:
        known = ", ".join(map(repr, SCALINGS))
        raise keys.refuse("rope_type", kind, f"'default' or one of {known}")
    fields["rope_scaling"] = kind
    longest = keys.get("max_position_embeddings", None)
    if kind in ("yarn", "longrope"):
        if defaults[ORIGINAL] is not None:  # This key counts, not the key of the object.
            given[ORIGINAL] = defaults[ORIGINAL]
        given[ORIGINAL] = given.get(ORIGINAL) or longest
        _set_factors(keys, given, longest, kind)
    elif kind == "dynamic":
        fields["rope_original_length"] = keys.check(
            "max_position_embeddings", longest, int, lambda x: x > 0, "1 or more"
        )
    for name, field in SCALINGS[kind].items():  # type: ignore[index]
        fields[field] = _factor(keys, name, given.pop(name, OPTIONAL.get(name)))
    # With the other kinds this key has no effect.
    given.pop(ORIGINAL, None)
    if given:
        raise keys.refuse("rope_scaling", given, f"no other keys for the type {kind!r}")
    return fields


def _set_factors(keys: Keys, given: dict[str, Any], longest: Any, kind: str) -> None:
    """Sets the factors that follow from other keys, as transformers computes them."""
    where, allowed = f"rope_scaling.{ORIGINAL}", "2 or more"
    original = keys.check(where, given[ORIGINAL], int, lambda x: x > 1, allowed)
    for name in ("factor", "attention_factor", "beta_slow", "beta_fast"):
        if name in given and given[name] is None:
            del given[name]
    if "factor" not in given:
        given["factor"] = longest
        keys.check("max_position_embeddings", longest, int, lambda x: x > 0, "1 or more")
        given["factor"] = max(longest / original, 1.0) if kind == "longrope" else longest / original
    scales = [given.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and "attention_factor" not in given and all(scales):
        factor = keys.check(
            "rope_scaling.factor", given["factor"], float, lambda x: x >= 1, "at least 1"
        )
        above, below = (
            0.1 * keys.check("rope_scaling.mscale", x, float, lambda x: x > 0, "more than 0")
            for x in scales
        )
        log = math.log(factor)
        given["attention_factor"] = (above * log + 1) / (below * log + 1)


def _partial(
    keys: Keys, family: str, given: dict[str, Any], defaults: Mapping[str, Any], size: int
) -> dict[str, Any]:
    """Reads how many features of a head are rotated; `given` is the object with the keys."""
    key = "partial_rotary_factor"
    partial = given.pop(key, None)
    partial = defaults[key] if partial is None else partial
    partial = PARTIAL.get(family, 1.0) if partial is None else partial
    if partial != 1 and family not in PARTIAL:
        raise keys.refuse(key, partial, f"1: all features of a head are rotated in {family!r}")
    share = keys.check(key, partial, float, lambda x: 0 < x <= 1, "above 0, and at most 1")
    features = int(size * share)
    if features == size:
        return {}
    if features < 2 or features % 2:
        raise keys.refuse(key, partial, f"an even number of the {size} features of a head")
    return {"rotary_features": features}


def _factor(keys: Keys, name: str, value: Any) -> Any:
    """Checks the value of a key of a scaling, and returns it in the type of its field."""
    where = f"rope_scaling.{name}"
    if name == "truncate":
        return keys.check(where, value, bool, lambda x: True, "true or false")
    if name.endswith(("long_factor", "short_factor")):
        if not isinstance(value, list) or not value:
            raise keys.refuse(where, value, "a list with a factor for each pair of features")
        return tuple(keys.check(where, x, float, lambda x: x > 0, "more than 0") for x in value)
    if name == "attention_factor":
        return keys.check(where, value, float, lambda x: x >= 0, "more than 0")
    if name == ORIGINAL:
        value = keys.check(where, value, float, lambda x: x > 0, "more than 0")
        return keys.check(where, int(value), int, lambda x: x > 0, "1 or more")
    return keys.check(where, value, float, lambda x: x > 0, "more than 0")


def write_rotations(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a `config.json` for rotary positions."""
    if fields["learned_positions"]:
        return {}
    config: dict[str, Any] = {"rope_theta": fields["rope_base"]}
    if features := fields["rotary_features"]:
        config["partial_rotary_factor"] = features / fields["head_size"]
    kind = fields["rope_scaling"]
    if not kind:
        return config
    if kind == "dynamic":
        config["max_position_embeddings"] = fields["rope_original_length"]
    scaling = {
        key: list(value) if isinstance(value := fields[field], tuple) else value
        for key, field in SCALINGS[kind].items()
    }
    config["rope_scaling"] = {"rope_type": kind, **scaling}
    if kind == "longrope":
        # Older versions of Phi-3's code allow only three keys in the object. The factor follows
        # from two lengths, and the attention's factor from the factor.
        original = config["rope_scaling"].pop(ORIGINAL)
        factor, longest = fields["rope_factor"], round(fields["rope_factor"] * original)
        usual = RotaryScaling(
            "longrope",
            factor,
            original_length=original,
            short_factors=fields["rope_short_factors"],
            long_factors=fields["rope_long_factors"],
        )
        config |= {"max_position_embeddings": longest, ORIGINAL: original}
        if max(longest / original, 1.0) == factor:
            del config["rope_scaling"]["factor"]
        if usual.amplitude == fields["rope_attention_factor"]:
            del config["rope_scaling"]["attention_factor"]
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    return config


# -------------------------------------------------------------------------------------------------
# The form of the tables of tensors, see `manualpar.models.pretrained.tensor_names`.


class Rule(NamedTuple):
    """The tensor of a parameter in the files.

    Attributes:
      tensor: The name of the tensor. `{E}` in the name stands for an index along dim `E`: the
        parameter then stacks one tensor for each index.
      dims: The dims of the parameter, an arrow, and the dims of the tensor, such as
        `D N H -> (N H) D`, without stacked dims; `""` if both are the same.
      part: If the tensor contains several parameters: a dim of the tensor, the entries of this dim
        before the parameter's own, and all entries of the dim. Both numbers are sums: `"NK"` is
        `N + K`, and `"2"` is 2. The dim is one of the parameter's dims, or a new one along which
        the parameter has one entry.
    """

    tensor: str
    dims: str = ""
    part: tuple[str, str, str] | tuple[()] = ()
