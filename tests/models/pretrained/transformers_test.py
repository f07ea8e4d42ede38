"""Models that transformers makes and saves are loaded here, and written so that it loads them."""

import json

import jax
import numpy as np
import pytest

from manualpar import make_mesh
from manualpar.models import Split, Transformer
from manualpar.models.flat_fields import nest_fields
from manualpar.models.generation import Generator
from manualpar.models.pretrained import export_hf, load_hf, read_architecture
from manualpar.models.pretrained.families import FAMILIES
from tests.models.pretrained.llama import assert_same_files, program_of, read
from tests.models.pretrained.transformers_models import MODELS, VOCABULARY, make_batch, saved

pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
pytestmark = pytest.mark.slow


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


def test_every_family_is_tried():
    types = {read_config(saved(*model).directory)["model_type"] for model in MODELS.values()}
    assert types == FAMILIES.keys()


# The code of these families runs for others too.
ALIKE = ("llama2", "mistral", "qwen2", "gemma", "ministral", "olmo2", "glm", "cohere")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in MODELS],
)
def test_logits_files_and_generated_tokens_are_theirs(name, tmp_path):
    import torch
    import transformers

    directory = saved(*MODELS[name]).directory
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    fields = read_architecture(directory).flat_fields
    experts = {"expert_axis": "expert"} if fields.get("num_experts") else {}
    axes = {"data": 2, "expert": 2, "model": 2} if experts else {"data": 4, "model": 2}
    model = Transformer(
        **nest_fields({**fields, **experts}), vocab_multiple=2, split=Split("model")
    )
    mesh, batch_axes = make_mesh(axes), tuple(axis for axis in axes if axis != "model")
    program = program_of(model, mesh, axis_name=batch_axes, pad=True)
    state = load_hf(program, directory)
    tokens = make_batch().inputs[:2]
    logits = jax.jit(model.apply)(program.whole(state), tokens)[..., :VOCABULARY]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)

    like = export_hf(program, state, tmp_path / "like", like=directory)
    # Some families describe the same model: Ministral's is also one of Mistral.
    family = read_config(directory)["model_type"]
    alone = export_hf(program, state, tmp_path / "alone", family=family, max_shard_bytes=8000)
    assert read_config(alone)["model_type"] == read_config(directory)["model_type"]
    original, prompt = read(directory), torch.from_numpy(tokens).long()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)  # Also where the prompt has the padding.
    texts = theirs.generate(prompt, **options)
    generator = Generator(program, stop_tokens=())
    answers = generator.generate(state, tokens.tolist(), max_tokens=options["max_new_tokens"])
    assert [answer.tokens for answer in answers] == texts[:, prompt.shape[1] :].tolist()
    for ours in (like, alone):
        assert_same_files(read(ours), original)
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            ours, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(again.generate(prompt, **options), texts)
