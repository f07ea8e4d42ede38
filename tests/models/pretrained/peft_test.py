"""Adapters go to the library peft and come from it, with the same logits."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from manualpar import fsdp, lora, make_mesh, quantized
from manualpar.models import Experts, Split, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.pretrained import (
    export_peft,
    load_hf,
    load_peft,
    lora_of_peft,
    read_architecture,
)
from manualpar.models.pretrained.peft_files import read_peft_config
from manualpar.models.pretrained.peft_modules import (
    find_family,
    find_places,
    fused_modules,
    join_fused,
    may_have_place,
    split_fused,
)
from tests.models.pretrained.transformers_models import MODELS, make_batch, saved

BATCH = make_batch()
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TABLES = ["embed_tokens", "lm_head"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
SOME = {
    "rank_pattern": {"layers.1.self_attn.q_proj": 4, "v_proj": 1},
    "layers_to_transform": [1, 2],
}
FAMILIES: dict[str, Any] = {
    "llama, rank-stabilized": ("Llama", {}, LAYERS + TABLES, {"use_rslora": True}),
    "qwen3, some layers": ("Qwen3", {"head_dim": 8}, LAYERS, SOME),
    "qwen2, other factors": ("Qwen2", {}, LAYERS, {"alpha_pattern": {"2.self_attn.q_proj": 7}}),
    "deepseek_v3, latents": (
        *MODELS["deepseek_v3"],
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        {"rank_pattern": {"layers.1.self_attn.kv_b_proj": 4}},
    ),
    "phi3, fused": (
        "Phi3",
        {"num_key_value_heads": 2},
        ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        {"alpha_pattern": {"1.self_attn.qkv_proj": 7}, "use_rslora": True},
    ),
    "gpt_neox, fused": (*MODELS["gpt_neox"], ["query_key_value", "dense_4h_to_h"], {}),
    "gpt2, fused": (*MODELS["gpt2"], ["c_attn", "c_fc"], {"fan_in_fan_out": True}),
    "gemma2, tied": ("Gemma2", GEMMA, LAYERS, {}),
    "mixtral, experts": (
        "Mixtral",
        {"num_local_experts": 4, "num_hidden_layers": 2},
        ["q_proj"],
        {"target_parameters": EXPERTS, "rank_pattern": {"experts.gate_up_proj": 2}},
    ),
    "qwen2_moe, half of the experts": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "num_hidden_layers": 2,
        },
        ["q_proj", "shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate"],
        {"target_parameters": EXPERTS[:1], "use_rslora": True},
    ),
}


# Warnings of peft itself: it also says that a pattern for a parameter is ignored, and applies it.
of_peft = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore:The following rank_pattern"
)


def _program(model: Any, mesh: dict[str, int]) -> Any:
    options: Any = {"mesh": make_mesh(mesh), "batch": BATCH, "min_weight_size": 0, "pad": True}
    return fsdp(model, optax.sgd(1.0), language_model_loss, **options)


@functools.cache
def _of_peft(name: str, folder: Path) -> tuple[Any, Path, np.ndarray]:
    """A model of transformers, adapters that peft has written, and the logits of both."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    family, fields, targets, options = FAMILIES[name]
    base = saved(family, fields)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, **options)
    model = peft.get_peft_model(copy.deepcopy(base.model), config)
    torch.manual_seed(1)
    for path, x in model.named_parameters():
        if "lora_" in path:
            x.data = torch.randn_like(x) / 4
    model.save_pretrained(folder / family)
    logits = model(torch.tensor(BATCH.inputs)).logits.detach().numpy()
    return base, folder / family, logits


