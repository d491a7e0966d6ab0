"""The four model.py files and what they share with the server, over real engines of a tiny checkpoint."""

import binascii
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit import fake_triton
from tests.unit.fake_triton import FakeServer, InferenceRequest, Tensor, TritonError, number, text

fake_triton.install()

from python_backend_models import metrics, offline, pcm, triton_io  # noqa: E402  after the stand-in
from python_backend_models.engine import acoustic  # noqa: E402
from python_backend_models.engine.talker import SongError  # noqa: E402
from python_backend_models.orchestrator import SongCancelledError, UnavailableError  # noqa: E402
from python_backend_models.request import InvalidRequestError  # noqa: E402
from python_backend_models.settings import Music3Settings, read  # noqa: E402
from python_backend_models.tiny_checkpoint import write_tiny_checkpoint  # noqa: E402

CAPTION, LYRICS = "slow piano", "[Verse] la la\nnothing but rain\n[Chorus]\noh"
STAGES = ("talker", "dit", "vocoder", "music3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> offline.OfflineModels:
    return offline.load_models(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    everyone = {"checkpoint": str(checkpoint)}
    computing = everyone | {"device": "cpu", "cpu_threads": "1"}
    running = FakeServer(
        STAGES,
        # Calls are counted here: on a slow machine the talker may not say "not yet" either.
        talker=computing | {"live_songs": "2", "kv_tokens": "41000", "answer_within_s": "60"},
        dit=computing,
        vocoder=computing,
        music3=everyone | {"live_songs": "2", "control_folder": str(tmp_path_factory.mktemp("control"))},
    )
    yield running
    running.close()


def song_fields(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    fields = {"caption": text(CAPTION), "lyrics": text(LYRICS), "max_frames": number(3, np.int32)}
    return {name: array for name, array in (fields | changes).items() if array is not None}


def outputs(response: Any) -> dict[str, np.ndarray]:
    assert not response.has_error(), response.error().message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def error_of(sender: Any) -> TritonError:
    (response,) = sender
    assert response.has_error()
    return response.error()


# --------------------------------------------------------------- whole songs


def test_a_streamed_song_equals_the_offline_one(server: FakeServer, models: offline.OfflineModels) -> None:
    expected = offline.make_song(models, CAPTION, LYRICS, seed=9, max_frames=201)
    assert len(expected.chunks) == 2
    server.calls.clear()
    fields = song_fields(seed=number(9, np.int64), max_frames=number(201, np.int32))
    chunks = [outputs(response) for response in server.song(**fields)]
    for chunk, want in zip(chunks, expected.chunks, strict=True):
        np.testing.assert_array_equal(chunk["audio"], want.numpy())
        assert chunk["sample_rate"].tolist() == [32000]
    assert [chunk["progress"].tolist() for chunk in chunks] == [[200, 201], [201, 201]]
    assert [chunk.get("finish_reason", np.array([b"none"])).tolist() for chunk in chunks] == [
        [b"none"],
        [b"length"],
    ]
    prompt = models.prompts.build(CAPTION, LYRICS)
    assert [warning.decode() for warning in chunks[0]["warnings"]] == prompt.warnings
    assert prompt.warnings
    assert chunks[0]["prompt_tokens"].tolist() == [len(prompt.ids)]
    assert "warnings" not in chunks[1]
    assert "prompt_tokens" not in chunks[1]
    window = [("dit", 0), ("vocoder", 0)]
    talker = [("talker", fake_triton.START), ("talker", 0), ("talker", fake_triton.END)]
    assert server.calls == [("music3", 0), talker[0], *window, talker[1], *window, talker[2]]


def test_every_call_of_a_song_carries_the_trace_of_its_request(server: FakeServer) -> None:
    """So that Triton's trace of a song shows its stages below it."""
    server.traces.clear()
    trace = object()
    inputs = [Tensor(name, array) for name, array in song_fields(max_frames=number(201, np.int32)).items()]
    assert len(list(server.submit(InferenceRequest(model_name="music3", inputs=inputs, trace=trace)))) == 2
    assert len(server.traces) == 1 + 3 + 2 + 2  # the client's; talker with the end, dit, vocoder
    assert all(each is trace for each in server.traces)


@pytest.mark.parametrize("frames", [1, 50])
def test_a_song_of_one_short_window(server: FakeServer, models: offline.OfflineModels, frames: int) -> None:
    expected = offline.make_song(models, CAPTION, LYRICS, max_frames=frames)
    (chunk,) = (outputs(r) for r in server.song(**song_fields(max_frames=number(frames, np.int32))))
    np.testing.assert_array_equal(chunk["audio"], expected.audio.numpy())
    assert chunk["finish_reason"].tolist() == [b"length"]


def test_integer_encodings_are_the_pcm_of_the_float_song(server: FakeServer) -> None:
    chunks = {}
    for encoding in ("f32", "s16", "s16_base64"):
        (response,) = server.song(**song_fields(audio_encoding=text(encoding)))
        chunks[encoding] = outputs(response)
    exact = chunks["f32"]["audio"]
    floor = np.clip(np.floor(exact.astype(np.float64) * 32768), -32768, 32767).astype("<i2")
    np.testing.assert_array_equal(chunks["s16"]["audio_s16"], floor)
    np.testing.assert_array_equal(pcm.to_int16(exact, profile="vllm-omni"), floor)
    (encoded,) = chunks["s16_base64"]["audio_base64"]
    assert binascii.a2b_base64(encoded) == floor.tobytes()
    for encoding, kept in (("f32", "audio"), ("s16", "audio_s16"), ("s16_base64", "audio_base64")):
        assert [name for name in chunks[encoding] if name.startswith("audio")] == [kept]


def test_songs_of_two_clients_share_the_stages(server: FakeServer, models: offline.OfflineModels) -> None:
    lengths = {5: 30, 6: 12, 7: 51}
    senders = {
        seed: server.song(**song_fields(seed=number(seed, np.int64), max_frames=number(frames, np.int32)))
        for seed, frames in lengths.items()
    }
    for seed, frames in lengths.items():
        (response,) = senders[seed]
        expected = offline.make_song(models, CAPTION, LYRICS, seed=seed, max_frames=frames).audio.numpy()
        np.testing.assert_allclose(outputs(response)["audio"], expected, rtol=0, atol=1e-4)


# ---------------------------------------------------------- refusals and errors


@pytest.mark.parametrize(
    ("changes", "parameters", "word"),
    [
        ({"caption": None}, {}, "caption"),
        ({"lyrics": text("  \n")}, {}, "lyrics"),
        ({"caption": text(b"\xff\xfe")}, {}, "caption"),
        ({"seed": number(-1, np.int64)}, {}, "seed"),
        ({"max_frames": number(9001, np.int32)}, {}, "max_frames"),
        ({"audio_encoding": text("mp3")}, {}, "audio_encoding"),
        ({}, {"temperature": 0.7}, "temperature"),
        ({}, {"probe": "yes"}, "probe"),
        ({"lyrics": text("la " * 6000)}, {}, "prompt"),
    ],
)
def test_a_bad_request_is_refused_by_the_field_before_any_stage_is_called(
    server: FakeServer, changes: dict[str, Any], parameters: dict[str, Any], word: str
) -> None:
    server.calls.clear()
    error = error_of(server.song(parameters, **song_fields(**changes)))
    assert error.code() == TritonError.INVALID_ARG
    assert word in error.message()
    assert server.calls == [("music3", 0)]


def test_a_cancelled_song_ends_with_cancelled_and_leaves_no_slot(server: FakeServer) -> None:
    request = InferenceRequest(
        model_name="music3",
        inputs=[
            Tensor(name, array) for name, array in song_fields(max_frames=number(9000, np.int32)).items()
        ],
    )
    request.sender.cancelled = True
    server.calls.clear()
    assert error_of(server.submit(request)).code() == TritonError.CANCELLED
    assert ("dit", 0) not in server.calls
    census = server.models["talker"]._loop._engine.census
    assert (census.live, census.waiting, census.slots_free) == (0, 0, 2)


def test_an_unforeseen_failure_tells_the_client_nothing_of_the_inside(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: Any) -> None:
        raise RuntimeError("/secret/path.py line 3")

    monkeypatch.setattr(server.models["vocoder"]._engine, "decode", explode)
    error = error_of(server.song(**song_fields()))
    assert (error.code(), error.message()) == (
        TritonError.INTERNAL,
        "vocoder: failed on this song; the server's log says why",
    )
    log = "\n".join(line for _, line in fake_triton.Logger.lines)
    assert "/secret/path.py line 3" in log


def test_the_talker_answers_a_request_for_no_song(server: FakeServer) -> None:
    next_window = InferenceRequest(model_name="talker", correlation_id=77)
    assert "no such song" in error_of(server.submit(next_window)).message()
    no_prompt = InferenceRequest(model_name="talker", correlation_id=78, flags=fake_triton.START)
    assert error_of(server.submit(no_prompt)).code() == TritonError.INTERNAL
    assert list(server.submit(InferenceRequest(model_name="talker", correlation_id=77, flags=2))) == []


def test_a_song_whose_windows_take_long_is_asked_for_again_and_the_same(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [outputs(each) for each in server.song({}, **song_fields(max_frames=np.array([250], np.int32)))]
    loop = server.models["talker"]._loop
    monkeypatch.setattr(loop, "_answer_within_s", 0.01)
    asked: list[object] = []
    ask = loop.next_window
    monkeypatch.setattr(loop, "next_window", lambda *call: [asked.append(call), ask(*call)])
    in_pieces = [
        outputs(each) for each in server.song({}, **song_fields(max_frames=np.array([250], np.int32)))
    ]
    assert len(asked) > len(at_once)
    assert len(in_pieces) == len(at_once)
    for one, other in zip(in_pieces, at_once, strict=True):
        np.testing.assert_array_equal(one["audio"], other["audio"])


def test_a_probe_makes_one_frame_and_later_only_asks_whether_sound_came_lately(server: FakeServer) -> None:
    server.models["music3"]._line._sound_at_s = None
    server.calls.clear()
    (made,) = server.song({"probe": True}, **song_fields(max_frames=None))
    assert outputs(made)["progress"].tolist() == [1, 1]
    assert len(server.calls) == 5
    (asked,) = server.song({"probe": True}, **song_fields())
    assert outputs(asked)["finish_reason"].tolist() == [b"alive"]
    assert outputs(asked)["audio"].shape == (0, 2)
    assert len(server.calls) == 6


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidRequestError("seed: no"), TritonError.INVALID_ARG, "seed: no"),
        (UnavailableError("full"), TritonError.UNAVAILABLE, "full"),
        (SongCancelledError("gone"), TritonError.CANCELLED, "gone"),
        (triton_io.StageError("dit: x"), TritonError.INTERNAL, "dit: x"),
        (KeyError("x"), TritonError.INTERNAL, "the song failed; the server's log says why"),
        (MemoryError("x"), TritonError.INTERNAL, "the song failed; the server's log says why"),
    ],
)
def test_code_and_text_of_every_kind_of_error(error: Exception, code: int, message: str) -> None:
    made = triton_io.to_triton_error(error)
    assert (made.code(), made.message()) == (code, message)


# --------------------------------------------------------------------- batches


class Batch:
    """Requests are numbers; computing doubles them, and fails on chosen ones."""

    def __init__(self, *, fail_together: bool = False, poison: int | None = None) -> None:
        self.fail_together, self.poison = fail_together, poison
        self.sizes: list[int] = []
        self.counted: list[tuple[int, int]] = []

    def answer(self, requests: list[Any]) -> list[Any]:
        return triton_io.answer_batch(
            requests,
            lambda request: int(request),
            self.compute,
            lambda result: [Tensor("y", number(100 // (result - 8), np.int64))],
            count=lambda windows, failed, seconds: self.counted.append((windows, failed)),
        )

    def compute(self, items: list[int]) -> list[Any]:
        self.sizes.append(len(items))
        if self.fail_together and len(items) > 1:
            raise torch.OutOfMemoryError("too many")
        if self.poison in items:
            raise RuntimeError("/inside.py broke")
        return [acoustic.NonFiniteError("not finite") if item == 13 else 2 * item for item in items]


def messages(answers: list[Any]) -> list[str]:
    return [a.error().message() if a.has_error() else str(a.output_tensors()[0].data[0]) for a in answers]


def test_one_bad_request_of_a_batch_harms_no_other() -> None:
    batch = Batch()
    # unreadable; fine; its result is an error; fine; can't be written
    assert messages(batch.answer(["x", "5", "13", "6", "4"])) == [
        "failed",
        "50",
        "this song: not finite",
        "25",
        "failed",
    ]
    assert batch.counted == [(5, 3)]
    assert batch.sizes == [4]


def test_a_batch_that_is_too_large_for_the_memory_is_computed_one_by_one() -> None:
    batch = Batch(fail_together=True, poison=7)
    assert messages(batch.answer(["5", "6", "7"])) == ["50", "25", "failed"]
    assert batch.sizes == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SongError("frame 3 broke"), "this song: frame 3 broke"),
        (acoustic.NonFiniteError("not finite"), "this song: not finite"),
        (torch.OutOfMemoryError("CUDA out of memory at 0x0"), "this song: not enough memory"),
        (ValueError("/a/path"), "failed"),
    ],
)
def test_only_messages_for_clients_leave_a_stage(error: Exception, message: str) -> None:
    assert str(triton_io.stage_failure(error)) == message


# --------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.zeros(1, 128, 0),
        torch.arange(40.0).view(2, 4, 5)[:, :, 2:3],
        torch.arange(40.0).view(2, 4, 5)[:, 1:2],
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.arange(6.0).view(2, 3).to(torch.bfloat16),
        torch.arange(6.0).view(2, 3).requires_grad_(),
    ],
)
def test_any_tensor_passes_the_servers_check_of_strides(tensor: torch.Tensor) -> None:
    sent = triton_io.from_torch("x", tensor)
    assert sent.shape() == list(tensor.shape)
    assert torch.equal(torch.from_dlpack(sent.to_dlpack()), tensor.detach())


