"""Malformed inputs of commands, second part: files, folders, and other commands' arguments."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.malformed_cases import CONFIGS, Case, field_cases, flag_cases, fsdp_case, size_cases
from benchmarks.malformed_models import model_cases
from benchmarks.malformed_programs import program_cases


def make_cases(folder: Path) -> list[Case]:
    """Makes all cases of all parts; writes the files that they name into an empty folder."""
    makers: tuple[Callable[[Path], Iterator[Case]], ...] = (
        field_cases,
        size_cases,
        flag_cases,
        _config_file_cases,
        _text_cases,
        _tokenizer_cases,
        program_cases,
        _token_folder_cases,
        _workdir_cases,
        _other_command_cases,
        model_cases,
    )
    return [case for make in makers for case in make(folder)]


def _config_file_cases(folder: Path) -> Iterator[Case]:
    """Yields malformed files for `--config`."""
    texts: dict[str, str | bytes] = {
        "empty": "",
        "import": "import nothing_such\n",
        "divides": "1/0\n",
        "exits": "exit(0)\n",
        "raises": "def get_config():\n    raise RuntimeError('one\\n two')\n",
        "none": "def get_config():\n    return None\n",
        "needs": "def get_config(x):\n    return x\n",
        "dict": "def get_config():\n    return {'seed': 1}\n",
        "number": "get_config = 3\n",
        "recursion": "def get_config():\n    return get_config()\n",
        "syntax": "def get_config(:\n",
        "binary": b"\x00\xff\xfe\x80",
        "nul": b"x = 1\x00\n",
        "latin": b"x = '\xe9'\n",
        "deep": "x = " + "(" * 500 + ")" * 500,
        "missing": "from ml_collections import ConfigDict\nget_config = ConfigDict\n",
    }
    for change in (
        "config.extra = 3",
        "config.model = None",
        "config.model = 'classifier'",
        "config.parallel.mesh = None",
        "config.parallel.mesh = 3",
        "config.seed = 1 + 2j",
        "config.optimizer.learning_rate = lambda step: 1",
        "del config.seed",
        "import numpy; config.seed = numpy.int64(3)",
        "config['model']['a.b'] = 1",
    ):
        source = (CONFIGS / "fsdp.py").read_text()
        texts[f"change {change[:30]}"] = source.replace(
            "    return config.lock()", f"    {change}\n    return config.lock()"
        )
    for number, (name, text) in enumerate(texts.items()):
        path = folder / f"config_{number}.py"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        yield fsdp_case("config files", name, f"--config={path}")
    (folder / "config.txt").write_text("hello")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "fifo.py")
    os.symlink("loop.py", folder / "loop.py")
    for name in (
        "config.txt",
        "folder.py",
        "fifo.py",
        "loop.py",
        "nothing.py",
        "a" * 5000,
        "a\0b.py",
    ):
        yield fsdp_case("config files", name[:20], f"--config={folder / name}")


def _language(kind: str, name: str, *arguments: str, names: str) -> Case:
    """Makes a case that trains a small language model."""
    return fsdp_case(kind, name, *arguments, names=names, config="fsdp_lm")


def _text_cases(folder: Path) -> Iterator[Case]:
    """Yields wrong paths for text data."""
    (folder / "text").mkdir()
    (folder / "text" / "empty.txt").touch()
    (folder / "one.txt").write_text("x")
    os.mkfifo(folder / "fifo")
    paths = ["text", "text/empty.txt", "one.txt", "nothing.txt", "*.zzz", "[", "fifo", "loop.py"]
    for path in [
        *(str(folder / path) for path in paths),
        "/dev/zero",
        "a\0b",
        "a" * 5000,
        "~nobody/x",
    ]:
        yield _language("text", path[-20:], f"--config.data.path={path}", names="data.path")


def _tokenizer_cases(folder: Path) -> Iterator[Case]:
    """Yields malformed tokenizer files, with text to encode."""
    (folder / "good.txt").write_text("the quick brown fox\n" * 2000)
    model: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }

    def words(vocab: dict[str, int], unknown: str) -> str:
        return json.dumps(
            {**model, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": unknown}}
        )

    texts: dict[str, str | bytes] = {
        "garbage": b"\x00\xff\x80" * 100,
        "empty": "",
        "object": "{}",
        "list": "[]",
        "deep": "[" * 10**5,
        "no bos": words({"a": 0}, "a"),
        "empty vocabulary": words({}, "a"),
        "no unknown": words({"<s>": 0}, "[UNK]"),
        "huge": words({"<s>": 0, "a": 4 * 10**9}, "<s>"),
        "large": words({"<s>": 0, "a": 2**31 - 1}, "<s>"),
        "negative": words({"<s>": -1}, "<s>"),
        "version": json.dumps({**model, "version": 3}),
        "number": "7",
        "null": "null",
    }
    paths = ["folder.py", "nothing", "fifo", "loop.py"]
    for number, text in enumerate(texts.values()):
        paths.append(f"tokenizer_{number}.json")
        (folder / paths[-1]).write_bytes(text.encode() if isinstance(text, str) else text)
    data = f"--config.data.path={folder / 'good.txt'}"
    for name, path in zip([*paths[:4], *texts], paths, strict=True):
        tokenizer = f"--config.data.tokenizer={folder / path}"
        yield _language("tokenizers", name, data, tokenizer, names="data.tokenizer")
    yield _language(
        "tokenizers",
        "of a source of tokens",
        "--config.data.source=tokens",
        "--config.data.tokenizer=x",
        names="data.tokenizer",
    )


def _token_folder_cases(folder: Path) -> Iterator[Case]:
    """Yields folders of token files with a malformed description or malformed files."""
    part = {"tokens": 2000, "bytes": 1990, "documents": 9, "blake2b": "0" * 16}
    good: dict[str, Any] = {
        "version": 1,
        "dtype": "<u2",
        "vocab_size": 257,
        "bos_token": 256,
        "tokenizer": "",
    }
    texts: dict[str, str] = {
        "binary": "\x00\x01",
        "list": "[1]",
        "deep": "[" * 10**5,
        "empty": "",
        "null": "null",
    }
    changes: tuple[tuple[str, Any], ...] = (
        ("version", 99),
        ("version", None),
        ("dtype", "<f8"),
        ("dtype", 2),
        ("vocab_size", 10**9),
        ("vocab_size", "257"),
        ("bos_token", -1),
        ("bos_token", None),
        ("tokenizer", 5),
        ("tokenizer", "/etc/passwd"),
        ("tokenizer", "../../x"),
        ("tokenizer", "tokenizer.json"),
        ("splits", None),
        ("splits", []),
        ("splits", {}),
        ("more", 1),
    )
    for field, value in changes:
        splits = dict.fromkeys(("train", "eval", "test"), part)
        texts[f"{field}={value}"] = json.dumps({**good, "splits": splits, field: value})
    changes = (
        ("tokens", -5),
        ("tokens", 10**15),
        ("tokens", "2000"),
        ("tokens", 2000.0),
        ("tokens", 1),
        ("tokens", True),
        ("tokens", math.nan),
        ("bytes", None),
        ("bytes", -4),
        ("bytes", "many"),
        ("documents", None),
        ("documents", 0),
        ("blake2b", None),
        ("more", 1),
    )
    for field, value in changes:
        splits = {split: {**part, field: value} for split in ("train", "eval", "test")}
        texts[f"splits {field}={value}"] = json.dumps({**good, "splits": splits})
    files = ("short", "missing", "other vocabulary", "eval of another vocabulary", "a folder")
    right = json.dumps({**good, "splits": dict.fromkeys(("train", "eval", "test"), part)})
    for number, (name, text) in enumerate({**texts, **dict.fromkeys(files, right)}.items()):
        path = folder / f"tokens_{number}"
        path.mkdir()
        (path / "tokens.json").write_text(text)
        for split in ("train", "eval", "test"):
            tokens = np.full(2000 - (name == "short"), 65, "<u2")
            if name == "other vocabulary" or name.startswith(split):
                tokens += 300
            tokens.tofile(path / f"{split}.bin")
        if name in ("missing", "a folder"):
            (path / "test.bin").unlink()
        if name == "a folder":
            (path / "test.bin").mkdir()
        yield _language(
            "token folders",
            name,
            "--config.data.source=tokens",
            f"--config.data.path={path}",
            names=".bin has token 365" if "vocabulary" in name else "config.data.",
        )
    for name in ("good.txt", "nothing", "text", ""):
        where = str(folder / name) if name else ""
        yield _language(
            "token folders",
            name or "no path",
            "--config.data.source=tokens",
            f"--config.data.path={where}",
            names="data.path",
        )


def _workdir_cases(folder: Path) -> Iterator[Case]:
    """Yields values of `--workdir` that are not folders to which a run can write."""
    for path in (
        "/etc/passwd",
        "/etc/passwd/x",
        "/dev/null",
        f"{folder}/{'a' * 300}",
        f"{folder}/loop.py",
        f"{folder}/a\0b",
        f"{folder}/fifo",
    ):
        yield fsdp_case("workdirs", path[-20:], f"--workdir={path}", names="workdir")


def _other_command_cases(folder: Path) -> Iterator[Case]:
    """Yields wrong arguments of other commands, such as `plan` and `inspect`."""
    lm, fsdp = f"--config={CONFIGS / 'fsdp_lm.py'}", f"--config={CONFIGS / 'fsdp.py'}"
    (folder / "budget.toml").write_text("[")
    (folder / "ledger.json").write_text("[" * 10**5)
    for text in (
        "nope",
        "v5p",
        "v5e:0x4",
        "v5e:4",
        "v9:2x2",
        "v5e:4x4x4",
        "h100:0",
        "h100:-1",
        "h100:x",
        "99999999999xv5e:2x2",
        "v5e:99999999999x4",
        "h100:99999999999999",
        "²xv5e:4x4",
        ":",
        "\0",
    ):
        names = "devices along 'data'" if text.startswith("9999") else "topology"
        yield Case("plan", text, "experiments.plan", (lm, f"--topology={text}"), names)
    for argument in (
        "--compiler=gcc",
        "--vocab_size=-1",
        "--vocab_size=x",
        "--search=maybe",
        "--devices=8",
        "--workdir=/etc/passwd",
        "--topolgy=v5e:4x4",
        "foo",
        "--config.model.num_layers=1000000",
    ):
        names = {"foo": "foo", "--workdir=/etc/passwd": "--output=/etc/passwd"}.get(
            argument, argument.split("=")[0].lstrip("-")
        )
        yield Case("plan", argument, "experiments.plan", (lm, argument), names)
    for argument in (
        "--devices=0",
        "--devices=x",
        "--compile=maybe",
        "--memory=much",
        "--memory=-1GiB",
        "--against=/nope",
        f"--against={folder / 'ledger.json'}",
        "--budget=/nope",
        f"--budget={folder / 'budget.toml'}",
        "--write-budget",
        "--output=/etc/passwd",
        "--outptu=x",
        "foo",
        fsdp,
        "--devices=100000 --compile",
        "--config.seed=x",
    ):
        names = {"foo": "foo", fsdp: "--config"}.get(argument, argument.split("=")[0].lstrip("-"))
        yield Case(
            "inspect", argument[-40:], "experiments.inspect", (fsdp, *argument.split(" ")), names
        )
    compare = f"--config={CONFIGS / 'compare.py'}"
    for argument in (
        "--config.pairs=()",
        "--config.pairs=(('fsdp',),)",
        "--config.pairs=(('fdsp','manual'),)",
        "--config.pairs=3",
        "--config.compare.repetitions=0",
        "--config.compare.repetitions=1.5",
        "--config.model.dropout_rate=0.5",
        "--workdir=/etc/passwd",
        "--devices=100000",
        "--config.data.batch_size=4294967296",
        "--config.model.hidden_size=99999999999",
    ):
        names = argument.replace("workdir", "output").split("=")[0].lstrip("-")
        yield Case("compare", argument, "experiments.compare", (compare, argument), names)
    one = ["--processes=1", "--", "true"]
    for arguments, names in (
        ([], "--processes"),
        (["--processes=0", *one[1:]], "--processes"),
        (["--processes=x", *one[1:]], "--processes"),
        (["--processes=-1", *one[1:]], "--processes"),
        (["--processes=²", *one[1:]], "--processes"),
        (["--processes=100000", *one[1:]], "--processes"),
        (["--grace=x", *one], "--grace"),
        (["--grace=nan", *one], "--grace"),
        (["--grace=-1", *one], "--grace"),
        (["--processes=1"], "command"),
        (["--devices-per-process=0", *one], "--devices-per-process"),
        (["--nope=1", *one], "--nope"),
        (["--devices-per-process=1000000", *one], "--devices-per-process"),
        (["--processes=1", "--"], "command"),
    ):
        yield Case(
            "launch",
            " ".join(arguments),
            "manualpar.launch",
            tuple(arguments),
            names,
        )
    text, out = f"--input={folder / 'good.txt'}", f"--output={folder / 'new'}"
    for arguments, names in (
        ([], "--input"),
        ([text], "--output"),
        ([text, "--output=/etc/passwd"], "output"),
        ([text, "--output=/etc/passwd/x"], "output"),
        (["--input=/nope", out], "/nope"),
        ([text, out, "--tokenizer=/nope"], "tokenizer"),
        ([text, out, "--nope=1"], "--nope"),
        ([text, f"--output={folder / 'text'}\0"], "output"),
        ([text, out, "foo"], "foo"),
        ([text, out, f"--tokenizer={folder / 'tokenizer_4.json'}"], "tokenizer"),
    ):
        yield Case(
            "tokenize",
            " ".join(arguments)[-60:],
            "manualpar.data.tokenize",
            tuple(arguments),
            names,
        )
    (folder / "binary.md").write_bytes(b"\xff\xfe")
    for arguments, names in (
        ([], "PAGE"),
        (["/nope.md"], "/nope.md"),
        (["page.md", "--chekc"], "--chekc"),
        ([str(folder)], str(folder)),
        ([str(folder / "binary.md")], "binary.md"),
        (["a\0b"], "a"),
        ([str(folder / "fifo")], "fifo"),
    ):
        yield Case("docs.run", " ".join(arguments), "docs.run", tuple(arguments), names)
