"""A folder of results in a bucket: written on a disk, and put there whole, now and then.

Objects cannot be appended to, and results are lines and events that are. So they are written into a
local folder, by the same code as any results, and every file that has changed since is put as one
object: when `publish` is called, which is before each checkpoint, every `PUT_SECONDS` in between,
and at the end. A process that is killed loses what it wrote after the last of these, and a run that
goes on from its last checkpoint writes all of that again.

Files in `FIRST` are put before the others: they hold what has been cut off from other files, which
must not be gone before it is there.
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
    """A local folder, and the one in a bucket that it is put to."""

    def __init__(
        self,
        folder: BucketPath,
        local: Path,
        *,
        left_out: tuple[str, ...],
        check: Callable[[], None],
    ) -> None:
        """Takes an empty local folder; `left_out` begin the names of what is not fetched."""
        self._folder, self._local, self._left_out, self._check = folder, local, left_out, check
        self._put: dict[str, tuple[int, int]] = {}  # Size and time of change of what is there.
        self._lock = threading.Lock()

    def fetch(self) -> None:
        """Copies what is in the bucket to the disk."""
        for name in self._folder.files():
            if not name.startswith(self._left_out):
                path = self._local / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes((self._folder / name).read_bytes())
                self._put[name] = _state(path)

    def publish(self) -> None:
        """Puts every file that has changed; raises a `BucketError` if that is not possible."""
        with self._lock:
            # A draft may get its name at any moment, so that it is not there any more.
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
    """Yields a local folder to write results of `folder` into, and `publish`.

    Of a local folder it is itself, and `publish` is `check`.

    Args:
      folder: Where the results are to be.
      left_out: What begins the names of files that are not results.
      check: Is called before anything is put, and raises if that must not be.
      is_main: Whether this process is the one that writes results. Others get an empty folder.

    Raises:
      BucketError: They cannot be read or written.
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
                with contextlib.suppress(BucketError):  # The next `publish` says so.
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
                error.add_note(str(second))  # The first error is the one to see.
            raise
        ended.set()
        thread.join()
        mirror.publish()


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
