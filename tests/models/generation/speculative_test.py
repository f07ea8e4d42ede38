"""Answers with a draft are those without one, whatever the draft proposes."""

import functools
import math

import jax
import numpy as np
import pytest

from manualpar import data_parallel, fsdp, hsdp
from manualpar.data.tokenizer import ByteTokenizer
from manualpar.models import Transformer
from manualpar.models.flat_fields import nest_fields, with_fields
from manualpar.models.generation import Draft, Generator
from tests.models.generation.programs import FAMILIES, SIZES, make_program, make_state

PROMPTS = ([5, 1, 2, 0, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18])
SPLIT = {"split_axis": "model"}
DYNAMIC = {"rope_scaling": "dynamic", "rope_factor": 2.0, "rope_original_length": 8}
DRAWN = {"temperature": 1.0, "min_p": 0.02, "seed": 5}
PENALIZED = {**DRAWN, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {3: -9.0}}
CASES = [
    ("grouped, documents, tied", fsdp, {"data": 8}, DYNAMIC),
    ("grouped, documents, tied", fsdp, {"data": 2, "model": 4}, {**SPLIT, "vocab_multiple": 4}),
    ("window", data_parallel, {"data": 8}, {}),
    ("window", fsdp, {"data": 2, "model": 2}, SPLIT),
    ("two kinds", hsdp, {"replica": 2, "data": 2, "model": 2}, SPLIT),
    ("latent", fsdp, {"data": 2, "model": 2}, SPLIT),
    ("experts", fsdp, {"data": 2, "expert": 2}, {"expert_axis": "expert"}),
    ("sinks", fsdp, {"data": 4, "model": 2}, SPLIT),
    ("chunks", fsdp, {"data": 2, "model": 2}, SPLIT),
]


def _model(name, **more):
    return Transformer(**nest_fields({**SIZES, **FAMILIES[name], "capacity_factor": 0.0, **more}))


def _changed(program, state, share):
    """A state whose every number differs by a random share of itself."""
    rng = np.random.default_rng(3)

    def change(x):
        x = np.asarray(x)
        return x * (1 + share * rng.standard_normal(x.shape)).astype(x.dtype)

    return program.init_from(jax.tree.map(change, jax.device_get(state.params)))


def _assert_same(answers, expected):
    for answer, plain in zip(answers, expected, strict=True):
        assert (answer.tokens, answer.ending) == (plain.tokens, plain.ending)
        np.testing.assert_allclose(answer.log_probabilities, plain.log_probabilities, atol=1e-5)


def _assert_accepts_its_own(model, axes, settings):
    """Checks what a model makes of its own drafts, and of those of a model that knows nothing."""
    program = make_program(model, axes)
    state = make_state(program)
    ignorant = _changed(program, state, 9)
    plain = Generator(program, stop_tokens=())
    for options in settings:
        options = {**options, "max_tokens": 10}
        expected = plain.generate(state, PROMPTS, **options)
        assert [answer.forward_passes for answer in expected] == [10] * 3
        drafted = Generator(program, stop_tokens=(), draft=Draft(program, state, 3))
        answers = drafted.generate(state, PROMPTS, **options)
        _assert_same(answers, expected)
        # The prompt's pass gives a token, and each other pass up to three and one more.
        counts = [(answer.drafted, answer.forward_passes) for answer in answers]
        assert counts == [(9 - 9 // 4, 1 + math.ceil(9 / 4))] * 3
        if len(settings) > 1:
            drafted = Generator(program, stop_tokens=(), draft=Draft(program, ignorant))
            answers = drafted.generate(state, PROMPTS, **options)
            _assert_same(answers, expected)
            assert sum(answer.drafted for answer in answers) < 9


def test_a_model_accepts_all_that_it_drafts_for_itself(devices8):
    del devices8
    small = Transformer(**{**SIZES, "num_layers": 1, "scan_layers": False})
    _assert_accepts_its_own(small, {"data": 1}, [DRAWN])


@pytest.mark.slow
def test_a_draft_that_knows_nothing_changes_no_answer(devices8):
    """The table of learned positions ends where the longest answer ends."""
    del devices8
    longest = len(PROMPTS[2]) + 10 - 1
    model = Transformer(**nest_fields({**SIZES, "learned_positions": longest}))
    _assert_accepts_its_own(model, {"data": 2}, [{}, PENALIZED])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "builder", "axes", "fields"), CASES)
