"""Mistakes in classifiers, losses, LoRA, quantization and text generation."""

import functools
import re
import types

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from manualpar import Batch, lora, quantized, tensor_parallel
from manualpar.data.tokenizer import ByteTokenizer
from manualpar.models import Attention, Classifier, Latent, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.finetuning.adapter_files import replace_adapters
from manualpar.models.generation import Generator, generator
from manualpar.models.generation.drawing import Drawing, sample_tokens
from manualpar.models.generation.scoring import score_completions
from manualpar.models.rotary import NO_ROTARY, Rotary, RotaryScaling
from tests.models.finetuning.adapted_models import BATCH, PLAN, SOMEBODYS, Somebodys
from tests.refused.sentences import cases
from tests.refused.table import check_refused, rows

KEY = jax.eval_shape(lambda: jax.random.key(0))


def init(model, *inputs):
    jax.eval_shape(model.init, KEY, *inputs)


LONGROPE = RotaryScaling(
    "longrope", original_length=8, short_factors=(1.0,) * 16, long_factors=(2.0,) * 16
)


def lose(changes):
    """Traces the loss of a model that returns logits of five classes, or calls `answer`."""
    answer = changes.get("answer")

    def apply(variables, tokens, train, rngs):
        return np.zeros((*tokens.shape, 5), np.float32)

    text = Batch(*np.ones((2, 3, 3), np.int32))
    text = text.replace(**{name: x for name, x in changes.items() if name != "answer"})
    apply = Answers(answer).apply if answer else apply
    jax.eval_shape(lambda key: language_model_loss({}, apply, text, key), KEY)


class Answers(nn.Module):
    """A model that gets labels, and returns the result of `answer`."""

    answer: object

    def __call__(self, tokens, train=False, labels=None):
        return self.answer(tokens, labels)


class Batched(nn.Module):
    """A model with layers for which LoRA has no adapter."""

    @nn.compact
    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = nn.Embed(16, 16, name="embed")(tokens_BS)
        x_BSD = nn.Einsum((16, 16), "bsd,fd->bsf", use_bias=False, name="backwards")(x_BSD)
        each = nn.vmap(
            nn.Dense,
            in_axes=None,
            out_axes=-1,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            axis_size=3,
        )
        x_BSD = each(16, name="each")(x_BSD).sum(-1)
        return nn.DenseGeneral(4, batch_dims=(0,), name="batched")(x_BSD)


def adapt(arguments):
    model, targets, *alpha = arguments
    lora(model, targets, alpha=alpha[0] if alpha else 1.0)


LORA = {"targets": {"head": 2}, "alpha": 1}
TINY = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "mlp_size": 8}
TINY |= {"head_size": 6, "attention": Attention(latent=Latent(4, rotary_size=2, value_size=4))}


def apply_trained(model):
    variables = model.init(jax.random.key(0), BATCH.inputs)
    return model.apply(variables, BATCH.inputs, train=True, rngs={"dropout": jax.random.key(0)})


def quantize(arguments):
    init(quantized(*arguments), BATCH.inputs)


