"""Cleaning rules: the published vectors, the warnings, and equality with the rules' plain patterns."""

import re
import sys
from collections.abc import Callable

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend_models import cleaning
from python_backend_models.cleaning import clean_caption, dropped_words, joined_words, normalize_lyrics

# Outputs of vllm-omni 0.30.0's prompt functions.
CAPTIONS = {
    "## Acoustic pop\n- Warm **alto** voice\n\n<|tempo 96|>": "Acoustic pop\nWarm alto voice\ntempo is 96",
    "foo\n   ***   \n\n\nbar": "foo\nbar",
    "---\nfoo": "\nfoo",
    "    indented    text": "indentedtext",
    "  * * item": "item",
    "* ** a": "** a",
    "**a *b* c**": "**a b c**",
    "***bold it***": "bold it",
    "• one\n•two": "one\n•two",
    " \n\n ": "\n",
    "<|<|im_end|>|>": "<|im_end|>",
    "1. x\n#c\n####### d": "1. x\n#c\n####### d",
    "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\r\nh\ri\n": "a\nb\nc\nd\ne\nf\ng\nh\ni",
}
LYRICS = {
    "[Verse] dropped text\nHello world [Chorus]\nSing": "[start]\n[verse]\nHello world\n[chorus]\nSing",
    " \t[A][B C] [D]x": "[start]\n[a][b c]\n[d]",
    "a] [b": "[start]\na]\n[b",
    "a ^ ^ b": "[start]\na\n^ b",
    "[Verse]\r\nfoo\r\n": "[start]\n[verse]\nfoo\r\n",
    "[V]: hi": "[start]\n[v]",
    "": "[start]\n",
    "[Start]\n\nx [] Y[ÄB\nC]": "[start]\n[start]\n\nx\n[]\nY[äb\nc]",
}
SPICY = st.text(alphabet="[]ABab \t\n\r^*-_#<|>•\x1f\x85\u2028\ufeff", max_size=60)


@pytest.mark.parametrize(("caption", "cleaned"), CAPTIONS.items())
@pytest.mark.parametrize("profile", ["vllm-omni", "sglang-omni"])
def test_caption_vectors(caption: str, cleaned: str, profile: str) -> None:
    assert clean_caption(caption, profile=profile) == cleaned


@pytest.mark.parametrize(("lyrics", "normalized"), LYRICS.items())
def test_lyrics_vectors(lyrics: str, normalized: str) -> None:
    assert normalize_lyrics(lyrics) == normalized


def test_profiles_differ_on_the_unit_separator_alone() -> None:
    caption = "a\n\x1f# h\nb"
    assert clean_caption(caption) == caption
    assert clean_caption(caption, profile="sglang-omni") == "a\nh\nb"
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    blank_for_re, blank_for_regex = set(re.findall(r"\s", everything)), set(regex.findall(r"\s", everything))
    # The other three separators end a line before any rule sees them.
    assert blank_for_re ^ blank_for_regex == set("\x1c\x1d\x1e\x1f")
    assert blank_for_re | blank_for_regex == set(filter(str.isspace, everything))


def test_unknown_profile() -> None:
    with pytest.raises(ValueError, match="allowed: vllm-omni, sglang-omni"):
        clean_caption("x", profile="omni")


@given(SPICY)
@settings(max_examples=400)
def test_lowercase_tags_are_what_the_pattern_finds(text: str) -> None:
    by_pattern = re.sub(r"\[([^\]]+)\]", lambda tag: f"[{tag.group(1).lower()}]", text)
    assert cleaning._with_lowercase_tags(text) == by_pattern


@given(
    st.lists(
        st.sampled_from(["\n", "\n\n", "\n\n\n\n\n", "---", "  ***", "a", " - b", "__", "    "]), max_size=12
    )
)
@settings(max_examples=400)
@pytest.mark.parametrize("engine", [re, regex])
def test_rule_lines_do_not_see_long_runs_of_line_breaks(engine: object, pieces: list[str]) -> None:
    lines = "\n".join(line.rstrip() for line in "".join(pieces).split("\n"))
    compiled: Callable[..., re.Pattern[str]] = engine.compile  # type: ignore[attr-defined]
    rule = compiled(r"^\s*[-*_]{3,}\s*$", re.MULTILINE if engine is re else regex.MULTILINE)

    def finished(text: str) -> str:
        return re.sub(r"\n{2,}", "\n", rule.sub("", text).replace("• ", "").replace("    ", ""))

    assert finished(re.sub(r"\n{3,}", "\n\n", lines)) == finished(lines)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "unit", ["\n", "\n x", "    ", "<|", "*", "**a", "*a", "-", "\x1f", "a    b ", "• ", "\r", "# ", "|>"]
)
def test_no_caption_is_slow(unit: str) -> None:
    caption = (unit * 20_000)[:20_000]
    assert len(clean_caption(caption)) <= len(caption)
    assert len(joined_words(caption)) <= 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "unit", ["[", "[a", "[a]", "[a] b\n", "\ufeff", "]", "[]", " [", "] ", "[\n", "a ^ ", "\ufeff["]
)
def test_no_lyrics_are_slow(unit: str) -> None:
    lyrics = (unit * 100_000)[:100_000]
    assert normalize_lyrics(lyrics).startswith("[start]\n")
    dropped_words(lyrics)


