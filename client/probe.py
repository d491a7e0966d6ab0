"""Whether a server can make songs, asked so cheaply that it may be asked every ten seconds.

    python -m client.probe --url localhost:8001 --timeout 10

The server's own readiness stays green when one of its model processes died. This asks the `music3` model: if
sound of any song came out in the last seconds, it says so; if nothing runs, it makes one frame of music with
all stages; while songs run, their next sound is the answer. A busy server answers, a broken one does not.
Exit codes: 0 songs can be made; 1 not, or not in time.
"""

import argparse
import os
import sys
import time
import uuid
from collections.abc import Sequence

import grpc

from client import wire
from client.errors import Music3Error, ServerUnavailable

DEFAULT_TIMEOUT_S = 10.0


def probe(
    url: str = wire.DEFAULT_URL, *, timeout_s: float = DEFAULT_TIMEOUT_S, model: str = wire.DEFAULT_MODEL
) -> float:
    """Ask once; the seconds that the answer took.

    Raises a Music3Error if songs can't be made, or the answer didn't come in time.
    """
    started_s = time.monotonic()
    request_id = f"probe-{uuid.uuid4().hex[:8]}"
    request = wire.build_request(
        caption="probe",
        lyrics="la",
        seed=0,
        max_frames=1,
        audio_encoding="s16",
        model=model,
        request_id=request_id,
    )
    request.parameters["probe"].bool_param = True
    reader = wire.SongReader(audio_encoding="s16", url=url, model=model, request_id=request_id)
    target, secure = wire.split_url(url)
    channel = (
        grpc.secure_channel(target, grpc.ssl_channel_credentials())
        if secure
        else grpc.insecure_channel(target)
    )
    with channel:
        try:
            for message in wire.song_method(channel)(request, timeout=timeout_s):
                reader.read(message)  # to the stream's end, see music3_client
        except grpc.RpcError as error:
            raise reader.error(error.code(), error.details()) from None
    if reader.finish_reason is None:
        raise ServerUnavailable("the server ended the probe without an answer")
    return time.monotonic() - started_s


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m client.probe", description="Find out whether a server can make songs."
    )
    parser.add_argument("--url", default=os.environ.get("MUSIC3_URL", wire.DEFAULT_URL), help="host:port")
    parser.add_argument("--timeout", metavar="S", type=float, default=DEFAULT_TIMEOUT_S, help="default 10")
    parser.add_argument("--model", default=wire.DEFAULT_MODEL, help="default music3")
    arguments = parser.parse_args(argv)
    try:
        seconds = probe(arguments.url, timeout_s=arguments.timeout, model=arguments.model)
    except Music3Error as error:
        print(f"{arguments.url}: no songs: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.url}: makes songs (answered in {seconds:.2f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
