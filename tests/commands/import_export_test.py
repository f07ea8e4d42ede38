"""The commands: a model comes into a workdir, is trained there without its files, and leaves it."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import fsdp
from manualpar.commands.import_export import export_main
from manualpar.data.tokenize import write_token_files
from manualpar.training.workdir import lock_workdir
from tests.models.pretrained.llama import (
    CONFIG,
    assert_same_files,
    llama,
    make_tokenizer,
    read,
    tensors_of,
    write,
)
from tests.paths import ROOT
from tests.runs.small_runs import run_here

# As into a bucket, where each process puts whole files.
IN_TURN = """
import sys
from manualpar.models.pretrained import export
from manualpar.models.pretrained import export as target
from manualpar.commands.import_export import export_main

class Alone(target.DiskTarget):
    folder = property(lambda self: None, lambda self, value: None)

export.open_target = Alone
sys.exit(export_main(sys.argv))
"""
TWO = [
    "-m",
    "manualpar.launch",
    "--processes=2",
    "--devices-per-process=4",
    "--",
    sys.executable,
]


def run(*arguments, code=0):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def bytes_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
@pytest.mark.long
def test_a_model_comes_and_goes_with_two_processes_and_is_trained_without_its_files(tmp_path):
    theirs, work, given = tmp_path / "theirs", tmp_path / "run", tmp_path / "text.txt"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    make_tokenizer(theirs / "tokenizer.json", 20)
    params = jax.jit(llama(theirs).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))["params"]
    tensors = {name: x.astype(jnp.bfloat16) for name, x in tensors_of(params).items()}
    write(theirs, tensors)
    given.write_text("w2 w3 w4 w5\n" * 3000)
    fields = {
        "data.path": given,
        "data.sequence_length": 16,
        "model.scan_layers": True,
        "sample.num_tokens": 0,
        "optimizer.warmup_steps": 0,
        "training.num_steps": 2,
        "training.eval_every_steps": 0,
        "checkpoint.every_steps": 2,
        "parallel.min_weight_size": 16,
    }
    flags = ["--config=configs/fsdp_lm.py", f"--workdir={work}"]
    flags += [f"--config.{name}={value}" for name, value in fields.items()]
    imports = ["-m", "experiments.import_hf", theirs, *flags]
    with lock_workdir(work, report=print):
        assert f"{work} is in use by another run: process" in run(*imports, code=2)
    assert [path.name for path in work.iterdir()] == [".lock"]
    said = run(*TWO, *imports)
    # Each of two processes reads half of everything but the small parameters that both have.
    assert "read 6.67 KiB of 30 tensors" in said
    assert "holds a run, expected a new folder" in run(*imports, code=2)
    exports = ["-m", "experiments.export_hf", f"--workdir={work}"]
    run(*TWO, *exports, f"--to={tmp_path / 'same'}", "--max-shard-bytes=4000")
    assert_same_files(read(tmp_path / "same"), tensors)
    assert (tmp_path / "same" / "tokenizer.json").exists()
    run(*exports, f"--to={tmp_path / 'one'}", "--max-shard-bytes=4000", "--devices=8")
    run(*TWO, "-c", IN_TURN, *exports[2:], f"--to={tmp_path / 'turn'}", "--max-shard-bytes=4000")
    assert (
        len(bytes_of(tmp_path / "one")) == 8
    )  # Also generation_config.json, which names the ends.
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "same") == bytes_of(tmp_path / "turn")
    shutil.rmtree(theirs)
    model = f"--config.model.from_hf={work / 'model'}"
    assert "going on from the checkpoint of step 0" in run("-m", "experiments.fsdp", *flags, model)
    said = run(*exports, f"--to={tmp_path / 'trained'}", "--dtype=float32", "--devices=1")
    assert "wrote step 2" in said
    trained = read(tmp_path / "trained")
    assert trained.keys() == tensors.keys()
    assert any((trained[name] != x).any() for name, x in tensors.items())
    assert "is not empty" in run(*exports, f"--to={tmp_path / 'trained'}", code=2)
    none = ["-m", "experiments.export_hf", f"--workdir={tmp_path}", "--to=x"]
    assert "holds no checkpoint, expected the folder of a run" in run(*none, code=2)


@pytest.mark.slow
def test_a_model_takes_the_tokenizer_of_its_token_files_along(
    tmp_path,
    devices8,
    limit_files,
    capsys,
):
    del devices8
    tokenizer, tokens = tmp_path / "t.json", tmp_path / "tokens"
    make_tokenizer(tokenizer, 20)
    (tmp_path / "text.txt").write_text("w2 w3 w4 w5\n" * 3000)
    write_token_files(str(tmp_path / "text.txt"), str(tokens), tokenizer=str(tokenizer))
    fields = {
        "data.source": "tokens",
        "data.path": tokens,
        "data.sequence_length": 16,
        "data.batch_size": 8,
        "model.hidden_size": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.mlp_size": 16,
        "sample.num_tokens": 0,
        "optimizer.warmup_steps": 0,
        "training.num_steps": 1,
        "training.eval_every_steps": 0,
        "checkpoint.every_steps": 1,
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    assert run_here(tmp_path / "run", *flags, config="fsdp_lm.py") == 0
    export = ["", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]
    limit_files(4000)
    assert export_main(export) == 6
    error = capsys.readouterr().err
    assert f"error: export_hf: {tmp_path / 'out'} cannot be written: File too large;" in error
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".*out*"))
    limit_files(2**30)
    assert export_main(export) == 0
    # It puts BOS before texts, as the training did; the rest is the same.
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert written.pop("post_processor")["type"] == "TemplateProcessing"
    assert written | {"post_processor": None} == json.loads(tokenizer.read_text())


def test_a_run_of_no_language_model_is_refused(tmp_path, monkeypatch, capsys):
    extra = {"config": fsdp.get_config().to_dict()}
    monkeypatch.setattr("manualpar.training.load_run.read_extra", lambda path: extra)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert export_main(["", f"--workdir={tmp_path}", f"--to={tmp_path / 'out'}"]) == 2
    assert "a run of config.model.name='classifier', expected 'tran" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_of_peft_come_with_a_model_and_leave_without_it(tmp_path):
    theirs, adapters, work = tmp_path / "theirs", tmp_path / "adapters", tmp_path / "run"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(theirs / "tokenizer.json", 20)
    params = jax.jit(llama(theirs).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))["params"]
    write(theirs, tensors_of(params))
    adapters.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_rslora": True}
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.lm_head.lora_{}.weight"
    rows, features = tensors_of(params)["lm_head.weight"].shape
    given = {
        name.format("A"): np.full((2, features), 0.5, np.float32),
        name.format("B"): np.outer(np.arange(rows), [1, 1]).astype(np.float32),
    }
    save_file(given, adapters / "adapter_model.safetensors")
    text = tmp_path / "text.txt"
    text.write_text("w2 w3 w4 w5\n" * 3000)
    fields = {"data.path": text, "data.sequence_length": 16, "sample.num_tokens": 0}
    flags = [f"--{name}={value}" for name, value in fields.items()]
    command = ["-m", "manualpar"]
    taken = [*command, "import", theirs, f"--workdir={work}", f"--model.adapter={adapters}"]
    assert f"--model.adapter={adapters}" in run(*taken, *flags)
    back = tmp_path / "back"
    assert "wrote the adapters of step 0" in run(
        *command, "export", f"--workdir={work}", f"--output={back}", "--adapter", "--devices=1"
    )
    found = load_file(back / "adapter_model.safetensors")
    assert found.keys() == given.keys()
    for key, x in given.items():
        np.testing.assert_array_equal(found[key], x)
    written = json.loads((back / "adapter_config.json").read_text())
    assert {key: written[key] for key in config} == config

    def answer(*flags):
        lines = run(*asked, *flags).splitlines()
        return next(line for line in lines if line.startswith("w2 w3"))

    asked = [*command, "generate", "--prompt=w2 w3", "--max-tokens=6", "--devices=1"]
    adapted = answer(f"--hf={theirs}", f"--adapter={back}")
    assert answer(f"--workdir={work}") == adapted != answer(f"--hf={theirs}")
    said = run(*asked, f"--workdir={work}", f"--adapter={back}", code=2)
    assert f"--adapter={back} without --hf, expected the base model in --hf" in said
