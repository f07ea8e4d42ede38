"""Token files hold what the text does, and nothing is taken for complete that is not."""

import json
import subprocess
import sys

import chex
import numpy as np
import pytest

from manualpar.data import tokenize
from manualpar.data.dataset import SPLITS
from manualpar.data.sources import load_dataset
from manualpar.data.tokenize import main, write_token_files
from tests.data_tokenizer_test import write_tokenizer


@pytest.fixture
def corpus(tmp_path):
    directory = tmp_path / "corpus"
    directory.mkdir()
    for index in range(30):
        (directory / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n")
    return str(directory)


@pytest.mark.parametrize("vocab_size", [0, 300, 70_000])
def test_token_files_give_the_sequences_of_their_text(tmp_path, corpus, vocab_size, monkeypatch):
    tokenizer = ""
    if vocab_size:
        tokenizer = write_tokenizer(tmp_path / "t.json")
    if vocab_size > 2**16:
        _add_token(tokenizer, vocab_size - 1)
    output = str(tmp_path / "tokens")
    written = write_token_files(corpus, output, tokenizer=tokenizer)
    assert written.dtype == ("<u4" if vocab_size > 2**16 else "<u2")
    made = load_dataset("tokens", seed=0, path=output, sequence_length=16)
    text = load_dataset("text", seed=0, path=corpus, sequence_length=16, tokenizer=tokenizer)
    for name in SPLITS:
        split, expected = getattr(made, name), getattr(text, name)
        assert len(split) == len(expected) > 0
        assert split.tokens_per_byte == expected.tokens_per_byte
        for index in range(len(split)):
            chex.assert_trees_all_equal(split[index], expected[index])
    assert made.tokenizer.vocab_size == text.tokenizer.vocab_size
    assert made.tokenizer.bos_token == text.tokenizer.bos_token
    assert made.fingerprint != text.fingerprint


def _add_token(path: str, number: int) -> None:
    """Writes a gap into a vocabulary, up to a token of this number."""
    with open(path) as file:
        content = json.load(file)
    vocab = content["model"]["vocab"]
    vocab["zzz"] = number
    with open(path, "w") as file:
        json.dump(content, file)


def test_the_same_text_makes_the_same_files_and_other_text_others(tmp_path, corpus):
    first = write_token_files(corpus, str(tmp_path / "a"))
    again = write_token_files(corpus, str(tmp_path / "b"))
    assert first == again
    for split in SPLITS:
        files = [tmp_path / name / f"{split}.bin" for name in "ab"]
        assert files[0].read_bytes() == files[1].read_bytes()

    def fingerprint(directory: str) -> str:
        path = str(tmp_path / directory)
        return load_dataset("tokens", seed=0, path=path, sequence_length=16).fingerprint

    with open(f"{corpus}/3.py", "r+") as file:
        file.write("gnu")  # As long as before.
    write_token_files(corpus, str(tmp_path / "c"))
    assert fingerprint("a") == fingerprint("b") != fingerprint("c")


def test_an_interrupted_call_leaves_nothing_that_loads_and_can_be_repeated(
    tmp_path, corpus, monkeypatch
):
    output = str(tmp_path / "tokens")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tokenize.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_token_files(corpus, output)
    with pytest.raises(
        ValueError, match=r"complete with its tokens\.json; make it with `python -m"
    ):
        load_dataset("tokens", seed=0, path=output, sequence_length=16)
    write_token_files(corpus, output)
    assert len(load_dataset("tokens", seed=0, path=output, sequence_length=16).train)
    with pytest.raises(ValueError, match=r"output is '.*', where there is something already"):
        write_token_files(corpus, output)


def _truncate(directory):
    path = directory / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])


def _describe(**changes):
    def change(directory):
        path = directory / "tokens.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _describe_train(**changes):
    def change(directory):
        path = directory / "tokens.json"
        fields = json.loads(path.read_text())
        fields["splits"]["train"] |= changes
        path.write_text(json.dumps(fields))

    return change


def _garble(directory):
    (directory / "eval.bin").write_bytes(b"\xff" * (directory / "eval.bin").stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"whose train\.bin has \d+ bytes, expected \d+ for the \d+ tokens"),
        (lambda directory: (directory / "test.bin").unlink(), r"which lacks test\.bin"),
        (
            lambda directory: (directory / "tokens.json").write_text("{"),
            r"tokens\.json is not JSON",
        ),
        (
            lambda directory: (directory / "tokens.json").write_text("[" * 10**5),
            r"tokens\.json is nested deeper than",
        ),
        (_describe(version=2), r"tokens\.json has the version 2, expected 1"),
        (_describe(version=[1]), r"has the version \[1\], expected 1"),
        (_describe(splits={}), r"has splits\.train=None, expected an object"),
        (_describe(splits=3), r"has splits=3, expected an object"),
        (_describe(dtype="<f4"), r"has dtype='<f4', expected one of"),
        (_describe(tokenizer=5), r"has tokenizer=5, expected a string"),
        (_describe(tokenizer="../x.json"), r"has tokenizer='../x.json', expected one of"),
        (_describe(vocab_size=True), r"has vocab_size=True, expected an integer"),
        (_describe(color=1), r"has the unknown field color"),
        (_describe_train(tokens=1), r"has splits\.train\.tokens=1, expected at least 2"),
        (_describe_train(tokens=20.0), r"has splits\.train\.tokens=20\.0, expected an integer"),
        (_describe_train(bytes=0), r"has splits\.train\.bytes=0, expected at least 1"),
        (_describe_train(documents=-1), r"has splits\.train\.documents=-1, expected at least 1"),
        (_describe_train(blake2b=None), r"has splits\.train\.blake2b=None, expected a string"),
        (_describe(vocab_size=300), r"whose byte tokenizer has 257 .* expected the 300 and 256"),
        (_garble, r"eval\.bin has token 65535 .* less than the vocabulary's 257"),
    ],
)
def test_what_does_not_fit_its_description_is_refused(tmp_path, corpus, damage, message):
    write_token_files(corpus, str(tmp_path / "tokens"))
    damage(tmp_path / "tokens")
    with pytest.raises(ValueError, match=rf"config\.data\.path.*{message}"):
        _ = load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=4).eval[0]


def test_the_files_are_mapped_and_not_read(tmp_path, corpus):
    write_token_files(corpus, str(tmp_path / "tokens"))
    dataset = load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=4)
    assert isinstance(dataset.train.stream.tokens, np.memmap)
    assert type(dataset.train[0].inputs) is np.ndarray


def test_the_command_line_says_what_it_made(tmp_path, corpus, capsys):
    arguments = [f"--input={corpus}", f"--output={tmp_path / 'tokens'}"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(SPLITS)
    assert sum(int(line.split()[1]) for line in lines) == 30
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output=")
    assert "where there is something already" in error
    assert error.count("\n") == 1


def test_it_runs_as_the_documentation_says(tmp_path, corpus):
    subprocess.run(
        [
            *(sys.executable, "-m", "manualpar.data.tokenize"),
            *(f"--input={corpus}/*.py", f"--output={tmp_path / 'tokens'}"),
        ],
        check=True,
        capture_output=True,
    )
    assert load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=4).test[0]
