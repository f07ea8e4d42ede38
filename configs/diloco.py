"""Handwritten digits with DiLoCo: two replicas of four devices, an outer step every ten steps.

    python -m experiments.diloco --config=configs/diloco.py

This config runs on any even number of devices that divides 32; on a CPU, eight devices are
simulated by default. Measured on 2026-11-23 with jax 0.10.2 and eight devices simulated on two
cores of a busy Intel Xeon: the test accuracy was 0.9750, and the command took 21 seconds.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp")
    config.parallel.strategy = "diloco"
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"replica": 2, "data": -1})  # -1: the rest of the devices
        config.parallel.inner = "fsdp"  # within a replica: "fsdp", "dp", "zero1" or "zero2"
        config.parallel.every = 10  # steps between two outer steps
        # With 1.0 and 0.0, an outer step sets the parameters to the mean of the replicas. The
        # paper uses 0.7 and 0.9.
        config.parallel.outer_learning_rate = 1.0
        config.parallel.outer_momentum = 0.0
        config.parallel.outer_code = ""  # "int8", "int4": quantizes outer gradients; "": does not
    return config.lock()
