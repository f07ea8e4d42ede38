"""A model of the size of DeepSeek-V3, to be planned on devices that nobody here has.

    python -m experiments.plan --config=configs/plan/deepseek_v3.py --topology=h100:1024

On any number of devices that divides 15,360. Nothing was measured here, and the plan is in
bfloat16: for 2,048 GPUs it says 23% MFU, where DeepSeek's speed in FP8 on H800s is 36% of
bfloat16's peak (python -m benchmarks.calibration). Sizes and batch are those of section 4.2 of
https://arxiv.org/abs/2412.19437, which has 671 billion parameters, 37 billion of
them for a token. This has 702 and 36 billion, because it differs in three things. The Transformer
here lacks the first, and the closed forms of a plan know of one kind of layer and of no shared
experts:

- Latent attention: 187 million weights a layer, and keys of 192 and values of 128 features for each
  of the 128 heads. Here they are 206 million, and heads have 56 features. So the products of
  attention's scores take 0.35 of the operations.
- A shared expert: 44 million weights a layer, which every token uses.
- Three dense layers of 18,432 at the beginning, and no experts there: 33.8 billion weights less.
  A token uses as many weights in them as in 9 experts.

Prediction of a second token, 14 billion parameters more in training, is not planned either.
"""

from ml_collections import ConfigDict

from configs.plan import llama3_8b


def get_config() -> ConfigDict:
    config = llama3_8b.get_config()
    config.data.sequence_length = 4096
    config.data.batch_size = 15_360
    config.model.num_layers = 61
    config.model.hidden_size = 7168
    config.model.mlp_size = 2048  # of an expert
    config.model.num_heads = 128
    config.model.num_kv_heads = 128
    config.model.rope_base = 10_000.0
    config.model.vocab_multiple = 129_280
    config.model.num_experts = 256
    config.model.experts_per_token = 8
    config.optimizer.learning_rate = 2.2e-4
    return config.lock()
