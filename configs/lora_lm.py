"""Somebody else's language model, fine-tuned with LoRA: its weights stay, small adapters learn.

    python -m experiments.fsdp --config=configs/lora_lm.py --config.model.from_hf=<directory>

On any number of devices that divides 16; by default eight simulated ones where the CPU is all there
is. The directory holds `config.json`, `tokenizer.json` and `.safetensors` files. The text is what
`config.data.path` names, by default the pages of this project.

docs/tune_a_model.md makes a small model and runs this, and shows what was measured.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.model.from_hf = ""  # a directory; the sizes below are then those of its config.json
        config.model.lora = ("*/attention/query:8", "*/attention/value:8", "*/mlp/*:8")  # glob:rank
        config.model.lora_alpha = 16.0
        config.model.int8 = ()  # glob:block; ("*kernel:64",) stores the layers' weights in 8 bits
    config.data.path = "docs/*.md"
    config.data.batch_size = 16
    config.model.scan_layers = True
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.0
    config.training.num_steps = 100
    config.training.eval_every_steps = 50
    config.checkpoint.every_steps = 50
    config.sample.num_tokens = 0
    return config.lock()
