"""How many requests the store gets when all ranks of a large run notice a stall at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.distributed.places import MAX_ROWS, PLACE, RING, STEP, PeerPlace, ProcessPlace
from megatron.training import failure_report, stall_watch
from megatron.training.failure_report import StalledError, record_failure
from megatron.training.incidents import read_incidents
from megatron.training.stall_watch import REQUEST_KEY, StallWatch, publish_place, read_places
from megatron.training.stalls import Stall

RANKS = 120


class SimulatedRanks:
    """Ranks on machines of their own, one after the other in this process, and the store that they share."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, behind: int) -> None:
        self.patch, self.texts, self.requests, self.askers = patch, dict[str, str](), Counter[str](), 0
        for name in ("publish_text", "read_texts", "add_to_count"):
            patch.setattr(stall_watch, name, getattr(self, name))
        self.places, self.watches = list[ProcessPlace](), list[StallWatch]()
        for rank in range(count):
            place = ProcessPlace()
            place.timeout, place.hosts = 0.01, [(f"node{other}", 0) for other in range(count)]
            place.slots[STEP] = 3
            row = place.new_row("world", range(count))
            for _ in range(2 if rank == behind else 3):
                place.call(row, "all-reduce", "world", "torch.float32", 7)
            self.places.append(place)
            patch.setattr(stall_watch, "PLACE", place)
            self.watches.append(StallWatch(SimpleNamespace(rank=rank, size=count, uses_nccl=True)))  # type: ignore[arg-type]

    def act_as(self, rank: int) -> StallWatch:
        self.patch.setattr(stall_watch, "PLACE", self.places[rank])
        return self.watches[rank]

    def publish_text(self, name: str, text: str) -> None:
        self.requests["set"] += 1
        self.texts[name] = text
        if name == REQUEST_KEY:  # the watchdogs of the others see it
            before = stall_watch.PLACE
            for rank, place in enumerate(self.places):
                if place is not before:
                    self.act_as(rank).answer()
            self.patch.setattr(stall_watch, "PLACE", before)

    def read_texts(self, names: Sequence[str]) -> dict[str, str]:
        self.requests["get"] += len(names)
        return {name: self.texts[name] for name in names if name in self.texts}

    def add_to_count(self, name: str) -> int:
        self.requests["add"] += 1
        self.askers += 1
        return self.askers


def test_one_rank_of_many_collects_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimulatedRanks(monkeypatch, RANKS, behind=5)
    assert not ranks.requests  # a rank publishes its place when another one asks for it
    found = [ranks.act_as(rank).find() for rank in range(RANKS)]
    first, *others = found
    assert first is not None
    assert (first.culprits, len(first.places)) == ((5,), RANKS)
    assert not any(others)
    assert ranks.requests == {"add": RANKS, "set": RANKS, "get": RANKS - 1}
    for rank in range(RANKS):
        ranks.act_as(rank).close(failed=True)
    assert ranks.requests["set"] == RANKS  # a rank that fails publishes nothing either, unless it is asked


def test_the_record_of_a_rank_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, str] = {}
    monkeypatch.setattr(stall_watch, "publish_text", store.__setitem__)
    monkeypatch.setattr(stall_watch, "read_texts", lambda names: {name: store[name] for name in names if name in store})
    place = ProcessPlace()
    for _ in range(MAX_ROWS):
        row = place.new_row("dp", range(1024))
        for number in range(100):
            place.call(row, "all-reduce", "dp", "torch.float32", number)
    stacks = "".join(f'  File "{os.urandom(8).hex()}.py", line 7 in forward\n' for _ in range(4000))
    publish_place(3, {**place.read(), "stacks": stacks})
    assert sum(map(len, store.values())) < 100_000
    (found,) = read_places(range(9)).values()
    assert found["groups"][0]["ranks"] == [*range(1024)]
    assert stacks.endswith(found["stacks"])


def test_a_rank_that_has_written_no_stacks_writes_them_when_its_place_is_gathered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a short timeout gloo's error comes before the watchdog has noticed that there is no progress."""
    alone: Any = SimpleNamespace(rank=0, size=1)
    PLACE.reset()
    try:
        assert stall_watch.gather_places(alone)[0]["stacks"] == ""  # nowhere to write them
        PLACE.share()
        stall = Stall("rank 1: no answer", (1,), places=stall_watch.gather_places(alone))
    finally:
        PLACE.reset()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(PLACE, "hosts", [("node", 0), ("node", 1)])
    monkeypatch.setattr(failure_report, "is_distributed_initialized", lambda: True)
    record_failure(str(tmp_path), StalledError(stall), {})
    ((folder, _),) = read_incidents(tmp_path)
    assert "gather_places" in (folder / "rank_0.txt").read_text()
    assert f"the stacks of the ranks: {folder}\n" in capsys.readouterr().err
    bare = replace(stall, places={0: {**stall.places[0], "stacks": ""}})
    record_failure(str(tmp_path), StalledError(bare), {})
    assert len([*read_incidents(tmp_path)]) == 2
    assert "the stacks" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "ahead", "differs"),
    [
        ("torch.float32", 0, False),
        ("torch.float32", 9, False),  # not yet called by this one
        ("torch.int32", 0, True),
        ("torch.int32", 9, True),
        ("torch.int32", 2 * RING, False),  # the neighbour has no longer the last call of both
    ],
)
def test_a_neighbour_with_other_calls_is_noticed_without_decoding(dtype: str, ahead: int, differs: bool) -> None:
    PLACE.reset()
    neighbour = ProcessPlace()
    for place, kind, calls in ((PLACE, "torch.float32", 200), (neighbour, dtype, 200 + ahead)):
        row, other = place.new_row("dp", range(4)), place.new_row("tp", range(2))
        for number in range(calls):
            place.call(row, "all-reduce", "dp", kind if number == 150 else "torch.float32", 7)
            place.call(other, "all-reduce", "tp", "torch.float32", number)
    peer = PeerPlace(os.getpid(), *map(os.dup, neighbour.share()))
    found = peer.differs()
    neighbour.reset()
    PLACE.reset()
    assert found == differs
