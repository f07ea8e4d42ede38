"""Writes the `config.json` of a `Transformer` for other programs.

For each family, a config is written, read again, and compared with the model field by field. The
first family without a difference is chosen, so that no field is lost. A model that fits no family
is refused. The config has the keys of transformers 4, because all versions of transformers read
these keys.
"""

from collections.abc import Mapping
from typing import Any

from manualpar.models import Transformer
from manualpar.models.flat_fields import flatten_fields
from manualpar.models.pretrained.architecture import (
    ACTIVATIONS,
    Architecture,
    parse_architecture,
)
from manualpar.models.pretrained.expert_keys import write_experts
from manualpar.models.pretrained.families import FAMILIES
from manualpar.models.pretrained.rotations import (
    FULL,
    ROPE_FIELDS,
    SLIDING,
    TWO_ROTATIONS,
    write_rotations,
)
from manualpar.models.transformer_fields import size_of_head

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

    Raises:
      ValueError: No family fits the fields; the message names the differences for each family.
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
    # Without this key some classes of transformers assume a token of their published models.
    config["pad_token_id"] = None
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
