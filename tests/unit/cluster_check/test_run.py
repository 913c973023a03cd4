from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import bandwidth
from tools.cluster_check import checks
from tools.cluster_check.checks import layout_cases
from tools.cluster_check.report import FAILED, OK, SKIPPED, WARNING, ClusterReport
from tools.cluster_check.run import BETWEEN_NODES, LAYOUT_STARTS, ClusterCheck, LaunchResult

FILES = {"missing": [], "visible_after": 0.1, "lock": "held", "torn": 0, "write_mb_per_s": 1.0}
FACTS = checks.machine_facts("cpu", {})
FIGURES = [
    {"where": where, "operation": operation, "ranks": ranks, "megabytes": size, "seconds": 1.0, "bus": 12.345}
    for where, ranks in (("all ranks", 4), ("within a node", 2))
    for operation in ("all-reduce", "all-gather")
    for size in (1, 4)
]
BANDWIDTH = {"device": "cpu", "ranks": 4, "clocks_apart": 0.002, "figures": FIGURES}


class Pretended:
    """A launcher whose programs write what was prepared for them.

    Attributes:
        ranks: that say they are there.
        act: called with the name and the words of every program; returns its exit status.
        started: names of the programs.
    """

    def __init__(self, folder: Path, ranks: int, act: Callable[[str, Sequence[Any]], int | None]) -> None:
        self.folder, self.ranks, self.act, self.started = folder, ranks, act, list[str]()

    def run(self, name: str, program: Sequence[Any], seconds: float) -> LaunchResult:
        self.started.append(name)
        log = self.folder / f"{name}.log"
        log.write_text(f"what {name} wrote")
        if name == "machine":
            for rank in range(self.ranks):
                place = {"rank": rank, "size": self.ranks, "host": "n1", "local_rank": rank, "files": FILES}
                (program[3] / f"machine.{rank}.json").write_text(json.dumps((FACTS if rank == 0 else {}) | place))
        if name == "bandwidth":
            Path(program[-1]).write_text(json.dumps(BANDWIDTH))
        return LaunchResult(self.act(name, program), 1.0, log)


def run(
    folder: Path, act: Callable[[str, Sequence[Any]], int | None], ranks: int = 4, parts: str = ""
) -> tuple[ClusterReport, list[str]]:
    launcher = Pretended(folder, ranks, act)
    course = ClusterCheck(launcher, folder, "auto", 60.0, ["fp32"], None, 10, 1)  # type: ignore[arg-type]
    with patch.object(
        checks, "check_layouts", lambda part, folder, dtype, cases, ranks: part.add(f"examined {dtype}", True, "")
    ):
        report = course.run(parts.split() or ("layouts", "interruption", "bandwidth"), "command")
    assert json.loads((folder / "acceptance.json").read_text())["failed"] == report.failed
    return report, launcher.started


def finish(program: Sequence[Any], until: int | None = None) -> None:
    """Have layouts come to their end: those that were asked for, or the first of them."""
    numbers = [int(number) for number in program[6].split(",")][:until]
    for case in [layout_cases(4, 4)[number] for number in numbers]:
        for rank in range(4):
            (program[3] / checks.trace_file_name(case, program[4], rank)).write_text("")


def all_fail(name: str, program: Sequence[Any]) -> int:
    return 0 if name == "machine" else 1


def test_what_fails_does_not_end_the_rest(tmp_path: Path) -> None:
    report, started = run(tmp_path, all_fail)
    assert report.failed
    assert [part.verdict for part in report.parts] == [OK, FAILED, FAILED, FAILED]
    assert [part.log for part in report.parts] == [
        "",
        "what layouts-fp32 wrote",
        "what undisturbed wrote",
        "what bandwidth wrote",
    ]
    assert started == ["machine", *LAYOUT_STARTS * ["layouts-fp32"], "undisturbed", "bandwidth"]


def test_an_error_that_nobody_foresaw_does_not_end_the_rest(tmp_path: Path) -> None:
    def act(name: str, program: Sequence[Any]) -> int:
        if name != "machine":
            raise RuntimeError("out of luck")
        return 0

    report, _ = run(tmp_path, act)
    assert [part.checks[0].detail for part in report.parts[1:]] == 3 * ["RuntimeError: out of luck"]


def test_layouts_after_one_that_fails_are_started_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def act(name: str, program: Sequence[Any]) -> int | None:
        if name == "layouts-fp32":
            asked.append(program[6])
            finish(program, until=4 if len(asked) == 1 else None)
            return None if len(asked) == 1 else 0
        return 0

    report, _ = run(tmp_path, act, parts="layouts")
    assert asked == ["0,1,2,3,4,5,6,7,8", "5,6,7,8"]
    (bad,) = [check for check in report.parts[1].checks if check.verdict == FAILED]
    assert bad.what == f"{layout_cases(4, 4)[4].name}, fp32"
    assert bad.detail == "timed out after 1 s; see layouts-fp32.log"


