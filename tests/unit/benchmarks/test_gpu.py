"""The command for one GPU, rehearsed on a CPU, and its arithmetic on a case that went wrong in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_case, gpu_contestants
from tests.processes import wait_until_gone

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
        gpu_contestants.Theirs(4, compiled=compiled).make(gpu_contestants.REHEARSAL[name], torch.device("cpu"))()
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
    printed = json.loads((tmp_path / "gpu.json").read_text())
    (case,) = printed["cases"]
    assert "failure" not in case
    assert {"best", "transformers"} <= set(case["final"])
    assert all(trial["error"] is None for trial in case["trials"])
    assert "one step" in (tmp_path / "gpu_profile_1B-s2048.txt").read_text()
    assert "a rehearsal" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "left"), [(0, '{"case": "1B-s2048", "tri'), (-9, ""), (0, None), (-9, "{}")])
def test_a_case_that_left_half_a_file_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int, left: str | None
) -> None:
    def ended(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if left is not None:
            Path(command[command.index("--out") + 1]).write_text(left)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", ended)
    readable = left in (None, "{}")
    found = gpu.measure("1B-s2048", 1.0, True)
    assert ("cannot be read" in found.get("failure", "")) is not readable
    assert found.get("failure", "0").startswith(str(status))
    argv = ["--rehearse", "--skip-tests", "--cases", "1B-s2048", "8B-shape-s8192", "--output", str(tmp_path)]
    assert gpu.main(argv) == 0
    printed = json.loads((tmp_path / "gpu.json").read_text())
    assert len(printed["cases"]) == 2


def test_tests_that_take_too_long_end_with_all_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, printed = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho test_a PASSED\necho test_b FAILED\nsleep 60 &\necho $! > {printed}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(gpu, "TESTS", {gpu.ALONE: []})
    told_of = gpu.test(1.0, True, tmp_path / "log.txt")
    assert told_of == "of time: ended after 1 s, by then 1 passed, 1 failed: see log.txt"
    wait_until_gone([int(printed.read_text())])


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_the_cases_are_those_that_are_measured() -> None:
    assert tuple(gpu_contestants.CASES) == tuple(gpu_contestants.REHEARSAL) == gpu.CASES
    assert all(len(case.micro_batches) == 2 for case in gpu_contestants.CASES.values())
    assert all(case.samples % size == 0 for case in gpu_contestants.CASES.values() for size in case.micro_batches)


def test_a_later_flag_takes_the_place_of_an_earlier_one() -> None:
    setting = (
        gpu_contestants.Ours(2, "--kernels torch")
        .changed("--cuda-graph step")
        .changed("--kernels auto attention=torch")
    )
    assert setting.more == "--kernels auto attention=torch --cuda-graph step"
    config = setting.changed("--cuda-graph none").config(gpu_contestants.CASES["8B-shape-s8192"], torch.device("cpu"))
    assert (config.model.num_layers, config.compute.kernels) == (8, ("auto", "attention=torch"))


def test_a_setting_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(
        self: gpu_contestants.Ours, case: gpu_contestants.Case, device: torch.device
    ) -> gpu_contestants.Step:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    name, out = "1B-s2048", tmp_path / "case.json"
    bench = gpu_case.Bench(name, gpu_contestants.REHEARSAL[name], torch.device("cpu"), 60.0, out)
    monkeypatch.setattr(gpu_contestants.Ours, "make", out_of_memory)
    assert bench.attempt(gpu_contestants.Ours(2)).median == float("inf")
    (trial,) = json.loads(out.read_text())["trials"]
    assert "out of memory" in trial["error"]


class Clock:
    """A device on which every setting takes the time that it is told to; the clock moves with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, build: float, theirs: float | None = None) -> None:
        self.now, self.built = 0.0, list[str]()
        self.build = {gpu_contestants.Ours: build, gpu_contestants.Theirs: theirs or build}
        for kind in (gpu_contestants.Ours, gpu_contestants.Theirs):
            monkeypatch.setattr(kind, "make", lambda setting, *_: self._make(setting))
        monkeypatch.setattr(
            gpu_case, "time", SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        )
        monkeypatch.setattr(gpu_case, "profile", lambda bench, step: "")

    def _make(self, setting: Any) -> Any:
        self.built.append(setting.name)
        self.now += self.build[type(setting)]
        pace = 0.2 if "auto" in setting.name else 0.3

        def step() -> torch.Tensor:
            self.now += pace
            return torch.zeros(())

        return step


def bench_of(out: Path, seconds: float) -> gpu_case.Bench:
    return gpu_case.Bench("1B-s2048", gpu_contestants.REHEARSAL["1B-s2048"], torch.device("cpu"), seconds, out)


