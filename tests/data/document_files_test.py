"""Files of many documents give each document once in any parts, and what is wrong has a place."""

import gzip
import itertools
import json

import numpy as np
import pyarrow
import pytest

from manualpar.data import document_files, load_dataset, load_tokenizer
from manualpar.data.dataset import SPLITS, DamagedDataError
from manualpar.data.document_files import SUFFIXES, Rows, divide, find_document_files
from manualpar.data.tokenize import write_token_files
from manualpar.data.tokenizer import frame_document
from tests.data.chats import write_chat_tokenizer
from tests.data.documents import DOCUMENTS, write_documents


def _read(path, source, field="text"):
    parts = divide(source, find_document_files(path, source), field)
    return parts, [x for part in parts for _, x in Rows(part, "error").documents()]


@pytest.mark.parametrize("source", SUFFIXES)
@pytest.mark.parametrize("part_bytes", [1, 100, 2**25])
def test_every_document_is_in_one_part(tmp_path, monkeypatch, source, part_bytes):
    monkeypatch.setattr(document_files, "PART_BYTES", part_bytes)
    parts, documents = _read(write_documents(tmp_path, source), source)
    assert [document.decode() for document in documents] == DOCUMENTS
    assert (len(parts) == 1) == (part_bytes > 100)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


@pytest.mark.parametrize("source", SUFFIXES)
def test_documents_may_be_tokens_already(tmp_path, source):
    tokens = [[1, 2, 3], [], [65535, 0]]
    path = write_documents(tmp_path, source, tokens, "ids")
    _, documents = _read(path, source, "<u2" if source == "arrayrecord" else "ids")
    assert [document.tolist() for document in documents] == [tokens[0], tokens[2]]


def test_a_directory_is_searched_for_files_of_the_source(tmp_path):
    for name in ("b/x.jsonl", "a.ndjson", ".hidden.jsonl", "notes.txt", "empty.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else '{"text": "a"}\n')
    found = find_document_files(str(tmp_path), "jsonl")
    assert sorted(file.name for file in found) == ["a.ndjson", "b/x.jsonl"]
    assert [file.name for file in find_document_files(f"{tmp_path}/*.txt", "jsonl")] == [
        "notes.txt"
    ]
    with pytest.raises(ValueError, match=r"`path` is '.*', .*directory with \.parquet"):
        find_document_files(str(tmp_path), "parquet")


def _cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _garble(path):
    content = bytearray(path.read_bytes())
    content[100:1100] = b"\xff" * 1000
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _garble])
@pytest.mark.parametrize("source", ["parquet", "arrayrecord"])
def test_a_damaged_file_is_an_error_and_no_text(tmp_path, source, damage):
    rng = np.random.default_rng(0)
    documents = [bytes(rng.integers(32, 127, 500, np.uint8)).decode() for _ in range(300)]
    path = write_documents(tmp_path, source, documents)
    damage(tmp_path / path)
    read, message = [], ""
    try:
        _, read = _read(path, source)
    except DamagedDataError as error:
        message = str(error)
    if message or source == "parquet":
        assert message.startswith(path)
        assert "\n" not in message
    else:  # ArrayRecord reads on where nothing but unused space is damaged.
        assert [document.decode() for document in read] == documents