@pytest.mark.slow
@of_peft
@pytest.mark.parametrize("name", list(FAMILIES))
def test_adapters_of_peft_are_read_and_written(name, tmp_path_factory):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters")
    base, adapters, logits = _of_peft(name, folder)
    assert np.abs(logits - base.logits).max() > 0.1
    fields = read_architecture(base.directory).fields
    model = lora_of_peft(Transformer(**fields, split=Split("model")), adapters)
    program = _program(model, {"data": 4, "model": 2})
    begun = load_hf(program, base.directory, jax.random.key(0), missing="init")
    state = load_peft(program, begun, adapters)
    ours = lora(Transformer(**fields), dict(model.targets), alpha=5)
    ours = ours if not model.rank_stabilized else lora_of_peft(ours.model, adapters)
    found = ours.apply(program.whole(state), BATCH.inputs)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    export_peft(program, state, folder / "back", base=str(base.directory))
    back = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), folder / "back")
    again = back(torch.tensor(BATCH.inputs)).logits.detach().numpy()
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-4)
    # And what was written is what had been read, on another mesh.
    other = _program(ours, {"data": 8})
    loaded = load_peft(
        other, load_hf(other, base.directory, jax.random.key(0), missing="init"), folder / "back"
    )
    for x, y in zip(
        jax.tree.leaves(program.whole(state)), jax.tree.leaves(other.whole(loaded)), strict=True
    ):
        np.testing.assert_array_equal(x, y)

    # Damaged files, and those of another model.
    tensors = load_file(adapters / "adapter_model.safetensors")
    first = FAMILIES[name][2][0]
    key = next(key for key in tensors if ".1." in key and f"{first}.lora_A" in key)
    for change, words in (
        ({key: tensors[key][:, :5]}, rf"{first}.*lora_A.weight has the shape \[\d, 5\]"),
        (
            {key: tensors[key][:1]},
            r"lora_(A.weight has the shape \[1, 16\]|B.* shape .*, 1\])",
        ),
        ({"x.lora_magnitude_vector": np.ones((1, 1), np.float32)}, "magnitude_vector is left over"),
        ({"y": np.ones((3, 3, 3), np.float32)}, "has y of float32 with 3 dims, expected a matrix"),
        ({key: tensors[key][0]}, "lora_A.weight of float32 with 1 dims, expected matrices"),
    ):
        damaged = folder / "damaged"
        damaged.mkdir(exist_ok=True)
        (damaged / "adapter_config.json").write_bytes(
            (adapters / "adapter_config.json").read_bytes()
        )
        save_file({**tensors, **change}, damaged / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_peft(program, begun, damaged)
    if name.startswith("llama"):
        copies = [name for name in tensors if "base_layer" in name]
        assert len(copies) == 2
        changed = {**tensors, copies[0]: tensors[copies[0]] + 1}
        save_file(changed, damaged / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=r"base_layer.weight is another (head|embedding) than"):
            load_peft(program, begun, damaged)


@pytest.mark.slow
@of_peft
def test_an_nf4_base_has_the_same_adapters(tmp_path):
    base, adapters, _ = _of_peft("gemma2, tied", tmp_path)
    stored = quantized(
        Transformer(**read_architecture(base.directory).fields), {"*kernel": 8}, code="nf4"
    )
    program = _program(lora_of_peft(stored, adapters), {"data": 8})
    state = load_hf(program, base.directory, jax.random.key(0), missing="init")
    state = load_peft(program, state, adapters)
    export_peft(program, state, tmp_path / "back")
    given, back = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapters, tmp_path / "back")
    )
    assert given.keys() == back.keys()
    for name, x in given.items():
        np.testing.assert_array_equal(back[name], x)


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": "yes"}, "use_dora is 'yes', expected true or false"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', expected names of modules"),
        *(
            ({"lora_dropout": rate}, "lora_dropout is .*, expected a number from 0 to below 1")
            for rate in (1, -0.1, "0", True)
        ),
        *(
            ({key: value}, f"{key} is .*, expected nothing, because lora has no such option")
            for key, value in (
                *(("lora_bias", True), ("use_qalora", True), ("alora_invocation_tokens", [1])),
                *(("layer_replication", [[0, 1]]), ("loftq_config", {"loftq_bits": 4})),
            )
        ),
        ({"bias": "all"}, "bias is 'all', expected nothing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected nothing"),
        ({"target_parameters": ["mlp.gate.bias"]}, "target_parameters is .*, expected names"),
        *(
            ({"trainable_token_indices": x}, r"trainable_token_indices is .*, expected tokens, or")
            for x in ([-1], [1, 1], [True], {"a": 1}, "1")
        ),
        ({"\x1b[2J": 1}, r"\\x1b\[2J is 1"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern is .*, expected names of modules"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected 'LORA'"),
        *(
            ({"lora_alpha": alpha}, "lora_alpha is .*, expected a number above 0 that float32")
            for alpha in (0, -1, 10**400, 1e308, 1e-323, float("inf"), True, "4", [4])
        ),
        ({"alpha_pattern": {"q": 10**400}}, "alpha_pattern is .*, expected a number above 0 that"),
        ({"alpha_pattern": {"q": 1e-320}}, "alpha_pattern is .*, expected a number above 0 that"),
        ({"alpha_pattern": ["q"]}, "alpha_pattern is .*, expected a number above 0 that"),
        ({"base_model_name_or_path": "\ud800"}, "has base_model_name_or_path=.*, expected text"),
        ({"r": True}, "r is True, expected a rank"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', expected true or false"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_changes_the_function_otherwise_is_refused_by_its_name(tmp_path, change, words):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(CONFIG | change).replace("Infinity", "1e400"))
    with pytest.raises(ValueError, match=words):
        read_peft_config(path)


@pytest.mark.parametrize("x", [np.nan, np.inf, 1e300], ids=str)
def test_an_adapter_that_is_no_number_in_float32_is_refused(tmp_path, x):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): np.ones((2, 16)), name.format("B"): np.full((16, 2), x)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    sizes: Any = {"vocab_size": 8, "num_layers": 1, "hidden_size": 16, "num_heads": 4}
    with pytest.raises(ValueError, match=r"safetensors has .*lora_B\.weight with NaN or infinit"):
        lora_of_peft(Transformer(**sizes, mlp_size=24), tmp_path)


