"""Opens files, and reads JSON, without trusting the folders in which the files are.

Anybody may have written the files, and may have put something else in their places. A FIFO makes a
reader wait forever, a device has no end, a link may lead out of the folder, and deeply nested JSON
exhausts the stack. A writer that follows a link, or that changes a file with a second name (a hard
link), destroys the content of another file. Here each of these cases raises an error whose message
names the case.

All files that this package writes on a disk are opened here, and a test looks for other places.
Libraries open files of their own: Orbax, the profiler, and the trackers. Only a path that a user
has named as the output of a command is followed wherever it leads.

Every message is the end of a sentence that begins with the name of the file: `is a FIFO, ...`.
"""

import contextlib
import io
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from manualpar.system.storage.bucket_path import AnyPath

from manualpar.errors import printable

MAX_BYTES = 1 << 26
MAX_DEPTH = 64
COPIED_BYTES = 1 << 24  # A file is copied in parts of this size.
# The most bytes in a `.safetensors` header. A tensor needs about 130 bytes, and reading the entries
# of 50,000 tensors takes a second. The largest model of the supported families has 24,000 tensors.
MAX_HEADER_BYTES = 1 << 24
# Names for everything but regular files, by the type bits of the mode.
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFileError(OSError):
    """A path leads to something other than a regular file, or to a file with several names."""


def kind_of(mode: int) -> str:
    """Describes the kind of a file, such as `a FIFO`, from its mode (of `os.stat`, `os.lstat`)."""
    return KINDS.get(stat.S_IFMT(mode), "a file")


def open_file(path: Path, *, follow_links: bool = False) -> io.BufferedReader:
    """Opens a regular file for reading; never waits for another process.

    With `follow_links` the last part of the path may be a link.

    Raises:
      NotAFileError: The path leads to a link, a folder, a FIFO, a socket or a device.
      OSError: The file cannot be opened.
    """
    _refuse_other_kinds(os.stat(path, follow_symlinks=follow_links).st_mode)
    # The path may lead to another file by now. With these flags, `open` does not wait for a FIFO
    # and does not follow a link.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _refuse_other_kinds(os.fstat(descriptor).st_mode)
    except NotAFileError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, *, follow_links: bool = False) -> bytes:
    """Reads a regular file; see `open_file`.

    Raises:
      OSError: The file cannot be read, or is no regular file.
    """
    with open_file(path, follow_links=follow_links) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES:,} bytes")
        return file.read()


def open_tensors(path: Path, *, most: int = MAX_HEADER_BYTES) -> tuple[io.BufferedReader, int]:
    """Opens a `.safetensors` file, and returns it with the length of its header.

    Args:
      most: The most bytes that the header may have.

    Raises:
      OSError: The file cannot be opened, or is no regular file.
    """
    file = open_file(path)
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    # If the file is cut off, the header's length counts as 0, and safetensors reports the damage.
    if length > os.fstat(file.fileno()).st_size:
        length = 0
    if length > most:
        file.close()
        raise ValueError(
            f"has a header of {length:,} bytes, expected at most {most:,}: store fewer tensors"
        )
    return file, length


def create_file(path: Path) -> io.BufferedWriter:
    """Creates a file for writing; replaces an existing file or link, without following the link.

    Raises:
      OSError: The file cannot be created, for example because there is a folder of this name.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_file(path: "AnyPath", data: bytes | str) -> None:
    """Writes a new file, see `create_file`, or an object in a bucket. Text is encoded as UTF-8.

    Raises:
      OSError: The file cannot be written.
    """
    data = data.encode() if isinstance(data, str) else data
    if not isinstance(path, Path):
        path.write_bytes(data)
        return
    with create_file(path) as file:
        file.write(data)


def write_named_file(path: "AnyPath", data: bytes | str) -> None:
    """Writes a file that a user has named for the output of a command, or an object in a bucket.

    As with `>` in a shell, the path may be a link, or a device such as `/dev/stdout`.

    Raises:
      OSError: The file cannot be written.
    """
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def open_own_file(path: Path, *, create: bool = True, appends: bool = False) -> io.FileIO:
    """Opens a file to read it and to change it, without a buffer; never waits.

    Args:
      create: Whether to create the file if it does not exist.
      appends: Whether every write goes to the end of the file.

    Raises:
      NotAFileError: The path leads to a link, a folder, a FIFO, a socket or a device, or the file
        has several names (hard links), so that a change would appear under the other names too.
      OSError: The file cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _refuse_other_kinds(os.lstat(path).st_mode)
    # The path may lead to another file by now, see `open_file`.
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW
    flags |= (os.O_CREAT if create else 0) | (os.O_APPEND if appends else 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        found = os.fstat(descriptor)
        _refuse_other_kinds(found.st_mode)
        if found.st_nlink > 1:
            raise NotAFileError(
                f"has {found.st_nlink} names (hard links), expected one, because all of them would "
                "show what is written; put a copy in its place"
            )
    except NotAFileError:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor, "r+")


