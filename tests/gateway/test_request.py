"""Bodies of POST /v1/audio/speech: those that the two other servers document, and what is refused by name."""

import json

import pytest

from client.gateway.errors import ApiError
from client.gateway.speech_request import SpeechRequest, names_this_model, parse_body, parse_query

# The requests of vllm-omni's recipe for this model and of sglang-omni's cookbook page, by what they send.
DOCUMENTED = {
    "vllm-omni recipe": """{
        "model": "MiniMaxAI/MiniMax-Music3",
        "input": "[Verse]\\nWalking down the empty street at midnight\\n[Chorus]\\nAnd I keep on walking",
        "instructions": "A melancholic lo-fi hip-hop track at 85 BPM in F minor: mellow Rhodes piano riff",
        "seed": 1, "max_new_tokens": 750}""",
    "sglang-omni with a format": """{
        "model": "MiniMaxAI/MiniMax-Music3",
        "input": "[Intro]\\n(instrumental)\\n[Outro]\\n(instrumental)",
        "instructions": "A moody synthwave instrumental at 100 BPM in D minor",
        "seed": 3, "max_new_tokens": 750, "response_format": "wav", "stream": false}""",
    "sglang-omni through the OpenAI client": """{
        "model": "MiniMaxAI/MiniMax-Music3", "voice": "default",
        "input": "[Verse]\\nSunday morning, quiet and slow\\n[Chorus]\\nTake it easy, take it slow",
        "instructions": "A melancholic lo-fi hip-hop track with a mellow piano riff at 85 BPM",
        "response_format": "wav", "seed": 42, "max_new_tokens": 750}""",
}

PLAIN = {"input": "[Verse]\nla la", "instructions": "folk"}


def parse(**fields: object) -> SpeechRequest:
    return parse_body({**PLAIN, **fields}, aliases=("our-singer",))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_bodies_mean_what_they_mean_there(name: str) -> None:
    body = json.loads(DOCUMENTED[name])
    assert parse_body(body, aliases=()) == SpeechRequest(
        caption=body["instructions"],
        lyrics=body["input"],
        seed=body["seed"],
        max_frames=750,
        response_format="wav",
        delivery="file",
    )


def test_defaults_are_the_peers() -> None:
    assert parse() == SpeechRequest("folk", "[Verse]\nla la", 0, None, "wav", "file")
    assert parse() == parse(seed=None, max_new_tokens=None, stream=None, response_format=None, voice=None)


