"""Process groups, channels, collectives of one rank, counts of traffic, and a store that is lost."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import comm, launch
from megatron.distributed.comm import (
    CommMeter,
    Group,
    Pending,
    all_gather_objects,
    all_reduce,
    broadcast_object,
)
from megatron.distributed.launch import fake_process_group, world_group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import GroupInfo, Mesh, alternate_edges
from megatron.pipeline.communication import channels
from tests.kit.solo import one_rank_mesh

MOST_TURNS = 8


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 64])
@pytest.mark.parametrize("shape", ["a line", "a circle", "a V"])
def test_channels_open_in_a_few_turns_however_many_ranks_there_are(shape: str, ranks: int) -> None:
    """An edge opens once both of its ranks have opened their earlier edges."""
    there = [*range(ranks)]
    placement = {"a line": there, "a circle": there * 2, "a V": there + there[::-1]}[shape]
    edges, turn = channels(placement), Counter[int]()
    opened = alternate_edges(edges)
    assert sorted(opened) == sorted(edges)
    for edge in opened:
        turn.update(dict.fromkeys(edge, 0))
        turn[edge[0]] = turn[edge[1]] = 1 + max(turn[rank] for rank in edge)
    assert max(turn.values()) <= MOST_TURNS


def test_in_a_pretended_world_no_one_answers_and_no_one_disagrees() -> None:
    with fake_process_group(5, 1024):
        world = world_group(5, 1024)
        assert all_gather_objects("mine", world) == ["mine"] * 1024
        assert broadcast_object("mine", world) == "mine"
        assert all_reduce(torch.ones(3), world).tolist() == [1, 1, 1]
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_process_group(0, 2):
        raise ZeroDivisionError
    assert not dist.is_initialized(), "whatever happens inside"


def test_every_rank_has_the_same_list_of_groups_and_its_own() -> None:
    """Shards of the optimizer's state on pairs of ranks; key/value heads on pairs, too."""
    layout = Layout({"pp": 4, "dp": 4, "cp": 1, "tp": 4, "edp": 4, "ep": 1, "etp": 4})
    printed = set()
    for rank in range(0, 64, 9):
        with fake_process_group(rank, 64):
            mesh = Mesh(
                layout,
                rank,
                tp_ranks_per_kv_head=2,
                placement=(0, 1, 2, 3),
                edges=channels((0, 1, 2, 3)),
                optimizer_instances=2,
                separate_gather_groups=True,
            )
        printed.add(tuple(mesh.created))
        assert mesh.tp.ranks == tuple(range(rank - rank % 4, rank - rank % 4 + 4))
        assert len(mesh.embedding_group.ranks) == (2 if mesh.coordinate["pp"] in (0, 3) else 1)
    (created,) = printed
    assert set(created) == {
        GroupInfo("tp", 16, 4),
        GroupInfo("dp", 16, 4),
        GroupInfo("pp", 16, 4),
        GroupInfo("pp-tp", 4, 16),
        GroupInfo("world", 1, 64),
        GroupInfo("tp kv", 32, 2),
        GroupInfo("pp embedding", 16, 2),
        GroupInfo("pp up", 16, 4),
        GroupInfo("pp down", 16, 4),
        GroupInfo("dp shards", 32, 2),
        GroupInfo("dp copies", 32, 2),
        GroupInfo("dp gather", 32, 2),
    }


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 4, "dp": 4, "cp": 1, "tp": 4, "edp": 4, "ep": 1, "etp": 4},
        {"pp": 2, "dp": 4, "cp": 1, "tp": 2},
        {"pp": 2, "dp": 2, "cp": 4, "tp": 2},
    ],
)
def test_communicators_open_in_one_order_so_that_no_rank_waits_for_a_later_one(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """Replay the groups and channels that each rank opens: one opens once all of its ranks have reached it."""
    layout = Layout({"edp": sizes["dp"] * sizes["cp"] // 2, "ep": 2, "etp": sizes["tp"], **sizes})
    size, stages = layout.world_size, tuple(range(sizes["pp"]))
    opens: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(comm, "open_communicator", lambda ranks: opens[-1].append(ranks) if ranks else None)
    monkeypatch.setattr(comm, "new_group", lambda ranks, *_: tuple(ranks))
    monkeypatch.setattr(dist, "get_backend", lambda *_: "fake")
    for act in ("send", "recv"):
        monkeypatch.setattr(dist, act, lambda x, peer, group: opens[-1].append((peer, *group)))
    for rank in range(size):
        opens.append([])
        mesh = Mesh(layout, rank, None, 2, stages, channels(stages), 2, True, min(sizes["cp"], 2))
        edges = iter([e for e in alternate_edges(channels(stages)) if mesh.coordinate["pp"] in e])
        for i, ranks in enumerate(opens[-1]):
            if len(set(ranks)) < len(ranks):  # a message to a peer
                edge = next(edges)
                opens[-1][i] = (-1, *(layout.group_of(rank, ("pp",))[pp] for pp in edge))
    at = [0] * size
    while any(at[rank] < len(opens[rank]) for rank in range(size)):
        before = list(at)
        for rank in range(size):
            if at[rank] < len(opens[rank]):
                group = opens[rank][at[rank]]
                members = [r for r in group if r >= 0]
                if all(at[r] < len(opens[r]) and opens[r][at[r]] == group for r in members):
                    for r in members:
                        at[r] += 1
        assert at != before, "every rank waits"


class Work:
    """Fills the result only when it is waited for."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.waits = result, 0

    def wait(self) -> None:
        self.waits += 1
        self.result.fill_(7.0)


def test_pending_waits_once() -> None:
    result = torch.zeros(2)
    work: Any = Work(result)
    pending = Pending(result, [work])
    assert pending.wait() is result
    assert pending.wait().tolist() == [7.0, 7.0]
    assert work.waits == 1


@pytest.mark.parametrize("on_gpu", [True, False])
def test_sums_take_the_place_of_a_ranks_rows_on_gpus_alone(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    outs = []
    monkeypatch.setattr(comm, "_reduce_scatter", lambda out, x, **rest: outs.append(out))
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    x = torch.zeros(6, 2)
    comm.start_reduce_scatter(x, Group((0, 1, 2), 1), x[2:4])
    comm.start_reduce_scatter(x, Group((0, 1, 2), 1))
    assert [out.shape for out in outs] == [(2, 2), (2, 2)]
    assert [out.data_ptr() == x[2:4].data_ptr() for out in outs] == [on_gpu, False]


def test_mesh_alone_needs_no_torch_distributed() -> None:
    mesh = one_rank_mesh()
    assert not dist.is_initialized()
    assert all(g == Group((0,)) for g in (mesh.tp, mesh.dp_cp, mesh.world, mesh.tp_subgroup((0,))))
    assert comm.all_gather_objects("x", mesh.world) == ["x"]


def test_the_mesh_has_only_the_groups_it_created() -> None:
    with pytest.raises(KeyError):
        one_rank_mesh().group("dp", "tp")
    with pytest.raises(ValueError, match="no group was created"):
        one_rank_mesh().tp_subgroup((0, 1))


def test_bytes_add_up_until_they_are_taken_and_not_in_pauses() -> None:
    meter = CommMeter(["tp"])
    meter.sends("tp", "send", 1.0)
    with meter.paused():
        meter.sends("tp", "send", 10.0)
    meter.sends("tp", "send", 2.0)
    meter.add("tp", 0.5)
    assert meter.pop_bytes_sent() == {("tp", "send"): 3.0}
    assert meter.pop_bytes_sent() == {}
    assert meter.pop() == {"tp": 0.5}


PATIENCE = timedelta(seconds=30)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process that hosts the store, which this one asks as a rank does."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
        os.write(writer, str(store.port).encode())
        while True:
            time.sleep(1)
    port = int(os.read(reader, 10))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for thread in launch._unanswered:
        thread.join(10)
    launch._unanswered.clear()


def test_the_host_answers(host: int) -> None:
    assert not launch.has_any_rank_failed()
    assert launch.register_failure()
    assert launch.has_any_rank_failed()
    assert not launch.register_failure()
    launch.publish_text("a", "text")
    assert launch.read_texts(["a", "b"]) == {"a": "text"}


def test_one_that_hangs_is_waited_for_once(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STORE_TIMEOUT_SECONDS", 0.5)
    os.kill(host, signal.SIGSTOP)
    assert launch.register_failure()
    assert launch.has_any_rank_failed()
    launch.publish_text("a", "text")
    assert launch.read_texts(["a"]) == {}
    assert len(launch._unanswered) == 1


def test_one_that_is_gone_has_no_answer(host: int) -> None:
    os.kill(host, signal.SIGKILL)
    assert launch.register_failure()
    assert launch.read_texts(["a"]) == {}
