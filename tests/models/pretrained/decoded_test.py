"""Codes of MXFP4 and of FP8 become what transformers' own functions decode, in every shard."""

import json
import shutil

import jax
import numpy as np
import pytest

from manualpar import make_mesh
from manualpar.models import Split, Transformer
from manualpar.models.flat_fields import nest_fields
from manualpar.models.pretrained import export_hf, load_hf, read_architecture
from tests.models.pretrained.llama import program_of
from tests.models.pretrained.transformers_models import MODELS, saved

pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GPT_OSS = MODELS["gpt_oss"][1] | {"hidden_size": 64, "intermediate_size": 96}
DEEPSEEK = MODELS["deepseek_v3"][1] | {"hidden_size": 20}
MESH = {"data": 2, "expert": 2, "model": 2}


def read(directory):
    from safetensors.torch import load_file

    return {k: x for path in directory.glob("*.safetensors") for k, x in load_file(path).items()}


def write(directory, config, tensors):
    from safetensors.torch import save_file

    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def state_of(directory):
    fields = read_architecture(directory).flat_fields | {"expert_axis": "expert"}
    model = Transformer(**nest_fields(fields), split=Split("model"))
    program = program_of(model, make_mesh(MESH), axis_name=("data", "expert"), pad=True)
    return program, load_hf(program, directory)


def assert_decoded(coded, plain, tmp_path):
    """Asserts that both directories have the same parameters, and that an export has no codes."""
    (program, state), (_, expected) = state_of(coded), state_of(plain)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    exported = export_hf(program, state, tmp_path / "exported", like=coded)
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    found, tensors = read(exported), read(plain)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype, name
        assert (found[name] == x).all(), name


def test_mxfp4_is_decoded_as_transformers_does(tmp_path, devices8):
    del devices8
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = saved("GptOss", GPT_OSS).directory
    coded, plain = read(source), read(source)
    torch.manual_seed(1)
    for name, x in read(source).items():
        if name.endswith("_proj"):
            experts, rows, columns = x.shape
            shape = experts, columns, rows // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            scales = torch.randint(118, 130, shape, dtype=torch.uint8)
            del coded[name]
            coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    config = json.loads((source / "config.json").read_text())
    write(tmp_path / "plain", config, plain)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write(tmp_path / "coded", config | {"quantization_config": quantization}, coded)
    assert_decoded(tmp_path / "coded", tmp_path / "plain", tmp_path)
    shutil.rmtree(tmp_path / "exported")
    del coded[next(name for name in coded if name.endswith("_scales"))]
    shutil.rmtree(tmp_path / "coded")
    write(tmp_path / "coded", config | {"quantization_config": quantization}, coded)
    with pytest.raises(ValueError, match=r"_blocks.* has the scales .*_scales: None"):
        state_of(tmp_path / "coded")


def test_fp8_is_decoded_as_transformers_does(tmp_path, devices8):
    del devices8
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = saved("DeepseekV3", DEEPSEEK).directory
    coded, plain = read(source), read(source)
    decode = Fp8Dequantize(None)._dequantize_one
    torch.manual_seed(1)
    for name, x in read(source).items():
        if name.endswith("_proj.weight") and not any(size % 4 for size in x.shape):
            factors = torch.rand(x.shape[0] // 4, x.shape[1] // 4) * 0.1
            codes = x.to(torch.float8_e4m3fn)
            coded |= {name: codes, f"{name}_scale_inv": factors}
            plain[name] = decode(codes, factors, torch.bfloat16)
    assert len(coded) > len(plain) + 20
    config = json.loads((source / "config.json").read_text())
    write(tmp_path / "plain", config, plain)
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 4], "fmt": "e4m3"}
    # Kimi K2 has another name, and a layer that predicts the token after the next.
    more = {"quantization_config": quantization, "num_nextn_predict_layers": 1}
    coded["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    write(tmp_path / "coded", config | more | {"model_type": "kimi_k2"}, coded)
    with pytest.warns(UserWarning, match="predict more than the next token .*eh_proj"):
        state_of(tmp_path / "coded")
    assert_decoded(tmp_path / "coded", tmp_path / "plain", tmp_path)
    config["quantization_config"] = quantization | {"weight_block_size": None}
    write(tmp_path / "other", config, coded)
    with pytest.raises(ValueError, match=r"weight_block_size is None, expected the rows"):
        state_of(tmp_path / "other")


@pytest.mark.parametrize("method", ["awq", None, ["gptq"]], ids=str)
def test_another_method_is_refused(method, tmp_path):
    source = saved(*MODELS["deepseek_v3"]).directory
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quant_method is .*, expected one of 'mxfp4', 'fp8'"):
        read_architecture(tmp_path)
