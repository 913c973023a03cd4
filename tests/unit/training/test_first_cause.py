"""The line in ``failures.jsonl``: which machine failed first, and the kind of failure."""

from __future__ import annotations

import errno
import json
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.errors import DamagedCheckpointError, StorageError, SupersededError
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.data.errors import DataError
from megatron.training import failure_report
from megatron.training.failure_report import (
    NonFiniteError,
    StartRefusedError,
    failure_kind,
    host_name,
    rank_label,
    record_failure,
)
from tests.runs import before_step, spoil_step, start, tiny_run


def refused(cause: Exception) -> StartRefusedError:
    error = StartRefusedError(str(cause))
    error.__cause__ = cause
    return error


CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {}, NCCL version 2.21.5\n{}"
GLOO = "[x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20417"
KINDS: list[tuple[BaseException, str]] = [
    (NonFiniteError("step 3"), "nonfinite"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "out-of-memory"),
    (MemoryError(), "out-of-memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "out-of-memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out-of-memory"),
    (RuntimeError(CUDA.format("uncorrectable ECC error encountered")), "device"),
    (RuntimeError(CUDA.format("an illegal memory access was encountered")), "device"),
    (torch.AcceleratorError(CUDA.format("unspecified launch failure")), "device"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), "device"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "device"),
    (torch.AcceleratorError(CUDA.format("device-side assert triggered")), "other"),
    (RuntimeError(CUDA.format("no kernel image is available for execution on the device")), "other"),
    (
        dist.DistBackendError(
            NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n")
            + "Cuda failure 'uncorrectable ECC error encountered'"
        ),
        "device",
    ),
    (
        dist.DistBackendError(
            NCCL.format("unhandled system error", "ncclSystemError: System call or external library call failed.\n")
            + "Last error:\nCall to ibv_modify_qp failed with error No such device"
        ),
        "device",
    ),
    (
        dist.DistBackendError(
            NCCL.format("unhandled system error", "ncclSystemError: System call failed.\nLast error:\n")
            + "socketStartConnect: Connect to 10.0.0.7<42> failed : Connection refused"
        ),
        "lost-contact",
    ),
    (
        dist.DistBackendError(
            NCCL.format("remote process exited or there was a network error", "ncclRemoteError: A call failed")
        ),
        "lost-contact",
    ),
    (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"), "lost-contact"),
    (dist.DistStoreError("wait timeout after 1800000ms"), "lost-contact"),
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
    (UserError([Problem("E707", "copies of the weights differ")]), "other"),  # of two ranks, who knows which
    (ValueError("shapes"), "other"),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=[f"{kind}-{type(e).__name__}" for e, kind in KINDS])
def test_what_sort_of_failure_it_is(error: BaseException, kind: str) -> None:
    assert failure_kind(error) == kind


HERE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURMD_NODENAME": "node2"}


def lines(folder: Path) -> list[dict[str, object]]:
    path = folder / failure_report.FAILURES_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_line_names_rank_machine_and_sort(tmp_path: Path) -> None:
    with patch.object(failure_report, "is_distributed_initialized", return_value=True):
        record_failure(str(tmp_path), RuntimeError("CUDA error: unknown\nerror"), HERE)
        record_failure(str(tmp_path), ValueError("shapes"), HERE)
    first, second = lines(tmp_path)
    assert abs(float(str(first.pop("time"))) - time.time()) < 60
    printed = {"rank": 5, "host": "node2", "local_rank": 1}
    assert first == printed | {"kind": "device", "sentence": "RuntimeError: CUDA error: unknown error"}
    assert (second["kind"], second["sentence"]) == ("other", "ValueError: shapes")


def test_without_slurm_a_machine_has_its_own_name() -> None:
    assert host_name({}) == socket.gethostname()
    assert host_name({"SLURMD_NODENAME": "node7"}) == "node7"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (HERE, "rank 5 on node2"),
        (HERE | {"LOCAL_WORLD_SIZE": "8"}, "rank 5"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1"),
        ({"SLURM_NNODES": "2", "SLURMD_NODENAME": "a"}, "rank 3 on a"),
        ({"SLURM_NNODES": "1"}, "rank 3"),
    ],
)
def test_the_machine_is_named_in_runs_on_several(environ: Mapping[str, str], told: str) -> None:
    if "SLURM_NNODES" in environ:
        place = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
        environ = {**environ, **place}
    assert rank_label(Launch.read(environ), environ) == told


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
GONE = refused(UserError([Problem("E207", "has 7 GPUs")]))
WRONG = refused(UserError([Problem("E206", "the nccl backend cannot serve CPUs")]))


@pytest.mark.parametrize(
    ("environ", "error", "told"),
    [
        (HERE, GONE, False),
        (HERE | {"LOCAL_RANK": "0"}, GONE, True),  # every rank of this machine fails so: one tells
        (SRUN, GONE, True),  # those that have no GPU, and they alone
        (HERE, WRONG, False),
        (HERE | {"LOCAL_RANK": "0"}, WRONG, False),
        (HERE | {"RANK": "0", "LOCAL_RANK": "0"}, WRONG, True),
    ],
)
def test_before_torch_distributed_is_initialised_few_ranks_report(
    tmp_path: Path, environ: dict[str, str], error: Exception, told: bool
) -> None:
    record_failure(str(tmp_path), error, environ)
    assert bool(lines(tmp_path)) == told


def test_nothing_that_goes_wrong_with_the_line_matters(tmp_path: Path) -> None:
    alone: dict[str, str] = {}
    record_failure(None, ValueError("shapes"), alone)
    record_failure(str(tmp_path / "none"), ValueError("shapes"), alone)
    assert not (tmp_path / "none").exists()
    (tmp_path / failure_report.FAILURES_FILE).mkdir()
    record_failure(str(tmp_path), ValueError("shapes"), alone)


def test_a_hanging_disk_does_not_keep_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "RECORD_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(failure_report, "JsonLinesLogger", lambda path, warn: time.sleep(5))
    began = time.monotonic()
    record_failure(str(tmp_path), ValueError("shapes"), {})
    assert time.monotonic() - began < 4


def test_a_start_that_was_superseded_writes_nothing(tmp_path: Path) -> None:
    record_failure(str(tmp_path), SupersededError("a later start has the folder"), {})
    assert lines(tmp_path) == []


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / failure_report.FAILURES_FILE).write_text('{"time": 1, "ra')
    record_failure(str(tmp_path), ValueError("shapes"), {})
    assert json.loads((tmp_path / failure_report.FAILURES_FILE).read_text().splitlines()[1])["kind"] == "other"


def test_each_failed_start_of_a_run_leaves_one_line(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    assert start(config).status == 0
    assert lines(tmp_path) == []
    for _ in range(2):
        assert start(config, before_step(3, spoil_step)).status == 1
    assert [line["kind"] for line in lines(tmp_path)] == ["nonfinite", "nonfinite"]
    assert "step 3 is not finite" in str(lines(tmp_path)[0]["sentence"])


def test_every_kind_is_documented_and_tried() -> None:
    docs = (Path(__file__).parents[3] / "docs/operations.md").read_text(encoding="utf-8")
    section = docs.split("### When a rank fails\n")[1].split("\n### ")[0]
    printed = re.findall(r"^\| `([a-z-]+)` \|", section, flags=re.MULTILINE)
    assert printed == [*failure_report.FAILURE_KINDS]
    assert {kind for _, kind in KINDS} == {*printed}
