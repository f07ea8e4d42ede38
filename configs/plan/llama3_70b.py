"""Llama 3 70B, for the planner; it is not trained here.

    python -m experiments.plan --config=configs/plan/llama3_70b.py --topology=h100:1024

The number of devices must divide 2,048. Nothing was measured here: the plan is an estimate. `python
-m benchmarks.calibration` compares it with published numbers. On 2,048 H100s the plan says 49.9%
MFU, and NVIDIA published 53.2% for the same layout. On a v6e-256 it says 48.3%, and MaxText has
50.4%. The shape is from table 3 of https://arxiv.org/abs/2407.21783: 70.6 billion parameters. The
batch and the vocabulary are the same as in llama3_8b.py.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("plan/llama3_8b")
    config.model.num_layers = 80
    config.model.hidden_size = 8192
    config.model.mlp_size = 28_672
    config.model.num_heads = 64
    config.optimizer.learning_rate = 1.5e-4
    return config.lock()
