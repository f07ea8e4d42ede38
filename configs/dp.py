"""Handwritten digits with data parallelism: every device stores the full model.

    python -m experiments.dp --config=configs/dp.py

This config runs on any number of devices that divides 32; on a CPU, eight devices are simulated by
default. Measured on 2026-11-20 with jax 0.10.2 and eight devices simulated on two cores of a busy
Intel Xeon: the test accuracy was 0.9750, and the command took 16 seconds.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp")
    config.parallel.strategy = "dp"
    return config.lock()