def test_a_factor_is_that_of_the_module(tmp_path):
    path = tmp_path / "adapter_config.json"
    with pytest.raises(ValueError, match=r"has no adapter_config\.json, expected a directory of"):
        read_peft_config(path)
    path.write_text(json.dumps({**CONFIG, "alpha_pattern": {"^a.q$": 6, "layers.1.q": 8}}))
    config = read_peft_config(path)
    names = ("a.q", "b.a.q", "layers.1.q", "x.layers.1.q", "layers.11.q")
    assert [config.scale(name, 2) for name in names] == [3, 2, 4, 4, 2]
    path.write_text(json.dumps({**CONFIG, "use_rslora": True}))
    assert read_peft_config(path).scale("a", 4) == 2


def test_the_product_of_a_fused_adapter_is_those_of_its_parts():
    sizes: Any = {"vocab_size": 60, "num_layers": 2, "hidden_size": 16, "num_heads": 4}
    model = Transformer(**sizes, num_kv_heads=2, mlp_size=24)
    variables = jax.eval_shape(model.init, jax.random.key(0), BATCH.inputs)
    params = flatten_dict(nn.meta.unbox(variables["params"]), sep="/")
    shapes = {path: x.shape for path, x in params.items()}
    paths = list(filter(may_have_place, shapes))
    modules = fused_modules(find_places(model, shapes, paths, family="phi3"))
    assert [len(parts) for parts in modules.values()].count(3) == 2
    name = "model.layers.1.self_attn.qkv_proj"
    modules[name].sort(key=lambda part: part.rows)
    assert [part.module.rpartition(".")[2] for part in modules[name]] == ["query", "key", "value"]
    assert find_family(model, shapes, [f"base_model.model.{name}.lora_A.weight"]) == "phi3"
    assert find_family(model, shapes, ["base_model.model.x.lora_A.weight"]) == "llama"

    rng = np.random.default_rng(0)
    for ranks, shared in (((2, 3, 1), False), ((2, 2, 2), True), ((2, 0, 2), False)):
        tensors: dict[str, Any] = {}
        products = []
        down = rng.normal(size=(2, 16))
        for part, rank in zip(modules[name], ranks, strict=True):
            own = down if shared else rng.normal(size=(rank, 16))
            up = rng.normal(size=(len(part.rows), rank))
            products.append(up @ own * 4 / max(rank, 1))
            if rank:
                tensors |= zip(part.names, (own, up), strict=True)
        before = dict(tensors)
        found = join_fused(tensors, modules, lambda rank: 4 / rank)
        assert found == {name: 2 if shared else sum(ranks)}
        down, up = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        np.testing.assert_allclose(up @ down * 4 / len(down), np.concatenate(products), rtol=1e-12)
        assert not split_fused(tensors, modules, lambda module, rank: 4 / rank)
        for part, rank in zip(modules[name], ranks, strict=True):
            for key in part.names:
                x = tensors.pop(key)
                assert x.size if rank else not x.size
                if rank:
                    np.testing.assert_allclose(x, before[key], rtol=1e-12)
        assert not tensors
    wrong = {f"base_model.model.{name}.lora_{x}.weight": np.ones((5, 5)) for x in "AB"}
    (said,) = split_fused(wrong, modules, lambda module, rank: 1.0)
    assert said.endswith("qkv_proj.lora_B.weight has the shape [5, 5], expected [32, 5]")


