"""The rank grid with its process groups. Nothing reads a group from a global: the mesh is passed in."""

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

from megatron.config.launch import Launch
from megatron.config.problems import Problem, UserError
from megatron.parallel.comm import BUBBLE, PRETENDED, Channel, Group
from megatron.parallel.layout import DENSE_AXES, Layout
from megatron.parallel.traffic import Meter
from megatron.pipeline.comms import channels

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
"""Every group the trainer asks for, in the order in which all ranks create them."""

REDUCED: tuple[tuple[str, ...], ...] = (("dp", "cp"), ("edp",))
"""The groups over which gradients are summed: of what all ranks have, and of experts."""

AS_DENSE: dict[str, tuple[str, ...]] = {"edp": ("dp", "cp"), "ep": (), "etp": ("tp",)}
"""Axes of the grid of experts, and what they are where experts are not dealt out: as everything else lies."""


@dataclass(frozen=True)
class Groups:
    """Communicators that were made in one go: every rank is in one of the groups, or alone.

    Attributes:
        name: the axes along which their ranks differ, and what they are for where others have the same ranks.
        count: how many there are in the world.
        size: ranks in each.
    """

    name: str
    count: int
    size: int


class Mesh:
    """This rank's place on the grid and the groups it belongs to.

    Attributes:
        placement: pipeline rank of every stage.
        ends: the ranks of the first and of the last stage, for one of them; others are alone in theirs.
        channels: to and from this rank's neighbours in the pipeline, by the pipeline ranks of sender and receiver.
        created: all groups of the world, in the order of their creation.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        timeout: timedelta | None = None,
        kv_copies: int = 1,
        placement: tuple[int, ...] = (0,),
        instances: int | None = None,
        gathers: bool = False,
    ) -> None:
        """Create every group; collective over all ranks (creation in another order would hang).

        Args:
            layout: the grid.
            rank: global rank of this process.
            timeout: of every group.
            kv_copies: tensor-parallel ranks that share one key/value head.
            placement: pipeline rank of every stage.
            instances: copies of the optimizer's state in every group over which gradients are summed; None for as many
                as it has ranks.
            gathers: whether weights are gathered through communicators of their own.

        """
        self.layout, self.rank = layout, rank
        self.coordinate = layout.coordinate(rank)
        self._timeout = timeout
        self.created: list[Groups] = []
        self._created: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
        partitions = {axes: layout.groups(axes) for axes in AXES_IN_USE}
        named = {self._name(axes): len(parts[0]) for axes, parts in partitions.items()}
        edges = channels(placement)
        waits = [name for name, size in named.items() if size > 1] + [BUBBLE] * bool(edges)
        self.meter = Meter(waits)
        self._groups = {axes: self._create(parts, self._name(axes)) for axes, parts in partitions.items()}
        blocks = [g[i : i + kv_copies] for g in layout.groups(("tp",)) for i in range(0, len(g), kv_copies)]
        self._kv_sharers = self._create(blocks, "tp", label="kv")
        self.placement = placement
        self.ends = self._create(self._ends(), "pp", label="ends")
        self.channels = self._open(edges)
        self._shards = {axes: self._halves(axes, instances) for axes in REDUCED}
        use = "gathers" if gathers else ""
        self._gathers = {axes: self._create(self._blocks(axes, instances), self._name(axes), use) for axes in REDUCED}

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one only along ``axes``.

        Raises:
            KeyError: when that group is not listed in ``AXES_IN_USE``.
        """
        return self._groups[axes]

    @property
    def tp(self) -> Group:
        """Tensor-parallel peers."""
        return self.group("tp")

    @property
    def replicas(self) -> Group:
        """Ranks with the same shards and other data: gradients are summed over them."""
        return self.group("dp", "cp")

    def shards(self, *axes: str) -> Group:
        """Of the ranks along ``axes``, over which gradients are summed, those that cut the state among themselves."""
        return self._shards[axes][0]

    def copies(self, *axes: str) -> Group:
        """Of the ranks along ``axes``, over which gradients are summed, those that have the same part of the state."""
        return self._shards[axes][1]

    def gathers(self, *axes: str) -> Group:
        """The ranks of :meth:`shards`, to gather weights over while other sums are on their way."""
        return self._gathers[axes]

    def _blocks(self, axes: tuple[str, ...], instances: int | None) -> list[tuple[int, ...]]:
        """Neighbouring ranks of every group along ``axes`` that cut the state among themselves."""
        groups = self.layout.groups(axes)
        size = 1 if instances is None else len(groups[0]) // instances
        return [ranks[i : i + size] for ranks in groups for i in range(0, len(ranks), size)]

    def _halves(self, axes: tuple[str, ...], instances: int | None) -> tuple[Group, Group]:
        """This rank's block, and the ranks that have its place in the other blocks of their group."""
        blocks = self._blocks(axes, instances)
        size, groups = len(blocks[0]), self.layout.groups(axes)
        copies = [ranks[i::size] for ranks in groups for i in range(size)]
        name = self._name(axes)
        return self._create(blocks, name, label="shards"), self._create(copies, name, label="copies")

    @property
    def pipeline(self) -> Group:
        """The ranks of this pipeline, in its order; what they wait for each other counts as ``BUBBLE``."""
        return replace(self.group("pp"), axes=BUBBLE)

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads."""
        return self.coordinate["dp"]

    @property
    def data_size(self) -> int:
        """Into how many parts the global batch is dealt."""
        return self.layout.sizes["dp"]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.group("pp", "dp", "cp", "tp")

    def beside(self) -> Group:
        """All ranks, with a new communicator for what threads do beside the steps, on the CPU; collective."""
        ranks = self.world.ranks
        handle = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo") if len(ranks) > 1 else None
        return Group(ranks, self.world.rank, handle)

    def sharers(self, tp_ranks: tuple[int, ...]) -> Group:
        """The group of tensor-parallel coordinates that hold the same piece.

        Raises:
            ValueError: when they are neither all TP ranks nor the sharers of a key/value head.
        """
        if len(tp_ranks) == 1:
            return Group((self.rank,))
        for group in (self.tp, self._kv_sharers):
            if tuple(self.layout.coordinate(r)["tp"] for r in group.ranks) == tp_ranks:
                return group
        raise ValueError(f"no group was created for the tensor-parallel ranks {tp_ranks}")

    def _ends(self) -> list[tuple[int, ...]]:
        """The ranks of the first and the last stage of each pipeline together, every other rank alone."""
        ends = {self.placement[0], self.placement[-1]}
        pipelines = self.layout.groups(("pp",))
        alone = [(ranks[i],) for ranks in pipelines for i in range(len(ranks)) if i not in ends]
        return [tuple(ranks[i] for i in sorted(ends)) for ranks in pipelines] + alone

    def _open(self, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Channel]:
        """This rank's channels, of those that every pipeline has.

        In a group, every pair of ranks has a communicator of its own for what one sends to the other. Two groups, for
        edges that go up and down, keep the directions of a pair apart. All ranks open their channels in one order,
        with a first message: a communicator that was made with the first step's could wait for a partner that waits
        for another. (Were ``device_id`` given to ``init_process_group``, NCCL would send all messages of a group
        through one communicator, one after the other.)
        """
        pipelines = self.layout.groups(("pp",))
        lines = {use: self._create(pipelines, "pp", use) for use in ("up", "down")} if edges else {}
        opened = {}
        for source, target in in_turns(edges):
            line = lines["up" if source < target else "down"]
            channel = Channel(line.ranks[source], line.ranks[target], line.handle, self.meter)
            if self.rank in (channel.source, channel.target):
                opened[source, target] = channel
                self._greet(channel)
        return opened

    def _greet(self, channel: Channel) -> None:
        greeting = torch.zeros(1, device="cuda" if dist.get_backend(channel.handle) == "nccl" else "cpu")
        if self.rank == channel.source:
            dist.send(greeting, channel.target, channel.handle)
        else:
            dist.recv(greeting, channel.source, channel.handle)

    def _name(self, axes: tuple[str, ...]) -> str:
        """Of a group: ``world``, or its axes that have more than one rank."""
        sizes = self.layout.sizes
        if len(axes) == len(DENSE_AXES):
            return "world"
        if sizes["ep"] == 1 and sizes["etp"] == sizes["tp"]:
            axes = tuple(same for axis in axes for same in AS_DENSE.get(axis, (axis,)))
        return "-".join(axis for axis in axes if sizes[axis] > 1)

    def _create(self, partition: list[tuple[int, ...]], name: str, use: str = "", label: str = "") -> Group:
        """This rank's group of a partition of all ranks; equal partitions of one use share their communicators.

        ``label`` says what they are for, where their communicators are nobody else's.
        """
        mine = next(ranks for ranks in partition if self.rank in ranks)
        key = use, tuple(partition)
        if key not in self._created:
            self._created[key] = None
            sizes = Counter(len(ranks) for ranks in partition if len(ranks) > 1)
            what = f"{name} {label or use}".rstrip()
            self.created += [Groups(what, count, size) for size, count in sizes.items()]
            for ranks in partition:
                handle = dist.new_group(list(ranks), timeout=self._timeout) if len(ranks) > 1 else None
                if ranks == mine:
                    self._created[key] = handle
        return Group(mine, mine.index(self.rank), self._created[key], name, self.meter)


def in_turns(edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges of a pipeline with every other pair of neighbours first, so that no rank waits for a chain of others.

    In ascending order each pair would wait for the one before, and opening channels take as long as there are ranks.
    """
    return sorted(edges, key=lambda edge: (min(edge) % 2, edge))


