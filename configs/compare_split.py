"""A language model whose layers are split over four devices, in each mode, side by side.

    python -m experiments.compare --config=configs/compare_split.py

On any number of devices of which 4 is a divisor, up to 64; by default eight simulated ones where
the CPU is all there is. The annotations are the same in each mode. In the others XLA decides what
activations are sent, and when; only mode manual has sequence parallelism.

Measured on 2026-11-22 with jax 0.10.2, eight devices simulated on two cores that several other
programs shared: all losses within 2e-6 of those of one device over 5 steps. A device sends 4,713
KiB a step with fsdp in mode manual, 5,753 in auto, 5,660 in explicit, which gathers the split
parameters, and 12,300 in auto-unconstrained.
"""

from ml_collections import ConfigDict

from configs import tp_lm


def get_config() -> ConfigDict:
    config = tp_lm.get_config()
    with config.unlocked():
        # What is compared, a row each: (strategy, mode).
        config.pairs = (
            ("dp", "manual"),
            ("dp", "auto"),
            ("fsdp", "manual"),
            ("fsdp", "auto"),
            ("fsdp", "explicit"),
            ("fsdp", "auto-unconstrained"),
        )
        config.compare = ConfigDict()
        config.compare.repetitions = 15  # timed steps of each row, in turn
    config.parallel.sequence = False
    config.data.batch_size = 16
    config.data.sequence_length = 64
    config.model.num_layers = 2
    config.model.hidden_size = 128
    config.model.mlp_size = 512
    config.model.dtype = "float32"  # in bfloat16 the order of sums shows in the losses
    config.optimizer.clip_norm = 0.0
    config.training.num_steps = 20
    return config.lock()
