"""Makes a directory of token files from files of documents, with any number of processes.

The work is divided into parts, which depend only on the files. A process writes the tokens of a
part to the folder `parts`, and then a small file that marks the part as finished. When all parts
are finished, they are joined in order. So the result has the same bytes with any number of
processes. If a call is killed, the next call makes only the parts that are not finished.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from manualpar.data.chat import ChatEncoder
from manualpar.data.chat_template import load_templates
from manualpar.data.dataset import SPLITS, DamagedDataError, make_fingerprint, state_of
from manualpar.data.document_files import (
    BAD_ROWS,
    PART_BYTES,
    BadRows,
    DocumentRange,
    divide,
    find_document_files,
)
from manualpar.data.text import TextFile, find_files, split_files
from manualpar.data.token_parts import (
    DocumentEncoder,
    Encoder,
    TextPart,
    TokenProgress,
    finished_file,
    tokens_file,
    write_part,
    write_whole,
)
from manualpar.data.tokenizer import TOKENIZER, Notes, load_tokenizer
from manualpar.data.tokens import (
    DESCRIPTION,
    OPTIONAL,
    VERSION,
    TokenFile,
    TokenFiles,
    lengths_file,
    read_description,
)
from manualpar.system.reports.progress_bars import bytes_bar
from manualpar.system.storage import AnyPath, BucketPath, user_cache, waiting_for, writing_cache
from manualpar.system.storage.untrusted import create_file, read_model_file, read_object, write_file

HELD_OUT = 0.02
PARTS, JOB, LOCK = "parts", "job.json", "lock"
# Larger each time that equal chats become other tokens, or equal documents of a tokenizer whose
# end token is not BOS.
CHATS, ENDED = 4, 1


@dataclasses.dataclass(frozen=True)
class Job:
    """The input and the settings from which a directory of token files is made.

    Attributes:
      parts: The parts of the input.
      tokenizer: See `load_tokenizer`.
      held_out: The fraction of the documents in eval; test has the same fraction.
      key: A hash of everything on which the result depends.
      is_chat: Whether the source is `chat`, see `manualpar.data.chat`.
      template: The chat template, see `load_templates`.
      parse_special: See `load_tokenizer`.
      bad_rows: See `Rows`.
    """

    parts: tuple[DocumentRange | TextPart, ...]
    tokenizer: str
    held_out: float
    key: str
    is_chat: bool = False
    template: str = ""
    parse_special: bool = False
    bad_rows: BadRows = "error"

    @property
    def size(self) -> int:
        """The estimated bytes of the documents in all parts."""
        return sum(part.size for part in self.parts)

    def make_encoder(self) -> Encoder:
        """Makes the encoder that tokenizes this job's parts."""
        tokenizer = load_tokenizer(self.tokenizer, parse_special=self.parse_special)
        if self.is_chat:
            return ChatEncoder(tokenizer, self.held_out, self.template, bad_rows=self.bad_rows)
        return DocumentEncoder(tokenizer, self.held_out, self.bad_rows)


@contextlib.contextmanager
def token_bar(job: Job) -> Iterator[Callable[[TokenProgress], None]]:
    """Shows the progress of `run_job` in a terminal: bytes, documents and tokens per second.

    The context's value is a function for the argument `report` of `run_job`.
    """
    started = time.monotonic()
    with bytes_bar("tokenizing", job.size) as show:

        def report(progress: TokenProgress) -> None:
            rate = progress.tokens / max(time.monotonic() - started, 1e-3)
            show(progress.bytes, f"{progress.documents:,} documents, {rate:,.0f} tokens/s")

        yield report


