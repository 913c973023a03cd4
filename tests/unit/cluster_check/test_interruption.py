from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.cluster_check.report import FAILED, OK, CheckSection
from tools.cluster_check.run import InterruptPlan, InterruptTest, LaunchResult

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


def test_every_seed_is_another_moment() -> None:
    assert len({InterruptPlan.draw(50, 4, seed) for seed in range(20)}) > 15


def loss(step: int) -> float:
    return 5.0 / step


def write(folder: Path, starts: Sequence[tuple[int, int]], change: Callable[[int], float] = loss) -> None:
    """What a run leaves that was started after the first step of each pair, and came to the second."""
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
    """A launcher under which the runs do what a test says; what it does not say is well."""

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
def test_what_goes_wrong_is_told(tmp_path: Path, fault: str) -> None:
    name, act, sentence = WRONG[fault]
    part, _ = tried(tmp_path, **{name: act(tmp_path)})
    (bad,) = [check for check in part.checks if check.verdict == FAILED]
    assert bad.detail.endswith(sentence) or sentence in bad.detail
