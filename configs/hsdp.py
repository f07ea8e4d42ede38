"""Handwritten digits with hybrid sharding: sharded over four devices, replicated over two groups.

    python -m experiments.hsdp --config=configs/hsdp.py

This config runs on any even number of devices that divides 32; on a CPU, eight devices are
simulated by default. Measured on 2026-11-21 with jax 0.10.2 and eight devices simulated on two
cores of a busy Intel Xeon: the test accuracy was 0.9778, and the command took 30 seconds.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp")
    config.parallel.strategy = "hsdp"
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"replica": 2, "data": -1})  # -1: the rest of the devices
    return config.lock()