@pytest.mark.slow
@of_peft
def test_adapters_of_the_parts_of_a_weight_become_one_and_are_split_again(tmp_path, devices8):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    everything = {"*/experts/gate": 2, "*/experts/up": 3, "*/experts/down": 1}
    shared = {"*/experts/shared_up": 2, "*/mlp/down": 3, "*/attention/query": 2}
    for name, targets in (
        ("mixtral", everything),
        ("mixtral", {"*/experts/up": 3}),
        ("dots1", {**shared, "*/experts/down": 2}),
        ("phi3", {"*/attention/query": 2, "*/attention/value": 3, "*/mlp/*": 1}),
        ("gpt_neox", {"*/attention/*": 2, "*/mlp/down": 3}),
        ("gpt2", {"*/attention/key": 2, "*/attention/value": 1}),
    ):
        base = saved(*MODELS[name])
        model = Transformer(**read_architecture(base.directory).fields)
        adapted = lora(model, targets, alpha=4)
        program = _program(adapted, {"data": 8})
        state = load_hf(program, base.directory, jax.random.key(0), missing="init")
        state = program.init_from(jax.tree.map_with_path(_trained, program.whole(state)))
        folder = tmp_path / f"{name} {len(targets)}"
        export_peft(program, state, folder)
        logits = adapted.apply(program.whole(state), BATCH.inputs)
        assert np.abs(logits - base.logits).max() > 0.1
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), folder)
        found = theirs(torch.tensor(BATCH.inputs)).logits.detach().numpy()
        np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
        read = dict(lora_of_peft(model, folder).targets)
        assert set(read.values()) == set(targets.values())
        begun = load_hf(program, base.directory, jax.random.key(1), missing="init")
        again = load_peft(program, begun, folder)
        for x, y in zip(*map(jax.tree.leaves, (state.params, again.params)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def _trained(path: Any, x: jax.Array) -> jax.Array:
    is_up = jax.tree_util.keystr(path).endswith("lora_b']")
    return jax.random.normal(jax.random.key(3), x.shape) / 4 if is_up else x


@pytest.mark.slow
def test_adapters_that_peft_has_no_tensors_for_are_refused(tmp_path, devices8):
    sizes: Any = {"vocab_size": 60, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    experts = Experts(4, capacity_factor=0.0)
    for model, target, words in (
        (Transformer(**sizes, experts=experts), "*/experts/router", "routers are no layers"),
        (Transformer(**sizes, tied_head=True), "embedding", "the embedding is also the head"),
    ):
        program = _program(lora(model, {target: 2}, alpha=4), {"data": 8})
        with pytest.raises(ValueError, match=words):
            export_peft(program, program.init(jax.random.key(0)), tmp_path / "x")