def test_a_number_must_be_one_number() -> None:
    request = InferenceRequest(inputs=[Tensor("two", np.array([1, 2])), Tensor("one", np.array([[7]]))])
    assert triton_io.to_int(request, "one") == 7
    for name in ("two", "none"):
        with pytest.raises(ValueError, match=name):
            triton_io.to_int(request, name)


def test_parameters_that_are_not_utf_8_are_refused() -> None:
    class Broken(InferenceRequest):
        def parameters(self) -> str:
            return b"\xff".decode()

    with pytest.raises(InvalidRequestError, match="parameters: not valid UTF-8"):
        fake_triton.load_model_file("music3").read_parameters(Broken())


# ------------------------------------------------------------ log and metrics


def test_a_record_that_can_not_be_logged_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(text: str) -> None:
        raise RuntimeError("the server is gone")

    triton_io.start_logging()
    monkeypatch.setattr(fake_triton.Logger, "log_info", broken)
    logging.getLogger("python_backend_models.x").info("anything")
    assert "the server is gone" in capsys.readouterr().err


def test_records_reach_the_servers_log_by_level() -> None:
    triton_io.start_logging()
    triton_io.start_logging()  # a second instance in the process must not double the lines
    fake_triton.Logger.lines.clear()
    log = logging.getLogger("python_backend_models.anything")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, "at %d", level)
    assert fake_triton.Logger.lines == [("info", "at 20"), ("warning", "at 30"), ("error", "at 40")]


