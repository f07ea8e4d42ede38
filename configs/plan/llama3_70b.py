"""Llama 3 70B, to be planned on devices that nobody here has, and not to be trained.

    python -m experiments.plan --config=configs/plan/llama3_70b.py --topology=h100:1024

On any number of devices that divides 2,048. Nothing was measured here: the plan says 49.9% MFU on
2,048 H100s for a layout with which NVIDIA published 53.2%, and 48.3% on a v6e-256 where MaxText has
50.4% (python -m benchmarks.calibration). The shape is that of table 3 of
https://arxiv.org/abs/2407.21783: 70.6 billion parameters. Batch and vocabulary are those of
llama3_8b.py.
"""

from ml_collections import ConfigDict

from configs.plan import llama3_8b


def get_config() -> ConfigDict:
    config = llama3_8b.get_config()
    config.model.num_layers = 80
    config.model.hidden_size = 8192
    config.model.mlp_size = 28_672
    config.model.num_heads = 64
    config.optimizer.learning_rate = 1.5e-4
    return config.lock()
