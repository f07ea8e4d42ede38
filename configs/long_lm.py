"""The language model of fsdp_lm.py on longer sequences; each sequence is sharded over devices.

    python -m experiments.long_lm --config=configs/long_lm.py

This config runs on any multiple of 4 devices up to 32; on a CPU, eight devices are simulated by
default. Each sequence is sharded over four devices, which send keys and values around a ring for
attention. With eight devices, two such groups compute different examples. The parameters are
sharded over all devices (FSDP). This config was not measured.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp_lm")
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "context": 4})
    config.data.sequence_length = 512
    config.data.batch_size = 8  # fewer but longer sequences, so as many tokens as in fsdp_lm.py
    return config.lock()
