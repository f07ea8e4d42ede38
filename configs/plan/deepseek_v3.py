"""A model of the size of DeepSeek-V3, for the planner; it is not trained here.

    python -m experiments.plan --config=configs/plan/deepseek_v3.py --topology=h100:1024

The number of devices must divide 15,360. Nothing was measured here: the plan is an estimate, in
bfloat16. `python -m benchmarks.calibration` compares it with published numbers. For 2,048 GPUs the
plan says 23% MFU. The published speed in FP8 on H800s is 36% of the bfloat16 peak. Sizes and batch
are from section 4.2 of https://arxiv.org/abs/2412.19437. That model has 671 billion parameters, of
which a token uses 37 billion. This config has 702 billion, of which a token uses 36 billion. It
lacks three things:

- Latent attention, which our Transformer does not have. DeepSeek-V3's attention has 187 million
  weights a layer, and 128 heads with keys of 192 and values of 128 features. Here it has 206
  million weights, and keys and values of 56 features. So the scores and the weighted sums of the
  values together take 0.35 of DeepSeek-V3's operations: (56 + 56) / (192 + 128).
- The shared expert, which the planner's formulas do not support. It has 44 million weights a
  layer, and every token uses it.
- The three dense MLPs of size 18,432 in the first layers, because the formulas support only one
  kind of layer. With them the model would have 33.8 billion weights less. A token uses as many
  weights in a dense MLP as in 9 experts.

The plan also leaves out the prediction of a second token, which adds 14 billion parameters in
training.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("plan/llama3_8b")
    config.data.sequence_length = 4096
    config.data.batch_size = 15_360
    config.model.num_layers = 61
    config.model.hidden_size = 7168
    config.model.mlp_size = 2048  # of each expert
    config.model.num_heads = 128
    config.model.num_kv_heads = 128
    config.model.rope_base = 10_000.0
    config.model.vocab_multiple = 129_280
    config.model.num_experts = 256
    config.model.experts_per_token = 8
    config.optimizer.learning_rate = 2.2e-4
    return config.lock()
