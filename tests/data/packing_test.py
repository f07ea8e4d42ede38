"""Packed examples are whole, apart from each other, and the same sequences in every run."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from manualpar.data.dataset import DamagedDataError
from manualpar.data.packing import LEARNED, pack

PADDING = 99


def _examples(lengths):
    """Examples whose tokens are the number of the example, and a place in it that is learned."""
    rng = np.random.default_rng(0)
    content = [np.full(length, number, np.uint32) for number, length in enumerate(lengths)]
    for example in content:
        example[rng.integers(1, len(example))] |= LEARNED
    return np.concatenate(content), np.array(lengths, np.uint32)


def _pack(lengths, sequence_length, **options):
    tokens, lengths = _examples(lengths)
    settings = {"vocab_size": 10**6, "padding": PADDING, "long_examples": "error", "name": "them"}
    return pack(tokens, lengths, sequence_length=sequence_length, **(settings | options))


@hypothesis.given(st.lists(st.integers(2, 17), min_size=1, max_size=60))
def test_every_example_is_in_one_sequence_and_whole(lengths):
    split = _pack(lengths, 16)
    found = {}
    for index in range(len(split)):
        batch = split[index]
        tokens, documents = batch.inputs["tokens"], batch.inputs["documents"]
        for document in range(1, documents.max() + 1):
            (places,) = np.nonzero(documents == document)
            assert (np.diff(places) == 1).all()
            (number,) = set(tokens[places].tolist()) | set(batch.labels[places].tolist())
            assert number not in found
            found[number] = len(places) + 1
            assert batch.mask[places].sum() == 1
        assert (tokens[documents == 0] == PADDING).all()
        assert not batch.mask[documents == 0].any()
        assert (np.diff(np.flatnonzero(documents)) == 1).all()
    assert found == dict(enumerate(lengths))


def test_labels_are_the_next_tokens_and_the_mask_is_that_of_the_label():
    tokens = np.array([5, 6, 7 | LEARNED, 8 | LEARNED, 1, 2 | LEARNED], np.uint32)
    options = {"vocab_size": 10, "padding": 0, "long_examples": "error", "name": ""}
    split = pack(tokens, np.array([4, 2]), sequence_length=6, **options)
    (batch,) = [split[index] for index in range(len(split))]
    np.testing.assert_array_equal(batch.inputs["tokens"], [5, 6, 7, 1, 0, 0])
    np.testing.assert_array_equal(batch.labels, [6, 7, 8, 2, 0, 0])
    np.testing.assert_array_equal(batch.mask, [0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(batch.inputs["documents"], [1, 1, 1, 2, 0, 0])
    assert batch.mask.dtype == np.float32
    assert {x.dtype for x in (*batch.inputs.values(), batch.labels)} == {np.dtype(np.int32)}


def test_little_room_is_left():
    lengths = np.random.default_rng(1).lognormal(5, 1, 3000).astype(int).clip(2, 2000)
    split = _pack(lengths.tolist(), 2048)
    assert split.filled > 0.98
    # Those of a sequence are of every length, and no longer ones stand in the first.
    assert np.corrcoef(split.order, np.arange(len(split.order)))[0, 1] < 0.1
    again = _pack(lengths.tolist(), 2048)
    np.testing.assert_array_equal(again.order, split.order)


def test_tokens_are_not_read_before_a_sequence_is_asked_for():
    class Unread:
        def __getitem__(self, part):
            raise AssertionError("read")

    settings = {"vocab_size": 9, "padding": 0, "long_examples": "error", "name": ""}
    split = pack(Unread(), np.array([3, 4]), sequence_length=8, **settings)
    assert (len(split), split.filled) == (1, 5 / 8)
    with pytest.raises(AssertionError, match="read"):
        split[0]


def test_examples_that_are_too_long_need_a_decision():
    lengths = [3, 30, 17, 18]
    with pytest.raises(ValueError, match=r"is 16, and 2 of 4 examples of them are longer, the lo"):
        _pack(lengths, 16)
    dropped = _pack(lengths, 16, long_examples="drop")
    assert sorted(dropped.order) == [0, 2]
    tokens, lengths = _examples(lengths)
    options = {"vocab_size": 10**6, "padding": PADDING, "long_examples": "cut", "name": "them"}
    cut = pack(tokens | LEARNED, lengths, sequence_length=16, **options)
    assert sorted(cut.order) == [0, 1, 2, 3]
    assert sorted(np.count_nonzero(cut[i].inputs["documents"]) for i in range(len(cut))) == [
        *(2, 16, 16, 16)
    ]
    with pytest.raises(ValueError, match=r"and all examples of them are longer; expected at leas"):
        _pack([30, 40], 16, long_examples="drop")


def test_examples_of_which_nothing_is_learned_after_a_cut_are_left_out():
    tokens = np.arange(30, dtype=np.uint32)
    tokens[[9, 17, 29]] |= LEARNED  # Labels 9, 7 and 9 of three examples of ten tokens.
    options = {"vocab_size": 10**6, "padding": PADDING, "long_examples": "cut", "name": "them"}
    lengths = np.full(3, 10, np.uint32)
    split = pack(tokens, lengths, sequence_length=7, **options)
    assert (split.order.tolist(), split.unlearned, len(split)) == ([1], 2, 1)
    with pytest.raises(ValueError, match=r"which cuts away all that is learned of them; .* 9\."):
        pack(tokens, lengths, sequence_length=6, **options)


def test_a_token_out_of_the_vocabulary_is_damage():
    split = _pack([3, 4, 5], 16, vocab_size=2)
    with pytest.raises(DamagedDataError, match=r"them has token 2 in example 2, expected less"):
        split[0]
    with pytest.raises(IndexError, match="sequence 1 of 1"):
        split[1]
