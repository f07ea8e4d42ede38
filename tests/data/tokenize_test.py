"""Token files hold what the text does, and nothing is taken for complete that is not."""

import itertools
import json
import subprocess
import sys
import time

import chex
import numpy as np
import pytest

from manualpar.data import document_files, token_job, token_parts
from manualpar.data.dataset import SPLITS
from manualpar.data.sources import load_dataset
from manualpar.data.tokenize import main, write_token_files
from tests.data.documents import write_documents
from tests.data.trained_tokenizer import write_tokenizer


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
        patch.setattr(token_parts.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_token_files(corpus, output)
    with pytest.raises(
        ValueError, match=r"complete with its tokens\.json; make it with `python -m"
    ):
        load_dataset("tokens", seed=0, path=output, sequence_length=16)
    write_token_files(corpus, output)
    assert len(load_dataset("tokens", seed=0, path=output, sequence_length=16).train)
    with pytest.raises(ValueError, match=r"output is '.*', which already holds token files"):
        write_token_files(corpus, output)


def test_the_files_are_mapped_and_not_read(tmp_path, corpus):
    write_token_files(corpus, str(tmp_path / "tokens"))
    dataset = load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=4)
    assert isinstance(dataset.train.stream.tokens, np.memmap)
    assert type(dataset.train[0].inputs) is np.ndarray


