"""How the tests' programs are compiled: with little effort, as they run for a moment only.

Programs that were compiled once are kept in the checkout, because compiling takes more than half of
the time of all tests. A program is found again only if everything that the compiler sees is the
same: the operations, their names, the options and the versions.
"""

import hashlib
import platform
import shutil
from pathlib import Path

import jaxlib.version

from tests.paths import ROOT

# XLA's older emitters of kernels, and no division of a program's kernels among threads: compiling
# takes a third of the time. What XLA's passes make of a program stays the same. Later versions do
# not have the older emitters, and end a process with a flag that they do not know.
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
HAS_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1" + (
    f" {OLDER_EMITTERS}" if HAS_OLDER_EMITTERS else ""
)


def _processor() -> str:
    """Names what this machine's instructions are; JAX's keys leave that out."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = [x for x in lines if x.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:8]


COMPILED = ROOT / "build" / "compiled" / _processor()
MAX_COMPILED_BYTES = 2**30  # The fast tests leave about 50 MB behind for each version of jax.

# JAX's settings by name, also those of a process that a test starts.
SETTINGS = {"jax_disable_most_optimizations": True, "jax_traceback_in_locations_limit": 0}
# Those of the processes that run tests alone: a process that a test kills, or whose files may not
# grow, would leave half a program behind. Scopes are part of a program's name in the cache, because
# tests read them in compiled programs; lines of code are not, so that another line above a function
# is no other program.
CACHE = {
    "jax_compilation_cache_dir": str(COMPILED),
    "jax_compilation_cache_include_metadata_in_key": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def forget_old_programs() -> None:
    """Empties the cache if it is large: nothing says which programs no test has any more."""
    sizes = [path.stat().st_size for path in COMPILED.glob("*")]
    if sum(sizes) > MAX_COMPILED_BYTES:
        shutil.rmtree(COMPILED)


# The same for a process that a test starts, which thus computes the same bits as the test.
ENVIRONMENT = {
    **{name.upper(): str(value) for name, value in SETTINGS.items()},
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": XLA_FLAGS,
}
