"""Paths in buckets, `s3://bucket/key` and `gs://bucket/key`, with the methods of `pathlib.Path`.

A bucket maps keys to objects. There are no folders, no renaming and no appending: an object appears
complete, in one request, or not at all. In this package a folder means all keys with a common
prefix, so a folder exists as soon as it has an object. Lists show all earlier writes.

Requests go through fsspec, with s3fs or gcsfs. These two packages read the credentials and the
address of the server from the environment; there is no other way to set them.

An object may change while it is read, and a server may send wrong bytes. So all requests of a read
name the same `Version`, and the answers are compared with this version.
"""

import dataclasses
import functools
import glob
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, TypeVar

from absl import logging

from manualpar.errors import require

# -------------------------------------------------------------------------------------------------
# Repeats requests to a bucket after temporary errors; explains all other errors.
#
# If a server is busy, a connection is cut off or a request takes too long, the request is repeated
# after each of the pauses in `WAITS` (in seconds), with a message on standard error. If the last
# attempt fails, a `BucketError` is raised, whose message is one sentence. The message contains
# only the error code of the server's answer, because the rest may contain parts of the signed
# request.


Result = TypeVar("Result")

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# The HTTP statuses below 500 that mean a temporary error: request timeout, conflict with another
# request, too early, and too many requests.
PASSING = frozenset({408, 409, 425, 429})
# Network errors, as pairs of a package's and a class's name, because the packages are optional.
NETWORK = frozenset(
    {
        ("aiohttp", "ClientError"),
        ("botocore", "ConnectionError"),
        ("botocore", "HTTPClientError"),
        ("fsspec", "FSTimeoutError"),
        ("google", "TransportError"),
        ("requests", "RequestException"),
    }
)
NO_CREDENTIALS = frozenset(
    {
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "RefreshError",
        "TokenRetrievalError",
    }
)
# tensorstore raises a `ValueError`, and only its text contains the status and the error code.
TENSORSTORE_STATUS = re.compile(r"http_response_code='(\d{3})'")
TENSORSTORE_CODE = re.compile(r"[A-Z_]+: ([A-Z][A-Za-z]{1,59}): ")
TENSORSTORE_PASSING = re.compile(r"(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE)\b")
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
}
ENDPOINTS = {
    "s3": "AWS_ENDPOINT_URL, which is for servers other than Amazon's",
    "gs": "STORAGE_EMULATOR_HOST, which is for servers other than Google's",
}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
ADDRESSES = {
    "s3": "set AWS_ENDPOINT_URL to the address that answers, or AWS_REGION to the bucket's region",
    "gs": "set STORAGE_EMULATOR_HOST to the address that answers",
}


class BucketError(OSError, ValueError):
    """A bucket cannot be read or written; the message is a sentence without its full stop.

    The class is also a `ValueError`, because commands print a `ValueError` as one sentence.
    """


class ContentError(BucketError):
    """The object changed after reading began, or the server sent bytes that were not requested."""


def twice(action: Callable[[], Result]) -> Result:
    """Calls `action`, and calls it a second time if the first call raises a `ContentError`."""
    try:
        return action()
    except ContentError as error:
        logging.warning("%s; reading it once more", error)
    return action()


def request(path: Any, action: Callable[[], Result]) -> Result:
    """Calls `action`, and repeats the call after the pauses in `WAITS` while errors are temporary.

    Args:
      path: The `BucketPath` of the request, for messages.
      action: Makes the request. It may be called again although the server has already carried out
        the request, because the answer may be lost.

    Raises:
      FileNotFoundError: There is no such object.
      FileExistsError: The request was to create an object that exists already.
      BucketError: The request fails for any other reason.
    """
    for wait in (*WAITS, None):
        try:
            return action()
        except FileExistsError:
            raise FileExistsError(f"{path} exists") from None
        except BucketError:
            raise
        except Exception as error:
            if not is_passing(error) or wait is None:
                raise _explained(path, error) from None
            logging.warning("%s: %s; trying again in %g s", path, describe_answer(error), wait)
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def is_passing(error: BaseException) -> bool:
    """Returns whether an error is temporary, so that the request may succeed later."""
    # Looks for an HTTP status first, because the type of a library's error is less precise.
    for status in filter(None, map(_status, _causes(error))):
        return status >= 500 or status in PASSING
    for cause in _causes(error):
        kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(cause).__mro__}
        if isinstance(cause, ConnectionError | TimeoutError) or kinds & NETWORK:
            return True
        if TENSORSTORE_PASSING.match(str(cause)):
            return True
    return False


