"""What every request passes first: who may ask, how much may be sent, what browsers may do with the answer.

Pure ASGI, so that nothing is buffered. Only /v1/ costs anything, so only /v1/ asks for a key.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.errors import ApiError
from client.gateway.metrics import Metrics
from client.gateway.options import Options
from client.gateway.waiting import within

ROUTES: Final = ("/v1/audio/speech", "/v1/models", "/health", "/metrics", "/")
_SECURITY_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
# The page needs its own files, its own API, and sound it has made itself.
_PAGE_POLICY: Final = "; ".join(
    (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:",
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )
)
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Middleware: keys, foreign pages, security headers, and the count of answers."""

    def __init__(self, app: ASGIApp, *, options: Options, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._keys = [_digest(key.encode()) for key in options.keys]
        sites = [_name(_netloc(origin) or "") for origin in options.allowed_origins]
        # A proxy may pass the name under which the world knows it, or the one that it knows the gateway by.
        self._own_names = {*_LOCAL_NAMES, *(site for site in sites if site)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_SECURITY_HEADERS)
                if not scope["path"].startswith("/v1/"):
                    headers["Content-Security-Policy"] = _PAGE_POLICY
                self._metrics.requests.labels(_route(scope["path"]), str(message["status"])).inc()
            await send(message)

        try:
            if scope["path"].startswith("/v1/"):
                self._check_origin(scope)
                self._check_key(Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, counted_send)
        else:
            await self._app(scope, receive, counted_send)

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # which is how a header's bytes were read
        # All are compared, each in constant time: how long it takes tells nothing about any key.
        found = sum(hmac.compare_digest(given, known) for known in self._keys)
        if scheme.lower() != "bearer" or not found:
            raise ApiError(401, "a valid key is needed: Authorization: Bearer <key>")

    def _check_origin(self, scope: Scope) -> None:
        """Refuse pages of other sites, which a browser on this machine would let ask for songs."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if origin in self._options.allowed_origins:
            return
        # A foreign name that points at this machine: its pages would count as this gateway's own.
        if self._options.is_local and not self._keys and _name(host) not in self._own_names:
            raise ApiError(403, "this gateway serves its own machine alone; see --host and --allow-origin")
        if origin and _netloc(origin) != host:
            raise ApiError(403, "pages of other sites may not use this gateway; see --allow-origin")
        # What <audio> asks for has no Origin.
        if not origin and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "pages of other sites may not use this gateway; see --allow-origin")


async def read_body(request: Request, options: Options) -> bytes:
    """A request's body. Raises ApiError 413 for one that is too large, before reading it where its length is
    told, and 408 for one that does not come."""
    limit = options.max_body_bytes
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise ApiError(400, "Content-Length is not a number")
    if int(length[:20]) > limit:
        raise ApiError(413, f"the body has {length[:20]} bytes; at most {limit}")

    async def read() -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise ApiError(413, f"the body has more than {limit} bytes")
        return bytes(body)

    try:
        return await within(read(), options.body_limit_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {options.body_limit_s:g} s") from None


class _AsciiResponse(JSONResponse):
    """Errors quote what was asked for, and JSON may ask with half a character, which UTF-8 cannot hold."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(error: ApiError, *, extra_headers: Iterable[tuple[str, str]] = ()) -> JSONResponse:
    """The answer that is this error."""
    headers = {**error.headers(), **dict(extra_headers)}
    if error.status in (408, 413):
        # The rest of the body is not read: the connection cannot be used again.
        headers["Connection"] = "close"
    return _AsciiResponse(error.body(), status_code=error.status, headers=headers)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _netloc(url: str) -> str | None:
    """Host and port; None where brackets hold no address."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _route(path: str) -> str:
    if path.startswith("/v1/models/"):
        return "/v1/models"
    return path if path in ROUTES else "other"
