"""Client of the `music3` model: a library (sync and asyncio) and a command line.

    with Music3Client("localhost:8001") as client:
        with client.stream(caption, lyrics, seed=7) as song:
            for chunk in song:
                chunk.audio  # float32 [samples, 2] at chunk.sample_rate_hz

Needs tritonclient[grpc], numpy, rich and soundfile; nothing of the server's side.
"""

from client.async_client import AsyncMusic3Client, AsyncSongStream
from client.errors import (
    Cancelled,
    DeadlinePassed,
    InvalidRequest,
    Music3Error,
    ServerError,
    ServerUnavailable,
)
from client.music3_client import Music3Client, SongStream
from client.wire import Chunk, Song, SongProgress

__all__ = [
    "AsyncMusic3Client",
    "AsyncSongStream",
    "Cancelled",
    "Chunk",
    "DeadlinePassed",
    "InvalidRequest",
    "Music3Client",
    "Music3Error",
    "ServerError",
    "ServerUnavailable",
    "Song",
    "SongProgress",
    "SongStream",
]
