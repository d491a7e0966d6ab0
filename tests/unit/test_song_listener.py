"""A song's listener: a request that the server has freed, and an end that can't be sent."""

import threading
from typing import Any

import pytest

from tests.unit import fake_triton
from tests.unit.fake_triton import InferenceRequest

fake_triton.install()

from python_backend_models import triton_io  # noqa: E402  after the stand-in
from python_backend_models.orchestrator import UnavailableError  # noqa: E402


class Talkative:
    """A sender that takes its time, and can't send errors."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.sent: list[int] = []

    def is_cancelled(self) -> bool:
        assert not self.sent, "a question about a request that the server has freed"
        self.asked.set()
        assert self.go_on.wait(60)
        assert not self.sent, "the request was freed amid a question about it"
        return False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None:
            raise MemoryError("no shared memory")
        self.sent.append(flags)


def listener_of(sender: Any) -> triton_io.SongListener:
    return triton_io.SongListener(InferenceRequest(), sender, audio_encoding="f32", profile="vllm-omni")


def test_nobody_asks_about_a_request_that_is_freed() -> None:
    """The server would look at freed memory."""
    sender = Talkative()
    listener = listener_of(sender)
    threads = [threading.Thread(target=call) for call in (listener.cancelled, lambda: listener.close(None))]
    threads[0].start()
    assert sender.asked.wait(60)
    threads[1].start()
    sender.go_on.set()
    for thread in threads:
        thread.join(60)
    assert sender.sent == [1]
    assert listener.cancelled()


def test_an_error_that_can_not_be_sent_still_ends_the_stream() -> None:
    sender = Talkative()
    listener = listener_of(sender)
    with pytest.raises(MemoryError):
        listener.close(UnavailableError("the queue is full"))
    assert sender.sent == [1]
    listener.close(None)
    assert sender.sent == [1]
