"""Kernels of attention behind doubles, and where documents begin. No fused kernel of a GPU runs here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.attention_pattern import CAUSAL, AttentionPattern
from megatron.config.compute import KERNEL_CANDIDATES
from megatron.kernels import attention, registry
from megatron.kernels.attention import sdpa
from megatron.kernels.attention_mask import PLAIN_SCORES, AttentionMask, AttentionScores
from megatron.kernels.operation import check_kernel, combine
from megatron.kernels.registry import OPERATIONS, select_kernels
from tests.unit.kernels.doubles import FlashAttention, install

CPU = torch.device("cpu")
ATTENTION = OPERATIONS["attention"]
KERNELS = [name for name in KERNEL_CANDIDATES["attention"] if name != "batch_invariant"]


FLASH = ("flash_attn", "varlen")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    """Both FlashAttention kernels, and a torch that can use every fused kernel."""
    double = FlashAttention()
    functions = {name: getattr(double, name) for name in ("flash_attn_func", "flash_attn_varlen_func")}
    install(monkeypatch, "flash_attn", **functions)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", double.aten)
    monkeypatch.setattr(attention, "can_use_flash_attention", lambda params: True)
    monkeypatch.setattr(attention, "can_use_cudnn_attention", lambda params: True)
    return double


def wrong(name: str) -> str | None:
    candidate = ATTENTION.candidates[name]
    return check_kernel(ATTENTION, candidate.make(), CPU, torch.float32, candidate.covers)


@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_agrees_on_all_masks(double: FlashAttention, name: str) -> None:
    """Causal, windows, documents, both, and cached keys, with grouped heads: the trials of every attention."""
    assert wrong(name) is None
    scaled = ["plain"] * (2 if name == "flash_attn" else 1)  # with a cap, too
    assert [kind for kind, _ in double.calls] == ["plain"] * 2 + ["documents"] * 2 + ["plain"] * 2 + scaled
    double.too_wide = 1
    assert "differs from torch" in str(wrong(name))


def test_flash_attn_gets_the_deterministic_option(double: FlashAttention) -> None:
    q, k, v = torch.randn(3, 4, 2, 2, 8)
    torch.use_deterministic_algorithms(True)
    try:
        ATTENTION.candidates["flash_attn"].make()(q, k, v, AttentionMask.of_sequence(4, CPU))
    finally:
        torch.use_deterministic_algorithms(False)
    assert double.calls == [("plain", True)]


def test_each_call_goes_to_the_first_kernel_that_covers_it(double: FlashAttention) -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    of, pieces, local = AttentionMask.of_sequence, (range(2), range(6, 8)), AttentionPattern(3)

    def taken(
        mask: AttentionMask,
        channels: int = 64,
        grad: bool = True,
        names: Sequence[str] = KERNELS,
        scores: AttentionScores = PLAIN_SCORES,
    ) -> str:
        queries, keys = (sum(map(len, ranges)) for ranges in (mask.queries, mask.keys))
        q, k = torch.empty(queries, 2, 4, channels), torch.empty(keys, 2, 2, channels)
        parts = [(lambda *inputs, name=name: name, ATTENTION.candidates[name].covers) for name in names]
        with torch.set_grad_enabled(grad):
            name: str = combine(parts)(q, k, k, mask, scores)
        return name

    plain = of(8, CPU)
    assert taken(plain) == taken(plain, channels=264) == "cudnn"
    assert taken(plain, grad=False) == "flash_attn", "no cuDNN plan for every length"
    whole = [of(8, CPU, pattern, documents) for pattern in (CAUSAL, local) for documents in (None, ids)][1:]
    for mask in (*whole, of(8, CPU, first_query=7), of(8, CPU, local, first_query=7)):
        assert taken(mask) == "flash_attn"
        assert taken(mask, names=("cudnn", "varlen", "torch")) == "varlen"
        assert taken(mask, channels=60, names=("cudnn", "varlen", "torch")) == "torch"
        assert taken(mask, channels=264) == "torch"
    assert taken(of(8, CPU, CAUSAL, ids, 7)) == "torch", "documents of cached tokens"
    for text in ("chunked:4", "dilated:2:2", "prefix:2", "local:2+first:1"):
        assert taken(of(8, CPU, AttentionPattern.parse(text))) == "flex"
    assert taken(AttentionMask(pieces, (range(8),), CPU)) == "torch", "a context-parallel rank's queries"
    assert taken(plain, scores=AttentionScores(scale=0.5)) == "cudnn"
    capped = AttentionScores(softcap=5.0)
    assert taken(plain, scores=capped) == "flash_attn"
    assert taken(plain, scores=capped, names=("cudnn", "varlen", "flex", "torch")) == "flex"
    assert taken(AttentionMask((range(4),), (range(8),), CPU)) == "torch", "keys after the queries"


def test_torch_takes_the_calls_that_a_chosen_kernel_does_not(
    double: FlashAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(ATTENTION.candidates["varlen"], missing=lambda device, dtype: None)
    operation = replace(ATTENTION, candidates=ATTENTION.candidates | {"varlen": here})
    monkeypatch.setitem(registry.OPERATIONS, "attention", operation)
    kernels, notes = select_kernels(("torch", "attention=varlen"), CPU, torch.float32)
    assert "varlen+torch (attention)" in notes[0]
    double.calls.clear()
    q, k, v = torch.randn(3, 8, 1, 2, 8)
    for queries in ((range(8),), (range(4), range(4, 8))):
        mask = AttentionMask(queries, (range(8),), CPU, AttentionPattern(3))
        torch.testing.assert_close(kernels.attention(q, k, v, mask), sdpa(q, k, v, mask))
        assert len(double.calls) == 1


@pytest.mark.parametrize(("capability", "first"), [((8, 0), "flash_attn"), ((9, 0), "cudnn"), ((12, 0), "flash_attn")])
def test_cudnn_comes_first_where_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, double: FlashAttention, capability: tuple[int, int], first: str
) -> None:
    candidates = {n: replace(c, missing=lambda device, dtype: None) for n, c in ATTENTION.candidates.items()}
    monkeypatch.setitem(registry.OPERATIONS, "attention", replace(ATTENTION, candidates=candidates))
    monkeypatch.setattr(registry, "check_kernel", lambda *inputs: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name, names in (("auto", first), ("cudnn", "cudnn")):
        (line,) = select_kernels(("torch", f"attention={name}"), torch.device("cuda"), torch.bfloat16)[1]
        assert f"; {names}+" in line


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_sdpa_never_picks_cudnn(monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None) -> None:
    """Its gradients under a mask may be NaN, and each new length costs a plan; other code keeps the choice."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    seen = []

    def observed(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(enabled())
        if error is not None:
            raise error
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", observed)
    q = torch.randn(8, 1, 2, 8)
    with nullcontext() if error is None else pytest.raises(error):
        sdpa(q, q, q, AttentionMask.of_sequence(8, CPU))
    assert (seen, enabled()) == ([False], True)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_boundaries_are_where_documents_begin(documents: list[list[int]]) -> None:
    runs = [len(list(run)) for row in documents for _, run in itertools.groupby(row)]
    found = AttentionMask.of_sequence(6, CPU, documents=torch.tensor(documents)).boundaries
    assert found.tolist() == [0, *itertools.accumulate(runs)]
    assert found.dtype == torch.int32


def test_boundaries_that_are_known_are_not_looked_for(double: FlashAttention) -> None:
    """A conversion would synchronize with the device."""
    documents, known = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = torch.randn(3, 5, 1, 2, 8)
    attend = ATTENTION.candidates["varlen"].make()
    expected = attend(q, k, v, AttentionMask.of_sequence(5, CPU, documents=documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "nonzero", None)
        mask = replace(AttentionMask.of_sequence(5, CPU, documents=documents), known_boundaries=known)
        assert torch.equal(attend(q, k, v, mask), expected)
    assert double.calls == [("documents", False)] * 2


def test_gpu_kernels_are_missing_here() -> None:
    for name in KERNELS[:-1]:
        missing = ATTENTION.candidates[name].missing
        assert "on a GPU" in str(missing(CPU, torch.bfloat16))
        assert "on a GPU" in str(missing(torch.device("cuda"), torch.float32))
    assert "cannot be imported" in str(ATTENTION.candidates["flash_attn"].missing(torch.device("cuda"), torch.bfloat16))
