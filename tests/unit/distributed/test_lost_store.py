"""What ranks ask of each other outside of collectives, when the process of rank 0 hangs that hosts the answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.distributed import launch

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


def test_it_answers(host: int) -> None:
    assert not launch.has_any_rank_failed()
    assert launch.register_failure()
    assert launch.has_any_rank_failed()
    assert not launch.register_failure()
    launch.publish_text("a", "said")
    assert launch.read_texts(["a", "b"]) == {"a": "said"}


def test_one_that_hangs_is_waited_for_once(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STORE_TIMEOUT_SECONDS", 0.5)
    os.kill(host, signal.SIGSTOP)
    assert launch.register_failure()
    assert launch.has_any_rank_failed()
    launch.publish_text("a", "said")
    assert launch.read_texts(["a"]) == {}
    assert len(launch._unanswered) == 1


def test_one_that_is_gone_has_no_answer(host: int) -> None:
    os.kill(host, signal.SIGKILL)
    assert launch.register_failure()
    assert launch.read_texts(["a"]) == {}