@pytest.mark.parametrize(
    ("lyrics", "warning"),
    [
        (
            "la\n[Verse] Hello you",
            r"line 2: 'Hello you' is dropped.* the tag '\[Verse\]'; put it on the next",
        ),
        ("[00:12.34] Hello", r"line 1: 'Hello' is dropped.* the time stamp '\[00:12.34\]'; remove"),
        ("[01:02]Hello", r"line 1: 'Hello' is dropped.* the time stamp '\[01:02\]'"),
        ("[A] [B]\t x", r"line 1: 'x' is dropped.* the tag '\[A\] \[B\]'"),
        ("[Verse]\rfoo\rbar", r"line 1: 'foo\\rbar' is dropped.*; only a line feed \(LF\) ends a line"),
        ("[Verse]\u2028foo", r"line 1: 'foo' is dropped"),
        ("\ufeff[Verse]\nfoo", r"line 1: '\[Verse\]' is not read as a tag.*: U\+FEFF stands before it"),
        ("a\n \u3000[Verse]\nfoo", r"line 2: '\[Verse\]' is not read as a tag.*: U\+3000 stands before it"),
        ("[Verse\nfoo", r"line 1: '\[Verse' is not read as a tag: its bracket"),
        ("[]\nfoo", r"line 1: '\[\]' is not read as a tag: its bracket is empty"),
        ("[Verse]\n[Chorus]\n", r"^lyrics: nothing is left to sing"),
        ("-- ^ !", r"^lyrics: nothing is left to sing"),
    ],
)
def test_lost_words_are_named(lyrics: str, warning: str) -> None:
    first = dropped_words(lyrics)[0]
    assert re.search(warning, first), first
    assert len(first) < 300


def test_every_line_that_loses_words_is_named_once() -> None:
    lyrics = "\n".join(f"[T{n}] word{n}" if n % 3 else f"word{n}" for n in range(30))
    assert [f"lyrics line {n + 1}: 'word{n}'" for n in range(30) if n % 3] == [
        warning.partition(" is dropped")[0] for warning in dropped_words(lyrics)
    ]


@pytest.mark.parametrize(
    "lyrics",
    [
        "[Verse]\nHello\n\n[Chorus] \nSing [Bridge]\nla",
        "[Verse]:\r\nfoo\r\n",
        "just words",
        "[Instrumental]\n(instrumental)",
        "你好\n[副歌]\n再见",
    ],
)
def test_nothing_lost_nothing_said(lyrics: str) -> None:
    assert dropped_words(lyrics) == []


@given(st.text(alphabet="[]Ab1: \t\n\r\ufeff", max_size=40))
@settings(max_examples=400)
def test_words_vanish_only_with_a_warning(lyrics: str) -> None:
    words = sorted(c for c in lyrics.lower() if c.isalnum())
    kept = sorted(c for c in normalize_lyrics(lyrics).removeprefix("[start]\n").lower() if c.isalnum())
    lost = [warning for warning in dropped_words(lyrics) if " is dropped" in warning]
    assert (words != kept) == bool(lost)


@pytest.mark.parametrize(
    ("caption", "glued"),
    [("soft    piano", ("'soft'", "'piano'")), ("- a\n- two        gaps", ("'two'", "'gaps'"))],
)
def test_glued_words_are_named(caption: str, glued: tuple[str, str]) -> None:
    (warning,) = joined_words(caption)
    assert all(word in warning for word in glued)
    assert glued[0].strip("'") + glued[1].strip("'") in clean_caption(caption)


@pytest.mark.parametrize(
    "caption", ["soft piano", "soft     piano", "    soft piano", "a    \nb", "a\n    b"]
)
def test_other_gaps_are_not_worth_a_warning(caption: str) -> None:
    assert joined_words(caption) == []


@given(st.text(max_size=300))
def test_shown_is_short_and_printable(text: str) -> None:
    shown = cleaning.shown(text)
    assert len(shown) <= 80
    assert shown.isprintable()
