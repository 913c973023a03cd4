"""The command for one GPU, rehearsed on a CPU, and its arithmetic on a case that went wrong in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_case

TOLD: dict[str, Any] = {
    "case": "1B-s2048",
    "peak_flops": 1e15,
    "flops_per_token": 8e9,
    "tokens": 32_000,
    "goal": 0.5,
    "notes": ["no time for compiled"],
    "failure": "ended: out of time",
    "winners": {"best": "fast", "transformers": "theirs, compiled", "eager": "slow"},
    "trials": [
        {"whose": "ours", "name": "slow", "seconds": [0.64, 0.64, 1.0], "peak_bytes": 2**31, "error": None},
        {"whose": "ours", "name": "fast", "seconds": [0.5], "peak_bytes": 2**30, "error": None},
        {"whose": "ours", "name": "huge", "seconds": [], "peak_bytes": 0, "error": "OutOfMemoryError: tried"},
        {"whose": "transformers", "name": "theirs, compiled", "seconds": [0.6], "peak_bytes": 2**32, "error": None},
    ],
    "final": {"best": {"setting": "fast", "seconds": [0.4, 0.512, 0.6], "peak_bytes": 2**30}},
}


def test_figures_come_from_the_turns_or_else_from_the_trials() -> None:
    found = gpu.standings(TOLD)
    assert found["best"] | {"setting": "", "how": ""} == {
        "tokens/s": 62_500.0,
        "MFU": 0.5,
        "seconds": 0.512,
        "GiB": 1.0,
        "setting": "",
        "how": "",
    }
    assert [v["how"] for v in found.values()] == ["in turns", "alone", "alone"]
    assert found["eager"]["tokens/s"] == pytest.approx(50_000)
    assert gpu.verdict(TOLD, found) == [
        "MFU 50.0%, goal 50%: met",
        "1.17 times as fast as transformers, goal 1.2: not met",
    ]


def test_nothing_is_said_of_the_goal_where_transformers_was_not_measured_at_its_best() -> None:
    trials = [trial | {"name": trial["name"].replace("compiled", "eager")} for trial in TOLD["trials"]]
    eager = TOLD | {"trials": trials, "winners": {"best": "fast", "transformers": "theirs, eager"}}
    assert gpu.verdict(eager, gpu.standings(eager))[1].endswith("goal 1.2: open, as it was not measured compiled")


@pytest.mark.parametrize("name", ["124M-s1024", "1B-s2048"])
def test_transformers_gets_no_mask_from_the_compiler_and_so_its_flash_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def spy(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=spy))
    losses = [
        gpu_case.Theirs(4, compiled=compiled).make(gpu_case.REHEARSAL[name], torch.device("cpu"))()
        for compiled in (True, False)
    ]
    assert all(torch.isfinite(loss) for loss in losses)
    assert seen
    assert all(kwargs["attn_mask"] is None and kwargs["is_causal"] for kwargs in seen)


def test_what_failed_is_told() -> None:
    text = "\n".join(gpu.table(TOLD))
    assert "ended: out of time" in text
    assert "OutOfMemoryError: tried" in text
    assert "no time for compiled" in text


def here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A case in this process, which has imported everything."""
    assert command[:3] == [sys.executable, "-m", "benchmarks.gpu_case"]
    return subprocess.CompletedProcess(command, gpu_case.main(command[3:]))


def test_the_whole_command_runs_in_miniature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", here)
    argv = ["--rehearse", "--skip-tests", "--cases", "1B-s2048", "--output", str(tmp_path)]
    assert gpu.main(argv) == 0
    told = json.loads((tmp_path / "gpu.json").read_text())
    (case,) = told["cases"]
    assert "failure" not in case
    assert {"best", "transformers"} <= set(case["final"])
    assert all(trial["error"] is None for trial in case["trials"])
    assert "one step" in (tmp_path / "gpu_profiles.txt").read_text()
    assert "a rehearsal" in capsys.readouterr().out


def test_tests_that_take_too_long_end_with_all_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, told = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {told}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert gpu.test(1.0, True, tmp_path / "log.txt") == "ended after 1 s, before they were through: see log.txt"
    state = Path("/proc", told.read_text().strip(), "status")
    assert not state.exists() or "zombie" in state.read_text()


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_the_cases_are_those_that_are_measured() -> None:
    assert tuple(gpu_case.CASES) == tuple(gpu_case.REHEARSAL) == gpu.CASES
    assert all(case.samples % size == 0 for case in gpu_case.CASES.values() for size in case.micro_batches)


def test_a_later_flag_takes_the_place_of_an_earlier_one() -> None:
    setting = gpu_case.Ours(2, "--kernels torch").changed("--cuda-graph step").changed("--kernels auto attention=torch")
    assert setting.more == "--kernels auto attention=torch --cuda-graph step"
    config = setting.changed("--cuda-graph none").config(gpu_case.CASES["8B-shape-s8192"], torch.device("cpu"))
    assert (config.model.num_layers, config.compute.kernels) == (8, ("auto", "attention=torch"))


def test_a_setting_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(self: gpu_case.Ours, case: gpu_case.Case, device: torch.device) -> gpu_case.Step:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    name, out = "1B-s2048", tmp_path / "case.json"
    bench = gpu_case.Bench(name, gpu_case.REHEARSAL[name], torch.device("cpu"), 60.0, out)
    monkeypatch.setattr(gpu_case.Ours, "make", out_of_memory)
    assert bench.attempt(gpu_case.Ours(2)).median == float("inf")
    (trial,) = json.loads(out.read_text())["trials"]
    assert "out of memory" in trial["error"]
