"""Profiles of chosen steps, and on request during a run."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.profiling import MAX_PROFILE_STEPS, ProfilingConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.timing import PHASES, profiler_range
from megatron.training import stop as stop_module
from megatron.training.callbacks import profiler as profiler_module
from megatron.training.callbacks.profiler import Profiler, StepProfiler
from megatron.training.control import DEFAULT_PROFILE_STEPS, NO_REQUEST, Requests
from megatron.training.stop import StopRequest
from tests.kit.runs import before_step, column, records, start, tiny_run

CPU = torch.device("cpu")
WINDOW = "--profile-step-start 3 --profile-step-end 5"


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(json.load(file)["traceEvents"])


def names(path: Path, category: str = "user_annotation") -> set[str]:
    return {event["name"] for event in trace(path) if event.get("cat") == category}


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profiles").iterdir()) if (folder / "profiles").exists() else []


def of_steps(first: int, last: int, rank: int = 0) -> list[str]:
    return [f"step_{first:06d}-{last:06d}_rank_{rank}.{suffix}" for suffix in ("json.gz", "txt")]


def losses(folder: Path) -> list[tuple[float, float]]:
    return list(zip(column(folder, "lm loss"), column(folder, "grad-norm")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    start(tiny_run(folder))
    return losses(folder)


def test_a_profile_has_its_steps_their_phases_and_the_layers(
    tmp_path: Path, undisturbed: list[tuple[float, float]]
) -> None:
    printed = start(tiny_run(tmp_path, f"--profile {WINDOW}"))
    assert printed.status == 0
    assert kept(tmp_path) == of_steps(3, 4)
    ranges = names(tmp_path / "profiles" / of_steps(3, 4)[0])
    assert {name for name in ranges if name.startswith("step ")} == {"step 3", "step 4"}
    assert set(PHASES) <= ranges
    assert {"layers.0", "layers.1"} <= ranges
    assert losses(tmp_path) == undisturbed
    events = [e for e in trace(tmp_path / "profiles" / of_steps(3, 4)[0]) if e.get("cat") == "user_annotation"]
    at = {e["name"]: e for e in events}  # of step 4
    order = ["step 4", "batch-generator", "forward-backward", "optimizer"]
    assert [at[name]["ts"] for name in order] == sorted(at[name]["ts"] for name in order)
    assert at["optimizer"]["ts"] + at["optimizer"]["dur"] <= at["step 4"]["ts"] + at["step 4"]["dur"]
    table = (tmp_path / "profiles" / of_steps(3, 4)[1]).read_text()
    assert all(name in table for name in ("step 3", "forward-compute", "layers.1", "aten::addmm"))
    assert f"profile of steps 3 to 4: {tmp_path}/profiles/step_000003" in records(tmp_path, "text")[-1]["text"]


def test_memory_is_a_curve_that_goes_up_and_down(tmp_path: Path) -> None:
    start(tiny_run(tmp_path, f"--profile-memory {WINDOW}"))
    path = tmp_path / "profiles" / of_steps(3, 4)[0]
    counters = [event["args"]["bytes"] for event in trace(path) if event.get("ph") == "C"]
    assert max(counters) - min(counters) > 4 * 8 * 16  # one layer's activations of one micro-batch, in fp32
    assert "Self CPU Mem" in path.with_name(of_steps(3, 4)[1]).read_text()


def test_shapes_and_call_stacks_are_recorded_where_asked_for(tmp_path: Path) -> None:
    flags = "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"
    for folder, more, there in ((tmp_path / "with", flags, True), (tmp_path / "without", "", False)):
        start(tiny_run(folder, f"--train-iters 2 --profile --profile-step-start 2 --profile-step-end 3 {more}"))
        events = trace(folder / "profiles" / of_steps(2, 2)[0])
        for key in ("Input Dims", "Python id"):
            assert any(key in event.get("args", {}) for event in events) is there


def test_the_end_of_the_run_cuts_a_profile_short_and_keeps_it(tmp_path: Path) -> None:
    start(tiny_run(tmp_path, f"--profile {WINDOW} --exit-interval 3"))
    assert kept(tmp_path) == of_steps(3, 3)


def test_a_step_that_fails_is_in_its_profile(tmp_path: Path) -> None:
    def fail(trainer: object) -> None:
        raise RuntimeError("no more of this")

    printed = start(tiny_run(tmp_path, f"--profile {WINDOW}"), before_step(4, fail))
    assert (printed.status, kept(tmp_path)) == (1, of_steps(3, 4))
    assert "no more of this" in printed.err


def test_a_file_asks_a_running_job_for_profiles(tmp_path: Path, undisturbed: list[tuple[float, float]]) -> None:
    with patch("megatron.training.stop.FILE_CHECK_SECONDS", 0.0):
        printed = start(tiny_run(tmp_path), before_step(2, lambda trainer: (tmp_path / "PROFILE").write_text("3\n")))
    assert printed.status == 0
    assert kept(tmp_path) == of_steps(3, 5)
    assert not (tmp_path / "PROFILE").exists()
    asked = "profile requested of steps 3 to 5, recorded on --profile-ranks 0"
    assert asked in [record["text"] for record in records(tmp_path, "text")]
    assert losses(tmp_path) == undisturbed


class Broken:
    """A torch profiler that cannot start, stop or write."""

    def __init__(self, at: str, error: Exception) -> None:
        self.at, self.error = at, error

    def __call__(self, **options: object) -> Broken:
        return self

    def __getattr__(self, name: str) -> Any:
        def act(*arguments: object) -> None:
            if name == self.at:
                raise self.error

        return act


FAULTS = {
    "start": RuntimeError("another profiler is active"),
    "stop": RuntimeError("lost"),
    "export_chrome_trace": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


@pytest.mark.parametrize("at", FAULTS)
def test_a_profiler_that_fails_is_a_warning(tmp_path: Path, undisturbed: list[tuple[float, float]], at: str) -> None:
    with patch.object(profiler_module, "profile", Broken(at, FAULTS[at])):
        printed = start(tiny_run(tmp_path, f"--profile {WINDOW}"))
    assert (printed.status, kept(tmp_path)) == (0, [])
    error = f"{type(FAULTS[at]).__name__}: {FAULTS[at]}"
    assert f"warning: no profile on rank 0, training continues: {error}\n" in printed.err
    assert printed.err.count("warning: no profile") == 1
    assert losses(tmp_path) == undisturbed


def test_a_trace_that_the_disk_does_not_take_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = before_step(3, lambda trainer: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1])))
    try:
        printed = start(tiny_run(tmp_path, f"--profile {WINDOW}"), small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (printed.status, kept(tmp_path)) == (0, [])
    assert "could not be written; is the disk full?" in printed.err


def test_a_profile_that_cannot_be_announced_is_kept(tmp_path: Path) -> None:
    def announce(text: str) -> None:
        raise ValueError("the console is closed")

    config = ProfilingConfig(profile=True, profile_step_start=1, profile_step_end=2)
    profiler = Profiler(config, str(tmp_path), 0, CPU, [], announce)
    with pytest.raises(ValueError, match="the console is closed"), profiler.step(1):
        torch.ones(1)
    assert kept(tmp_path) == of_steps(1, 1)


def test_a_timeline_that_the_disk_does_not_take_leaves_nothing(tmp_path: Path) -> None:
    def write_trace(timeline: object, path: Path) -> None:
        path.write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(profiler_module, "write_trace", write_trace):
        printed = start(tiny_run(tmp_path, f"--profile-pipeline {WINDOW}"))
    assert (printed.status, kept(tmp_path)) == (0, [])
    for step in (3, 4):
        assert f"warning: no timeline of step {step}, training continues: " in printed.err


def test_timelines_of_a_million_steps_cost_no_memory_in_advance(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "--profile-pipeline --profile-step-end 1000000")
    trainer: Any = SimpleNamespace(config=config, chunks={}, mesh=SimpleNamespace(rank=0), device=CPU)
    log: Any = SimpleNamespace(enabled=False)
    tracemalloc.start()
    try:
        StepProfiler(trainer, log, lambda: NO_REQUEST)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def recorded(config: ProfilingConfig, tmp_path: Path, steps: range, asked: dict[int, int]) -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    profiler = Profiler(config, str(tmp_path), 0, CPU, [model], lambda text: None)
    for number in steps:
        with profiler.step(number), profiler_range("work"):
            torch.ones(1)
        profiler.ask(number, asked.get(number, 0))
    profiler.close(steps[-1])
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    return [name.partition("_rank")[0] for name in kept(tmp_path) if name.endswith("txt")]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, ["step_000003-000004"]),
        ({1: 1}, ["step_000002-000004"]),  # no gap, one profile
        ({3: 3}, ["step_000003-000006"]),
        ({4: 2}, ["step_000003-000004", "step_000005-000006"]),
        ({4: 1, 8: 9}, ["step_000003-000004", "step_000005-000005", "step_000009-000009"]),
    ],
)
def test_profile_requests_and_chosen_steps_combine(tmp_path: Path, asked: dict[int, int], found: list[str]) -> None:
    config = ProfilingConfig(profile=True, profile_step_start=3, profile_step_end=5)
    assert recorded(config, tmp_path, range(1, 10), asked) == found


def test_a_profile_that_cannot_start_or_stop_leaves_no_hooks_and_no_recording(
    tmp_path: Path, cuda_memory: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    config = ProfilingConfig(profile=True, profile_memory=True)
    for at in ("start", "stop"):
        profiler = Profiler(config, str(tmp_path), 0, torch.device("cuda"), [model], lambda text: None)
        with patch.object(profiler_module, "profile", Broken(at, FAULTS[at])):
            for number in (10, 11):
                with profiler.step(number):
                    model(torch.ones(1, 2))
        assert not model[0]._forward_hooks
        assert not model[0]._forward_pre_hooks
        assert cuda_memory[-1] == ("record", {"enabled": None})
        assert (
            capsys.readouterr().err
            == f"warning: no profile on rank 0, training continues: RuntimeError: {FAULTS[at]}\n"
        )
    assert kept(tmp_path) == []


def test_one_profile_has_so_many_steps_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_module, "MAX_PROFILE_STEPS", 3)
    found = recorded(ProfilingConfig(), tmp_path, range(1, 10), {1: 3, 3: 3, 4: 3})
    assert found == ["step_000002-000004", "step_000005-000007"]


@pytest.fixture
def cuda_memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The calls that record a GPU's memory."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(("record", options)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    return calls


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_a_gpu_memory_is_a_snapshot(tmp_path: Path, cuda_memory: list[tuple[str, Any]]) -> None:
    """With a double of torch's calls: a snapshot itself was not taken."""
    config, model = ProfilingConfig(profile_memory=True), torch.nn.Sequential()
    profiler = Profiler(config, str(tmp_path), 0, torch.device("cuda"), [model], lambda text: None)
    for number in (10, 11):
        with profiler.step(number):
            torch.ones(1)
    stem = str(tmp_path / "profiles" / "step_000010-000011_rank_0")
    assert cuda_memory == [
        ("record", {"max_entries": profiler_module.SNAPSHOT_ENTRIES}),
        ("dump", f"{stem}_memory.pickle"),
        ("record", {"enabled": None}),
    ]


