"""Prompts: framing, the unconditional twin, limits, and text that tries to be control."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backend_models import contract
from python_backend_models.cleaning import clean_caption, normalize_lyrics
from python_backend_models.prompt import (
    PromptBuilder,
    TokenizerMismatchError,
    frame_budget,
    unconditional_twin,
)
from python_backend_models.request import InvalidRequestError
from python_backend_models.tiny_checkpoint import tokenizer_description
from python_backend_models.tokenizer import TextTokenizer

FRAMING_TOKENS = 7
TEXT = st.lists(
    st.sampled_from(
        [*contract.SPECIAL_TOKEN_IDS, "<|", "|>", "[", "]", "a", " ", "\n", "é", "<|<|im_end|>|>"]
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompt") / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_description()))
    return path


@pytest.fixture(scope="module")
def builder(file: Path) -> PromptBuilder:
    return PromptBuilder(file)


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> TextTokenizer:
    return TextTokenizer(file)


def test_framing(builder: PromptBuilder, tokenizer: TextTokenizer) -> None:
    prompt = builder.build("## Folk", "[Verse]\nla")
    assert prompt.ids == [
        *(151644, 151671, *tokenizer.ids("Folk"), 151672),
        *(151673, *tokenizer.ids("[start]\n[verse]\nla"), 151674),
        *(151645, 151669),
    ]
    assert prompt.warnings == []


def test_twin(builder: PromptBuilder) -> None:
    prompt = builder.build("Folk", "la")
    hidden = len(prompt.ids) - 3
    assert prompt.unconditional_ids == [151644, *[151654] * hidden, 151645, 151669]


@given(caption=TEXT, lyrics=TEXT)
def test_text_never_becomes_control(
    builder: PromptBuilder, tokenizer: TextTokenizer, caption: str, lyrics: str
) -> None:
    prompt = builder.build(f"x{caption}", lyrics)
    steering = [token_id for token_id in prompt.ids if token_id >= contract.TEXT_TOKENS]
    assert steering == [151644, 151671, 151672, 151673, 151674, 151645, 151669]
    middle = prompt.ids.index(151672)
    assert prompt.ids[2:middle] == tokenizer.ids(clean_caption(f"x{caption}"))
    assert prompt.ids[middle + 2 : -3] == tokenizer.ids(normalize_lyrics(lyrics))


def test_profile_decides_the_cleaning(file: Path, tokenizer: TextTokenizer) -> None:
    caption = "a\n\x1f# h\nb"
    for profile in contract.PROFILES:
        ids = PromptBuilder(file, profile=profile).build(caption, "la").ids
        assert ids[2 : ids.index(151672)] == tokenizer.ids(clean_caption(caption, profile=profile))


def test_unknown_profile(file: Path) -> None:
    with pytest.raises(ValueError, match="profile"):
        PromptBuilder(file, profile="omni")


def test_wrong_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerMismatchError):
        PromptBuilder(tmp_path / "tokenizer.json")


def test_warnings(builder: PromptBuilder) -> None:
    caption_warning, *lyric_warnings = builder.build(
        "soft    piano", "[Verse] one\ntwo\n[Chorus] three"
    ).warnings
    assert caption_warning.startswith("caption: ")
    assert [warning.partition(":")[0] for warning in lyric_warnings] == ["lyrics line 1", "lyrics line 3"]


def test_empty_caption_is_refused(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidRequestError, match="caption"):
        builder.build("<||>", "la")


def test_longest_prompt(builder: PromptBuilder, tokenizer: TextTokenizer) -> None:
    # "z" is never part of a merge, so each is a token; digits too.
    caption_tokens = 100
    own = len(tokenizer.ids(normalize_lyrics("")))
    fitting = 5000 - FRAMING_TOKENS - caption_tokens - own
    assert len(builder.build("z" * caption_tokens, "z" * fitting).ids) == 5000
    with pytest.raises(InvalidRequestError, match=r"lyrics: the prompt has 5001 tokens \(100 of the caption"):
        builder.build("z" * caption_tokens, "z" * (fitting + 1))
    with pytest.raises(InvalidRequestError, match=r"caption: the prompt has \d+ tokens.*; at most 5000"):
        builder.build("z" * 5000, "z")


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "frames"),
    [
        (10, None, 9000),
        (1238, None, 9000),
        (1239, None, 8999),
        (5000, None, 5238),
        (10, 1, 1),
        (1238, 9000, 9000),
        (5000, 5238, 5238),
    ],
)
def test_frame_budget(prompt_tokens: int, asked: int | None, frames: int) -> None:
    assert frame_budget(prompt_tokens, asked) == frames


@pytest.mark.parametrize(("prompt_tokens", "asked", "most"), [(1239, 9000, 8999), (5000, 5239, 5238)])
def test_frame_budget_names_the_largest_that_fits(prompt_tokens: int, asked: int, most: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"max_frames: {asked} .*{prompt_tokens} tokens; at most {most}$"
    ):
        frame_budget(prompt_tokens, asked)
    assert prompt_tokens + most + 2 == 10_240


@given(st.integers(8, 5000), st.none() | st.integers(1, 9000))
def test_a_granted_budget_fits_the_context(prompt_tokens: int, asked: int | None) -> None:
    try:
        frames = frame_budget(prompt_tokens, asked)
    except InvalidRequestError:
        assert asked is not None
        assert prompt_tokens + asked + 2 > 10_240
        return
    assert 1 <= frames <= 9000
    assert prompt_tokens + frames + 2 <= 10_240
    assert frames == (asked or min(9000, 10_238 - prompt_tokens))


@pytest.mark.parametrize(
    "ids", [[], [151644, 151645, 151669], [1, 2, 151645, 151669], [151644, 1, 2, 151669]]
)
def test_twin_of_something_else(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="not a framed prompt"):
        unconditional_twin(ids)
