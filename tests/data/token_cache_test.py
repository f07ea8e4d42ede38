"""Files of documents are made into tokens once, and what the cache holds is never stale."""

import os
import pathlib

import chex
import pytest

from manualpar.data import sources as token_cache
from manualpar.data import token_job
from manualpar.data.sources import cache_folder, load_dataset
from manualpar.data.tokenize import write_token_files
from tests.data.documents import write_documents
from tests.data.trained_tokenizer import write_tokenizer
from tests.shown_bars import record_bars

DOCUMENTS = [f"{i} " + "a b\n" * (i % 9) for i in range(100)]


def _load(path, cache, source="jsonl", **options):
    options = {"held_out": 0.1, "sequence_length": 16, "cache": str(cache), **options}
    return load_dataset(source, seed=0, path=path, **options)


@pytest.mark.parametrize("source", ["jsonl", "parquet", "arrayrecord"])
def test_a_source_has_the_sequences_of_its_token_files(tmp_path, source):
    path = write_documents(tmp_path, source, DOCUMENTS)
    tokenizer = write_tokenizer(tmp_path / "t.json")
    dataset = _load(path, tmp_path / "cache", source, tokenizer=tokenizer)
    options = {"source": source, "tokenizer": tokenizer, "held_out": 0.1}
    write_token_files(path, str(tmp_path / "tokens"), **options)
    made = load_dataset("tokens", seed=0, path=str(tmp_path / "tokens"), sequence_length=16)
    assert made.fingerprint == dataset.fingerprint
    for index in range(len(made.train)):
        chex.assert_trees_all_equal(dataset.train[index], made.train[index])
    assert dataset.eval.tokens_per_byte == made.eval.tokens_per_byte > 0


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    path, cache, calls = write_documents(tmp_path, "jsonl", DOCUMENTS), tmp_path / "cache", []
    run_job = token_cache.run_job

    def counted(*arguments, **options):
        calls.append(arguments)
        return run_job(*arguments, **options)

    monkeypatch.setattr(token_cache, "run_job", counted)
    bars = record_bars(monkeypatch, token_job)
    first = _load(path, cache)
    ((work, total, shown),) = bars
    assert (work, total) == ("tokenizing", os.path.getsize(path))
    assert shown[-1] == total
    assert _load(path, cache, sequence_length=8).fingerprint != first.fingerprint
    assert len(calls) == 1
    content = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(content.replace(b"a b", b"b a", 1))
    os.utime(path, ns=(1, 1))
    assert _load(path, cache).fingerprint != first.fingerprint
    pathlib.Path(path).write_bytes(content)
    moved = tmp_path / "moved"
    moved.mkdir()
    os.rename(path, there := moved / "documents.jsonl")
    assert _load(str(there), cache).fingerprint == first.fingerprint
    assert _load(str(there), cache, held_out=0.2).fingerprint != first.fingerprint
    assert len(calls) == 4


def test_a_damaged_cache_is_made_again(tmp_path):
    path, cache = write_documents(tmp_path, "jsonl", DOCUMENTS), tmp_path / "cache"
    first = _load(path, cache)
    (train,) = (cache / "tokens").glob("*/train.bin")
    train.write_bytes(train.read_bytes()[:-2])
    again = _load(path, cache)
    assert again.fingerprint == first.fingerprint
    chex.assert_trees_all_equal(again.train[0], first.train[0])


def test_the_cache_is_in_the_users_folder_unless_the_config_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "manualpar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("") == pathlib.Path.home() / ".cache" / "manualpar"
    assert cache_folder("~/x") == pathlib.Path.home() / "x"


def test_what_cannot_be_kept_is_a_mistake_in_the_config(tmp_path, monkeypatch):
    path = write_documents(tmp_path, "jsonl", DOCUMENTS)
    monkeypatch.setattr(token_cache, "MOST_BYTES", 100)
    with pytest.raises(
        ValueError, match=r"make token files once with `python -m manualpar\.data\.tokeni"
    ):
        _load(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
