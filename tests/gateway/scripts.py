"""What a fake server does with a song, and where in it a test looks."""

import threading
import time
from collections.abc import Iterator

import grpc

from tests.client.fake_server import Message, Request, Script, chunk_message, song_messages

WARNING = "lyrics line 2: 'la' is dropped, because it shares the line with the tag '[Verse]'"


def whole(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
    """A song at once, with a warning."""
    yield from song_messages(request, warnings=(WARNING,))


def nothing(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
    """No message for as long as somebody listens: a song that waits for its turn."""
    while context.is_active():
        time.sleep(0.02)
    yield from ()


def failing(code: grpc.StatusCode, text: str, *, after_chunks: int) -> Script:
    """A song that ends with a status after some chunks."""

    def script(request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        for _, message in zip(range(after_chunks), song_messages(request), strict=False):
            yield message
        context.abort(code, text)

    return script


class Gated:
    """Songs whose first chunk leaves at once and whose others wait for `open.set()`."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        first, *rest = song_messages(request)
        yield first
        assert self.open.wait(60)
        yield from rest


class Endless:
    """A song without end, as fast as it is taken; counts the bytes of sound that were."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    def __call__(self, request: Request, context: grpc.ServicerContext) -> Iterator[Message]:
        first = next(iter(song_messages(request)))
        audio_bytes = len(first.infer_response.raw_output_contents[0])
        message = chunk_message(request.id, None, encoding="s16", progress=(1, 9000))
        message.CopyFrom(first)
        while context.is_active():
            yield message
            self.taken_bytes += audio_bytes
