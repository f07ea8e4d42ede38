"""Compares the error and the memory of a stored base model with those of bitsandbytes.

    python -m benchmarks.stored_base [--json FILE.json]

Each row of the table is one way to store the frozen kernels of a model: those of `quantized`, and
those of bitsandbytes if it is installed. Both divide a kernel into the same blocks. *Bits* are the
bits of a number with its share of the scales; tables that all kernels share are not counted.
*Normal* and *heavy tails* are the mean absolute errors of numbers with a standard deviation of 1: a
normal distribution, and a t-distribution with 5 degrees of freedom. *Logits off by* is the standard
deviation of the difference from the logits in float32, divided by the standard deviation of the
logits, for a random Transformer of 4 layers of 256 features.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import meta

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import table
from manualpar.core.trees import path_name
from manualpar.models import Transformer
from manualpar.models.finetuning.quantized import Code, decode, encode

# A way to store an array: the array that is decoded, and the number of stored bytes.
Store = Callable[[jax.Array], tuple[jax.Array, int]]
BLOCK = 64


def main() -> None:
    """Measures, and prints and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="a JSON file")
    args = parser.parse_args()
    conditions = note_conditions("benchmarks.stored_base", None)
    lines = rows(ways(), size=1024)
    print("\n".join(lines))
    write_results(conditions, lines=lines, data={}, output=None, json_output=args.json)


def ways() -> dict[str, Store]:
    """Returns all ways to store an array, by name."""
    found: dict[str, Store] = {"bfloat16": _rounded}
    for code in ("int8", "nf4"):
        for dtype in ("float32", "bfloat16"):
            name = f"`quantized`, {code.upper() if code == 'nf4' else code}, scales in {dtype}"
            found[name] = functools.partial(_ours, code=code, dtype=dtype)
    if importlib.util.find_spec("bitsandbytes"):
        found["bitsandbytes, int8, a scale for each row"] = _int8_of_bitsandbytes
        for name, is_double in (("NF4", False), ("NF4, scales quantized again", True)):
            found[f"bitsandbytes, {name}"] = functools.partial(_nf4_of_bitsandbytes, is_double)
    return found


def rows(stores: Mapping[str, Store], size: int) -> list[str]:
    """Makes the table; the errors of numbers are means over `size ** 2` numbers."""
    keys = jax.random.split(jax.random.key(0))
    normal = jax.random.normal(keys[0], (size, size))
    heavy = jax.random.t(keys[1], 5.0, (size, size)) * (3 / 5) ** 0.5
    model = Transformer(
        vocab_size=512, num_layers=4, hidden_size=256, num_heads=4, mlp_size=768, scan_layers=True
    )
    tokens = jax.random.randint(jax.random.key(1), (4, 64), 0, 512)
    params = meta.unbox(model.init(jax.random.key(2), tokens))["params"]
    call = jax.jit(lambda params: model.apply({"params": params}, tokens))
    logits = call(params)
    lines = []
    for name, store in stores.items():
        decoded, stored_bytes = store(normal)
        errors = [jnp.abs(decoded - normal).mean(), jnp.abs(store(heavy)[0] - heavy).mean()]
        other = call(jax.tree.map_with_path(functools.partial(_stored, store), params))
        off = float((other - logits).std() / logits.std())
        bits = stored_bytes * 8 / normal.size
        lines.append([name, f"{bits:.3f}", *(f"{x:.4f}" for x in errors), f"{off:.2%}"])
    return table(["base", "bits", "normal", "heavy tails", "logits off by"], lines)


def _stored(store: Store, path: Any, x: jax.Array) -> jax.Array:
    return store(x)[0] if path_name(path).endswith("kernel") else x


def _rounded(x: jax.Array) -> tuple[jax.Array, int]:
    return x.astype(jnp.bfloat16).astype(x.dtype), x.size * 2


def _ours(x: jax.Array, *, code: Code, dtype: str) -> tuple[jax.Array, int]:
    codes, scales = encode(x, BLOCK, code)
    scales = scales.astype(dtype)
    # `decode` returns the dtype of the scales. A model decodes to bfloat16 with these scales.
    return decode(codes, scales).astype(x.dtype), codes.nbytes + scales.nbytes


def _int8_of_bitsandbytes(x: jax.Array) -> tuple[jax.Array, int]:
    import torch
    from bitsandbytes import functional

    # Its rows are inputs of an output feature: the last dim of a kernel in PyTorch.
    flat = torch.tensor(np.asarray(x, np.float32).reshape(-1, x.shape[-1]))
    codes, scales, _ = functional.int8_vectorwise_quant(flat.half())
    found = functional.int8_vectorwise_dequant(codes, scales).float().numpy()
    return jnp.asarray(found).reshape(x.shape), codes.nbytes + scales.nbytes


def _nf4_of_bitsandbytes(is_double: bool, x: jax.Array) -> tuple[jax.Array, int]:
    import torch
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        torch.tensor(np.asarray(x, np.float32)),
        blocksize=BLOCK,
        compress_statistics=is_double,
        quant_type="nf4",
    )
    size = codes.nbytes + state.absmax.nbytes
    if is_double:
        size += state.state2.absmax.nbytes + state.offset.nbytes
    found = functional.dequantize_4bit(codes, state).numpy()
    return jnp.asarray(found).reshape(x.shape), size


if __name__ == "__main__":
    main()
