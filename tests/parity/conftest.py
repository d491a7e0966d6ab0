"""Fidelity: parity tests record what they compared; a run of this whole folder alone writes docs/fidelity.md.

A run of all tests leaves the file and fails if it is not of what was compared.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "docs" / "fidelity.md"
HOW_TO_WRITE = "./build.sh test tests/parity writes it"
INTRODUCTION = """# Fidelity

What was compared with code that others wrote, and how close it came. Written by
`./build.sh test tests/parity`, whose tests fail where a tolerance is exceeded.
Errors are absolute unless the note says otherwise.
"""


@dataclass(frozen=True)
class Row:
    """One quantity compared with one oracle."""

    section: str
    quantity: str
    oracle: str
    cases: int
    largest_error: float
    tolerance: float | Literal["equal bits"]
    note: str

    def markdown(self) -> str:
        error = "0" if self.largest_error == 0 else f"{self.largest_error:.2g}"
        tolerance = self.tolerance if isinstance(self.tolerance, str) else f"{self.tolerance:.2g}"
        cells = (self.quantity, self.oracle, f"{self.cases:,}", error, tolerance, self.note)
        return "| " + " | ".join(cells) + " |"


@dataclass
class Fidelity:
    """Collects rows and fails what is out of tolerance."""

    rows: list[Row] = field(default_factory=list)

    def record(
        self,
        *,
        quantity: str,
        oracle: str,
        cases: int,
        largest_error: float,
        tolerance: float | Literal["equal bits"],
        note: str = "",
        section: str = "Acoustic half",
    ) -> None:
        """Add a row; fails the test if no case was compared or the error exceeds the tolerance.

        Args:
            quantity, oracle: what was compared, and with what.
            cases: how many comparisons stand behind the row.
            largest_error: over all of them, in the note's unit if it gives one.
            tolerance: largest error allowed; `"equal bits"` allows none.
            note: sizes, dtypes, reasons.
            section: heading the row goes under.
        """
        allowed = 0.0 if tolerance == "equal bits" else tolerance
        assert cases > 0, f"{quantity}: nothing was compared"
        assert largest_error <= allowed, f"{quantity}: off by {largest_error} where {tolerance} is allowed"
        self.rows.append(Row(section, quantity, oracle, cases, float(largest_error), tolerance, note))

    def markdown(self) -> str:
        """The whole document; rows in a fixed order whatever order the tests ran in."""
        ordered = sorted(self.rows, key=lambda row: (row.section, row.quantity, row.oracle, row.note))
        parts = [INTRODUCTION]
        for section in dict.fromkeys(row.section for row in ordered):
            parts.append(
                f"\n## {section}\n\n| quantity | oracle | cases | largest error | tolerance | note |\n"
                "| --- | --- | --- | --- | --- | --- |\n"
            )
            parts.extend(row.markdown() + "\n" for row in ordered if row.section == section)
        return "".join(parts)


_collected = Fidelity()
_whole = True


@pytest.fixture(scope="session")
def fidelity() -> Fidelity:
    """Where a parity test says what it compared: `fidelity.record(...)`."""
    return _collected


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember that a run is not whole."""
    global _whole
    _whole = False


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After a whole run in which everything held: write the table, or hold it against what was compared."""
    if exitstatus != 0 or not _is_whole(session):
        return
    if {Path(argument).resolve() for argument in session.config.args} == {HERE}:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(_collected.markdown(), encoding="utf-8")
    elif differences := stale(TABLE.read_text(encoding="utf-8"), _collected):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in ("docs/fidelity.md is not what these tests compare:", *differences, HOW_TO_WRITE):
            reporter.write_line(line, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_whole(session: pytest.Session) -> bool:
    """Whether every test of this folder was in the run."""
    collected = {item.path for item in session.items}
    parts = any("::" in argument for argument in session.config.args)
    return _whole and not parts and collected >= set(HERE.glob("test_*.py"))


def stale(table: str, compared: Fidelity) -> list[str]:
    """Rows that a table has too many (-) or lacks (+).

    Errors are left aside, and notes, which may hold some: they differ from machine to machine.
    """

    def rows(text: str) -> Counter[str]:
        section, found = "", Counter[str]()
        for line in text.splitlines():
            section = line if line.startswith("## ") else section
            if line.startswith("| "):
                cells = line.split(" | ")
                found[" | ".join([section, *cells[:3], cells[4]])] += 1
        return found

    written, wanted = rows(table), rows(compared.markdown())
    return [f"- {row}" for row in (written - wanted).elements()] + [
        f"+ {row}" for row in (wanted - written).elements()
    ]