def test_ranks_that_fail_after_all_layouts_have_not_passed(tmp_path: Path) -> None:
    def act(name: str, program: Sequence[Any]) -> int | None:
        if name == "layouts-fp32":
            finish(program)
            return None
        return 0

    part = run(tmp_path, act, parts="layouts")[0].parts[1]
    (bad,) = [check for check in part.checks if check.verdict == FAILED]
    assert (bad.what, bad.detail) == ("ranks exit cleanly, fp32", "timed out after 1 s")


def test_a_page_that_is_cut_short_does_not_look_like_a_good_one(tmp_path: Path) -> None:
    pages: list[str] = []

    def act(name: str, program: Sequence[Any]) -> int:
        if name == "bandwidth":
            pages.append((tmp_path / "acceptance.md").read_text())
        return 0

    report, _ = run(tmp_path, act, parts="bandwidth")
    assert pages[0].startswith("# Cluster acceptance: unfinished, bandwidth still to come\n")
    assert report.verdict == "passed, without layouts, interruption"


@pytest.mark.parametrize(
    ("bus", "verdict", "told"),
    [(40.0, OK, "80 of 100 GB/s"), (0.6, WARNING, "1.2 of 100 GB/s")],
)
def test_nodes_that_do_not_use_their_fabric(tmp_path: Path, bus: float, verdict: str, told: str) -> None:
    figures = [FIGURES[0] | {"where": where, "bus": b} for where, b in ((BETWEEN_NODES, bus), ("within a node", 300.0))]

    def act(name: str, program: Sequence[Any]) -> int:
        (tmp_path / "bandwidth.json").write_text(json.dumps(BANDWIDTH | {"figures": figures}))
        return 0

    course = ClusterCheck(Pretended(tmp_path, 4, act), tmp_path, "cuda", 60.0, ["fp32"], None, 10, 1)  # type: ignore[arg-type]
    course.ranks, course.per_node, course.fabric = 4, 2, 100.0
    with patch.object(course, "machine", lambda part: None):
        (check,) = [c for c in course.run(["bandwidth"], "").parts[1].checks if c.what == "fabric between nodes"]
    assert (check.verdict, check.detail) == (verdict, f"{told} that a node's InfiniBand ports carry at best")
    assert BETWEEN_NODES == bandwidth.BETWEEN


def test_gpus_that_are_asked_for_and_not_found_fail(tmp_path: Path) -> None:
    launcher = Pretended(tmp_path, 1, lambda name, program: 0)
    course = ClusterCheck(launcher, tmp_path, "cuda", 60.0, ["fp32"], None, 10, 1)  # type: ignore[arg-type]
    report = course.run(["machine"], "command")
    assert report.failed
    assert course.device == "cuda", "what is asked for is not replaced in silence"
    assert "no GPU found" in report.about


def test_after_too_many_failures_the_rest_is_not_tried(tmp_path: Path) -> None:
    report, _ = run(tmp_path, all_fail, parts="layouts")
    verdicts = [check.verdict for check in report.parts[1].checks]
    assert verdicts == [*LAYOUT_STARTS * [FAILED], *(9 - LAYOUT_STARTS) * [SKIPPED], OK]


def test_only_the_parts_that_were_asked_for(tmp_path: Path) -> None:
    assert run(tmp_path, all_fail, parts="bandwidth")[1] == ["machine", "bandwidth"]


def test_nothing_goes_on_where_no_rank_starts(tmp_path: Path) -> None:
    report, started = run(tmp_path, lambda name, program: 1, ranks=0)
    assert started == ["machine"]
    assert [part.verdict for part in report.parts] == [FAILED, SKIPPED, SKIPPED, SKIPPED]


def test_one_rank_has_nobody_to_communicate_with(tmp_path: Path) -> None:
    report, started = run(tmp_path, all_fail, ranks=1)
    assert started == ["machine", "undisturbed"]
    assert [part.verdict for part in report.parts] == [OK, SKIPPED, FAILED, SKIPPED]


def test_the_cluster_in_a_line(tmp_path: Path) -> None:
    report, _ = run(tmp_path, all_fail, parts="bandwidth")
    assert report.about.startswith(f"4 ranks on 1 node: CPUs alone (gloo); torch {FACTS['torch']}; ")


@pytest.mark.parametrize(("apart", "verdict"), [(0.002, OK), (5.0, WARNING)])
def test_bandwidths_and_clocks(tmp_path: Path, apart: float, verdict: str) -> None:
    def act(name: str, program: Sequence[Any]) -> int:
        if name == "bandwidth":
            program[-1].write_text(json.dumps(BANDWIDTH | {"clocks_apart": apart}))
        return 0

    part = run(tmp_path, act, parts="bandwidth")[0].parts[1]
    assert part.verdict == verdict
    assert f"apart by {1000 * apart:.0f} ms" in part.checks[1].detail
    titles = [*part.tables]
    within = "Bus bandwidth (nccl-tests), GB/s, within a node, groups of 2 (send/receive: one way after the other)"
    assert titles[1] == within
    assert part.tables[titles[0]] == [
        ("", "1 MB", "4 MB"),
        ("all-reduce", "12.3", "12.3"),
        ("all-gather", "12.3", "12.3"),
    ]
