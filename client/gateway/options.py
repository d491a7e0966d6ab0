"""What can be set on a gateway: the command line, and the environment for its key alone."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client.wire import DEFAULT_MODEL, DEFAULT_URL

KEY_VARIABLE: Final = "MUSIC3_GATEWAY_KEY"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Options:
    """A gateway's settings; the defaults are the command line's."""

    host: str = "127.0.0.1"
    port: int = 8080
    url: str = DEFAULT_URL
    model: str = DEFAULT_MODEL
    keys: tuple[str, ...] = ()
    model_aliases: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_songs: int = 64
    max_connections: int = 512
    max_body_bytes: int = 2**20
    head_limit_s: float = 20.0
    body_limit_s: float = 30.0
    buffer_bytes: int = 8 * 2**20
    time_limit_s: float = 3600.0
    stall_limit_s: float = 60.0
    drain_s: float = 600.0
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in _LOOPBACK


def _parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="gateway",
        description="POST /v1/audio/speech and a listening page, over a running Music 3 server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default=defaults.host, help="address to listen on; the default is this machine alone")
    add("--port", type=int, default=defaults.port, help="0: any free one, named in the first line")
    add("--url", default=defaults.url, help="the server's gRPC door; grpcs:// for TLS")
    add("--model", default=defaults.model, help="the model's name there")
    add(
        "--key-file",
        type=Path,
        help=f"bearer keys, one a line; else {KEY_VARIABLE}, else no key is asked for",
    )
    add("--model-alias", action="append", default=[], help="one more name that a request's model may have")
    add("--allow-origin", action="append", default=[], help="another site whose pages may use this gateway")
    add(
        "--max-songs", type=_positive, default=defaults.max_songs, help="at once, waiting ones too; more: 429"
    )
    add(
        "--max-connections",
        type=_positive,
        default=defaults.max_connections,
        help="at once, idle ones too; more are closed unheard",
    )
    add("--max-body-bytes", type=_positive, default=defaults.max_body_bytes, help="of a request; more: 413")
    add(
        "--buffer-bytes",
        type=_positive,
        default=defaults.buffer_bytes,
        help="kept per song for a slow reader",
    )
    add(
        "--head-limit-s",
        type=float,
        default=defaults.head_limit_s,
        help="for a request's head to arrive; longer: the connection is closed",
    )
    add("--body-limit-s", type=float, default=defaults.body_limit_s, help="for a body to arrive; longer: 408")
    add("--time-limit-s", type=float, default=defaults.time_limit_s, help="for a song, its waiting included")
    add("--stall-limit-s", type=float, default=defaults.stall_limit_s, help="for a reader that takes nothing")
    add("--drain-s", type=float, default=defaults.drain_s, help="for songs on their way after SIGTERM")
    add("--tls-certificate", type=Path, help="PEM file; with it the gateway speaks HTTPS")
    add("--tls-key", type=Path, help="PEM file")
    return parser


def read(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> Options:
    """Options from a command line; leaves with exit code 2 where something is wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in ("head_limit_s", "body_limit_s", "time_limit_s", "stall_limit_s", "drain_s"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: must be more than 0")
    for path in (given.tls_certificate, given.tls_key):
        if path is not None and not path.is_file():
            parser.error(f"there is no file {path}")
    keys = [environment.get(KEY_VARIABLE, "")]
    if given.key_file is not None:
        try:
            keys = given.key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--key-file: {error}")
        if not any(key.strip() for key in keys):
            parser.error(f"--key-file: there is no key in {given.key_file}")
    return Options(
        host=given.host,
        port=given.port,
        url=given.url,
        model=given.model,
        keys=tuple(key.strip() for key in keys if key.strip()),
        model_aliases=tuple(given.model_alias),
        allowed_origins=tuple(origin.rstrip("/").lower() for origin in given.allow_origin),
        max_songs=given.max_songs,
        max_connections=given.max_connections,
        max_body_bytes=given.max_body_bytes,
        head_limit_s=given.head_limit_s,
        body_limit_s=given.body_limit_s,
        buffer_bytes=given.buffer_bytes,
        time_limit_s=given.time_limit_s,
        stall_limit_s=given.stall_limit_s,
        drain_s=given.drain_s,
        tls_certificate=given.tls_certificate,
        tls_key=given.tls_key,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
