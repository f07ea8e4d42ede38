"""Reads a tiny random checkpoint of every causal language model that transformers has.

```
python -m benchmarks.causal_lm_types              # All types, some seconds each.
python -m benchmarks.causal_lm_types llama gpt2   # Only these types.
python -m benchmarks.causal_lm_types --families   # Only the types that we read.
```

For each type transformers makes a small model with random parameters and saves it. The verdict is
`exact` if our logits differ by at most `TOLERANCE`, and the exported files have the same bits;
`refused` if the config is refused, with the reason; `not made` if transformers cannot make such a
small model, or not in time; and `wrong` in any other case. Each type has a process of its own and a
limit of time, so that no type takes the others down. The command exits with 1 if a type is wrong.
"""

import argparse
import concurrent.futures
import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import table
from manualpar.models.pretrained.families import FAMILIES, WRAPPERS

TOLERANCE = 1e-4  # Of logits of the size of 1, in float32.
SECONDS = 240
VOCABULARY, POSITIONS = 64, 16
# The names that configs use for sizes, each with a small value.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    "head_dim": 8,
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 40,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Types whose defaults are models that we refuse, with the keys of the models that are read.
OF_TYPE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["attention"] * SMALL["num_hidden_layers"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    },
    "llama4_text": {"num_experts_per_tok": 1, "floor_scale": 4},
}


class Verdict(NamedTuple):
    """What became of a type: `exact`, `refused`, `not made` or `wrong`, and the reason."""

    verdict: str
    reason: str


def causal_lm_types() -> list[str]:
    """Returns the `model_type` of all causal language models of the installed transformers."""
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(name: str) -> Any:
    """Makes a config of a type with small sizes, also of the text model within."""
    config_class = importlib.import_module("transformers").CONFIG_MAPPING[name]
    default = config_class()
    options = _options(default)
    inner = getattr(default, "text_config", None)
    if inner is not None:
        of_text = _options(inner) | OF_TYPE.get(inner.model_type, {})
        options["text_config"] = type(inner)(**of_text).to_dict()
    return config_class(**options | OF_TYPE.get(name, {}))


def _options(default: Any) -> dict[str, Any]:
    names = {**default.to_dict(), **dict.fromkeys(default.attribute_map)}
    options = {key: value for key, value in SMALL.items() if key in names}
    if "kv_lora_rank" in names:  # With latent attention there are as many heads of keys.
        options["num_key_value_heads"] = SMALL["num_attention_heads"]
    # A config that names other heads than its sizes say would not be small.
    for key in default.attribute_map.values():
        if key in SMALL:
            options[key] = SMALL[key]
    return options


def make_checkpoint(config: Any, directory: Path) -> np.ndarray:
    """Saves a small random model of a config; returns its logits of `tokens`."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager", dtype=torch.float32).eval()
    for path, x in model.named_parameters():
        noise = torch.randn_like(x)
        fan = x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3
        x.data = x.data + 0.3 * noise if "norm" in path or "ln_" in path else noise * fan
    model.save_pretrained(directory)
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(tokens()).long()).logits.numpy()
    return logits


def tokens() -> np.ndarray:
    """Returns the tokens of the comparison, `int32[2, POSITIONS]`."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, POSITIONS), dtype=np.int32)


