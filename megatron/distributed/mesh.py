"""The rank grid with its process groups.

There is no global mesh: it is passed to the code that communicates. All groups are created up front, on all ranks in
the same order. The functions below join and leave torch.distributed, and use its store to report failures.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.distributed.comm import BUBBLE, FAKE_BACKEND, Channel, CommMeter, Group
from megatron.distributed.layout import DENSE_AXES, Layout
from megatron.pipeline.communication import channels

T = TypeVar("T")

AXES_IN_USE: tuple[tuple[str, ...], ...] = (
    ("tp",),
    ("dp", "cp"),
    ("pp",),
    ("pp", "tp"),
    ("pp", "dp", "cp", "tp"),
    ("edp",),
    ("ep", "etp"),
    ("etp",),
)
"""Axes of every group that training uses, in the order of creation."""

REDUCTION_GROUPS: tuple[tuple[str, ...], ...] = (("dp", "cp"), ("edp",))
"""Groups over which gradients are summed: of dense parameters, and of experts."""

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
        optimizer_instances: int | None = None,
        separate_gather_groups: bool = False,
    ) -> None:
        """Create every group. Collective over all ranks, which must create groups in the same order.

        Args:
            layout: the grid.
            rank: global rank of this process.
            timeout: of every group.
            tp_ranks_per_kv_head: tensor-parallel ranks that share one key/value head.
            placement: pipeline rank of every stage.
            optimizer_instances: replicas of the optimizer state per reduction group; None for one per rank (no ZeRO).
            separate_gather_groups: gather weights through separate communicators, to overlap with other collectives.

        """
        self.layout, self.rank = layout, rank
        self.coordinate = layout.coordinate(rank)
        self._timeout = timeout
        # All groups of the world, in the order of creation.
        self.created: list[GroupInfo] = []
        self._handles: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
        partitions = {axes: layout.groups(axes) for axes in AXES_IN_USE}
        sizes = {self._name(axes): len(parts[0]) for axes, parts in partitions.items()}
        edges = channels(placement)
        self.meter = CommMeter([name for name, size in sizes.items() if size > 1] + [BUBBLE] * bool(edges))
        self._groups = {axes: self._create(parts, self._name(axes)) for axes, parts in partitions.items()}
        kv_blocks = [
            g[i : i + tp_ranks_per_kv_head]
            for g in layout.groups(("tp",))
            for i in range(0, len(g), tp_ranks_per_kv_head)
        ]
        self._kv_group = self._create(kv_blocks, "tp", label="kv")
        # Pipeline rank of every stage.
        self.placement = placement
        # First and last stage of this pipeline, for their ranks; a middle stage's rank is alone.
        self.embedding_group = self._create(self._first_and_last_stages(), "pp", label="ends")
        # This rank's channels to and from its pipeline neighbours, by the pipeline ranks of sender and receiver.
        self.channels = self._open_channels(edges)
        self._optimizer_groups = {
            axes: self._create_optimizer_groups(axes, optimizer_instances) for axes in REDUCTION_GROUPS
        }
        use = "gathers" if separate_gather_groups else ""
        self._gathers = {
            axes: self._create(self._shard_partition(axes, optimizer_instances), self._name(axes), use)
            for axes in REDUCTION_GROUPS
        }

    def group(self, *axes: str) -> Group:
        """Return the ranks that differ from this one only along ``axes``.

        Raises:
            KeyError: when ``axes`` are not listed in ``AXES_IN_USE``.
        """
        return self._groups[axes]

    @property
    def tp(self) -> Group:
        """Tensor-parallel peers."""
        return self.group("tp")

    @property
    def dp_cp(self) -> Group:
        """Data-parallel peers (including CP): ranks with the same shards and other data."""
        return self.group("dp", "cp")

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

    @property
    def pipeline(self) -> Group:
        """The ranks of this pipeline, in its order; time blocked on them counts as ``BUBBLE``."""
        return replace(self.group("pp"), axes=BUBBLE)

    @property
    def dp_rank(self) -> int:
        """Index of the part of the global batch that this rank reads."""
        return self.coordinate["dp"]

    @property
    def dp_size(self) -> int:
        """Number of parts into which the global batch is divided."""
        return self.layout.sizes["dp"]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.group("pp", "dp", "cp", "tp")

    def background_group(self) -> Group:
        """Create a gloo group of all ranks, for background threads. Collective."""
        ranks = self.world.ranks
        handle = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo") if len(ranks) > 1 else None
        return Group(ranks, self.world.rank, handle)

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
        groups = {use: self._create(pipelines, "pp", use) for use in ("up", "down")} if edges else {}
        opened = {}
        for source, target in alternate_edges(edges):
            group = groups["up" if source < target else "down"]
            channel = Channel(group.ranks[source], group.ranks[target], group.handle, self.meter)
            if self.rank not in (channel.source, channel.target):
                continue
            opened[source, target] = channel
            message = torch.zeros(1, device="cuda" if dist.get_backend(channel.handle) == "nccl" else "cpu")
            if self.rank == channel.source:
                dist.send(message, channel.target, channel.handle)
            else:
                dist.recv(message, channel.source, channel.handle)
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
        """Return this rank's group of a partition of all ranks.

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
                handle = dist.new_group(list(ranks), timeout=self._timeout) if len(ranks) > 1 else None
                if ranks == mine:
                    self._handles[key] = handle
        return Group(mine, mine.index(self.rank), self._handles[key], name, self.meter)


