"""In which order channels are opened, and a world of one rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron.distributed.comm import all_gather_objects, all_reduce, broadcast_object
from megatron.distributed.launch import fake_process_group, world_group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import GroupInfo, Mesh, alternate_edges
from megatron.pipeline.communication import channels

MOST_TURNS = 8


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 64])
@pytest.mark.parametrize("shape", ["a line", "a circle", "a V"])
def test_channels_open_in_a_few_turns_however_many_ranks_there_are(shape: str, ranks: int) -> None:
    """An edge opens once both of its ranks have opened those of theirs that are before it."""
    there = [*range(ranks)]
    placement = {"a line": there, "a circle": there * 2, "a V": there + there[::-1]}[shape]
    edges, turn = channels(placement), Counter[int]()
    opened = alternate_edges(edges)
    assert sorted(opened) == sorted(edges)
    for edge in opened:
        turn.update(dict.fromkeys(edge, 0))
        turn[edge[0]] = turn[edge[1]] = 1 + max(turn[rank] for rank in edge)
    assert max(turn.values()) <= MOST_TURNS


def test_in_a_pretended_world_nobody_answers_and_nobody_disagrees() -> None:
    with fake_process_group(5, 1024):
        world = world_group(5, 1024)
        assert all_gather_objects("mine", world) == ["mine"] * 1024
        assert broadcast_object("mine", world) == "mine"
        assert all_reduce(torch.ones(3), world).tolist() == [1, 1, 1]
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_process_group(0, 2):
        raise ZeroDivisionError
    assert not dist.is_initialized(), "whatever happens inside"


def test_a_pretended_world_of_one_rank_needs_no_groups() -> None:
    with fake_process_group(0, 1):
        assert not dist.is_initialized()


def test_every_rank_knows_of_the_same_groups_and_is_in_its_own() -> None:
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
