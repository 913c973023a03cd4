"""Benchmarks in miniature: of one GPU rehearsed on a CPU, of pipelines and schedules."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import gpu, gpu_case, gpu_contestants, pipeline, schedules
from megatron.distributed import comm
from tests.kit.processes import wait_until_gone

RESULTS: dict[str, Any] = {
    "case": "1B-s2048",
    "peak_flops": 1e15,
    "flops_per_token": 8e9,
    "flops_per_token_causal": 6e9,
    "tokens": 32_000,
    "goal": 0.5,
    "notes": ["no time for compiled"],
    "failure": "out of time",
    "fastest": {"best": "fast", "transformers": "theirs, compiled", "eager": "slow"},
    "trials": [
        {"implementation": "ours", "name": "slow", "seconds": [0.64, 0.64, 1.0], "peak_bytes": 2**31, "error": None},
        {"implementation": "ours", "name": "fast", "seconds": [0.5], "peak_bytes": 2**30, "error": None},
        {"implementation": "ours", "name": "huge", "seconds": [], "peak_bytes": 0, "error": "OutOfMemoryError: tried"},
        {
            "implementation": "transformers",
            "name": "theirs, compiled",
            "seconds": [0.6],
            "peak_bytes": 2**32,
            "error": None,
        },
    ],
    "final": {"best": {"setting": "fast", "seconds": [0.4, 0.512, 0.6], "peak_bytes": 2**30}},
}


def test_figures_come_from_the_rounds_or_else_from_the_trials() -> None:
    found = gpu.standings(RESULTS)
    assert found["best"] | {"setting": "", "how": ""} == {
        "tokens/s": 62_500.0,
        "MFU": 0.5,
        "causal": 0.375,
        "seconds": 0.512,
        "GiB": 1.0,
        "setting": "",
        "how": "",
    }
    assert [v["how"] for v in found.values()] == ["alternating", "alone", "alone"]
    assert found["eager"]["tokens/s"] == pytest.approx(50_000)
    assert gpu.verdict(RESULTS, found) == [
        "MFU 50.0%, goal 50%: met",
        "1.17 times as fast as transformers, goal 1.2: not met",
    ]


@pytest.mark.slow
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


def here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A case in this process, which has imported everything."""
    assert command[:3] == [sys.executable, "-m", "benchmarks.gpu_case"]
    return subprocess.CompletedProcess(command, gpu_case.main(command[3:]))


@pytest.mark.slow
def test_the_whole_command_runs_in_miniature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", here)
    argv = ["--rehearse", "--cases", "1B-s2048", "--output", str(tmp_path)]
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
    argv = ["--rehearse", "--cases", "1B-s2048", "8B-shape-s8192", "--output", str(tmp_path)]
    assert gpu.main(argv) == 0
    printed = json.loads((tmp_path / "gpu.json").read_text())
    assert len(printed["cases"]) == 2


def test_tests_that_take_too_long_end_with_all_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, printed = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho test_a PASSED\necho test_b FAILED\nsleep 60 &\necho $! > {printed}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    summary = gpu.test(1.0, True, tmp_path / "log.txt")
    assert summary == "stopped after 1 s: see log.txt"
    wait_until_gone([int(printed.read_text())])


def test_a_gpu_is_needed_without_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_a_setting_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(
        self: gpu_contestants.Ours, case: gpu_contestants.Case, device: torch.device
    ) -> gpu_contestants.Step:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    name, out = "1B-s2048", tmp_path / "case.json"
    bench = gpu_case.Bench(name, gpu_contestants.REHEARSAL[name], torch.device("cpu"), 60.0, out)
    monkeypatch.setattr(gpu_contestants.Ours, "make", out_of_memory)
    assert bench.measure(gpu_contestants.Ours(2)).median == float("inf")
    (trial,) = json.loads(out.read_text())["trials"]
    assert "out of memory" in trial["error"]


