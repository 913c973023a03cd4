"""Failures: exit status, the report of the first rank, ``failures.jsonl``, and ranks that wait for a dead one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.errors import DamagedCheckpointError, StorageError, SupersededError
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.data.errors import DataError
from megatron.distributed.comm import Group
from megatron.distributed.launch import FAILED_KEY, MissingRanksError, enable_flight_recorder
from megatron.training import failure_report, main
from megatron.training.failure_report import (
    EXIT_SIGTERM,
    FAILURE_KINDS,
    LOST_CONTACT,
    NonFiniteError,
    PeerWatchdog,
    StartRefusedError,
    describe_error,
    explain_error,
    failure_kind,
    host_name,
    rank_label,
    rank_positions,
    record_failure,
    report_failure,
    running_peers,
)
from megatron.training.first_cause import is_first_failure
from tests.kit.runs import before_step, column, spoil_step, start, tiny_run

# ---- Exit status and report

GLOO = "[x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:51376: Connection reset by peer"
USER = UserError([Problem("E701", "the disk is gone")])


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record that torch.distributed was shut down."""
    calls: list[str] = []
    monkeypatch.setattr(main, "destroy_distributed", lambda: calls.append("left"))
    return calls


@pytest.mark.parametrize("status", [0, 143])
def test_run_returns_the_status_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[str], status: int
) -> None:
    monkeypatch.setattr(main, "train", lambda *arguments: status)
    assert main.run(tiny_run(tmp_path), ["a note"]) == status
    assert left == ["left"]
    note, kernels, summary = column(tmp_path, "text", "text")
    assert note == "a note"
    assert kernels.startswith("kernels: torch")
    assert summary.startswith("ranks      1 = ")


REPORTS: list[tuple[Exception, str]] = [
    (USER, f"error: {USER}\n"),
    (DataError("no such sample"), "error: no such sample\n"),
    (NonFiniteError("step 3 is not finite"), "error: step 3 is not finite\n"),
    (RuntimeError(GLOO), f"error: {LOST_CONTACT}\n  {GLOO}\n"),
    (FileNotFoundError(2, "gone"), "error: Traceback (most recent call last):"),
]


@pytest.mark.parametrize(("error", "text"), REPORTS)
def test_an_error_is_reported_once_and_the_rest_is_left_to_the_end_of_the_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: list[str],
    error: Exception,
    text: str,
) -> None:
    def train(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(main, "train", train)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main.run(tiny_run(tmp_path)) == 1
    printed = capsys.readouterr().err
    assert text in printed
    assert ("Traceback" in printed) == isinstance(error, OSError)
    assert left == []
    message = json.loads((tmp_path / "error.json").read_text())["message"]  # what torchrun reports
    assert message["message"] == f"{type(error).__name__}: {error}"
    assert ("in train" in message["extraInfo"]["py_callstack"]) == isinstance(error, OSError)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", os.devnull)
    assert main.run(tiny_run(tmp_path)) == 1
    assert text in capsys.readouterr().err
    monkeypatch.setattr(failure_report, "is_first_failure", lambda error: False)  # another rank has reported it
    assert main.run(tiny_run(tmp_path)) == 1
    assert "error: " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (GLOO, "Connection reset by peer"),
        (
            "[x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
            "Timed out waiting 1800000ms for recv operation to complete",
        ),
        ("Application timeout caused pair closure", "Application timeout caused pair closure"),
        (f"{GLOO}. This is typically caused by a remote worker hanging. Check the logs.", "Connection reset by peer"),
        (f"NCCL error in: x.cpp:1, unhandled {100 * 'y'}\nLast error", f"x.cpp:1, unhandled {41 * 'y'}..."),
    ],
)
def test_lost_contact_takes_one_line_in_the_records(text: str, cause: str) -> None:
    error = dist.DistBackendError(text)
    assert describe_error(error) == f"{LOST_CONTACT} ({cause})"
    error.add_note("in the pipeline at 3F2")
    assert describe_error(error) == f"{LOST_CONTACT} ({cause}), in the pipeline at 3F2"


def test_records_name_the_pipeline_action_that_failed() -> None:
    error = ValueError("too hot")
    error.add_note("in the pipeline at 3F2")
    assert describe_error(error) == "ValueError: too hot, in the pipeline at 3F2"
    assert explain_error(error).endswith("ValueError: too hot\nin the pipeline at 3F2")


