"""Adapters with magnitudes, whole modules and new tokens train as the library peft trains them."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from manualpar import Batch, fsdp, make_mesh, merge_lora, quantized
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.pretrained import (
    export_hf,
    export_peft,
    load_hf,
    load_peft,
    lora_of_peft,
    read_architecture,
)
from tests.models.pretrained.transformers_models import MODELS, make_batch, saved

BATCH = Batch(make_batch().inputs, make_batch().labels)
LAYERS = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
# A family, its fields, and the options of peft.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "Llama",
        {"num_hidden_layers": 2},
        {"target_modules": LAYERS, "modules_to_save": ["lm_head", "embed_tokens", "layernorm"]},
    ),
    "gpt2": (
        MODELS["gpt2"][0],
        MODELS["gpt2"][1] | {"num_hidden_layers": 2},
        {"target_modules": ["c_fc"], "modules_to_save": ["ln_f"], "fan_in_fan_out": True},
    ),
}
MESHES = [{"data": 1}, {"data": 8}, {"data": 4, "model": 2}]
of_peft = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _random(model: Any) -> Any:
    """Gives the adapters of a model of peft values as if it had been trained."""
    import torch

    torch.manual_seed(1)
    for path, x in model.named_parameters():
        if "lora_A" in path or "lora_B" in path:
            x.data = torch.randn_like(x) / 4
        elif "magnitude" in path:
            x.data *= 1 + torch.rand_like(x)
    return model.eval()  # Without dropout.


def _steps_of_peft(model: Any, optimizer: Any, folder: Path) -> None:
    """Takes three steps, and saves the adapters before and after them."""
    import torch

    model.save_pretrained(folder / "begun")
    inputs, labels = (torch.tensor(x).long() for x in (BATCH.inputs, BATCH.labels))
    tx = optimizer([x for x in model.parameters() if x.requires_grad])
    for _ in range(3):
        tx.zero_grad()
        logits = model(inputs).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
        tx.step()
    model.save_pretrained(folder / "trained")


def _optimizers() -> dict[str, tuple[Any, Any]]:
    import torch

    return {
        "sgd": (optax.sgd(0.1), lambda params: torch.optim.SGD(params, 0.1)),
        "adamw": (
            optax.adamw(1e-2, weight_decay=0.1),
            lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1),
        ),
    }


def _program(model: Any, mesh: dict[str, int], tx: Any) -> Any:
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    options: Any = {"mesh": make_mesh(mesh, devices), "batch": BATCH, "min_weight_size": 64}
    return fsdp(model, tx, language_model_loss, pad=True, **options)


def _assert_same(one: Path, other: Path) -> None:
    files = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    expected, found = files
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.mark.slow
@of_peft
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", list(CASES))
def test_magnitudes_and_whole_modules_train_as_in_peft(name, optimizer, mesh, tmp_path, devices8):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    family, fields, options = CASES[name]
    base = saved(family, fields)
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, **options)
    theirs = _random(peft.get_peft_model(copy.deepcopy(base.model), config))
    tx, of_torch = _optimizers()[optimizer]
    _steps_of_peft(theirs, of_torch, tmp_path)

    split = Split("model" if "model" in mesh else None)
    model = lora_of_peft(
        Transformer(**read_architecture(base.directory).fields, split=split), tmp_path / "begun"
    )
    assert model.magnitudes
    assert model.save
    program = _program(model, mesh, tx)
    # The magnitudes of a new adapter are the lengths of the columns that were loaded.
    state = load_hf(program, base.directory, jax.random.key(0), missing="init")
    params = program.whole(state)["params"]
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    if name == "gpt2":
        lengths = params["layers"]["mlp"]["up"]["lora_magnitude"]
        np.testing.assert_allclose(lengths, np.linalg.norm(kernel, axis=1), rtol=1e-5)
    state = load_peft(program, state, tmp_path / "begun")
    for _ in range(3):
        state, _ = program.train_step(state, BATCH)
    export_peft(program, state, tmp_path / "ours", base=str(base.directory))
    _assert_same(tmp_path / "trained", tmp_path / "ours")

    # What is written has the same logits in peft, and merged in transformers.
    inputs = torch.tensor(BATCH.inputs)
    expected = theirs.eval()(inputs).logits.detach().numpy()
    back = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / "ours")
    np.testing.assert_allclose(back(inputs).logits.detach(), expected, rtol=1e-3, atol=1e-3)
    plain = Transformer(**read_architecture(base.directory).fields)
    merged = _program(plain, {"data": 8}, tx)
    whole = merged.whole(merged.init_from(merge_lora(program, state)))
    np.testing.assert_allclose(
        jax.jit(plain.apply)(whole, BATCH.inputs), expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
@of_peft
@pytest.mark.parametrize("code", ["int8", "nf4"])
def test_magnitudes_on_a_quantized_base_train_as_in_peft_on_its_decoded_kernels(
    code, tmp_path, devices8
):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    family, fields, options = CASES["llama"]
    base = saved(family, fields)
    plain = Transformer(**read_architecture(base.directory).fields)
    stored = quantized(plain, {"*kernel": 8}, code=code)
    tx, of_torch = _optimizers()["adamw"]
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, **options)
    _random(peft.get_peft_model(copy.deepcopy(base.model), config)).save_pretrained(
        tmp_path / "any"
    )
    program = _program(lora_of_peft(stored, tmp_path / "any"), {"data": 4, "model": 2}, tx)
    begun = load_hf(program, base.directory, jax.random.key(0), missing="init")
    export_hf(program, begun, tmp_path / "decoded", like=base.directory)
    decoded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoded")
    theirs = _random(peft.get_peft_model(decoded.float(), config))
    _steps_of_peft(theirs, of_torch, tmp_path)
    state = load_peft(program, begun, tmp_path / "begun")
    for _ in range(3):
        state, _ = program.train_step(state, BATCH)
    export_peft(program, state, tmp_path / "ours", base=str(base.directory))
    _assert_same(tmp_path / "trained", tmp_path / "ours")


def _resized(model: Any, number: int) -> Any:
    model = copy.deepcopy(model)
    model.resize_token_embeddings(number)
    return model


NEW = 63
# Options of peft for a base with new tokens, and what is then trained and saved.
FORMS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "frozen": ("Llama", {}, ()),
    "whole": ("Llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, ("embedding", "head")),
    "rows": ("Llama", {"trainable_token_indices": [1, NEW - 1]}, ("embedding",)),
    "tied": (
        "Qwen2",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ("embedding",),
    ),
    "tied rows": ("Qwen2", {"trainable_token_indices": [1, NEW - 1]}, ("embedding",)),
}


@pytest.mark.slow
@of_peft
@pytest.mark.parametrize("name", list(FORMS))
def test_new_tokens_are_read_and_written(name, tmp_path, devices8):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    family, options, save = FORMS[name]
    tied = {"tie_word_embeddings": True} if family == "Qwen2" else {}
    base = saved(family, {"num_hidden_layers": 2, **tied})
    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"], **options)
    resized = _resized(base.model, NEW)
    theirs = _random(peft.get_peft_model(copy.deepcopy(resized), config))
    for path, x in theirs.named_parameters():
        if "token_adapter.trainable" in path or "modules_to_save" in path:
            x.data += torch.randn_like(x) / 4
    theirs.peft_config["default"].base_model_name_or_path = str(base.directory)
    theirs.save_pretrained(tmp_path / "theirs")
    inputs = torch.tensor(np.concatenate([BATCH.inputs, np.full_like(BATCH.inputs, NEW - 1)], 1))
    expected = theirs(inputs).logits.detach().numpy()

    fields = read_architecture(base.directory).fields
    given = Transformer(**fields, split=Split("model"), vocab_multiple=8)
    if "rows" in name:
        with pytest.warns(UserWarning, match="all rows of embedding are trained"):
            model = lora_of_peft(given, tmp_path / "theirs")
    else:
        model = lora_of_peft(given, tmp_path / "theirs")
    assert (model.model.vocab_size, model.save) == (NEW, save)
    program = _program(model, {"data": 4, "model": 2}, optax.sgd(0.1))
    with pytest.raises(ValueError, match=f"vocab_size is {NEW}, there 60"):
        load_hf(program, base.directory, missing="init")
    state = load_hf(program, base.directory, missing="init", add_tokens=True)
    params = program.whole(state)["params"]
    rows = resized.get_input_embeddings().weight.detach().numpy()
    # With more tokens than features transformers adds noise to the mean.
    np.testing.assert_array_equal(params["embedding"][:60], rows[:60])
    np.testing.assert_allclose(params["embedding"][60:NEW], rows[60:], atol=1e-3)
    np.testing.assert_allclose(params["embedding"][60], rows[:60].mean(0), atol=1e-6)
    assert not params["embedding"][NEW:].any()
    state = load_peft(program, state, tmp_path / "theirs")
    plain = Transformer(**{**fields, "vocab_size": NEW}, vocab_multiple=8)
    one = dataclasses.replace(model, model=plain)
    found = jax.jit(one.apply)(program.whole(state), inputs.numpy())
    np.testing.assert_allclose(found[..., :NEW], expected, rtol=1e-4, atol=1e-4)

    export_peft(program, state, tmp_path / "ours", base=str(base.directory))
    back = peft.PeftModel.from_pretrained(copy.deepcopy(resized), tmp_path / "ours")
    np.testing.assert_allclose(back(inputs).logits.detach(), expected, rtol=1e-4, atol=1e-4)
    export_hf(program, state, tmp_path / "merged", like=base.directory)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(merged(inputs).logits.detach(), expected, rtol=1e-4, atol=1e-4)
