"""``slurm/lib.sh`` on a real Slurm, with a script in the place of torchrun: what becomes of a job, told in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster


class Job:
    """``slurm/train_175b.sh`` whose torchrun, one task on each node, is a few lines of bash."""

    def __init__(self, cluster: Cluster, name: str, *torchrun: str, nodes: int = 3, **environ: str) -> None:
        self.cluster, self.folder = cluster, cluster.root / name
        stubs = self.folder / "bin"
        stubs.mkdir(parents=True)
        self._write(stubs / "python", "exit 0")  # --check-config finds nothing wrong
        self._write(stubs / "torchrun", "start=${SLURM_RESTART_COUNT:-0}", *torchrun)
        here = {"SMALL": "1", "RUN": str(self.folder), "VENV": "none", "PATH": f"{stubs}:{cluster.path}"}
        self.number = cluster.sbatch(f"--nodes={nodes}", "slurm/train_175b.sh", environ=here | environ)

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


@pytest.mark.slow  # tests/unit/slurm/test_lib.py tells it in a second, of stand-ins; test_training.py queues jobs again
def test_srun_that_succeeds_is_not_believed_and_a_chain_without_progress_stops(cluster: Cluster) -> None:
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
        'if [ "$(hostname)" = n2 ]; then echo \'{"kind": "device", "host": "n2"}\' >>"$RUN"/failures.jsonl; exit 1; fi'
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
