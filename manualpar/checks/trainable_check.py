"""Checks the option `trainable`: every glob matches, and trained parameters can have gradients."""

import difflib

import jax
import jax.numpy as jnp

from manualpar.core.model.trace_model import TracedModel
from manualpar.core.parameters.placement import is_trained


def check_trainable(strategy: str, model: TracedModel) -> None:
    """Refuses globs that match no parameter, and trained parameters that cannot have a gradient."""
    infos = jax.tree.leaves(model.own(model.parameters))
    paths = [info.path for info in infos]
    for glob in model.trainable:
        if not any(is_trained(path, (glob,)) for path in paths):
            near = difflib.get_close_matches(glob, paths, n=1, cutoff=0)[0]
            raise ValueError(
                f"{strategy}: trainable has {glob!r}, which fits no parameter; expected a glob "
                f"over paths such as {near!r}. inspect.layout_table shows all."
            )
    for info in infos:
        if info.trainable and not jnp.issubdtype(info.dtype, jnp.inexact):
            raise ValueError(
                f"{strategy}: parameter {info.path!r} is {info.dtype}, expected a floating or "
                "complex dtype, because it is trained. Name the parameters to train in trainable=, "
                "and leave this one out."
            )
    frozen_dtype, dtype = model.stored_dtypes
    if frozen_dtype != dtype and all(info.trainable for info in infos):
        raise ValueError(
            f"{strategy}: frozen_dtype={frozen_dtype!r}, expected None, because all parameters are "
            "trained. Name the parameters to train in trainable=, or use param_dtype= instead."
        )