def make_job(
    source: str,
    path: str,
    *,
    tokenizer: str = "",
    field: str = "text",
    held_out: float = HELD_OUT,
    template: str = "",
    parse_special: bool = False,
    bad_rows: BadRows = "error",
) -> Job:
    """Makes a `Job`: finds the files and divides them into parts.

    Args:
      source: `text`, `jsonl`, `parquet`, `arrayrecord` or `chat`.
      path: The files; see `find_files` for `text`, otherwise `find_document_files`.
      tokenizer: See `load_tokenizer`.
      field: See `DocumentRange`.
      held_out: The fraction of the documents in eval; test has the same fraction. Not used for
        `text`.
      template: See `Job`.
      parse_special: See `Job`.
      bad_rows: See `Job`.
    """
    if bad_rows not in BAD_ROWS:
        raise ValueError(f"`bad_rows` is {bad_rows!r}, expected 'error' or 'skip'.")
    parts: list[DocumentRange | TextPart] = []
    if source == "text":
        for split, files in split_files(find_files(path), path).items():
            parts += _text_parts(split, files)
        files_key: list[Any] = [
            [part.split, [(f.name, f.start, f.size, _changed(f.path)) for f in part.files]]
            for part in parts
            if isinstance(part, TextPart)
        ]
    else:
        found = find_document_files(path, source)
        parts += divide(source, found, field)
        files_key = [[f.path, f.name, f.size, f.modified] for f in found]
    encoder = load_tokenizer(tokenizer, parse_special=parse_special)
    settings: list[Any] = [VERSION, PART_BYTES, encoder.fingerprint, field, held_out]
    if bad_rows != "error":
        settings.append(bad_rows)
    if encoder.end_token != encoder.bos_token:
        settings.append(f"ends {ENDED}")
    if source == "chat":
        settings.append(CHATS)
        texts = [read_model_file(file, encoder.files[0].parent) for file in encoder.files]
        if template:
            texts.append(load_templates(template, encoder.files).chosen.encode())
        settings += [hashlib.blake2b(text).hexdigest() for text in texts]
    key = make_fingerprint(settings, source, files_key, len(parts))
    is_chat = source == "chat"
    return Job(tuple(parts), tokenizer, held_out, key, is_chat, template, parse_special, bad_rows)


def run_job(
    job: Job,
    directory: AnyPath,
    *,
    processes: int = 1,
    report: Callable[[TokenProgress], None] = lambda progress: None,
) -> TokenFiles:
    """Makes a job's directory of token files, and returns the description of the directory.

    If an earlier call for an equal job was interrupted, this call completes its directory.

    Args:
      directory: The directory to make; its parents need not exist. If the directory is in a bucket,
        the files are made in the user's cache folder and then uploaded, the description last.
      processes: The number of processes that make tokens; 1 for only this process.
      report: Called regularly with the progress.

    Raises:
      DamagedDataError: A file of documents is damaged, or a process was killed.
      OSError: The directory cannot be written to.
    """
    if isinstance(directory, BucketPath):
        return _run_job_for_bucket(job, directory, processes=processes, report=report)
    parts = directory / PARTS
    _begin_directory(job, directory, parts)
    with waiting_for(parts / LOCK):
        # Another process may have finished the directory while this process waited for the lock.
        if not (directory / DESCRIPTION).exists():
            finished = {n for n in range(len(job.parts)) if finished_file(parts, n).exists()}
            left = {n: part for n, part in enumerate(job.parts) if n not in finished}
            done = TokenProgress(job.size - sum(part.size for part in left.values()), 0, 0)
            make_parts(Work(left, parts, job.make_encoder, done), processes, report)
            written = _join(job, directory, parts)
            shutil.rmtree(parts)
            return written
    return read_description(directory, str(directory))


def _run_job_for_bucket(
    job: Job, directory: BucketPath, *, processes: int, report: Callable[[TokenProgress], None]
) -> TokenFiles:
    """Makes the files in a local folder, and uploads them.

    A later call for an equal job uses the same local folder again.
    """
    if (directory / DESCRIPTION).is_file():
        raise _conflicting_files(directory)
    name = hashlib.blake2b(f"{directory} {job.key}".encode(), digest_size=8).hexdigest()
    made = user_cache() / "made" / name
    # If an earlier call stopped during the upload, the local files are complete already.
    with writing_cache(made):
        if not (made / DESCRIPTION).exists():
            run_job(job, made, processes=processes, report=report)
    names = {path.name for path in made.iterdir()} - {DESCRIPTION}
    for each in (*sorted(names), DESCRIPTION):
        (directory / each).upload(made / each)
    written = read_description(made, str(directory))
    shutil.rmtree(made)
    return written


