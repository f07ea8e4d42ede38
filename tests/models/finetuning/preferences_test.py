"""Preference tuning against the formula of direct preference optimization on one device."""

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow
import pyarrow.parquet
import pytest

from manualpar import Batch, fsdp, lora, quantized
from manualpar.commands.command_line import parse_command_line
from manualpar.commands.train_command import run_command
from manualpar.data import load_dataset, load_tokenizer, preference_examples
from manualpar.data.chat import Chats
from manualpar.data.tokenizer import ByteTokenizer
from manualpar.models import Split, Transformer
from manualpar.models.finetuning.preferences import WithReference, first_call, preference_loss
from manualpar.models.generation import Generator
from manualpar.models.pretrained import export_hf
from manualpar.training.experiment import prepare
from manualpar.training.fitting import fit
from manualpar.training.imported_model import fill_from_hf
from manualpar.training.load_run import load_directory, load_run
from tests.data.chats import CHATML, write_chat_tokenizer
from tests.models.finetuning.adapted_models import OURS, by_path, is_adapter, on
from tests.models.generation.programs import make_program
from tests.one_device import slow_unless
from tests.paths import ROOT

BETA = 0.3
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 16, (8, 2, 9))
MASK = (RANDOM.random((8, 2, 8)) < 0.5).astype(np.float32)
MASK[..., -1] = 1
MASK[5] = 0  # A pair that only fills the batch.
BATCH = Batch(TOKENS[..., :-1], TOKENS[..., 1:], MASK)
PLAIN = Transformer(**OURS, num_layers=2)
TARGETS = {"*/attention/*": 2, "head": 2}
MESHES = {
    "data": ({"data": 8}, Split()),
    "data and model": ({"data": 2, "model": 4}, Split("model")),
    "sequences": ({"data": 4, "model": 2}, Split("model", True)),
}


def _answers(model: Any, params: Any) -> jax.Array:
    """The log-probabilities of answers, `[8, 2]`, of all logits on one device."""
    logits = model.apply({"params": params}, BATCH.inputs.reshape(16, 8))
    each = jax.nn.log_softmax(logits)
    each = jnp.take_along_axis(each, BATCH.labels.reshape(16, 8)[..., None], -1)
    return (each.reshape(8, 2, 8) * MASK).sum(-1)


def _on_one_device(policy: Any, model: Any, reference: jax.Array) -> jax.Array:
    """The loss of TRL's `DPOTrainer` with `loss_type="sigmoid"`, its formula written out."""
    logps = _answers(model, policy)
    chosen_logratios, rejected_logratios = (logps - reference).T
    losses = -jax.nn.log_sigmoid(BETA * (chosen_logratios - rejected_logratios))
    return losses[np.arange(8) != 5].mean()


def _params(model: Any, seed: int = 0) -> Any:
    def trained(path: Any, x: jax.Array) -> jax.Array:
        is_up = jax.tree_util.keystr(path).endswith("lora_b']")
        return jax.random.normal(jax.random.key(3), x.shape) / 4 if is_up else x

    variables = nn.meta.unbox(model.init(jax.random.key(seed), BATCH.inputs[:, 0]))
    return jax.tree.map_with_path(trained, variables["params"])


def _check(program: Any, params: Any, expected: Any) -> Any:
    """A step of SGD with the loss and gradients of one device; what has no gradient stays."""
    loss, grads = expected
    before = by_path(params)
    state, metrics = program.train_step(program.init_from(params), BATCH)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=1e-5)
    assert metrics["loss"][1] == 7
    after = by_path(program.whole(state)["params"])
    assert after.keys() == before.keys()
    for path, x in before.items():
        if path in grads:
            assert np.abs(grads[path]).max() > 1e-6, path
            np.testing.assert_allclose(after[path], x - grads[path], atol=3e-6, err_msg=path)
        else:
            np.testing.assert_array_equal(after[path], x, err_msg=path)
    return metrics


@pytest.mark.parametrize("name", [slow_unless((), name) for name in MESHES])
def test_a_whole_model_and_its_frozen_copy_are_sharded_beside_each_other(name):
    mesh, split = MESHES[name]
    policy, reference = _params(PLAIN, 0), _params(PLAIN, 1)
    program = on(fsdp, mesh)(
        WithReference(PLAIN.clone(split=split)),
        optax.sgd(1.0),
        preference_loss(BETA),
        batch=BATCH,
        trainable=("policy/*",),
        init_args=first_call,
    )
    loss, grads = jax.value_and_grad(_on_one_device)(policy, PLAIN, _answers(PLAIN, reference))
    grads = {f"policy/{path}": x for path, x in by_path(grads).items()}
    metrics = _check(program, {"policy": policy, "reference": reference}, (loss, grads))
    chosen, rejected = (_answers(PLAIN, policy) - _answers(PLAIN, reference)).T
    margins = BETA * np.delete(chosen - rejected, 5)
    np.testing.assert_allclose(metrics["margin"][0], margins.sum(), rtol=1e-4)
    assert metrics["accuracy"][0] == (margins > 0).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MESHES))
