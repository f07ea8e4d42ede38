"""Decodes quantized tensors while they are read: MXFP4 of gpt-oss, and FP8 in blocks of DeepSeek.

`DecodedFiles` shows the tensors that the codes and scales in files stand for, in bfloat16. A slice
of a tensor reads only the blocks in which it lies. So a program never holds codes, and a
decoded model is exported in bfloat16.

- MXFP4 (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): two
  codes of 4 bits in each byte of `X_blocks` `[..., blocks, 16]`, and an exponent of 2 for each
  block of 32 in `X_scales` `[..., blocks]`. The tensor `X` is the transposed of the decoded rows.
- FP8 (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3): `X.weight` in `float8_e4m3fn`,
  and a factor for each block in `X.weight_scale_inv`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from manualpar.errors import printable
from manualpar.models.pretrained.tensor_files import TensorFiles

DECODED = "bfloat16"
METHODS = ("mxfp4", "fp8")
BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
MXFP4_BLOCK = 32
# The values of the codes of MXFP4, which has one bit of mantissa.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([FP4, -FP4])
FP8 = "F8_E4M3"


class Quantization(NamedTuple):
    """How the weights in files are quantized.

    Attributes:
      method: One of `METHODS`; `""` if weights are plain numbers.
      block: The rows and columns of a block, for `"fp8"`.
    """

    method: str = ""
    block: tuple[int, int] = (128, 128)


def quantization_of(config: Mapping[str, Any]) -> Quantization:
    """Reads how a `config.json` says that weights are quantized.

    Raises:
      ValueError: The method is none that this module decodes.
    """
    found = config.get("quantization_config")
    if not found:
        return Quantization()
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if method not in METHODS:
        raise ValueError(
            f"quantization_config.quant_method is {printable(repr(method))}, expected one of "
            f"{', '.join(map(repr, METHODS))}, whose codes are decoded on import. Dequantize the "
            "model with the library that quantized it"
        )
    block = found.get("weight_block_size", (128, 128))
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(
            f"quantization_config.weight_block_size is {printable(repr(block))}, expected the rows "
            "and columns of a block, such as [128, 128], because only blocks are decoded"
        )
    return Quantization(str(method), (block[0], block[1]))


class DecodedFiles(TensorFiles):
    """The tensors of a directory, decoded if the files have codes and scales.

    The attributes are those of `TensorFiles`; they show the decoded tensors.
    """

    def __init__(self, directory: Path, quantization: Quantization) -> None:
        """Opens all files.

        Raises:
          ValueError: See `TensorFiles`; or codes and scales do not fit each other.
        """
        super().__init__(directory)
        method, self._block = quantization
        self._stored = dict(self.shapes)
        self._sources: dict[str, tuple[str, str]] = {}  # Tensor -> its codes and its scales.
        for name in list(self.shapes):
            if method == "mxfp4" and name.endswith(BLOCKS):
                self._show_mxfp4(name, name.removesuffix(BLOCKS))
            elif method == "fp8" and self.dtypes[name] == FP8:
                self._show_fp8(name)

    def read(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor, see `TensorFiles.read`; decodes it if it has codes."""
        if tensor not in self._sources:
            return super().read(tensor, index)
        codes, scales = self._sources[tensor]
        if codes.endswith(BLOCKS):
            return self._read_mxfp4(codes, scales, index)
        return self._read_fp8(codes, scales, index)

    def _show(self, name: str, codes: str, scales: str, shape: tuple[int, ...]) -> None:
        for source in {codes, scales}:
            del self.shapes[source], self.dtypes[source]
        self.shapes[name], self.dtypes[name] = shape, DECODED
        self.files[name] = self.files[codes]
        self._sources[name] = codes, scales

    def _show_mxfp4(self, codes: str, name: str) -> None:
        scales, shape = name + SCALES, self.shapes[codes]
        self._check(codes, scales, {"U8"}, shape[:-1])
        if shape[-1] != MXFP4_BLOCK // 2 or len(shape) != 4:
            raise ValueError(
                f"{codes} has the shape {list(shape)}, expected [experts, rows, blocks, 16]."
            )
        self._show(name, codes, scales, (shape[0], shape[2] * MXFP4_BLOCK, shape[1]))

    def _show_fp8(self, codes: str) -> None:
        scales, shape = codes + FACTORS, self.shapes[codes]
        grid = tuple(-(-size // by) for size, by in zip(shape, self._block, strict=False))
        self._check(codes, scales, {"float32", "bfloat16"}, grid)
        self._show(codes, codes, scales, shape)

    def _check(self, codes: str, scales: str, dtypes: set[str], shape: tuple[int, ...]) -> None:
        found = self.dtypes.get(scales), self.shapes.get(scales)
        if found[0] not in dtypes or found[1] != shape:
            raise ValueError(
                f"{codes}, {list(self.shapes[codes])}, has the scales {scales}: {found[0]}"
                f"{list(found[1] or ())}, expected {' or '.join(sorted(dtypes))}{list(shape)}; the "
                "codes cannot be decoded. Fetch all files of the model again."
            )

    def _read_mxfp4(self, codes: str, scales: str, index: tuple[slice, ...]) -> np.ndarray:
        blocks = self._stored[codes][2]
        expert, features, row = index
        start, stop, step = features.indices(blocks * MXFP4_BLOCK)
        first, last = start // MXFP4_BLOCK, -(-stop // MXFP4_BLOCK)
        inside = expert, row, slice(first, last)
        byte = super().read(codes, (*inside, slice(0, MXFP4_BLOCK // 2)))
        exponent = super().read(scales, inside).astype(np.int32) - 127
        values = FP4_VALUES[np.stack([byte & 15, byte >> 4], axis=-1)]
        values = values.reshape(*byte.shape[:-1], MXFP4_BLOCK)
        values = np.ldexp(values, exponent[..., None]).reshape(*byte.shape[:2], -1)
        corner = first * MXFP4_BLOCK
        values = values[..., start - corner : stop - corner : step]
        return values.swapaxes(1, 2).astype(jnp.dtype(DECODED))

    def _read_fp8(self, codes: str, scales: str, index: tuple[slice, ...]) -> np.ndarray:
        value = super().read(codes, index).astype(np.float32)
        sizes = self._stored[codes]
        rows, columns = (
            np.arange(size)[part] // by
            for part, size, by in zip(index, sizes, self._block, strict=True)
        )
        every = tuple(slice(0, blocks) for blocks in self._stored[scales])
        factors = super().read(scales, every).astype(np.float32)
        return (value * factors[np.ix_(rows, columns)]).astype(jnp.dtype(DECODED))


def open_tensor_files(directory: Path, quantization: Quantization) -> TensorFiles:
    """Opens the tensors of a directory; decodes them if they are quantized."""
    return DecodedFiles(directory, quantization) if quantization.method else TensorFiles(directory)
