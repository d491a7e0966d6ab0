"""docs/settings.md is what the settings are."""

import dataclasses
import re

import pytest

from python_backend_models.settings import (
    DitSettings,
    Music3Settings,
    SettingsError,
    TalkerSettings,
    VocoderSettings,
    read,
)
from python_backend_models.settings_page import PAGE, page

STAGES = {"music3": Music3Settings, "talker": TalkerSettings, "dit": DitSettings, "vocoder": VocoderSettings}
ROW = re.compile(r"^\| `(\w+)` \| (?:`([^`]*)`|none) \| (.+?) \| .+ \|$", re.MULTILINE)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m python_backend_models.settings_page"


def test_every_setting_has_a_row() -> None:
    rows = [match[1] for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    fields = {field.name for kind in STAGES.values() for field in dataclasses.fields(kind)}
    assert set(rows) == fields


@pytest.mark.parametrize("stage", STAGES)
def test_what_the_page_allows_is_allowed_and_what_it_leaves_out_is_not(stage: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    kind = STAGES[stage]
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = (each for each in sections if each.startswith(f"`{stage}`") and "`dit` and" not in each[:40])
    rows = list(ROW.finditer(section))
    assert rows
    for row in rows:
        name, default, allowed = row[1], row[2], row[3]
        if default is not None:
            assert getattr(read(kind, stage, {name: default}, {}), name) == getattr(kind(), name)
        for choice in re.findall(r"`([^`]+)`", allowed):
            assert getattr(read(kind, stage, {name: choice}, {}), name) == choice
        outside = {"any": None, "at": "-1"}.get(allowed.split()[0], "99999999")
        if outside is not None:
            with pytest.raises(SettingsError, match=name):
                read(kind, stage, {name: outside}, {})
