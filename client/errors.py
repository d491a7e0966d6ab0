"""What can go wrong with a song, as exceptions that say what to do next.

Every error carries `advice` (one sentence, may be empty) and `frames_done`, the frames that had arrived.
Where a gRPC status comes, it decides the class. Triton's streams carry a refusal as text without its status;
then the text decides: by the name of a status that it begins with, else by the wording of the server's rules.
"""

import re

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
    "cancelling all calls",
)


# What the texts of errors look like that come without a status, first match first. The server's refusals of a
# field begin with its name; Triton's own checks of a request have words of their own.
_KINDS: tuple[tuple[str, str], ...] = (
    (r"^(caption|lyrics|seed|max_frames|audio_encoding|prompt|probe): ", "INVALID_ARGUMENT"),
    (r"this model cannot honour|no such input|sent as a request parameter", "INVALID_ARGUMENT"),
    (r"songs run and \d+ wait|not available|not ready|maximum queue size|shutting down", "UNAVAILABLE"),
    (r"^(talker|dit|vocoder): |the server's log says why", "INTERNAL"),
    (r"unknown model|model '?[^']*'? is not found", "NOT_FOUND"),
    (r"cancelled|given up", "CANCELLED"),
    (
        r"unexpected (shape|inference input|data)|expected number of inputs|inference input",
        "INVALID_ARGUMENT",
    ),
)
_NAMED_STATUS = re.compile(r"^\[?([A-Z]+(?:_[A-Z]+)*)\]?: ")
_TRITON_NAMES = {"INVALID_ARG": "INVALID_ARGUMENT"}


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
    """The exception for an error text that came without a status."""
    name = "INTERNAL"
    named = _NAMED_STATUS.match(message)
    if named and _TRITON_NAMES.get(named[1], named[1]) in grpc.StatusCode.__members__:
        name, message = _TRITON_NAMES.get(named[1], named[1]), message[named.end() :]
    else:
        name = next((kind for words, kind in _KINDS if re.search(words, message)), name)
    return from_status(grpc.StatusCode[name], message, url=url, model=model, frames_done=frames_done)


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
