"""Fidelity: parity tests record what they compared; `MUSIC3_WRITE_FIDELITY=1` writes docs/fidelity.md."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

TABLE = Path(__file__).resolve().parents[2] / "docs" / "fidelity.md"
INTRODUCTION = """# Fidelity

What was compared with code that others wrote, and how close it came. Written by
`MUSIC3_WRITE_FIDELITY=1 ./build.sh test tests/parity`; the same tests fail where a tolerance is exceeded.
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


@pytest.fixture(scope="session")
def fidelity() -> Fidelity:
    """Where a parity test says what it compared: `fidelity.record(...)`."""
    return _collected


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table, but only from a run in which everything held."""
    if os.environ.get("MUSIC3_WRITE_FIDELITY") == "1" and exitstatus == 0 and _collected.rows:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(_collected.markdown(), encoding="utf-8")
