"""Keeps a run's results in a bucket: writes them to a local folder and regularly uploads them.

Results are appended to files, but nothing can be appended to an object. So results are written to a
local folder, and `publish` uploads every file that has changed, as one object. `publish` is called
before each checkpoint, every `PUT_SECONDS` in between, and at the end. If the process is killed,
the lines after the last upload are lost, and a run that resumes from the last checkpoint writes
these lines again.

The files in `FIRST` contain lines that were cut off from other files. These files are uploaded
before the other files, so that every line is always in at least one file of the bucket.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from manualpar.system.storage.bucket_path import AnyPath, BucketError, BucketPath
from manualpar.system.storage.untrusted import write_file

PUT_SECONDS = 60.0
FIRST = ("discarded.jsonl",)


class Mirror:
    """Copies a local folder to a folder in a bucket."""

    def __init__(
        self,
        folder: BucketPath,
        local: Path,
        *,
        left_out: tuple[str, ...],
        check: Callable[[], None],
    ) -> None:
        """Takes an empty `local`; skips files whose names begin with a prefix in `left_out`."""
        self._folder, self._local, self._left_out, self._check = folder, local, left_out, check
        # Maps the name of a file to the size and modification time that it had at its last upload.
        self._put: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def fetch(self) -> None:
        """Copies the files of the folder in the bucket to the local folder."""
        for name in self._folder.files():
            if not name.startswith(self._left_out):
                path = self._local / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, (self._folder / name).read_bytes())
                self._put[name] = _state(path)

    def publish(self) -> None:
        """Uploads every file that has changed; raises a `BucketError` if an upload fails."""
        with self._lock:
            # Skips drafts, because another thread may rename them at any moment.
            paths = [path for path in self._local.rglob("*") if path.suffix != ".draft"]
            files = [path for path in paths if path.is_file()]
            names = {path.relative_to(self._local).as_posix(): path for path in files}
            changed = {
                name: state
                for name, path in names.items()
                if (state := _state(path)) != self._put.get(name)
            }
            if changed:
                self._check()
            for name in sorted(changed, key=lambda name: (name not in FIRST, name)):
                write_file(self._folder / name, names[name].read_bytes())
                self._put[name] = changed[name]


@contextlib.contextmanager
def mirrored(
    folder: AnyPath,
    *,
    left_out: tuple[str, ...],
    check: Callable[[], None],
    is_main: bool = True,
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields a local folder for the results of `folder`, and a function that uploads the results.

    If `folder` is local, the function yields `folder` and `check`.

    Args:
      left_out: The prefixes of files that are not copied.
      check: Called before each upload; raises an error if this process no longer owns `folder`.
      is_main: Whether this process writes results. Other processes get an empty folder.

    Raises:
      BucketError: The results cannot be read or written.
    """
    if not isinstance(folder, BucketPath):
        yield folder, check
        return
    with tempfile.TemporaryDirectory(prefix="results-") as local:
        if not is_main:
            yield Path(local), lambda: None
            return
        mirror = Mirror(folder, Path(local), left_out=left_out, check=check)
        mirror.fetch()
        ended = threading.Event()

        def put_now_and_then() -> None:
            while not ended.wait(PUT_SECONDS):
                with contextlib.suppress(BucketError):  # The next `publish` tries again and raises.
                    mirror.publish()

        thread = threading.Thread(target=put_now_and_then, name="results", daemon=True)
        thread.start()
        try:
            yield Path(local), mirror.publish
        except BaseException as error:
            ended.set()
            thread.join()
            try:
                mirror.publish()
            except BucketError as second:
                error.add_note(str(second))  # The user must see the first error.
            raise
        ended.set()
        thread.join()
        mirror.publish()


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
