"""How the tests' programs are compiled: with little effort, as they run for a moment only."""

import jaxlib.version

# XLA's older emitters of kernels, and no division of a program's kernels among threads: compiling
# takes a third of the time. What XLA's passes make of a program stays the same. Later versions do
# not have the older emitters, and end a process with a flag that they do not know.
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
HAS_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1" + (
    f" {OLDER_EMITTERS}" if HAS_OLDER_EMITTERS else ""
)

# The same for a process that a test starts, which thus computes the same bits as the test.
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": XLA_FLAGS,
}
