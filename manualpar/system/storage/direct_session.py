"""Makes connections to an S3 server that follow no redirects.

aiobotocore lets aiohttp follow redirects. A request is signed for one host, so another host could
only refuse the request. But the other host would receive the session token, and its answer to a
list request would be trusted. So here a redirect raises an error. The exception is a redirect that
names a region, such as Amazon's: it is returned to botocore, which signs the request again and
sends it to this region.
"""

import functools
from typing import Any

from manualpar.system.storage.requests import REDIRECTS

REGION = "x-amz-bucket-region"


class RedirectError(OSError):
    """A server has redirected a request to another address."""

    def __init__(self, status: int) -> None:
        """Makes the error for a redirect with this HTTP status."""
        super().__init__(f"a redirect ({status})")
        self.status = status


@functools.cache
def direct_session() -> type:
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
