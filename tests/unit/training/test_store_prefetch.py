"""Runs that read their tokens from an object store on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec.config
import numpy as np
import pytest
import s3fs

from megatron.checkpoint import object_store
from megatron.checkpoint.format import Manifest
from megatron.config.data_store import DataStoreOptions
from megatron.data import block_prefetch, token_store
from megatron.data.block_prefetch import BlockPrefetch
from megatron.data.prefixes import use_data_store
from megatron.training.components.store_prefetch import StorePrefetch
from megatron.training.stop import NO_DATA
from megatron.training.trainer import Trainer
from tests.kit.runs import Outcome, before_step, differences, records, start, steps, tiny_run
from tests.unit.checkpoint.s3_server import Store, serving, settings
from tests.unit.data.pairs import write

URI = "s3://bucket/data/words"
BLOCK = 1 << 18


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 80 blocks, more than a short run reads."""
    draw = np.random.default_rng(1)
    return write(tmp_path_factory.mktemp("pair") / "words", draw.integers(0, 31, (80, BLOCK // 2)))


@pytest.fixture
def store(pair: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(object_store, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(block_prefetch, "FAILED_SECONDS", 0.01)
    with serving() as (address, found):
        monkeypatch.setitem(fsspec.config.conf, "s3", settings(address))
        found.objects = {f"bucket/data/words.{end}": pair.with_suffix(f".{end}").read_bytes() for end in ("bin", "idx")}
        yield found


def run(folder: Path, flags: str, cache: str = "", blocks: int = 64) -> Outcome:
    """Train on the local or the remote pair."""
    token_store.token_store(DataStoreOptions())  # forgets the store that a run before has opened
    use_data_store(DataStoreOptions(), [])
    flags = f"--set data.mock_data=false --split 1 --eval-iters 0 {flags}"
    if cache:
        flags += (
            f" --data-store-cache {cache} --data-store-block-bytes {BLOCK} --data-store-cache-bytes {BLOCK * blocks}"
        )
    return start(tiny_run(folder, flags))


def test_a_run_from_a_store_is_that_from_the_disk(pair: Path, store: Store, tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert run(a, f"--data-path {pair} --save {a} --save-interval 6").status == 0
    faults = iter(["503"] * 4)  # fewer than attempts: threads' requests may be counted so that one gets all
    store.fault = lambda request: next(faults, None) if request.number % 7 == 6 else None
    remote = run(b, f"--data-path {URI} --save {b} --exit-interval 3", str(tmp_path / "cache"))
    assert remote.status == 0, remote.err
    again = run(b, f"--data-path {URI} --save {b}", str(tmp_path / "cache"))
    assert again.status == 0, again.err
    assert steps(a) == steps(b)
    assert differences(a / "iter_0000006", b / "iter_0000006") == ["data"]  # the name of the source
    one, other = (Manifest.open(folder / "iter_0000006").state["data"] for folder in (a, b))
    assert (one["digest"], one["fingerprints"]) == (other["digest"], other["fingerprints"])
    store.fault = lambda request: None
    before = len(store.requests)
    assert run(c, f"--data-path {URI}", str(tmp_path / "cache")).status == 0
    assert [request.kind for request in store.requests[before:]] == ["List"]  # everything is cached
    assert steps(a) == steps(c)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("fetch-", "plan-"))]


def fetches(trainer: Trainer) -> BlockPrefetch:
    return next(each.fetches for each in trainer.components if isinstance(each, StorePrefetch))


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_blocks_are_fetched_before_they_are_read(pair: Path, store: Store, tmp_path: Path) -> None:
    """All of a short run with evaluations, before its first step."""

    def wait(trainer: Trainer) -> None:
        wait_for(lambda: fetches(trainer).done)
        store.fault = lambda request: "403"

    cut = "--split 9,1 --eval-iters 2 --eval-interval 4"
    with before_step(1, wait):
        remote = run(tmp_path / "a", f"--data-path {URI} {cut}", str(tmp_path / "cache"), blocks=256)
    assert remote.status == 0, remote.err
    assert len(records(tmp_path / "a", "lm loss validation")) == 2


def test_a_store_that_dies_stops_the_run_before_the_step_that_needs_it(
    pair: Path, store: Store, tmp_path: Path
) -> None:
    """With a checkpoint of the step before; a later start goes on to the bit.

    The cache holds some steps: of one that holds a single step, the next one is not asked for in time.
    """
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(a, f"--data-path {pair} --train-iters 30").status == 0

    def die(trainer: Trainer) -> None:
        wait_for(lambda: fetches(trainer).done)
        store.fault = lambda request: "503"
        fetches(trainer).move()

    def settle(trainer: Trainer) -> None:
        wait_for(lambda: fetches(trainer).done or fetches(trainer).errors)

    flags = f"--data-path {URI} --save {b} --train-iters 30"
    with ExitStack() as events:
        events.enter_context(before_step(2, die))
        for step in range(3, 30):
            events.enter_context(before_step(step, settle))
        cut = run(b, flags, str(tmp_path / "cache"))
    assert cut.status == NO_DATA, cut.err
    assert "this step is the last one, because the data of the next one cannot be read: s3://" in cut.err
    taken = len(steps(b))
    assert 2 < taken < 30
    assert f"saved {b}/iter_{taken:07d}" in cut.out
    store.fault = lambda request: None
    assert run(b, flags, str(tmp_path / "cache")).status == 0
    assert steps(a) == steps(b)