def test_the_reference_of_adapters_is_the_model_without_them(name):
    mesh, split = MESHES[name]
    one = lora(PLAIN, TARGETS, alpha=4)
    params = _params(one)
    program = on(fsdp, mesh)(
        lora(PLAIN.clone(split=split), TARGETS, alpha=4),
        optax.sgd(1.0),
        preference_loss(BETA),
        batch=BATCH,
        init_args=first_call,
    )
    expected = _answers(PLAIN, _params(PLAIN))  # Other parameters have the same initial bits.
    loss, grads = jax.value_and_grad(_on_one_device)(params, one, expected)
    _check(program, params, (loss, {p: x for p, x in by_path(grads).items() if is_adapter(p)}))


def test_the_reference_drops_no_activations():
    called = []

    def apply_fn(variables: Any, tokens: Any, *, train: bool, **kwargs: Any) -> Any:
        called.append((set(variables["params"]), train))
        return jnp.zeros((*tokens.shape, 16))

    params = dict.fromkeys(("head", "head_lora_a", "head_lora_b"), jnp.zeros((2, 2)))
    preference_loss(BETA)(params, apply_fn, BATCH, jax.random.key(0))
    assert called == [(set(params), True), ({"head"}, False)]


@pytest.mark.slow
def test_a_run_on_pairs_of_chats_learns_what_is_chosen(tmp_path):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", CHATML))
    chats = [
        {
            "prompt": [{"role": "user", "content": f"Is {number} even?"}],
            "chosen": [{"role": "assistant", "content": "It is"}],
            "rejected": [{"role": "assistant", "content": "You are welcome"}],
        }
        for number in range(8)
    ]
    with pytest.raises(ValueError, match="pair 1 has tools, which the chat's template leaves out"):
        preference_examples([{**chats[0], "tools": [{"name": "f"}]}], tokenizer, 64)
    pairs = preference_examples(chats, tokenizer, 64)
    model = Transformer(**{**OURS, "vocab_size": tokenizer.vocab_size}, num_layers=2)
    base = quantized(model, {"*kernel": 8}, code="nf4")
    result = fit(
        lora(base, {"*/attention/*": 4, "head": 4}, alpha=8),
        preference_loss(),
        {"train": pairs, "eval": pairs},
        config={
            "training.num_steps": 20,
            "data.batch_size": 8,
            "optimizer.learning_rate": 1e-2,
            "optimizer.warmup_steps": 0,
        },
        options={"init_args": first_call},
        workdir=tmp_path / "run",
    )
    assert result.metrics["eval"]["loss"] < 0.6 < np.log(2)
    assert result.metrics["eval"]["accuracy"] == 1


def test_pairs_are_encoded_up_to_where_they_differ(tmp_path):
    tokenizer = ByteTokenizer()
    pair = {"prompt": "Q", "chosen": "yes", "rejected": "you", "more": 1}
    (example,) = preference_examples([pair], tokenizer, 6)
    end = tokenizer.end_token
    assert example.inputs.tolist() == [[end, *b"Qyes", end], [end, *b"Qyou", end]]
    assert example.labels.tolist() == [[*b"Qyes", end, 0], [*b"Qyou", end, 0]]
    assert example.mask.tolist() == [[0, 0, 1, 1, 1, 0]] * 2
    for change, words in (
        ({"chosen": "you"}, "pair 2 has the same answer twice"),
        ({"chosen": "you are"}, "pair 2 has an answer that ends after 9 positions, expected at"),
        ({"chosen": 1}, "pair 2 has a completion of type int"),
        ({"rejected": None}, "pair 2 has a completion of type NoneType"),
    ):
        with pytest.raises(ValueError, match=words):
            preference_examples([pair, {**pair, **change}], tokenizer, 6)
    with pytest.raises(ValueError, match="pair 1 has no 'rejected', expected 'prompt', 'chosen'"):
        preference_examples([{"prompt": "", "chosen": ""}], tokenizer, 6)


def test_what_has_no_reference_or_is_no_pair_is_refused():
    with pytest.raises(ValueError, match="beta is 0, expected a number above 0"):
        preference_loss(0)

    def build(model: Any, batch: Batch = BATCH) -> None:
        on(fsdp, {"data": 8})(
            model, optax.sgd(1.0), preference_loss(), batch=batch, init_args=first_call
        )

    with pytest.raises(ValueError, match="has no adapters and no reference, expected the result"):
        build(PLAIN)
    with pytest.raises(ValueError, match=r"save=\('head',\)\), expected no such parameters"):
        build(lora(PLAIN, {"*/attention/*": 2}, alpha=4, save=("head",)))
    with pytest.raises(ValueError, match=r"the model has z_loss=0\.1, expected 0"):
        build(WithReference(PLAIN.clone(z_loss=0.1)))
    with pytest.raises(ValueError, match=r"the model has bos_token=1, expected -1"):
        build(WithReference(PLAIN.clone(bos_token=1)))
    with pytest.raises(ValueError, match=r"expected \[B, 2, S\] each"):
        build(WithReference(PLAIN), Batch(BATCH.inputs, BATCH.labels))


