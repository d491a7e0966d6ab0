"""A song request, checked. Needs neither Triton nor torch: it starts from what the wire carried.

Every rule that can be checked without the tokenizer is checked here, before any costly work. A refusal is an
`InvalidRequestError`: it names the field, says what is wrong with the value and what is allowed, and may be
shown to the client as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from python_backend_models import contract
from python_backend_models.cleaning import clean_caption, shown

FIELDS = ("caption", "lyrics", "seed", "max_frames", "audio_encoding")

# Request parameters that belong to Triton. Its front ends take these out of a request, but not in every form
# (`generate` with nested parameters, a BLS caller), and none of them asks the model for anything.
TRITON_PARAMETERS = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
TRITON_PARAMETER_PREFIX = "triton_"

BYTES_PER_CHARACTER = 4  # at most, in UTF-8


class InvalidRequestError(ValueError):
    """A request that cannot be honoured as it is; its text is meant for the client."""


@dataclass(frozen=True)
class SongRequest:
    """One song as asked for. `max_frames` is in frames of 40 ms; None means as many as fit."""

    caption: str
    lyrics: str
    seed: int = 0
    max_frames: int | None = None
    audio_encoding: str = contract.AUDIO_ENCODINGS[0]


def parse_request(
    fields: Mapping[str, np.ndarray[Any, Any] | None],
    parameters: Mapping[str, object],
    *,
    profile: str = contract.PROFILES[0],
) -> SongRequest:
    """Check a request's input tensors and parameters.

    Args:
        fields: input tensors by name, each of shape `[1]`; STRING as object arrays of UTF-8 bytes, `seed` as
            int64, `max_frames` as int32. Absent or None: not sent.
        parameters: request parameters by name. Those of Triton itself pass, all others are refused.
        profile: whose rules clean the caption, which must leave something of it.

    Raises:
        InvalidRequestError: for the first thing that is wrong.
    """
    _refuse_unknown(fields, parameters)
    caption = _text(fields, "caption", most_characters=contract.MAX_CAPTION_CHARACTERS)
    if not clean_caption(caption, profile=profile).strip():
        raise InvalidRequestError(
            f"caption: {shown(caption)} is nothing but markup, cleaning it leaves no text; describe the music"
        )
    encoding = _optional_text(fields, "audio_encoding", default=contract.AUDIO_ENCODINGS[0])
    if encoding not in contract.AUDIO_ENCODINGS:
        raise InvalidRequestError(
            f"audio_encoding: {shown(encoding)} is unknown; allowed: {', '.join(contract.AUDIO_ENCODINGS)}"
        )
    seed = _integer(fields, "seed", dtype=np.dtype(np.int64), least=0, most=contract.MAX_SEED)
    return SongRequest(
        caption=caption,
        lyrics=_text(fields, "lyrics", most_characters=contract.MAX_LYRICS_CHARACTERS),
        seed=0 if seed is None else seed,
        max_frames=_integer(
            fields, "max_frames", dtype=np.dtype(np.int32), least=1, most=contract.MAX_SONG_FRAMES
        ),
        audio_encoding=encoding,
    )


def _refuse_unknown(fields: Mapping[str, Any], parameters: Mapping[str, object]) -> None:
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequestError(f"{shown(name)}: no such input; allowed: {', '.join(FIELDS)}")
    for name in parameters:
        if name in FIELDS:
            raise InvalidRequestError(f"{name}: sent as a request parameter; send it as an input tensor")
        if name not in TRITON_PARAMETERS and not name.startswith(TRITON_PARAMETER_PREFIX):
            raise InvalidRequestError(
                f"{shown(name)}: this model cannot honour such a parameter; remove it (a song is set by "
                f"{', '.join(FIELDS)} alone)"
            )


def _element(fields: Mapping[str, np.ndarray[Any, Any] | None], name: str) -> Any:
    """The one element of a field's array, or None where the field was not sent."""
    array = fields.get(name)
    if array is None:
        return None
    if array.shape != (1,):
        raise InvalidRequestError(f"{name}: its shape is {shown(str(list(array.shape)))}, must be [1]")
    return array[0]


def _text(fields: Mapping[str, np.ndarray[Any, Any] | None], name: str, *, most_characters: int) -> str:
    text = _decoded(_element(fields, name), name, most_characters=most_characters)
    if text is None:
        raise InvalidRequestError(f"{name}: missing; it is required and must not be blank")
    if not text.strip():
        raise InvalidRequestError(f"{name}: blank; it is required and must have something other than spaces")
    return text


def _optional_text(fields: Mapping[str, np.ndarray[Any, Any] | None], name: str, *, default: str) -> str:
    text = _decoded(_element(fields, name), name, most_characters=100)
    return default if text is None else text


def _decoded(value: Any, name: str, *, most_characters: int) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if not isinstance(value, bytes):
        raise InvalidRequestError(f"{name}: its type is {shown(type(value).__name__)}, must be STRING")
    # Size first: a longer text than this cannot be allowed, and need not be decoded to know it.
    if len(value) > BYTES_PER_CHARACTER * most_characters:
        raise InvalidRequestError(f"{name}: {len(value)} bytes long; at most {most_characters} characters")
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: not valid UTF-8 at byte {error.start} ({error.reason})") from None
    if len(text) > most_characters:
        raise InvalidRequestError(
            f"{name}: {len(text)} characters long; at most {most_characters} characters"
        )
    if "\0" in text:
        raise InvalidRequestError(f"{name}: has a NUL character at {text.index(chr(0))}; NUL is not text")
    return text


def _integer(
    fields: Mapping[str, np.ndarray[Any, Any] | None],
    name: str,
    *,
    dtype: np.dtype[Any],
    least: int,
    most: int,
) -> int | None:
    value = _element(fields, name)
    if value is None:
        return None
    found = getattr(value, "dtype", type(value))
    if found != dtype:
        raise InvalidRequestError(
            f"{name}: its type is {shown(_wire_type(found))}, must be {_wire_type(dtype)}"
        )
    if not least <= int(value) <= most:
        raise InvalidRequestError(f"{name}: {int(value)} is out of range; allowed: {least} to {most}")
    return int(value)


def _wire_type(dtype: Any) -> str:
    return (
        "STRING" if dtype in (bytes, str) else getattr(dtype, "name", getattr(dtype, "__name__", "?")).upper()
    )
