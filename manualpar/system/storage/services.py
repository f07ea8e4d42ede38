"""Makes the requests to S3 and Google Cloud Storage for which fsspec's functions do not suffice.

There are two: `read_part` reads one version of an object, and returns the server's data about this
version. `list_page` lists objects page by page, so that an endless list is noticed.

Requests to S3 follow no redirects, although aiobotocore lets aiohttp follow them. A request is
signed for one host, so another host could only refuse the request. But the other host would receive
the session token, and its answer to a list request would be trusted. So here a redirect raises an
error. The exception is a redirect that names a region, such as Amazon's: it is returned to
botocore, which signs the request again and sends it to this region.
"""

import dataclasses
import functools
import re
from typing import Any

from manualpar.errors import require
from manualpar.system.storage.requests import REDIRECTS, ContentError, has_status

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
      bucket: The name of the bucket.
      key: The key of the object.
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
      bucket: The name of the bucket.
      prefix: The beginning of the objects' keys.
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
