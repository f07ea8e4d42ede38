"""Llama 3 405B, to be planned on devices that nobody here has, and not to be trained.

    python -m experiments.plan --config=configs/plan/llama3_405b.py --topology=h100:1024

On any number of devices that divides 2,048, or more with layers split over an axis model. Nothing
was measured here: for Meta's layout on 16,384 H100s the plan says 37.9% MFU where Meta published
41%, and with 131,072 positions 51.9% where it published 38% (python -m benchmarks.calibration;
docs/scale.md says why). The shape is that of table 3 of https://arxiv.org/abs/2407.21783: 405.9
billion parameters. The batch is that of most of its training, 16.8 million tokens. The vocabulary
is that of llama3_8b.py.
"""

from ml_collections import ConfigDict

from configs.plan import llama3_8b


def get_config() -> ConfigDict:
    config = llama3_8b.get_config()
    config.model.num_layers = 126
    config.model.hidden_size = 16_384
    config.model.mlp_size = 53_248
    config.model.num_heads = 128
    config.optimizer.learning_rate = 8e-5
    return config.lock()
