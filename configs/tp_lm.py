"""The language model of fsdp_lm.py with split layers: each device computes a part of every layer.

    python -m experiments.tp_lm --config=configs/tp_lm.py

On any number of devices of which 4 is a divisor, up to 128; by default eight simulated ones where
the CPU is all there is. Four devices share the heads and hidden features of each layer and the
tokens of the vocabulary, and split the positions between the layers. Two such groups share the
examples, and store the parameters sharded (FSDP).

Measured on 2026-11-22 with jax 0.10.2, eight devices simulated on two cores that about ten other
programs shared: 1.999 bits a byte on the test files, 1.63 on the first 32 KB of the evaluation
files. The command took 9 minutes of processor time and 34 minutes in all.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "model": 4})
    config.parallel.sequence = True
    config.model.num_heads = 8
    config.model.num_kv_heads = 2  # each shared by two devices
    config.model.vocab_multiple = 4
    return config.lock()
