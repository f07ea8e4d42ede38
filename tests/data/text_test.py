"""Files become the same stream in the same splits, wherever they lie and in whatever order."""

import os
import sysconfig

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from manualpar.data import text as text_module
from manualpar.data.dataset import SPLITS
from manualpar.data.sources import load_dataset
from manualpar.data.text import ByteStream, TextFile, find_files, load_text, split_files
from manualpar.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.trained_tokenizer import write_tokenizer
from tests.shown_bars import record_bars

BOS = 256


def _write(directory, documents: dict[str, bytes]) -> str:
    for name, content in documents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(directory)


def _named(names) -> list[TextFile]:
    files = [TextFile(None, name, 1, 0, 1) for name in names]
    return sorted(files, key=lambda file: (file.name_hash, file.name))


def _names(files) -> list[str]:
    return [file.name for file in files]


def _stream(documents: list[bytes]) -> np.ndarray:
    return np.array([token for data in documents for token in (BOS, *data)] + [BOS])


@hypothesis.given(
    contents=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6), data=st.data()
)
def test_any_part_of_the_stream_is_read_from_the_files(tmp_path_factory, contents, data):
    directory = tmp_path_factory.mktemp("files")
    files = []
    for index, content in enumerate(contents):
        path = directory / str(index)
        path.write_bytes(content)
        files.append(TextFile(path, str(index), len(content), 0, len(content)))
    stream, whole = ByteStream(files), _stream(contents)
    assert len(stream) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    np.testing.assert_array_equal(stream.read(start, stop), whole[start:stop])


def test_a_dataset_holds_every_byte_of_every_file_once(tmp_path):
    documents = {f"{i % 3}/{i}.txt": os.urandom(1 + 7 * i % 50) for i in range(40)}
    dataset = load_text(_write(tmp_path, documents), sequence_length=16, tokenizer=ByteTokenizer())
    found = []
    for name in SPLITS:
        split = getattr(dataset, name)
        tokens = split.stream.read(0, len(split.stream))
        parts = np.split(tokens, np.flatnonzero(tokens == BOS))[1:-1]
        assert len(parts) == split.num_documents > 0
        found += [bytes(part[1:].tolist()) for part in parts]
        assert split.num_bytes == sum(len(part) - 1 for part in parts)
    assert sorted(found) == sorted(documents.values())


def test_the_order_is_that_of_the_names_and_not_of_the_file_system(tmp_path, monkeypatch):
    documents = {f"d{i % 4}/{i}": b"x" for i in range(30)}
    here = find_files(_write(tmp_path / "here", documents))
    there = _write(tmp_path / "there", dict(reversed(documents.items())))
    walk = os.walk

    def backwards(root):
        for directory, subdirectories, names in walk(root):
            subdirectories.sort(reverse=True)
            yield directory, subdirectories, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert _names(find_files(there)) == _names(here)
    assert _names(here) != sorted(_names(here)), "not mixed"


@hypothesis.given(names=st.sets(st.text("abc/", min_size=1), min_size=3))
def test_every_file_is_in_one_split_and_no_split_is_empty(names):
    files = _named(names)
    parts = split_files(files)
    assert _names([*parts["eval"], *parts["test"], *parts["train"]]) == _names(files)
    assert all(parts.values())


def test_a_file_stays_in_its_split_when_others_come():
    few, many = (split_files(_named(map(str, range(n)))) for n in (1000, 3000))
    for split in SPLITS:
        assert set(_names(few[split])) <= set(_names(many[split]))
        assert _names(few[split]) == [f.name for f in many[split] if int(f.name) < 1000]
    assert 40 <= len(many["eval"]) <= 80
    assert 40 <= len(many["test"]) <= 80


def test_a_directory_leaves_out_hidden_and_empty_files_and_a_glob_chooses(tmp_path):
    documents = {"a.txt": b"1", "b/c.txt": b"2", "b/d.py": b"3", "b/e/f.txt": b"4"}
    hidden = {".git/config": b"5", "b/.h.txt": b"6", "empty.txt": b""}
    path = _write(tmp_path, documents | hidden)
    assert sorted(_names(find_files(path))) == sorted(documents)
    assert sorted(_names(find_files(f"{path}/**/*.txt"))) == ["a.txt", "b/c.txt", "b/e/f.txt"]
    assert sorted(_names(find_files(f"{path}/b/**/*"))) == ["c.txt", "d.py", "e/f.txt"]


