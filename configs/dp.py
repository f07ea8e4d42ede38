"""Handwritten digits with data parallelism: every device holds the whole model.

    python -m experiments.dp --config=configs/dp.py

On any number of devices that divides 32; by default eight simulated ones where the CPU is all there
is. Measured on 2026-11-20 with jax 0.10.2, eight devices simulated on two cores of an Intel Xeon
that had other work besides: test accuracy 0.9750, the command took 16 seconds.
"""

from ml_collections import ConfigDict

from configs import fsdp


def get_config() -> ConfigDict:
    config = fsdp.get_config()
    config.parallel.strategy = "dp"
    return config.lock()
