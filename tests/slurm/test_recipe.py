"""``slurm/lib.sh`` on a real Slurm, with a script in the place of torchrun: the end of a job, in seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config.privacy import user_name
from tests.slurm import cluster as slurm
from tests.slurm.cluster import ENDED, Cluster


class Job:
    """``slurm/train_175b.sh`` whose torchrun, one task on each node, is a few lines of bash."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *torchrun: str,
        nodes: int = 3,
        flags: Sequence[str] = (),
        python: str = "exit 0",  # --check-config finds nothing wrong
        **environ: str,
    ) -> None:
        self.cluster, self.folder = cluster, cluster.root / name
        stubs = self.folder / "bin"
        stubs.mkdir(parents=True)
        self._write(stubs / "python", python)
        self._write(stubs / "torchrun", "start=${SLURM_RESTART_COUNT:-0}", *torchrun)
        here = {
            "SMALL": "1",
            "RUN": str(self.folder),
            "VENV": "none",
            "LAUNCHER": "torchrun",
            "PATH": f"{stubs}:{cluster.path}",
        }
        options = (f"--nodes={nodes}", f"--job-name={name}")
        self.number = cluster.sbatch(*options, "slurm/train_175b.sh", *flags, environ=here | environ)

    @staticmethod
    def _write(path: Path, *lines: str) -> None:
        path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
        path.chmod(0o755)

    def starts(self) -> list[str]:
        """The nodes of every start, as the job remembers them."""
        lines = (self.folder / "slurm" / "starts").read_text().splitlines()
        return [line.partition(" on ")[2] for line in lines if " start " in line]


FIRST_TASK_SAVES = 'if [ "$SLURM_PROCID.$start" = 0.0 ]; then mkdir -p "$RUN"/checkpoints/iter_0000007; fi'
COMPLETE = '[ "$start" != 0 ] || : >"$RUN"/checkpoints/iter_0000007/COMPLETE'


@pytest.mark.slow  # tests/unit/slurm/test_lib.py checks it with stand-ins; test_training.py queues jobs again
def test_a_chain_without_progress_stops_although_srun_succeeds(cluster: Cluster) -> None:
    job = Job(cluster, "stalled", FIRST_TASK_SAVES, "sleep 1", COMPLETE, "exit 0", MAX_STALLED="1")
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "1")
    assert "1 starts have brought no new checkpoint (newest: iter_0000007)" in cluster.log(job.number)


def test_a_job_that_loses_a_node_starts_again_on_others_and_is_done_where_the_marker_is(cluster: Cluster) -> None:
    job = Job(cluster, "lost", '[ "$start" = 1 ] || exec sleep 700', ': >"$RUN"/finished.json', "exit 3")
    cluster.until(lambda: bool(cluster.processes("n2", "^sleep 700")), "n2 is at work", job.number)
    cluster.power_off("n2")
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert job.starts() == ["n1 n2 n3", "n1 n3 n4"]
    assert "Slurm ends this start" in cluster.log(job.number)


def test_a_node_whose_device_fails_is_left_out_and_a_spare_one_takes_over_inside_the_job(cluster: Cluster) -> None:
    fails = (
        'if [ "$(hostname)" = n2 ]; then echo \'{"kind": "device", "host": "n2"}\' >>"$RUN"/failures.jsonl;'
        " sleep 2; exit 1; fi"  # not before srun has started all tasks
    )
    waits = 'if [ "$SLURM_STEP_NODELIST" = "n[1-3]" ]; then exec sleep 600; fi'
    job = Job(cluster, "spared", fails, waits, ': >"$RUN"/finished.json', nodes=4, SPARES="1")
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    assert "nodes: n1 n3 n4" in cluster.log(job.number)
    assert (job.folder / "slurm" / "bad_nodes").read_text().split()[0] == "n2"


def test_flags_that_no_start_would_take_end_the_job_with_their_complaint(cluster: Cluster) -> None:
    environ = {"SMALL": "1", "RUN": str(cluster.root / "refused")}
    job = cluster.sbatch("--nodes=3", "slurm/train_175b.sh", "--num-layerz", "7", environ=environ)
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert "--num-layerz" in cluster.log(job)


def chain_has_ended(cluster: Cluster, name: str, jobs: int) -> None:
    """Wait for the end of so many jobs, the last of which has never run."""

    def holds() -> bool:
        states = cluster.named(name)
        return len(states) >= jobs and set(states) <= ENDED

    cluster.until(holds, f"{jobs} jobs of the chain have ended")