ARRAY = json.dumps([{"text": document, "more": ['"', "\\", "]}"]} for document in DOCUMENTS])
LINES = "".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS)
FORMS = {
    "array": ARRAY.encode(),
    "pretty array": json.dumps(json.loads(ARRAY), indent=1, ensure_ascii=False).encode(),
    "byte order mark": b"\xef\xbb\xbf" + LINES.encode(),
    "mark and array": b"\xef\xbb\xbf \n" + ARRAY.encode(),
    "gzip": gzip.compress(LINES.encode()),
    "gzip of an array": gzip.compress(ARRAY.encode()),
    "two gzips": b"".join(gzip.compress(x) for x in (LINES[:999].encode(), LINES[999:].encode())),
    "zstd": pyarrow.compress(LINES.encode(), "zstd", asbytes=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_json_is_read_in_the_forms_in_which_people_have_it(tmp_path, monkeypatch, form):
    """In small parts and small pieces, so that every boundary is somewhere."""
    monkeypatch.setattr(document_files, "PART_BYTES", 100)
    monkeypatch.setattr(document_files, "PIECE_BYTES", 7)
    (tmp_path / "rows.json").write_bytes(FORMS[form])
    parts, documents = _read(str(tmp_path), "jsonl")
    assert [document.decode() for document in documents] == DOCUMENTS
    assert (len(parts) == 1) == (form != "byte order mark")


MANY = gzip.compress(b"\n" * 10**7)
DAMAGED = {
    "cut off": (FORMS["gzip"][:-20], "rows.json is damaged or cut off"),
    "zstd cut off": (FORMS["zstd"][:-20], "rows.json is damaged or cut off"),
    "bomb": (MANY, r"more than 2 times as many bytes"),
    "open array": (ARRAY[:-1].encode(), "is cut off before the end of its array"),
    "text after": (ARRAY.encode() + b"1", "has text after its array"),
    "no objects": (b'[{"text": "a"},\n{"text": "b"},\n1]', "line 3: is not a JSON object"),
    "in gzip": (gzip.compress(b'{"text": "a"}\n\n{"text": 1}'), "line 3: has int in 'text'"),
    "UTF-16": (LINES.encode("utf-16"), "is UTF-16, expected UTF-8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_json_ends_with_a_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setattr(document_files, "MOST_TIMES", 2 if name == "bomb" else 1100)
    monkeypatch.setattr(document_files, "MAX_BYTES", 10**6)
    content, words = DAMAGED[name]
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(DamagedDataError, match=words):
        _read(str(tmp_path), "jsonl")


def test_bad_rows_are_skipped_on_request_and_counted(tmp_path):
    rows = [json.dumps({"text": f"Row {i}"}) for i in range(90)]
    rows[20:20] = ["{", '{"text": 1}', '{"other": "a"}', '{"text": [1, 999]}']
    path = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    options = {"seed": 0, "sequence_length": 8, "held_out": 0.2, "cache": str(tmp_path / "cache")}
    with pytest.raises(DamagedDataError, match=r"rows\.jsonl, line 21: is not JSON"):
        load_dataset("jsonl", path=path, **options)
    for _ in range(2):  # Also of tokens that are in the cache.
        with pytest.warns(
            UserWarning, match=r"^.*rows\.jsonl: skipped 4 bad rows: .*line 23: .* \(and 1"
        ):
            dataset = load_dataset("jsonl", path=path, bad_rows="skip", **options)
    assert sum(getattr(dataset, split).num_documents for split in SPLITS) == 90
    (tmp_path / "rows.jsonl").write_text("{\n" * 2000)
    with pytest.raises(DamagedDataError, match=r"the first 1000 rows are all bad"):
        load_dataset("jsonl", path=path, bad_rows="skip", **options)


SPELT = [f"<|im_start|>user\nsay {i}<|im_end|>\n" for i in range(40)]
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def _tokenizer_of_texts(path, **config):
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    return write_chat_tokenizer(path, special=SPECIAL, **config)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "tokens"])
def test_special_tokens_in_texts_are_counted_and_read_on_request(tmp_path, source):
    transformers = pytest.importorskip("transformers")
    named = _tokenizer_of_texts(tmp_path / "t")
    if source == "text":
        path = str(tmp_path / "texts")
        (tmp_path / "texts").mkdir()
        for number, text in enumerate(SPELT):
            (tmp_path / "texts" / f"{number}.txt").write_text(text)
    else:
        path = write_documents(tmp_path, "parquet" if source == "parquet" else "jsonl", SPELT)
    options = {"seed": 0, "sequence_length": 64, "held_out": 0.2, "cache": str(tmp_path / "cache")}

    def load(**more):
        if source == "tokens":
            to = str(tmp_path / f"made {len(more)}")
            given = {"source": "jsonl", "tokenizer": named, "held_out": 0.2, **more}
            write_token_files(path, to, **given)
            return load_dataset("tokens", path=to, seed=0, sequence_length=64)
        return load_dataset(source, path=path, tokenizer=named, **options, **more)

    with pytest.warns(UserWarning, match=r"special tokens 80 times \('<\|im_start\|>' 40 times"):
        plain = load()
    read = load(parse_special=True)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(named)
    bos, end = theirs.bos_token_id, theirs.eos_token_id
    streams = []
    for dataset in (plain, read):
        stream = dataset.train.stream.read(0, len(dataset.train.stream)).tolist()
        starts = [i for i, token in enumerate(stream) if token == bos]
        documents = [stream[a + 1 : b] for a, b in itertools.pairwise(starts)]
        assert all(document[-1] == end for document in documents)
        streams.append(documents)
    wanted = {tuple(theirs(text, add_special_tokens=False).input_ids) for text in SPELT}
    assert {tuple(document[:-1]) for document in streams[1]} <= wanted
    assert not any({2, 3} & {*document} for document in streams[0])
    assert read.tokenizer.encode("<|im_end|>").tolist() == [
        3
    ]  # So a prompt is read in this way too.


def test_a_document_has_its_first_and_last_token_once(tmp_path):
    """Whether the texts, or lists of tokens, have them or not."""
    same = {"bos_token": "<s>", "eos_token": "<s>"}
    for config, body, framed in (
        ({}, "<s>a</s>", [0, "a", 1]),
        ({}, "a</s><s>a", [0, "a", 1, 0, "a", 1]),
        (same, "a<s>", [0, "a"]),
        (same, "a<s>a", [0, "a", 0, "a"]),
    ):
        directory = _tokenizer_of_texts(tmp_path / "t", **config)
        tokenizer = load_tokenizer(directory, parse_special=True)
        a = int(tokenizer.encode("a")[0])
        expected = [a if x == "a" else x for x in framed]
        assert frame_document(tokenizer, tokenizer.encode(body)).tolist() == expected
    # A chat whose turns begin with BOS would not see what is before.
    tokenizer = load_tokenizer(
        _tokenizer_of_texts(tmp_path / "t", bos_token="<|im_start|>"), parse_special=True
    )
    with pytest.raises(ValueError, match=r"spells the token 2, which begins a document"):
        frame_document(tokenizer, tokenizer.encode("<|im_start|>a\n<|im_start|>b"))
