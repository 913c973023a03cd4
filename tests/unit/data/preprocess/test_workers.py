"""Processes that encode: the order, how much is on the way, and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.data.errors import DataError
from megatron.data.preprocess import encode
from megatron.data.preprocess.corpus import Block, LineBlock
from megatron.data.preprocess.encode import BLOCKS_PER_WORKER, EncodedBlock, EncodeOptions, EncoderPool
from megatron.data.tokenizers.huggingface import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions
from tests.processes import wait_until_gone

JOB = EncodeOptions(("text",), TokenizerOptions("ByteTokenizer"), ByteTokenizer().fingerprint, append_eod=False)
WORKERS = 2


@contextmanager
def encoded(blocks: Iterable[Block], job: EncodeOptions = JOB) -> Iterator[Iterator[tuple[Block, EncodedBlock]]]:
    """The blocks as two workers encode them."""
    with EncoderPool(job, WORKERS) as workers, closing(workers.encoded(blocks, "numpy")) as results:
        yield results


def block(number: int, size: int) -> LineBlock:
    content = b'{"text": "%08d%s"}\n' % (number, b"x" * size)
    return LineBlock(Path("x.jsonl"), content, len(content), first=True, last=True)


class Counted:
    """Blocks, and how many were taken."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self.taken = 0

    def __iter__(self) -> Iterator[LineBlock]:
        for number, size in enumerate(self._sizes):
            self.taken += 1
            yield block(number, size)


def children() -> set[int]:
    """Processes that this one started and that still run."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and "spawn_main" in (status.parent / "cmdline").read_text():
            found.add(int(status.parent.name))
    return found


def test_order_and_back_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader gets the blocks in order, and no more are taken than may be on the way, whatever they weigh."""
    monkeypatch.setattr(encode, "MAX_BYTES_PER_WORKER", 10_000)
    sizes = [200_000 if number % 3 == 0 else 10 for number in range(12)] + [10] * 60
    blocks = Counted(sizes)
    before = children()
    most = 0
    with encoded(blocks) as results:
        for number, (given, done) in enumerate(results):
            assert given == block(number, sizes[number])
            assert bytes(done.columns[0].ids[:8].astype("u1")) == b"%08d" % number
            waiting = sizes[number : blocks.taken]
            assert sum(waiting[:-1]) <= 10_000 * WORKERS or len(waiting) <= 2
            most = max(most, blocks.taken - number)
    assert number == len(sizes) - 1
    assert most == BLOCKS_PER_WORKER * WORKERS + 1
    wait_until_gone(children() - before)


def test_workers_end_when_nobody_listens_any_more() -> None:
    before = children()
    with encoded(Counted([50_000] * 100)) as results:
        next(results)
        started = children() - before
        assert 1 <= len(started) <= WORKERS
    wait_until_gone(started)


def test_ctrl_c_is_not_for_workers() -> None:
    before = children()
    with encoded(Counted([50_000] * 100)) as results:
        next(results)
        for worker in children() - before:
            os.kill(worker, signal.SIGINT)
        assert sum(1 for _ in results) == 99


def test_a_dead_worker_is_told_and_the_others_end() -> None:
    before = children()
    with encoded(Counted([50_000] * 1000)) as results:
        next(results)
        started = children() - before
        os.kill(min(started), signal.SIGKILL)
        with pytest.raises(
            DataError, match="a worker process was killed by SIGKILL; it may have run out of memory\n  fix: "
        ):
            for _ in results:
                pass
    wait_until_gone(started)


def test_what_a_worker_raises_is_raised_here() -> None:
    changed = replace(JOB, fingerprint="other")
    with (
        encoded(Counted([10] * 9), changed) as results,
        pytest.raises(DataError, match="the files of the tokenizer have changed"),
    ):
        next(results)


def test_who_is_at_work_is_not_waited_for() -> None:
    """Leaving takes no longer when a block takes long."""
    numbers = b'{"text": "%s"}\n' % (b"1 " * 8_000_000)
    slow = LineBlock(Path("x.jsonl"), numbers, len(numbers), first=True, last=True)
    job = replace(
        JOB, tokenizer_options=TokenizerOptions("NullTokenizer", vocab_size=9), fingerprint=NullTokenizer(9).fingerprint
    )
    before = children()
    with encoded([block(0, 10)._replace(content=b'{"text": "1"}\n'), slow, slow], job) as results:
        next(results)
        started, left = children() - before, time.monotonic()
    wait_until_gone(started)
    assert time.monotonic() - left < 2.0


def test_a_check_ends_the_wait_for_a_long_document() -> None:
    """The worker is busy for many seconds; what the check raises comes at once."""
    job = EncodeOptions(
        ("text",), TokenizerOptions("NullTokenizer", vocab_size=10), NullTokenizer(10).fingerprint, False
    )
    content = b'{"text": "%s"}' % (b"1 " * 20_000_000)
    long = LineBlock(Path("x.jsonl"), content, len(content), first=True, last=True)
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() > began + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), EncoderPool(job, 1) as busy:
        list(busy.encoded([long], "numpy", check))
    assert time.monotonic() < began + 4
