"""What importing and exporting a model takes: seconds, bytes read, and memory of the host.

python -m benchmarks.import_export [--gib 2] [--folder /tmp]

A Llama of random bfloat16 numbers is written in files of half a GiB. Then, each in processes of its
own: manualpar loads it into shards on eight simulated devices, in one process and in two, and
exports it; transformers loads it with `from_pretrained` and saves it with `save_pretrained`.
Everything stays bfloat16, and there is no optimizer state. What transformers
loads is the mapped file until it is used, so that every number is looked at once.

Simulated devices hold their shards in the memory of the host. So the memory that counts is the peak
of a process (`VmHWM`, reset before) beyond what it had after its imports, and beyond the bytes of
the state that its own devices hold in the end. The files are in the page cache, so that seconds are
those of copying; but `export_hf` waits until its files are on the disk, and `save_pretrained` does
not. Seconds of processors are those of all threads of all processes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch, Program, fsdp, make_mesh
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.pretrained import export_hf, load, read_architecture
from manualpar.models.pretrained.tensor_names import pieces_of_transformer
from manualpar.system.cluster import initialize

GIB = 1 << 30
HIDDEN, INSIDE, HEADS, VOCABULARY = 2048, 5632, 16, 32_000
ROWS = (
    ("manualpar load_hf, 1 process", "load", 1),
    ("manualpar load_hf, 2 processes", "load", 2),
    ("transformers from_pretrained", "torch-load", 1),
    ("manualpar export_hf, 1 process", "export", 1),
    ("manualpar export_hf, 2 processes", "export", 2),
    ("transformers save_pretrained", "torch-save", 1),
)


def main() -> int:
    """Makes the files, measures every row in processes of its own, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gib", type=float, default=2.0, help="of tensors (default: 2)")
    parser.add_argument("--folder", type=Path, help="where the files go for a while")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.work:
        return _work(flags.work, flags.directory)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        directory = Path(folder) / "model"
        total = make_model(directory, int(flags.gib * GIB))
        print(f"{total / GIB:.2f} GiB in {len(list(directory.glob('*.safetensors')))} files\n")
        print("| what | seconds | of processors | GiB read a process | of state | peak beyond it |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for name, work, processes in ROWS:
            rows = measure(work, directory, processes)
            seconds, processor = (
                f"{max(row['seconds'] for row in rows):.1f}",
                f"{sum(row['processor'] for row in rows):.1f}",
            )
            read, state, peak = (
                " + ".join(f"{row[key] / GIB:.2f}" for row in rows)
                for key in ("read", "state", "beyond")
            )
            print(f"| {name} | {seconds} | {processor} | {read} | {state} | {peak} |", flush=True)
    return 0


def make_model(directory: Path, size: int) -> int:
    """Writes a random Llama of about so many bytes, file by file; returns the bytes of tensors."""
    from safetensors.numpy import save_file

    layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INSIDE)
    layers = max(1, round((size - 4 * VOCABULARY * HIDDEN) / layer))
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INSIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    model = Transformer(**read_architecture(directory).fields)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    flat = {"/".join(k.key for k in path): x.shape for path, x in _leaves(shapes)}
    random = np.random.default_rng(0)
    files: dict[str, dict[str, None]] = {}
    group: dict[str, np.ndarray] = {}
    for path, pieces in pieces_of_transformer("llama", flat).items():
        for piece in pieces:
            shape = piece.tensor_shape(flat[path][len(piece.entry) :])
            bits = random.integers(0x3C00, 0x3D00, shape, np.uint16)  # From 0.008 to 0.03.
            group[piece.tensor] = bits.view(jnp.bfloat16)
            if sum(x.nbytes for x in group.values()) >= GIB // 2:
                files[f"model-{len(files)}.safetensors"] = dict.fromkeys(group)
                save_file(group, directory / list(files)[-1], metadata={"format": "pt"})
                group = {}
    files[f"model-{len(files)}.safetensors"] = dict.fromkeys(group)
    save_file(group, directory / list(files)[-1], metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {key: name for name, keys in files.items() for key in keys},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _leaves(tree: Any) -> Any:
    return jax.tree_util.tree_leaves_with_path(tree)


def measure(work: str, directory: Path, processes: int) -> list[dict[str, float]]:
    """The figures of each process that does a piece of work."""
    command = [sys.executable, "-m", "benchmarks.import_export", f"--work={work}"]
    command.append(f"--directory={directory}")
    devices = {"JAX_NUM_CPU_DEVICES": "8"}
    if processes > 1:
        launch = [
            sys.executable,
            "-m",
            "manualpar.launch",
            f"--processes={processes}",
        ]
        command = [*launch, f"--devices-per-process={8 // processes}", "--", *command]
        devices = {}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | devices)
    if done.returncode:
        raise RuntimeError(f"{work} failed:\n{done.stdout}{done.stderr}")
    lines = [line.partition("{") for line in done.stdout.splitlines() if '"seconds"' in line]
    return [json.loads(brace + text) for _, brace, text in lines]