def start_distributed(backend: str | None, timeout: timedelta, device: torch.device) -> None:
    """Join the other ranks; nothing to do for a process alone or a group that exists.

    Args:
        backend: ``nccl`` or ``gloo``; None picks by the device.
        timeout: of the default group.
        device: where this rank computes.

    Raises:
        UserError: when the backend cannot serve the device, or nothing says where rank 0 is.

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
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world of which no other is there, as a :class:`Mesh` of it takes them.

    Collectives return at once and leave results as they find them: good for shapes and sizes, not for values.

    Args:
        rank: to be.
        world_size: ranks of the world; one by itself needs no torch.distributed here either.

    """
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which makes the backend known, too

    dist.init_process_group(PRETENDED, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def everyone(rank: int, world_size: int) -> Group:
    """All ranks, as soon as they have joined: the group to agree in before there is a mesh."""
    handle = dist.group.WORLD if world_size > 1 else None
    return Group(tuple(range(world_size)), rank, handle)


def leave_distributed() -> None:
    """Undo :func:`start_distributed`. Not after an error: NCCL would wait here for ranks that no longer answer."""
    if dist.is_initialized():
        dist.destroy_process_group()


FAILED = "failed_ranks"
"""The word that counts the ranks that have asked :func:`first_to_fail`."""


ANSWER_SECONDS = 3.0
"""How long the host of the store may take to answer: one that is slower hangs."""

_unanswered: list[threading.Thread] = []
"""Those that wait for the host of the store, and longer than it may take."""


def first_to_fail() -> bool:
    """Whether no other rank has asked this before; True too when there is nobody left to ask."""
    return _answer(lambda store: int(store.add(FAILED, 1)) == 1, otherwise=True)


def has_anyone_failed() -> bool:
    """Whether a rank has asked :func:`first_to_fail`; True too when there is nobody left to ask."""
    return _answer(lambda store: bool(store.check([FAILED])), otherwise=dist.is_initialized())


def leave_word(name: str, text: str) -> None:
    """Leave a text for the other ranks to find, outside of any collective; lost when there is nobody left."""
    _answer(lambda store: store.set(name, text), otherwise=None)


def words_left(names: Sequence[str]) -> dict[str, str]:
    """What was left under ``names``, as far as it is there; nothing when there is nobody left to ask."""
    return _answer(
        lambda store: {name: store.get(name).decode() for name in names if store.check([name])}, otherwise={}
    )


def _answer(ask: Callable[[dist.distributed_c10d.Store], T], otherwise: T) -> T:
    """What ``ask`` gets from the store; ``otherwise`` when its host is gone, or gives no answer in time.

    The store's client waits for ever for rank 0, which may hang or be cut off, so that a thread does the asking; once
    it was waited for in vain, it is not waited for again.
    """
    if not dist.is_initialized() or any(thread.is_alive() for thread in _unanswered):
        return otherwise
    answers: list[T] = []

    def fetch() -> None:
        with suppress(Exception):  # the process that hosts the store is gone
            answers.append(ask(_words()))

    asking = threading.Thread(target=fetch, name="store", daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    if asking.is_alive():
        _unanswered.append(asking)
    return answers[0] if answers else otherwise


def _words() -> dist.distributed_c10d.Store:
    return dist.distributed_c10d._get_default_store()


def has_joined() -> bool:
    """Whether this rank has met the others."""
    return dist.is_initialized()


GLOO = "gloo/transport", "timeout caused pair closure"
"""What is said by gloo, which raises a plain RuntimeError: of its own wait, and of one that was ended by another."""


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error is how torch.distributed tells that a rank is gone or does not answer."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in GLOO)
