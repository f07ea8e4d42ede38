"""Tokens a second of generation: here on one and on eight simulated devices, and transformers.

python -m benchmarks.generation [--rows=8] [--prompt=128] [--tokens=64] [--side=...]

The same small Llama with the same weights, made with transformers and read by `load_hf`. Each side
is a process of its own. Times are the best of several calls, after one that compiles. `prefill` is
the time of a call for one token, and `decode` what each further token takes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIDES = ("ours, 1 device", "ours, 8 devices fsdp", "ours, data 2 x model 4", "transformers")
FIELDS = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
REPEATS = 4


def main() -> None:
    """Measures the sides one after the other and prints a table."""
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 8), ("prompt", 128), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--directory", type=Path)
    flags = parser.parse_args()
    if flags.side:
        measure = _transformers if flags.side == "transformers" else _ours
        print(json.dumps(measure(flags)))
        return
    with tempfile.TemporaryDirectory() as directory:
        _make_model(directory)
        print("| side | prefill tokens/s | decode tokens/s | compiled again | sent a token |")
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.generation", f"--side={side}"]
            command += [f"--directory={directory}", f"--rows={flags.rows}"]
            command += [f"--prompt={flags.prompt}", f"--tokens={flags.tokens}"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {side} | {found['prefill']:,.0f} | {found['decode']:,.0f} "
                f"| {found.get('compilations', '')} | {found.get('sent', '')} |",
                flush=True,
            )


def _make_model(directory: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**FIELDS, max_position_embeddings=4096)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def _prompts(flags: argparse.Namespace) -> np.ndarray:
    shape = flags.rows, flags.prompt
    return np.random.default_rng(0).integers(3, FIELDS["vocab_size"], shape)


def _rates(flags: argparse.Namespace, call: Callable[[int], Any]) -> dict[str, Any]:
    """Tokens a second, of a call for so many tokens."""
    seconds = {}
    for tokens in (1, flags.tokens):
        call(tokens)
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            call(tokens)
            times.append(time.perf_counter() - started)
        seconds[tokens] = min(times)
    per_token = (seconds[flags.tokens] - seconds[1]) / (flags.tokens - 1)
    return {"prefill": flags.rows * flags.prompt / seconds[1], "decode": flags.rows / per_token}


def _transformers(flags: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(flags.directory).eval()
    prompts = torch.tensor(_prompts(flags))
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def call(tokens: int) -> None:
        with torch.no_grad():
            model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, **options
            )

    return _rates(flags, call)


def _ours(flags: argparse.Namespace) -> dict[str, Any]:
    import jax
    import optax

    from manualpar import Batch, fsdp, make_mesh
    from manualpar.models import Transformer
    from manualpar.models.cross_entropy import language_model_loss
    from manualpar.models.generation import Generator
    from manualpar.models.pretrained import load_hf, read_architecture
    from manualpar.training.devices import simulate_devices

    single = flags.side == "ours, 1 device"
    simulate_devices(1 if single else 8)
    axes = {"data": 2, "model": 4} if "model" in flags.side else {"data": -1}
    fields = dict(read_architecture(flags.directory).fields)
    fields["split_axis"] = "model" if "model" in axes else ""
    tokens = np.zeros((8, 16), np.int32)
    program = fsdp(
        Transformer(**fields),
        optax.identity(),
        language_model_loss,
        mesh=make_mesh(axes),
        batch=Batch(tokens, tokens),
        min_weight_size=2**12,
    )
    state = load_hf(program, flags.directory)
    generator = Generator(program, stop_tokens=(), batch_size=flags.rows)
    prompts = _prompts(flags).tolist()
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **more: str | int) -> None:
        del duration_secs, more
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)

    seen: list[int] = []

    def call(number: int) -> None:
        generator.generate(state, prompts, max_tokens=number)
        seen.append(len(compiled))

    found = _rates(flags, call)
    # Of each of the two lengths all calls but the first.
    first, again = seen[: REPEATS + 1], seen[REPEATS + 1 :]
    found["compilations"] = first[-1] - first[0] + again[-1] - again[0]
    found["sent"] = f"{_sent(generator, state, flags) / 1e6:.2f} MB"
    return found


def _sent(generator: Any, state: Any, flags: argparse.Namespace) -> float:
    """The bytes that a device sends for a token of each row."""
    import jax

    from manualpar.inspect import trace_collectives
    from manualpar.models.generation.drawing import Drawing

    steps, drawing = generator.steps, Drawing().as_arrays()
    tokens, lengths = generator.pad([[0] * flags.prompt] * flags.rows, flags.prompt)
    keys = jax.random.split(jax.random.key(0), len(tokens))
    given = [steps.put_rows(x) for x in (tokens, lengths, keys)]
    size = flags.prompt + flags.tokens
    rows, _ = steps.prefill(state.params, {}, *given, drawing, size=size)
    traced = steps.decode.jitted.trace(state.params, {}, rows, drawing)
    return float(sum(each.bytes_sent for each in trace_collectives(traced)))


if __name__ == "__main__":
    main()
