"""Fine-tunes pretrained models with LoRA adapters, and stores frozen parameters in int8."""
