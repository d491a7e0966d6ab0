"""Writes docs/settings.md from `settings`: `python -m python_backend_models.settings_page`."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from python_backend_models.settings import (
    CHECKPOINT_VARIABLE,
    ENVIRONMENT_PREFIX,
    DeviceSettings,
    DitSettings,
    Music3Settings,
    StageSettings,
    TalkerSettings,
    VocoderSettings,
)

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
# Heading, stage for an example, and the class whose own fields stand under it.
GROUPS: tuple[tuple[str, str, type[StageSettings]], ...] = (
    ("Every model", "", StageSettings),
    ("`talker`, `dit` and `vocoder`", "", DeviceSettings),
    ("`music3`, the front door", "music3", Music3Settings),
    ("`talker`, the autoregressive stage", "talker", TalkerSettings),
    ("`dit`, the flow-matching stage", "dit", DitSettings),
    ("`vocoder`", "vocoder", VocoderSettings),
)


def page() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    source = "python_backend_models/settings.py"
    yield f"Written by `python -m python_backend_models.settings_page` from `{source}`."
    yield ""
    yield "For the setting `name` of a model, the first of these that is set wins:"
    yield ""
    yield f"1. `{ENVIRONMENT_PREFIX}<MODEL>_<NAME>` in the server's environment, for that model alone"
    yield f"2. `{ENVIRONMENT_PREFIX}<NAME>`, for every model that has such a setting"
    yield "3. the parameter `name` in the model's `config.pbtxt`:"
    yield '   `parameters [ { key: "precision" value: { string_value: "tf32" } } ]`'
    yield "4. the default below"
    yield ""
    yield "A parameter that is no setting or a value that isn't allowed fails the load, and the log names it."
    yield f"`{CHECKPOINT_VARIABLE}` is how `./build.sh serve --checkpoint` passes the folder on."
    for heading, stage, kind in GROUPS:
        inherited = {field.name for base in kind.__mro__[1:] for field in _fields(base)}
        yield ""
        yield f"## {heading}"
        yield ""
        if stage:
            yield f"In the environment `{ENVIRONMENT_PREFIX}{stage.upper()}_<NAME>`."
            yield ""
        yield "| setting | default | allowed | meaning |"
        yield "|---|---|---|---|"
        for field in _fields(kind):
            if field.name not in inherited:
                yield f"| `{field.name}` | {_shown(field.default)} | {_allowed(field)} | {_cell(field)} |"
    yield ""


def _fields(kind: type) -> tuple[Any, ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _shown(value: Any) -> str:
    return "none" if value == "" else f"`{value}`"


def _allowed(field: Any) -> str:
    least, most, choices = (field.metadata[key] for key in ("least", "most", "choices"))
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if least is None and most is None:
        return "any"
    return f"at least {least}" if most is None else f"{least} to {most}"


def _cell(field: Any) -> str:
    return str(field.metadata["meaning"]).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE, file=sys.stderr)


if __name__ == "__main__":
    main()