def test_every_family_answers_on_its_meshes_as_without_a_draft(
    name, builder, axes, fields, devices8
):
    """The draft is a changed copy of the model on another mesh, which is right now and then."""
    del devices8
    shared = {field: x for field, x in fields.items() if not field.endswith("_axis")}
    model = _model(name, **shared)
    axes_of_fields = {field: x for field, x in fields.items() if field.endswith("_axis")}
    program = make_program(with_fields(model, **axes_of_fields), axes, builder)
    state = make_state(program)
    other = make_program(model, {"data": math.prod(axes.values())})
    draft = Draft(other, _changed(other, make_state(other), 0.15), 3)
    plain = Generator(program, stop_tokens=())
    drafted = Generator(program, stop_tokens=(), draft=draft)
    options = {**(PENALIZED if "split_axis" in fields else {}), "max_tokens": 14}
    expected = plain.generate(state, PROMPTS, **options)
    answers = drafted.generate(state, PROMPTS, **options)
    _assert_same(answers, expected)
    # Some drafted tokens are accepted, and some are not.
    passes = [answer.forward_passes for answer in answers]
    assert 1 + math.ceil(13 / 4) < max(passes) < 14
    # An answer may end in the middle of what a pass has accepted.
    stop = [expected[2].tokens[3]]
    stopped = [x.generate(state, PROMPTS, **options, stop=stop) for x in (plain, drafted)]
    _assert_same(stopped[1], stopped[0])
    assert "stop" in {answer.ending for answer in stopped[1]}


@pytest.mark.slow
def test_samples_and_batches_are_drawn_as_without_a_draft(devices8):
    """And pieces are streamed in the order of an answer's tokens."""
    del devices8
    program = make_program(_model("window"), {"data": 2})
    state = make_state(program)
    draft = Draft(program, _changed(program, state, 0.15), 5)
    options = {**DRAWN, "top_k": 20, "top_p": 0.9, "samples": 2, "max_tokens": 12}
    make = functools.partial(Generator, program, stop_tokens=(), batch_size=4)
    expected = make().generate(state, PROMPTS, **options)
    drafted = make(draft=draft)
    _assert_same(drafted.generate(state, PROMPTS, **options), expected)
    streamed = [[] for _ in expected]
    for piece in drafted.stream(state, PROMPTS, **options):
        streamed[piece.row].append(piece.token)
    assert streamed == [answer.tokens for answer in expected]


@pytest.mark.slow
@pytest.mark.parametrize("size", [257, 272])
def test_a_draft_may_have_another_number_of_rows_of_padding(devices8, size):
    """The tokenizer has 257 tokens, and the model 260."""
    del devices8
    fields = nest_fields({**SIZES, "num_layers": 1, "bos_token": 256})
    program, other = (
        make_program(Transformer(**{**fields, "vocab_size": number}), {"data": 1})
        for number in (260, size)
    )
    state, tokenizer = make_state(program), ByteTokenizer()
    draft = Draft(other, make_state(other), 3)
    options = {**PENALIZED, "max_tokens": 12}
    prompts = [*PROMPTS, [258, 259, 3]]
    expected = Generator(program, tokenizer, stop_tokens=()).generate(state, prompts, **options)
    drafting = Generator(program, tokenizer, stop_tokens=(), draft=draft)
    _assert_same(drafting.generate(state, prompts, **options), expected)
    with pytest.raises(ValueError, match=f"a model of {size} tokens, expected 260"):
        Generator(program, draft=draft)
