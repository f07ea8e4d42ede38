"""Decides whether a run may be resumed with a changed config.

Fields that determine the trained function, the examples, their order or the optimizer must not
change, because the rest of the run would then belong to another experiment. Fields for parallelism,
duration and reports may change.
"""

import types
from collections.abc import Mapping
from typing import Any

# Fields that must not change. An entry that ends in a dot means all fields that begin with it,
# except the fields in FREE.
FIXED = ("model.", "data.", "seed", "parallel.param_dtype", "optimizer.name")
FREE = (
    *("data.batch_size", "data.prefetch", "data.cache", "model.attention", "model.remat"),
    "model.from_hf",  # Its files are read only when a run begins.
)
# Removed fields, each with the value that had no effect and the reason for the removal. None of
# these fields changed the trained function.
REMOVED: Mapping[str, tuple[Any, str]] = {
    "model.prefetch": (
        False,
        "it made a step slower, because compilers overlap these gathers by themselves",
    ),
    "model.scan_unroll": (1, "it made a step 0.5% faster and took 20% more memory"),
    "parallel.combine_bytes": (
        0,
        "it gained nothing, because only large parameters are sharded",
    ),
}
# Required fields that older configs lack, each with the value that gives the older behaviour. A
# field that has a default is not listed here, because its default gives the older behaviour.
ADDED: Mapping[str, Any] = {
    "model.vocab_multiple": 1,
    "model.num_experts": 0,
    "model.experts_per_token": 2,
    "model.capacity_factor": 1.25,
    "model.logit_soft_cap": 0.0,
    "model.attention_window": 0,
    "model.attention_soft_cap": 0.0,
    "training.label_smoothing": 0.0,
    "training.z_loss": 0.0,
    "parallel.sequence": False,
    "parallel.layer_overlap": "none",
    "parallel.mesh_order": (),
    "parallel.context_attention": "ring",
    "parallel.pipeline": "1f1b",
    "parallel.pipeline_chunks": 1,
    "parallel.pipeline_keep": "residuals",
}
# Renamed values of fields: field -> old name -> new name.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "parallel.overlap": {"default": "none", "asynchronous": "auto"}
}
ABSENT = "(absent)"


def renamed_value(field: str, value: Any) -> str | None:
    """Returns the current name of a field's value; `None` if the value was not renamed."""
    return RENAMED.get(field, {}).get(value) if isinstance(value, str) else None


def check_resumable(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[str]:
    """Compares the config of a checkpoint with the config of the run that resumes from it.

    Both configs map dotted names, such as `model.hidden_size`, to plain values. If a field is newer
    than the checkpoint, its saved value is taken from `ADDED` or from `defaults`.

    Args:
      saved: The checkpoint's config.
      current: The config of the run that resumes.
      defaults: The values of the fields that a config may leave out.

    Returns:
      A line for each removed field that had an effect in the saved config, and a line for each
      allowed difference, such as `training.num_steps: 100 -> 200`.

    Raises:
      ValueError: A field that must not change differs.
    """
    gone = [
        f"{name} was {saved[name]!r} and has been removed: {why}"
        for name, (unused, why) in REMOVED.items()
        if saved.get(name, unused) != unused
    ]
    allowed: list[str] = []
    refused: list[str] = []
    added = {**ADDED, **defaults}.items()
    saved = {name: value for name, value in added if name in current} | dict(saved)
    saved = {name: renamed_value(name, value) or value for name, value in saved.items()}
    for name in sorted({*saved, *current} - REMOVED.keys()):
        before, after = saved.get(name, ABSENT), current.get(name, ABSENT)
        if _as_json(before) != _as_json(after):
            old, new = (repr(c[name]) if name in c else ABSENT for c in (saved, current))
            is_fixed = any(name == f or (f.endswith(".") and name.startswith(f)) for f in FIXED)
            lines = refused if is_fixed and name not in FREE else allowed
            lines.append(f"{name}: {old} -> {new}")
    if refused:
        raise ValueError(
            "the config changes the model, the data or the optimizer of the run in the workdir; "
            "expected the saved values. Set them again, or choose another workdir (saved -> asked "
            "for):\n" + "\n".join(f"  {line}" for line in refused)
        )
    return gone + allowed


def _as_json(value: Any) -> Any:
    """Converts a value for a comparison as in JSON: tuples equal lists, and True differs from 1."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return (isinstance(value, bool), value)