def alternate_edges(edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order a pipeline's edges with every other pair of neighbours first.

    In ascending order each pair would wait for the one before, and opening channels would take time linear in ranks.
    """
    return sorted(edges, key=lambda edge: (min(edge) % 2, edge))


def init_distributed(backend: str | None, timeout: timedelta, device: torch.device) -> None:
    """Initialise torch.distributed; a no-op for a single process, or when it is already initialised.

    Args:
        backend: ``nccl`` or ``gloo``; None picks by the device.
        timeout: of the default group.
        device: where this rank computes.

    Raises:
        UserError: when the backend does not support the device, or the address of rank 0 is unknown.

    """
    launch = Launch.read(os.environ)
    if launch.world_size == 1 or dist.is_initialized():
        return
    problems = [*launch.problems()]
    if backend == "nccl" and device.type != "cuda":
        problems.append(Problem("E206", "the nccl backend cannot serve CPUs", ("--distributed-backend gloo",)))
    if problems:
        raise UserError(problems)
    os.environ.setdefault("MASTER_ADDR", str(launch.master))
    os.environ.setdefault("MASTER_PORT", "29500")
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(chosen, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Pretend to be one rank of a world without peers, in which a :class:`Mesh` can be built.

    Collectives return at once and leave their results unset: good for shapes and sizes, not for values.
    """
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    dist.init_process_group(FAKE_BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def world_group(rank: int, world_size: int) -> Group:
    """Return the group of all ranks, for collectives before there is a mesh."""
    handle = dist.group.WORLD if world_size > 1 else None
    return Group(tuple(range(world_size)), rank, handle)


def destroy_distributed() -> None:
    """Destroy the process group. Not to be called after an error: NCCL would wait for ranks that are gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


FAILED_KEY = "failed_ranks"
"""Store key that counts the calls of :func:`register_failure`."""


STORE_TIMEOUT_SECONDS = 3.0
"""Timeout of a request to the store."""

_unanswered: list[threading.Thread] = []
"""Threads whose requests timed out."""


def register_failure() -> bool:
    """Register a failure of this rank; return True if it is the first. True also when the store is unreachable."""
    return _query_store(lambda store: int(store.add(FAILED_KEY, 1)) == 1, default=True)


def has_any_rank_failed() -> bool:
    """Return True if any rank has registered a failure. True also when the store is unreachable."""
    return _query_store(lambda store: bool(store.check([FAILED_KEY])), default=dist.is_initialized())


def publish_text(name: str, text: str) -> None:
    """Write a text to the store for other ranks, outside of any collective. Lost when the store is unreachable."""
    _query_store(lambda store: store.set(name, text), default=None)


def read_texts(names: Sequence[str]) -> dict[str, str]:
    """Return the texts stored under ``names``, as far as they exist; empty when the store is unreachable."""
    return _query_store(
        lambda store: {name: store.get(name).decode() for name in names if store.check([name])}, default={}
    )


def _query_store(query: Callable[[dist.distributed_c10d.Store], T], default: T) -> T:
    """Return the store's answer, or ``default`` when its host (rank 0) does not answer in time.

    The store's client has no usable timeout, so a thread sends the request. After one timeout no more are sent.
    """
    if not dist.is_initialized() or any(thread.is_alive() for thread in _unanswered):
        return default
    answers: list[T] = []

    def fetch() -> None:
        with suppress(Exception):  # the process that hosts the store is gone
            answers.append(query(dist.distributed_c10d._get_default_store()))

    request = threading.Thread(target=fetch, name="store", daemon=True)
    request.start()
    request.join(STORE_TIMEOUT_SECONDS)
    if request.is_alive():
        _unanswered.append(request)
    return answers[0] if answers else default


def is_distributed_initialized() -> bool:
    """Return True if torch.distributed is initialised."""
    return dist.is_initialized()


GLOO_PEER_LOST = "gloo/transport", "timeout caused pair closure"
"""Fragments of gloo's messages about lost peers, which it raises as plain RuntimeErrors."""


def is_peer_lost(error: BaseException) -> bool:
    """Return True if torch.distributed raised ``error`` because a rank is gone or does not respond."""
    return isinstance(error, dist.DistError) or any(fragment in str(error) for fragment in GLOO_PEER_LOST)
