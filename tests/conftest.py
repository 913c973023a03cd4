"""Settings every test runs under, and the fixtures all kinds of tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.pool import Pool

# Before torch is imported anywhere: threads that wait for a shared core cost more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests never look for models or data on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Nothing is garbage before the tests run, and looking for it takes half the time of collecting them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Let later modules not look through what one has left, such as a million nodes of syntax trees, for garbage."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests on several ranks; see ``tests/kit/pool.py``."""
    from tests.kit.pool import Pool  # imports torch, which most unit tests do without

    with Pool() as workers:
        yield workers
