"""Requests to S3 and to Google's service for which fsspec's functions do not suffice.

There are two requests. Reading an object needs one version, and the server's data about this
version. Listing goes page by page here, so that an endless list is noticed.

Requests to S3 follow no redirect, although aiobotocore lets aiohttp follow them. A request is
signed for one host, so another host could only refuse it. But the other host would receive the
session token, and its answer to a list request would be trusted. So a redirect is an error here. A
redirect that names a region, like Amazon's redirects, is returned as the answer: botocore then
signs the request again and sends it to this region.
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
      size: In bytes.
      tag: The ETag, which changes with the content; "" if the server gives none.
      generation: The number that Google's service gives to each content of a name; "" for S3.
    """

    size: int
    tag: str
    generation: str = ""


@dataclasses.dataclass(frozen=True)
class ObjectPart:
    """Bytes of an object, and the server's data about them.

    Attributes:
      data: The bytes; empty if `length` is not the requested length.
      length: The number of bytes according to the server.
      tag: The ETag of the object; "" if the server gives none.
      is_range: Whether the bytes are a range, and not the whole object.
      size: The size of the whole object, if the bytes are a range and the server gives it.
    """

    data: bytes
    length: int
    tag: str
    is_range: bool
    size: int | None


@dataclasses.dataclass(frozen=True)
class Page:
    """A part of a list: sizes by key, folders with a slash at the end, next page's token."""

    sizes: dict[str, int]
    folders: list[str]
    is_last: bool
    next_token: str


class RedirectError(OSError):
    """A server has redirected a request to another address."""

    def __init__(self, status: int) -> None:
        """Takes the HTTP status."""
        super().__init__(f"a redirect ({status})")
        self.status = status


def file_system(scheme: str) -> Any:
    """Returns fsspec's file system; fsspec keeps one object for each set of options."""
    require(f"{scheme}://", MODULES[scheme])
    import fsspec

    # A cached list would not show later writes of other processes.
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},
            "http_session_cls": _direct_session(),
        }
    files = fsspec.filesystem(scheme, **options)
    files.retries = 1  # `request` repeats, and reports that.
    return files


def version_of(info: dict[str, Any]) -> Version:
    """Reads the version of an object from the `info` of fsspec."""
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
    """Asks for an object, or for a range of it.

    Args:
      scheme: A key of `MODULES`.
      bucket: The bucket.
      key: The key of the object.
      limits: The first byte and the byte after the last; `None` for the whole object.
      version: The version of the bytes. The server refuses to send bytes of another version.

    Raises:
      ContentError: The server has refused, because the object has another version.
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
        # A whole object in place of a small part may not fit into memory.
        is_wanted = length is None or sent <= length
        data = fsspec.asyn.sync(files.loop, body.read) if is_wanted else b""
    finally:
        body.close()
    size = _whole_size(str(answer.get("ContentRange", "")))
    return ObjectPart(
        data, len(data) if is_wanted else sent, str(answer.get("ETag", "")), is_range, size
    )


def list_page(scheme: str, bucket: str, prefix: str, *, delimiter: str, token: str) -> Page:
    """Asks for a page of the list of objects whose keys begin with `prefix`.

    Args:
      scheme: A key of `MODULES`.
      bucket: The bucket.
      prefix: The beginning of the objects' keys.
      delimiter: "/" to list only the folder itself, "" for everything below.
      token: The `next_token` of the page before; "" for the first page.
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
    """Returns the class of sessions without redirects, for `AioConfig(http_session_cls=...)`."""
    from aiobotocore.httpsession import AIOHTTPSession

    class DirectSession(AIOHTTPSession):  # type: ignore[misc, unused-ignore]  # Optional.
        async def _get_session(self, proxy_url: str | None) -> _Direct:
            return _Direct(await super()._get_session(proxy_url))

    return DirectSession


class _Direct:
    """A session of aiohttp whose requests follow no redirect."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> Any:
        """Sends a request; returns its response."""
        response = await self._session.request(*args, **options, allow_redirects=False)
        if response.status in REDIRECTS and REGION not in response.headers:
            response.close()
            raise RedirectError(response.status)
        return response
