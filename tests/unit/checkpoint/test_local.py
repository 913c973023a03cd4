"""Checkpoints from the files of several nodes, and one node alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.folder import CheckpointFolder, is_local_checkpoint, node_folder
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest
from megatron.checkpoint.save import CheckpointExtras
from megatron.distributed.comm import Group
from megatron.training.local_checkpoints import (
    LocalCheckpoint,
    NodeCheckpoints,
    choose_sources,
    list_node_checkpoints,
    merge_node_checkpoints,
)
from tests.unit.checkpoint.samples import ALONE, all_of, files_of, save
from tests.unit.checkpoint.test_faults import content, is_whole

RUN = "runs/a"


def test_a_folder_is_a_nodes() -> None:
    assert node_folder("/disk/{node}/a", 3) == Path("/disk/3/a")
    assert node_folder("/disk/a", 3) == Path("/disk/a")
    for path, pattern, expected in [
        ("/disk/3/a/iter_0000001", "/disk/{node}/a", True),
        ("/disk/3/a/iter_0000001", "/disk//{node}/a/", True),
        ("/disk/x/a/iter_0000001", "/disk/{node}/a", False),
        ("/disk/3/a/b/iter_0000001", "/disk/{node}/a", False),
        ("/disk/3.a/iter_0000001", "/disk/3.a", True),
        ("/disk/3xa/iter_0000001", "/disk/3.a", False),
    ]:
        assert is_local_checkpoint(Path(path), pattern) == expected, path


def test_ranks_and_their_neighbours() -> None:
    def seen_by(rank: int, *node_of: int) -> NodeCheckpoints:
        group = Group(tuple(range(len(node_of))), rank)
        return NodeCheckpoints(Path(), node_of, group, group)

    even = [seen_by(rank, 0, 0, 1, 1, 2, 2) for rank in range(6)]
    assert [nodes.neighbour(1) for nodes in even] == [2, 3, 4, 5, 0, 1]  # rank + ranks per node
    assert [nodes.neighbour(-1) for nodes in even] == [4, 5, 0, 1, 2, 3]
    assert [nodes.is_leader for nodes in even] == [True, False] * 3
    cyclic = [seen_by(rank, 1, 0, 1, 0) for rank in range(4)]
    assert cyclic[0].ranks(0) == [1, 3]
    assert [nodes.neighbour(1) for nodes in cyclic] == [1, 0, 3, 2]


def held(node: int, iteration: int, mark: str, *files: str) -> LocalCheckpoint:
    return LocalCheckpoint(iteration, mark, RUN, {node: frozenset(files)}, ("a", "b", "c"))


def test_nodes_with_the_same_mark_have_parts_of_one_save() -> None:
    parts = [held(0, 3, "x", "a"), held(0, 2, "y", "a"), held(1, 3, "z", "b"), held(2, 3, "x", "c")]
    found = merge_node_checkpoints(parts)
    assert [(c.iteration, c.mark, sorted(c.files)) for c in found] == [(3, "x", [0, 2]), (3, "z", [1]), (2, "y", [0])]
    assert found[0].missing == ["b"]
    assert merge_node_checkpoints([]) == []


names = st.frozensets(st.sampled_from("abc"))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(names, min_size=1, max_size=4), st.lists(names, min_size=4, max_size=4), st.data())
def test_each_file_comes_from_the_nearest_good_copy(
    there: list[frozenset[str]], needed: list[frozenset[str]], data: st.DataObject
) -> None:
    """Against a walk around the ring, one node after the other."""
    count = len(there)
    copies = [(node, name) for node in range(count) for name in there[node]]
    bad = dict.fromkeys(data.draw(st.lists(st.sampled_from(copies))) if copies else [], "flipped")
    checkpoint = LocalCheckpoint(1, "x", RUN, dict(enumerate(there)))
    needs = dict(enumerate(needed[:count]))
    expected: dict[tuple[int, str], int] | None = {}
    for node in range(count):
        for name in needs[node]:
            ring = [(node + step) % count for step in range(count)]
            good = [n for n in ring if name in there[n] and (n, name) not in bad]
            if not good:
                expected = None
            elif expected is not None:
                expected[node, name] = good[0]
    if expected is None:
        with pytest.raises(DamagedCheckpointError, match="no node has"):
            choose_sources(checkpoint, needs, bad)
    else:
        assert choose_sources(checkpoint, needs, bad) == expected


def test_node_checkpoints_of_a_folder_are_listed_newest_first(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in (1, 2, 3, 4):
        save(runs.path(iteration), content(iteration))
    (runs.path(4) / MARKER).write_text("0" * 16)
    (files_of(tmp_path / "iter_0000003") / "tensors_00000.safetensors").unlink()
    runs.path(2).rename(tmp_path / "iter_0000002.tmp")  # whole, and lacks nothing but its name
    found, notes = list_node_checkpoints(tmp_path, 0)
    assert [(h.iteration, len(h.files[0])) for h in found] == [(3, 1), (2, 2), (1, 2)]
    assert found[0].mark == (tmp_path / "iter_0000003" / MARKER).read_text()
    (note,) = notes
    assert note.startswith(f"passed over {runs.path(4)}: {MANIFEST} is missing, or {MARKER} has flipped bytes")
    assert list_node_checkpoints(tmp_path / "none", 0) == ([], [])


def tier(folder: Path) -> NodeCheckpoints:
    return NodeCheckpoints(folder, (0,), ALONE, ALONE)


def step(folder: Path, iteration: int) -> None:
    """Save as a run does, and delete the one before."""
    extra = CheckpointExtras(
        {"iteration": iteration}, {"checkpoint": {"save": RUN}}, {"tokenizer/tokenizer.json": b"{}"}
    )
    tier(folder).save(iteration, all_of(content(iteration)), extra)
    assert tier(folder).delete_others(iteration) is None


def newest(folder: Path) -> int:
    """The step of the checkpoint that a start takes, which is whole."""
    (first, *_), _ = tier(folder).find()
    manifest, notes = tier(folder).fetch(first, all_of(content(0)))
    assert notes == []
    assert is_whole(manifest, first.iteration)
    return first.iteration


def test_one_node_alone(tmp_path: Path) -> None:
    for iteration in (1, 2):
        step(tmp_path, iteration)
        assert newest(tmp_path) == iteration
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000002"]
    Manifest.open(tmp_path / "iter_0000002")
