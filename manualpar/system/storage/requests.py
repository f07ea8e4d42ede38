"""Repeats requests to a bucket after temporary errors; explains all other errors.

If a server is busy, a connection is cut off or a request takes too long, the request is repeated
after each of the pauses in `WAITS` (in seconds), with a message on standard error. If the last
attempt fails, a `BucketError` is raised, whose message is one sentence. The message contains only
the error code of the server's answer, because the rest may contain parts of the signed request.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging

T = TypeVar("T")

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


def twice(action: Callable[[], T]) -> T:
    """Calls `action`, and calls it a second time if the first call raises a `ContentError`."""
    try:
        return action()
    except ContentError as error:
        logging.warning("%s; reading it once more", error)
    return action()


def request(path: Any, action: Callable[[], T]) -> T:
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
