"""LoRA and quantized parameters."""
