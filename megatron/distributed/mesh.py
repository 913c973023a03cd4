"""The rank grid with its process groups.

There is no global mesh: it is passed to the code that communicates. All groups are created up front, on all ranks in
the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.distributed import comm
from megatron.distributed.comm import BUBBLE, Channel, CommMeter, Group
from megatron.distributed.layout import AXES_IN_USE, DENSE_AXES, REDUCTION_GROUPS, Layout
from megatron.distributed.places import BACKGROUND, PLACE

CHANNEL_USES = "up", "down"
"""Uses of the groups whose pairs of ranks are channels."""

DEVICE_MESH_AXES = ("pp",), ("dp", "cp"), ("tp",)
"""Axes of the rank grid that are a dimension of torch's mesh."""

DENSE_EQUIVALENT: dict[str, tuple[str, ...]] = {"edp": ("dp", "cp"), "ep": (), "etp": ("tp",)}
"""Expert axes and the dense axes that they coincide with without expert parallelism."""


@dataclass(frozen=True)
class GroupInfo:
    """Groups of one size that partition the ranks."""

    # Axes along which their ranks differ, and their use where other groups have the same ranks.
    name: str
    # Number of groups.
    count: int
    # Ranks per group.
    size: int


class Mesh:
    """This rank's coordinate on the grid, and the groups it belongs to."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        timeout: timedelta | None = None,
        tp_ranks_per_kv_head: int = 1,
        placement: tuple[int, ...] = (0,),
        edges: Sequence[tuple[int, int]] = (),
        optimizer_instances: int | None = None,
        separate_gather_groups: bool = False,
        cp_head_ranks: int = 1,
    ) -> None:
        """Create every group. Collective over all ranks, which must create groups in the same order.

        Args:
            layout: the grid.
            rank: global rank of this process.
            timeout: of every group.
            tp_ranks_per_kv_head: tensor-parallel ranks that share one key/value head.
            placement: pipeline rank of every stage.
            edges: pairs (sender, receiver) of pipeline ranks for which to open channels.
            optimizer_instances: replicas of the optimizer state per reduction group; None for one per rank (no ZeRO).
            separate_gather_groups: gather weights through separate communicators, to overlap with other collectives.
            cp_head_ranks: neighbouring context-parallel ranks that exchange the sequence for heads.
        """
        self.layout, self.rank = layout, rank
        self.coordinate = layout.coordinate(rank)
        self._timeout = timeout
        # All groups of the world, in the order of creation.
        self.created: list[GroupInfo] = []
        self._handles: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
        self._rows: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}  # in the place of this process
        self._background: list[dist.ProcessGroup | None] = []
        partitions = {axes: layout.groups(axes) for axes in AXES_IN_USE}
        sizes = {self._name(axes): len(parts[0]) for axes, parts in partitions.items()}
        self.meter = CommMeter([name for name, size in sizes.items() if size > 1] + [BUBBLE] * bool(edges))
        self._groups = {axes: self._create(parts, self._name(axes)) for axes, parts in partitions.items()}
        kv_blocks = [
            g[i : i + tp_ranks_per_kv_head]
            for g in layout.groups(("tp",))
            for i in range(0, len(g), tp_ranks_per_kv_head)
        ]
        # All ranks; those with the same shards and other data (with CP); and tensor-parallel peers.
        self.world, self.dp_cp, self.tp = self.group(*DENSE_AXES), self.group("dp", "cp"), self.group("tp")
        # The ranks of this pipeline, in its order; time blocked on them counts as ``BUBBLE``.
        self.pipeline = replace(self.group("pp"), axes=BUBBLE)
        # Index of the part of the global batch that this rank reads, and number of parts.
        self.dp_rank, self.dp_size = self.coordinate["dp"], layout.sizes["dp"]
        self._kv_group = self._create(kv_blocks, "tp", label="kv")
        cp_groups = layout.groups(("cp",))
        shares = [g[i : i + cp_head_ranks] for g in cp_groups for i in range(0, len(g), cp_head_ranks)]
        rings = [g[i::cp_head_ranks] for g in cp_groups for i in range(cp_head_ranks)]
        # Context-parallel ranks that exchange heads, and those that exchange keys and values.
        self.cp_heads, self.cp_ring = self._create(shares, "cp", label="heads"), self._create(rings, "cp", "ring")
        # Pipeline rank of every stage.
        self.placement = placement
        # First and last stage of this pipeline, for their ranks; a middle stage's rank is alone.
        self.embedding_group = self._create(self._first_and_last_stages(), "pp", label="embedding")
        # This rank's channels to and from its pipeline neighbours, by the pipeline ranks of sender and receiver.
        self.channels = self._open_channels(edges)
        self._optimizer_groups = {
            axes: self._create_optimizer_groups(axes, optimizer_instances) for axes in REDUCTION_GROUPS
        }
        use = "gather" if separate_gather_groups else ""
        self._gathers = {
            axes: self._create(self._shard_partition(axes, optimizer_instances), self._name(axes), use)
            for axes in REDUCTION_GROUPS
        }

    def close(self) -> None:
        """Destroy this rank's groups, after the last collective of all ranks; the default group remains."""
        for handle in [*self._handles.values(), *self._background]:
            if handle is not None:
                dist.destroy_process_group(handle)

    def group(self, *axes: str) -> Group:
        """Return the ranks that differ from this one only along ``axes``.

        Raises:
            KeyError: when ``axes`` are not listed in ``AXES_IN_USE``.
        """
        return self._groups[axes]

    def optimizer_shard_group(self, *axes: str) -> Group:
        """Return the ranks of the reduction group ``axes`` that shard one replica of the optimizer state (ZeRO)."""
        return self._optimizer_groups[axes][0]

    def optimizer_replica_group(self, *axes: str) -> Group:
        """Return the ranks of the reduction group ``axes`` that hold the same shard of the optimizer state."""
        return self._optimizer_groups[axes][1]

    def weight_gather_group(self, *axes: str) -> Group:
        """Return the ranks of :meth:`optimizer_shard_group`, with a communicator that may be used during others."""
        return self._gathers[axes]

    def _shard_partition(self, axes: tuple[str, ...], optimizer_instances: int | None) -> list[tuple[int, ...]]:
        """Return blocks of neighbouring ranks that each shard one replica of the optimizer state."""
        groups = self.layout.groups(axes)
        size = 1 if optimizer_instances is None else len(groups[0]) // optimizer_instances
        return [ranks[i : i + size] for ranks in groups for i in range(0, len(ranks), size)]

    def _create_optimizer_groups(self, axes: tuple[str, ...], optimizer_instances: int | None) -> tuple[Group, Group]:
        """Create the groups of :meth:`optimizer_shard_group` and :meth:`optimizer_replica_group`."""
        blocks = self._shard_partition(axes, optimizer_instances)
        size = len(blocks[0])
        copies = [ranks[i::size] for ranks in self.layout.groups(axes) for i in range(size)]
        name = self._name(axes)
        return self._create(blocks, name, label="shards"), self._create(copies, name, label="copies")

    def device_mesh(self) -> DeviceMesh:
        """Return torch's mesh of all ranks, with the groups of this one.

        Its dimensions are those of ``pp``, ``dp_cp`` (replicas that sum their gradients) and ``tp`` that have several
        ranks. Slice it by name for the ranks that hold one parameter.

        Raises:
            ValueError: when there is one rank.
        """
        groups = [(axes, self.group(*axes)) for axes in DEVICE_MESH_AXES if self.group(*axes).size > 1]
        handles = [group.handle for _, group in groups if group.handle is not None]
        if not handles:
            raise ValueError("a single rank has no device mesh")
        ranks = torch.arange(self.layout.world_size).view([group.size for _, group in groups])
        names = tuple("_".join(axes) for axes, _ in groups)
        return DeviceMesh.from_group(handles, "cuda" if self.world.uses_nccl else "cpu", ranks, mesh_dim_names=names)

    def background_group(self) -> Group:
        """Create a gloo group of all ranks, for background threads. Collective."""
        ranks = self.world.ranks
        handle = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo") if len(ranks) > 1 else None
        self._background.append(handle)
        return Group(ranks, self.world.rank, handle, BACKGROUND, row=PLACE.new_row(BACKGROUND, ranks))

    def tp_subgroup(self, tp_ranks: tuple[int, ...]) -> Group:
        """Return the group of the tensor-parallel ranks ``tp_ranks``, which hold the same piece of a parameter.

        Raises:
            ValueError: when they are neither all TP ranks nor those of one key/value head.
        """
        if len(tp_ranks) == 1:
            return Group((self.rank,))
        for group in (self.tp, self._kv_group):
            if tuple(self.layout.coordinate(r)["tp"] for r in group.ranks) == tp_ranks:
                return group
        raise ValueError(f"no group was created for the tensor-parallel ranks {tp_ranks}")

    def _first_and_last_stages(self) -> list[tuple[int, ...]]:
        """Return a partition: first and last stage of each pipeline together, every other rank alone."""
        ends = {self.placement[0], self.placement[-1]}
        pipelines = self.layout.groups(("pp",))
        alone = [(ranks[i],) for ranks in pipelines for i in range(len(ranks)) if i not in ends]
        return [tuple(ranks[i] for i in sorted(ends)) for ranks in pipelines] + alone

    def _open_channels(self, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Channel]:
        """Open this rank's channels.

        NCCL creates a communicator for every pair of ranks of a group. Two groups, one for edges to higher stages and
        one for edges to lower stages, keep the two directions of a pair apart. All ranks open their channels in the
        same order with a first message: communicators that are created lazily, in the first step, could deadlock.
        (With ``device_id`` passed to ``init_process_group``, NCCL would serialise all messages of a group in one
        communicator.)
        """
        pipelines = self.layout.groups(("pp",))
        groups = {use: self._create(pipelines, "pp", use) for use in CHANNEL_USES} if edges else {}
        opened = {}
        for source, target in alternate_edges(edges):
            group = groups["up" if source < target else "down"]
            channel = Channel(group.ranks[source], group.ranks[target], group.handle, self.meter)
            if self.rank not in (channel.source, channel.target):
                continue
            row = PLACE.new_row("pp", (channel.source, channel.target), channel=True)
            opened[source, target] = replace(channel, row=row)
            message = torch.zeros(1, device="cuda" if dist.get_backend(channel.handle) == "nccl" else "cpu")
            if self.rank == channel.source:
                dist.send(message, channel.target, channel.handle)
            else:
                dist.recv(message, channel.source, channel.handle)
            if message.is_cuda:
                torch.cuda.synchronize()
        return opened

    def _name(self, axes: tuple[str, ...]) -> str:
        """Return the name of a group: ``world``, or its axes with more than one rank."""
        sizes = self.layout.sizes
        if len(axes) == len(DENSE_AXES):
            return "world"
        if sizes["ep"] == 1 and sizes["etp"] == sizes["tp"]:
            axes = tuple(same for axis in axes for same in DENSE_EQUIVALENT.get(axis, (axis,)))
        return "-".join(axis for axis in axes if sizes[axis] > 1)

    def _create(self, partition: list[tuple[int, ...]], name: str, use: str = "", label: str = "") -> Group:
        """Return this rank's group of a partition of all ranks, and open its communicator.

        All ranks create and open their groups in one order. So the first group that is not open yet has all its ranks
        waiting at it or on their way to it, and no group waits for a later one.

        Equal partitions with the same ``use`` share their communicators; ``label`` only names new ones.
        """
        mine = next(ranks for ranks in partition if self.rank in ranks)
        key = use, tuple(partition)
        if key not in self._handles:
            self._handles[key] = None
            sizes = Counter(len(ranks) for ranks in partition if len(ranks) > 1)
            description = f"{name} {label or use}".rstrip()
            self.created += [GroupInfo(description, count, size) for size, count in sizes.items()]
            for ranks in partition:
                handle = comm.new_group(ranks, self._timeout, description) if len(ranks) > 1 else None
                if ranks == mine:
                    self._handles[key] = handle
            if use not in CHANNEL_USES:
                comm.open_communicator(self._handles[key])
            self._rows[key] = PLACE.new_row(description, mine)
        return Group(mine, mine.index(self.rank), self._handles[key], name, self.meter, self._rows[key])


def alternate_edges(edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order a pipeline's edges with every other pair of neighbours first.

    In ascending order each pair would wait for the one before, and opening channels would take time linear in ranks.
    """
    return sorted(edges, key=lambda edge: (min(edge) % 2, edge))
