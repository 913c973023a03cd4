"""Stalls: the rank that others wait for is named with its place, all ranks end, and slow ranks are no stall."""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.distributed.places import PLACE
from megatron.distributed.timing import PHASES
from megatron.training.failure_report import FAILURES_FILE
from megatron.training.incidents import read_incidents
from megatron.training.loggers.alerts import ALERTS_FILE
from megatron.training.loggers.run_folder import INCIDENTS_FILE, METRICS_FILE, read_json_lines
from megatron.training.trainer import Trainer
from tests.distributed.stalls import CASES, Ended, run_case, run_rank
from tests.kit.pool import Pool
from tests.kit.processes import ForkedProgram, free_port
from tests.kit.runs import Outcome, before_step, start, tiny_run

MINUTES = 0.1
"""Timeout of a collective."""

SHORT = {"SIGSTOP": (2, 0), "native": (3, 2), "size": (2, 0)}
"""Cases of CI, their ranks, and the rank with the fault; rank 0 hosts the store."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("stalls")

    def run(name: str) -> Ended:
        size, rank = SHORT[name]
        return run_case(name, size, rank, MINUTES, folder / name, "--global-batch-size 6 --alert-command true")

    with ThreadPoolExecutor() as threads:  # they mostly wait
        return dict(zip(SHORT, threads.map(run, SHORT)))


@pytest.mark.parametrize("name", SHORT)
def test_the_rank_and_its_place_are_named_and_all_ranks_end(ended: dict[str, Ended], name: str) -> None:
    assert ended[name].problems(name, SHORT[name][1], 60 * MINUTES) == [], ended[name].printed


def test_an_incident_has_the_places_and_stacks_of_all_ranks(ended: dict[str, Ended]) -> None:
    ((folder, incident),) = read_incidents(ended["native"].folder / "run")
    assert (incident.kind, incident.step) == ("hang", 3)
    assert incident.facts["culprits"] == [2]
    assert [*incident.facts["places"]] == ["0", "1", "2"]
    for place in incident.facts["places"].values():  # as in the sentence
        assert place["at"] in incident.sentence
        assert place["phase"] in PHASES
    assert incident.facts["places"]["0"]["groups"][0]["awaited"]["operation"] == "all-reduce"
    assert "in hold_lock" in (folder / "rank_2.txt").read_text()
    assert "in all_reduce" in (folder / "rank_0.txt").read_text()


@pytest.mark.parametrize("name", SHORT)
def test_a_stall_is_alerted_and_logged_as_a_hang(ended: dict[str, Ended], name: str) -> None:
    run = ended[name].folder / "run"
    lines = {file: [line or {} for line in read_json_lines(run / file)] for file in (METRICS_FILE, ALERTS_FILE)}
    ((folder, _),) = read_incidents(run)
    (alert,), (event,) = lines[ALERTS_FILE], [line for line in lines[METRICS_FILE] if line.get("event") == "incident"]
    (failure,) = read_json_lines(run / FAILURES_FILE)
    assert (alert["event"], alert["step"]) == ("hang", 3)
    assert failure is not None
    assert alert["text"] == event["text"] == failure["sentence"]
    assert alert["text"].startswith(("stalled for", "ranks called"))
    assert (event["kind"], event["iteration"], event["folder"]) == ("hang", 2, str(folder))
    assert event["consumed-tokens"] > 0
    assert f"step 2: incident: {alert['text']}; {folder}\n" in (run / INCIDENTS_FILE).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_fault_on_one_of_8_ranks(name: str, tmp_path: Path) -> None:
    assert run_case(name, 8, 5, 2 * MINUTES, tmp_path).problems(name, 5, 120 * MINUTES) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sleep", "exit"])
def test_ranks_of_other_machines_publish_their_places(name: str, tmp_path: Path) -> None:
    ended = run_case(name, 4, 1, 2 * MINUTES, tmp_path, apart=True)
    assert len(re.findall("^error on rank", ended.printed, re.MULTILINE)) == 1
    place = "forward-compute, step 3, micro-batch 1 (0F1)" if name == "sleep" else "no answer"
    assert f"rank 1{' on node1' if name == 'sleep' else ''}: {place}" in ended.printed
    assert all(ended.statuses)


@pytest.mark.slow
def test_ranks_that_are_all_stopped_for_less_than_the_timeout_go_on(tmp_path: Path) -> None:
    flags = "--train-iters 400 --log-interval 100 --distributed-timeout-minutes 0.2"
    arguments = free_port(), "none", 0, str(tmp_path), flags, False
    ranks = [ForkedProgram(run_rank, rank, 2, *arguments, output=tmp_path / f"{rank}.txt") for rank in range(2)]
    try:
        while "100/400" not in ranks[0].output:
            assert ranks[0].poll() is None
            time.sleep(0.05)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                rank.send_signal(number)
            time.sleep(8.0 if number == signal.SIGSTOP else 0.0)
        assert [rank.wait(120.0) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


# ---- Timeouts, and slow ranks


def look_at_groups(trainer: Trainer, found: list[tuple[str, timedelta]]) -> None:
    """List the groups of this process and their timeouts."""
    trainer.mesh.background_group()
    device = torch.device("cpu")
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        found.append((f"{group.group_desc} {backend}", group._get_backend(device).options._timeout))
    found.append(("store", dist.distributed_c10d._get_default_store().timeout))


def run_listed(rank: int, world_size: int, config: RunConfig) -> tuple[int | None, list[tuple[str, timedelta]]]:
    found: list[tuple[str, timedelta]] = []
    return start(config, before_step(2, partial(look_at_groups, found=found)), rank, world_size).status, found


def test_the_timeout_reaches_every_group(pool: Pool, tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --async-save --save-interval 2"
    flags += f" --save {tmp_path}/saved --distributed-timeout-minutes 3.5"
    for status, groups in pool.run(4, run_listed, tiny_run(tmp_path, flags, 4), backend="gloo"):
        assert status == 0
        of_the_pool = {"default_pg gloo", "store"}  # it has joined the ranks before the run
        assert len(groups) > 6
        assert {timeout for name, timeout in groups if name not in of_the_pool} == {timedelta(minutes=3.5)}, groups


def be_slow(trainer: Trainer) -> None:
    """Take half of the timeout in every step, on one rank, and more than all of it on all ranks together."""
    time.sleep(0.5 * PLACE.timeout if trainer.mesh.rank else 0.0)


def run_slow(rank: int, world_size: int, config: RunConfig) -> Outcome:
    return start(config, before_step(2, be_slow), rank, world_size)


def test_a_slow_rank_is_no_stall(pool: Pool, tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "--train-iters 3 --distributed-timeout-minutes 0.05", 2)
    assert [(printed.status, printed.err) for printed in pool.run(2, run_slow, config, backend="gloo")] == 2 * [(0, "")]
    assert not (tmp_path / "incidents").exists()
