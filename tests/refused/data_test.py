"""Mistakes in data: sources, mixtures, files of documents, and token files."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from manualpar.data import document_files
from manualpar.data.dataset import DamagedDataError
from manualpar.data.document_files import Rows, divide, find_document_files
from manualpar.data.sources import load_dataset
from manualpar.data.text import ByteStream, find_files
from manualpar.data.tokenize import write_token_files
from manualpar.system.storage import untrusted
from tests.data.documents import DOCUMENTS, write_documents
from tests.refused.sentences import cases
from tests.refused.table import check_refused, rows

HERE = Path()
SHORT = {"sequence_length": 8, "held_out": 0.1, "cache": "cache"}


def load(options):
    load_dataset(seed=0, **options)


def find_unreadable(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path.name != name)
        (HERE / name).write_bytes(b"x")
        find_files(".")


def load_one_line(line):
    (HERE / "a.txt").write_bytes(line)
    load({"source": "text", "path": ".", "sequence_length": 8})


def read_changed(content):
    (HERE / "a").write_bytes(b"ten bytes.")
    (HERE / "b").write_bytes(b"x")
    stream = ByteStream(find_files("."))
    (HERE / "a").write_bytes(content)
    stream.read(0, len(stream))


def read(path, source, field="text"):
    for part in divide(source, find_document_files(str(path), source), field):
        list(Rows(part, "error").documents())


def read_line(line):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_files, "PART_BYTES", 50)
        (HERE / "x.jsonl").write_bytes(b'{"text": "fine"}\n\n' * 20 + line + b"\n")
        read("x.jsonl", "jsonl")


def read_long_line(line):
    with pytest.MonkeyPatch.context() as patch:
        for module in (document_files, untrusted):
            patch.setattr(module, "MAX_BYTES", 1000)
        (HERE / "x.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
        read("x.jsonl", "jsonl")


def read_table(columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), "x.parquet")
    read("x.parquet", "parquet")


def read_record(arguments):
    field, record = arguments
    writer = ArrayRecordWriter("x.array_record", "group_size:1")
    for content in (b"abcd", record):
        writer.write(content)
    writer.close()
    read("x.array_record", "arrayrecord", field)


def read_changed_documents(line):
    path = write_documents(HERE, "jsonl")
    parts = divide("jsonl", find_document_files(path, "jsonl"), "text")
    with open(path, "a") as file:
        file.write(line)
    list(Rows(parts[0], "error").documents())


def cache_in_a_file(name):
    (HERE / name).write_text("")
    path = write_documents(HERE, "jsonl", DOCUMENTS)
    load({"source": "jsonl", "path": path, "sequence_length": 16, "held_out": 0.1, "cache": name})


def load_damaged(damage):
    """Writes token files, damages them with `damage`, and reads an example from them."""
    (HERE / "corpus").mkdir()
    for index in range(30):
        (HERE / "corpus" / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n")
    write_token_files("corpus", "tokens")
    damage(HERE / "tokens")
    _ = load_dataset("tokens", seed=0, path="tokens", sequence_length=4).eval[0]


def truncate(directory):
    path = directory / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])


def garble(directory):
    (directory / "eval.bin").write_bytes(b"\xff" * (directory / "eval.bin").stat().st_size)


def text(content):
    return lambda directory: (directory / "tokens.json").write_text(content)


def fields(**changes):
    return change(lambda content: content.update(changes))


def train(**changes):
    return change(lambda content: content["splits"]["train"].update(changes))


def change(update):
    def damage(directory):
        content = json.loads((directory / "tokens.json").read_text())
        update(content)
        (directory / "tokens.json").write_text(json.dumps(content))

    return damage


def hold_out_of(documents):
    path = write_documents(HERE, "jsonl", documents)
    write_token_files(path, "tokens", source="jsonl")


def write_tokens_of_others(documents):
    path = write_documents(HERE, "parquet", documents, "ids")
    write_token_files(path, "tokens", source="parquet", field="ids", held_out=0.1)


SOURCES = [
    *rows(
        "source",
        load,
        *cases(
            (
                {"source": "mnist"},
                "source` is 'mnist', expected one of digits, synthetic, text, tokens",
            ),
            (
                {"source": "text"},
                "sequence_length` is 0, expected at least 1 for the source 'text'",
            ),
            (
                {"source": "tokens"},
                "sequence_length` is 0, expected at least 1 for the source 'tokens'",
            ),
            (
                {"source": "chat", "sequence_length": 1, "long_examples": "dropped"},
                "long_examples` is 'dropped', expected one of error, cut, drop",
            ),
            (
                {"source": "preferences", "sequence_length": 1, "bad_rows": "skipped"},
                "bad_rows` is 'skipped', expected one of error, skip",
            ),
            (
                {"source": "tokens", "sequence_length": 1, "tokenizer": "t.json"},
                "tokenizer` is 't.json', expected '' for the source 'tokens'",
            ),
            ({"source": "text", "sequence_length": 1, "path": "/no/such"}, "path` is '/no/such'"),
            ({"source": "tokens", "sequence_length": 1, "path": "/no/such"}, "path` is '/no/such'"),
            (
                {"source": "text", "sequence_length": 1, "tokenizer": "/no/such"},
                "tokenizer` is '/no/such'",
            ),
            begins=r"^`",
        ),
        *(
            (
                {"source": source, "path": "s3://AKIAUSER:hush@bucket/x", "sequence_length": 32},
                "^(?!.*hush).*credentials come from the environment",
            )
            for source in ("text", "tokens", "jsonl")
        ),
    ),
    *rows(
        "text",
        find_files,
        *(
            (path, r"`path` is .* stands for no file with any")
            for path in ("/no/such", ".", "*.txt")
        ),
    ),
    *rows("text", find_unreadable, ("3.txt", r"`path` is .*3\.txt cannot be read")),
    *rows(
        "text",
        load_one_line,
        (b"a single line", r"`path` is .* too few lines to hold some out"),
    ),
    *rows(
        "text",
        read_changed,
        *(
            (content, f"a had 10 bytes when the run began and has {len(content)}")
            for content in (b"longer than before", b"short", b"")
        ),
    ),
    *rows(
        "mixture",
        lambda mixture: load({"source": "mixture", "mixture": mixture, **SHORT}),
        ((), r"`mixture` is \(\), expected an entry"),
        (("jsonl x",), r"the entry 'jsonl x', whose source is 'x', none of text, tokens, jsonl"),
        (("0.5 mixture x",), r"whose source is 'mixture', none of"),
        (("half jsonl x",), r"whose weight 'half' is no number; expected 'WEIGHT SOURCE PATH'"),
        (("1/0 jsonl x",), r"whose weight '1/0' is no number"),
        (("nan jsonl x",), r"whose weight 'nan' is no number"),
        (("-1 jsonl x",), r"whose weight -1 is not above 0"),
        (("0 jsonl x",), r"whose weight 0 is not above 0"),
        (("",), r"whose source is '', none of"),
        (("1 text", "1e-9 jsonl x"), r"the entry 'jsonl x', whose weight is less than 1/65536"),
    ),
    *rows("cache", cache_in_a_file, ("file", r"^`cache` is 'file', and .* cannot be")),
]
DOCUMENT_FILES = [
    *rows(
        "JSON lines",
        read_line,
        *cases(
            (b'{"text": "a"', r"is not JSON \("),
            (b"[1]", r"is not a JSON object \(list\)"),
            (b'{"text": "\xff"}', r"is not UTF-8 \(byte 10\)"),
            (b'{"body": "a", "b": 1}', r"has no field 'text', only 'body', 'b'"),
            (b'{"text": null}', r"has null in 'text', expected a text or a list of tokens"),
            (b'{"text": 3}', r"has int in 'text', expected"),
            (b'{"text": [1, 2.0]}', r"has a list that is not all integers in 'text', expected"),
            (b'{"text": [1, true]}', r"has a list that is not all integers in 'text', expected"),
            (b'{"text": [1, -2]}', r"has a token in 'text' below 0, or above"),
            (b'{"text": [4294967296]}', r"has a token in 'text' below 0, or above"),
            (b'{"text": "\\ud800"}', r"has half of a surrogate pair in 'text' at character 0"),
            (b'{"text": ' + b"[" * 10**5 + b"}", r"(is nested deeper than|is not JSON)"),
            (b'{"text": NaN}', r"is not JSON \(NaN"),
            begins=r"^x\.jsonl, line 41: ",
            error=DamagedDataError,
        ),
    ),
    *rows(
        "a line without an end",
        read_long_line,
        ('{"text": "' + "b" * 5000 + '"}', DamagedDataError, "line 2: has more than 1,000 bytes"),
    ),
    *rows(
        "parquet",
        read_table,
        *cases(
            (
                {"body": ["a"]},
                r"has 0 columns 'text', expected one; it has 'body'\. Name the column",
            ),
            ({"text": [1.5]}, r"has the type double in its column 'text', expected texts or lists"),
            ({"text": [[1.5]]}, r"has the type list<.*double> in its column"),
            ({"text": ["a", None]}, r"row 2: has null in 'text', expected a text"),
            ({"text": [[1], [2, None]]}, r"row 2: has a list that is not all integers in 'text'"),
            begins=r"^x\.parquet,? ",
            error=DamagedDataError,
        ),
    ),
    *rows(
        "ArrayRecord",
        read_record,
        *cases(
            (("text", b"\xff"), r"record 2: is not UTF-8 \(byte 0\)"),
            (("<u4", b"abcde"), r"record 2: has 5 bytes, expected tokens of type <u4"),
            (("<i4", b"\xff" * 4), r"record 2: has a token below 0"),
            begins=r"^x\.array_record, ",
            error=DamagedDataError,
        ),
        (("body", b"a"), r"^`field` is 'body', expected 'text'"),
    ),
    *rows(
        "documents",
        read_changed_documents,
        ('{"text": "more"}\n', DamagedDataError, "has changed since it was found"),
    ),
]
TOKENS = [
    *rows(
        "token files",
        load_damaged,
        *cases(
            (truncate, r"whose train\.bin has \d+ bytes, expected \d+ for the \d+ tokens"),
            (lambda directory: (directory / "test.bin").unlink(), r"which lacks test\.bin"),
            (text("{"), r"tokens\.json is not JSON"),
            (text("[" * 10**5), r"tokens\.json is nested deeper than"),
            (fields(version=2), r"tokens\.json has the version 2, expected 1"),
            (fields(version=[1]), r"has the version \[1\], expected 1"),
            (fields(splits={}), r"has splits\.train=None, expected an object"),
            (fields(splits=3), r"has splits=3, expected an object"),
            (fields(dtype="<f4"), r"has dtype='<f4', expected one of"),
            (fields(tokenizer=5), r"has tokenizer=5, expected a string"),
            (fields(tokenizer="../x.json"), r"has tokenizer='../x.json', expected one of"),
            (fields(vocab_size=True), r"has vocab_size=True, expected an integer"),
            (fields(color=1), r"has the unknown field color"),
            (train(tokens=1), r"has splits\.train\.tokens=1, expected at least 2"),
            (train(tokens=20.0), r"has splits\.train\.tokens=20\.0, expected an integer"),
            (train(bytes=-1), r"has splits\.train\.bytes=-1, expected at least 0"),
            (train(documents=-1), r"has splits\.train\.documents=-1, expected at least 1"),
            (train(blake2b=None), r"has splits\.train\.blake2b=None, expected a string"),
            (fields(vocab_size=300), r"byte tokenizer has 257 .* expected 300 tokens and BOS 256"),
            begins=r"^`path`.*",
        ),
        (garble, r"^tokens/eval\.bin has token 65535 .* less than the vocabulary's 257"),
    ),
    *rows(
        "held_out",
        hold_out_of,
        (["only one"] * 5, r"^`held_out` is 0\.02, which leaves none of"),
    ),
    *rows(
        "tokens of others",
        write_tokens_of_others,
        ([[257]], "has the token 257, expected tokens below 257, the vocab"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), [*SOURCES, *DOCUMENT_FILES, *TOKENS])
def test_refused(call, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(call, error, words)
