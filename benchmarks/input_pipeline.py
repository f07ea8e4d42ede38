"""How fast each source gives batches, and whether a step would have to wait for them.

python -m benchmarks.input_pipeline [--sources digits synthetic text tokens] [--batch_size 32]
    [--sequence_length 128] [--prefetch 2] [--batches 200] [--step_ms MEASURED]

The text is Python's standard library, and the token files are made of it in a temporary directory.
Batches are taken as fast as they come, from the start of an epoch, with nothing else going on: the
median of five rounds, all of them on one device. With `--step_ms`, the time of a step from a run's
report, the last column is the share of a step that reading takes; below 100 % the reading, which
goes on meanwhile, is hidden if a core is free for it.

The lines above the table say what the corpus is, and what of its held-out bytes is needed without
any model: the entropy of single bytes, their frequencies known, and zlib's length, in bits a byte.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
import zlib

import jax
import numpy as np

from manualpar.data import (
    Dataset,
    LanguageDataset,
    Split,
    TokenSplit,
    load_dataset,
    train_batches,
)
from manualpar.data.sources import SOURCES
from manualpar.data.tokenize import write_token_files

ROUNDS = 5


def batches_per_second(split: Split, *, batch_size: int, prefetch: int, num_batches: int) -> float:
    """The median over `ROUNDS`, the first batch of each left out."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    rates = []
    for seed in range(ROUNDS):
        options = {"seed": seed, "batch_size": batch_size, "prefetch": prefetch}
        with contextlib.closing(train_batches(split, sharding=sharding, **options)) as batches:
            jax.block_until_ready(next(batches))
            started = time.perf_counter()
            for _ in range(num_batches):
                batch = next(batches)
            jax.block_until_ready(batch)
            rates.append(num_batches / (time.perf_counter() - started))
    return statistics.median(rates)


def bits_per_byte(data: bytes) -> tuple[float, float]:
    """(entropy of single bytes, zlib) of data that is not empty."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    frequencies = counts[counts > 0] / len(data)
    entropy = -float(frequencies @ np.log2(frequencies))
    return entropy, 8 * len(zlib.compress(data, 9)) / len(data)


def describe_corpus(dataset: LanguageDataset) -> list[str]:
    """A line for each split of a corpus of bytes."""
    lines = []
    for name, split in (("train", dataset.train), ("eval", dataset.eval), ("test", dataset.test)):
        assert isinstance(split, TokenSplit)
        tokens = split.stream.read(0, len(split.stream))
        data = tokens[tokens != split.bos_token].astype(np.uint8).tobytes()
        entropy, compressed = bits_per_byte(data)
        lines.append(
            f"{name}: {split.num_documents} files, {split.num_bytes} bytes, {len(split)} "
            f"sequences; entropy {entropy:.2f}, zlib {compressed:.2f}"
        )
    return lines


def measure(dataset: Dataset, source: str, args: argparse.Namespace) -> list[str]:
    """A row of the table."""
    split = dataset.train
    rate = batches_per_second(
        split,
        batch_size=args.batch_size,
        prefetch=args.prefetch,
        num_batches=args.batches,
    )
    is_text = isinstance(split, TokenSplit)
    tokens = f"{rate * args.batch_size * args.sequence_length:,.0f}" if is_text else ""
    return [
        source,
        f"{1e3 / rate:.2f}",
        f"{rate * args.batch_size:,.0f}",
        tokens,
        *([f"{100 * 1e3 / rate / args.step_ms:.1f} %"] if args.step_ms else []),
    ]


def main() -> None:
    """Prints the corpus and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--step_ms", type=float, default=0, help="the time of a step, measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if "tokens" in args.sources:
            write_token_files("", directory)
        datasets = {
            source: load_dataset(
                source,
                seed=0,
                path=directory if source == "tokens" else "",
                sequence_length=args.sequence_length,
            )
            for source in args.sources
        }
        for dataset in datasets.values():
            if isinstance(dataset, LanguageDataset):
                print("\n".join(describe_corpus(dataset)) + "\n")
                break
        header = ["source", "ms a batch", "examples/s", "tokens/s"]
        header += ["share of the step"] if args.step_ms else []
        for row in (header, ["---"] * len(header)):
            print(f"| {' | '.join(row)} |")
        for source, dataset in datasets.items():
            print(f"| {' | '.join(measure(dataset, source, args))} |", flush=True)


if __name__ == "__main__":
    main()
