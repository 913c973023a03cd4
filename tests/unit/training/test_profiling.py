from __future__ import annotations

import errno
import gzip
import json
import os
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.run import ProfilingConfig
from megatron.distributed.timing import PHASES, profiler_range
from megatron.training.callbacks import profiler as profiler_module
from megatron.training.callbacks.profiler import Profiler
from tests.runs import before_step, column, records, start, tiny_run

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
    table = (tmp_path / "profiles" / of_steps(3, 4)[1]).read_text()
    assert all(name in table for name in ("2 steps", "forward-compute", "layers.1", "aten::addmm"))
    assert f"profile of steps 3 to 4: {tmp_path}/profiles/step_000003" in records(tmp_path, "text")[-1]["text"]


def test_phases_lie_within_their_step_and_after_one_another(tmp_path: Path) -> None:
    start(tiny_run(tmp_path, "--profile --profile-step-start 2 --profile-step-end 3"))
    at = {e["name"]: e for e in trace(tmp_path / "profiles" / of_steps(2, 2)[0]) if e.get("cat") == "user_annotation"}
    order = ["batch-generator", "forward-backward", "optimizer"]
    assert [at[name]["ts"] for name in order] == sorted(at[name]["ts"] for name in order)
    step, last = at["step 2"], at["optimizer"]
    assert step["ts"] <= at["batch-generator"]["ts"]
    assert last["ts"] + last["dur"] <= step["ts"] + step["dur"]


def test_memory_is_a_curve_that_goes_up_and_down(tmp_path: Path) -> None:
    start(tiny_run(tmp_path, f"--profile-memory {WINDOW}"))
    path = tmp_path / "profiles" / of_steps(3, 4)[0]
    counters = [event["args"]["bytes"] for event in trace(path) if event.get("ph") == "C"]
    assert max(counters) - min(counters) > 4 * 8 * 16  # one layer's activations of one micro-batch, in fp32
    assert "allocated since the recording began, at most" in path.with_name(of_steps(3, 4)[1]).read_text()


@pytest.mark.parametrize(
    ("flag", "key"),
    [("--pytorch-profiler-collect-shapes", "Input Dims"), ("--pytorch-profiler-collect-callstack", "Python id")],
)
def test_shapes_and_call_stacks_are_recorded_where_asked_for(tmp_path: Path, flag: str, key: str) -> None:
    for folder, more, there in ((tmp_path / "with", flag, True), (tmp_path / "without", "", False)):
        start(tiny_run(folder, f"--train-iters 2 --profile --profile-step-start 2 --profile-step-end 3 {more}"))
        events = trace(folder / "profiles" / of_steps(2, 2)[0])
        assert any(key in event.get("args", {}) for event in events) is there


@pytest.mark.parametrize("flags", ["", f"--profile {WINDOW} --train-iters 2"])
def test_without_a_wish_or_a_step_there_is_no_profile(tmp_path: Path, flags: str) -> None:
    assert start(tiny_run(tmp_path, flags)).status == 0
    assert kept(tmp_path) == []


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
    with patch("megatron.training.callbacks.profiler.FILE_CHECK_SECONDS", 0.0):
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


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    with before_step(2, lambda trainer: (tmp_path / "profiles").write_text("in the way")):
        printed = start(tiny_run(tmp_path, f"--profile {WINDOW}"))
    assert (printed.status, "no profile on rank 0, training continues: FileExistsError" in printed.err) == (0, True)


def recorded(config: ProfilingConfig, tmp_path: Path, steps: range, asked: dict[int, int]) -> list[str]:
    profiler = Profiler(config, str(tmp_path), 0, CPU, [torch.nn.Sequential(torch.nn.Linear(2, 2))], lambda text: None)
    for number in steps:
        with profiler.step(number), profiler_range("work"):
            torch.ones(1)
        profiler.ask(number, asked.get(number, 0))
    profiler.close(steps[-1])
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
def test_wishes_and_the_chosen_steps_go_together(tmp_path: Path, asked: dict[int, int], found: list[str]) -> None:
    config = ProfilingConfig(profile=True, profile_step_start=3, profile_step_end=5)
    assert recorded(config, tmp_path, range(1, 10), asked) == found


def test_one_profile_has_so_many_steps_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_module, "MAX_PROFILE_STEPS", 3)
    found = recorded(ProfilingConfig(), tmp_path, range(1, 10), {1: 3, 3: 3, 4: 3})
    assert found == ["step_000002-000004", "step_000005-000007"]


def test_a_profile_whose_layers_cannot_be_marked_leaves_no_profiler_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = Profiler(ProfilingConfig(profile=True), str(tmp_path), 0, CPU, [])
    with patch.object(profiler_module, "LayerRanges", side_effect=RuntimeError("no hooks")), profiler.step(10):
        assert not torch.autograd._profiler_enabled()
    assert capsys.readouterr().err == "warning: no profile on rank 0, training continues: RuntimeError: no hooks\n"


def test_hooks_are_gone_after_a_profile(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    profiler = Profiler(ProfilingConfig(profile=True), str(tmp_path), 0, CPU, [model], lambda text: None)
    for number in (10, 11):
        with profiler.step(number):
            assert model[0]._forward_hooks
            model(torch.ones(1, 2))
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


@pytest.fixture
def cuda_memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The calls that record a GPU's memory."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(("record", options)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    return calls


def test_a_gpu_whose_profile_cannot_begin_records_nothing(
    tmp_path: Path,
    cuda_memory: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(profiler_module, "profile", Broken("start", FAULTS["start"]))
    config, model = ProfilingConfig(profile_memory=True), torch.nn.Sequential()
    profiler = Profiler(config, str(tmp_path), 0, torch.device("cuda"), [model])
    with profiler.step(10):
        torch.ones(1)
    assert [options for _, options in cuda_memory][-1] == {"enabled": None}
    printed = capsys.readouterr().err
    assert printed == "warning: no profile on rank 0, training continues: RuntimeError: another profiler is active\n"


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


def test_layers_that_are_computed_anew_are_seen_again(tmp_path: Path) -> None:
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
