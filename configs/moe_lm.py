"""The language model of fsdp_lm.py with experts: each token is computed by 2 of 8 MLPs.

    python -m experiments.moe_lm --config=configs/moe_lm.py

On any number of devices of which 4 is a divisor, up to 32; by default eight simulated ones where
the CPU is all there is. The experts are divided over four devices, to which tokens travel by an
all-to-all. All eight split the examples, and store the other parameters sharded (FSDP). Not
measured.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "expert": 4})
    config.model.num_experts = 8
    config.model.mlp_size = 256  # of an expert
    return config.lock()
