"""Tokenizers take text for text, and say what they cannot do."""

import json

import numpy as np
import pytest
import tokenizers

from benchmarks.malformed_programs import TOKENIZERS, replacing, splitting, words
from manualpar.data.tokenizer import ByteTokenizer, check_tokenizer, guarded, load_tokenizer
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


def test_padding_to_a_length_does_not_change_how_a_prompt_begins(tmp_path, tokenizer_file):
    with open(tokenizer_file) as file:
        content = json.load(file)
    bos = content["added_tokens"][0]["content"]
    begin, text = (
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    content["padding"] |= {"strategy": {"Fixed": 100}, "direction": "Left", "pad_id": 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(str(tmp_path)).begins_with_bos


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


# -------------------------------------------------------------------------------------------------
# Tokenizers that would not end are refused, and ordinary ones are not.


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORDINARY = {
    "gpt2": {"pre_tokenizer": splitting(GPT2)},
    "llama3": {"pre_tokenizer": splitting(LLAMA3)},
    "llama2": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replacing(" ", "\u2581")],
        },
        "decoder": replacing("\u2581", " "),
    },
    "albert": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                replacing("``", '"'),
                replacing("''", '"'),
                {"type": "NFKD"},
                replacing(" {2,}", " ", "Regex"),
            ],
        }
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_does_not_end_is_refused(tmp_path, name, capfd):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words(**TOKENIZERS[name])))
    expected = (
        r"`tokenizer` is '.*tokenizer.json', which has (a reg.* exponential time|\d* ?\w+ed?ers|.)"
    )
    with pytest.raises(ValueError, match=expected):
        load_tokenizer(str(path))
    assert capfd.readouterr().err == "", "the library's stack"


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_tokenizer_is_taken(tmp_path, name):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words(**ORDINARY[name])))
    assert load_tokenizer(str(path)).encode("a b").size
    # One that cannot encode everything takes no time for that.
    check_tokenizer(words(unknown="none", **ORDINARY[name]))


def test_a_panic_with_a_text_is_a_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("manualpar.data.tokenizer.check_tokenizer", lambda fields: None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words(pre_tokenizer=splitting("(a+)+$"))))
    tokenizer = load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"`tokenizer` cannot encode a text \(Onig"):
        tokenizer.encode("a" * 50 + "!")
    capfd.readouterr()
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
