"""A small Llama: its config, its files, and what is in them."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from manualpar import Batch, fsdp
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.pretrained import export, read_architecture
from tests.paths import ROOT

CONFIG = {
    "model_type": "llama",
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def llama(directory, **fields):
    return Transformer(**read_architecture(directory).fields, **fields)


def tensors_of(params, num_layers=3):
    """The tensors of a scanned model, by their names in a file, written down one by one."""

    def flat(x, *, outputs):
        return np.ascontiguousarray(x.reshape(-1, np.prod(x.shape[-outputs:], dtype=int)).T)

    p = {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}
    tensors = {
        "model.embed_tokens.weight": p["embedding"][:30],
        "model.norm.weight": p["final_norm/scale"],
        "lm_head.weight": np.ascontiguousarray(p["head"].T[:30]),
    }
    for i in range(num_layers):
        layer, at = {k[7:]: x[i] for k, x in p.items() if k.startswith("layers/")}, "model.layers"
        for name in ("query", "key", "value"):
            kernel = flat(layer[f"attention/{name}/kernel"], outputs=2)
            tensors[f"{at}.{i}.self_attn.{name[0]}_proj.weight"] = kernel
        out = flat(layer["attention/out/kernel"], outputs=1)
        tensors[f"{at}.{i}.self_attn.o_proj.weight"] = out
        for name in ("gate", "up", "down"):
            kernel = flat(layer[f"mlp/{name}/kernel"], outputs=1)
            tensors[f"{at}.{i}.mlp.{name}_proj.weight"] = kernel
        tensors[f"{at}.{i}.input_layernorm.weight"] = layer["attention_norm/scale"]
        tensors[f"{at}.{i}.post_attention_layernorm.weight"] = layer["mlp_norm/scale"]
    return tensors


def write(directory, tensors):
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for name, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, directory / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def program_of(model, mesh, **options):
    batch = Batch(jnp.zeros((8, 8), jnp.int32), jnp.zeros((8, 8), jnp.int32))
    options = {"min_weight_size": 64, **options}
    return fsdp(model, optax.adamw(1e-3), language_model_loss, mesh=mesh, batch=batch, **options)


def read(directory):
    return {k: x for path in directory.glob("*.safetensors") for k, x in load_file(path).items()}


def during(monkeypatch, other):
    """Calls `other` once while an export writes; its error goes into the list that is returned."""
    errors, write = [], export.write_tensors

    def write_beside(*args):
        monkeypatch.setattr(export, "write_tensors", write)
        try:
            other()
        except ValueError as error:
            errors.append(error)
        write(*args)

    monkeypatch.setattr("manualpar.system.storage.drafts.DYING_SECONDS", 0.1)
    monkeypatch.setattr(export, "write_tensors", write_beside)
    return errors


def assert_same_files(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


CONFIG_FILE = ROOT / "configs" / "fsdp_lm.py"


def make_tokenizer(path, size):
    words = {"<s>": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(path))