def has_status(error: BaseException, status: int) -> bool:
    """Returns whether the server answered with an HTTP status, such as 412."""
    return any(_status(cause) == status for cause in _causes(error))


def describe_answer(error: BaseException) -> str:
    """Describes an error in a few words: the server's error code, or the type of the error."""
    for cause in _causes(error):
        if code := _code(cause):
            return f"the server answered {code}"
    name = "" if isinstance(error, ValueError) else f" ({type(error).__name__})"
    return f"the server cannot be reached{name}"


def _explained(path: Any, error: Exception) -> OSError:
    codes = {_code(cause) for cause in _causes(error)}
    statuses = {_status(cause) for cause in _causes(error)}
    names = {type(cause).__name__ for cause in _causes(error)}
    credentials, endpoint = CREDENTIALS[path.scheme], ENDPOINTS[path.scheme]
    if "NoSuchBucket" in codes:
        text = f"there is no such bucket: check its name, and {endpoint}"
    elif isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path} does not exist")
    elif names & NO_CREDENTIALS:
        text = f"there are no credentials in the environment: set {credentials}"
    elif isinstance(error, PermissionError) or statuses & {401, 403}:
        problem = f"access is refused ({_named(codes)})"
        text = f"{problem}: check {credentials}, and their permissions in this bucket"
    elif redirects := statuses & REDIRECTS:
        text = (
            f"the server redirects to another address ({min(redirects)}), which is not followed "
            f"because the request is signed for this address: {ADDRESSES[path.scheme]}"
        )
    elif is_passing(error):
        tries = f"in each of {len(WAITS) + 1} tries"
        text = f"{describe_answer(error)}, {tries}: check the network, and {endpoint}"
    else:
        text = f"the request failed ({_named(codes) or type(error).__name__}): check {endpoint}"
    return BucketError(f"{path}: {text}")


def _named(codes: set[str]) -> str:
    return ", ".join(sorted(filter(None, codes)))


def _code(error: BaseException) -> str:
    """Returns the server's code for an error, or the HTTP status; '' if there was no answer."""
    response = getattr(error, "response", None)
    found = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    if in_text := TENSORSTORE_CODE.match(str(error)):
        found = in_text[1]
    found = str(found or _status(error) or "")
    return found if re.fullmatch(r"[\w.-]{1,60}", found) else ""


def _status(error: BaseException) -> int:
    """Returns the HTTP status in an error of a library; 0 if the error has no status."""
    if in_text := TENSORSTORE_STATUS.search(str(error)):
        return int(in_text[1])
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(getattr(error, "status", None) or getattr(error, "code", None))
    return int(code) if code.isdecimal() else 0


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and the errors that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


# -------------------------------------------------------------------------------------------------
# Makes the requests to S3 and Google Cloud Storage for which fsspec's functions do not suffice.
#
# There are two: `read_part` reads one version of an object, and returns the server's data about
# this version. `list_page` lists objects page by page, so that an endless list is noticed.
#
# Requests to S3 follow no redirects, although aiobotocore lets aiohttp follow them. A request is
# signed for one host, so another host could only refuse the request. But the other host would
# receive the session token, and its answer to a list request would be trusted. So here a redirect
# raises an error. The exception is a redirect that names a region, such as Amazon's: it is
# returned to botocore, which signs the request again and sends it to this region.


MODULES = {"s3": "s3fs", "gs": "gcsfs"}
CONNECT_SECONDS, READ_SECONDS = 10, 60
PARTIAL_CONTENT, PRECONDITION_FAILED = 206, 412
REGION = "x-amz-bucket-region"
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclasses.dataclass(frozen=True)
class Version:
    """A server's data about the content of an object.

    Attributes:
      size: The size in bytes.
      tag: The ETag, which changes with the content; "" if the server sends no ETag.
      generation: The number that Google Cloud Storage gives to each content of a name; "" for S3.
    """

    size: int
    tag: str
    generation: str = ""


