"""The folder in which JAX keeps compiled programs, which a user chooses in the environment."""

import os
import sys
import warnings
from pathlib import Path

import jax

from manualpar.system.storage.durable_files import why_unwritable


def check_compilation_cache() -> None:
    """Says in one sentence if JAX's compilation cache cannot be written to.

    Otherwise JAX gives a warning for each program that it compiles. A folder that exists is still
    read, and without a folder JAX compiles without its cache.
    """
    named = jax.config.values["jax_compilation_cache_dir"]
    if not named or "://" in named or not (reason := why_unwritable(Path(named))):
        return
    effect = "new programs are not stored"
    if os.path.isdir(named):
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    else:
        jax.config.update("jax_compilation_cache_dir", None)
        effect = "programs are compiled without it"
    print(
        f"the compilation cache {named} cannot be written to: {reason}; {effect}. Set "
        "JAX_COMPILATION_CACHE_DIR to another folder, or unset it.",
        file=sys.stderr,
    )
