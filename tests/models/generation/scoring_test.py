"""Scores are those of a forward pass, whatever stands beside a sequence, on any mesh."""

import jax
import numpy as np
import pytest

from manualpar.models import Transformer
from manualpar.models.flat_fields import nest_fields, with_fields
from manualpar.models.generation import Generator
from manualpar.models.generation.scoring import cut_windows, score_completions, score_documents
from tests.models.generation.programs import FAMILIES, SIZES, make_program, make_state


def test_windows_score_each_token_once_and_the_last_has_the_most_context():
    # The example in lm-eval's documentation.
    tokens = ["BOS", *range(10)]
    assert list(cut_windows(tokens, 4)) == [
        (["BOS"], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(cut_windows(["BOS"], 4)) == []
    for length in range(1, 8):
        scored = [token for _, window in cut_windows(tokens, length) for token in window]
        assert scored == tokens[1:]
        assert all(len(a) + len(b) <= length + 1 for a, b in cut_windows(tokens, length))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped, documents, tied", "experts"])
def test_scores_are_those_of_one_sequence_on_one_device(name, devices8):
    del devices8
    plain = Transformer(**nest_fields({**SIZES, **FAMILIES[name]}))
    program = make_program(with_fields(plain, split_axis="model"), {"data": 2, "model": 2})
    state, generator = make_state(program), Generator(program, batch_size=4)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 64, size).tolist() for size in (3, 20, 7, 2, 40, 9, 5)]
    cuts = [1, 15, 2, 1, 39, 4, 3]
    tokens[1][7] = 0  # The token that begins a document, in the middle of a sequence.
    pairs = [(row[:cut], row[cut:]) for row, cut in zip(tokens, cuts, strict=True)]
    scores = score_completions(generator, state, pairs)
    packed = score_completions(generator, state, pairs[1:2], packed=True)
    params, model = jax.device_get(state.params), with_fields(plain, capacity_factor=0.0)
    one, several = (jax.jit(x.apply) for x in (model.clone(bos_token=-1), model))
    # A batch of another number of rows is summed in another order.
    is_same = packed[0] == pytest.approx(scores[1], abs=1e-5)
    assert is_same == (plain.bos_token < 0)
    cases = zip(tokens, cuts, scores, [one] * len(tokens), strict=True)
    for row, cut, score, apply in (*cases, (tokens[1], cuts[1], packed[0], several)):
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(row)] = row
        logits = jax.nn.log_softmax(apply({"params": params}, padded)[0])
        wanted = [float(logits[place - 1, row[place]]) for place in range(cut, len(row))]
        assert score.log_likelihood == pytest.approx(sum(wanted), abs=2e-5 * len(wanted))
        assert score.num_tokens == len(wanted)
        best = [int(logits[place - 1].argmax()) for place in range(cut, len(row))]
        assert score.is_greedy == (best == row[cut:])
    # What stands beside a sequence does not matter, and a greedy answer is greedy.
    alone = score_completions(generator, state, pairs[2:3])[0]
    assert alone.log_likelihood == pytest.approx(scores[2].log_likelihood, abs=1e-5)
    (answer,) = Generator(program, stop_tokens=()).generate(state, [tokens[0]], max_tokens=5)
    greedy = score_completions(generator, state, [(tokens[0], answer.tokens)])[0]
    assert greedy.is_greedy
    assert greedy.log_likelihood == pytest.approx(sum(answer.log_probabilities), abs=5e-5)
    # Documents in windows.
    whole, begun = score_documents(
        generator, state, [tokens[4], [0, *tokens[4]]], first_token=0, max_length=16
    )
    assert begun == pytest.approx(whole, abs=1e-4)
    windows = score_completions(generator, state, list(cut_windows([0, *tokens[4]], 16)))
    assert whole.num_tokens == 40
    assert whole.log_likelihood == pytest.approx(sum(x.log_likelihood for x in windows), abs=1e-4)