@dataclasses.dataclass(frozen=True)
class ObjectPart:
    """Bytes of an object, and the server's data about them.

    Attributes:
      data: The bytes; empty if `length` is more than was requested.
      length: The number of bytes that the server announces.
      tag: The ETag of the object; "" if the server sends no ETag.
      is_range: Whether the server sends a range, and not the whole object.
      size: The size of the whole object, if the server sends a range and this size.
    """

    data: bytes
    length: int
    tag: str
    is_range: bool
    size: int | None


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of a list: sizes by key, folders (with a slash at the end), and next page's token."""

    sizes: dict[str, int]
    folders: list[str]
    is_last: bool
    next_token: str


class RedirectError(OSError):
    """A server has redirected a request to another address."""

    def __init__(self, status: int) -> None:
        """Makes the error for a redirect with this HTTP status."""
        super().__init__(f"a redirect ({status})")
        self.status = status


def file_system(scheme: str) -> Any:
    """Returns fsspec's file system for a scheme; repeated calls return the same object."""
    require(f"{scheme}://", MODULES[scheme])
    import fsspec

    # No caching of lists, because a cached list would not show later writes of other processes.
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},
            "http_session_cls": _direct_session(),
        }
    files = fsspec.filesystem(scheme, **options)
    files.retries = 1  # No repetition here: `request` repeats requests, and reports this.
    return files


def version_of(info: dict[str, Any]) -> Version:
    """Reads the version of an object from fsspec's `info` about the object."""
    tag = str(info.get("ETag") or info.get("etag") or "")
    return Version(int(info["size"]), tag, str(info.get("generation") or ""))


def read_part(
    scheme: str,
    bucket: str,
    key: str,
    *,
    limits: tuple[int, int] | None,
    version: Version | None,
) -> ObjectPart:
    """Requests an object, or a range of its bytes.

    Args:
      scheme: A key of `MODULES`.
      limits: The first byte, and the byte after the last byte; `None` for the whole object.
      version: The version to read; the server refuses to send another version. `None` for any.

    Raises:
      ContentError: The server refused, because the object now has another version.
    """
    wanted = {} if limits is None else {"Range": f"bytes={limits[0]}-{limits[1] - 1}"}
    length = limits[1] - limits[0] if limits else version.size if version else None
    files = file_system(scheme)
    if scheme == "gs":
        generation = version.generation if version else ""
        url = files.url(f"{bucket}/{key}", generation=generation or None)
        headers, data = files.call("GET", url, headers=wanted)
        found = str(headers.get("Content-Range", ""))
        return ObjectPart(data, len(data), "", bool(found), _whole_size(found))
    import fsspec.asyn

    if version and version.tag:
        wanted["IfMatch"] = version.tag
    try:
        answer = files.call_s3("get_object", Bucket=bucket, Key=key, **wanted)
    except Exception as error:
        if has_status(error, PRECONDITION_FAILED):
            raise ContentError(f"s3://{bucket}/{key} changed after reading began") from None
        raise
    body = answer["Body"]
    try:
        sent = int(answer.get("ContentLength", 0))
        is_range = answer["ResponseMetadata"]["HTTPStatusCode"] == PARTIAL_CONTENT
        # A server may send the whole object instead of a range, which may not fit into memory.
        is_wanted = length is None or sent <= length
        data = fsspec.asyn.sync(files.loop, body.read) if is_wanted else b""
    finally:
        body.close()
    size = _whole_size(str(answer.get("ContentRange", "")))
    return ObjectPart(
        data, len(data) if is_wanted else sent, str(answer.get("ETag", "")), is_range, size
    )


def list_page(scheme: str, bucket: str, prefix: str, *, delimiter: str, token: str) -> Page:
    """Requests a page of the list of objects whose keys begin with `prefix`.

    Args:
      scheme: A key of `MODULES`.
      delimiter: "/" to list a folder without its subfolders' objects, "" to list all objects.
      token: The `next_token` of the previous page; "" for the first page.
    """
    files = file_system(scheme)
    if scheme == "gs":
        found = files.call(
            "GET",
            "b/{}/o",
            bucket,
            prefix=prefix or None,
            delimiter=delimiter or None,
            pageToken=token or None,
            json_out=True,
        )
        sizes = {item["name"]: int(item["size"]) for item in found.get("items", [])}
        token = str(found.get("nextPageToken") or "")
        return Page(sizes, list(found.get("prefixes", [])), not token, token)
    options = {"Delimiter": delimiter} if delimiter else {}
    if token:
        options["ContinuationToken"] = token
    found = files.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **options)
    sizes = {item["Key"]: int(item["Size"]) for item in found.get("Contents", [])}
    folders = [item["Prefix"] for item in found.get("CommonPrefixes", [])]
    token = str(found.get("NextContinuationToken") or "")
    return Page(sizes, folders, not found.get("IsTruncated"), token)


