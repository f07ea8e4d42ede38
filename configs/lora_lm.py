"""A pretrained language model, fine-tuned with LoRA: only small adapters are trained.

    python -m experiments.fsdp --config=configs/lora_lm.py --config.model.from_hf=<directory>

This config runs on any number of devices that divides 16; on a CPU, eight devices are simulated by
default. The directory contains `config.json`, `tokenizer.json` and `.safetensors` files. The
training text is in `config.data.path`, by default the documentation of this project.

docs/tune_a_model.md makes a small model, fine-tunes the model with this config, and shows the
measured results.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp_lm")
    with config.unlocked():
        config.model.from_hf = ""  # a directory; its config.json replaces the fields of `model`
        config.model.lora = ("*/attention/query:8", "*/attention/value:8", "*/mlp/*:8")  # glob:rank
        config.model.lora_alpha = 16.0
        config.model.int8 = ()  # glob:block length; ("*kernel:64",) stores kernels in int8
        config.model.nf4 = ()  # the same in NF4, half the bytes
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
