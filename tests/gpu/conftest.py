"""Tests that need a GPU: ``python -m pytest tests/gpu -m gpu``.

``REHEARSE=1`` runs them in miniature on a CPU, those that make sense there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when cuBLAS starts


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU that stands in for it."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("REHEARSE") != "1":
        pytest.skip("there is no GPU here; REHEARSE=1 runs the tests in miniature on a CPU")
    return torch.device("cpu")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A real one."""
    if device.type != "cuda":
        pytest.skip("has no meaning on a CPU")
    return device


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As ``--deterministic`` has it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