def _whole_size(content_range: str) -> int | None:
    found = CONTENT_RANGE.fullmatch(content_range)
    return int(found[3]) if found else None


@functools.cache
def _direct_session() -> type:
    """Returns a class of sessions without redirects, for `AioConfig(http_session_cls=...)`."""
    from aiobotocore.httpsession import AIOHTTPSession

    class DirectSession(AIOHTTPSession):  # type: ignore[misc, unused-ignore]  # Optional.
        async def _get_session(self, proxy_url: str | None) -> _Direct:
            return _Direct(await super()._get_session(proxy_url))

    return DirectSession


class _Direct:
    """Wraps a session of aiohttp, so that its requests follow no redirect."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> Any:
        """Sends a request and returns the response; raises a `RedirectError` for a redirect."""
        response = await self._session.request(*args, **options, allow_redirects=False)
        if response.status in REDIRECTS and REGION not in response.headers:
            response.close()
            raise RedirectError(response.status)
        return response


# -------------------------------------------------------------------------------------------------


T = TypeVar("T")

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# The fewest bytes that a `BucketFile` requests at once.
BLOCK_BYTES = 1 << 20
# A large file is uploaded in parts of this size, ten parts at a time.
UPLOADED_BYTES = 1 << 24
# A list counts as endless if it has more than `MOST_PAGES` pages (of up to a thousand objects
# each), or more than `MOST_EMPTY_PAGES` pages without new objects in a row.
MOST_PAGES, MOST_EMPTY_PAGES = 10_000, 100


@dataclasses.dataclass(frozen=True, order=True)
class BucketPath:
    """A path in a bucket. Its methods raise `FileNotFoundError` or `BucketError`.

    The class has no `__fspath__`, so that functions of `os` refuse it. Otherwise they could create
    a local folder `s3:`.
    """

    scheme: str
    bucket: str
    key: str = ""  # Parts separated by single slashes; '' for the bucket itself.

    def __str__(self) -> str:
        return f"{self.scheme}://{self._address}"

    def __truediv__(self, other: str | PurePosixPath) -> Self:
        parts = [*self.parts, *PurePosixPath(other).parts]
        if ".." in parts or "/" in parts:
            raise ValueError(f"{str(other)!r}, expected a path below {self}.")
        return dataclasses.replace(self, key="/".join(parts))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the key."""
        return tuple(self.key.split("/")) if self.key else ()

    @property
    def name(self) -> str:
        """The last part of the key; '' for the bucket itself."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder that contains this path; the parent of a bucket is the bucket itself."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def relative_to(self, folder: "BucketPath") -> PurePosixPath:
        """Returns this path relative to a folder that contains it."""
        if (folder.scheme, folder.bucket) != (self.scheme, self.bucket):
            raise ValueError(f"{self} is not below {folder}.")
        return PurePosixPath(self.key).relative_to(folder.key)

    def read_bytes(
        self, start: int = 0, stop: int | None = None, *, version: Version | None = None
    ) -> bytes:
        """Reads the object, or its bytes from `start` to `stop`.

        Args:
          start: The first byte.
          stop: The byte after the last byte; `None`, or a number beyond the end, means the end.
          version: The version to read, a result of `version`. By default the current version,
            which needs an extra request unless `stop` is given.

        Raises:
          ContentError: The object now has another version, or the server has twice sent bytes that
            were not requested.
        """

        def read() -> bytes:
            now = self.version() if version is None and stop is None else version
            end = now.size if now and (stop is None or stop > now.size) else stop
            assert end is not None, "without a version there is a stop"
            return b"" if end <= start else self._read_part(start, end, now)

        return twice(read)

    def write_bytes(self, data: bytes) -> None:
        """Writes the object, or replaces it; readers see the complete old or new content."""
        self._ask(lambda files: files.pipe_file(self._address, data))

    def upload(self, path: Path) -> None:
        """Uploads a local file of any size as the object; see `write_bytes`."""
        self._ask(lambda files: files.put_file(str(path), self._address, chunksize=UPLOADED_BYTES))

    def create(self, data: bytes) -> bool:
        """Creates the object unless it exists; returns whether the call created it."""
        try:
            self._ask(lambda files: files.pipe_file(self._address, data, mode="create"))
        except FileExistsError:
            # The request may have been repeated although its first attempt succeeded.
            return self.read_bytes() == data
        return True

    def size(self) -> int:
        """Returns the size of the object in bytes."""
        return self.version().size

    def version(self) -> Version:
        """Returns the current version of the object: its size, tag and generation."""
        found = self._ask(lambda files: files.info(self._address))
        if found["type"] != "file":
            raise FileNotFoundError(f"{self} does not exist")
        return version_of(found)

    def is_file(self) -> bool:
        """Returns whether there is an object with this key."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Returns whether there are objects below this path."""
        return bool(self.names())

    def exists(self) -> bool:
        """Returns whether the path is a file or a folder."""
        return self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """Returns the names of files and folders in this folder; `[]` if it does not exist."""
        sizes, folders = self._list(self._prefix, delimiter="/")
        found = (key.removeprefix(self._prefix).rstrip("/") for key in (*sizes, *folders))
        # An object whose key is the prefix itself is in the list with an empty name.
        return sorted(filter(None, found))

    def files(self) -> dict[str, int]:
        """Returns the size of each object below this folder, by its path relative to the folder."""
        sizes, _ = self._list(self._prefix)
        return {
            key.removeprefix(self._prefix): size
            for key, size in sorted(sizes.items())
            if not key.endswith("/")
        }

    def glob(self) -> dict["BucketPath", int]:
        """Finds the objects that match this path as a glob (`*`, `?`, `[]`, `**`), with sizes."""
        file_system(self.scheme)  # Reports a missing package.
        from fsspec.utils import glob_translate

        parts, folders = self.parts, [""]
        while len(parts) > 1 and "**" not in parts[0]:
            part, *rest = parts
            if glob.has_magic(part):
                matches = re.compile(glob_translate(part)).match
                below = [key for folder in folders for key in self._list(folder, delimiter="/")[1]]
                folders = [key for key in below if matches(key.rstrip("/").rpartition("/")[2])]
            else:
                folders = [f"{folder}{part}/" for folder in folders]
            parts = tuple(rest)
        delimiter = "" if "**" in parts[0] else "/"
        matches = re.compile(glob_translate(self.key)).match
        return {
            dataclasses.replace(self, key=key): size
            for folder in folders
            for key, size in sorted(self._list(folder, delimiter=delimiter)[0].items())
            if matches(key) and not key.endswith("/")
        }

    def copy_to(self, other: "BucketPath") -> None:
        """Copies the object to `other` on the server; replaces an existing object there."""
        self._ask(lambda files: files.cp_file(self._address, other._address))

    def delete(self) -> None:
        """Deletes the object, if there is one."""
        try:
            self._ask(lambda files: files.rm_file(self._address))
        except FileNotFoundError:
            return

    def delete_files(self, first: str = "") -> None:
        """Deletes all objects below this folder; deletes the object `first` before all others."""
        if first:
            (self / first).delete()
        if names := list(self.files()):
            addresses = [f"{self._address}/{name}" for name in names]
            self._ask(lambda files: files.rm(addresses))

    @property
    def _address(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    @property
    def _prefix(self) -> str:
        """The prefix of all keys below this path."""
        return f"{self.key}/" if self.key else ""

    def _ask(self, action: Callable[[Any], T]) -> T:
        files = file_system(self.scheme)  # Not in `request`, which would retry a missing package.
        return request(self, lambda: action(files))

    def _read_part(self, start: int, stop: int, version: Version | None) -> bytes:
        limits = None if version and (start, stop) == (0, version.size) else (start, stop)

        ask = functools.partial(
            read_part, self.scheme, self.bucket, self.key, limits=limits, version=version
        )
        try:
            part = request(self, ask)
        except FileNotFoundError:
            if version is None:
                raise
            raise ContentError(f"{self} changed or was deleted after reading began") from None
        if limits and not part.is_range:
            raise BucketError(
                f"{self}: the server answers a request for {stop - start} bytes with the whole "
                f"object, expected a server that supports ranges: check {ENDPOINTS[self.scheme]}"
            )
        if version and version.tag and part.tag not in ("", version.tag):
            raise ContentError(f"{self} changed after reading began (its ETag is another one)")
        end = stop if part.size is None or version else min(stop, part.size)
        if part.length != end - start:
            raise ContentError(
                f"{self}: the server sent {part.length} bytes, expected {end - start}: check the "
                f"object, and {ENDPOINTS[self.scheme]}"
            )
        return part.data

    def _list(self, prefix: str, *, delimiter: str = "") -> tuple[dict[str, int], list[str]]:
        """Returns the sizes of objects with a prefix, by key, and with a delimiter the folders.

        Raises:
          BucketError: The list cannot be read, or does not end.
        """
        sizes: dict[str, int] = {}
        folders: dict[str, None] = {}
        token, tokens, empty = "", {""}, 0
        for _ in range(MOST_PAGES):
            ask = functools.partial(
                list_page, self.scheme, self.bucket, prefix, delimiter=delimiter, token=token
            )
            page, before = request(self, ask), len(sizes) + len(folders)
            sizes |= page.sizes
            folders |= dict.fromkeys(page.folders)
            if page.is_last:
                return sizes, list(folders)
            empty = 0 if len(sizes) + len(folders) > before else empty + 1
            token = page.next_token
            if token in tokens or empty > MOST_EMPTY_PAGES:
                break
            tokens.add(token)
        raise BucketError(
            f"{self}: the server's list of objects does not end (after {len(tokens)} pages with "
            f"{len(sizes) + len(folders)} names the server says that there are more): check "
            f"{ENDPOINTS[self.scheme]}"
        )


AnyPath = Path | BucketPath
GivenPath = str | os.PathLike[str] | BucketPath  # The types of a path that callers may pass.


def as_path(text: GivenPath) -> AnyPath:
    """Parses a text into a local path or a path in a bucket.

    An error's message does not repeat the text, which may contain a password.
    """
    if isinstance(text, BucketPath):
        return text
    found = SCHEME.fullmatch(os.fspath(text))
    if not found:
        return Path(text)
    scheme, rest = found[1], found[2]
    bucket, _, key = rest.partition("/")
    if scheme not in MODULES:
        raise ValueError(
            f"a path begins with {scheme}://, which is not supported; expected s3://, gs:// or a "
            "local path."
        )
    if not BUCKET.fullmatch(bucket):
        raise ValueError(
            f"a path on {scheme}:// does not begin with the name of a bucket, expected "
            f"{scheme}://BUCKET/KEY. Write no user and no password into a path: credentials come "
            "from the environment."
        )
    if ".." in key.split("/") or not rest.isprintable():
        raise ValueError(f"a path on {scheme}://{bucket} contains '..' or unprintable characters.")
    return BucketPath(scheme, bucket, "/".join(part for part in key.split("/") if part))


class BucketFile(io.RawIOBase):
    """A file interface to an object, for reading from any position; each read requests a range.

    All reads use the version that was current when the file was opened.
    """

    def __init__(self, path: BucketPath, version: Version | None = None) -> None:
        """Opens the object in a given version, by default in its current version."""
        super().__init__()
        self._path, self._version, self._position = path, version or path.version(), 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to another position, and returns the new position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._version.size}[
            whence
        ]
        if start + offset < 0:
            raise ValueError(f"seek to {start + offset}, expected at least 0.")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer as far as possible; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        stop = self._position + len(view)
        data = self._path.read_bytes(self._position, stop, version=self._version)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_for_reading(path: AnyPath, *, version: Version | None = None) -> BinaryIO:
    """Opens a file, local or in a bucket, to be read from any position.

    Args:
      version: The version to read of a file in a bucket; by default the current version.
    """
    if isinstance(path, BucketPath):
        return io.BufferedReader(BucketFile(path, version), BLOCK_BYTES)
    return open(path, "rb")
