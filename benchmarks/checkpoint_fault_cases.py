"""Changes to a run's folder, and whether the run must then resume; see `checkpoint_faults`."""

import functools
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.training.checkpoints import manifest
from manualpar.training.monitoring.run_files import HASHES
from manualpar.training.workdir import FOLDER

STEPS = (20, 40)  # The steps with a checkpoint.
GOES_ON, REFUSED, EITHER = "goes on", "is refused", "goes on or is refused"
DEEP = b"[" * 200_000
NO_CHANGES: Mapping[str, Any] = {}

Damage = Callable[[Path], object]


class Case(NamedTuple):
    """A change to a run's folder.

    Attributes:
      kind: The kind of change, for example "file of a checkpoint"; results are counted by kind.
      name: The change in words.
      damage: Makes the change in a folder.
      expected: `GOES_ON`, `REFUSED` or `EITHER`.
      step: The step of the checkpoint from which the run goes on.
      changes: Config fields that are changed before the run is resumed.
    """

    kind: str
    name: str
    damage: Damage
    expected: str
    step: int = STEPS[-1]
    changes: Mapping[str, Any] = NO_CHANGES


def flip(path: Path, *, part: float = 0.5) -> None:
    """Flips a bit of a file, in the byte at the fraction `part` of its length."""
    data = bytearray(path.read_bytes())
    data[int(part * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def put(content: bytes | None, path: Path) -> None:
    """Removes the file or folder at a path; writes a file there, unless `content` is `None`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def others(outside: Path) -> dict[str, Callable[[Path], None]]:
    """Returns functions that replace the file at a path by a folder, a FIFO, a socket or a link."""

    def link(path: Path) -> None:
        target = outside / "copy"
        if path.is_dir():
            shutil.copytree(path, target)
        elif path.exists():
            shutil.copy(path, target)
        else:
            target.write_bytes(b"")
        put(None, path)
        path.symlink_to(target)

    def then(make: Callable[[Path], object]) -> Callable[[Path], None]:
        def replace(path: Path) -> None:
            put(None, path)
            make(path)

        return replace

    return {
        "a folder": then(Path.mkdir),
        "a FIFO": then(os.mkfifo),
        "a socket": then(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
        "a link to a copy elsewhere": link,
        "a link to nothing": then(lambda path: path.symlink_to("nothing")),
        "a link to itself": then(lambda path: path.symlink_to(path.name)),
        "a link to a device": then(lambda path: path.symlink_to("/dev/zero")),
    }


def damages() -> dict[str, Callable[[Path], object]]:
    """Returns functions that change the content of the file at a path, or remove the file."""
    return {
        "a bit flipped": flip,
        "the first bit flipped": functools.partial(flip, part=0.0),
        "the last bit flipped": functools.partial(flip, part=1.0),
        "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
        "empty": lambda path: os.truncate(path, 0),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
        "gone": functools.partial(put, None),
    }


def at(name: str, act: Callable[[Path], object]) -> Damage:
    """Returns a function that applies `act` to the file `name` of a run's folder."""
    return lambda workdir: act(workdir / name)


NEWEST = f"{FOLDER}/{STEPS[-1]}"


def cases(workdir: Path, outside: Path) -> Iterator[Case]:
    """Yields all cases.

    Args:
      workdir: The folder of the undamaged run; there are cases for each file in it.
      outside: The folder outside of the run that links point to.
    """
    yield Case("nothing", "nothing", lambda workdir: None, GOES_ON)
    yield from _checkpoint_files(workdir, outside)
    yield from _manifests()
    yield from _texts()
    yield from _extras()
    yield from _names(outside)
    yield from _lines(outside)
    yield from _configs(workdir, outside)
    yield from _locks(outside)


def _checkpoint_files(workdir: Path, outside: Path) -> Iterator[Case]:
    """Yields cases with one damaged or replaced file of the newest checkpoint."""
    folder = workdir / NEWEST
    back = {"checkpoint.on_corruption": "previous"}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        shown = re.sub(r"(/d/.{6}).*", r"\1...", name)
        for what, act in (damages() | others(outside)).items():
            damage = at(f"{NEWEST}/{name}", act)
            yield Case("file of a checkpoint", f"{shown}: {what}", damage, REFUSED)
        damage = at(f"{NEWEST}/{name}", flip)
        yield Case(
            "file of a checkpoint, on_corruption=previous", shown, damage, GOES_ON, STEPS[0], back
        )


def forge(workdir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of the newest checkpoint, and gives it the right checksum."""
    path = workdir / NEWEST / manifest.MANIFEST
    found = manifest.read_manifest(path.parent)
    content: dict[str, Any] = {
        "step": found.step,
        "metrics": found.metrics,
        "files": dict(found.files),
    }
    change(content)
    path.write_text(manifest.manifest_text(manifest.Manifest(**content)))


def _manifests() -> Iterator[Case]:
    """Yields cases whose manifest has the right checksum, but content that no save writes."""
    kind, digest = "manifest made on purpose", "0" * 64

    def changed(name: str, value: Any) -> Damage:
        return lambda workdir: forge(workdir, lambda content: content.update({name: value}))

    def with_file(name: str, entry: Any) -> Damage:
        return lambda workdir: forge(workdir, lambda found: found["files"].update({name: entry}))

    fields: dict[str, list[Any]] = {
        "step": [None, "40", 40.0, True, -1, 39, 10**30, [40], {}, float("nan")],
        "metrics": [None, "loss", 3, [1], {"loss": "x"}, {"loss": None}, {"loss": float("inf")}],
        "files": [None, "a", 3, [["a", 1]], {"a": None}],
    }
    for field, values in fields.items():
        for value in values:
            yield Case(kind, f"{field} {value!r}", changed(field, value), REFUSED)
    names = ["../x", "../../config.json", "/etc/passwd", "/dev/zero", "a/../../x", "..", "."]
    names += ["", "a/", "//a", "./a", "a//b", "a\0b", "a\nb", "\udcff", "\ud800", manifest.MANIFEST]
    names += ["x" * 300, "x/" * 3000 + "x", "none", "state"]
    for name in names:
        yield Case(kind, f"file {name!r:.40}", with_file(name, (0, digest)), REFUSED)
    entries: list[Any] = [None, 3, "x", [], [1], [1, digest, 1], ["1", digest], [-1, digest]]
    entries += [[1.5, digest], [True, digest], [10**30, digest], [1, None], [1, "x"], [1, digest]]
    for entry in entries:
        name = f"entry {entry!r}".replace(digest, "0...")
        yield Case(kind, name, with_file("extra/metadata", entry), REFUSED)


TEXTS = {
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "an empty object": b"{}",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "deep": DEEP,
    "a deep object": b'{"a":' * 100_000,
    "a number of 10,000 digits": b'{"step": ' + b"9" * 10_000 + b"}",
    "half": b'{"step": 40, "fi',
}


def _texts() -> Iterator[Case]:
    """Yields a checkpoint's JSON files with bad content; the manifest has the right new hash."""
    for text, content in {**TEXTS, "100 MB of blanks": b" " * 100_000_000}.items():
        damage = at(f"{NEWEST}/{manifest.MANIFEST}", functools.partial(put, content))
        yield Case("JSON of a checkpoint", f"{manifest.MANIFEST}: {text}", damage, REFUSED)
    inner = ["extra/metadata", "keys/metadata", "state/_METADATA", "_CHECKPOINT_METADATA"]
    inner += ["state/_sharding", "state/array_metadatas/process_0"]
    for name in inner:
        for text, content in TEXTS.items():
            # Orbax may ignore some of these files, because it does not need them.
            expected = (
                EITHER if name[:1] == "_" or "/_sharding" in name or "array" in name else REFUSED
            )
            damage = _rewritten(name, content)
            yield Case("JSON of a checkpoint", f"{name}: {text}", damage, expected)


def _rewritten(name: str, content: bytes) -> Damage:
    """Returns a function that replaces a file of the newest checkpoint, and its hash."""

    def damage(workdir: Path) -> None:
        folder = workdir / NEWEST
        (folder / name).write_bytes(content)
        found = manifest.read_manifest(folder)
        manifest.write_manifest(folder, step=found.step, metrics=found.metrics)

    return damage


def _extras() -> Iterator[Case]:
    """Yields changes to `extra/metadata`, the saved values that are not arrays, and its hash."""
    nested: Any = []
    for _ in range(90):
        nested = [nested]
    sizes: list[Any] = [-1, "3", 1.5, 10**40, 10**9, 7, None]
    no_hashes: tuple[Any, ...] = (None, "x", [], {})
    fields: dict[str, list[Any]] = {
        "position": ["abc", -1, True, 10**40, None, 1.5, [1], float("nan")],
        "data": [None, 3, "other", []],
        "config": [None, 3, [], {}, {"a": nested}, {"seed": 9}],
        "recorder": [
            *(None, [], {}, {"totals": {}, "latest": {}}),
            {"totals": {"train": {"loss": [1]}}, "latest": {}, "skipped": 0},
            {"totals": {}, "latest": {"eval": {"loss": "x"}}, "skipped": 0},
        ],
        "files": [
            *(None, [], {}, {"metrics.jsonl": 0}),
            *({"metrics.jsonl": size, "throughput.jsonl": 0} for size in sizes),
            *({"metrics.jsonl": 0, "throughput.jsonl": 0, HASHES: x} for x in no_hashes),
        ],
    }

    def damage(change: Callable[[dict[str, Any]], object], workdir: Path) -> None:
        extra = json.loads((workdir / NEWEST / "extra/metadata").read_text())
        change(extra)
        _rewritten("extra/metadata", json.dumps(extra).encode())(workdir)

    kind = "what is saved besides arrays"
    for field, values in fields.items():
        for value in values:
            changed = functools.partial(damage, functools.partial(_update, field, value))
            yield Case(kind, f"{field} {value!r:.60}", changed, REFUSED)
        # Checkpoints of older versions have no config, so `config.json` is used.
        expected = GOES_ON if field == "config" else REFUSED
        gone = functools.partial(damage, functools.partial(_remove, field))
        yield Case(kind, f"no {field}", gone, expected)


def _update(field: str, value: Any, content: dict[str, Any]) -> None:
    """Sets one field of a JSON object."""
    content[field] = value


def _remove(field: str, content: dict[str, Any]) -> None:
    """Removes one field of a JSON object."""
    del content[field]


def _names(outside: Path) -> Iterator[Case]:
    """Yields files and folders that no run makes, in the folder that contains the checkpoints."""
    kind, back = "name in the folder of checkpoints", {"checkpoint.on_corruption": "previous"}
    no_folders = others(outside)
    makers = {name: act for name, act in no_folders.items() if name != "a folder"}
    makers["a file"] = functools.partial(put, b"x")
    for what, act in makers.items():
        for name in ("41.unfinished", "41.unfinished.orbax-checkpoint-tmp", "20.deleted"):
            yield Case(kind, f"{name}: {what}", at(f"{FOLDER}/{name}", act), REFUSED)
        for name in ("40", "60"):
            damage = at(f"{FOLDER}/{name}", act)
            yield Case(kind, f"{name}: {what}", damage, REFUSED)
            step = STEPS[0] if name == "40" else STEPS[1]
            yield Case(kind, f"{name}: {what}, previous", damage, GOES_ON, step, back)
        yield Case(kind, f"the folder: {what}", at(FOLDER, act), EITHER)
        yield Case(kind, f"notes: {what}", at(f"{FOLDER}/notes", act), GOES_ON)
    for name in ("41.unfinished", "20.deleted", "007", "²", "٧٠", "40.superseded-1"):
        yield Case(kind, f"{name}: a folder", at(f"{FOLDER}/{name}", Path.mkdir), GOES_ON)
    for name in ("60", "9" * 30, "9" * 200):
        yield Case(kind, f"{name:.40}: a folder", at(f"{FOLDER}/{name}", Path.mkdir), REFUSED)


GOOD = {
    "metrics.jsonl": b'{"step": 1, "split": "train", "loss": 0.5}',
    "throughput.jsonl": b'{"step": 1, "split": "train", "examples_per_second": 0.5}',
    "discarded.jsonl": b'{"resumed_after_step": 1, "reason": "resumed", "time": "now"}',
}


def _lines(outside: Path) -> Iterator[Case]:
    """Yields damage to the JSON Lines files of `GOOD`, such as invalid lines and lost bytes."""
    kind = "file of lines"
    lines = {
        "nothing": b"",
        "half": b'{"step": 1, "spl',
        "overwritten": b"xxxxxxxxx",
        "binary": bytes(range(128, 256)),
        "zeros": bytes(100),
        "UTF-16": '{"a": 1}'.encode("utf-16").replace(b"\n", b""),
        "deep": DEEP,
        "50 MB": b"x" * 50_000_000,
        "a list": b"[1]",
        "null": b"null",
        "no keys": b"{}",
        "a step that is text": b'{"step": "1", "split": "train", "resumed_after_step": "1"}',
        "a step that is huge": b'{"step": 1' + b"0" * 400 + b', "split": "train"}',
        "a split that is a list": b'{"step": 1, "split": []}',
        "a split that is a formula": b'{"step": 1, "split": "$x^$", "loss": 1}',
        "NaN": b'{"step": 1, "split": "train", "loss": NaN}',
        "infinite": b'{"step": 1, "split": "train", "loss": 1e999, "mfu": -1e999}',
        "a string": b'{"step": 1, "split": "train", "loss": "1"}',
        "an object": b'{"step": 1, "split": "train", "loss": {"a": 1}}',
        "large numbers": b'{"step": 1, "split": "train", "loss": 1e300, "mfu": 1e300}',
        "small numbers": b'{"step": 1, "split": "train", "loss": 5e-324, "mfu": -5e-324}',
        "lists that are numbers": b'{"resumed_after_step": 1, "reason": [], "time": {}}',
    }

    def prepend(name: str, line: bytes, workdir: Path) -> None:
        """Inserts a first line into a file, and corrects its size and hash in the checkpoint."""
        path = workdir / name
        path.write_bytes(line + b"\n" + path.read_bytes())
        extra = json.loads((workdir / NEWEST / "extra/metadata").read_text())
        if name in extra["files"]:
            extra["files"][name] += len(line) + 1
            before = path.read_bytes()[: extra["files"][name]]
            extra["files"][HASHES][name] = hashlib.sha256(before).hexdigest()
            _rewritten("extra/metadata", json.dumps(extra).encode())(workdir)

    for name in GOOD:
        for what, line in lines.items():
            damage = functools.partial(prepend, name, line)
            yield Case(kind, f"{name}: a line that is {what}", damage, GOES_ON)
        whole = REFUSED if name == "metrics.jsonl" else GOES_ON
        for what in ("cut in half", "empty", "gone", *(x for x in damages() if "flipped" in x)):
            yield Case(kind, f"{name}: {what}", at(name, damages()[what]), whole)
        yield Case(kind, f"{name}: longer", at(name, damages()["longer"]), GOES_ON)
        for what, act in others(outside).items():
            yield Case(kind, f"{name}: {what}", at(name, act), REFUSED)


def _configs(workdir: Path, outside: Path) -> Iterator[Case]:
    """Yields damage to `config.json`; the run is resumed with its own config or another seed."""
    kind, other = "config.json", {"seed": 9}
    contents = {**TEXTS, "gone": None}
    for what, content in contents.items():
        damage = at("config.json", functools.partial(put, content))
        # In place of a missing or incomplete config, the config in the checkpoint is compared.
        same = GOES_ON if what in ("gone", "an empty object") else REFUSED
        yield Case(kind, what, damage, same)
        yield Case(kind, f"{what}, another seed", damage, REFUSED, changes=other)
    text = (workdir / "config.json").read_bytes()
    seeded = functools.partial(put, text.replace(b'"seed": 42', b'"seed": 9'))
    yield Case(kind, "of another seed", at("config.json", seeded), GOES_ON)
    yield Case(
        kind, "of another seed, asked for", at("config.json", seeded), REFUSED, changes=other
    )
    yield Case(kind, "right, another seed", lambda workdir: None, REFUSED, changes=other)
    for what, act in others(outside).items():
        yield Case(kind, what, at("config.json", act), REFUSED)


def _locks(outside: Path) -> Iterator[Case]:
    """Yields changes to the lock file, and to the draft that is renamed to `config.json`."""
    for what, act in others(outside).items():
        yield Case("lock", what, at(".lock", act), REFUSED)
    for what, content in TEXTS.items():
        yield Case(
            "lock", f"{what}, nobody's", at(".lock", functools.partial(put, content)), GOES_ON
        )
    for what, act in others(outside).items():
        changes = {"training.num_steps": 2000}  # A changed config is written again.
        expected = REFUSED if what == "a folder" else GOES_ON
        damage = at(".config.json.draft", act)
        yield Case("draft", what, damage, expected, changes=changes)
