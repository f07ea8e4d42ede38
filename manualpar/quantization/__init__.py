"""Numbers in fewer bits: codes with scales, collectives that send them, corrections of rounding."""

from manualpar.quantization.quantized_collectives import (
    dequantize,
    make_quantizer,
    quantize,
    quantized_block_size,
)

__all__ = ["dequantize", "make_quantizer", "quantize", "quantized_block_size"]
