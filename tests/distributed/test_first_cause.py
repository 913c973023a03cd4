"""Many ranks that fail together: one report on the console, the others counted and in their logs, crashes named."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.config.reliability import ReliabilityConfig
from megatron.distributed.launch import FAILED_KEY, read_texts
from megatron.training import first_cause
from megatron.training.failure_report import report_failure
from megatron.training.loggers.alerts import alerts_of
from megatron.training.rank_log import rank_log
from tests.kit.processes import ForkedProgram, free_port

SECONDS = timedelta(seconds=60)


def fork_ranks(count: int, act: Callable[[int], None], run_dir: str) -> list[int]:
    """Fork a process per rank, which acts, reports its error as a run does, and ends; return their ids."""
    processes = []
    for rank in range(count):
        if process := os.fork():
            processes.append(process)
            continue
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        status = 1
        try:
            alerts = alerts_of(ReliabilityConfig(alert_command="true"), run_dir)
            with alerts, rank_log(run_dir, rank, count, os.environ):
                try:
                    act(rank)
                    status = 0
                except Exception as error:
                    report_failure(error, run_dir)
        finally:
            os._exit(status)
    return processes


def many(count: int, culprit: int, port: int, run_dir: str) -> int:
    """Ranks with a store and no other connection: one fails, and the others within a second after it."""

    def act(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, count, False, SECONDS, wait_for_workers=False)
        dist.init_process_group("fake", store=store, rank=rank, world_size=count)
        store.add("joined", 1)
        while store.add("joined", 0) < count or (rank != culprit and not read_texts([FAILED_KEY])):
            time.sleep(0.05)
        if rank == culprit:
            raise ValueError("the first cause")
        time.sleep(random.Random(rank).random())
        if rank % 8 == 1:
            raise RuntimeError("one of its own")
        raise dist.DistNetworkError("Connection reset by peer")

    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert FakeStore
    processes = fork_ranks(count, act, run_dir)
    store = dist.TCPStore("127.0.0.1", port, count, True, SECONDS, wait_for_workers=False)
    for process in processes:
        os.waitpid(process, 0)
    return 0 if store else 1


@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.slow)])
def test_many_failures_are_one_report_and_a_count(tmp_path: Path, count: int) -> None:
    run, culprit = tmp_path / "run", 7
    with ForkedProgram(many, count, culprit, free_port(), str(run), output=tmp_path / "out") as program:
        program.wait(120.0)
    printed = program.output
    assert printed.count("Traceback (most recent call last)") == 1
    assert f"error on rank {culprit}: Traceback" in printed
    assert "ValueError: the first cause\n" in printed
    (counts,) = re.findall(r"this failure is the first, at 20.* on .*: (.*)", printed)
    lost, own = map(int, re.findall(r"(\d+) ranks? (?:lost|failed)", counts))
    assert (lost > own > 0, lost + own < count) == (True, True)
    logs = {rank: (run / "ranks" / f"rank_{rank:05}.log").read_text() for rank in range(count)}
    assert all(log.count("Traceback") == 1 for log in logs.values())
    assert "ValueError: the first cause" in logs[culprit]
    assert all("RuntimeError: one of its own" in log for rank, log in logs.items() if rank % 8 == 1 and rank != culprit)
    assert "this rank failed after another one:" in logs[0]
    assert len((run / "failures.jsonl").read_text().splitlines()) == 1
    (alert,) = map(json.loads, (run / "alerts.jsonl").read_text().splitlines())
    assert (alert["event"], alert["text"]) == ("failure", f"rank {culprit}: ValueError: the first cause")


def connected(count: int, victim: int, how: str, port: int, hosts: bool, run_dir: str) -> int:
    """Ranks of a real group, one of which dies without a word while the others wait for it."""

    def act(rank: int) -> None:
        host = hosts and rank == 0
        store = dist.TCPStore("127.0.0.1", port, count, host, SECONDS, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=SECONDS)
        dist.all_reduce(torch.ones(1))
        if rank == victim:
            time.sleep(0.2)
            if how == "crash":
                ctypes.string_at(0)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    processes = fork_ranks(count, act, run_dir)
    store = None if hosts else dist.TCPStore("127.0.0.1", port, count, True, SECONDS, wait_for_workers=False)
    for process in processes:
        os.waitpid(process, 0)
    return 0 if store or hosts else 1


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("how", "hosts"), [("crash", False), ("kill", False), ("kill", True)])
def test_a_rank_that_dies_in_native_code_is_named_by_the_others_once(
    tmp_path: Path, count: int, how: str, hosts: bool
) -> None:
    run, victim = tmp_path / "run", 0 if hosts else count - 1
    arguments = count, victim, how, free_port(), hosts, str(run)
    with ForkedProgram(connected, *arguments, output=tmp_path / "out") as program:
        program.wait(60.0)
    printed = program.output
    assert printed.count("lost contact with another rank") == 1
    crash = f"rank {victim} has crashed: Segmentation fault; its stacks: {run}/ranks/rank_{victim:05}.log\n"
    assert (crash in printed) == (how == "crash")
    log = (run / "ranks" / f"rank_{victim:05}.log").read_text()
    assert ("in string_at" in log) == (how == "crash")
    assert len((run / "failures.jsonl").read_text().splitlines()) == 1


def test_processes_that_the_kernel_kills_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(first_cause, "VMSTAT", vmstat)
    assert first_cause.oom_kills() == 0
    vmstat.write_text("pgfree 1\noom_kill 3\nx 4\n")
    monkeypatch.setattr(first_cause, "_oom_kills_before", 1)
    found = first_cause.consequences(dist.DistNetworkError("x"), 1, "node7")
    assert found == "processes that the kernel of node7 has killed since the start for want of memory: 2"
