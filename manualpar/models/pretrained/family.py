"""The form of the tables of model families, see `manualpar.models.pretrained.families`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from manualpar.models.pretrained.keys import Keys

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
