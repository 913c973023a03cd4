"""flash-attn behind its double, and where documents begin. Not run against flash-attn or cuDNN here."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.kernels.attention import ATTENTION, AttentionMask
from megatron.kernels.operation import check_kernel
from tests.unit.kernels.doubles import FlashAttention, install

CPU = torch.device("cpu")


def installed(monkeypatch: pytest.MonkeyPatch, double: FlashAttention) -> FlashAttention:
    install(
        monkeypatch,
        "flash_attn",
        flash_attn_func=double.flash_attn_func,
        flash_attn_varlen_func=double.flash_attn_varlen_func,
    )
    return double


def test_flash_attn_agrees_on_all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, windows, documents and both, with grouped heads: the trials of every attention."""
    double = installed(monkeypatch, FlashAttention())
    assert check_kernel(ATTENTION, ATTENTION.candidates["flash_attn"].make(), CPU, torch.float32) is None
    assert double.calls == [("plain", False), ("plain", False), ("documents", False), ("documents", False)]


def test_flash_attn_gets_the_deterministic_option(monkeypatch: pytest.MonkeyPatch) -> None:
    double = installed(monkeypatch, FlashAttention())
    q, k, v = torch.randn(3, 4, 2, 2, 8)
    torch.use_deterministic_algorithms(True)
    try:
        ATTENTION.candidates["flash_attn"].make()(q, k, v, AttentionMask.of_sequence(4, CPU))
    finally:
        torch.use_deterministic_algorithms(False)
    assert double.calls == [("plain", True)]


def test_a_cache_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than queries: the mask knows which belong together."""
    double = installed(monkeypatch, FlashAttention())
    q, (k, v) = torch.randn(1, 2, 2, 8), torch.randn(2, 5, 2, 2, 8)
    out = ATTENTION.candidates["flash_attn"].make()(q, k, v, AttentionMask.of_sequence(5, CPU, first_query=4))
    assert (out.shape, double.calls) == (q.shape, [])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_boundaries_are_where_documents_begin(documents: list[list[int]]) -> None:
    runs = [len(list(run)) for row in documents for _, run in itertools.groupby(row)]
    found = AttentionMask.of_sequence(6, CPU, documents=torch.tensor(documents)).boundaries
    assert found.tolist() == [0, *itertools.accumulate(runs)]
    assert found.dtype == torch.int32


def test_boundaries_that_are_known_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would wait for the device."""
    double = installed(monkeypatch, FlashAttention())
    documents, known = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = torch.randn(3, 5, 1, 2, 8)
    attend = ATTENTION.candidates["flash_attn"].make()
    expected = attend(q, k, v, AttentionMask.of_sequence(5, CPU, documents=documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "nonzero", None)
        assert torch.equal(
            attend(q, k, v, AttentionMask.of_sequence(5, CPU, documents=documents, known_boundaries=known)), expected
        )
    assert double.calls == [("documents", False)] * 2


def test_a_mask_is_made_once_and_only_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, FlashAttention())
    mask = AttentionMask.of_sequence(5, CPU, window=2)
    q, k, v = torch.randn(3, 5, 2, 2, 8)
    ATTENTION.candidates["flash_attn"].make()(q, k, v, mask)
    assert "dense" not in vars(mask)
    ATTENTION.candidates["torch"].make()(q, k, v, mask)
    assert mask.dense is vars(mask)["dense"]


@pytest.mark.parametrize("documents", [None, torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])])
@pytest.mark.parametrize("window", [None, 3])
def test_any_part_of_a_sequence_has_its_part_of_the_mask(window: int | None, documents: torch.Tensor | None) -> None:
    """Queries and keys of context-parallel ranks, which hold two pieces of the sequence each."""
    whole = AttentionMask.of_sequence(8, CPU, window, documents)
    pieces = [(range(2), range(6, 8)), (range(2, 4), range(4, 6))]
    rows = [torch.tensor([i for piece in rank for i in piece]) for rank in pieces]
    for (queries, q), (keys, k) in itertools.product(zip(pieces, rows), repeat=2):
        parts = (None, None) if documents is None else (documents[:, q], documents[:, k])
        mask = AttentionMask(queries, keys, CPU, window, *parts)
        assert torch.equal(mask.dense, whole.dense[:, :, q][..., k])
        assert not mask.is_causal, "two pieces are not one triangle"


def test_ranks_that_hold_parts_of_the_queries_compute_the_whole() -> None:
    """With all keys gathered, each rank's call gives its rows: also through flash-attn, which leaves them to torch."""
    q, k, v = torch.randn(3, 8, 2, 2, 4, dtype=torch.float64)
    whole = AttentionMask.of_sequence(8, CPU, window=3)
    expected = ATTENTION.candidates["torch"].make()(q, k, v, whole)
    for queries in ((range(2), range(6, 8)), (range(2, 6),)):
        rows = torch.tensor([i for piece in queries for i in piece])
        mask = AttentionMask(queries, whole.keys, CPU, window=3)
        torch.testing.assert_close(ATTENTION.candidates["torch"].make()(q[rows], k, v, mask), expected[rows])


def test_gpu_kernels_are_missing_here() -> None:
    for name in ("flash_attn", "cudnn"):
        missing = ATTENTION.candidates[name].missing
        assert "on a GPU" in str(missing(CPU, torch.bfloat16))
        assert "on a GPU" in str(missing(torch.device("cuda"), torch.float32))
    assert "cannot be imported" in str(ATTENTION.candidates["flash_attn"].missing(torch.device("cuda"), torch.bfloat16))