def test_songs_are_counted_on_the_metrics_page(server: FakeServer) -> None:
    before = page(server)
    for response in server.song(**song_fields(max_frames=number(4, np.int32))):
        outputs(response)
    error_of(server.song(**song_fields(lyrics=text(" "))))
    after = page(server)
    grown = {key: after[key] - before[key] for key in after if after[key] != before[key]}
    assert grown[("music3_songs_total", "done")] == 1
    assert grown[("music3_songs_total", "refused")] == 1
    assert grown[("music3_frames_total", "")] == 4
    assert grown[("music3_talker_frames_total", "")] == 4
    assert grown[("music3_dit_windows_total", "")] == grown[("music3_vocoder_windows_total", "")] == 1
    assert grown[("music3_stage_calls_total", "talker")] == 2
    # The talker reads the note of a song's end between two steps.
    deadline_s = time.monotonic() + 60
    while page(server)[("music3_talker_free_slots", "")] != 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def page(server: FakeServer) -> dict[tuple[str, str], float]:
    """The fake page, without the instances' names."""
    for model in server.models.values():
        model._publisher.publish()
    found = {}
    for (name, labels), value in fake_triton.MetricFamily.page.items():
        own = [text for label, text in labels if label != "instance_name"]
        assert len(own) == len(labels) - 1
        found[name, "".join(own)] = value
    return found


