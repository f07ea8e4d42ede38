"""A run on packed chats: adapters learn its answers, and from its workdir it gives them."""

import json
import types

import jax
import pytest

from manualpar import make_mesh
from manualpar.commands import command_flags, evaluate_command, generate_command
from manualpar.commands.command_line import parse_command_line
from manualpar.commands.train_command import run_command
from manualpar.data.sources import load_dataset
from manualpar.training.load_run import Trained
from tests.data.chats import write_chat_tokenizer
from tests.paths import ROOT

CONFIG = ROOT / "configs" / "fsdp_lm.py"
FIELDS = {
    "data.source": "chat",
    "data.sequence_length": 96,
    "data.held_out": 0.1,
    "data.batch_size": 8,
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.mlp_size": 64,
    "model.vocab_multiple": 8,
    "model.scan_layers": True,
    "model.dtype": "float32",
    "model.lora": ("*/attention/*:16", "*/mlp/*:16"),
    "model.lora_alpha": 32.0,
    "optimizer.learning_rate": 2e-2,
    "optimizer.warmup_steps": 5,
    "optimizer.weight_decay": 0.0,
    "training.num_steps": 80,
    "training.eval_every_steps": 80,
    "checkpoint.every_steps": 80,
    "sample.num_tokens": 0,
}


def write_chats(path):
    """Whoever asks for a color is told it, behind a greeting."""
    colors, lines = ("red", "blue", "green"), []
    for number in range(240):
        color = colors[number % 3]
        asked = {"role": "user", "content": f"{number} wants {color}"}
        told = {"role": "assistant", "content": f"so {color}!"}
        lines.append(json.dumps({"messages": [asked, told]}))
    path.write_text("\n".join(lines))
    return path


def test_packed_chats_have_no_test_split_to_evaluate(tmp_path, monkeypatch, capsys):
    lines = ({"prompt": f"{number}?", "completion": "so"} for number in range(90))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    options = {"sequence_length": 32, "held_out": 0.1, "cache": str(tmp_path / "cache")}
    dataset = load_dataset("chat", seed=0, path=str(path), **options)
    program = types.SimpleNamespace(mesh=make_mesh({"data": 1}, jax.devices()[:1]))
    trained = Trained(program, None, dataset.tokenizer, 32, dataset, "step 3 of runs/1")
    asked = types.SimpleNamespace(stop_tokens=frozenset())
    monkeypatch.setattr(command_flags, "load_run", lambda workdir, mesh: trained)
    monkeypatch.setattr(command_flags, "Generator", lambda *args, **kwargs: asked)
    assert evaluate_command.main(["evaluate", "--workdir=runs/1"]) == 2
    message = "step 3 of runs/1 has a test split with several documents in a sequence, which"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_chats_with_adapters_answers_from_its_workdir(tmp_path, devices8, capsys):
    del devices8
    workdir, tokenizer = tmp_path / "run", write_chat_tokenizer(tmp_path / "tokenizer")
    fields = FIELDS | {
        "data.path": write_chats(tmp_path / "chats.jsonl"),
        "data.tokenizer": tokenizer,
        "data.cache": tmp_path / "cache",
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    argv = ["fsdp", f"--config={CONFIG}", *flags, f"--workdir={workdir}"]
    assert run_command(parse_command_line(argv, default_config=CONFIG)) == 0
    capsys.readouterr()
    asked = ["--prompt=999 wants blue", "--chat", "--max_tokens=24"]
    assert generate_command.main(["generate", f"--workdir={workdir}", *asked]) == 0
    answer = capsys.readouterr().out
    assert answer == "so blue!\n"
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "998 wants red"}]
    turn = {"role": "assistant", "content": "so red!"}
    lines = [{"messages": chat}, {"messages": [*chat, turn, chat[0]]}, {"prompt": "so"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    assert generate_command.main(["generate", f"--workdir={workdir}", f"--prompts={prompts}"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found[0]["text"], found[0]["ending"]] == ["so red!", "stop"]
    assert found[1]["text"].startswith("so ")  # It has learned no second turns.
    prompts.write_text('{"messages": [{"role": "user", "content": "<|im_end|>"}]}')
    assert generate_command.main(["generate", f"--workdir={workdir}", f"--prompts={prompts}"]) == 2
    error = capsys.readouterr().err
    assert "line 1: it has a message 1 whose content spells out the special token" in error
    assert evaluate_command.main(["evaluate", f"--workdir={workdir}"]) == 2
    assert "several documents in a sequence" in capsys.readouterr().err
