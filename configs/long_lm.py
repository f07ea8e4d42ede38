"""The language model of fsdp_lm.py on longer sequences, each of which is split over devices.

    python -m experiments.long_lm --config=configs/long_lm.py

On any number of devices of which 4 is a divisor, up to 32; by default eight simulated ones where
the CPU is all there is. Four devices share the positions of each sequence, and attention goes
around them in a ring. Two such groups share the examples; all eight store the parameters sharded
(FSDP). Not measured.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "context": 4})
    config.data.sequence_length = 512
    config.data.batch_size = 8  # as many tokens
    return config.lock()
