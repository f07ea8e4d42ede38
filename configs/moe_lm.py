"""The language model of fsdp_lm.py with experts: each token is computed by 2 of 8 MLPs.

    python -m experiments.moe_lm --config=configs/moe_lm.py

On any number of devices of which 4 is a divisor, up to 32; by default eight simulated ones where
the CPU is all there is. The experts are divided over four devices, to which tokens travel by an
all-to-all. All eight split the examples, and store the other parameters sharded (FSDP).

Measured on 2026-11-22 with jax 0.10.2, eight devices simulated on two cores that about ten other
programs shared: 1.992 bits a byte on the test files, 1.64 on the first 32 KB of the evaluation
files, with 3% of the tokens' choices dropped at the end. The command took 8 minutes of processor
time and 10 minutes in all. Each token is multiplied with as many weights as in fsdp_lm.py.
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
