"""What can go wrong with a song, as exceptions that say what to do next.

Every error carries `advice` (one sentence, may be empty) and `frames_done`, the frames whose audio
had arrived. The gRPC status decides the class; Triton itself refuses some requests without a status,
and then its wording does.
"""

import grpc

# Words of gRPC's own transport errors: nobody at the other end said them.
_TRANSPORT_WORDS = (
    "failed to connect",
    "connection refused",
    "connection reset",
    "connection timed out",
    "resolving",
    "resolution",
    "lookup",
    "socket closed",
    "recvmsg",
    "sendmsg",
    "goaway",
    "broken pipe",
    "keepalive",
    "ping timeout",
    "http1.x",
    "unavailable: transport",
    "stream removed",
)


class Music3Error(Exception):
    """A song that did not arrive whole."""

    def __init__(self, message: str, *, advice: str = "", frames_done: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.frames_done = frames_done

    def __str__(self) -> str:
        return f"{self.message}\n{self.advice}" if self.advice else self.message


class InvalidRequest(Music3Error, ValueError):  # noqa: N818 - named after the contract's table
    """The request cannot be served as it is; the message names the field and what is allowed."""


class ServerUnavailable(Music3Error):  # noqa: N818
    """Nobody answers, the connection broke, or the server has no place now. Asking again may help."""


class Cancelled(Music3Error):  # noqa: N818
    """The song was cancelled, here or by the server."""


class DeadlinePassed(Cancelled):
    """The deadline given with the request passed before the song was done."""


class ServerError(Music3Error):
    """The server failed on this song; its log has the reason."""


def from_status(
    code: grpc.StatusCode, details: str, *, url: str, model: str, frames_done: int = 0
) -> Music3Error:
    """The exception for a gRPC status, whether the server sent it or the transport made it."""
    details = (details or "").strip() or code.name
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(details, frames_done=frames_done)
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"cancelled: {details}", frames_done=frames_done)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        advice = "Give it more time (deadline_s, --deadline), or ask for fewer frames."
        return DeadlinePassed("the deadline passed", advice=advice, frames_done=frames_done)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(details, url=url, frames_done=frames_done)
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        return _no_such_model(details, url=url, model=model, frames_done=frames_done)
    return ServerError(
        details, advice="The server's log has the details; other songs go on.", frames_done=frames_done
    )


def from_message(message: str, *, url: str, model: str, frames_done: int = 0) -> Music3Error:
    """The exception for an error text that came without a status (Triton's own checks of a request)."""
    text = message.lower()
    if "unknown model" in text or ("model" in text and "not found" in text):
        return _no_such_model(message, url=url, model=model, frames_done=frames_done)
    if "not ready" in text or "unavailable" in text or "maximum queue size" in text:
        return _unavailable(message, url=url, frames_done=frames_done)
    if "unexpected" in text or "expected" in text or "missing" in text:
        return InvalidRequest(message, frames_done=frames_done)
    if "cancel" in text:
        return Cancelled(message, frames_done=frames_done)
    return from_status(grpc.StatusCode.INTERNAL, message, url=url, model=model, frames_done=frames_done)


def _unavailable(details: str, *, url: str, frames_done: int) -> ServerUnavailable:
    if not any(word in details.lower() for word in _TRANSPORT_WORDS):
        return ServerUnavailable(details, advice="Ask again in a while.", frames_done=frames_done)
    if frames_done:
        return ServerUnavailable(
            f"the connection to {url} broke after {frames_done} frames ({details})",
            advice="Ask again: the same caption, lyrics and seed give the same song.",
            frames_done=frames_done,
        )
    return ServerUnavailable(
        f"no answer from {url} ({details})",
        advice="Is the server running (./build.sh serve), and is this its gRPC port (8001 by default, "
        "not HTTP's 8000)?",
    )


def _no_such_model(details: str, *, url: str, model: str, frames_done: int) -> ServerUnavailable:
    return ServerUnavailable(
        f"{url} does not serve the model {model!r} ({details})",
        advice="Start the server on this project's model_repository, or name the model it serves.",
        frames_done=frames_done,
    )
