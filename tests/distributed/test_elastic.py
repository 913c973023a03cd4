"""Torchrun's agents restart more or fewer ranks: the run resumes and ends like an undisturbed one."""

from __future__ import annotations

import re
import signal
import time
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.distributed.elastic_runs import Job, Plan
from tests.kit.runs import checkpoint, column, differences, start, steps, tiny_run

STEPS = 12
SHUTDOWN_SECONDS = 25.0
"""Less than torchrun gives ranks that it ends."""

FLAGS = f"--train-iters {STEPS} --hidden-dropout 0.1 --save-interval 3 --distributed-timeout-minutes 0.5"
LONG = (
    "--train-iters 40 --params-dtype fp64 --global-batch-size 3 --pad-global-batch --hidden-dropout 0.1 "
    "--eval-interval 20 --eval-iters 1 --save-interval 5 --distributed-timeout-minutes 0.5"
)


def saving(folder: Path, flags: str) -> str:
    return f"{flags} --save {folder}/saved"


def job(folder: Path, flags: str, **others: object) -> Job:
    return Job(folder, saving(folder, flags), **others)  # type: ignore[arg-type]


def test_a_killed_rank_restarts_all_and_nothing_is_lost(tmp_path: Path) -> None:
    """To the bit, as without it.

    First one rank hangs where a killed one never comes, and torchrun, which asks it to end, waits for it: it has to
    end at once, though it wants to finish its step.
    """
    with job(tmp_path / "calm", FLAGS, ranks=2) as calm:
        agent = calm.add()
        calm.wait(lambda: agent.poll() is not None)
    plans = Plan("hang", 0, 5), Plan("die", 1, 5), Plan("die", 0, 8)
    with job(tmp_path / "struck", FLAGS, ranks=2, plans=plans) as struck:
        agent = struck.add()
        struck.wait(lambda: all((struck.folder / f"struck{number}").exists() for number in (0, 1)))
        since = time.monotonic()
        struck.wait(lambda: "resumed from" in struck.output())
        assert time.monotonic() - since < SHUTDOWN_SECONDS
        struck.wait(lambda: agent.poll() is not None)
        assert agent.poll() == 0, struck.output()
        assert struck.struck()
    assert steps(struck.folder) == steps(calm.folder)
    last = f"saved/iter_{STEPS:07d}"
    assert differences(struck.folder / last, calm.folder / last) == []


PLACES = r"the ranks were at: 0(SEND_F[01]|RECV_B0|B0) \(rank 0\), no answer \(rank 1\)"
"""Rank 1 dies before it sends or receives; which action of rank 0 is the first to see it is the kernel's affair."""


def test_a_killed_rank_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --distributed-timeout-minutes 0.5"
    with job(tmp_path, flags, ranks=2, restarts=0, plans=(Plan("die", 1, 3),)) as struck:
        agent = struck.add()
        struck.wait(lambda: agent.poll() is not None)
    assert agent.poll() == 1
    output = struck.output()
    assert "error on rank 0: lost contact with another rank" in output, output
    assert "megatron/training/" not in output  # as in a traceback
    assert "rank 1" in output.partition("error on rank 0: ")[2].splitlines()[0]
    assert re.fullmatch(PLACES, "".join(re.findall("the ranks were at.*", output)))
    (incident,) = [line for line in (tmp_path / "incidents.md").read_text().splitlines() if "error:" in line]
    assert "error: lost contact with another rank" in incident
    assert "gloo" not in incident
    assert column(tmp_path, "iteration") == [1, 2]


@pytest.mark.slow
def test_a_lost_node_makes_the_run_smaller_until_it_is_back(tmp_path: Path) -> None:
    """Two ranks, of which one has a padding sample; one alone, with none; two again: the losses of a calm run."""
    calm = tmp_path / "calm"
    assert start(tiny_run(calm, saving(calm, LONG))).status == 0
    plans = (Plan("die with agent", 1, 6, world=2),)
    with job(tmp_path / "shrunk", LONG, nodes=2, plans=plans) as shrunk:
        first, _ = shrunk.add(), shrunk.add()
        shrunk.wait(lambda: shrunk.struck() and shrunk.step() >= 8)
        back = shrunk.add()
        shrunk.wait(lambda: first.poll() is not None and back.poll() is not None)
        assert (first.poll(), back.poll()) == (0, 0), shrunk.output()
    worlds = [size for size, _ in groupby(column(shrunk.folder, "world-size"))]
    assert worlds[-3:] == [2, 1, 2], shrunk.output()
    assert "1 of 4 samples padding" in shrunk.output()
    assert_near(shrunk.folder, calm)


def assert_near(folder: Path, calm: Path) -> None:
    """Check that all numbers match an undisturbed run up to the order of sums, and that it read the same samples."""
    got, expected = steps(folder), steps(calm)
    assert got.keys() == expected.keys()
    for step, numbers in expected.items():
        assert got[step].pop("skipped-iterations") == numbers.pop("skipped-iterations")
        assert got[step] == pytest.approx(numbers, rel=1e-10), step
    (tensors, state), (others, other_state) = (
        checkpoint(f / f"saved/iter_{len(expected):07d}") for f in (folder, calm)
    )
    assert state == other_state
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_the_loss_of_the_agents_store_ends_all_of_them_at_once(tmp_path: Path) -> None:
    """No rendezvous is left, so all agents have to be started again; the run then resumes."""
    plans = (Plan("die with agent", 0, 6, world=2),)
    with job(tmp_path, LONG, nodes=2, plans=plans) as struck:
        host = struck.add()
        struck.wait(lambda: (struck.folder / "metrics.jsonl").exists())
        other = struck.add()
        struck.wait(struck.struck)
        struck.wait(lambda: host.poll() is not None and other.poll() is not None, SHUTDOWN_SECONDS)
        assert (host.poll(), other.poll()) == (-signal.SIGKILL, 1), struck.output()
    assert start(tiny_run(tmp_path, saving(tmp_path, LONG))).status == 0
    assert set(steps(tmp_path)) == set(range(1, 41))
