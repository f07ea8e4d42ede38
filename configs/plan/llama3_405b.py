"""Llama 3 405B, for the planner; it is not trained here.

    python -m experiments.plan --config=configs/plan/llama3_405b.py --topology=h100:1024

The number of devices must divide 2,048. It may be larger if an axis `model` splits layers. Nothing
was measured here: the plan is an estimate. `python -m benchmarks.calibration` compares it with
published numbers. For Meta's layout on 16,384 H100s the plan says 37.9% MFU, and Meta published
41%. With 131,072 positions the plan says 51.9%, and Meta published 38%; docs/scale.md says why. The
shape is from table 3 of https://arxiv.org/abs/2407.21783: 405.9 billion parameters. The batch is
16.8 million tokens, as in most of the model's training. The vocabulary is the same as in
llama3_8b.py.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("plan/llama3_8b")
    config.model.num_layers = 126
    config.model.hidden_size = 16_384
    config.model.mlp_size = 53_248
    config.model.num_heads = 128
    config.optimizer.learning_rate = 8e-5
    return config.lock()