def parse_object(text: bytes | str, *, allow_nan: bool = False) -> dict[str, Any]:
    """Parses a JSON object; bytes are decoded as UTF-8.

    With `allow_nan` the text may contain NaN and Infinity, which Python writes although JSON does
    not have them. The result is nested at most `MAX_DEPTH` deep, so recursion over it is safe.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES:,} bytes")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=float if allow_nan else _refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"is not a JSON object ({type(value).__name__})")
    # A text with at most `MAX_DEPTH` opening brackets cannot be nested too deep.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _refuse_depth(value)
    return value


def read_object(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Reads a JSON object from a regular file; see `read_file` and `parse_object`."""
    return parse_object(read_file(path, follow_links=follow_links))


def _refuse_other_kinds(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotAFileError(f"is {kind_of(mode)}, expected a file")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _refuse_depth(value: Any) -> None:
    """Refuses a value that is nested too deep, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")


def model_file(path: Path, folder: Path) -> Path:
    """Returns the path without links of a file in a model's folder.

    Anybody may have made the folder. A link out of it could lead to a private file of this machine,
    which an export would publish. So a link must lead to a file of the folder. In the cache of
    Hugging Face, where `models--NAME/snapshots/REVISION` contains links, they may also lead to
    `models--NAME/blobs`.

    Args:
      path: The file, a path below `folder`.
      folder: The model's folder. A user has named it, so the folder itself may be a link.

    Raises:
      NotAFileError: The path leads out of the folder, to nothing, or to something other than a
        regular file.
      OSError: There is no such file, or it cannot be examined.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
    except OSError:
        if os.path.islink(path):
            raise NotAFileError("is a link that leads to nothing, expected a file") from None
        raise
    root = Path(os.path.realpath(folder))
    if not any(real.is_relative_to(place) for place in (root, *_blobs(root))):
        raise NotAFileError(
            f"leads to {printable(real)}, expected a file in the folder of the model, because a "
            "link could lead to a private file; copy the file into the folder"
        )
    _refuse_other_kinds(os.lstat(real).st_mode)
    return real


def _blobs(folder: Path) -> list[Path]:
    """Returns the folder of all files of a model in the cache of Hugging Face, if it is there."""
    found = []
    for revision in (folder, *folder.parents):
        snapshots, model = revision.parent, revision.parent.parent
        if snapshots.name == "snapshots" and model.name.startswith("models--"):
            found.append(model / "blobs")
    return found


def read_model_file(path: Path, folder: Path) -> bytes:
    """Reads a small file in a model's folder; see `model_file` and `read_file`."""
    return read_file(model_file(path, folder))


def read_model_object(path: Path, folder: Path) -> dict[str, Any]:
    """Reads a JSON object in a model's folder; see `model_file` and `parse_object`.

    Raises:
      OSError: The file cannot be read; see `model_file`.
    """
    data = read_model_file(path, folder)
    value = parse_object(data)
    # JSON can write such a character only in this way.
    if b"\\ud" in data.lower():
        _refuse_surrogates(value, "")
    return value


def _refuse_surrogates(value: Any, where: str) -> None:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            named = f"{printable(where)}={value!r:.100}" if where else "such a key"
            raise ValueError(
                f"has {named}, expected text in Unicode, which contains no half of a surrogate pair"
            ) from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_surrogates(key, "")
            _refuse_surrogates(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_surrogates(inner, f"{where}[{number}]")
