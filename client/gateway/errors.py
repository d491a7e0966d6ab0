"""Errors as OpenAI's API shapes them: a status and `{"error": {message, type, param, code}}`.

What the client library raises is translated here: its fields get the names that this door uses for them, and
nothing of the machine behind the gateway (addresses, tracebacks) is shown.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from client.errors import Cancelled, DeadlinePassed, InvalidRequest, Music3Error, ServerUnavailable

RETRY_AFTER_S: Final = 5

# The model's inputs, as this door calls them.
FIELD_NAMES: Final = {
    "caption": "instructions",
    "lyrics": "input",
    "max_frames": "max_new_tokens",
    "seed": "seed",
}
_FIELD: Final = re.compile(rf"^({'|'.join(FIELD_NAMES)}): ")
_CODES: Final = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "forbidden_origin",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "too_many_songs",
    500: "song_failed",
    503: "unavailable",
    504: "time_limit",
}
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. `param` is the field it is about, if it is about one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status, HTTPStatus(status).name.lower())

    def body(self) -> dict[str, object]:
        """What is sent, as JSON or in an event."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> Mapping[str, str]:
        """Headers that belong to the status."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def from_song_error(error: Music3Error, *, url: str) -> ApiError:
    """The answer for a song that did not arrive whole. `url` is the server's, which no answer names."""
    match error:
        case InvalidRequest():
            field = _FIELD.match(error.message)
            if field is None:
                return ApiError(400, error.message)
            name = FIELD_NAMES[field[1]]
            return ApiError(400, f"{name}: {error.message[field.end() :]}", param=name)
        case DeadlinePassed():
            return ApiError(504, "the song took longer than this gateway's time limit; ask for fewer frames")
        case ServerUnavailable() if url in error.message:
            return ApiError(503, "the music server does not answer; try again later")
        case ServerUnavailable() | Cancelled():
            return ApiError(503, f"{error.message}; try again later")
        case _:
            return ApiError(500, "the song failed; the server's log says why")
