"""A real gateway process in front of a fake server: what is sent, in which form, and every error's status."""

import asyncio
import base64
import http.client
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import soundfile
from prometheus_client.parser import text_string_to_metric_families

from client.gateway import options
from client.gateway.metrics import Metrics
from client.gateway.options import Options
from client.gateway.service import Service
from tests.client.fake_server import FakeServer, one_chunk_then_nothing, read_inputs, song_audio
from tests.gateway.conftest import ALLOWED_ORIGIN, MakeGateway, StandIn
from tests.gateway.gateway import CAPTION, LYRICS, Answer
from tests.gateway.scripts import WARNING, failing, nothing, whole
from tests.triton.server import wait_until

MEDIA_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm; rate=32000; channels=2",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
}


# ---------------------------------------------------------------- songs


def test_whole_files(stand_in: StandIn) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    answers = {name: gateway.sing(seed=7, response_format=name) for name in MEDIA_TYPES}
    song = song_audio(250, 7)
    for name, answer in answers.items():
        assert answer.status == 200
        assert answer.headers["content-type"] == MEDIA_TYPES[name]
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.headers["x-music3-seed"] == "7"
        assert answer.headers["x-music3-frames"] == "250"
        assert answer.headers["x-music3-frame-cap"] == "250"
        assert answer.headers["x-music3-finish-reason"] == "length"
        assert json.loads(answer.headers["x-music3-warnings"]) == [WARNING]
        assert f'filename="song-seed7.{name}"' in answer.headers["content-disposition"]
    assert answers["pcm"].body == song.tobytes()
    for name in ("wav", "flac"):
        heard, rate_hz = soundfile.read(io.BytesIO(answers[name].body), dtype="int16")
        assert rate_hz == 32_000
        np.testing.assert_array_equal(heard, song)
    for name in ("mp3", "ogg"):
        with soundfile.SoundFile(io.BytesIO(answers[name].body)) as file:
            assert (file.frames, file.channels, file.samplerate) == (len(song), 2, 32_000)
    ids = [answer.headers["x-request-id"] for answer in answers.values()]
    assert [request.id for request in server.requests] == ids
    assert read_inputs(server.requests[0]) == {
        "caption": CAPTION,
        "lyrics": LYRICS,
        "seed": 7,
        "audio_encoding": "s16",
    }


def test_streams(stand_in: StandIn) -> None:
    gateway = stand_in.gateway
    for name, media_type in MEDIA_TYPES.items():
        answer = gateway.sing(seed=3, max_new_tokens=120, response_format=name, stream=True)
        assert answer.headers["content-type"] == media_type
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.headers["x-music3-frame-cap"] == "120"
        assert "x-music3-finish-reason" not in answer.headers
        if name == "pcm":
            assert answer.body == song_audio(120, 3).tobytes()
        if name == "wav":
            assert answer.body[44:] == song_audio(120, 3).tobytes()
    got = gateway.ask("GET", "/v1/audio/speech?input=la&instructions=folk&seed=3&max_new_tokens=120")
    assert got.headers["content-type"] == "audio/wav"
    assert got.body[44:] == song_audio(120, 3).tobytes()


def test_events(stand_in: StandIn) -> None:
    gateway = stand_in.gateway
    answer = gateway.sing(seed=5, response_format="pcm", stream_format="sse")
    assert answer.headers["content-type"] == "text/event-stream"
    *deltas, done = answer.events()
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(str(event["audio"]), validate=True) for event in deltas)
    assert sound == song_audio(250, 5).tobytes()
    assert [event["frames"] for event in deltas] == [100, 200, 250]
    assert {event["frame_cap"] for event in deltas} == {250}
    assert deltas[0]["warnings"] == [WARNING]
    assert (deltas[0]["seed"], deltas[0]["sample_rate"], deltas[0]["channels"]) == (5, 32_000, 2)
    assert done["type"] == "speech.audio.done"
    assert (done["finish_reason"], done["frames"], done["warnings"]) == ("length", 250, [WARNING])
    # The fake server does not tell its prompt's tokens.
    assert done["usage"] == {"input_tokens": 0, "output_tokens": 250, "total_tokens": 250}


def test_events_begin_before_the_sound_and_go_on_saying_so(stand_in: StandIn) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    server.script = nothing
    connection = gateway.connect()
    body = json.dumps({"input": LYRICS, "instructions": CAPTION, "stream_format": "sse"})
    connection.request("POST", "/v1/audio/speech", body=body)
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline() == b": waiting\n"
    connection.close()
    assert server.cancelled.wait(10)


