"""Elastic replicas against one process: deaths, returns, fences, the writer's role, and what is refused."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from megatron.training.loggers.run_folder import METRICS_FILE, read_json_lines
from tests.distributed.replica_runs import FP64, Fleet, broken_promises, undisturbed
from tests.elastic_soak import SETUPS, make_run
from tests.kit.runs import checkpoint, saved_steps, start, tiny_run

STEPS = 40

BASE = f"{FP64} --lr 1e-3 --lr-decay-iters 400 --lr-warmup-iters 0 --global-batch-size 6 --log-interval 10"


def test_the_others_go_on_and_a_lost_replica_is_filled(tmp_path: Path) -> None:
    """Six deaths: before the exchange, the vote and the update of a step, and while a replica is filled.

    The last checkpoint is one of an ordinary run.
    """
    flags = f"{BASE} --global-batch-size 4 --hidden-dropout 0.1 --train-iters {STEPS} --save-interval 20"
    with Fleet(tmp_path / "run", f"{flags} --elastic-timeout 60 --save {tmp_path}/saved", 3) as fleet:
        fleet.allow(2)
        for index, place in enumerate(("exchange", "exchange", "vote")):
            fleet.start(index, place=place)
        fleet.wait(lambda: fleet.last_step() == 2)
        lose(fleet, 0)  # which saves
        fleet.start(0, place="commit")
        fleet.join(0)
        lose(fleet, 1, 2)
        fleet.start(1, place="fill")
        fleet.strike(1)
        fleet.start(2, place="exchange")
        fleet.wait(lambda: fleet.waits(1) and fleet.waits(2))
        fleet.advance(lambda: fleet.programs[1][0].poll() is not None and fleet.is_back(2))
        fleet.start(1)
        fleet.join(1)
        lose(fleet, 0)
        lose(fleet, 2)
        assert [fleet.programs[index][0].poll() for index in (0, 2)] == [-signal.SIGKILL] * 2
        assert fleet.last_step() < STEPS - 2
        fleet.allow(STEPS)
        fleet.finish(1)
        one = undisturbed(tmp_path / "one", f"{flags} --save {tmp_path}/alone")
        assert [*broken_promises(fleet, one)] == []
        assert "filled by replica 0" in fleet.text_of(2)
        logs = [line or {} for index in range(3) for line in read_json_lines(tmp_path / f"run/{index}" / METRICS_FILE)]
        assert {"replica-lost", "replica-back"} <= {line.get("kind") for line in logs if line.get("event") == "warning"}
    assert saved_steps(tmp_path / "saved")[-1] == STEPS
    (mine, state), (alone, other) = (checkpoint(tmp_path / name / f"iter_{STEPS:07d}") for name in ("saved", "alone"))
    assert max(float((mine[n] - alone[n]).abs().max()) for n in alone) < 1e-9
    assert state["data"] == other["data"]
    assert state["consumed_samples"] == other["consumed_samples"] == 4 * STEPS
    more = start(tiny_run(tmp_path / "more", f"{flags} --train-iters {STEPS + 1} --load {tmp_path}/saved"))
    assert more.status == 0
    assert f"step {STEPS}" in more.out


def lose(fleet: Fleet, *indices: int) -> None:
    """Let replicas die where they are to, and the others take two steps more, long before the timeout."""
    fleet.strike(*indices)
    step, began = fleet.last_step(), time.monotonic()
    fleet.allow(step + 2)
    fleet.wait(lambda: fleet.last_step() == step + 2)
    assert time.monotonic() - began < 30
    assert all(fleet.programs[index][0].poll() == -signal.SIGKILL for index in indices)


def test_runs_that_differ_are_refused_and_a_lost_server_ends_replicas_with_the_last_step_saved(tmp_path: Path) -> None:
    """Before that, the writer changes twice, so replica 1 writes again after replica 0 has."""
    saves = f"--save {tmp_path}/saved --save-interval 4"
    flags = f"{BASE} --global-batch-size 2 --train-iters 400 --elastic-timeout 2 {saves}"
    with Fleet(tmp_path / "run", flags, 2) as fleet:
        fleet.allow(3)
        fleet.start(0, 1)
        fleet.wait(lambda: min(fleet.step_of(0), fleet.step_of(1)) == 3)
        for more, code in (("--seed 7 --elastic-replica 1", "E955"), ("--elastic-replica 0", "E956")):
            refused = start(tiny_run(tmp_path / code, f"{fleet.flags} {more}"))
            assert refused.status == 2
            assert code in refused.err
        for last in (4, 12):
            fleet.kill(0)
            fleet.allow(last)
            fleet.wait((tmp_path / f"saved/iter_{last:07d}/COMPLETE").exists)
            fleet.start(0)
            fleet.join(0)
            fleet.advance((tmp_path / f"saved/iter_{last + 4:07d}/COMPLETE").exists)
        fleet.advance(lambda: fleet.last_step() > 16)
        fleet.server.stop()
        fleet.allow(400)
        assert set(fleet.wait_for_end(0, 1)) == {1}
        assert "the replica server is gone" in fleet.output()
        assert saved_steps(tmp_path / "saved") == [4, 8, 12, 16, fleet.step_of(0)]


@pytest.mark.slow
def test_a_stopped_replica_does_not_come_back_into_a_step(tmp_path: Path) -> None:
    flags = f"{BASE} --train-iters 4000 --elastic-timeout 2 --save {tmp_path}/saved --save-interval 50"
    with Fleet(tmp_path / "run", flags, 3, pause=0.02) as fleet:
        fleet.start(0, 1, 2)
        fleet.wait(lambda: all(fleet.is_back(index) for index in range(3)))
        fleet.programs[0][0].send_signal(signal.SIGSTOP)
        step = fleet.step_of(1)
        fleet.wait(lambda: min(fleet.step_of(1), fleet.step_of(2)) > step + 3, 10.0)
        fleet.programs[0][0].send_signal(signal.SIGCONT)
        assert fleet.wait_for_end(0) == [1]
        assert "went on without this one" in fleet.output()
        fleet.start(0)
        fleet.wait(lambda: fleet.is_back(0))
        fleet.kill(0, 1, 2)
        assert [*broken_promises(fleet, None)] == []


@pytest.mark.slow
def test_all_lost_at_once_resume_from_the_checkpoint(tmp_path: Path) -> None:
    flags = f"{BASE} --train-iters 90 --elastic-timeout 2 --save {tmp_path}/saved --save-interval 20"
    with Fleet(tmp_path / "run", flags, 2, pause=0.02) as fleet:
        fleet.start(0, 1)
        fleet.wait(lambda: fleet.step_of(0) > 45)
        fleet.kill(0, 1)
        fleet.start(0, 1)
        fleet.finish(0, 1)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/0/steps.0.jsonl").read_text().splitlines()]
    assert steps[-50:] == [*range(41, 91)]


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_promises_in_every_setup(tmp_path: Path, setup: str) -> None:
    run = make_run(tmp_path, setup, 1, 10, 2.0)
    assert run.wrong == []
    assert all(death.again is not None and death.again < 10 for death in run.deaths)
