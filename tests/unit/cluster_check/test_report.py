from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.cluster_check.report import (
    FAILED,
    JSON,
    MARKDOWN,
    OK,
    SKIPPED,
    WARNING,
    CheckResult,
    CheckSection,
    ClusterReport,
    section_summary,
)


def part(*verdicts: str) -> CheckSection:
    return CheckSection("x", [CheckResult(f"what {i}", verdict, f"told {i}") for i, verdict in enumerate(verdicts)])


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [((), SKIPPED), ((OK, SKIPPED), OK), ((OK, WARNING, SKIPPED), WARNING), ((WARNING, FAILED, OK), FAILED)],
)
def test_a_part_is_as_good_as_its_worst_check(verdicts: tuple[str, ...], worst: str) -> None:
    assert part(*verdicts).verdict == worst
    assert ClusterReport("", "", [part(OK), part(*verdicts)]).failed == (worst == FAILED)


def test_the_headline_is_the_first_that_is_not_well() -> None:
    assert section_summary(part(OK, OK)) == "2 checks"
    assert section_summary(part(OK)) == "1 check"
    assert section_summary(part(OK, WARNING, FAILED, FAILED)) == "what 2: told 2"
    assert section_summary(part()) == ""


def test_a_check_is_noted_with_its_verdict() -> None:
    noted = CheckSection("x")
    assert noted.add("a", True, "fine")
    assert not noted.add("b", False, "not fine", otherwise=WARNING)
    assert not noted.add("c", False, "bad")
    assert [check.verdict for check in noted.checks] == [OK, WARNING, FAILED]


def test_the_page_and_the_data(tmp_path: Path) -> None:
    bad = part(OK, FAILED)
    bad.tables["Numbers"] = [("a", "b"), ("1 | 2", "3")]
    bad.facts["seed"] = 7
    bad.log = "the end\nof it"
    ClusterReport("4 ranks", "tools/acceptance.py", [part(OK), bad]).write(tmp_path)
    page = (tmp_path / MARKDOWN).read_text()
    assert page.startswith("# Cluster acceptance: FAILED\n\n4 ranks\n\nStarted as `tools/acceptance.py`.\n")
    assert "\n| x | FAILED | 0 | what 1: told 1 |\n" in page
    assert "\n- **FAILED** what 1: told 1\n" in page
    assert "\nNumbers:\n\n| a | b |\n| --- | --- |\n| 1 \\| 2 | 3 |\n" in page
    assert page.endswith("```\nthe end\nof it\n```\n")
    printed = json.loads((tmp_path / JSON).read_text())
    assert printed["failed"] is True
    assert [entry["verdict"] for entry in printed["parts"]] == [OK, FAILED]
    assert printed["parts"][1]["facts"] == {"seed": 7}
    assert {path.name for path in tmp_path.iterdir()} == {MARKDOWN, JSON}


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (ClusterReport("", "", [part(OK), part(WARNING)]), "passed"),
        (ClusterReport("", "", [part(OK)], unasked=["layouts"]), "passed, without layouts"),
        (ClusterReport("", "", [part(OK), part(SKIPPED)]), "passed, without x"),
        (ClusterReport("", "", [part(FAILED), part(SKIPPED)]), "FAILED"),
        (
            ClusterReport("", "", [part(OK)], left=["layouts", "bandwidth"]),
            "unfinished, layouts, bandwidth still to come",
        ),
        (ClusterReport("", "", [part(FAILED)], left=["layouts"]), "unfinished, layouts still to come, FAILED already"),
    ],
)
def test_what_was_not_tried_has_not_passed(report: ClusterReport, verdict: str, tmp_path: Path) -> None:
    assert report.verdict == verdict
    assert report.markdown().startswith(f"# Cluster acceptance: {verdict}\n")
    report.write(tmp_path)
    printed = json.loads((tmp_path / JSON).read_text())
    assert (printed["version"], printed["verdict"], printed["over"]) == (1, verdict, not report.left)


def test_errors_of_several_lines_leave_the_table_whole() -> None:
    page = ClusterReport("", "", [CheckSection("x", [CheckResult("a", FAILED, "E1 bad\n  fix: none")])]).markdown()
    assert "\n| x | FAILED | 0 | a: E1 bad fix: none |\n" in page