def generate(arguments, tokenizer=None, rotary=NO_ROTARY):
    """Calls a generator with prompts that it refuses before it runs a step."""
    prompts, options = arguments
    model = Transformer(vocab_size=260, bos_token=256, rotary=rotary)
    steps = types.SimpleNamespace(model=model, row_devices=2, bos_token=256)
    steps.adopt = lambda state: state
    state = types.SimpleNamespace(params={}, collections={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "CachedSteps", lambda program: steps)
        Generator(None, tokenizer).generate(state, prompts, **options)


def sample(arguments):
    prompt, options = arguments
    options = {"num_tokens": 6, "sequence_length": 8, "temperature": 0, "rng": KEY, **options}
    sample_tokens(lambda *args: 1 / 0, {}, prompt, **options)


def score(pairs, **options):
    encoder = types.SimpleNamespace(encode=lambda tokens, index: tokens)
    score_completions(encoder, None, pairs, **options)


REFUSED = [
    *rows(
        "Classifier",
        lambda layers: init(Classifier(num_layers=layers), np.zeros((2, 6), np.float32), False),
        (0, "num_layers is 0, expected at least 1"),
    ),
    *rows(
        "language_model_loss",
        lose,
        *cases(
            # There are as many tokens as examples, so NumPy would broadcast the mask over tokens.
            (
                {"mask": np.ones(3)},
                r"batch.mask has the shape \(3,\), expected \(3, 3\): one for each",
            ),
            (
                {"labels": np.ones((3, 4), int)},
                r"batch.labels has the shape \(3, 4\), expected \(3, 3\)",
            ),
            (
                {"answer": lambda x, y: x},
                r".*takes labels, returned arrays of the shapes \[\(3, 3\)\], expected two of "
                r"\(3, 3\)",
            ),
            (
                {"answer": lambda x, y: (x, y[0])},
                r".*takes labels, returned arrays of the shapes \[\(3, 3\), \(3,\)\], expected "
                r"two of \(3, 3\)",
            ),
            (
                {"answer": lambda x, y: (x * 0.5, x == y), "mask": np.ones(3)},
                r"batch.mask has the shape \(3,\), expected \(3, 3\)",
            ),
            begins="language_model_loss: ",
        ),
    ),
    *rows(
        "lora",
        lambda targets: init(lora(Batched(), targets, alpha=1), BATCH.inputs),
        ({"embed": 2}, "'embed' is a Embed, expected one of SplitDense, nn.Dense"),
        ({"backwards": 2}, "'bsd,fd->bsf', expected that the dims which the kernel shares"),
        ({"each": 2}, "loop that stacks kernels .16, 16. as .16, 3, 16."),
        ({"batched": 2}, "batch_dims=.0,., expected none"),
        ({"*embedding": 2}, "matches no module with parameters.*'embed'"),
        ({"*": 2}, "'backwards' computes|'batched' has batch_dims"),
        ({"*s*": 2, "backwards": 1}, "'backwards' has more than one rank"),
    ),
    *rows(
        "lora",
        adapt,
        ((nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {"*": 2}), TypeError, "nnx.Module Linear.*nnx.LoRA"),
        (("model", {"*": 2}), TypeError, "model is 'model'"),
        ((Somebodys(), {}), TypeError, "targets is {}, expected a dict from globs"),
        ((Somebodys(), {"head": 0}), "'head': 0, expected a rank of at least 1"),
        ((Somebodys(), {"head": True}), TypeError, "'head': True, expected a glob and a rank"),
        ((Somebodys(), {"head": 1}, "2"), TypeError, "alpha is '2', expected a number"),
        ((Somebodys(), {"head": 1}, -1), "alpha is -1, expected a finite number"),
        (
            (tensor_parallel(Somebodys(), PLAN, sequence=True, overlap="ring"), {"head": 1}),
            "overlap='ring', expected 'none'",
        ),
    ),
    *rows(
        "lora",
        lambda options: init(
            lora(quantized(Somebodys(), {"*/up/kernel": 4}), **{**LORA, **options}), BATCH.inputs
        ),
        ({"dropout": 1}, "dropout is 1, expected a number from 0 to below 1"),
        ({"save": "head"}, TypeError, "save is 'head', expected a tuple of globs"),
        ({"save": ("norm/*",)}, "save has 'norm/.', but this glob matches no .*'layers/norm/bias'"),
        ({"save": ("*/up/*",)}, "'layers/up/kernel' is stored in codes, which are not trained"),
        ({"save": ("head/*",)}, "save has 'head/.', and parameter 'head/kernel' has an adapter"),
        (
            {"targets": {"embed/embedding": 1}, "magnitudes": True},
            "magnitudes is True and targets name the parameter 'embed/embedding', expected layers",
        ),
    ),
    *rows(
        "lora",
        lambda options: jax.eval_shape(
            lambda: apply_trained(lora(Transformer(**TINY), alpha=1, dropout=0.1, **options))
        ),
        ({"targets": {"head": 1}}, "dropout is 0.1 and the parameter 'head' has an adapter"),
        ({"targets": {"*/expand": 1}}, "'layers/attention/expand' has an adapter and dropout is"),
    ),
    *rows(
        "quantized",
        quantize,
        (
            (Somebodys(), {"*/kernels": 4}),
            "'.*/kernels': 4, but this glob matches no parameter, .*kernel",
        ),
        ((Somebodys(), {"*": 4}), "'embed/embedding'|head/bias', which is float32 of shape .16,."),
        ((Somebodys(), {"*kernel": 4, "head/*l": 8}), "'head/kernel' has more than one block"),
        (
            (tensor_parallel(Somebodys(), PLAN), {"*kernel": 3}),
            "block length of 3 does not divide",
        ),
    ),
    *rows(
        "quantized",
        lambda arguments: quantized(*arguments),
        ((nnx.Linear(2, 2, rngs=nnx.Rngs(0)),), TypeError, "nnx.Module Linear"),
        ((lora(Somebodys(), SOMEBODYS, alpha=4),), TypeError, "lora.quantized.model., ....."),
        ((Somebodys(), {}), TypeError, "targets is {}, expected a dict from globs"),
        ((Somebodys(), {"*kernel": 0}), "'.kernel': 0, expected a block of at least 1"),
        (
            (Somebodys(), {"*kernel": "8"}),
            TypeError,
            "'.kernel': '8', expected a glob and a",
        ),
    ),
    *rows(
        "Drawing",
        lambda options: Drawing(**options).as_arrays(),
        ({"temperature": -1}, "temperature is -1, expected a finite number, at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1, expected a number of tokens"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a number of tokens"),
        ({"top_p": 0.0}, "top_p is 0.0, expected more than 0"),
        ({"top_p": 1.1}, "top_p is 1.1, expected"),
    ),
    *rows(
        "generate",
        functools.partial(generate, tokenizer=ByteTokenizer()),
        (([[]], {}), r"prompt 0 has the shape \(0,\)"),
        (([[1.5]], {}), TypeError, "generate: prompt 0 is of float64, expected integers"),
        (([[1], [260]], {}), "prompt 1 has tokens from 260 to 260, expected 0 to 259"),
        *(
            (([[1]], {name: value}), f"{name} is {re.escape(str(value)[:20])}.*, expected")
            for name, values in {
                "max_tokens": (0, 1.5, 10**9, 10**400, np.inf, np.nan),
                "samples": (10**12,),
                "seed": (10**30, -(10**400)),
                "temperature": (1e300, 10**400, np.nan),
                "top_k": (10**30, np.inf),
                "top_p": (10**400,),
                "min_p": (10**400,),
                "repetition_penalty": (1e300, 1e-320, 10**400),
                "frequency_penalty": (1e300, 10**400),
            }.items()
            for value in values
        ),
        (([[1]], {"top_p": 2}), "top_p is 2, expected more than 0"),
        (([[1]], {"min_p": 2}), "min_p is 2, expected at least 0"),
        (([[1]], {"repetition_penalty": 0}), "repetition_penalty is 0, expected a finite"),
        (([[1]], {"presence_penalty": np.nan}), "presence_penalty is nan, expected a finite"),
        (([[1]], {"logit_bias": {260: 1}}), "logit_bias has the token 260, expected 0 to 259"),
        (([[1]], {"logit_bias": {1: np.inf}}), "logit_bias adds inf to the token 1"),
        (([[1]], {"logit_bias": {1: 10**400}}), "logit_bias adds 1.* to the token 1"),
        (([[1]], {"logit_bias": {10**400: 1}}), "logit_bias has the token 1.*, expected 0 to 259"),
        (([[1]], {"samples": 0}), "samples is 0, expected at least 1"),
        (([[1]], {"samples": 2}), "samples is 2 and temperature is 0, expected a temp"),
    ),
    *rows(
        "generate without a tokenizer",
        generate,
        ((["a"], {}), TypeError, "prompt 0 is a string and there is no tokenizer"),
        (([[1]], {"stop": ["b"]}), "stop has the string 'b' and there is no tokenizer"),
    ),
    *rows(
        "generate with a table of positions",
        functools.partial(generate, rotary=Rotary(learned=8)),
        (([[1], [1] * 5], {"max_tokens": 5}), "prompt 1 has 5 tokens and max_tokens is 5, expect"),
        (([[1] * 9], {"max_tokens": 1}), "expected at most rotary.learned=8, the length of the"),
    ),
    *rows(
        "generate with longrope",
        functools.partial(generate, rotary=Rotary(scaling=LONGROPE)),
        (([[1] * 8], {"max_tokens": 2}), r"at most rotary.scaling.original_length=8 \(or a longer"),
    ),
    *rows(
        "adapters",
        lambda x: replace_adapters("load_adapters", None, None, {"a/lora_a": x, "b": np.zeros(1)}),
        *(
            (np.array([1, x], np.float32), "load_adapters: a/lora_a would contain NaN or infinity,")
            for x in (np.nan, np.inf, -np.inf)
        ),
    ),
    *rows(
        "sample_tokens",
        sample,
        *cases(
            (([], {}), r"prompt has the shape \(0,\), expected \[tokens\] or"),
            ((np.zeros((2, 0), int), {}), r"prompt has the shape \(2, 0\)"),
            ((3, {}), r"prompt has the shape \(\)"),
            (([1], {"num_tokens": 0}), "num_tokens is 0, expected at least 1"),
            (([1], {"sequence_length": 0}), "sequence_length is 0, expected at least 1"),
            (([1], {"temperature": -1}), "temperature is -1, expected a finite number, at least 0"),
            (([1], {"temperature": float("nan")}), "temperature is nan, expected a finite"),
            begins="sample_tokens: ",
        ),
        (([1.5], {}), TypeError, "sample_tokens: prompt is of float64, expected integers"),
        (([1], {"rng": 3}), TypeError, "sample_tokens: rng is 3, expected one key"),
    ),
    *rows(
        "score_completions",
        score,
        ([([], [1])], "pair 0 has 0 tokens of context and 1 of completion"),
        ([([1], [1]), ([1], [])], "pair 1 has 1 tokens of context and 0 of completion"),
    ),
    *rows(
        "score_completions",
        functools.partial(score, max_length=2),
        ([([1], [1, 2, 3])], "completion of 3 tokens, expected at most max_length=2"),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
