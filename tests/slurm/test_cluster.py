"""The cluster of these tests is a real one: its nodes are machines of their own, fail as such, and are repaired."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kit.processes import is_alive, wait_until_gone
from tests.slurm import cluster as slurm
from tests.slurm.cluster import MINISLURM, Cluster


def test_nodes_have_names_and_gpus_of_their_own(cluster: Cluster) -> None:
    task = "srun bash -c 'echo $SLURMD_NODENAME $(hostname) $CUDA_VISIBLE_DEVICES'"
    job = cluster.sbatch("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", f"--wrap={task}")
    assert cluster.wait(job)["JobState"] == "COMPLETED"
    assert sorted(cluster.log(job).split("\n"))[1:] == ["n1 n1 0,1", "n2 n2 0,1"]


def test_a_node_keeps_its_hardware_address_over_a_boot(cluster: Cluster) -> None:
    """Others send to the address that they remember."""

    def address() -> str:
        return cluster.on("n4", "ip", "-brief", "link", "show", "eth0").split()[2]

    before = address()
    cluster.power_off("n4")
    cluster.power_on("n4")
    assert address() == before


def test_a_cluster_ends_with_its_owner() -> None:
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