def test_sigterm_is_ignored_while_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(rank: int, world_size: int) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return ""

    monkeypatch.setattr(failure_report, "rank_positions", positions)
    before = signal.getsignal(signal.SIGTERM)
    report_failure(ValueError("too hot"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_nccl_dumps_its_collectives_into_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    enable_flight_recorder(None)
    assert os.environ == {"TORCH_FR_BUFFER_SIZE": "7"}
    enable_flight_recorder(str(tmp_path))
    assert os.environ == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_trace_rank_",
    }


# ---- failures.jsonl


def refused(cause: Exception) -> StartRefusedError:
    error = StartRefusedError(str(cause))
    error.__cause__ = cause
    return error


CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"


def nccl(kind: str, details: str) -> dist.DistBackendError:
    where = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268"
    return dist.DistBackendError(f"{where}, unhandled {kind} error, NCCL version 2.21.5\n{details}")


KINDS: list[tuple[BaseException, str]] = [
    (NonFiniteError("step 3"), "nonfinite"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "out-of-memory"),
    (MemoryError(), "out-of-memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "out-of-memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out-of-memory"),
    (RuntimeError(CUDA.format("uncorrectable ECC error encountered")), "device"),
    (torch.AcceleratorError(CUDA.format("unspecified launch failure")), "device"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "device"),
    (torch.AcceleratorError(CUDA.format("device-side assert triggered")), "other"),
    (RuntimeError(CUDA.format("no kernel image is available for execution on the device")), "other"),
    (
        nccl("cuda", "Call to CUDA failed.\nLast error:\nCuda failure 'uncorrectable ECC error'"),
        "device",
    ),
    (nccl("system", "ncclSystemError: System call failed.\nLast error:\nCall to ibv_modify_qp failed"), "device"),
    (nccl("system", "ncclSystemError: Call failed.\nLast error:\nConnect to 10.0.0.7<42> failed"), "lost-contact"),
    (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"), "lost-contact"),
    (RuntimeError(GLOO), "lost-contact"),
    (ConnectionResetError(104, "Connection reset by peer"), "lost-contact"),
    (DataError("no such sample"), "data"),
    (refused(DataError("the tokenizer is torn")), "data"),
    (StorageError("the disk is full"), "disk"),
    (DamagedCheckpointError("iter_0000100"), "disk"),
    (OSError(errno.EIO, "Input/output error"), "disk"),
    (refused(UserError([Problem("E816", "no room")])), "disk"),
    (refused(UserError([Problem("E207", "this machine runs at least 8 ranks, but has 7 GPUs")])), "device"),
    (refused(UserError([Problem("E821", "another model"), Problem("E825", "another batch")])), "other"),
    (ValueError("shapes"), "other"),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=[f"{kind}-{type(e).__name__}" for e, kind in KINDS])
def test_failures_are_classified(error: BaseException, kind: str) -> None:
    assert failure_kind(error) == kind


def test_every_kind_is_documented_and_tried() -> None:
    docs = (Path(__file__).parents[3] / "docs/running.md").read_text(encoding="utf-8")
    section = docs.split("### When a rank fails\n")[1].split("\n### ")[0]
    documented = re.findall(r"^\| `([a-z-]+)` \|", section, flags=re.MULTILINE)
    assert documented == [*FAILURE_KINDS]
    assert {kind for _, kind in KINDS} == {*documented}


HERE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURMD_NODENAME": "node2"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}


def lines(folder: Path) -> list[dict[str, object]]:
    path = folder / failure_report.FAILURES_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_line_names_rank_machine_and_kind(tmp_path: Path) -> None:
    with patch.object(failure_report, "is_distributed_initialized", return_value=True):
        record_failure(str(tmp_path), RuntimeError("CUDA error: unknown\nerror"), HERE)
        record_failure(str(tmp_path), ValueError("shapes"), HERE)
    first, second = lines(tmp_path)
    assert abs(float(str(first.pop("time"))) - time.time()) < 60
    where = {"rank": 5, "host": "node2", "local_rank": 1}
    assert first == where | {"kind": "device", "sentence": "RuntimeError: CUDA error: unknown error"}
    assert (second["kind"], second["sentence"]) == ("other", "ValueError: shapes")
    assert host_name({}) == socket.gethostname()


@pytest.mark.parametrize(
    ("environ", "label"),
    [
        (HERE, "rank 5 on node2"),
        (HERE | {"LOCAL_WORLD_SIZE": "8"}, "rank 5"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1"),
        (SRUN | {"SLURMD_NODENAME": "a"}, "rank 5 on a"),
        (SRUN | {"SLURM_NNODES": "1"}, "rank 5"),
    ],
)
def test_the_machine_is_named_in_runs_on_several(environ: Mapping[str, str], label: str) -> None:
    assert rank_label(Launch.read(environ), environ) == label


@pytest.mark.parametrize(("local_rank", "missing", "reported"), [(0, 3, True), (1, 3, False), (1, 4, True)])
def test_one_rank_of_a_machine_reports_those_that_do_not_join(
    local_rank: int, missing: int, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (HERE | {"LOCAL_RANK": str(local_rank)}).items():
        monkeypatch.setenv(name, value)
    assert is_first_failure(MissingRanksError("waiting for a rank", [missing])) == reported


GONE = refused(UserError([Problem("E207", "has 7 GPUs")]))
WRONG = refused(UserError([Problem("E206", "the nccl backend cannot serve CPUs")]))


@pytest.mark.parametrize(
    ("environ", "error", "reported"),
    [
        (HERE, GONE, False),
        (HERE | {"LOCAL_RANK": "0"}, GONE, True),  # every rank of this machine fails so: one reports
        (SRUN, GONE, True),  # those that have no GPU, and they alone
        (HERE | {"LOCAL_RANK": "0"}, WRONG, False),
        (HERE | {"RANK": "0", "LOCAL_RANK": "0"}, WRONG, True),
        (HERE | {"RANK": "0", "LOCAL_RANK": "0"}, SupersededError("a later start has the folder"), False),
    ],
)
def test_before_torch_distributed_is_initialised_few_ranks_report(
    tmp_path: Path, environ: dict[str, str], error: Exception, reported: bool
) -> None:
    record_failure(str(tmp_path), error, environ)
    assert bool(lines(tmp_path)) == reported


def test_nothing_that_goes_wrong_with_the_line_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / failure_report.FAILURES_FILE
    file.write_text('{"time": 1, "ra')  # cut off by a crash
    record_failure(str(tmp_path), ValueError("shapes"), {})
    assert json.loads(file.read_text().splitlines()[1])["kind"] == "other"
    file.unlink()
    file.mkdir()
    for folder in (None, str(tmp_path / "none"), str(tmp_path)):
        record_failure(folder, ValueError("shapes"), {})
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(failure_report, "RECORD_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(failure_report, "JsonLinesLogger", lambda path, warn: time.sleep(5))  # a hanging disk
    began = time.monotonic()
    record_failure(str(tmp_path), ValueError("shapes"), {})
    assert time.monotonic() - began < 4


def test_each_failed_start_of_a_run_leaves_one_line(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    for _ in range(2):
        assert start(config, before_step(3, spoil_step)).status == 1
    assert [line["kind"] for line in lines(tmp_path)] == ["nonfinite", "nonfinite"]
    assert "step 3 is not finite" in str(lines(tmp_path)[0]["sentence"])


# ---- Words between ranks; for real ranks see tests/distributed/test_pipeline_runtime.py


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Messages published by ranks."""
    published: dict[str, str] = {}

    def found(names: Sequence[str]) -> dict[str, str]:
        return {name: published[name] for name in names if name in published}

    monkeypatch.setattr(failure_report, "publish_text", published.__setitem__)
    monkeypatch.setattr(failure_report, "read_texts", found)
    monkeypatch.setattr(failure_report, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(failure_report, "POSITION_TIMEOUT_SECONDS", 0.1)
    return published


def test_records_after_lost_contact_have_the_error_of_the_first_rank(
    words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    report_failure(ValueError("too hot"))
    assert describe_error(RuntimeError(GLOO)) == "rank 1: ValueError: too hot"
    assert describe_error(KeyError("cause")) == "KeyError: 'cause'"


def test_ranks_at_the_same_position_are_listed_together(words: dict[str, str]) -> None:
    words.update({f"place of rank {rank}": "0B0" if rank < 18 else "1F2" for rank in range(19)})
    expected = f"the ranks were at: 0B0 (ranks {', '.join(map(str, range(16)))} and 2 more), 1F2 (rank 18)"
    assert rank_positions(3, 19) == expected


def test_ranks_that_do_not_answer_are_listed_after_a_while(words: dict[str, str]) -> None:
    began = time.monotonic()
    assert rank_positions(0, 2) == ""  # without a pipeline there is no wait
    assert time.monotonic() - began < 0.1
    words.update({"place of rank 0": "other work", "place of rank 1": "other work"})
    assert rank_positions(0, 2) == ""
    words["place of rank 1"] = "1F2"
    assert rank_positions(1, 3) == "the ranks were at: other work (rank 0), 1F2 (rank 1), no answer (rank 2)"


def test_a_rank_publishes_its_position_when_it_or_another_fails(words: dict[str, str]) -> None:
    def rank_5_at(action: str) -> PeerWatchdog:
        pipeline: Any = SimpleNamespace(at=action)
        return PeerWatchdog(Group(tuple(range(6)), 5), pipeline)

    with rank_5_at("1F2"):
        pass
    assert words == {}
    with pytest.raises(ValueError, match="too hot"), rank_5_at("1F2"):
        raise ValueError("too hot")
    assert words == {"place of rank 5": "1F2"}
    with rank_5_at("0B0"):
        words[FAILED_KEY] = "1"
        _wait_for(lambda: words["place of rank 5"] == "0B0")


# ---- On SIGTERM a rank that waits for a dead peer exits, and a rank that can finish its step does so

WORLD = Group((0, 1))


class Ended(threading.Event):
    """Set instead of ending this process."""

    status = 0

    def leave(self, status: int) -> None:
        self.status = status
        self.set()


@pytest.fixture
def ended() -> Iterator[Ended]:
    """With a handler, as in a run that finishes its step; all waiting times are a tenth."""
    found, before = Ended(), signal.signal(signal.SIGTERM, lambda number, frame: None)
    with (
        patch.object(failure_report.os, "_exit", found.leave),
        patch.multiple(failure_report, PEER_POLL_SECONDS=0.02, PEER_GRACE_SECONDS=0.2),
    ):
        yield found
    signal.signal(signal.SIGTERM, before)


def watchdog(gone: bool, world: Group = WORLD) -> PeerWatchdog:
    """Return a watchdog that finds a peer gone, or all there."""
    watchdog = PeerWatchdog(world)
    watchdog.is_peer_gone = lambda: gone  # type: ignore[method-assign]
    return watchdog


@pytest.mark.parametrize(
    ("gone", "world", "number", "seconds", "ends"),
    [
        (True, WORLD, signal.SIGTERM, 0.6, True),
        (False, WORLD, signal.SIGTERM, 0.6, False),  # it may finish its step
        (True, Group(), signal.SIGTERM, 0.4, False),
        (True, WORLD, signal.SIGUSR1, 0.4, False),
        (True, WORLD, signal.SIGTERM, 0.05, False),  # it reports the lost peer itself
    ],
)
def test_it_ends_after_sigterm_where_another_rank_is_gone(
    ended: Ended,
    capsys: pytest.CaptureFixture[str],
    gone: bool,
    world: Group,
    number: int,
    seconds: float,
    ends: bool,
) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    with watchdog(gone, world):
        signal.raise_signal(number)
        assert ended.wait(seconds) == ends
    signal.signal(signal.SIGUSR1, before)
    assert ended.wait(0.3) == ends
    assert ended.status == (EXIT_SIGTERM if ends else 0)
    assert ("error on rank 0: lost contact with another rank" in capsys.readouterr().err) == ends


def test_the_signal_is_seen_where_no_handler_runs(ended: Ended) -> None:
    """As inside a collective: the interpreter runs neither when the signal comes nor when the process ends."""
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    seen_before_the_end: list[list[int]] = []
    leave = ended.leave
    with (
        watchdog(True),
        patch.object(
            failure_report.os, "_exit", lambda status: (seen_before_the_end.append([*handled]), leave(status))
        ),
    ):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        until = time.monotonic() + 20
        while not ended.is_set() and time.monotonic() < until and not handled:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # seconds without the interpreter
    assert seen_before_the_end == [[]]


def test_peers_are_processes_with_the_same_command() -> None:
    """Two children of this process are ranks, as another one sees them; then one is killed."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks, other = [subprocess.Popen(sleeps) for _ in range(2)], subprocess.Popen(["sleep", "60"])
    try:
        with (
            patch.object(failure_report.os, "getppid", os.getpid),
            patch.object(failure_report, "PROC_SELF", failure_report.PROC / str(ranks[0].pid)),
        ):
            _wait_for(lambda: running_peers() == {rank.pid for rank in ranks})
            with PeerWatchdog(WORLD) as watching:
                other.kill()
                other.wait()
                assert not watching.is_peer_gone()
                with patch.object(failure_report, "has_any_rank_failed", lambda: True):  # on another machine
                    assert watching.is_peer_gone()
                ranks[1].kill()
                _wait_for(watching.is_peer_gone)
                ranks[1].wait()
                assert watching.is_peer_gone()
    finally:
        for process in (*ranks, other):
            process.kill()
            process.wait()


def _wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_watchdog_that_fails_leaves_the_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    no_thread = RuntimeError("can't start new thread")
    with (
        patch.object(failure_report, "read_texts", side_effect=no_thread),
        patch.object(failure_report.StallWatch, "close") as close,
        PeerWatchdog(WORLD) as watchdog,
    ):
        watchdog._thread.join(10.0)
        close.assert_called_once_with(failed=False)  # or its timers end the process
    assert "no longer watched for stalls: RuntimeError: can't start new thread" in capsys.readouterr().err
