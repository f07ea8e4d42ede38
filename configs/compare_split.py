"""A language model whose layers are sharded over four devices, compared in each mode.

    python -m experiments.compare --config=configs/compare_split.py

This config runs on any multiple of 4 devices up to 64; on a CPU, eight devices are simulated by
default. The annotations are the same in each mode. Only mode manual has sequence parallelism. In
the other modes XLA decides which activations are sent, and when.

Measured on 2026-11-22 with jax 0.10.2 and eight devices simulated on two busy cores: over 5 steps
all losses stayed within 2e-6 of the losses on one device. With fsdp a device sends 4,713 KiB a step
in mode manual, 5,753 in auto, 5,660 in explicit, and 12,300 in auto-unconstrained. Mode explicit
gathers the parameters of the sharded layers.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("tp_lm")
    with config.unlocked():
        # The pairs (strategy, mode) to compare; each pair becomes a row.
        config.pairs = (
            ("dp", "manual"),
            ("dp", "auto"),
            ("fsdp", "manual"),
            ("fsdp", "auto"),
            ("fsdp", "explicit"),
            ("fsdp", "auto-unconstrained"),
        )
        config.compare = ConfigDict()
        config.compare.repetitions = 15  # timed steps of each row, one in each round
    config.parallel.sequence = False
    config.data.batch_size = 16
    config.data.sequence_length = 64
    config.model.num_layers = 2
    config.model.hidden_size = 128
    config.model.mlp_size = 512
    config.model.dtype = "float32"  # in bfloat16, losses would differ by the order of sums
    config.optimizer.learning_rate = 2e-3  # the peak
    config.optimizer.warmup_steps = 20
    config.optimizer.clip_norm = 0.0
    config.training.num_steps = 20
    return config.lock()
