"""Tokenizers take text for text, and say what they cannot do."""

import json

import numpy as np
import pytest
import tokenizers

from manualpar.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.trained_tokenizer import TEXT, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def test_bytes_are_tokens_as_they_are():
    tokenizer = load_tokenizer("")
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_token) == (257, 256)
    everything = bytes(range(256))
    np.testing.assert_array_equal(tokenizer.encode_documents([everything])[0], np.arange(256))
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([256, 0xC3, 0xA9, 256, 65, 0xFF]) == "éA\N{REPLACEMENT CHARACTER}"
    assert tokenizer.encode("\udcff").tolist() == [0xFF]


def test_a_tokenizer_file_encodes_all_of_a_text_and_nothing_else(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT, "truncated or padded"
    assert len(tokens) < len(TEXT)
    assert tokens.dtype == np.int32
    assert tokens.max() < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.bos_token, *tokens]) == TEXT
    first, second = tokenizer.encode_documents([TEXT.encode(), b"x \xff"])
    np.testing.assert_array_equal(first, tokens)
    assert tokenizer.decode(second) == "x \N{REPLACEMENT CHARACTER}"


def test_a_document_cannot_spell_out_the_token_between_documents(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    tokens = tokenizer.encode("a <|endoftext|> b")
    assert tokenizer.bos_token not in tokens
    assert tokenizer.decode(tokens) == "a <|endoftext|> b"


def test_the_vocabulary_reaches_to_the_highest_token(tmp_path, tokenizer_file):
    with open(tokenizer_file) as file:
        content = json.load(file)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "<late>"})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    highest = tokenizers.Tokenizer.from_file(str(path)).token_to_id("<late>")
    assert tokenizer.vocab_size == highest + 1
    assert tokenizer.fingerprint != load_tokenizer(tokenizer_file).fingerprint


@pytest.mark.parametrize(
    ("special", "bos"),
    [
        (("<pad>", "<s>", "</s>"), "<s>"),
        (("[CLS]", "[SEP]"), "[CLS]"),
        (("<|endoftext|>", "<s>"), "<s>"),
    ],
)
def test_bos_is_the_token_that_is_called_so(tmp_path, special, bos):
    path = write_tokenizer(tmp_path / "tokenizer.json", special)
    expected = tokenizers.Tokenizer.from_file(path).token_to_id(bos)
    assert load_tokenizer(path).bos_token == expected
