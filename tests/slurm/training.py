"""A training job of a recipe in ``slurm/``, as seen from its run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster

Record = dict[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class Shape:
    """The size of a run: nodes of the job, ranks of each node, and steps."""

    nodes: int
    ranks: int
    steps: int

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}"


SMALL, LARGE = Shape(2, 1, 16), Shape(3, 2, 30)
"""PP2 x VPP2, and in the large one x DP3 besides."""

LIGHT = ("--num-layers", "4", "--tensor-model-parallel-size", "1", "--no-sequence-parallel")
"""Flags that leave of the recipe's layout PP2 x VPP2, and take less than a second for a step on two cores."""

SLOWED = ("--plugin", "tests.slurm.pace")


@dataclass(frozen=True)
class Training:
    """One job that trains.

    Attributes:
        cluster: where it runs.
        job: its number.
        folder: the run's.
        shape: its size.
    """

    cluster: Cluster
    job: str
    folder: Path
    shape: Shape

    @classmethod
    def submit(
        cls,
        cluster: Cluster,
        name: str,
        shape: Shape,
        *flags: str,
        sbatch: Sequence[str] = (),
        launcher: str = "srun",
        **more: str,
    ) -> Training:
        """Submit ``slurm/train_175b.sh`` with ``SMALL=1``.

        Args:
            cluster: where.
            name: of its run folder, to which its shape is added.
            shape: its size.
            flags: of ``pretrain_gpt.py``, besides the recipe's and :data:`LIGHT`.
            sbatch: its own flags, besides.
            launcher: of the ranks.
            more: settings of the job.
        """
        folder = cluster.root / f"{name}{shape}"
        environ = {"SMALL": "1", "RUN": str(folder), "LAUNCHER": launcher}
        environ |= more | {"STEPS": str(shape.steps), "SAVE_EVERY": "2", "RANKS_PER_NODE": str(shape.ranks)}
        nodes, batch = f"--nodes={shape.nodes}", ("--global-batch-size", str(2 * shape.nodes * shape.ranks))
        job = cluster.sbatch(nodes, *sbatch, "slurm/train_175b.sh", *LIGHT, *batch, *flags, environ=environ)
        return cls(cluster, job, folder, shape)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def last(self) -> Path:
        """The checkpoint of the last step."""
        return self.checkpoints / f"iter_{self.shape.steps:07d}"

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
        """The step of the newest checkpoint that is named in its first ``until`` records, or all."""
        printed = [record for record in self.records()[:until] if record.get("event") == "checkpoint"]
        return max(int(Path(record["path"]).name.removeprefix("iter_")) for record in printed)

    def finished(self) -> Record | None:
        """Return the record of the end; None while there is none."""
        path = self.folder / "finished.json"
        return dict(json.loads(path.read_text())) if path.exists() else None
