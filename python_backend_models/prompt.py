"""From caption and lyrics to the two token rows that a song starts from.

    im_start caption_start <caption> caption_end lyrics_start <lyrics> lyrics_end im_end audio_start

The framing ids are placed here and text can't produce them, so a request never becomes control. The second
row, which guidance steers away from, is the same with all but the first id and the last two replaced.
"""

from dataclasses import dataclass
from pathlib import Path

from python_backend_models import contract
from python_backend_models.cleaning import (
    clean_caption,
    dropped_words,
    joined_words,
    normalize_lyrics,
    shown,
)
from python_backend_models.request import InvalidRequestError
from python_backend_models.tokenizer import TextTokenizer, TokenizerMismatchError

__all__ = [
    "Prompt",
    "PromptBuilder",
    "TokenizerMismatchError",
    "clean_caption",
    "dropped_words",
    "frame_budget",
    "normalize_lyrics",
    "unconditional_twin",
]

KEPT_AT_START, KEPT_AT_END = 1, 2  # of the conditional row, in its unconditional twin


@dataclass(frozen=True)
class Prompt:
    """Two rows of equal length, and what to tell the client about its text."""

    ids: list[int]
    unconditional_ids: list[int]
    warnings: list[str]


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer. Keeps no state between prompts."""

    def __init__(self, tokenizer_json: Path, *, profile: str = contract.PROFILES[0]) -> None:
        """Load the tokenizer.

        Raises:
            OSError: the file can't be read.
            TokenizerMismatchError: it isn't this model's.
            ValueError: unknown profile.
        """
        clean_caption("", profile=profile)  # an unknown profile is refused now, not at the first song
        self._profile = profile
        self._tokenizer = TextTokenizer(tokenizer_json)

    def build(self, caption: str, lyrics: str) -> Prompt:
        """Clean, tokenize and frame one song's text.

        Raises:
            InvalidRequestError: the prompt is longer than `contract.MAX_PROMPT_TOKENS`, or nothing is left of
                the caption.
        """
        cleaned = clean_caption(caption, profile=self._profile)
        if not cleaned.strip():
            raise InvalidRequestError(f"caption: {shown(caption)} is nothing but markup; describe the music")
        caption_ids = self._tokenizer.ids(cleaned)
        lyrics_ids = self._tokenizer.ids(normalize_lyrics(lyrics))
        ids = [
            *(contract.IM_START, contract.CAPTION_START),
            *caption_ids,
            *(contract.CAPTION_END, contract.LYRICS_START),
            *lyrics_ids,
            *(contract.LYRICS_END, contract.IM_END, contract.AUDIO_START),
        ]
        if len(ids) > contract.MAX_PROMPT_TOKENS:
            longer = "lyrics" if len(lyrics_ids) >= len(caption_ids) else "caption"
            raise InvalidRequestError(
                f"{longer}: the prompt has {len(ids)} tokens ({len(caption_ids)} of the caption, "
                f"{len(lyrics_ids)} of the lyrics); at most {contract.MAX_PROMPT_TOKENS}"
            )
        return Prompt(
            ids=ids,
            unconditional_ids=unconditional_twin(ids),
            warnings=joined_words(caption, profile=self._profile) + dropped_words(lyrics),
        )


def unconditional_twin(ids: list[int]) -> list[int]:
    """The row that guidance steers away from: `im_start`, then `audio_cfg` throughout, then the last two ids.

    Source: vllm-omni 0.30.0. Raises ValueError for a row that is not a framed prompt.
    """
    frame = (contract.IM_START, contract.IM_END, contract.AUDIO_START)
    if len(ids) < KEPT_AT_START + KEPT_AT_END + 1 or (ids[0], *ids[-KEPT_AT_END:]) != frame:
        raise ValueError(f"not a framed prompt of {len(ids)} ids: it must begin and end with {frame}")
    hidden = len(ids) - KEPT_AT_START - KEPT_AT_END
    return [*ids[:KEPT_AT_START], *[contract.AUDIO_CFG] * hidden, *ids[-KEPT_AT_END:]]


def frame_budget(prompt_tokens: int, max_frames: int | None) -> int:
    """The cap of a song in frames: what was asked for, else as many as the model and its context allow.

    Raises:
        InvalidRequestError: more frames were asked for than fit beside the prompt.
    """
    left = contract.CONTEXT_TOKENS - contract.CONTEXT_RESERVE_TOKENS - prompt_tokens
    most = min(contract.MAX_SONG_FRAMES, left)
    if max_frames is None:
        return most
    if max_frames > most:
        raise InvalidRequestError(
            f"max_frames: {max_frames} do not fit beside a prompt of {prompt_tokens} tokens; at most {most}"
        )
    return max_frames