def test_a_server_without_custom_metrics_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise fake_triton.TritonModelException("metrics are not enabled")

    monkeypatch.setattr(
        triton_io.pb_utils, "MetricFamily", type("None", (), {"COUNTER": 1, "__init__": refuse})
    )
    publisher = triton_io.publish_metrics(
        metrics.acoustic_board("dit"), {"model_instance_name": "dit_0_0"}, every_s=1
    )
    assert publisher._thread is None
    publisher.close()


# --------------------------------------------------------------------- configs


def test_settings_come_from_the_config_and_wrong_ones_fail_the_load(checkpoint: Path) -> None:
    for model, parameters, word in [
        ("music3", {"checkpoint": str(checkpoint), "live_song": "3"}, "live_song"),
        ("dit", {"checkpoint": str(checkpoint), "precision": "int4"}, "precision"),
        ("vocoder", {"checkpoint": "/nowhere"}, "/nowhere"),
        ("talker", {"checkpoint": str(checkpoint), "live_songs": "65"}, "live_songs"),
        ("dit", {"checkpoint": str(checkpoint), "fault": "nan_latents@1"}, "MUSIC3_TEST_FAULTS"),
    ]:
        instance = fake_triton.load_model_file(model).TritonPythonModel()
        with pytest.raises(Exception, match=word):
            instance.initialize(fake_triton.initialize_arguments(model, **parameters))