@pytest.mark.parametrize(
    "neutral",
    [
        {"voice": "default"},
        {"voice": " Default "},
        {"voice": ""},
        {"voice": {"id": "default"}},
        {"speaker": "default"},
        {"speed": 1},
        {"speed": 1.0},
        {"sample_rate": 32000},
        {"word_timestamps": False},
        {"extra_params": {}},
        {"temperature": None, "ref_audio": None, "anything": None},
        {"model": "music3"},
        {"model": "our-singer"},
        {"model": "/models/MiniMax-Music3/"},
        {"model": "minimax_music_3"},
    ],
)
def test_what_asks_for_nothing_is_taken(neutral: dict[str, object]) -> None:
    assert parse(**neutral) == parse()


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        # What the contract and the peers' adapters refuse, at the top and in extra_params.
        *(({name: 1}, name, "sampling") for name in ("temperature", "top_p", "top_k", "repetition_penalty")),
        ({"cfg_scale": 1.5}, "cfg_scale", "sampling"),
        ({"extra_params": {"top_k": 50}}, "extra_params.top_k", "sampling"),
        ({"extra_params": {"cfg_role": "cond"}}, "extra_params.cfg_role", "remove"),
        ({"extra_params": "x"}, "extra_params", "remove"),
        ({"voice": "alloy"}, "voice", "instructions"),
        ({"voice": 7}, "voice", "instructions"),
        ({"voice": {"id": "alloy"}}, "voice", "instructions"),
        ({"speaker": "vivian"}, "speaker", "instructions"),
        ({"speed": 1.5}, "speed", "tempo"),
        ({"speed": True}, "speed", "tempo"),
        ({"speed": "1"}, "speed", "tempo"),
        ({"ref_audio": "https://example.com/a.wav"}, "ref_audio", "no reference"),
        ({"ref_text": "a"}, "ref_text", "no reference"),
        ({"language": "English"}, "language", "follows the lyrics"),
        ({"task_type": "Base"}, "task_type", "one task"),
        ({"x_vector_only_mode": True}, "x_vector_only_mode", "no reference"),
        ({"initial_codec_chunk_frames": 4}, "initial_codec_chunk_frames", "remove"),
        ({"sample_rate": 44100}, "sample_rate", "32000"),
        ({"word_timestamps": True}, "word_timestamps", "remove"),
        ({"caption": "folk"}, "caption", "instructions"),
        ({"lyrics": "la"}, "lyrics", "input"),
        ({"max_frames": 3}, "max_frames", "max_new_tokens"),
        ({"duration_seconds": 3}, "duration_seconds", "max_new_tokens"),
        ({"nonsense": []}, "nonsense", "remove"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, object], param: str, hint: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(**fields)
    error = raised.value.body()["error"]
    assert raised.value.status == 400
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert hint in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"input": None}, "input", 400),
        ({"input": " \n\t"}, "input", 400),
        ({"input": ["la"]}, "input", 400),
        ({"instructions": None}, "instructions", 400),
        ({"instructions": "\u3000"}, "instructions", 400),
        ({"instructions": 5}, "instructions", 400),
        ({"seed": 1.0}, "seed", 400),
        ({"seed": "1"}, "seed", 400),
        ({"seed": True}, "seed", 400),
        ({"max_new_tokens": 2.5}, "max_new_tokens", 400),
        ({"max_new_tokens": False}, "max_new_tokens", 400),
        ({"stream": 1}, "stream", 400),
        ({"stream": "true"}, "stream", 400),
        ({"stream_format": "chunks"}, "stream_format", 400),
        ({"response_format": "midi"}, "response_format", 400),
        ({"response_format": "WAV"}, "response_format", 400),
        ({"response_format": 1}, "response_format", 400),
        ({"model": "tts-1"}, "model", 404),
        ({"model": "MiniMaxAI/MiniMax-Music2"}, "model", 404),
        ({"model": 3}, "model", 400),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], param: str, status: int) -> None:
    with pytest.raises(ApiError) as raised:
        parse(**fields)
    assert raised.value.status == status
    assert raised.value.param == param


@pytest.mark.parametrize(("name", "instead"), [("opus", "ogg"), ("aac", "mp3")])
def test_formats_that_cannot_be_made_say_which_is_nearest(name: str, instead: str) -> None:
    with pytest.raises(ApiError, match=f"{instead}.* is nearest; allowed: wav, pcm, flac, mp3, ogg"):
        parse(response_format=name)


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(ApiError, match="JSON object"):
        parse_body(body, aliases=())


@pytest.mark.parametrize(
    ("fields", "delivery"),
    [
        ({}, "file"),
        ({"stream": False}, "file"),
        ({"stream": True}, "audio"),
        ({"stream": True, "stream_format": "audio"}, "audio"),
        ({"stream_format": "audio"}, "audio"),
        ({"stream_format": "sse"}, "sse"),
        ({"stream": True, "stream_format": "sse"}, "sse"),
    ],
)
def test_delivery(fields: dict[str, object], delivery: str) -> None:
    assert parse(**fields).delivery == delivery


def test_query_of_an_audio_element() -> None:
    query = {**PLAIN, "seed": str(2**63 - 1), "max_new_tokens": "250", "response_format": "mp3"}
    assert parse_body(parse_query(query), aliases=()) == SpeechRequest(
        "folk", "[Verse]\nla la", 2**63 - 1, 250, "mp3", "audio"
    )
    for wrong, param in (({"seed": "1.5"}, "seed"), ({"stream": "false"}, "stream"), ({"a": "b"}, "a")):
        with pytest.raises(ApiError) as raised:
            parse_body(parse_query({**PLAIN, **wrong}), aliases=())
        assert raised.value.param == param


@pytest.mark.parametrize("name", ["", "music", "MiniMax-Music3-tiny", "x/music3/other"])
def test_other_models_are_others(name: str) -> None:
    assert not names_this_model(name, ())
