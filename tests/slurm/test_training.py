"""``SMALL=1 sbatch slurm/train_175b.sh`` on nodes of four: time limits, lost nodes, a cut network change no bit.

Ranks are PP2 x VPP2 with all overlaps; the large form has three replicas and the distributed optimizer besides.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.folder import CheckpointFolder
from tests.kit.runs import differences
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import LARGE, SLOWED, Shape, Training

RANKS = r"python\S* (-\S+ )*pretrain_gpt.py"


def assert_ended_well(training: Training) -> None:
    assert training.cluster.job(training.job)["JobState"] == "COMPLETED"
    assert_finished(training)


def assert_finished(training: Training) -> None:
    finished = training.finished()
    assert finished is not None
    assert finished["iteration"] == training.shape.steps
    assert Path(finished["checkpoint"]).name == training.last().name
    assert CheckpointFolder(training.checkpoints).newest()[0].path.name == training.last().name


def test_a_run_that_nothing_happens_to_ends_with_its_marker(undisturbed: Training, cluster: Cluster) -> None:
    assert_ended_well(undisturbed)
    assert undisturbed.starts() == [0]
    logs = {path.name for path in (undisturbed.folder / "logs").rglob("*.log")}
    ranks = {f"n{1 + r // undisturbed.shape.ranks}-rank{r}.log" for r in range(1, undisturbed.shape.size)}
    assert logs == ranks | {f"n{node}.log" for node in range(2, undisturbed.shape.nodes + 1)}, "and logs of agents"
    assert cluster.job(undisturbed.job)["Restarts"] == "0"


@pytest.mark.slow  # test_recipe.py loses a node; tests/unit/checkpoint/test_fencing.py: ranks of an earlier start
def test_time_limit_lost_nodes_and_a_cut_network_change_no_bit(
    undisturbed: Training, cluster: Cluster, shape: Shape
) -> None:
    training = Training.submit(cluster, "disturbed", shape, *SLOWED)
    training.trains()
    the_time_is_nearly_up(training)
    if shape == LARGE:  # in the small form, the node that is cut off is one that is lost
        lose_a_node(training, training.head())
        lose_a_node(training, training.nodes()[1])
    cut_off_the_first_rank(training)
    cluster.wait(training.job)
    assert_ended_well(training)
    assert cluster.job(training.job)["Restarts"] == ("4" if shape == LARGE else "2")
    logs = [path.name for path in (training.folder / "logs" / f"{training.job}.0").iterdir()]
    assert sum(name.endswith(f"-rank{shape.size - 1}.log") for name in logs) == 1
    assert len(logs) == shape.size - 1, "of all ranks but the first"
    assert differences(training.last(), undisturbed.last()) == []


def the_time_is_nearly_up(training: Training) -> None:
    """Slurm's signal: all ranks save after the step they are at; the job queues itself again and goes on from there."""
    since = len(training.records())
    training.cluster.login("scancel", "--signal=USR1", "--batch", training.job)
    training.trains(since)
    printed = training.records()[since:]
    (stop,) = [record for record in printed if record.get("event") == "stop"]
    begin = printed.index(next(record for record in printed if record.get("event") == "start"))
    assert stop["iteration"] == training.saved(since + begin) == printed[begin]["iteration"]
    assert not any(record.get("event") == "error" for record in printed)


def lose_a_node(training: Training, node: str) -> None:
    """Without a word to anybody; the job goes on with the spare one."""
    since, cluster = len(training.records()), training.cluster
    saved = training.saved()
    cluster.power_off(node)
    training.trains(since)
    assert node not in training.nodes()
    assert training.starts()[-1] >= saved
    cluster.power_on(node)
    cluster.until(lambda: cluster.nodes()[node] == "IDLE", f"{node} is idle again")


def cut_off_the_first_rank(training: Training) -> None:
    """Its node sees the disk, and no other node: it lives on beside the new start, and does not write into its run."""
    since, node, old = go_on_without_the_head(training)
    assert old & ranks_on(training.cluster, node), "the old ranks should still be alive"
    plug_in(training, node)
    assert_no_one_else_has_written(training, since)


def ranks_on(cluster: Cluster, node: str) -> set[int]:
    return set(cluster.processes(node, RANKS))


def go_on_without_the_head(training: Training) -> tuple[int, str, set[int]]:
    """Unplug the node of rank 0 and wait for the new start; records before that, the node, and the old ranks there."""
    since, node = len(training.records()), training.head()
    old = ranks_on(training.cluster, node)
    assert len(old) == training.shape.ranks
    training.cluster.unplug(node)
    training.trains(since)
    assert node not in training.nodes()
    return since, node, old


def plug_in(training: Training, node: str) -> None:
    """Connections of the old ranks come back to life, without a peer; then Slurm ends them."""
    training.cluster.plug(node)
    training.cluster.until(lambda: not ranks_on(training.cluster, node), f"Slurm has ended the old ranks on {node}")


def assert_no_one_else_has_written(training: Training, since: int) -> None:
    """The records belong to one start, from its first on."""
    new = training.records()[since:]
    begin = new.index(next(record for record in new if record.get("event") == "start"))
    assert not any(record.get("event") in ("start", "stop", "error") for record in new[begin + 1 :])
    first = new[begin]["iteration"] + 1
    steps = [record["iteration"] for record in new[begin:] if "lm loss" in record]
    assert steps == list(range(first, first + len(steps)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LARGE], indirect=True)
def test_ranks_of_a_cut_off_node_that_wake_up_write_nothing(undisturbed: Training, cluster: Cluster) -> None:
    """They wait for the others until the time of a collective is up, and fail beside the new start or after its end."""
    training = Training.submit(cluster, "woken", LARGE, *SLOWED, "--distributed-timeout-minutes", "2")
    training.trains()
    since, node, old = go_on_without_the_head(training)
    cluster.until(lambda: not old & ranks_on(cluster, node), f"the old ranks on {node} have failed")
    cluster.wait(training.job)
    plug_in(training, node)
    assert_no_one_else_has_written(training, since)
    assert_ended_well(training)
    assert differences(training.last(), undisturbed.last()) == []


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["", "1"])
@pytest.mark.parametrize("shape", [LARGE], indirect=True)
def test_the_time_limit_itself(undisturbed: Training, cluster: Cluster, chain: str) -> None:
    """Slurm looks at its clock every 30 s, so the signal comes up to 30 s late or early: before the end in any case."""
    name = f"limited{chain}"
    limit = ("--time=2", "--signal=B:USR1@60", f"--job-name={name}")
    training = Training.submit(cluster, name, LARGE, *SLOWED, sbatch=limit, CHAIN=chain, PACE="4")
    cluster.until(lambda: set(cluster.named(name)) <= ENDED, "the job or chain ends", seconds=1800)
    assert_finished(training)
    assert len(cluster.named(name)) > 2 if chain else cluster.job(training.job)["Restarts"] != "0"
    assert differences(training.last(), undisturbed.last()) == []
