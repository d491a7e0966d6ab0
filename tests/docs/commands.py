"""The commands of README.md and docs/: what stands in their fenced blocks, and how a test runs them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: the page it is in, its language, its text."""

    page: str
    language: str
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, *, page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(page, language, body) for language, body in _FENCE.findall(text)]


def shell_commands(text: str) -> list[str]:
    """Commands of a shell block: continued lines and open quotes joined, comments left out."""
    commands: list[str] = []
    pending = ""
    for line in text.splitlines():
        pending += line if not pending or pending.endswith("\n") else f"\n{line}"
        if line.endswith("\\"):
            pending = pending[:-1].rstrip() + "\n"
            continue
        if pending.count("'") % 2 or pending.count('"') % 2:
            continue
        command = re.sub(r"\s+#(?!\S)[^'\"]*$", "", re.sub(r"\n\s*(?=-)", " ", pending)).strip()
        if command and not command.startswith("#"):
            commands.append(command)
        pending = ""
    if pending.strip():
        raise ValueError(f"a block ends within a command: {pending!r}")
    return commands


def all_blocks() -> list[Block]:
    """Those of all pages."""
    return [
        block
        for path in pages()
        for block in blocks(path.read_text(encoding="utf-8"), page=path.relative_to(ROOT).as_posix())
    ]