class Clock:
    """A device on which settings take given times, and the clock that measures them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, build: float, theirs: float | None = None) -> None:
        self.now, self.built = 0.0, list[str]()
        self.build = {gpu_contestants.Ours: build, gpu_contestants.Theirs: theirs or build}
        for kind in (gpu_contestants.Ours, gpu_contestants.Theirs):
            monkeypatch.setattr(kind, "make", lambda setting, *_: self._make(setting))
        monkeypatch.setattr(
            gpu_case, "time", SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        )
        monkeypatch.setattr(gpu_case, "gc", SimpleNamespace(collect=lambda: None))  # there is no memory to free
        monkeypatch.setattr(gpu_case, "profile", lambda bench, step: "")

    def _make(self, setting: Any) -> Any:
        self.built.append(setting.name)
        self.now += self.build[type(setting)]
        pace = 0.2 if "auto" in setting.name else 0.29 if "compiled" in setting.name else 0.3

        def step() -> torch.Tensor:
            self.now += pace
            return torch.zeros(())

        return step


def bench_of(out: Path, seconds: float) -> gpu_case.Bench:
    return gpu_case.Bench("1B-s2048", gpu_contestants.REHEARSAL["1B-s2048"], torch.device("cpu"), seconds, out)


@pytest.mark.parametrize("seconds", [20.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_trials_for_the_verdict_run_first(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(monkeypatch, build=4.0), tmp_path / "case.json"
    gpu_case.run(bench_of(out, seconds))
    printed = json.loads(out.read_text())
    assert [(t["implementation"], t["name"].split()[3]) for t in printed["trials"]][:3] == [
        ("ours", "torch"),
        ("transformers", "weights,"),
        ("ours", "auto"),
    ]
    alike = {"transformers, fp32 weights"} if seconds > 100 else set[str]()
    assert set(printed["fastest"]) == {"best", "transformers", "eager"} | alike
    assert set(printed["final"]) == set(printed["fastest"])
    assert clock.now < seconds + gpu.GRACE
    assert len(clock.built) == len(set(clock.built)), "no step is built twice"
    assert any("no time" in note for note in printed["notes"]) == (seconds < 100)


@pytest.mark.parametrize("seconds", [55.0, pytest.param(500.0, marks=pytest.mark.slow)])
def test_on_a_gpu_transformers_is_compiled_and_the_chunk_size_comes_next(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of trials where compiling takes long, with CUDA's functions replaced."""
    clock, out = Clock(monkeypatch, build=5.0), tmp_path / "case.json"
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    bench = bench_of(out, seconds)
    bench.cuda = True
    gpu_case.run(bench)
    printed = json.loads(out.read_text())
    names = [trial["name"] for trial in printed["trials"]]
    assert names[:5] == [
        "micro-batch 2 --kernels torch --cuda-graph none",
        "micro-batch 2, bf16 weights, eager",
        "micro-batch 2 --kernels auto",
        "micro-batch 2, bf16 weights, compiled",
        "micro-batch 2 --kernels auto --cross-entropy-chunk-size 64",
    ]
    assert ("micro-batch 4, bf16 weights, compiled" in names) is (seconds > 100)
    assert any("--cuda-graph step" in name for name in names) is (seconds > 100)
    alike = {"transformers, fp32 weights"} if seconds > 100 else set[str]()
    assert set(printed["final"]) == {"best", "transformers", "eager"} | alike
    beside = gpu.verdict(printed | {"goal": 0.5}, gpu.standings(printed))
    assert beside[0].endswith("goal 1.2: met")
    assert any("with fp32 weights" in line for line in beside) is bool(alike)
    assert clock.now < seconds


@pytest.mark.parametrize(("seconds", "profiled"), [(200.0, ["best"]), (30.0, [])])
def test_the_best_is_profiled_alone_if_memory_has_room_for_one(
    seconds: float, profiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, build=8.0)
    out = tmp_path / "case.json"
    bench = bench_of(out, seconds)
    bench.memory = -1
    gpu_case.run(bench)
    printed = json.loads(out.read_text())
    assert "final" not in printed
    assert any("best was measured alone" in note for note in printed["notes"])
    assert [*printed.get("profiles", {})] == profiled


def test_settings_that_run_out_of_memory_are_retried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, build=1.0)
    bench, made = bench_of(tmp_path / "case.json", 100.0), gpu_contestants.Ours.make
    bench.challenge("best", gpu_contestants.Ours(2))

    def make(setting: gpu_contestants.Ours, *rest: Any) -> gpu_contestants.Step:
        if bench.steps:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(setting, *rest)

    monkeypatch.setattr(gpu_contestants.Ours, "make", make)
    assert bench.measure(gpu_contestants.Ours(4)).error is None


