"""How the tests' programs are compiled: with little effort, as they run for a moment only."""

# XLA's older emitters of kernels, and no division of a program's kernels among threads: compiling
# takes a third of the time. What XLA's passes make of a program stays the same.
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# The same for a process that a test starts, which thus computes the same bits as the test.
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": XLA_FLAGS,
}