def _work(work: str, directory: Path) -> int:
    """Does a piece of work in this process, and prints its figures."""
    target = directory.parent / work
    if work.startswith("torch"):
        figures = _transformers(work, directory, target)
        shutil.rmtree(target, ignore_errors=True)
    else:
        with initialize():
            figures = _manualpar(work, directory, target)
        if jax.process_index() == 0:
            shutil.rmtree(target, ignore_errors=True)
    print(json.dumps(figures), flush=True)
    return 0


def _manualpar(work: str, directory: Path, target: Path) -> dict[str, float]:
    program = _program(directory)
    if work == "load":
        loaded, figures = _measured(lambda: load(program, directory))
        state, read = loaded.state, loaded.bytes_read
        held = sum(
            s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards
        )
        return figures | {"read": read, "state": held, "beyond": figures["beyond"] - held}
    state = load(program, directory).state
    held = sum(s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards)
    _, figures = _measured(
        lambda: export_hf(program, state, target, like=directory, max_shard_bytes=GIB // 2)
    )
    return figures | {"read": 0, "state": held}


def _program(directory: Path) -> Program:
    model = Transformer(**read_architecture(directory).fields, dtype="bfloat16")
    tokens = jnp.zeros((8, 8), jnp.int32)
    return fsdp(
        model,
        optax.sgd(0.1),
        language_model_loss,
        mesh=make_mesh({"data": 8}),
        batch=Batch(tokens, tokens),
        param_dtype="bfloat16",
    )


def _transformers(work: str, directory: Path, target: Path) -> dict[str, float]:
    import torch
    import transformers

    def make() -> Any:
        kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(directory, dtype=torch.bfloat16)
        for tensor in model.parameters():
            tensor.data.view(torch.int16).max()  # It is mapped, and read when it is first used.
        return model

    if work == "torch-load":
        model, figures = _measured(make)
    else:
        model = make()
        for tensor in model.parameters():
            tensor.data = tensor.data.clone()  # As after a step of training: in memory, not mapped.
    held = sum(tensor.nbytes for tensor in model.parameters())
    if work == "torch-load":
        return figures | {"read": held, "state": held, "beyond": figures["beyond"] - held}
    _, figures = _measured(lambda: model.save_pretrained(target, max_shard_size="512MB"))
    return figures | {"read": 0, "state": held}


def _measured(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What a call returns, its seconds, and the peak of memory beyond what there was before."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = _memory("VmRSS")
    started, processor = time.perf_counter(), time.process_time()
    result = call()
    if hasattr(result, "state"):
        jax.block_until_ready(result.state)
    seconds = time.perf_counter() - started
    return result, {
        "seconds": seconds,
        "processor": time.process_time() - processor,
        "beyond": float(_memory("VmHWM") - before),
    }


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
