"""A training job of a recipe in ``slurm/``, as seen from its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster

Record = dict[str, Any]
"""A line of metrics.jsonl."""

STEPS = 24
SIX_RANKS = {"STEPS": str(STEPS), "SAVE_EVERY": "2", "RANKS_PER_NODE": "2"}
"""Settings of ``slurm/lib.sh`` for a short run with two ranks on each of its three nodes."""

LIGHT = (
    *("--num-layers", "4", "--global-batch-size", "12"),
    *("--tensor-model-parallel-size", "1", "--no-sequence-parallel"),
)
"""Flags for PP2 x VPP2 x DP3, and for a step of less than a second on two cores."""

SLOWED = ("--plugin", "tests.slurm.pace")


@dataclass(frozen=True)
class Training:
    """One job that trains.

    Attributes:
        cluster: where it runs.
        job: its number.
        folder: the run's.
    """

    cluster: Cluster
    job: str
    folder: Path

    @classmethod
    def submit(
        cls,
        cluster: Cluster,
        name: str,
        *flags: str,
        sbatch: Sequence[str] = (),
        environ: Mapping[str, str],
    ) -> Training:
        """Submit ``slurm/train_175b.sh`` with ``SMALL=1``, on three nodes.

        Args:
            cluster: where.
            name: of its run folder.
            flags: of ``pretrain_gpt.py``, besides the recipe's.
            sbatch: its own flags, besides.
            environ: what ``slurm/lib.sh`` reads, such as ``STEPS``.
        """
        folder = cluster.root / name
        words = {"SMALL": "1", "RUN": str(folder), **environ}
        job = cluster.sbatch("--nodes=3", *sbatch, "slurm/train_175b.sh", *flags, environ=words)
        return cls(cluster, job, folder)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def last(self) -> Path:
        """The checkpoint of the last step."""
        return self.checkpoints / f"iter_{STEPS:07d}"

    def records(self) -> list[Record]:
        """The lines of metrics.jsonl that are whole: a killed process may have left a piece of one."""
        found = []
        path = self.folder / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def trains(self, since: int = 0) -> None:
        """Wait until a start that began after ``since`` records has saved, and taken a step more.

        Raises:
            AssertionError: when it does not within :data:`~tests.slurm.cluster.PATIENCE`, or the job ends.
        """

        def holds() -> bool:
            new = self.records()[since:]
            starts = [i for i, record in enumerate(new) if record.get("event") == "start"]
            latest = new[starts[-1] :] if starts else []
            saves = [i for i, record in enumerate(latest) if record.get("event") == "checkpoint"]
            return bool(saves) and any("lm loss" in record for record in latest[saves[0] :])

        self.cluster.until(holds, f"job {self.job} saves in this start, and takes a step more", self.job)

    def starts(self) -> list[int]:
        """The iteration that each start went on from."""
        return [record["iteration"] for record in self.records() if record.get("event") == "start"]

    def nodes(self) -> list[str]:
        """The nodes it has."""
        return self.cluster.node_list(self.job)

    def head(self) -> str:
        """The node of its batch script and of rank 0."""
        return self.cluster.job(self.job)["BatchHost"]

    def saved(self, until: int | None = None) -> int:
        """The step of the newest checkpoint that is told of in its first ``until`` records, or all."""
        printed = [record for record in self.records()[:until] if record.get("event") == "checkpoint"]
        return max(int(Path(record["path"]).name.removeprefix("iter_")) for record in printed)

    def finished(self) -> Record | None:
        """What the marker of the end says; None while there is none."""
        path = self.folder / "finished.json"
        return dict(json.loads(path.read_text())) if path.exists() else None
