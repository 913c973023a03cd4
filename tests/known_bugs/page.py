"""The page of known bugs: a table for each kind, from the catalogue and from a run of all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.golden.provenance import provenance
from tests.known_bugs.bug import KnownBug, UncoveredBug
from tests.known_bugs.bugs import BUGS, UNCOVERED

PAGE = Path(__file__).parents[2] / "docs" / "known_bugs.md"
REPORT = re.compile(r"([\w.-]+)/([\w.-]+)#(\d+)(.*)")
HEAD = "| report | what went wrong there | compared here | largest error | with the bug planted |"

INTRODUCTION = """# Known silent bugs

Bugs that were reported in frameworks for training, with which a run went on and learned something wrong. For each, a
small test here compares with something independent. It passes, and it fails when the bug is planted in this library.
Written by `python -m tests.known_bugs` ({provenance}).

**{absent} of {all} are absent here, and {noticed} of {all} are noticed when planted.** The reports are of {projects}
projects, read in stored copies of their public threads; what a report states was not measured again.

"Against one process" compares training steps in fp64 with those of one process that takes the whole batch at once: the
loss, the gradient norm, every gradient as the update uses it (clipped), and every weight after it; copies of a
parameter on several ranks are equal to the bit. "Largest error" is the largest relative error of all these. The last
column has those with the bug planted, of the loss, of the norm, and of the gradient that is farthest off. A dash
stands for a test of other things, which are equal or not. CI runs all of them and plants a third (`tests/known_bugs`).
`python -m tests.known_bugs --only labels-not-shifted` runs one, without and with its bug, and writes nothing; `--help`
lists the names, in the order of this page.
"""

UNCOVERED_HEAD = """
## Not covered

Reported bugs of features that this library does not have. They do not count. Of the findings of
[Megatron-LM 7452](https://github.com/NVIDIA/Megatron-LM/issues/7452), 2, 3, 5, 8, 10, 11 and 12 are covered above, and
1, 6 and 7 are here; the stored copy of the thread that was read lacks 4, 9, and 13, which is of Megatron-Bridge.

| report | what went wrong there | why not |
|---|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    """What a run of a bug's test has shown.

    Args:
        absent: the library as it is passes.
        noticed: the library with the bug fails.
        error: the largest error without the bug, as text.
        planted: how far off the library with the bug is, as text.
    """

    absent: bool
    noticed: bool
    error: str
    planted: str


def link(report: str) -> str:
    """Return the link to a report, ``owner/project#number (note)``; anything else as it is."""
    if (found := REPORT.fullmatch(report)) is None:
        return report
    owner, project, number, note = found.groups()
    return f"[{project} {number}](https://github.com/{owner}/{project}/issues/{number}){note}"


def _row(reports: Sequence[str], *sentences: str) -> str:
    links = ", ".join(map(link, reports))
    return " | ".join(["| " + links, *(s[:1].upper() + s[1:].rstrip(".") for s in sentences)]) + " |"


def words_of(bug: KnownBug) -> str:
    """Return the cells of a row that are in the catalogue."""
    mended = f". **Was present here:** {bug.mended}" if bug.mended else ""
    return _row(bug.reports, bug.bug, bug.check + mended)


def uncovered_row(bug: UncoveredBug) -> str:
    """Return the row of a bug that is not covered."""
    return _row(bug.reports, bug.bug, bug.why)


def rows_of(page: str) -> set[str]:
    """Return the cells of all rows of known bugs on a page, without those that a run has filled in."""
    tables = page.split(UNCOVERED_HEAD)[0].splitlines()
    rows = [line.split(" | ") for line in tables if line.startswith("| [")]
    return {" | ".join(cells[:3]) + " |" for cells in rows}


def page_of(outcomes: Mapping[str, Outcome]) -> str:
    """Return the page."""
    projects = {report.split("#")[0] for bug in BUGS.values() for report in bug.reports}
    lines = [
        INTRODUCTION.format(
            provenance=provenance(),
            all=len(BUGS),
            absent=sum(outcome.absent for outcome in outcomes.values()),
            noticed=sum(outcome.noticed for outcome in outcomes.values()),
            projects=len(projects),
        )
    ]
    for kind in dict.fromkeys(bug.kind for bug in BUGS.values()):
        lines += [f"## {kind}", "", HEAD, "|---|---|---|--:|---|"]
        for name, bug in BUGS.items():
            if bug.kind == kind:
                outcome = outcomes[name]
                error = outcome.error if outcome.absent else "**present**"
                planted = outcome.planted if outcome.noticed else "**not noticed**"
                lines.append(f"{words_of(bug)} {error} | {planted} |")
        lines.append("")
    uncovered = [uncovered_row(bug) for bug in UNCOVERED]
    return "\n".join(lines).rstrip() + "\n" + UNCOVERED_HEAD + "\n".join(uncovered) + "\n"
