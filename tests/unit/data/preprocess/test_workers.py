"""Work in other processes: results, their order, the work in flight, and the end of the processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import active_children
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from megatron.data.errors import DataError, StoppedError, stop_on_signals
from megatron.data.preprocess.corpus import Block, LineBlock
from megatron.data.preprocess.encode import EncodedBlock, EncoderPool, PreprocessOptions
from megatron.data.preprocess.workers import REQUESTS_PER_WORKER, Report, run_in_subprocess
from megatron.data.tokenizers.huggingface import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions
from tests.kit.processes import wait_until_gone

WORKERS = 2
BYTES = PreprocessOptions((), ("text",), "", TokenizerOptions("ByteTokenizer"), workers=WORKERS)
IDS = replace(BYTES, tokenizer_options=TokenizerOptions("NullTokenizer", vocab_size=10), workers=1)


def block(number: int, size: int = 50_000) -> LineBlock:
    content = b'{"text": "%08d%s"}\n' % (number, b"x" * size)
    return LineBlock(Path("x.jsonl"), content, len(content), first=True, last=True)


def workers() -> list[SpawnProcess]:
    """Those of this process's children that encode."""
    return [child for child in active_children() if isinstance(child, SpawnProcess)]


@contextmanager
def encoded(
    blocks: Iterable[Block], fingerprint: str = ByteTokenizer().fingerprint
) -> Iterator[Iterator[tuple[Block, EncodedBlock]]]:
    """The blocks as two workers encode them."""
    with closing(EncoderPool(BYTES, fingerprint)) as pool, closing(pool.encoded(blocks, "numpy")) as results:
        yield results


def test_order_and_back_pressure() -> None:
    """A slow reader gets the blocks in order, only so many are taken ahead, and signals are not for workers."""
    taken = []

    def blocks() -> Iterator[LineBlock]:
        for number in range(60):
            taken.append(number)
            yield block(number, 200_000 if number % 3 == 0 else 10)

    with encoded(blocks()) as results:
        for number, (_, done) in enumerate(results):
            assert bytes(done.columns[0].ids[:8].astype("u1")) == b"%08d" % number
            assert len(taken) - number <= REQUESTS_PER_WORKER * WORKERS + 1
            for worker in workers() if number == 5 else ():
                for signal_number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(worker.pid or 0, signal_number)
    assert number == 59
    assert not workers()


@pytest.mark.parametrize("moment", [0.0, 0.002, 0.01])
def test_a_dead_worker_is_reported_and_the_others_end(moment: float) -> None:
    """Also if it dies while it sends a result, of which this process has the beginning only."""
    with encoded(block(number, 4_000_000) for number in range(1000)) as results:
        next(results)
        started = workers()
        assert len(started) == WORKERS
        time.sleep(moment)
        started[0].kill()
        sentence = "a worker process was killed by SIGKILL; it may have run out of memory\n  fix: --workers 1"
        with pytest.raises(DataError, match=sentence):
            for _ in results:
                pass
    assert not workers()


def test_worker_exceptions_are_raised_by_the_parent() -> None:
    with (
        encoded(map(block, range(9)), "other") as results,
        pytest.raises(DataError, match="the files of the tokenizer have changed"),
    ):
        next(results)


def test_a_check_ends_the_wait_for_a_long_document() -> None:
    """The workers are busy for many seconds; what the check raises comes at once, and they end."""
    content = b'{"text": "%s"}' % (b"1 " * 20_000_000)
    long = LineBlock(Path("x.jsonl"), content, len(content), first=True, last=True)
    began = raised = time.monotonic()

    def check() -> None:
        nonlocal raised
        raised = time.monotonic()
        if raised > began + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), closing(EncoderPool(IDS, NullTokenizer(10).fingerprint)) as pool:
        list(pool.encoded([long], "numpy", check))
    assert time.monotonic() < raised + 4
    assert not workers()


# --- one function in a process ---


class Listener:
    """Keeps all messages."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, str]] = []

    def set_stage(self, stage: str) -> None:
        self.reported.append(("stage", stage))

    def message(self, text: str) -> None:
        self.reported.append(("message", text))

    def tick(self) -> None: ...


def work(plan: str, report: Report) -> str:
    """Run the part of the other process."""
    report("stage", "a stage")
    report("message", "a sentence")
    if plan == "bad":
        raise DataError("bad data", "mend them")
    if plan == "gone":
        raise FileNotFoundError(2, "No such file", "x")
    if plan == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.startswith("/"):
        Path(plan).write_text(str(os.getpid()))
        time.sleep(60)
    return f"{plan} done"


def test_a_subprocess_passes_on_results_reports_and_exceptions() -> None:
    listener = Listener()
    assert run_in_subprocess(work, "work", listener) == "work done"
    assert listener.reported == [("stage", "a stage"), ("message", "a sentence")]
    with pytest.raises(DataError, match="bad data\n  fix: mend them") as bad:
        run_in_subprocess(work, "bad", Listener())
    assert (bad.value.seen, bad.value.fixes) == ("bad data", ("mend them",))
    with pytest.raises(FileNotFoundError) as gone:
        run_in_subprocess(work, "gone", Listener())
    assert gone.value.filename == "x"
    with pytest.raises(DataError, match="a worker process was killed by SIGKILL; it may have run out of memory"):
        run_in_subprocess(work, "killed", Listener())


def test_it_ends_with_the_call_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "pid"

    class Until(Listener):
        def tick(self) -> None:
            if path.exists() and path.read_text():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_subprocess(work, str(path), Until())
    wait_until_gone([int(path.read_text())])


def test_a_signal_during_the_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start = SpawnProcess.start

    def interrupted(process: SpawnProcess) -> None:
        start(process)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(StoppedError, match="SIGTERM"), stop_on_signals():
        run_in_subprocess(work, "work", Listener())
    assert not workers()
