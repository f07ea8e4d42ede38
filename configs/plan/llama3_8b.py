"""Llama 3 8B, to be planned on devices that nobody here has, and not to be trained.

    python -m experiments.plan --config=configs/plan/llama3_8b.py --topology=h100:1024

On any number of devices that divides 2,048. A step has 2,048 sequences of 8,192 tokens, which is
the batch of the family's largest model. Nothing was measured here: on 128 H100s the plan says 61.4%
MFU for a layout with which NVIDIA published 58.6%, and on 128 H100s of 500 W 39.2% where torchtitan
has 38.1% (python -m benchmarks.calibration). The shape is that of table 3 of
https://arxiv.org/abs/2407.21783: 8.03 billion parameters.

The tokens of a language model are those of its data. Here they are the bytes of Python's standard
library, padded to the vocabulary of the model that is planned.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    config.data.sequence_length = 8192
    config.data.batch_size = 2048
    config.model.num_layers = 32
    config.model.hidden_size = 4096
    config.model.mlp_size = 14_336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.rope_base = 500_000.0
    config.model.vocab_multiple = 128_256
    config.model.scan_layers = True
    config.model.remat = "full"
    config.optimizer.learning_rate = 3e-4
    config.parallel.gather_dtype = "bfloat16"
    config.parallel.reduce_dtype = "float32"
    return config.lock()
