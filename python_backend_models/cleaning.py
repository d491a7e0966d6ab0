"""What the checkpoint was trained to read: rules that clean a caption and lay out lyrics.

The rules and their order are the model's input contract; one character more or less moves every token after
it and changes the song. They are those of vllm-omni 0.30.0, which sglang-omni and diffusers share but for one
character: U+001F is blank for Python's `re` (sglang-omni) and not for the `regex` module (vllm-omni), so the
profile picks the engine. As published, some rules are quadratic; here each is linear in the text, save for
bold nested thousands deep (half a second for a caption that is nothing else).

Where the rules lose words or structure, `dropped_words` and `joined_words` say so for people.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex

from python_backend_models.contract import PROFILES

ENGINES: dict[str, Any] = {"vllm-omni": regex, "sglang-omni": re}
SHOWN_CHARACTERS = 60  # of a client's text, in a warning


@dataclass(frozen=True)
class _CaptionRules:
    """The caption's patterns, compiled by one of the two engines."""

    markup: Any
    line_prefixes: tuple[Any, ...]
    italic: Any
    rule_line: Any


BOLD = re.compile(r"\*\*([^*]+)\*\*")  # the same in both engines, and three times as fast in this one


@cache
def _caption_rules(profile: str) -> _CaptionRules:
    if profile not in ENGINES:
        raise ValueError(f"profile is {profile!r}; allowed: {', '.join(ENGINES)}")
    compiled: Callable[..., Any] = ENGINES[profile].compile
    multiline = ENGINES[profile].MULTILINE
    return _CaptionRules(
        markup=compiled(r"<\|([^|]*)\|>"),
        # A heading, then one bullet, then one more star as a bullet: "  * * item" loses both.
        line_prefixes=(compiled(r"^\s{0,3}#{1,6}\s+"), compiled(r"^\s*[*+-]\s+"), compiled(r"^\s*\*\s+")),
        italic=compiled(r"(?<!\*)\*([^*\n]+)\*(?!\*)"),
        rule_line=compiled(r"^\s*[-*_]{3,}\s*$", multiline),
    )


def clean_caption(caption: str, *, profile: str = PROFILES[0]) -> str:
    """Turn a caption's markup and Markdown into the plain lines that the model knows.

    `<|key value|>` becomes `key is value`, once: what that pass puts together is plain text to the tokenizer.
    Line breaks of every kind become LF, and runs of them one. Raises ValueError on an unknown profile.
    Source: vllm-omni 0.30.0, prompt rules of MiniMax Music 3.
    """
    text = _without_markdown(caption, _caption_rules(profile))
    text = text.replace("• ", "").replace("    ", "")
    return re.sub(r"\n{2,}", "\n", text)


def _without_markdown(caption: str, rules: _CaptionRules) -> str:
    text = rules.markup.sub(_spoken_markup, caption)
    text = "\n".join(_plain_line(line, rules) for line in text.splitlines())
    # The rule-line pattern is quadratic in the length of a run of line breaks. No line ends in a blank by
    # now, so for that pattern, and for the final collapse, more than two line breaks are the same as two.
    text = re.sub(r"\n{3,}", "\n\n", text)
    return rules.rule_line.sub("", text)


def _spoken_markup(match: Any) -> str:
    inner: str = match.group(1).strip()
    words = inner.split(None, 1)
    return " is ".join(words) if len(words) == 2 else inner


def _plain_line(line: str, rules: _CaptionRules) -> str:
    for prefix in rules.line_prefixes:
        line = prefix.sub("", line)
    while "**" in line and (plain := BOLD.sub(r"\1", line)) != line:
        line = plain
    return str(rules.italic.sub(r"\1", line)).rstrip()


def joined_words(caption: str, *, profile: str = PROFILES[0]) -> list[str]:
    """Warn once where cleaning a caption glues words together: four spaces in a row are deleted."""
    text = _without_markdown(caption, _caption_rules(profile)).replace("• ", "")
    glued = re.search(r"(?<=\S)(?:    )+(?=\S)", text)
    if glued is None:
        return []
    before = text[: glued.start()].split()[-1][-20:]
    after = text[glued.end() :].split(None, 1)[0][:20]
    return [
        f"caption: four spaces in a row are deleted, so {shown(before)} and {shown(after)} become "
        f"{shown(before + after)}; use one space between words"
    ]


