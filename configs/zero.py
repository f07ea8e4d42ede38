"""Handwritten digits with ZeRO: every device stores the full model, and updates a shard of it.

    python -m experiments.zero --config=configs/zero.py

This config runs on any number of devices that divides 32; on a CPU, eight devices are simulated by
default. It uses ZeRO stage 1; `--config.parallel.strategy=zero2` uses stage 2. Measured on
2026-11-21 with jax 0.10.2 and eight devices simulated on two cores of a busy Intel Xeon: the test
accuracy was 0.9750, and the command took 25 seconds.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp")
    config.parallel.strategy = "zero1"  # or "zero2"
    return config.lock()