def _conflicting_files(directory: AnyPath) -> ValueError:
    return ValueError(
        f"output is {str(directory)!r}, which already holds token files or is a file; name another "
        "directory."
    )


def _text_parts(split: str, files: Sequence[TextFile]) -> Iterator[TextPart]:
    collected: list[TextFile] = []
    for file in files:
        collected.append(file)
        if sum(each.size for each in collected) >= PART_BYTES or len(collected) == 4096:
            yield TextPart(split, tuple(collected))
            collected = []
    if collected:
        yield TextPart(split, tuple(collected))


def _changed(path: AnyPath) -> int:
    return state_of(path)[1]


def _begin_directory(job: Job, directory: pathlib.Path, parts: pathlib.Path) -> None:
    if (directory / DESCRIPTION).exists() or (directory.exists() and not directory.is_dir()):
        raise _conflicting_files(directory)
    parts.mkdir(parents=True, exist_ok=True)
    described = parts / JOB
    if described.exists():
        try:
            found = read_object(described).get("key")
        except (OSError, ValueError):
            found = None
        if found != job.key:
            raise ValueError(
                f"output is {str(directory)!r}, which holds an unfinished call with other options "
                "or other files, or the files have changed since; use the same options and files, "
                "name another directory, or delete this one to begin again."
            )
    else:
        write_whole(described, {"key": job.key})


def _join(job: Job, directory: pathlib.Path, parts: pathlib.Path) -> TokenFiles:
    tokenizer = load_tokenizer(job.tokenizer, parse_special=job.parse_special)
    encoder = job.make_encoder()
    numbers = range(len(job.parts))
    counts = [json.loads(finished_file(parts, number).read_text()) for number in numbers]
    notes = Notes()
    for part in counts:
        notes.add(Notes(**part.pop("notes", {})))  # An unfinished job of 0.3.0 has none.
    splits = {}
    for split in SPLITS:
        total = {name: sum(part[split][name] for part in counts) for name in counts[0][split]}
        if not total["documents"]:
            everything = sum(part[name]["documents"] for part in counts for name in SPLITS)
            raise ValueError(
                f"`held_out` is {job.held_out}, which leaves none of the {everything} "
                f"documents for {split}; expected a larger share, or more documents"
                f"{''.join(f'; {each}' for each in notes.sentences())}."
            )
        size = 0 if total["unknown"] else total["bytes"]
        digest, end = hashlib.blake2b(digest_size=8), b""
        if not encoder.makes_examples:
            end = np.array([tokenizer.bos_token]).astype(encoder.dtype).tobytes()
        sources = [tokens_file(parts, number, split) for number in numbers]
        joined = directory / f"{split}.bin"
        _concatenate(joined, sources, end, digest)
        if encoder.makes_examples:
            _concatenate(lengths_file(joined), list(map(lengths_file, sources)), b"", digest)
        tokens = total["tokens"] + bool(end)
        splits[split] = TokenFile(tokens, size, total["documents"], digest.hexdigest())
    folder = tokenizer.files[0].parent if tokenizer.files else directory
    names = [TOKENIZER, *(str(file.relative_to(folder)) for file in tokenizer.files[1:])]
    for name, path in zip(names, tokenizer.files, strict=False):
        (directory / name).parent.mkdir(exist_ok=True)
        write_file(directory / name, read_model_file(path, folder))
    written = TokenFiles(
        version=VERSION,
        dtype=encoder.dtype,
        vocab_size=tokenizer.vocab_size,
        bos_token=tokenizer.bos_token,
        tokenizer=TOKENIZER if tokenizer.files else "",
        splits=splits,
        examples=int(encoder.makes_examples),
        parse_special=int(job.parse_special),
        remarks=notes.sentences(),
    )
    fields = dataclasses.asdict(written)
    kept = {name: x for name, x in fields.items() if x or name not in OPTIONAL}
    # The description is written last, in one step, so that it never describes missing files.
    write_whole(directory / DESCRIPTION, kept)
    return written


