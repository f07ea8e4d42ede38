"""A folder of results in a bucket: written on a disk, and regularly copied to the bucket.

Results are appended to files, but nothing can be appended to an object. So the code for
local results writes into a local folder, and `publish` puts every file that has changed as one
object. `publish` is called before each checkpoint, every `PUT_SECONDS` in between, and at the end.
A killed process loses the lines after the last call, and a run that goes on from its last
checkpoint writes these lines again.

Files in `FIRST` are put before other files: they hold the lines that were cut off from other files,
so that no line is missing from both.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from manualpar.system.storage.bucket_path import AnyPath, BucketPath
from manualpar.system.storage.requests import BucketError

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
        """Takes an empty local folder; files with a prefix in `left_out` are not fetched."""
        self._folder, self._local, self._left_out, self._check = folder, local, left_out, check
        # File in the bucket -> size and time of change of the local file that was put.
        self._put: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def fetch(self) -> None:
        """Copies the bucket's files to the disk."""
        for name in self._folder.files():
            if not name.startswith(self._left_out):
                path = self._local / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes((self._folder / name).read_bytes())
                self._put[name] = _state(path)

    def publish(self) -> None:
        """Puts every file that has changed; raises a `BucketError` if that is not possible."""
        with self._lock:
            # Another thread may rename a draft at any moment.
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
                (self._folder / name).write_bytes(names[name].read_bytes())
                self._put[name] = changed[name]


@contextlib.contextmanager
def mirrored(
    folder: AnyPath,
    *,
    left_out: tuple[str, ...],
    check: Callable[[], None],
    is_main: bool = True,
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields a local folder for the results that belong in `folder`, and `publish`.

    If `folder` is local, the function yields `folder` and `check`.

    Args:
      folder: The destination of the results.
      left_out: Prefixes of files that are not results.
      check: Called before anything is put; raises if nothing may be put.
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
                with contextlib.suppress(BucketError):  # The next `publish` raises it.
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