def test_recomputed_layers_are_recorded_again(tmp_path: Path) -> None:
    """Also where that ends in the middle of a layer, as soon as everything that backward needs is there."""
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    start(tiny_run(tmp_path, f"--profile --profile-step-start 2 --profile-step-end 3 {flags}"))
    events = [e for e in trace(tmp_path / "profiles" / of_steps(2, 2)[0]) if e.get("cat") == "user_annotation"]
    forward, backward = ([e for e in events if e["name"] == f"{way}-compute"] for way in ("forward", "backward"))
    layers = [e for e in events if e["name"].startswith("layers.")]
    assert len(forward) == len(backward) == 4  # micro-batches
    for part in (*forward, *backward):
        inside = [e["name"] for e in layers if part["ts"] <= e["ts"] and e["ts"] + e["dur"] <= part["ts"] + part["dur"]]
        assert sorted(inside) == ["layers.0", "layers.1"]


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StopRequest]]:
    """Makes requests on ranks whose peers have none."""
    made: list[StopRequest] = []
    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(comm, "all_reduce", lambda x, group, op: x)

    def make(run_dir: Path | None, rank: int = 0) -> StopRequest:
        world = Group((0, 1), rank) if rank else Group()
        made.append(StopRequest(world, CPU, run_dir=None if run_dir is None else str(run_dir)))
        return made[-1]

    yield make
    for stop in reversed(made):
        stop.restore()
    signal.signal(signal.SIGUSR2, before)