def _concatenate(
    joined: pathlib.Path, sources: Sequence[pathlib.Path], end: bytes, digest: Any
) -> None:
    """Writes the contents of `sources`, and then `end`, to `joined`, and adds them to `digest`."""
    with create_file(joined) as out:
        for source in sources:
            with open(source, "rb") as file:
                while piece := file.read(2**22):
                    digest.update(piece)
                    out.write(piece)
        digest.update(end)
        out.write(end)
        out.flush()
        os.fsync(out.fileno())


# -------------------------------------------------------------------------------------------------
# Makes the parts of a directory of token files, in this process or in several processes.
#
# A process takes the next part when it has finished a part. No process waits for the tokens of
# another process, so a slow process delays no other process. All processes end when the process
# that started them ends for any reason. The next call makes the unfinished parts again.


SECONDS_BETWEEN_REPORTS = 0.2


@dataclasses.dataclass(frozen=True)
class Work:
    """The parts that still have to be made.

    Attributes:
      parts: Number of a part -> the part.
      folder: The folder to which the parts are written.
      make_encoder: Makes the encoder; called in each process.
      done: The work that earlier calls have done.
    """

    parts: dict[int, DocumentRange | TextPart]
    folder: pathlib.Path
    make_encoder: Callable[[], Encoder]
    done: TokenProgress


def make_parts(work: Work, processes: int, report: Callable[[TokenProgress], None]) -> None:
    """Makes all parts that still have to be made.

    Args:
      processes: The number of processes. With 1 this process makes the parts.
      report: Called regularly with all the work done so far.

    Raises:
      DamagedDataError: A file is damaged, or a process was killed.
      ValueError, OSError: See `write_part`.
    """
    if not work.parts:
        return
    if processes == 1:
        _make_parts_here(work, report)
        return
    # Spawns processes, because a forked process would inherit the locks of this process's threads.
    spawn = multiprocessing.get_context("spawn")
    # Shared memory: the three numbers of `TokenProgress`, and the number of parts taken so far.
    shared = spawn.Array("q", [*work.done, 0])
    pipes = [spawn.Pipe(duplex=False) for _ in range(min(processes, len(work.parts)))]
    workers = [spawn.Process(target=_work, args=(work, shared, pipe)) for _, pipe in pipes]
    try:
        for worker in workers:
            worker.start()
        while left := [worker for worker in workers if worker.exitcode is None]:
            multiprocessing.connection.wait([w.sentinel for w in left], SECONDS_BETWEEN_REPORTS)
            for worker, (receiver, _) in zip(workers, pipes, strict=True):
                if receiver.poll():
                    raise receiver.recv()
                if worker.exitcode:
                    raise DamagedDataError(
                        "a process that made tokens was killed, perhaps because memory was full; "
                        "run the same command again to continue."
                    )
            with shared.get_lock():
                report(TokenProgress(*shared[:3]))
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _make_parts_here(work: Work, report: Callable[[TokenProgress], None]) -> None:
    encoder, done = work.make_encoder(), work.done
    for number, part in work.parts.items():
        before = done.bytes

        def count(more: TokenProgress) -> None:
            nonlocal done
            done = TokenProgress(*(a + b for a, b in zip(done, more, strict=True)))
            report(done)

        write_part(part, number, work.folder, encoder, count)
        done = done._replace(bytes=before + part.size)
        report(done)


def _work(work: Work, shared: Any, errors: multiprocessing.connection.Connection) -> None:
    """Makes parts until no part is left, or until a part fails."""
    # A terminal sends Ctrl-C to this process too, but only the parent process must handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        encoder, numbers = work.make_encoder(), list(work.parts)
        while (number := _take(shared, numbers)) is not None:
            part, counted = work.parts[number], 0

            def count(more: TokenProgress) -> None:
                nonlocal counted
                counted += more.bytes
                _add(shared, more)

            write_part(part, number, work.folder, encoder, count)
            _add(shared, TokenProgress(part.size - counted, 0, 0))
    except (ValueError, OSError) as error:
        errors.send(error)


def _take(shared: Any, numbers: Sequence[int]) -> int | None:
    with shared.get_lock():
        taken = shared[3]
        shared[3] += 1
    return numbers[taken] if taken < len(numbers) else None


def _add(shared: Any, more: TokenProgress) -> None:
    with shared.get_lock():
        for index, value in enumerate(more):
            shared[index] += value


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