@pytest.mark.parametrize(
    ("environment", "cuda", "places"),
    [
        ({}, False, 2),
        ({}, True, 16),
        ({"MUSIC3_DEVICE": "cpu"}, True, 2),
        ({"MUSIC3_BATCH_WINDOWS": "2"}, True, 4),
        ({"MUSIC3_DIT_BATCH_WINDOWS": "4"}, True, 8),
        ({"MUSIC3_DIT_BATCH_WINDOWS": "4", "MUSIC3_WINDOWS_IN_FLIGHT": "5"}, True, 5),
    ],
)
def test_windows_in_flight_are_one_batch_and_the_next(
    environment: dict[str, str], cuda: bool, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    settings = read(Music3Settings, "music3", {})
    assert fake_triton.load_model_file("music3").windows_in_flight(settings) == places


def test_every_stage_boundary_has_the_same_names_and_types_on_both_sides() -> None:
    configs = {model: fake_triton.read_config(model) for model in STAGES}

    def specs(which: Any) -> dict[str, tuple[int, int]]:
        return {spec.name: (spec.data_type, len(spec.dims)) for spec in which}

    passed_on = {"talker": ["hidden", "window_index"], "dit": ["latent"]}
    takers = {"talker": "dit", "dit": "vocoder"}
    for giver, names in passed_on.items():
        given, taken = specs(configs[giver].output), specs(configs[takers[giver]].input)
        assert {name: given[name] for name in names} == {name: taken[name] for name in names}
    dit = configs["dit"]
    for carry in ("carry_latent", "carry_condition"):
        assert specs(dit.input)[carry] == specs(dit.output)[carry]
    crop = {
        name: specs(c)["crop_samples"]
        for name, c in (("given", configs["talker"].output), ("taken", configs["vocoder"].input))
    }
    assert crop["given"] == crop["taken"]


def test_the_stub_hands_over_the_config_as_json() -> None:
    arguments = fake_triton.initialize_arguments("talker", kv_tokens="5")
    assert triton_io.parameters(arguments) == {"kv_tokens": "5"}
    assert triton_io.sequence_places(arguments) == 64
    assert triton_io.compute_device(arguments, "cpu") == torch.device("cpu")
