"""The acceptance of a cluster: it accepts the library as it is, and rejects a faulty collective."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from tests.kit.pool import Pool
from tests.kit.users import NOBODY, needs_root
from tools.acceptance import main
from tools.cluster_check import checks
from tools.cluster_check.checks import layout_cases
from tools.cluster_check.report import FAILED, OK, CheckSection, ClusterReport
from tools.lib.verify_parallel import RankTrace

RANKS = 2
CASES = {case.name: case for case in layout_cases(RANKS, RANKS)}


@contextmanager
def spoiled(operation: str, factor: float) -> Iterator[None]:
    """Scale the output of one of the raw collectives on several ranks; of a send, its input."""
    original = getattr(comm, operation)

    def act(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor | Pending:
        if operation == "start_send":
            return original(x * factor, *rest, **named)
        out = original(x, *rest, **named)
        result = out.wait() if isinstance(out, Pending) else out
        (group,) = (argument for argument in rest if isinstance(argument, Group))
        if result.is_floating_point() and group.size > 1:
            result.mul_(factor)
        return Pending(result) if isinstance(out, Pending) else result

    with patch.object(comm, operation, act):
        yield


def traced(rank: int, ranks: int, folder: Path, names: list[str], dtype: str, operation: str, factor: float) -> None:
    with spoiled(operation, factor):
        checks.trace_layouts(folder, dtype, "cpu", [CASES[name] for name in names], rank, ranks)


def examined(
    pool: Pool, folder: Path, *names: str, dtype: str = "fp32", operation: str = "all_gather", factor: float = 1.0
) -> CheckSection:
    pool.run(RANKS, traced, folder, [*names], dtype, operation, factor)
    part = CheckSection("layouts")
    checks.check_layouts(part, folder, dtype, [CASES[name] for name in names], RANKS)
    return part


LONG = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("fp32", ["TP2 SP", "EP2 DP2"]),
        pytest.param("fp32", [*CASES][::2], marks=LONG),
        pytest.param("bf16", ["TP2 SP", "EP2 DP2"], marks=LONG),
    ],
)
def test_right_layouts_pass(pool: Pool, tmp_path: Path, dtype: str, names: list[str]) -> None:
    part = examined(pool, tmp_path, *names, dtype=dtype)
    assert part.verdict == OK
    assert [check.what for check in part.checks] == [
        f"devices compute the same, dense, {dtype}",
        f"devices compute the same, experts, {dtype}",
        f"{len(names)} layouts in {dtype}",
    ]
    (rows,) = part.tables.values()
    assert [row[0] for row in rows[1:]] == names


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("DP2", "start_all_reduce"),
        pytest.param("DP2, ZeRO-2", "start_all_gather", marks=LONG),
        pytest.param("TP2 SP", "start_reduce_scatter", marks=LONG),
        ("EP2 DP2", "start_all_to_all_rows"),
    ],
)
def test_a_wrong_collective_fails(pool: Pool, tmp_path: Path, name: str, operation: str) -> None:
    part = examined(pool, tmp_path, name, operation=operation, factor=1.001)
    assert part.verdict == FAILED
    assert ClusterReport("", "", [part]).failed
    assert {check.what for check in part.checks if check.verdict == FAILED} == {f"{name}, fp32"}


def test_a_device_that_computes_something_else_is_named(pool: Pool, tmp_path: Path) -> None:
    examined(pool, tmp_path, "DP2")
    path = tmp_path / "alone.dense.fp32.1.pt"
    alone = checks.load_trace(path)
    wrong = [replace(step, grad_norm=step.grad_norm * 1.001) for step in alone.steps]
    checks.save_atomic(path, checks.SingleRankTrace("n7", wrong))
    part = CheckSection("layouts")
    checks.check_layouts(part, tmp_path, "fp32", [CASES["DP2"]], RANKS)
    (bad,) = [check for check in part.checks if check.verdict == FAILED]
    assert bad.what == "devices compute the same, dense, fp32"
    assert bad.detail.startswith("rank 1 on n7 is off by 1.0e-03")


def test_a_device_that_computes_no_number_is_named(tmp_path: Path) -> None:
    for rank, norm in enumerate((1.0, 1.0, float("nan"))):
        steps = [RankTrace(6.0, norm, {}, {})]
        checks.save_atomic(tmp_path / f"alone.dense.fp32.{rank}.pt", checks.SingleRankTrace(f"n{rank}", steps))
    part = CheckSection("layouts")
    checks.check_devices(part, tmp_path, "dense", "fp32", 3)
    assert part.verdict == FAILED
    assert part.checks[0].detail.startswith("rank 2 on n2 is off by nan")


def accept(folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Status, data and page of the tool."""
    status = main(["--out", str(folder / "out"), "--device", "cpu", *flags])
    printed = json.loads((folder / "out" / "acceptance.json").read_text())
    return status, printed, (folder / "out" / "acceptance.md").read_text()


@pytest.mark.slow
def test_as_a_person_runs_it(tmp_path: Path) -> None:
    flags = ["--nproc", "2", "--parts", "layouts", "bandwidth", "--layouts", "2", "--formats", "fp32"]
    status, printed, page = accept(tmp_path, *flags)
    assert (status, printed["failed"]) == (0, False), page
    assert [(part["name"], part["verdict"]) for part in printed["parts"]] == [
        ("machine", "ok"),
        ("layouts", "ok"),
        ("bandwidth", "ok"),
    ]
    assert "| DP2, ZeRO-1 | ok |" in page
    assert "Bus bandwidth (nccl-tests), GB/s, all ranks, groups of 2 (send/receive" in page


def test_a_launcher_that_starts_nothing(tmp_path: Path) -> None:
    status, printed, page = accept(tmp_path, "--launch", f"{sys.executable} -c 'import\tsys;sys.exit(5)'")
    assert (status, printed["failed"]) == (1, True)
    assert page.startswith("# Cluster acceptance: FAILED\n")
    assert "exit status 5" in page


@pytest.mark.slow
def test_all_of_it_on_four_ranks(tmp_path: Path) -> None:
    status, printed, page = accept(tmp_path, "--nproc", "4")
    assert (status, printed["failed"]) == (0, False), page
    assert "losses as undisturbed: bitwise equal" in page


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--nproc 0", "E002 --nproc 0 must be above 0"),
        ("--steps 3", "E002 --steps 3 leaves no step"),
        ("--out .", "E002 --out . exists and is not empty"),
        ("--out /proc/here", "E002 --out /proc/here cannot be used: "),
    ],
)
def test_flags_that_cannot_work(capsys: pytest.CaptureFixture[str], flags: str, complaint: str) -> None:
    assert main(flags.split()) == 2
    assert complaint in capsys.readouterr().err


@needs_root
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also an empty one: its owner could replace what the ranks write."""
    (tmp_path / "out").mkdir()
    os.chown(tmp_path / "out", NOBODY, NOBODY)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "it belongs to " in capsys.readouterr().err