def test_a_later_run_keeps_results_it_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "measure", lambda case, seconds, rehearse: RESULTS | {"case": case})
    monkeypatch.setattr(gpu, "test", lambda seconds, rehearse, log: f"all passed within {seconds:.0f} s")
    for argv in (["--cases", "1B-s4096"], ["--tests"], ["--cases", "124M-s1024"]):
        assert gpu.main(["--rehearse", "--output", str(tmp_path), *argv]) == 0
    printed = json.loads((tmp_path / "gpu.json").read_text())
    assert [case["case"] for case in printed["cases"]] == ["124M-s1024", "1B-s4096"]
    assert printed["tests"] == "all passed within 520 s"
    monkeypatch.setattr(gpu, "machine", lambda: {"device": "another"})
    assert gpu.main(["--rehearse", "--output", str(tmp_path), "--cases", "1B-s2048"]) == 0
    printed = json.loads((tmp_path / "gpu.json").read_text())
    assert ([case["case"] for case in printed["cases"]], printed["tests"]) == (["1B-s2048"], "not run")
    assert "replaced" in capsys.readouterr().out


def test_rather_fewer_cases_than_none_with_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], list[float]()

    def measure(case: str, seconds: float, rehearse: bool) -> gpu.Values:
        given.append(seconds)
        now[0] += seconds
        return RESULTS | {"case": case}

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "machine", lambda: {"device": "some"})
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert gpu.main(["--minutes", "5", "--output", str(tmp_path)]) == 0
    assert len(given) == 3
    assert all(80 < seconds < 100 for seconds in given)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])  # those that hand nothing over on a rank
def test_both_compute_the_same(name: str) -> None:
    case = pipeline.Case.of(name, 3)
    with patch.multiple(comm, start_send=pipeline.nothing_moves, start_receive=pipeline.nothing_moves):
        case.plain()()
        plain, case.weight.grad = case.weight.grad, None
        case.pipeline()()
    assert plain is not None
    assert torch.equal(case.weight.grad, plain)


def test_the_cost_of_an_action() -> None:
    row = {"actions": 10, "computing": 4, "micros": {"runtime": [300.0, 500.0, 400.0], "plain": [100.0, 200.0, 200.0]}}
    assert pipeline.price(row) == [20.0, 30.0, 20.0]
    result = {"schedules": {"zb-h1": row}, "rounds": 3, "microbatches": 8, "load": 0.5}
    machine = {"processor": "a processor", "python": "3", "torch": "2"}
    page = pipeline.page(result | machine)
    assert "| zb-h1 | 10 | 4 | 20.0 | 20.0 | 30.0 | 2.5 |" in page
    assert "all below 50 us" in page
    row["micros"]["runtime"] = [1000.0] * 3
    assert "above 50 us: zb-h1" in pipeline.page(result | machine)


def test_a_small_pipeline_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "2", "--chunks", "3", "--microbatches", "4", "--repeats", "2"]
    assert schedules.main(["--schedules", "interleaved", "1f1b", *sizes]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    sizes_of = {row[0].strip("| "): row[1:3] for row in rows if len(row) > 3}
    # of m micro-batches over s stages: 2ms computed, and 2m sent and received over each of the s - 1 edges
    assert sizes_of["interleaved"] == ["3", str(2 * 4 * 6 + 4 * 4 * 5)]
    assert sizes_of["1f1b"] == ["1", str(2 * 4 * 2 + 4 * 4 * 1)]


def test_sums_medians_and_what_is_above_the_limit() -> None:
    micros = {"made": [1.0, 3.0, 2.0], "communication": [4.0] * 3, "proof": [2.0] * 3, "simulation": [1.0, 1.0, 4.0]}
    row = {"chunks": 1, "actions": 3000, "computing": 1000, "micros": micros | {schedules.COLLECTOR: [0.5] * 3}}
    result = {"schedules": {"zb-h1": row}, "ranks": 4, "microbatches": 8, "rounds": 3, "clock": "wall"}
    machine = {"processor": "a processor", "load": 0.5, "python": "3"}
    page = schedules.page(result | machine)
    assert "| zb-h1 | 1 | 3,000 | 2.00 | 4.00 | 2.00 | 1.00 | 10.00 | 8.00 | 12.00 | 0.50 | 30.0 |" in page
    assert "all below 10 microseconds" in page
    row["micros"]["proof"] = [9.0] * 3
    assert "above 10 microseconds: zb-h1" in schedules.page(result | machine)
