"""The language model of fsdp_lm.py with tensor parallelism: each layer is sharded over devices.

    python -m experiments.tp_lm --config=configs/tp_lm.py

This config runs on any multiple of 4 devices up to 128; on a CPU, eight devices are simulated by
default. The heads and hidden features of each layer, and the tokens of the vocabulary, are sharded
over four devices. Between the layers, the activations are sharded along positions. With eight
devices, two such groups compute different examples, and the parameters are sharded over both
(FSDP).

Measured on 2026-11-22 with jax 0.10.2 and eight devices simulated on two busy cores: 1.999 bits per
byte on the test files, and 1.63 on the first 32 KB of the evaluation files. The command took 9
minutes of processor time and 34 minutes in all.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp_lm")
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "model": 4})
    config.parallel.sequence = True
    config.model.num_heads = 8
    config.model.num_kv_heads = 2  # two of the four devices use each key and value head
    config.model.vocab_multiple = 4
    return config.lock()