def test_a_relative_path_and_a_home_give_the_same_names(tmp_path, monkeypatch):
    path = _write(tmp_path / "corpus", {f"{i}.txt": b"x" for i in range(5)})
    whole = find_files(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for same in ("corpus", "./corpus/", "corpus/*.txt", "~/corpus", f"{path}/*"):
        assert _names(find_files(same)) == _names(whole), same


def test_one_file_is_cut_at_the_ends_of_lines(tmp_path):
    lines = [b"line %d\n" % i * (1 + i % 3) for i in range(500)]
    _write(tmp_path, {"book.txt": b"".join(lines)})
    pieces = find_files(str(tmp_path / "book.txt"))
    assert 40 <= len(pieces) <= 50
    in_order = sorted(pieces, key=lambda piece: piece.start)
    contents = [piece.read(0, piece.size) for piece in in_order]
    assert b"".join(contents) == b"".join(lines)
    assert all(content.endswith(b"\n") for content in contents)
    dataset = load_text(str(tmp_path), sequence_length=8, tokenizer=ByteTokenizer())
    assert sum(getattr(dataset, split).num_bytes for split in SPLITS) == len(b"".join(lines))


@pytest.mark.parametrize("name", ["[1].txt", "a*.txt"])
def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path, name):
    _write(tmp_path, {name: b"x\n" * 200, "1.txt": b"y", "ab.txt": b"y"})
    assert {piece.path.name for piece in find_files(str(tmp_path / name))} == {name}


def test_a_tokenizer_file_makes_the_tokens(tmp_path, monkeypatch):
    bars = record_bars(monkeypatch, text_module)
    documents = {f"{i}.py": b"def f(x):\n    return %d\n" % i for i in range(200)}
    path = _write(tmp_path / "corpus", documents)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    dataset = load_text(path, sequence_length=32, tokenizer=tokenizer)
    total = sum(map(len, documents.values()))
    ((work, size, shown),) = bars
    assert (work, size, shown[-1]) == ("tokenizing", total, total)
    load_text(path, sequence_length=32, tokenizer=ByteTokenizer())
    assert len(bars) == 1, "bytes need not be tokenized"
    bos = dataset.tokenizer.bos_token
    for name, files in split_files(find_files(path)).items():
        split = getattr(dataset, name)
        tokens = split.stream.read(0, len(split.stream))
        assert tokens[-1] == bos
        parts = np.split(tokens, np.flatnonzero(tokens == bos))[1:-1]
        texts = [tokenizer.decode(part[1:]) for part in parts]
        assert texts == [documents[file.name].decode() for file in files]
        assert split.tokens_per_byte < 1


def test_the_fingerprint_tells_corpora_and_settings_apart(tmp_path):
    documents = {f"{i}": b"x" * 9 for i in range(9)}
    path = _write(tmp_path / "corpus", documents)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")

    def fingerprint(**changes) -> str:
        options = {"path": path, "sequence_length": 8} | changes
        return load_dataset("text", seed=0, **options).fingerprint

    elsewhere = _write(tmp_path / "copy", documents)
    assert fingerprint() == fingerprint(path=elsewhere)
    _write(tmp_path / "copy", {"8": b"x"})
    prints = [
        fingerprint(),
        fingerprint(path=elsewhere),
        fingerprint(sequence_length=9),
        fingerprint(tokenizer=tokenizer),
    ]
    assert len(set(prints)) == len(prints)


def test_the_default_is_python_s_own_standard_library():
    files = find_files("")
    names = set(_names(files))
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert sum(file.size for file in files) > 8_000_000
    dataset = load_dataset("text", seed=0, sequence_length=256)
    root = sysconfig.get_path("stdlib")
    text = dataset.tokenizer.decode(dataset.test[0].inputs)
    first = split_files(files)["test"][0]
    with open(os.path.join(root, first.name), encoding="utf-8") as file:
        assert file.read().startswith(text[:200])
