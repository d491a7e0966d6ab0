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

Fields = Mapping[str, "np.ndarray[Any, Any] | None"]
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


def take_probe(parameters: dict[str, object]) -> bool:
    """Take the parameter `probe` out of a request's: whether it only asks if songs can be made.

    Raises:
        InvalidRequestError: its value is neither true nor false.
    """
    probe = parameters.pop("probe", False)
    if not isinstance(probe, bool):
        raise InvalidRequestError(f"probe: {shown(str(probe))} is not allowed; allowed: true, false")
    return probe


def parse_request(
    fields: Fields,
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
    seed = _integer(fields, "seed", dtype=np.int64, least=0, most=contract.MAX_SEED)
    request = SongRequest(
        caption=_text(fields, "caption", most_characters=contract.MAX_CAPTION_CHARACTERS),
        lyrics=_text(fields, "lyrics", most_characters=contract.MAX_LYRICS_CHARACTERS),
        seed=0 if seed is None else seed,
        max_frames=_integer(fields, "max_frames", dtype=np.int32, least=1, most=contract.MAX_SONG_FRAMES),
        audio_encoding=_encoding(fields, "audio_encoding"),
    )
    # Last, because it is the one check that takes time.
    if not clean_caption(request.caption, profile=profile).strip():
        raise InvalidRequestError(
            f"caption: {shown(request.caption)} is nothing but markup, no text is left; describe the music"
        )
    return request


def _refuse_unknown(fields: Fields, parameters: Mapping[str, object]) -> None:
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


def _sent(fields: Fields, name: str) -> np.ndarray[Any, Any] | None:
    """A field's array of one element, or None where the field was not sent."""
    array = fields.get(name)
    if array is not None and array.shape != (1,):
        raise InvalidRequestError(f"{name}: its shape is {shown(str(list(array.shape)))}, must be [1]")
    return array


def _text(fields: Fields, name: str, *, most_characters: int) -> str:
    array = _sent(fields, name)
    if array is None:
        raise InvalidRequestError(f"{name}: missing; it is required and must not be blank")
    allowed = f"at most {most_characters} characters"
    text = _decoded(array, name, most_characters=most_characters, allowed=allowed)
    if not text.strip():
        raise InvalidRequestError(f"{name}: blank; it is required and must have something other than spaces")
    return text


def _encoding(fields: Fields, name: str) -> str:
    array = _sent(fields, name)
    if array is None:
        return contract.AUDIO_ENCODINGS[0]
    allowed = "allowed: " + ", ".join(contract.AUDIO_ENCODINGS)
    longest = max(map(len, contract.AUDIO_ENCODINGS))
    encoding = _decoded(array, name, most_characters=longest, allowed=allowed)
    if encoding not in contract.AUDIO_ENCODINGS:
        raise InvalidRequestError(f"{name}: {shown(encoding)} is unknown; {allowed}")
    return encoding


def _decoded(array: np.ndarray[Any, Any], name: str, *, most_characters: int, allowed: str) -> str:
    value = array[0]
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if not isinstance(value, bytes):
        raise InvalidRequestError(f"{name}: its type is {shown(type(value).__name__)}, must be STRING")
    # Size first: a longer text than this cannot be allowed, and need not be decoded to know it.
    if len(value) > BYTES_PER_CHARACTER * most_characters:
        raise InvalidRequestError(f"{name}: {len(value)} bytes long; {allowed}")
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: not valid UTF-8 at byte {error.start} ({error.reason})") from None
    if len(text) > most_characters:
        raise InvalidRequestError(f"{name}: {len(text)} characters long; {allowed}")
    if "\0" in text:
        raise InvalidRequestError(f"{name}: has a NUL character at {text.index(chr(0))}; NUL is not text")
    return text


def _integer(fields: Fields, name: str, *, dtype: type[np.integer[Any]], least: int, most: int) -> int | None:
    array = _sent(fields, name)
    if array is None:
        return None
    if array.dtype != dtype:
        found = "STRING" if array.dtype == object else array.dtype.name.upper()
        raise InvalidRequestError(f"{name}: its type is {shown(found)}, must be {dtype.__name__.upper()}")
    value = int(array[0])
    if not least <= value <= most:
        raise InvalidRequestError(f"{name}: {value} is out of range; allowed: {least} to {most}")
    return value
