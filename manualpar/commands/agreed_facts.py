"""The facts that must be equal in all processes of a run; `Cluster.agree` compares them.

Processes may have different settings for prefetching, monitoring and profiles, and different patch
versions of Python. They may also read the data from different paths, because the fingerprint and
the first examples of the data are compared instead.
"""

import importlib.metadata
import platform

import jax

from manualpar.commands.command_line import CommandLine
from manualpar.system.cluster.facts import Facts
from manualpar.training.config import flatten_config
from manualpar.training.experiment_facts import show_fact

PACKAGES = ("manualpar", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# The settings of JAX that change the results, even if only their last bits.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
# The config fields that may differ between processes. An entry that ends in a dot means all fields
# that begin with it.
LOCAL = (
    *("watch.", "profile", "debug.draw_sharding"),
    *("data.path", "data.tokenizer", "data.template", "data.cache", "data.prefetch"),
)


def run_facts(command: CommandLine) -> Facts:
    """Collects the facts that are known before JAX starts: config, folder, versions, settings."""
    facts = {
        f"config.{name}": show_fact(value)
        for name, value in flatten_config(command.config).items()
        if not any(name.startswith(x) if x.endswith(".") else name == x for x in LOCAL)
    }
    facts["--workdir"] = str(command.flags.workdir or "not given")
    facts["Python"] = ".".join(platform.python_version_tuple()[:2])
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return facts | {setting: str(getattr(jax.config, setting)) for setting in SETTINGS}
