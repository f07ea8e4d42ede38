"""The language model of fsdp_lm.py on longer sequences; each sequence is split over devices.

    python -m experiments.long_lm --config=configs/long_lm.py

Runs on any multiple of 4 devices up to 32; on a CPU it simulates eight by default. Four devices
share the positions of each sequence, and attention sends keys and values around them in a ring. Two
such groups share the examples. All eight devices store the parameters sharded (FSDP). This config
was not measured.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "context": 4})
    config.data.sequence_length = 512
    config.data.batch_size = 8  # fewer, longer sequences: as many tokens as in fsdp_lm.py
    return config.lock()
