"""Checkpoints on the nodes' own disks: what each node has, and which of it makes up a whole checkpoint.

A node has the files of its own ranks and copies of those of the node before it, beside the manifest of the whole
checkpoint; so any one node may be lost. No torch here, and no communication: those are in `local_saving` and
`local_loading`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.claims import Claim
from megatron.checkpoint.errors import DamagedError, within
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import MARKER, Manifest
from megatron.checkpoint.publish import home
from megatron.checkpoint.remote import on_disk

NODE = "{node}"
"""What stands for a node's number in the name of a folder."""


def folder_of(pattern: str, node: int) -> Path:
    """The folder of a node."""
    return Path(pattern.replace(NODE, str(node)))


def is_local(path: Path, pattern: str) -> bool:
    """Whether a checkpoint lies in the folder of a node, whichever."""
    return bool(re.fullmatch(r"\d+".join(map(re.escape, str(Path(pattern)).split(NODE))), str(home(path))))


@dataclass(frozen=True)
class Nodes:
    """Which ranks are on which node.

    Attributes:
        of: the node of every rank; nodes are counted from 0.
    """

    of: tuple[int, ...]

    @classmethod
    def counted(cls, numbers: Sequence[int]) -> Nodes:
        """From whatever numbers the launcher gives to the nodes of the ranks."""
        known = sorted(set(numbers))
        return cls(tuple(known.index(number) for number in numbers))

    @property
    def count(self) -> int:
        """Nodes."""
        return max(self.of) + 1

    @property
    def are_even(self) -> bool:
        """Whether there are as many ranks on each."""
        return len({len(self.ranks(node)) for node in range(self.count)}) == 1

    def ranks(self, node: int) -> list[int]:
        """The ranks on a node; the first one leads."""
        return [rank for rank, number in enumerate(self.of) if number == node]

    def leads(self, rank: int) -> bool:
        """Whether a rank does for its node what one does for all."""
        return self.ranks(self.of[rank])[0] == rank

    def neighbour(self, rank: int, step: int) -> int:
        """The rank in the same place ``step`` nodes further on, in a ring."""
        node = self.of[rank]
        return self.ranks((node + step) % self.count)[self.ranks(node).index(rank)]


@dataclass(frozen=True)
class Held:
    """What a node has of a checkpoint.

    Attributes:
        iteration: steps taken when it was saved.
        mark: content of the marker: nodes with the same one have parts of one save.
        run: the ``--save`` folder of the run that wrote it.
        files: those that are there in full length.
    """

    iteration: int
    mark: str
    run: str | None
    files: frozenset[str]


def held_in(folder: Path, claim: Claim | None = None) -> tuple[list[Held], list[str]]:
    """What a node's folder holds, once what a crash interrupted is finished, and notes on what cannot be trusted.

    Raises:
        NewerVersionError: when a newer version of this program wrote one.
        OSError: when the disk refuses.
    """
    runs = Checkpoints(folder)
    runs.retain(None, claim=claim)
    held, notes = [], []
    for iteration, path in runs.named():
        try:
            manifest = Manifest.described(path)
        except DamagedError as error:
            notes.append(f"passed over {path}: {within(path, error)}")
            continue
        mark, run = on_disk(path / MARKER).read_text(), manifest.config.get("checkpoint", {}).get("save")
        held.append(Held(iteration, mark, run, frozenset(name for name in manifest.files if _is_there(manifest, name))))
    return held, notes


def _is_there(manifest: Manifest, name: str) -> bool:
    try:
        manifest.check_file(name)
    except DamagedError:
        return False
    return True


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint, wherever its files are.

    Attributes:
        iteration: steps taken when it was saved.
        mark: content of its marker.
        run: the ``--save`` folder of the run that wrote it.
        files: what each node has of it, by the node's number; nodes that have no manifest of it have nothing.
    """

    iteration: int
    mark: str
    run: str | None
    files: Mapping[int, frozenset[str]]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the checkpoint's files that no node has."""
        there = frozenset().union(*self.files.values())
        return [name for name in names if name not in there]


def put_together(by_node: Sequence[Sequence[Held]]) -> list[LocalCheckpoint]:
    """The checkpoints that nodes have, newest first; of two of one iteration, that which more of them have."""
    found: dict[tuple[int, str], dict[int, Held]] = defaultdict(dict)
    for node, some in enumerate(by_node):
        for held in some:
            found[held.iteration, held.mark][node] = held
    ordered = sorted(found.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1]), reverse=True)
    return [
        LocalCheckpoint(
            iteration, mark, next(iter(nodes.values())).run, {node: held.files for node, held in nodes.items()}
        )
        for (iteration, mark), nodes in ordered
    ]


Copy = tuple[int, str]
"""A node, and the name of a file that it has, or needs."""


def sources(
    checkpoint: LocalCheckpoint, needs: Mapping[int, frozenset[str]], bad: Mapping[Copy, str]
) -> dict[Copy, int]:
    """For each file that a node needs, the node whose copy serves: its own, or the nearest one behind it.

    Args:
        checkpoint: which of its files are where.
        needs: by node, the files it needs.
        bad: copies that are not what was written, and why.

    Raises:
        DamagedError: when none is left of a file.
    """
    chosen, count = {}, max([*needs, *checkpoint.files]) + 1
    for node, names in needs.items():
        for name in sorted(names):
            there = [n for n, files in checkpoint.files.items() if name in files and (n, name) not in bad]
            if not there:
                why = "; ".join(f"node {n}: {text}" for (n, other), text in sorted(bad.items()) if other == name)
                raise DamagedError(f"no node has {name}" + (f" as it was written ({why})" if why else ""))
            chosen[node, name] = min(there, key=lambda n: (n - node) % count)
    return chosen