LEADING_TAGS = re.compile(r"^[ \t]*((?:\[[^\]]+\][ \t]*)+)")


def normalize_lyrics(lyrics: str) -> str:
    """Put each structure tag on a line of its own, in lower case, below an opening `[start]`.

    Only LF ends a line. Where a line begins with tags, its rest is dropped: `dropped_words` tells.
    Source: vllm-omni 0.30.0, prompt rules of MiniMax Music 3; the same in sglang-omni and diffusers.
    """
    lines = lyrics.split("\n")
    kept = (tags.group(1).strip() if (tags := LEADING_TAGS.match(line)) else line for line in lines)
    text = "\n".join(kept).replace("] ", "]\n").replace(" [", "\n[").replace(" ^ ", "\n")
    return "[start]\n" + _with_lowercase_tags(text)


def _with_lowercase_tags(text: str) -> str:
    return "".join(part.lower() if is_tag else part for part, is_tag in _split_at_tags(text))


def _split_at_tags(text: str) -> Iterator[tuple[str, bool]]:
    r"""The text in pieces, each with whether `\[[^\]]+\]` matches it (which takes `re` quadratic time)."""
    done = 0
    start = text.find("[")
    while start != -1 and (end := text.find("]", start)) != -1:
        if end > start + 1:
            yield text[done:start], False
            yield text[start : end + 1], True
            done = end + 1
        start = text.find("[", end)
    yield text[done:], False


# Beside the LF: what people take for a line's end, and the rules do not.
OTHER_LINE_ENDS = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
TIME_STAMP = re.compile(r"\[\d+:\d+(?:[.:]\d+)?\]")


def dropped_words(lyrics: str) -> list[str]:
    """Warnings, for people, where `normalize_lyrics` loses words or structure; at most one per line.

    Words that share a line with the tags before them are lost; an LRC time stamp is such a tag. A tag is lost
    as one when something invisible stands before it or its bracket is not closed on its line.
    """
    warnings: list[str] = []
    for number, line in enumerate(lyrics.split("\n"), start=1):
        tags = LEADING_TAGS.match(line)
        warning = _lost_words(line, tags) if tags else _lost_tag(line)
        if warning:
            warnings.append(f"lyrics line {number}: {warning}")
    if not any(_has_words(part) for part, is_tag in _split_at_tags(normalize_lyrics(lyrics)) if not is_tag):
        warnings.append("lyrics: nothing is left to sing but structure tags")
    return warnings


def _lost_words(line: str, tags: re.Match[str]) -> str | None:
    rest = line[tags.end() :].strip()
    if not _has_words(rest):
        return None
    tag = tags.group(1).strip()
    what = "time stamp" if TIME_STAMP.fullmatch(tag.partition("]")[0] + "]") else "tag"
    warning = f"{shown(rest)} is dropped, because it shares the line with the {what} {shown(tag)}"
    if OTHER_LINE_ENDS.search(rest):
        return warning + "; only a line feed (LF) ends a line"
    return warning + ("; remove time stamps" if what == "time stamp" else "; put it on the next line")


def _lost_tag(line: str) -> str | None:
    hidden = 0
    while hidden < len(line) and (line[hidden].isspace() or unicodedata.category(line[hidden]) == "Cf"):
        hidden += 1
    before, visible = line[:hidden].strip(" \t"), line[hidden:]
    if not visible.startswith("["):
        return None
    tag = LEADING_TAGS.match(visible)
    if tag is None:
        return f"{shown(visible)} is not read as a tag: its bracket is empty or not closed on its line"
    names = " ".join(f"U+{ord(character):04X}" for character in before[:4])
    return (
        f"{shown(tag.group(1).strip())} is not read as a tag at the start of a line: {names} stands before it"
    )


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)


def shown(text: str) -> str:
    """A client's text as a message may show it: quoted, escaped where it does not print, and short."""
    quoted = repr(text[: SHOWN_CHARACTERS + 1])
    return quoted if len(quoted) <= SHOWN_CHARACTERS + 2 else quoted[:SHOWN_CHARACTERS] + "…" + quoted[0]
