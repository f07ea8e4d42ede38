"""Malformed inputs of commands, third part: directories of downloaded models.

A wrong `config.json` must be refused before anything is allocated for it. Only regular files may be
opened. Names from files must be escaped before they reach a terminal.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.malformed_cases import CONFIGS, Case

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
DOTS: Mapping[str, Any] = {
    **LLAMA,
    "model_type": "dots1",
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
TOO_LARGE = "1e400"  # In JSON this is a number, which Python reads as infinity.
INTEGERS: tuple[Any, ...] = (
    0,
    -1,
    2**31,
    2**63,
    10**399,
    True,
    1.5,
    TOO_LARGE,
    "4",
    "\x1b[2J",
    [],
    {},
)
MANY = 10**6
# A value that some fields may have, but no machine has enough memory for the model.
LARGE = 2**31 - 1
FLOATS: tuple[Any, ...] = (0, -1, 10**399, TOO_LARGE, True, "x", [])
MAY_BE_0 = ("n_shared_experts", "first_k_dense_replace")
ONE_FILE = "model.safetensors"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def model_cases(folder: Path) -> Iterator[Case]:
    """Yields malformed directories of models."""
    models = folder / "models"
    models.mkdir()
    yield from _configs(models)
    yield from _files(models)
    yield from _tensors(models)


def _case(directory: Path, name: str, names: str) -> Case:
    arguments = (
        str(directory),
        f"--config={CONFIGS / 'fsdp_lm.py'}",
        f"--workdir={directory}.run",
        f"--config.data.path={directory.parent.parent / 'good.txt'}",
    )
    return Case("models", name, "experiments.import_hf", arguments, names)


def _make(directory: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """Writes a model's directory with this config, a valid tokenizer, and only one tensor."""
    directory.mkdir()
    text = json.dumps(config).replace(f'"{TOO_LARGE}"', TOO_LARGE)
    (directory / "config.json").write_text(text)
    vocab = {"<s>": 0, "</s>": 1, "a": 2}
    tokenizer = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": tokenizer}))
    write_tensors(directory / "model.safetensors", {"model.norm.weight": [16]})
    return directory


def write_tensors(path: Path, shapes: Mapping[str, list[int]]) -> None:
    """Writes a safetensors file with float32 zeros; names are not checked."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def _configs(models: Path) -> Iterator[Case]:
    for base in (LLAMA, DOTS):
        fields = [key for key, value in base.items() if type(value) is int]
        wrong: dict[str, tuple[str, Any, str]] = {
            f"{key} {value!r:.20}": (key, value, key) for key in fields for value in INTEGERS
        }
        for value in FLOATS:
            wrong[f"rms_norm_eps {value!r:.20}"] = ("rms_norm_eps", value, "rms_norm_eps")
        wrong |= {f"{key} large": (key, LARGE, "") for key in fields}
        scaled = {"rope_type": "linear", "factor": 10**399}
        wrong["rope_scaling large"] = ("rope_scaling", scaled, "rope_scaling.factor")
        wrong["a key with escapes"] = (ESCAPE, 1, "\\x1b]0;owned")
        for number, (name, (key, value, names)) in enumerate(wrong.items()):
            if value == 0 and type(value) is int and key in MAY_BE_0:
                continue
            directory = _make(models / f"{base['model_type']}_{number}", {**base, key: value})
            yield _case(directory, name, names)


def _files(models: Path) -> Iterator[Case]:
    """Yields directories in which a FIFO, a folder, a link or a device replaces a file."""
    index = "model.safetensors.index.json"
    private = models / "private"
    private.write_text("{}")

    def make_fifo_behind_link(path: Path) -> None:
        os.mkfifo(f"{path}.fifo")
        path.symlink_to(f"{path.name}.fifo")

    kinds: dict[str, Callable[[Path], None]] = {
        "a FIFO": os.mkfifo,
        "a folder": Path.mkdir,
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a FIFO behind a link": make_fifo_behind_link,
        "a link to a private file": lambda path: path.symlink_to(private),
    }
    for number, (kind, make) in enumerate(kinds.items()):
        for name in ("config.json", "tokenizer.json", "generation_config.json", ONE_FILE, index):
            directory = _make(models / f"{name}_{number}")
            (directory / (ONE_FILE if name == index else name)).unlink(missing_ok=True)
            make(directory / name)
            yield _case(directory, f"{name} is {kind}", name.removesuffix(".index.json"))


def _tensors(models: Path) -> Iterator[Case]:
    """Yields directories with a million tensors, or with terminal escapes in a name."""
    path = _make(models / "many") / "model.safetensors"
    write_tensors(path, {f"t{number}": [0] for number in range(MANY)})
    yield _case(path.parent, "a million tensors", "header")
    path = _make(models / "escapes") / "model.safetensors"
    write_tensors(path, {ESCAPE: [2]})
    yield _case(path.parent, "a name with escapes", "tensors")
    path = _make(models / "file name") / "model.safetensors"
    path.unlink()
    (path.parent / f"{ESCAPE.replace('/', '')}.bin").touch()
    yield _case(path.parent, "a file's name with escapes", "pickled")
    path = _make(models / "index") / "model.safetensors"
    shutil.move(path, path.with_name("a.safetensors"))
    places = {**dict.fromkeys(map(str, range(MANY)), "a.safetensors"), ESCAPE: "a.safetensors"}
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": places}))
    yield _case(path.parent, "an index of a million", "index")
