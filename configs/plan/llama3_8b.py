"""Llama 3 8B, for the planner; it is not trained here.

    python -m experiments.plan --config=configs/plan/llama3_8b.py --topology=h100:1024

The number of devices must divide 2,048. A step has 2,048 sequences of 8,192 tokens, like the batch
of the family's largest model. Nothing was measured here: the plan is an estimate. `python -m
benchmarks.calibration` compares it with published numbers. On 128 H100s the plan says 61.4% MFU,
and NVIDIA published 58.6% for the same layout. On 128 H100s of 500 W it says 39.2%, and torchtitan
has 38.1%. The shape is from table 3 of https://arxiv.org/abs/2407.21783: 8.03 billion parameters.

A config's vocabulary comes from its data. Here the data is the bytes of Python's standard library,
and the vocabulary is padded to the size of Llama 3's vocabulary.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp_lm")
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
