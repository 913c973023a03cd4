"""The parts of a cluster check: programs, layouts, a killed run, and the page on failures."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import bandwidth
from megatron.distributed.layout import Layout
from megatron.distributed.sharding import Box
from tests.kit.processes import wait_until_gone
from tools.cluster_check import checks
from tools.cluster_check import run as runner
from tools.cluster_check.checks import LAYOUT_FORMATS, batch_flags, layout_cases, trace_config
from tools.cluster_check.report import FAILED, OK, WARNING, CheckSection, ClusterReport
from tools.cluster_check.run import (
    BETWEEN_NODES,
    LAYOUT_STARTS,
    ClusterCheck,
    InterruptPlan,
    InterruptTest,
    LaunchResult,
    RankLauncher,
    killed_run_layout,
    resumed_run_layout,
)
from tools.lib.verify_parallel import RankTrace, TracedPiece

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
        ranks: that report themselves.
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


def test_a_failed_check_does_not_end_the_others(tmp_path: Path) -> None:
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


def test_an_error_that_no_one_foresaw_does_not_end_the_rest(tmp_path: Path) -> None:
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
    assert asked == ["0,1,2,3,4,5,6,7,8,9,10", "5,6,7,8,9,10"]
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
    ("bus", "verdict", "reported"),
    [(40.0, OK, "80 of 100 GB/s"), (0.6, WARNING, "1.2 of 100 GB/s")],
)
def test_nodes_that_do_not_use_their_fabric(tmp_path: Path, bus: float, verdict: str, reported: str) -> None:
    figures = [FIGURES[0] | {"where": where, "bus": b} for where, b in ((BETWEEN_NODES, bus), ("within a node", 300.0))]

    def act(name: str, program: Sequence[Any]) -> int:
        (tmp_path / "bandwidth.json").write_text(json.dumps(BANDWIDTH | {"figures": figures}))
        return 0

    course = ClusterCheck(Pretended(tmp_path, 4, act), tmp_path, "cuda", 60.0, ["fp32"], None, 10, 1)  # type: ignore[arg-type]
    course.ranks, course.per_node, course.fabric = 4, 2, 100.0
    with patch.object(course, "machine", lambda part: None):
        (check,) = [c for c in course.run(["bandwidth"], "").parts[1].checks if c.what == "fabric between nodes"]
    assert (check.verdict, check.detail) == (verdict, f"{reported} that a node's InfiniBand ports carry at best")
    assert BETWEEN_NODES == bandwidth.BETWEEN


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


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_program_gets_its_arguments_and_finds_the_library(tmp_path: Path) -> None:
    echo = "import os, sys, megatron.config.launch\nprint(sys.argv[1:], os.environ['MASTER_PORT'])\nsys.exit(3)\n"
    starts = RankLauncher([sys.executable, "-B", "-W", "ignore::{port}"], tmp_path)
    outcomes = [starts.run("echo", [program(tmp_path / "echo.py", echo), "a b", tmp_path], 60) for _ in range(2)]
    logs = [outcome.log.read_text() for outcome in outcomes]
    assert [outcome.status for outcome in outcomes] == [3, 3]
    assert outcomes[0].ended == "exit status 3"
    assert [outcome.log.name for outcome in outcomes] == ["01-echo.log", "02-echo.log"]
    assert f"['a b', '{tmp_path}'] " in logs[0]
    ports = [log.split()[-1] for log in logs]
    assert ports[0] != ports[1]
    assert f"ignore::{ports[0]}" in logs[0].splitlines()[0]


def test_a_hanging_check_is_killed_with_its_children(tmp_path: Path) -> None:
    hang = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with patch.object(runner, "GRACE_SECONDS", 0.2):
        outcome = RankLauncher([sys.executable], tmp_path).run("hang", [program(tmp_path / "hang.py", hang)], 3)
    assert outcome.status is None
    assert outcome.ended.startswith("timed out after ")
    wait_until_gone(map(int, outcome.log.read_text().splitlines()[-1].split()))


def test_a_launcher_that_is_asked_to_end_may_end_its_ranks(tmp_path: Path) -> None:
    polite = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('goodbye'), sys.exit(0)))\n"
        "print('here', flush=True)\ntime.sleep(600)\n"
    )
    outcome = RankLauncher([sys.executable], tmp_path).run("polite", [program(tmp_path / "polite.py", polite)], 3)
    assert outcome.status is None
    assert outcome.log.read_text().endswith("here\ngoodbye\n")


def test_the_tail_is_the_output_of_ranks(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    agent = "W1122 12:06:08.012 3133 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 1 SIGTERM"
    log.write_text("\n".join([*(f"line {i}" for i in range(100)), "error on rank 1: out of luck", agent, "Root Cause"]))
    tail = LaunchResult(1, 0.0, log).tail().splitlines()
    assert tail[-1] == "error on rank 1: out of luck"
    assert len(tail) == runner.TAIL_LINES


STEPS, KILLED = 10, 5


def test_a_resumed_run_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    runs, part = Runs(tmp_path), CheckSection("interruption")
    runs.acts["killed"] = lambda: write(tmp_path / "killed", [(0, 6)]) or 1
    runs.acts["resumed"] = lambda: write(tmp_path / "killed", [(0, 6), (2, STEPS)]) or 0
    trial = InterruptTest(runs, tmp_path, "cpu", 4, InterruptPlan(STEPS, 2, 7, 1, 3), 60.0)  # type: ignore[arg-type]
    trial.undisturbed(part)
    trial.interrupted(part)
    (bad,) = [check for check in part.checks if check.verdict == FAILED]
    assert bad.detail == "it continued after step 2 of 6"


@given(steps=st.integers(6, 500), ranks=st.integers(1, 64), seed=st.integers(0, 10**10))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_a_rank_dies_after_one_save_and_before_another(steps: int, ranks: int, seed: int) -> None:
    plan = InterruptPlan.draw(steps, ranks, seed)
    assert plan.every < plan.killed <= steps - plan.every
    assert 0 <= plan.rank < ranks
    assert plan == InterruptPlan.draw(steps, ranks, seed)


def loss(step: int) -> float:
    return 5.0 / step


def write(folder: Path, starts: Sequence[tuple[int, int]], change: Callable[[int], float] = loss) -> None:
    """Write the log of a run whose starts begin after the first step of each pair, and come to the second."""
    lines: list[dict[str, Any]] = []
    for begun, last in starts:
        lines.append({"event": "start", "iteration": begun, "consumed-tokens": 64 * begun})
        counted = (
            {"iteration": i, "consumed-tokens": 64 * i, "consumed-samples": i} for i in range(begun + 1, last + 1)
        )
        rest = {"batch-size": 1, "learning-rate": 0.1, "skipped-iterations": []}
        lines += [line | rest | {"lm loss": change(line["iteration"])} for line in counted]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Runs:
    """A launcher under which the runs do what a test asks; otherwise they succeed."""

    def __init__(self, folder: Path, **acts: Callable[[], int | None]) -> None:
        self.folder, self.programs = folder, dict[str, list[str]]()
        self.acts: dict[str, Callable[[], int | None]] = {
            "undisturbed": lambda: write(folder / "undisturbed", [(0, STEPS)]) or 0,
            "killed": lambda: write(folder / "killed", [(0, KILLED - 1)]) or 1,
            "resumed": lambda: write(folder / "killed", [(0, KILLED - 1), (4, STEPS)]) or 0,
            "elsewhere": lambda: write(folder / "elsewhere", [(8, STEPS)], lambda i: loss(i) * (1 + 1e-7)) or 0,
        } | acts

    def run(self, name: str, program: Sequence[Any], seconds: float) -> LaunchResult:
        self.programs[name] = [*map(str, program)]
        log = self.folder / f"{name}.log"
        log.write_text(f"what {name} wrote")
        return LaunchResult(self.acts[name](), 2.0, log)


def tried(folder: Path, **acts: Callable[[], int | None]) -> tuple[CheckSection, Runs]:
    runs, part = Runs(folder, **acts), CheckSection("interruption")
    trial = InterruptTest(runs, folder, "cpu", 4, InterruptPlan(STEPS, 2, KILLED, 1, 3), 60.0)  # type: ignore[arg-type]
    if trial.undisturbed(part):
        trial.interrupted(part)
        trial.elsewhere(part)
    return part, runs


def test_all_well(tmp_path: Path) -> None:
    part, runs = tried(tmp_path)
    assert part.verdict == OK
    assert [check.detail for check in part.checks if "losses" in check.what] == [
        "bitwise equal",
        "steps 9 to 10 differ by 1.0e-07 at most (allowed: 1e-05)",
    ]
    assert runs.programs["killed"][:6] == ["tools/acceptance.py", "rank", "train", "1", "5", "3"]
    assert runs.programs["killed"][6:] == runs.programs["resumed"][1:]
    assert "--async-save" in runs.programs["undisturbed"]
    assert runs.programs["elsewhere"][-4:] == ["--load", f"{tmp_path}/undisturbed/checkpoints", "--ckpt-step", "8"]


WRONG: dict[str, tuple[str, Callable[[Path], Callable[[], int | None]], str]] = {
    "fails": ("undisturbed", lambda folder: lambda: 1, "exit status 1 after 2 s"),
    "hangs": ("undisturbed", lambda folder: lambda: None, "timed out after 2 s after 2 s"),
    "not killed": (
        "killed",
        lambda folder: lambda: write(folder / "killed", [(0, STEPS)]) or 0,
        "exit status 0, with step 10 as the last in the log",
    ),
    "hangs when killed": (
        "killed",
        lambda folder: lambda: write(folder / "killed", [(0, 4)]),
        "timed out after 2 s, with step 4 as the last in the log",
    ),
    "does not resume": ("resumed", lambda folder: lambda: 1, "exit status 1 after 2 s"),
    "begins anew": (
        "resumed",
        lambda folder: lambda: write(folder / "killed", [(0, 4), (0, STEPS)]) or 0,
        "it continued after step 0 of 4",
    ),
    "dies too early": (
        "killed",
        lambda folder: lambda: write(folder / "killed", [(0, 2)]) or 1,
        "exit status 1, with step 2 as the last in the log",
    ),
    "off by a bit": (
        "resumed",
        lambda folder: (
            lambda: write(folder / "killed", [(0, 4), (4, STEPS)], lambda i: loss(i) * (1 + 1e-15 * (i > 7))) or 0
        ),
        "(they must be bitwise equal)",
    ),
    "loses a step": (
        "resumed",
        lambda folder: lambda: write(folder / "killed", [(0, 3), (4, STEPS)]) or 0,
        "no loss was recorded for step 4",
    ),
    "not a number": (
        "resumed",
        lambda folder: lambda: write(folder / "killed", [(0, 4), (4, STEPS)], lambda i: float("nan")) or 0,
        "differ by nan at most",
    ),
    "another model": (
        "elsewhere",
        lambda folder: lambda: write(folder / "elsewhere", [(8, STEPS)], lambda i: 1.0) or 0,
        "(allowed: 1e-05)",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_faults_are_reported(tmp_path: Path, fault: str) -> None:
    name, act, sentence = WRONG[fault]
    part, _ = tried(tmp_path, **{name: act(tmp_path)})
    (bad,) = [check for check in part.checks if check.verdict == FAILED]
    assert bad.detail.endswith(sentence) or sentence in bad.detail


CLUSTERS = [(2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (5, 1), (6, 3), (8, 4), (12, 4), (16, 8), (24, 8)]
"""Ranks, and ranks of a node."""


@pytest.mark.parametrize(("ranks", "per_node"), CLUSTERS)
def test_all_layouts_fit_the_ranks_and_their_names(ranks: int, per_node: int) -> None:
    for case in layout_cases(ranks, per_node):
        config = trace_config(f"{batch_flags(ranks)} {case.flags}", case.experts, "bf16", "cpu", 0, ranks)
        named = {axis.lower(): int(size) for axis, size in re.findall(r"\b(TP|PP|DP|CP)(\d+)", case.name)}
        sizes = Layout.from_config(config.parallel, ranks).sizes
        assert {axis: size for axis, size in sizes.items() if axis in ("tp", "pp", "dp", "cp") and size > 1} == named
        assert prod(named.values()) == ranks
        assert config.parallel.sequence_parallel == (" SP" in case.name)
        assert config.parallel.zero_stage == int(*re.findall(r"ZeRO-(\d)", case.name) or "0")
        assert (config.parallel.expert_model_parallel_size, bool(config.model.num_experts)) == (
            (2, True) if case.name.startswith("EP2") else (1, False)
        )


@pytest.mark.parametrize(("ranks", "per_node"), CLUSTERS)
def test_no_tensor_parallel_group_leaves_its_node(ranks: int, per_node: int) -> None:
    for case in layout_cases(ranks, per_node):
        tp = int(*re.findall(r"TP(\d+)", case.name) or "1")
        assert per_node % tp == 0 or (tp == 2 and "PP2" in case.name) or case.experts


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", LAYOUT_FORMATS)
def test_the_run_that_is_killed_and_its_other_layout_fit_any_ranks(ranks: int, dtype: str) -> None:
    for flags in (killed_run_layout(ranks), resumed_run_layout(ranks)):
        trace_config(f"{batch_flags(ranks)} {flags}", False, dtype, "cpu", 0, ranks)


class Exploit:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_a_planted_trace_runs_nothing(tmp_path: Path) -> None:
    for name in ("alone.dense.fp32.0.pt", "alone.dense.fp32.1.pt"):
        torch.save(Exploit(f"touch {tmp_path}/done"), tmp_path / name)
    with pytest.raises(pickle.UnpicklingError):
        checks.check_devices(CheckSection("layouts"), tmp_path, "dense", "fp32", 2)
    assert not (tmp_path / "done").exists()


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    piece = TracedPiece((2, 3), (6,), Box((0,), (6,)), "d", torch.arange(6.0))
    trace = checks.SingleRankTrace("n1", [RankTrace(1.5, 2.5, {"w": [piece]}, {"w": [replace(piece, values=None)]})])
    checks.save_atomic(tmp_path / "a.pt", trace)
    read = checks.load_trace(tmp_path / "a.pt")
    assert (read.host, read.steps[0].loss, read.steps[0].grad_norm) == ("n1", 1.5, 2.5)
    (found,) = read.steps[0].grads["w"]
    assert torch.equal(found.values, piece.values)
    assert replace(found, values=None) == replace(piece, values=None) == read.steps[0].weights["w"][0]


def test_a_report_holds_no_credentials(tmp_path: Path) -> None:
    part = CheckSection("machine", log="pulling docker://me:LEAK@host/image")
    part.add("container", False, "403 for https://me:LEAK@host")
    part.add("names", False, 'open "https://x?token=LEAK", password="LEAKs": \x1b[2J refused')
    ClusterReport("about", "tools/acceptance.py --launch 'srun --container-image=docker://me:LEAK@host'", [part]).write(
        tmp_path
    )
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert len(texts) == 2
    assert all("***@host" in text and "LEAK" not in text for text in texts)
    json.loads((tmp_path / "acceptance.json").read_text())
    assert "\x1b" not in "".join(texts)