def _pairs(number=60):
    return [
        {
            "prompt": [{"role": "user", "content": f"Is {n} even?"}],
            "chosen": [{"role": "assistant", "content": "It is"}],
            "rejected": [{"role": "assistant", "content": f"You are {n}"}],
        }
        for n in range(number)
    ]


def test_files_of_pairs_are_a_source(tmp_path):
    """In every form of rows, with the pairs of `preference_examples`."""
    named = write_chat_tokenizer(tmp_path / "t", CHATML, bos_token="<|im_start|>")
    pairs = _pairs()
    options = {"seed": 0, "sequence_length": 64, "held_out": 0.2, "tokenizer": named}
    expected = preference_examples(pairs, load_tokenizer(named), 64)
    wanted = {example.inputs.tobytes() for example in expected.pairs}
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [
        {
            field: [{"from": names[m["role"]], "value": m["content"]} for m in messages]
            for field, messages in pair.items()
        }
        for pair in pairs
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(sharegpt))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    prints = set()
    for name in ("pairs.json", "pairs.jsonl", "pairs.parquet"):
        dataset = load_dataset("preferences", path=str(tmp_path / name), **options)
        splits = dataset.train, dataset.eval, dataset.test
        assert {x.inputs.tobytes() for split in splits for x in split.pairs} == wanted
        prints.add(dataset.fingerprint)
    assert len(prints) == 1
    bad = [*pairs, {"prompt": "a"}, {**pairs[0], "rejected": pairs[0]["chosen"]}]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, bad)))
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 61: has no 'chosen', expected"):
        load_dataset("preferences", path=str(tmp_path / "bad.jsonl"), **options)
    with pytest.warns(UserWarning, match=r"skipped 2 bad rows: .*line 62: has the same answer"):
        load_dataset("preferences", path=str(tmp_path / "bad.jsonl"), bad_rows="skip", **options)
    options["sequence_length"] = 30
    with pytest.raises(ValueError, match=r"line \d+: has an answer that ends after \d+ positions"):
        load_dataset("preferences", path=str(tmp_path / "pairs.jsonl"), **options)
    with pytest.raises(ValueError, match="`long_examples` is 'cut', expected 'error' or 'drop'"):
        load_dataset("preferences", path=str(tmp_path), long_examples="cut", **options)


@pytest.mark.slow
def test_a_command_tunes_adapters_of_an_imported_model(tmp_path):
    """With BOS within the chats; and the export of the run answers as the run does."""
    named = write_chat_tokenizer(tmp_path / "model", CHATML, bos_token="<|im_start|>")
    plain = Transformer(
        vocab_size=load_tokenizer(named).vocab_size,
        num_layers=1,
        hidden_size=32,
        num_heads=2,
        mlp_size=32,
    )
    program = make_program(plain, {"data": 1})
    state = program.init(jax.random.key(0))
    export_hf(program, state, tmp_path / "hf", tokenizer=named, template="")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, _pairs())))
    flags = [
        f"--model.from_hf={tmp_path / 'hf'}",
        f"--workdir={tmp_path / 'run'}",
        f"--data.path={tmp_path / 'pairs.jsonl'}",
        "--data.source=preferences",
        "--data.sequence_length=64",
        "--data.batch_size=8",
        "--data.held_out=0.1",
        "--optimizer.warmup_steps=0",
        "--training.num_steps=20",
        "--training.eval_every_steps=20",
        "--checkpoint.every_steps=20",
        "--model.dtype=float32",
        "--mesh=data=2",
    ]
    config = ROOT / "configs" / "lora_lm.py"
    refused = parse_command_line(
        ["train", f"--config={config}", *flags, "--model.lora=()"], default_config=config
    )
    with pytest.raises(ValueError, match=r"config\.model\.lora is \(\), expected adapters"):
        prepare(fill_from_hf(refused.config))
    command = parse_command_line(["train", f"--config={config}", *flags], default_config=config)
    assert run_command(command) == 0
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["loss"] for line in lines if line.get("split") == "eval"}
    assert losses[20] < 0.6 < losses[0] == pytest.approx(np.log(2), abs=1e-4)
    run = load_run(tmp_path / "run", mesh={"data": 1})
    out = export_hf(run.program, run.state, tmp_path / "out", like=tmp_path / "hf")
    other = load_directory(out, mesh={"data": 1})
    asked = [Chats(run.tokenizer).prompt({"messages": _pairs(1)[0]["prompt"]})]
    answers = [
        Generator(each.program).generate(each.state, asked, max_tokens=5)[0].tokens
        for each in (run, other)
    ]
    assert answers[0] == answers[1]
