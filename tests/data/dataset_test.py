"""Packing loses no token and asks for none twice."""

import chex
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from manualpar.data.dataset import ArrayStream, TokenSplit, make_fingerprint

BOS = 9


def _split(documents: list[list[int]], sequence_length: int) -> TokenSplit:
    tokens = [token for document in documents for token in (BOS, *document)] + [BOS]
    return TokenSplit(
        ArrayStream(np.array(tokens, np.uint16), "documents", 10),
        sequence_length=sequence_length,
        bos_token=BOS,
        num_bytes=sum(map(len, documents)),
        num_documents=len(documents),
    )


DOCUMENTS = st.lists(
    st.lists(st.integers(0, BOS - 1), min_size=1, max_size=12), min_size=1, max_size=8
)


@hypothesis.given(documents=DOCUMENTS, sequence_length=st.integers(1, 20))
def test_sequences_laid_end_to_end_are_the_documents(documents, sequence_length):
    split = _split(documents, sequence_length)
    sequences = [split[index] for index in range(len(split))]
    for sequence in sequences:
        chex.assert_shape([sequence.inputs, sequence.labels, sequence.mask], (sequence_length,))
        chex.assert_type(
            [sequence.inputs, sequence.labels, sequence.mask], [np.int32, np.int32, np.float32]
        )
    inputs, labels, masks = (
        np.concatenate([getattr(sequence, leaf) for sequence in sequences])
        for leaf in ("inputs", "labels", "mask")
    )
    real = masks == 1
    stream = split.stream.read(0, len(split.stream))
    np.testing.assert_array_equal(inputs[real], stream[:-1])
    np.testing.assert_array_equal(labels[real], stream[1:])
    np.testing.assert_array_equal(inputs[~real][1:], BOS)
    np.testing.assert_array_equal(labels[~real], BOS)
    assert (~real).sum() < sequence_length, "a sequence of nothing but padding"
    assert not (np.diff(masks) > 0).any(), "padding before the end"
    # Documents come apart again at the BOS tokens.
    begins = np.flatnonzero(inputs[real] == BOS)
    parts = [part[1:].tolist() for part in np.split(inputs[real], begins)[1:]]
    assert parts == documents


@hypothesis.given(documents=DOCUMENTS)
def test_every_token_and_every_end_is_one_label_of_the_bits_per_byte(documents):
    split = _split(documents, 4)
    num_bytes = sum(map(len, documents))
    assert split.num_labels == num_bytes + len(documents)
    assert split.tokens_per_byte == (num_bytes + len(documents)) / num_bytes
    assert sum(split[index].mask.sum() for index in range(len(split))) == split.num_labels


def test_there_is_nothing_past_the_end():
    split = _split([[1, 2, 3]], 2)
    assert len(split) == 2
    assert len(list(split)) == 2
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"sequence {index} of 2"):
            split[index]


def test_a_token_outside_the_vocabulary_is_refused():
    stream = ArrayStream(np.array([0, 7, 10], np.uint16), "train.bin", 10)
    np.testing.assert_array_equal(stream.read(0, 2), [0, 7])
    with pytest.raises(ValueError, match=r"train\.bin has token 10 .* less than .* 10; make the"):
        stream.read(1, 3)


def test_a_fingerprint_tells_contents_types_shapes_and_order_apart():
    array = np.arange(4, dtype=np.int32)
    parts = [
        (array, "a"),
        ("a", array),
        (array[::-1], "a"),
        (array.astype(np.uint32), "a"),
        (array.reshape(2, 2), "a"),
        (array, "b"),
        (array, "a", 1),
    ]
    prints = [make_fingerprint(*each) for each in parts]
    assert len(set(prints)) == len(parts)
    assert prints == [make_fingerprint(*each) for each in parts]
