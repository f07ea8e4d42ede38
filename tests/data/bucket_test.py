"""Data in a bucket: what is read there is what the same files on a disk give."""

import json
import shutil

import numpy as np
import pytest

from manualpar.data import DamagedDataError, token_job
from manualpar.data.sources import load_dataset
from manualpar.data.token_job import make_parts
from manualpar.data.tokenize import main as tokenize
from manualpar.data.tokens import load_tokens
from manualpar.system.storage import BucketError
from manualpar.system.storage import bucket_path as requests
from tests.system.storage.s3_server import Proxy, upload

server = pytest.mark.slow


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    folder = tmp_path / "corpus"
    for number in range(12):
        path = folder / f"part-{number % 2}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number} lines of text\n" * (number + 3))
    (folder / ".hidden").write_text("not this")
    records = [{"text": f"record {number} " * 9} for number in range(300)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines)
    return folder


def sequences(dataset):
    return [
        split[index]
        for split in (dataset.train, dataset.eval, dataset.test)
        for index in range(len(split))
    ]


def assert_same_data(dataset, expected):
    assert dataset.fingerprint == expected.fingerprint
    found = sequences(dataset)
    assert len(found) > 2
    for one, other in zip(found, sequences(expected), strict=True):
        np.testing.assert_array_equal(one.inputs, other.inputs)
        np.testing.assert_array_equal(one.labels, other.labels)


def load(source, path, **options):
    return load_dataset(source, seed=0, path=str(path), sequence_length=32, **options)


@server
def test_token_files_are_made_in_a_bucket_and_an_interrupted_call_goes_on(
    bucket_folder, corpus, s3_port, use_s3, monkeypatch, capsys
):
    upload(corpus, bucket_folder / "text")
    flags = [f"--input={bucket_folder / 'text'}/**/*.txt"]
    local = corpus.parent / "tokens"
    assert tokenize(["tokenize", *flags, f"--output={local}"]) == 0
    expected = capsys.readouterr().out
    there = bucket_folder / "tokens"
    made = []
    monkeypatch.setattr(token_job, "make_parts", lambda *args: made.append(make_parts(*args)))
    monkeypatch.setattr(requests, "WAITS", (0.01,))
    for at in (1, 3, 4):  # Before each of these requests the server begins to refuse.
        with Proxy(s3_port, lambda *request, at=at: 403 if request[2] >= at else None) as proxy:
            use_s3(port=proxy.port)
            assert tokenize(["tokenize", *flags, f"--output={there}"]) == 2
            assert "access is refused" in capsys.readouterr().err
        use_s3()
        assert not (there / "tokens.json").is_file()
    assert tokenize(["tokenize", *flags, f"--output={there}"]) == 0
    assert len(made) == 1
    assert capsys.readouterr().out == expected
    assert set(there.names()) == {path.name for path in local.iterdir()}
    for path in local.iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes()
    assert not list((corpus.parent / "user_cache").rglob("*.bin"))
    assert tokenize(["tokenize", *flags, f"--output={there}"]) == 2
    assert "which already holds token files" in capsys.readouterr().err


@server
def test_text(bucket_folder, corpus):
    upload(corpus, bucket_folder)
    for pattern in ("/part-1", "/part-?/*2.txt", "/**/[13]*.txt", "/*", "/part-0/8.txt"):
        expected = load("text", f"{corpus}{pattern}")
        assert_same_data(load("text", f"{bucket_folder}{pattern}"), expected)
    with pytest.raises(ValueError, match="which stands for no file with any text in it"):
        load("text", f"{bucket_folder}/*.none")
    with pytest.raises(BucketError, match="s3://no-bucket/x: there is no such bucket"):
        load("text", "s3://no-bucket/x")


@server
def test_json_lines_and_tables(bucket_folder, corpus):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    table = pyarrow.table({"text": [f"row {number} " * 9 for number in range(200)]})
    parquet.write_table(table, corpus / "rows.parquet")
    upload(corpus, bucket_folder)
    for source, name in (("jsonl", "/*.jsonl"), ("parquet", "/rows.parquet")):
        assert_same_data(load(source, f"{bucket_folder}{name}"), load(source, f"{corpus}{name}"))
    (bucket_folder / "x.array_record").write_bytes(b"x")
    with pytest.raises(ValueError, match="ArrayRecord files cannot be read from a bucket"):
        load("arrayrecord", bucket_folder)
    (bucket_folder / "records.jsonl").write_bytes(b'{"text": 1}\n')
    with pytest.raises(DamagedDataError, match=r"s3://.*records.jsonl, line 1: has int in 'text'"):
        load("jsonl", f"{bucket_folder}/*.jsonl")


@server
def test_tokens_by_ranges_or_from_a_copy(bucket_folder, corpus, s3_port, use_s3, monkeypatch):
    tokens = corpus.parent / "tokens"
    assert tokenize(["tokenize", f"--input={corpus}/**/*.txt", f"--output={tokens}"]) == 0
    upload(tokens, bucket_folder)
    expected = load_tokens(str(tokens), sequence_length=16)
    asked = []
    with Proxy(s3_port, lambda method, path, number: asked.append((method, path))) as proxy:
        use_s3(port=proxy.port)
        dataset = load_tokens(str(bucket_folder), sequence_length=16)
        assert_same_data(dataset, expected)
        cache = corpus.parent / "cache"
        copied = load_tokens(str(bucket_folder), sequence_length=16, cache=str(cache))
        asked.clear()
        assert_same_data(copied, expected)
        assert not asked
        again = load_tokens(str(bucket_folder), sequence_length=16, cache=str(cache))
        assert not [path for method, path in asked if method == "GET" and "train.bin" in path]
        assert_same_data(again, expected)
        monkeypatch.setattr(requests, "WAITS", (0.01,))
        proxy.fault = lambda *request: 503
        with pytest.raises(DamagedDataError, match="the server answered 503, in each of 2 tries"):
            dataset.train[0]
    use_s3()
    (bucket_folder / "train.bin").write_bytes(b"12")
    with pytest.raises(DamagedDataError, match=r"train.bin changed after reading began; do not"):
        dataset.train[0]
    with pytest.raises(ValueError, match=r"whose train\.bin has 2 bytes, expected"):
        load_tokens(str(bucket_folder), sequence_length=16)
    with pytest.raises(ValueError, match=r"`cache` is 's3://bucket/c', expected a path"):
        load_tokens(str(bucket_folder), sequence_length=16, cache="s3://bucket/c")
    shutil.rmtree(cache)
    (bucket_folder / "tokens.json").delete()
    with pytest.raises(ValueError, match="expected a directory of token files"):
        load_tokens(str(bucket_folder), sequence_length=16, cache=str(cache))


@server
def test_a_tokenizer_file(bucket_folder, corpus):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        ["some lines of text"],
        tokenizers.trainers.BpeTrainer(
            special_tokens=["<s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(corpus.parent / "tokenizer.json"))
    upload(corpus, bucket_folder / "corpus")
    there = bucket_folder / "tokenizer.json"
    there.write_bytes((corpus.parent / "tokenizer.json").read_bytes())
    expected = load("text", corpus, tokenizer=str(corpus.parent / "tokenizer.json"))
    for path in (there, bucket_folder):
        dataset = load("text", bucket_folder / "corpus", tokenizer=str(path))
        assert_same_data(dataset, expected)
    with pytest.raises(ValueError, match=r"`tokenizer` is 's3://.*which is no file"):
        load("text", corpus, tokenizer=str(bucket_folder / "none.json"))
