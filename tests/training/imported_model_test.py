"""A config that names the directory of a model trains that model, from its parameters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from manualpar.commands.command_line import parse_command_line
from manualpar.errors import UsageError
from manualpar.models import Transformer
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from manualpar.training.imported_model import fill_from_hf, initial_state
from manualpar.training.load_run import load_directory
from tests.models.pretrained.llama import (
    CONFIG,
    CONFIG_FILE,
    llama,
    make_tokenizer,
    read,
    tensors_of,
    write,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(directory / "tokenizer.json", 20)
    params = jax.jit(llama(directory).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))
    write(directory, tensors_of(params["params"]))
    (directory / "text.txt").write_text("w2 w3 w4 w5\n" * 3000)
    return directory


def config_of(directory):
    config = load_config(CONFIG_FILE)
    with config.unlocked():
        config.model.from_hf, config.data.path = str(directory), str(directory / "text.txt")
        config.data.sequence_length, config.model.scan_layers = 16, True
        config.sample.num_tokens = 0
    return config


def test_the_model_is_that_of_the_directory_and_so_are_its_parameters(directory):
    experiment = prepare(config_of(directory))
    model = experiment.task.model
    assert isinstance(model, Transformer)
    assert (model.vocab_size, model.num_layers, model.rotary.base) == (30, 3, 5000.0)
    assert experiment.config.data.tokenizer == str(directory)
    assert experiment.config.model.hidden_size == 16
    said = []
    state = initial_state(experiment.config, experiment.program, report=said.append)
    assert said[0].startswith("read 26.7 KiB of 30 tensors from")
    head = tensors_of(experiment.program.whole(state)["params"])["lm_head.weight"]
    np.testing.assert_array_equal(head, read(directory)["lm_head.weight"])
    broken = experiment.config.copy_and_resolve_references().unlock()
    broken.model.from_hf = str(directory / "none")
    with pytest.raises(UsageError, match=r"config\.model\.from_hf: .*none is no directory"):
        initial_state(broken, experiment.program, report=said.append)


@pytest.mark.slow
def test_adapters_bring_their_tokens_and_their_tokenizer(directory, tmp_path, devices8):
    rng = np.random.default_rng(0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {f"base_model.model.{name}": rng.normal(size=(40, 16)) for name in names}
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors |= {layer.format("A"): np.ones((2, 16)), layer.format("B"): np.ones((16, 2))}
    arrays = {name: x.astype(np.float32) for name, x in tensors.items()}
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.1}
    given["modules_to_save"] = ["lm_head"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(given))
    make_tokenizer(tmp_path / "tokenizer.json", 40)
    config = config_of(directory)
    with config.unlocked():
        config.model.adapter = str(tmp_path)
    model = fill_from_hf(config).model
    assert (model.vocab_size, model.lora_dropout, model.lora_save) == (40, 0.1, ("head",))
    loaded = load_directory(directory, adapter=tmp_path)
    assert loaded.tokenizer.vocab_size == 40
    params = loaded.program.whole(loaded.state)["params"]
    np.testing.assert_array_equal(params["embedding"], arrays[f"base_model.model.{names[0]}"])
    np.testing.assert_array_equal(params["head"].T, arrays[f"base_model.model.{names[1]}"])


def test_what_contradicts_the_directory_is_refused(directory, tmp_path):
    config = config_of(directory)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 5}))
    with pytest.raises(ValueError, match=r"num_layers is 3 and .*from_hf.* says 5"):
        fill_from_hf(config_of(tmp_path), given=["model.dtype", "model.num_layers"])
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, and config\.data\.tokenizer"):
        fill_from_hf(config_of(tmp_path))
    make_tokenizer(tmp_path / "tokenizer.json", 40)
    with config.unlocked():
        config.data.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer has 40 tokens and .*vocab_size is 30"):
        prepare(config)
    # Or the model gets them, with the mean of the other rows.
    with config.unlocked():
        config.model.add_tokens = True
    experiment, said = prepare(config), []
    assert experiment.task.model.vocab_size == experiment.config.model.vocab_size == 40
    state = initial_state(experiment.config, experiment.program, report=said.append)
    assert said[0].endswith("; 10 new tokens begin as the mean")
    params, tensors = experiment.program.whole(state)["params"], read(directory)
    for own, name in ((params["embedding"], "model.embed_tokens"), (params["head"].T, "lm_head")):
        np.testing.assert_array_equal(own[:30], tensors[f"{name}.weight"])
        means = tensors[f"{name}.weight"].mean(0)
        np.testing.assert_allclose(own[30:], np.tile(means, (10, 1)), atol=1e-6)
    arguments = ["", f"--config.model.from_hf={directory}", "--config.model.num_layers=2"]
    with pytest.raises(UsageError, match=r"num_layers is 2 and .* says 3; leave one of them out"):
        parse_command_line(arguments, default_config=CONFIG_FILE)
    line = parse_command_line(arguments[:2], default_config=CONFIG_FILE)
    assert line.config.model.num_kv_heads == 2
    assert fill_from_hf(load_config(CONFIG_FILE)).model.num_layers == 3