def judge(name: str) -> Verdict:
    """Makes, reads, runs and writes a small checkpoint of a type."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary, "made")
        directory.mkdir()
        named = {"model_type": name, "text_config": {}}
        (directory / "config.json").write_text(json.dumps(named))
        if "model_type is" in (reason := refusal(directory)):
            return Verdict("refused", reason.partition("; these models have ")[2] or "no family")
        try:
            config = small_config(name)
            config.save_pretrained(directory)
        except Exception as error:  # Of any library's code.
            return Verdict("not made", f"{type(error).__name__}: {error}")
        if reason := refusal(directory):
            return Verdict("refused", reason)
        try:
            expected = make_checkpoint(config, directory)
        except Exception as error:
            return Verdict("not made", f"{type(error).__name__}: {error}")
        return judge_checkpoint(directory, expected, Path(temporary, "written"))


def refusal(directory: Path) -> str:
    """Returns why the config in a directory is refused; "" if it is read."""
    from manualpar.models.pretrained import read_architecture

    try:
        read_architecture(directory)
    except ValueError as error:
        return str(error).replace(str(directory), "").lstrip("/")
    return ""


def judge_checkpoint(directory: Path, expected: np.ndarray, written: Path) -> Verdict:
    """Reads a checkpoint, and compares its logits, and the files that we write."""
    import jax
    import optax

    from manualpar import Batch, fsdp, make_mesh
    from manualpar.models import Transformer
    from manualpar.models.cross_entropy import language_model_loss
    from manualpar.models.pretrained import export_hf, load_hf, read_architecture

    jax.config.update("jax_disable_most_optimizations", True)
    model, inputs = Transformer(**read_architecture(directory).fields), tokens()
    program = fsdp(
        model,
        optax.sgd(1.0),
        language_model_loss,
        mesh=make_mesh({"data": 1}, jax.devices()[:1]),
        batch=Batch(inputs, inputs),
    )
    state = load_hf(program, directory)
    logits = np.asarray(jax.jit(model.apply)(program.whole(state), inputs))
    distance = float(np.abs(logits - expected).max())
    if not distance <= TOLERANCE:
        return Verdict("wrong", f"logits differ by {distance:.2g}")
    export_hf(program, state, written, like=directory)
    different = _different_files(directory, written)
    if different:
        return Verdict("wrong", f"the file has other {different}")
    return Verdict("exact", f"{distance:.1e}")


def _different_files(directory: Path, written: Path) -> str:
    """Names a tensor that differs between two directories; "" if all have the same bits."""
    from safetensors.numpy import load_file

    found = [
        {
            _of_text_model(name): tensor
            for path in sorted(place.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for place in (directory, written)
    ]
    is_wrapped = json.loads((directory / "config.json").read_text())["model_type"] in WRAPPERS
    for name in sorted(found[1].keys() if is_wrapped else found[0].keys() | found[1].keys()):
        first, second = (tensors.get(name) for tensors in found)
        if first is None or second is None or not np.array_equal(first, second):
            return name
    return ""


def _of_text_model(name: str) -> str:
    """Returns the name of a tensor without the prefixes of a multimodal model."""
    name = name.replace("model.language_model.", "model.")
    return name.removeprefix("language_model.")


def judge_apart(name: str, seconds: float = SECONDS) -> Verdict:
    """Judges a type in a process of its own."""
    # The libraries are imported once, in the process that all others are forks of.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["transformers.modeling_utils", "manualpar.models.pretrained"])
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_send_verdict, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return Verdict("not made", f"no result in {seconds} s")
        verdict: Verdict = ours.recv()
        process.join(seconds)  # So that it leaves nothing behind.
        return verdict
    except EOFError:
        process.join()
        return Verdict("wrong", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_verdict(name: str, pipe: Any) -> None:
    # Libraries print and warn.
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nothing:
        warnings.simplefilter("ignore")
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        try:
            verdict = judge(name)
        except Exception as error:
            verdict = Verdict("wrong", f"{type(error).__name__}: {error}")
        pipe.send(verdict)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns 1 if a type is wrong."""
    parser = argparse.ArgumentParser(description="Reads every causal LM type of transformers.")
    parser.add_argument("types", nargs="*", help="types of models; all if none is given")
    parser.add_argument("--families", action="store_true", help="only the types that we read")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit for a type")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at a time")
    parser.add_argument("--json", type=Path, help="a JSON file")
    given = parser.parse_args(arguments)
    conditions = note_conditions("benchmarks.causal_lm_types", arguments)
    names = given.types or causal_lm_types()
    if given.families:
        names = [name for name in names if name in FAMILIES or name in WRAPPERS]
    found: dict[str, list[str]] = {}
    print(f"{'type':28} {'verdict':9} reason")
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        verdicts = pool.map(functools.partial(judge_apart, seconds=given.seconds), names)
        for name, (verdict, reason) in zip(names, verdicts, strict=True):
            found.setdefault(verdict, []).append(name)
            print(f"{name:28} {verdict:9} {' '.join(reason.split())[:160]}", flush=True)
    print(", ".join(f"{len(types)} {verdict}" for verdict, types in sorted(found.items())))
    lines = table(
        ["verdict", "number", "types"],
        [[verdict, str(len(types)), ", ".join(types)] for verdict, types in sorted(found.items())],
    )
    write_results(conditions, lines=lines, data={}, output=None, json_output=given.json)
    return 1 if "wrong" in found else 0


if __name__ == "__main__":
    sys.exit(main())
