"""A source that is asked for wrongly is refused by the name of the config's field."""

import subprocess
import sys

import pytest

from manualpar.data.sources import SOURCES, load_dataset


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("mnist", {}, "source is 'mnist', expected one of digits, synthetic, text, tokens"),
        ("text", {}, "sequence_length is 0, expected at least 1 for the source 'text'"),
        ("tokens", {}, "sequence_length is 0, expected at least 1 for the source 'tokens'"),
        (
            "tokens",
            {"sequence_length": 1, "tokenizer": "t.json"},
            "tokenizer is 't.json', expected '' for the source 'tokens'",
        ),
        ("text", {"sequence_length": 1, "path": "/no/such"}, "path is '/no/such'"),
        ("tokens", {"sequence_length": 1, "path": "/no/such"}, "path is '/no/such'"),
        ("text", {"sequence_length": 1, "tokenizer": "/no/such"}, "tokenizer is '/no/such'"),
    ],
)
def test_a_mistake_is_named_as_the_field_it_is_in(source, options, message):
    with pytest.raises(ValueError, match=rf"^config\.data\.{message}"):
        load_dataset(source, seed=0, **options)


@pytest.mark.parametrize("source", ["digits", "synthetic", "text"])
def test_every_source_gives_three_splits_of_examples(source):
    dataset = load_dataset(source, seed=0, sequence_length=32)
    assert source in SOURCES
    for split in (dataset.train, dataset.eval, dataset.test):
        assert len(split) > 0
        assert split[len(split) - 1].labels.dtype == "int32"


def test_importing_the_package_is_cheap():
    code = (
        "import sys, manualpar.data\n"
        "heavy = {'grain', 'sklearn', 'tokenizers', 'orbax.checkpoint'}\n"
        "assert not (found := heavy & set(sys.modules)), found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