# ---------------------------------------------------------------- errors of songs

REFUSED, UNAVAILABLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE
STATUSES = [
    (REFUSED, "caption: blank; it is required", 400, "instructions", "instructions: blank;"),
    (REFUSED, "max_frames: 0 is out of range", 400, "max_new_tokens", "max_new_tokens: 0"),
    (REFUSED, "lyrics: the prompt has 5001 tokens", 400, "input", "input: the prompt"),
    (UNAVAILABLE, "the queue is full: 8 songs run and 256 wait; try again later", 503, None, "8 songs run"),
    (grpc.StatusCode.CANCELLED, "the server is shutting down", 503, None, "shutting down"),
    (grpc.StatusCode.INTERNAL, "Traceback: /srv/secret.py", 500, None, "the server's log says why"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text", "status", "param", "shown"), STATUSES)
def test_errors_before_the_first_sound_have_a_status(
    stand_in: StandIn, code: grpc.StatusCode, text: str, status: int, param: str | None, shown: str
) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    server.script = failing(code, text, after_chunks=0)
    for fields in ({}, {"stream": True}, {"stream_format": "sse"}):
        answer = gateway.sing(**fields)
        assert answer.status == status
        assert answer.error()["param"] == param
        assert shown in str(answer.error()["message"])
        assert "secret" not in answer.body.decode()
        assert answer.headers.get("retry-after") == ("5" if status == 503 else None)
        assert answer.headers["x-request-id"] == server.requests[-1].id


def test_errors_after_the_first_sound(stand_in: StandIn) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    server.script = failing(grpc.StatusCode.INTERNAL, "NaN", after_chunks=2)
    # A whole file was not begun; events end with the error; sound is cut off without HTTP's end.
    assert gateway.sing().status == 500
    *deltas, failure = gateway.sing(stream_format="sse").events()
    assert [event["frames"] for event in deltas] == [100, 200]
    assert failure["type"] == "speech.audio.error"
    assert failure["error"]["code"] == "song_failed"
    with pytest.raises(http.client.IncompleteRead):
        gateway.sing(stream=True)
    line = f"song {server.requests[-1].id}: failed"
    wait_until(lambda: line in gateway.log(), timeout_s=10, what="the song's line")


def test_a_server_that_is_away(make_gateway: MakeGateway) -> None:
    with FakeServer(whole) as server:
        url = server.url
        gateway = make_gateway(url)
        assert gateway.ask("GET", "/health").status == 200
    answer = gateway.sing()
    assert answer.status == 503
    assert url not in answer.body.decode()
    assert "does not answer" in str(answer.error()["message"])
    # The server is asked at most once a second.
    wait_until(lambda: gateway.ask("GET", "/health").status == 503, timeout_s=10, what="an ill health")


def test_time_limit(make_gateway: MakeGateway) -> None:
    with FakeServer(nothing) as server:
        # The first chunk of those that have one must come within it.
        gateway = make_gateway(server.url, "--time-limit-s", "4")
        assert gateway.sing().status == 504
        server.script = one_chunk_then_nothing
        with ThreadPoolExecutor() as pool:
            file, stream, in_events = (
                pool.submit(gateway.sing, **fields)
                for fields in ({}, {"stream": True}, {"stream_format": "sse"})
            )
            assert file.result().error()["code"] == "time_limit"
            with pytest.raises(http.client.IncompleteRead):
                stream.result()
            assert in_events.result().events()[-1]["error"]["code"] == "time_limit"


# ---------------------------------------------------------------- who may ask, and how much


def test_keys(make_gateway: MakeGateway, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\n\n  second-ключ  \n")
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, "--key-file", str(keys))

        def with_header(value: str | None) -> Answer:
            headers = {} if value is None else {"Authorization": value.encode().decode("latin-1")}
            return gateway.sing(headers=headers, max_new_tokens=1)

        for value in (None, "Bearer", "Bearer ", "Bearer first", "Bearer first-keyx", "Basic first-key"):
            answer = with_header(value)
            assert answer.status == 401, value
            assert answer.error()["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert server.requests == []
        for value in ("Bearer first-key", "bearer second-ключ"):
            assert with_header(value).status == 200, value
        assert gateway.ask("GET", "/v1/models").status == 401
        for path in ("/", "/app.js", "/health", "/metrics"):
            assert gateway.ask("GET", path).status == 200
        assert "first-key" not in gateway.log()
        by_environment = make_gateway(server.url, MUSIC3_GATEWAY_KEY="env-key")
        assert by_environment.sing(max_new_tokens=1).status == 401
        assert (
            by_environment.sing(max_new_tokens=1, headers={"Authorization": "Bearer env-key"}).status == 200
        )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://{host}"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": ALLOWED_ORIGIN}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        # A foreign name that points at this machine.
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:8080"}, 200),
        # What is no address at all.
        ({"Origin": "http://[evil"}, 403),
        ({"Host": "["}, 403),
        # Behind a proxy, the site's own name passed on or not. What <audio> asks for has no Origin.
        ({"Host": "studio.example", "Origin": ALLOWED_ORIGIN, "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "studio.example", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "127.0.0.1:8080", "Origin": ALLOWED_ORIGIN, "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "studio.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "studio.example", "Origin": "https://evil.example"}, 403),
        ({"Host": "studio.example.evil.example", "Sec-Fetch-Site": "same-origin"}, 403),
    ],
)
def test_pages_of_other_sites(stand_in: StandIn, headers: dict[str, str], status: int) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    host = f"{gateway.host}:{gateway.port}"
    given = {name: value.format(host=host) for name, value in headers.items()}
    answer = gateway.sing(headers=given, max_new_tokens=1)
    assert answer.status == status
    assert len(server.requests) == (status == 200)
    is_studio = given.get("Origin") == ALLOWED_ORIGIN
    assert answer.headers.get("access-control-allow-origin") == (given["Origin"] if is_studio else None)


def test_pages_of_allowed_sites_see_all_headers(stand_in: StandIn) -> None:
    answer = stand_in.gateway.sing(headers={"Origin": ALLOWED_ORIGIN})
    shown = {name.strip().lower() for name in answer.headers["access-control-expose-headers"].split(",")}
    ours = {name for name in answer.headers if name == "x-request-id" or name.startswith("x-music3-")}
    assert len(ours) == 6  # the fake server does not tell its prompt's tokens
    assert ours | {"x-music3-prompt-tokens", "retry-after"} == shown


def test_bodies(make_gateway: MakeGateway) -> None:
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url, "--max-body-bytes", "5000", "--body-limit-s", "3")
        path = "/v1/audio/speech"
        for body in (
            b"",
            b"{",
            b"\xff\xfe",
            b'{"input": "\xff"}',
            b"[" * 4999,
            b'{"seed": 1' + b"0" * 4900 + b"}",
        ):
            answer = gateway.ask("POST", path, body=body)
            assert answer.status == 400, body[:20]
            assert answer.error()["type"] == "invalid_request_error"
        assert gateway.sing(input="\ud800").status == 400
        # Half a character, which an error's JSON can only hold as JSON asked with it.
        for fields, param in (
            ({"\ud800": 1}, "\ud800"),
            ({"extra_params": {"\ud800": 1}}, "extra_params.\ud800"),
            ({"model": "\ud800"}, "model"),
            ({"response_format": "\ud800"}, "response_format"),
        ):
            answer = gateway.sing(**fields)
            assert answer.status == (404 if param == "model" else 400), param
            assert answer.error()["param"] == param
        assert gateway.sing(seed=2**63).error()["param"] == "seed"
        assert gateway.sing(input="la " * 2000).status == 413

        # A length that is too large is refused before a byte of the body was sent.
        connection = gateway.connect()
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", "5001")
        connection.endheaders()
        assert connection.getresponse().status == 413
        # Nor does a body without a length get further than the limit.
        connection = gateway.connect()
        connection.request("POST", path, body=iter([b"x" * 3000] * 3), encode_chunked=True)
        assert connection.getresponse().status == 413
        # One that does not come keeps nobody waiting.
        connection = gateway.connect()
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
    assert server.requests == []


def test_too_many_songs(make_gateway: MakeGateway) -> None:
    with FakeServer(one_chunk_then_nothing) as server:
        gateway = make_gateway(server.url, "--max-songs", "2")
        held = []
        for _ in range(2):
            connection = gateway.connect()
            body = json.dumps({"input": LYRICS, "instructions": CAPTION, "stream": True})
            connection.request("POST", "/v1/audio/speech", body=body)
            assert connection.getresponse().read1(10)
            held.append(connection)
        answer = gateway.sing()
        assert answer.status == 429
        assert answer.headers["retry-after"] == "5"
        assert answer.error()["type"] == "rate_limit_error"
        assert gateway.metric("live_songs") == 2
        server.script = whole
        held[0].close()
        assert server.cancelled.wait(10)
        wait_until(
            lambda: gateway.sing(max_new_tokens=1).status == 200, timeout_s=10, what="the place to be free"
        )
        held[1].close()


# ---------------------------------------------------------------- the rest of the door


def test_models_health_and_errors_of_routes(stand_in: StandIn) -> None:
    gateway = stand_in.gateway
    models = json.loads(gateway.ask("GET", "/v1/models").body)
    assert [model["id"] for model in models["data"]] == [
        "MiniMaxAI/MiniMax-Music3",
        "music3",
        "our-singer",
    ]
    assert json.loads(gateway.ask("GET", "/v1/models/MiniMaxAI/MiniMax-Music3").body) == models["data"][0]
    assert gateway.ask("GET", "/v1/models/gpt-4o").status == 404
    assert json.loads(gateway.ask("GET", "/health").body) == {"status": "ok", "live_songs": 0}
    for method, path, status in (
        ("GET", "/v1/audio/nothing", 404),
        ("DELETE", "/v1/audio/speech", 405),
        ("GET", "/nothing", 404),
        ("GET", "/../options.py", 404),
        ("GET", "/docs", 404),
        ("POST", "/", 405),
    ):
        answer = gateway.ask(method, path)
        assert answer.status == status, path
        assert answer.error()["type"] == "invalid_request_error"


def test_who_asks_for_health_during_a_check_waits_for_it() -> None:
    asked = []

    class Counting(FakeServer):
        def ModelReady(self, *arguments: object) -> object:  # noqa: N802 - the protocol's name
            asked.append(arguments)
            return super().ModelReady(*arguments)

    async def ask(url: str) -> list[bool]:
        service = Service(Options(url=url), Metrics())
        try:
            leaves = asyncio.create_task(service.is_ready())
            stay = [asyncio.create_task(service.is_ready()) for _ in range(3)]
            await asyncio.sleep(0)
            leaves.cancel()
            return [*await asyncio.gather(*stay), await service.is_ready()]
        finally:
            await service.client.close()

    with Counting(whole) as server:
        assert asyncio.run(ask(server.url)) == [True] * 4
    assert len(asked) == 1


def test_metrics_page(make_gateway: MakeGateway) -> None:
    with FakeServer(whole) as server:
        gateway = make_gateway(server.url)
        gateway.sing(max_new_tokens=100)
        gateway.sing(max_new_tokens=100, stream=True)
        gateway.sing(temperature=1)
        done = [{"outcome": "done", "delivery": delivery} for delivery in ("file", "audio")]
        wait_until(
            lambda: [gateway.metric("songs_total", **each) for each in done] == [1, 1],
            timeout_s=10,
            what="the counts",
        )
        page = gateway.ask("GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(page.body.decode())}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    prefix = "music3_gateway_"
    assert values[f"{prefix}songs_total", ("delivery", "file"), ("outcome", "done")] == 1
    assert values[f"{prefix}songs_total", ("delivery", "audio"), ("outcome", "done")] == 1
    route = ("route", "/v1/audio/speech")
    assert values[f"{prefix}requests_total", route, ("status", "200")] == 2
    assert values[f"{prefix}requests_total", route, ("status", "400")] == 1
    assert values[(f"{prefix}first_audio_seconds_count",)] == 2
    assert values[(f"{prefix}audio_seconds_total",)] == pytest.approx(2 * len(song_audio(100, 0)) / 32_000)
    assert values[(f"{prefix}sent_bytes_total",)] == 2 * (song_audio(100, 0).nbytes + 44)
    assert values[(f"{prefix}live_songs",)] == values[(f"{prefix}buffered_bytes",)] == 0
    assert values[("process_cpu_seconds_total",)] > 0


def test_nothing_of_the_song_is_logged(stand_in: StandIn) -> None:
    server, gateway = stand_in.server, stand_in.gateway
    gateway.sing(input="[Verse]\nmost private words")
    gateway.ask("GET", "/v1/audio/speech?input=most+private+words&instructions=hush")
    lines = [f"song {request.id}: done" for request in server.requests]
    wait_until(lambda: all(line in gateway.log() for line in lines), timeout_s=10, what="the songs' lines")
    assert "private" not in gateway.log()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-songs", "0"),
        ("--max-connections", "0"),
        ("--head-limit-s", "0"),
        ("--stall-limit-s", "0"),
        ("--key-file", "/no/such/file"),
        ("--key-file", "/dev/null"),
        ("--tls-certificate", "/no/such/file"),
        ("--nonsense", "1"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options.read(arguments, {})
    shown = capsys.readouterr().err
    assert arguments[0] in shown or arguments[1] in shown.splitlines()[-1]
