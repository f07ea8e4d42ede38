"""Tokenizers that would not end are refused, and ordinary ones are not."""

import json

import pytest
import tokenizers

from benchmarks.malformed_programs import TOKENIZERS, replacing, splitting, words
from manualpar.data import load_tokenizer
from manualpar.data.tokenizer import check_tokenizer, guarded

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
    check_tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(words(unknown="none", **ORDINARY[name])))
    )


def test_a_panic_with_a_text_is_a_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("manualpar.data.tokenizer.check_tokenizer", lambda tokenizer: None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words(pre_tokenizer=splitting("(a+)+$"))))
    tokenizer = load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"`tokenizer` cannot encode a text \(Onig"):
        tokenizer.encode("a" * 50 + "!")
    capfd.readouterr()
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