@pytest.mark.parametrize(("seconds", "turns"), [(1000.0, True), (45.0, True), (30.0, False)])
def test_what_a_verdict_needs_comes_first_and_the_turns_get_their_time(
    seconds: float, turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, out = Clock(monkeypatch, build=8.0), tmp_path / "case.json"
    gpu_case.run(bench_of(out, seconds))
    printed = json.loads(out.read_text())
    assert [(t["whose"], t["name"].split()[-1]) for t in printed["trials"]][:3] == [
        ("ours", "torch"),
        ("transformers", "eager"),
        ("ours", "auto"),
    ]
    assert set(printed["winners"]) == {"best", "transformers", "eager"}
    assert ("final" in printed) == turns
    assert clock.now < seconds + 12.0, "one trial beyond the time, at most"
    assert len(clock.built) == len(set(clock.built)), "what still stands is not built again"
    assert any("no time" in note for note in printed["notes"]) == (seconds < 1000)


def test_no_size_is_tried_for_us_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, build=2.0, theirs=20.0)
    bench = bench_of(tmp_path / "case.json", 55.0)
    gpu_case.run(bench)
    assert {setting.micro_batch for setting in bench.results} == {2}
    assert "as transformers was not tried with such micro-batches" in str(bench.report["notes"])


@pytest.mark.parametrize("seconds", [55.0, 500.0])
def test_on_a_gpu_transformers_is_compiled_before_anything_is_refined(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of trials where compiling takes long, with CUDA's functions replaced."""
    clock, out = Clock(monkeypatch, build=8.0), tmp_path / "case.json"
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    bench = bench_of(out, seconds)
    bench.device = torch.device("cuda", 0)
    gpu_case.run(bench)
    printed = json.loads(out.read_text())
    names = [trial["name"] for trial in printed["trials"]]
    assert names[:4] == [
        "micro-batch 2 --kernels torch",
        "micro-batch 2, bf16 weights, eager",
        "micro-batch 2 --kernels auto",
        "micro-batch 2, bf16 weights, compiled",
    ]
    assert ("micro-batch 4, bf16 weights, compiled" in names) is (seconds > 100)
    assert any("--cuda-graph step" in name for name in names) is (seconds > 100)
    assert set(printed["final"]) == {"best", "transformers", "eager"}
    assert gpu.verdict(printed | {"goal": 0.5}, gpu.standings(printed))[-1].endswith("goal 1.2: met")
    assert clock.now < seconds


def test_what_runs_out_of_memory_beside_others_is_tried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, build=1.0)
    bench, made = bench_of(tmp_path / "case.json", 100.0), gpu_contestants.Ours.make
    bench.challenge("best", gpu_contestants.Ours(2))

    def make(setting: gpu_contestants.Ours, *rest: Any) -> gpu_contestants.Step:
        if bench.steps:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(setting, *rest)

    monkeypatch.setattr(gpu_contestants.Ours, "make", make)
    assert bench.attempt(gpu_contestants.Ours(4)).error is None


def test_what_does_not_fit_together_takes_turns_without_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, build=1.0)
    bench = bench_of(tmp_path / "case.json", 100.0)
    for name, setting in {"best": gpu_contestants.Ours(2, "--kernels auto"), "eager": gpu_contestants.Ours(2)}.items():
        bench.challenge(name, setting)
        bench.results[setting].peak_bytes = 60
    bench.room = 100.0
    gpu_case.leave_out(bench)
    assert list(bench.winners) == ["best"]
    assert "not all fit" in str(bench.report["notes"])


def test_a_later_run_keeps_what_it_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "measure", lambda case, seconds, rehearse: TOLD | {"case": case})
    monkeypatch.setattr(gpu, "test", lambda seconds, rehearse, log: f"all passed within {seconds:.0f} s")
    for argv in (["--cases", "1B-s4096"], ["--skip-tests", "--cases", "124M-s1024"]):
        assert gpu.main(["--rehearse", "--output", str(tmp_path), *argv]) == 0
    printed = json.loads((tmp_path / "gpu.json").read_text())
    assert [case["case"] for case in printed["cases"]] == ["124M-s1024", "1B-s4096"]
    assert printed["tests"] == "all passed within 120 s"
    monkeypatch.setattr(gpu, "machine", lambda: {"device": "another"})
    assert gpu.main(["--rehearse", "--output", str(tmp_path), "--skip-tests", "--cases", "1B-s2048"]) == 0
    printed = json.loads((tmp_path / "gpu.json").read_text())
    assert ([case["case"] for case in printed["cases"]], printed["tests"]) == (["1B-s2048"], "left out")
    assert "are replaced" in capsys.readouterr().out


def test_rather_fewer_cases_than_none_with_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], list[float]()

    def measure(case: str, seconds: float, rehearse: bool) -> gpu.Values:
        given.append(seconds)
        now[0] += seconds
        return TOLD | {"case": case}

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "machine", lambda: {"device": "some"})
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert gpu.main(["--minutes", "5", "--skip-tests", "--output", str(tmp_path)]) == 0
    assert len(given) == 3
    assert all(85 < seconds < 100 for seconds in given)
