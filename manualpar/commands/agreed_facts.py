"""The facts that must be equal in all processes of a run; `Cluster.agree` compares them.

Processes may have different settings for prefetching, monitoring and profiles, and different patch
versions of Python. They may also read the data from different paths, because the fingerprint and
the first examples of the data are compared instead.
"""

import jax

from manualpar.commands.command_line import CommandLine
from manualpar.system.cluster.facts import Facts
from manualpar.system.cluster.software import software_facts
from manualpar.training.config import flatten_config
from manualpar.training.experiment_facts import show_fact
from manualpar.training.sources import source_facts

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
    """Collects the facts that are known before JAX starts: config, sources, folder, versions."""
    facts = {
        f"config.{name}": show_fact(value)
        for name, value in flatten_config(command.config).items()
        if not any(name.startswith(x) if x.endswith(".") else name == x for x in LOCAL)
    }
    facts |= source_facts(files=[command.config_path])
    facts["--workdir"] = str(command.flags.workdir or "not given")
    facts |= software_facts()
    return facts | {setting: str(getattr(jax.config, setting)) for setting in SETTINGS}
