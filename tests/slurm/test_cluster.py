"""The cluster of these tests is a real one: its nodes are machines of their own, fail as such, and are repaired."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import is_alive, wait_until_gone
from tests.slurm import cluster as slurm
from tests.slurm.cluster import MINISLURM, Cluster


def script(cluster: Cluster, name: str, *lines: str) -> str:
    path = cluster.root / name
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    return str(path)


def test_nodes_have_names_and_gpus_of_their_own(cluster: Cluster) -> None:
    task = "srun bash -c 'echo $SLURMD_NODENAME $(hostname) $CUDA_VISIBLE_DEVICES'"
    job = cluster.sbatch("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", script(cluster, "names.sh", task))
    assert cluster.wait(job)["JobState"] == "COMPLETED"
    assert sorted(cluster.log(job).split("\n"))[1:] == ["n1 n1 0,1", "n2 n2 0,1"]


@pytest.mark.slow  # those of training do it with more at stake
def test_a_job_whose_node_dies_starts_again_elsewhere(cluster: Cluster) -> None:
    lines = (
        "echo start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST",
        "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || srun sleep 600",
    )
    job = cluster.sbatch("--nodes=2", "--requeue", script(cluster, "dies.sh", *lines))
    cluster.until(lambda: bool(cluster.processes("n2", "sleep 600")), "the task runs on n2", job)
    cluster.power_off("n2")
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert "start 1 on n[3-4]" in cluster.log(job) or "start 1 on n[1,3]" in cluster.log(job)


@pytest.mark.slow
def test_processes_of_an_unplugged_node_go_on_beside_the_new_start_until_it_is_plugged_in(cluster: Cluster) -> None:
    lines = (
        'echo "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"',
        'srun bash -c "echo $SLURM_RESTART_COUNT > $1/beat.$SLURM_RESTART_COUNT; exec sleep 500"',
    )
    job = cluster.sbatch("--nodes=2", "--requeue", script(cluster, "beats.sh", *lines), str(cluster.root))
    cluster.until(lambda: bool(cluster.processes("n2", "^sleep 500")), "the task runs on n2", job)
    cluster.unplug("n2")
    cluster.until(lambda: bool(cluster.processes("n3", "^sleep 500")), "the task runs on n3", job)
    assert cluster.processes("n2", "^sleep 500")
    cluster.plug("n2")
    cluster.until(lambda: not cluster.processes("n2", "^sleep 500"), "Slurm cleans n2")
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_cluster_whose_owner_is_killed_comes_down() -> None:
    if why := slurm.obstacle():
        pytest.skip(why)
    with slurm.temporary_folder() as root:
        owner = subprocess.Popen(["sleep", "600"])
        environ = os.environ | {"MINISLURM_OWNER": str(owner.pid)}
        subprocess.run([MINISLURM, "up", root, "1"], env=environ, check=True, timeout=120)
        machines = [int(path.read_text()) for path in Path(root, "run").glob("*[n1].pid") if "slurm" not in path.name]
        assert len(machines) == 2
        assert all(map(is_alive, machines))
        owner.kill()
        owner.wait()
        wait_until_gone(machines, seconds=60)


def test_where_slurm_is_missing_a_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("bash", "realpath", "id", "dirname"):
        found = subprocess.run(["which", name], text=True, capture_output=True, check=True).stdout.strip()
        (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    why = slurm.obstacle()
    assert why is not None
    assert ("sbatch" if os.geteuid() == 0 else "root") in why