def test_a_chain_goes_on_after_a_killed_job_with_the_same_copies_of_its_data_and_ends_when_finished(
    cluster: Cluster,
) -> None:
    data, disk = cluster.root / "corpus", cluster.root / "local" / "nvme"  # each node has its own folder local
    copy = f"{disk}/{user_name(os.getuid())}{data}"
    for end in ("idx", "bin"):
        data.with_suffix(f".{end}").write_text("tokens")
    job = Job(
        cluster,
        "chained",
        f'echo "agent of $SLURMD_NODENAME: $(stat -c %i {copy}.bin) $*"',
        '[ "$SLURM_JOB_ID" != "$CHAIN_ID" ] || exec sleep 700',
        ': >"$RUN"/finished.json',
        nodes=4,
        flags=("--data-path", str(data)),
        CHAIN="1",
        STAGE=str(disk),
    )
    cluster.until(lambda: bool(cluster.processes("n2", "^sleep 700")), "n2 is at work", job.number)
    cluster.login("scancel", job.number)  # TERM and, in three seconds, KILL, as at the time limit
    chain_has_ended(cluster, "chained", 3)
    assert sorted(cluster.named("chained")) == ["CANCELLED", "CANCELLED", "COMPLETED"]
    assert len(job.starts()) == 2
    log = cluster.log(job.number)
    assert "finished" in log, "one log for all jobs"
    agents = [line.split(maxsplit=4) for line in log.splitlines() if line.startswith("agent")]
    assert [words[2] for words in agents] == ["n1:", "n1:"], "the output of other nodes is in files"
    assert agents[0][3] == agents[1][3], "the copy is reused"
    assert f"--data-path {copy} " in agents[1][4]
    logs = sorted(path.relative_to(job.folder).as_posix() for path in job.folder.glob("logs/*/*"))
    assert [path.rpartition("/")[2] for path in logs] == ["n2.log", "n3.log", "n4.log"] * 2
    assert (job.folder / logs[0]).read_text().startswith("agent of n2: ")
    assert cluster.on("n2", "cat", f"{copy}.idx") == "tokens"


@pytest.mark.slow  # tests/unit/slurm/test_lib.py checks it with stand-ins
def test_a_chain_that_fails_at_once_ends(cluster: Cluster) -> None:
    job = Job(cluster, "failing", "exit 3", nodes=1, CHAIN="1", MAX_STALLED="2")
    chain_has_ended(cluster, "failing", 3)
    assert sorted(cluster.named("failing")) == ["CANCELLED", "FAILED", "FAILED"]
    assert "2 starts have brought no new checkpoint" in cluster.log(job.number)
    assert len(job.starts()) == 2


@pytest.mark.slow  # tests/unit/slurm/test_lib.py checks most of it; Slurm notices a lost node after 11 seconds
def test_a_chain_goes_on_after_a_lost_node_and_slurm_queues_nothing_again(cluster: Cluster) -> None:
    begins = '[ "$SLURM_JOB_ID" != "$CHAIN_ID" ] || exec sleep 700'
    job = Job(cluster, "relayed", begins, ': >"$RUN"/finished.json', CHAIN="1")
    cluster.until(lambda: bool(cluster.processes("n2", "^sleep 700")), "n2 is at work", job.number)
    cluster.power_off("n2")
    chain_has_ended(cluster, "relayed", 3)
    assert sorted(cluster.named("relayed")) == ["CANCELLED", "COMPLETED", "NODE_FAIL"]
    assert job.starts() == ["n1 n2 n3", "n1 n3 n4"]


@pytest.mark.slow  # a cluster of its own
def test_ranks_are_in_the_order_of_the_switches() -> None:
    if why := slurm.obstacle():
        pytest.skip(why)
    with slurm.running(nodes=4, gpus=8, switches="n1,n3 n2,n4") as cluster:
        ranks = 'case $* in *check-config*) ;; *) echo "$SLURM_PROCID $SLURMD_NODENAME" >>"$RUN"/ranks ;; esac'
        environ = {"LAUNCHER": "srun", "RANK_ORDER": "topology", "RANKS_PER_NODE": "2", "MAX_RESTARTS": "0"}
        job = Job(cluster, "sorted", nodes=4, python=ranks, MAX_STALLED="1", **environ)
        cluster.wait(job.number)
        lines = sorted((job.folder / "ranks").read_text().split("\n"))[1:]
        assert lines == [f"{rank} {node}" for rank, node in enumerate(["n1", "n1", "n3", "n3", "n2", "n2", "n4", "n4"])]
        assert job.starts() == ["n1 n3 n2 n4"] * len(job.starts())