def asked(stop: StopRequest) -> Requests:
    assert stop.poll() == 0
    return stop.requests


BY_SIGNAL = Requests(DEFAULT_PROFILE_STEPS)


def test_signals_are_one_request_that_is_agreed_on_with_a_stop(
    tmp_path: Path, stops: Callable[..., StopRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    stop = stops(tmp_path, rank=1)
    assert asked(stop) == NO_REQUEST
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert [asked(stop), asked(stop)] == [BY_SIGNAL, NO_REQUEST]
    signal.raise_signal(signal.SIGUSR1)
    assert (stop.poll(), stop.requests) == (128 + signal.SIGUSR1, NO_REQUEST)
    stop.restore()
    signal.raise_signal(signal.SIGUSR2)
    assert (stop.poll(), stop.requests, received) == (128 + signal.SIGUSR1, NO_REQUEST, [signal.SIGUSR2])
    assert capsys.readouterr().err == ""


def test_a_signal_without_a_run_folder_prints_a_message_and_ends_nothing(
    stops: Callable[..., StopRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = stops(None)
    signal.raise_signal(signal.SIGUSR2)
    assert asked(stop) == NO_REQUEST
    sentence = "warning: SIGUSR2 requests a profile, which needs --run-dir; this run has none\n"
    assert capsys.readouterr().err == sentence


INVALID = "warning: no profile: PROFILE may be empty, for 2 steps, or contain a number of steps up to 20"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", BY_SIGNAL),
        (" 12 \n", Requests(12)),
        (str(MAX_PROFILE_STEPS), Requests(MAX_PROFILE_STEPS)),
        ("pipeline\n", Requests(pipeline=DEFAULT_PROFILE_STEPS)),
        ("pipeline 3", Requests(pipeline=3)),
        *((text, NO_REQUEST) for text in ("0", "two", "3 pipeline", "2.5", str(MAX_PROFILE_STEPS + 1), "9" * 5000)),
        ("\0\xff", NO_REQUEST),
    ],
)
def test_a_profile_file_gives_kind_and_steps_and_is_removed(
    tmp_path: Path, stops: Callable[..., StopRequest], capsys: pytest.CaptureFixture[str], text: str, expected: object
) -> None:
    stop = stops(tmp_path)
    (tmp_path / "PROFILE").write_text(text)
    assert asked(stop) == expected
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().err
    assert printed.startswith(INVALID) if expected == NO_REQUEST else printed == ""
    assert len(printed) < 250


def test_the_file_is_looked_for_once_a_second_and_by_rank_0(
    tmp_path: Path, clock: Clock, stops: Callable[..., StopRequest]
) -> None:
    stop, other = stops(tmp_path), stops(tmp_path, rank=1)
    assert asked(stop) == NO_REQUEST
    (tmp_path / "PROFILE").touch()
    clock.now += 0.9
    assert [asked(stop), asked(other)] == [NO_REQUEST, NO_REQUEST]
    clock.now += 0.2
    assert [asked(other), asked(stop), asked(stop)] == [NO_REQUEST, BY_SIGNAL, NO_REQUEST]


def test_a_file_that_cannot_be_removed_is_reported_once(
    tmp_path: Path, clock: Clock, stops: Callable[..., StopRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = stops(tmp_path)
    (tmp_path / "PROFILE").mkdir()
    for _ in range(3):
        assert asked(stop) == NO_REQUEST
        clock.now += 2.0
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "is ignored from now on, because it cannot be read and removed" in sentence
