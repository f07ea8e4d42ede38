"""Mixtral 8x22B, for the planner; it is not trained here.

    python -m experiments.plan --config=configs/plan/mixtral_8x22b.py --topology=h100:1024

The number of devices must divide 2,048. Nothing was measured here: the plan is an estimate. `python
-m benchmarks.calibration` compares it with published numbers. On a v6e-256 the plan says 33.6% MFU,
and MaxText published 36.2%. Each token is computed by 2 of 8 experts. The shape is from params.json
in https://huggingface.co/mistralai/Mixtral-8x22B-v0.1, with the vocabulary of the instruction-tuned
model, version 3: 140.6 billion parameters. The model's batch was not published, so this config has
the batch of llama3_8b.py. Mixtral never drops a token's choice of an expert. Here an expert has
room for 1.25 times its equal share of tokens.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("plan/llama3_8b")
    config.model.num_layers = 56
    config.model.hidden_size = 6144
    config.model.mlp_size = 16_384  # of each expert
    config.model.num_heads = 48
    config.model.rope_base = 1e6
    config.model.vocab_multiple = 32_768
    config.model.num_experts = 8
    config.model.experts_per_token = 2
    return config.lock()
