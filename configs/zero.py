"""Handwritten digits with ZeRO: every device holds the full model, and updates a shard of it.

    python -m experiments.zero --config=configs/zero.py

Runs on any number of devices that divides 32; on a CPU it simulates eight by default. This is stage
1; `--config.parallel.strategy=zero2` is stage 2. Measured on 2026-11-21 with jax 0.10.2 and eight
devices simulated on two cores of a busy Intel Xeon: the test accuracy was 0.9750, and the command
took 25 seconds.
"""

from ml_collections import ConfigDict

from configs import fsdp


def get_config() -> ConfigDict:
    config = fsdp.get_config()
    config.parallel.strategy = "zero1"  # or "zero2"
    return config.lock()
