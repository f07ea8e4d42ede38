"""Mixtral 8x22B, to be planned on devices that nobody here has, and not to be trained.

    python -m experiments.plan --config=configs/plan/mixtral_8x22b.py --topology=h100:1024

On any number of devices that divides 2,048. Nothing was measured here: on a v6e-256 the plan says
33.6% MFU where MaxText published 36.2% (python -m benchmarks.calibration). Each token is computed
by 2 of 8 experts. The shape is that of params.json in https://huggingface.co/mistralai/Mixtral-8x22B-v0.1,
with the vocabulary of the instructed model, version 3: 140.6 billion parameters. Its batch was not
published; here it is that of llama3_8b.py. Mixtral drops no token's choice. Here an expert has room
for 1.25 times its share.
"""

from ml_collections import ConfigDict

from configs.plan import llama3_8b


def get_config() -> ConfigDict:
    config = llama3_8b.get_config()
    config.model.num_layers = 56
    config.model.hidden_size = 6144
    config.model.mlp_size = 16_384  # of an expert
    config.model.num_heads = 48
    config.model.rope_base = 1e6
    config.model.vocab_multiple = 32_768
    config.model.num_experts = 8
    config.model.experts_per_token = 2
    return config.lock()
