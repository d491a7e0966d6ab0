"""The body of `POST /v1/audio/speech`, checked: what the two other servers of this model take, and what they
refuse (vllm-omni 0.30.0; sglang-omni's cookbook).

`input` is the lyrics, `instructions` the caption, `max_new_tokens` a cap in frames of 40 ms. Null is the same
as absent. What cannot be honoured is refused by name, never ignored, unless it says what is so anyway
(`speed` 1, `voice` "default", `sample_rate` 32000). Ranges and lengths are the model's to judge.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from client.gateway.encoders import FORMATS, REFUSED_FORMATS
from client.gateway.errors import ApiError
from python_backend_models.contract import FRAME_RATE_HZ, OUTPUT_RATE_HZ

Delivery = Literal["file", "audio", "sse"]

_FRAMES_HINT: Final = f"cap the length with `max_new_tokens`, {FRAME_RATE_HZ} frames a second"
_SAMPLING_HINT: Final = "sampling is fixed by the checkpoint"
_SINGER_HINT: Final = (
    "there is no reference sound and no speaker to choose; describe the voice in `instructions`"
)
_HINTS: Final = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "repetition_penalty", "cfg_scale"), _SAMPLING_HINT),
    **dict.fromkeys(
        ("ref_audio", "ref_text", "references", "speaker_embedding", "x_vector_only_mode"), _SINGER_HINT
    ),
    **dict.fromkeys(
        ("max_tokens", "max_frames", "duration", "audio_duration", "duration_seconds"), _FRAMES_HINT
    ),
    **dict.fromkeys(("caption", "prompt"), "the caption goes into `instructions`"),
    "lyrics": "the lyrics go into `input`",
    "language": "the language follows the lyrics",
    "task_type": "this model has one task",
}
_QUERY_INTEGERS: Final = ("seed", "max_new_tokens")


@dataclass(frozen=True)
class SpeechRequest:
    """One song as asked for: as a whole `file`, as `audio` while it is made, or as events (`sse`)."""

    caption: str
    lyrics: str
    seed: int
    max_frames: int | None
    response_format: str
    delivery: Delivery


def names_this_model(name: str, aliases: Collection[str]) -> bool:
    """Whether a request's `model` means this one: an alias, or any path or spelling of Music 3's own name."""
    plain = re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].lower())
    return name in aliases or plain in ("music3", "minimaxmusic3")


def parse_query(query: Mapping[str, str]) -> dict[str, object]:
    """A body from the query of a GET, which is all that an `<audio>` element can send; it always streams."""
    body: dict[str, object] = {"stream": True, **query}
    for name in _QUERY_INTEGERS:
        if name in query and re.fullmatch(r"-?[0-9]{1,20}", query[name]):
            body[name] = int(query[name])
    if body["stream"] not in (True, "true"):
        raise ApiError(400, "stream: a song asked for by GET always streams; use POST", param="stream")
    body["stream"] = True
    return body


def parse_body(body: object, *, aliases: Collection[str]) -> SpeechRequest:
    """Check a JSON body. Raises ApiError for the first thing that is wrong."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_model(fields.pop("model", None), aliases)
    lyrics = _text(fields, "input", "the lyrics")
    caption = _text(fields, "instructions", "the caption: genre, instruments, tempo, voice, mood")
    seed = _integer(fields, "seed")
    max_frames = _integer(fields, "max_new_tokens")
    delivery = _delivery(fields)
    response_format = _format(fields)
    _check_neutral(fields)
    for name in fields:
        hint = _HINTS.get(name)
        raise ApiError(
            400,
            f"{name[:64]}: this model cannot honour it" + (f"; {hint}" if hint else "; remove it"),
            param=name[:64],
            code="unsupported_parameter",
        )
    return SpeechRequest(
        caption=caption,
        lyrics=lyrics,
        seed=0 if seed is None else seed,
        max_frames=max_frames,
        response_format=response_format,
        delivery=delivery,
    )


def _check_model(name: object, aliases: Collection[str]) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise ApiError(400, "model: must be text", param="model")
    if not names_this_model(name, aliases):
        raise ApiError(
            404,
            f"model: {name[:200]!r} is not served here; see /v1/models",
            param="model",
            code="model_not_found",
        )


def _text(fields: dict[str, object], name: str, meaning: str) -> str:
    value = fields.pop(name, None)
    if value is None:
        raise ApiError(400, f"{name}: missing; it carries {meaning}", param=name, code="missing_parameter")
    if not isinstance(value, str):
        raise ApiError(400, f"{name}: must be text", param=name)
    if not value.strip():
        raise ApiError(400, f"{name}: blank; it carries {meaning}", param=name)
    return value


def _integer(fields: dict[str, object], name: str) -> int | None:
    value = fields.pop(name, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ApiError(400, f"{name}: must be a whole number", param=name)
    return value


def _delivery(fields: dict[str, object]) -> Delivery:
    stream, form = fields.pop("stream", False), fields.pop("stream_format", None)
    if not isinstance(stream, bool):
        raise ApiError(400, "stream: must be true or false", param="stream")
    # As in vllm-omni, a stream format asks for a stream by itself.
    match form:
        case None:
            return "audio" if stream else "file"
        case "audio" | "sse":
            return form
        case _:
            raise ApiError(400, "stream_format: must be audio or sse", param="stream_format")


def _format(fields: dict[str, object]) -> str:
    value = fields.pop("response_format", "wav")
    if isinstance(value, str) and value in FORMATS:
        return value
    allowed = ", ".join(FORMATS)
    reason = REFUSED_FORMATS.get(value, "unknown") if isinstance(value, str) else "must be text"
    raise ApiError(400, f"response_format: {reason}; allowed: {allowed}", param="response_format")


def _check_neutral(fields: dict[str, object]) -> None:
    """Take out what asks for nothing, and say of the rest what to do instead."""
    for name in ("voice", "speaker"):
        voice = fields.pop(name, "")
        if isinstance(voice, Mapping):
            voice = voice.get("id")
        if not isinstance(voice, str) or voice.strip().lower() not in ("", "default"):
            raise ApiError(400, f"{name}: {_SINGER_HINT}", param=name, code="unsupported_parameter")
    speed = fields.pop("speed", 1)
    if isinstance(speed, bool) or speed != 1:
        hint = "only 1; say the tempo in `instructions`, as in 'at 92 BPM'"
        raise ApiError(400, f"speed: {hint}", param="speed", code="unsupported_parameter")
    rate = fields.pop("sample_rate", OUTPUT_RATE_HZ)
    if isinstance(rate, bool) or rate != OUTPUT_RATE_HZ:
        raise ApiError(
            400, f"sample_rate: only {OUTPUT_RATE_HZ}", param="sample_rate", code="unsupported_parameter"
        )
    if fields.get("word_timestamps") is False:
        del fields["word_timestamps"]
    extra = fields.pop("extra_params", {})
    if extra != {}:
        first = next(iter(extra), "") if isinstance(extra, Mapping) else ""
        name = f"extra_params.{first}"[:64].rstrip(".")
        hint = _HINTS.get(str(first), "there are no such parameters; remove it")
        raise ApiError(
            400, f"{name}: this model cannot honour it; {hint}", param=name, code="unsupported_parameter"
        )