def test_the_command_line_says_what_it_made(tmp_path, corpus, capsys):
    arguments = [f"--input={corpus}", f"--output={tmp_path / 'tokens'}"]
    assert main(["tokenize", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(SPLITS)
    assert sum(int(line.split()[1]) for line in lines) == 30
    assert main(["tokenize", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output=")
    assert "which already holds token files" in error
    assert error.count("\n") == 1


def _contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("source", document_files.SUFFIXES)
def test_every_source_of_the_same_documents_makes_the_same_files(tmp_path, monkeypatch, source):
    monkeypatch.setattr(document_files, "PART_BYTES", 500)
    documents = [f"{i} " + "a b\n" * (i % 9) for i in range(200)]
    path = write_documents(tmp_path, source, documents)
    output = tmp_path / "tokens"
    written = write_token_files(path, str(output), source=source, held_out=0.1)
    assert sum(part.documents for part in written.splits.values()) == 200
    found = []
    for split in SPLITS:
        tokens = np.fromfile(output / f"{split}.bin", written.dtype)
        assert tokens[0] == tokens[-1] == 256
        texts = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode().split("\0")
        found += texts[1:-1]
        assert written.splits[split].bytes == sum(map(len, texts))
        # Line by line, so that it is the same one for every format.
        expected = [d for d in documents if token_parts.split_of_content(d.encode(), 0.1) == split]
        assert texts[1:-1] == expected
        assert len(expected) > 5
    assert sorted(found) == sorted(documents)
    assert sorted(_contents(output)) == ["eval.bin", "test.bin", "tokens.json", "train.bin"]


def test_equal_documents_are_in_the_same_split_of_different_files():
    splits = [token_parts.split_of_content(str(i).encode(), 0.1) for i in range(2000)]
    assert 150 < splits.count("eval") < 250
    assert 150 < splits.count("test") < 250
    few = [token_parts.split_of_content(str(i).encode(), 0.05) for i in range(2000)]
    assert all(b == "train" for a, b in zip(splits, few, strict=True) if a == "train")


def test_tokens_of_others_are_taken_as_they_are(tmp_path):
    tokens = [[256, i % 256, 3] if i % 2 else [i % 256] for i in range(100)]
    path = write_documents(tmp_path, "parquet", tokens, "ids")
    options = {"source": "parquet", "field": "ids", "held_out": 0.1}
    written = write_token_files(path, str(tmp_path / "tokens"), **options)
    content = np.fromfile(tmp_path / "tokens" / "train.bin", written.dtype)
    assert (content == 256).sum() == written.splits["train"].documents + 1
    made = load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=8)
    assert made.train.tokens_per_byte is None


def test_a_call_goes_on_with_the_parts_that_were_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "PART_BYTES", 500)
    path = write_documents(tmp_path, "jsonl", [f"{i} abc" for i in range(200)])
    options = {"source": "jsonl", "held_out": 0.1}
    write_token_files(path, str(tmp_path / "whole"), **options)
    output, written, seen = tmp_path / "tokens", [], []
    write_part = token_parts.write_part

    def fail_at(last):
        def write(part, number, *others):
            if number == last:
                (output / "parts" / f"{number:06d}-train.bin").write_bytes(b"half")
                raise KeyboardInterrupt
            written.append(number)
            write_part(part, number, *others)

        return write

    for last in (3, 7, -1):
        with monkeypatch.context() as patch:
            patch.setattr("manualpar.data.token_job.write_part", fail_at(last))
            job = token_job.make_job("jsonl", path, held_out=0.1)
            if last < 0:
                # A part as 0.3.0 has made it.
                part = output / "parts" / "000000.json"
                fields = json.loads(part.read_text())
                del fields["notes"]
                part.write_text(json.dumps(fields))
                token_job.run_job(job, output, report=seen.append)
            else:
                with pytest.raises(KeyboardInterrupt):
                    token_job.run_job(job, output)
    assert written == list(range(len(job.parts))), "made again"
    assert _contents(output) == _contents(tmp_path / "whole")
    assert seen[0].bytes > sum(part.size for part in job.parts[:7])
    assert seen[-1].bytes == job.size
    assert all(a.bytes <= b.bytes for a, b in itertools.pairwise(seen))


def test_parts_of_another_call_are_not_gone_on_with(tmp_path, monkeypatch):
    path = write_documents(tmp_path, "jsonl", [f"{i} abc" for i in range(200)])
    output = str(tmp_path / "tokens")
    with monkeypatch.context() as patch:
        patch.setattr(token_job, "_join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_token_files(path, output, source="jsonl", held_out=0.1)
    message = r"which holds an unfinished call with other options or other files, or the files have"
    with pytest.raises(ValueError, match=message):
        write_token_files(path, output, source="jsonl", held_out=0.2)
    with open(path, "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(ValueError, match=message):
        write_token_files(path, output, source="jsonl", held_out=0.1)


@pytest.mark.slow
def test_many_processes_make_what_one_makes_and_so_do_killed_ones(tmp_path):
    path = tmp_path / "large.jsonl"
    line = json.dumps({"text": "the quick brown fox " * 500})
    path.write_text(
        "".join(line[:-2] + f'{i}"}}\n' for i in range(8 * document_files.PART_BYTES // len(line)))
    )
    command = [sys.executable, "-m", "manualpar.data.tokenize", f"--input={path}"]
    command += ["--source=jsonl"]
    killed = subprocess.Popen([*command, f"--output={tmp_path / 'a'}", "--processes=2"])
    parts = tmp_path / "a" / "parts"
    deadline = time.monotonic() + 300
    while len(list(parts.glob("??????.json"))) < 2:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    left = {part.name: part.stat().st_mtime_ns for part in parts.glob("??????.json")}
    assert not (tmp_path / "a" / "tokens.json").exists()
    time.sleep(1)  # Its processes end with it.
    assert left == {part.name: part.stat().st_mtime_ns for part in parts.glob("??????.json")}
    for name, processes in (("a", 2), ("b", 1)):
        output = [f"--output={tmp_path / name}", f"--processes={processes}"]
        subprocess.run([*command, *output], check=True, capture_output=True)
    assert _contents(tmp_path / "a") == _contents(tmp_path / "b")
    with open(path, "a") as file:
        file.write("{\n")
    wrong = [*command, f"--output={tmp_path / 'c'}", "--processes=2"]
    ended = subprocess.run(wrong, capture_output=True, text=True)
    assert ended.returncode == 6
    assert ended.stderr.startswith(f"error: {path}, line ")
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_damaged_file_ends_the_command_with_a_sentence(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' * 3 + "{\n")
    arguments = [f"--input={path}", f"--output={tmp_path / 'tokens'}", "--source=jsonl"]
    assert main(["tokenize", *arguments]) == 6
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}, line 4: is not JSON")
    assert error.count("\n") == 1
