"""A song as server-sent events, with the names that OpenAI's API and vllm-omni give them.

`speech.audio.delta` carries base64 `audio` and how far the song is, `speech.audio.done` how it ended and
`usage`, `speech.audio.error` an error in place of the end.
"""

import base64
import json
from typing import Final

from client.gateway.errors import ApiError
from client.gateway.speech_request import SpeechRequest
from client.wire import SongProgress
from python_backend_models.contract import CHANNELS, FRAME_RATE_HZ, OUTPUT_RATE_HZ

ALIVE: Final = b": waiting\n\n"


def delta(audio: bytes, wanted: SpeechRequest, progress: SongProgress, *, is_first: bool) -> bytes:
    """A piece of sound. The first one says what the song is made from and of."""
    fields: dict[str, object] = {
        "audio": base64.b64encode(audio).decode("ascii"),
        "response_format": wanted.response_format,
        "frames": progress.frames_done,
        "frame_cap": progress.frame_cap,
    }
    if is_first:
        fields |= {
            "id": progress.request_id,
            "seed": wanted.seed,
            "frame_rate": FRAME_RATE_HZ,
            "sample_rate": OUTPUT_RATE_HZ,
            "channels": CHANNELS,
            "warnings": progress.warnings,
        }
    return _event("speech.audio.delta", fields)


def done(wanted: SpeechRequest, progress: SongProgress) -> bytes:
    """The end of a song that is whole."""
    prompt_tokens = progress.prompt_tokens or 0
    fields = {
        "id": progress.request_id,
        "seed": wanted.seed,
        "finish_reason": progress.finish_reason,
        "frames": progress.frames_done,
        "warnings": progress.warnings,
        "usage": {
            "input_tokens": prompt_tokens,
            "output_tokens": progress.frames_done,
            "total_tokens": prompt_tokens + progress.frames_done,
        },
    }
    return _event("speech.audio.done", fields)


def failed(error: ApiError) -> bytes:
    """The end of a song that is not whole: what came before is a part of it."""
    return _event("speech.audio.error", error.body())


def _event(name: str, fields: dict[str, object]) -> bytes:
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode("ascii")
