"""Losses and gradients on the GPU against fp64 on the CPU: every format, every mask, every kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.compute import KERNEL_CANDIDATES
from megatron.distributed.context_parallel import chunks_of, chunks_of_all
from megatron.kernels.attention import sdpa
from megatron.kernels.attention_mask import AttentionMask
from megatron.kernels.block_attention import Use, block_attention
from megatron.kernels.fp8 import BLOCKS, Float8Recipe, fp8_operation
from megatron.kernels.grouped_fp8 import grouped_fp8_operation
from megatron.kernels.operation import check_kernel
from megatron.kernels.registry import OPERATIONS, select_kernels
from megatron.layers.context import DTYPES
from tests.gpu.models import batches_of, distance, gradients, trainer_of, twin_of

pytestmark = pytest.mark.gpu

FP8 = {f"fp8 {name}": fp8_operation(Float8Recipe("e4m3", name)) for name in BLOCKS}
FP8 |= {f"grouped_fp8 {name}": grouped_fp8_operation(Float8Recipe("e4m3", name)) for name in ("rowwise", "blockwise")}

LIMITS = {"fp32": (1e-6, 1e-5), "bf16": (5e-3, 3e-2), "fp16": (1e-3, 5e-3)}
"""Relative errors of the loss and of all gradients together: some units of rounding of each format."""


def compare(device: torch.device, dtype: str, flags: str = "", shape: str = "llama", documents: bool = False) -> None:
    trainer = trainer_of(device, f"{'' if dtype == 'fp32' else f'--{dtype} '}{flags}", shape)
    batches = batches_of(trainer, documents=documents)
    loss, found = gradients(trainer, batches)
    right_loss, right = gradients(twin_of(trainer), batches)
    far = distance(found, right)
    assert loss == pytest.approx(right_loss, rel=LIMITS[dtype][0])
    assert far["all"] < LIMITS[dtype][1]
    assert max(far.values()) < 10 * LIMITS[dtype][1], far


@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_every_format(device: torch.device, dtype: str, shape: str) -> None:
    compare(device, dtype, shape=shape)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("flags", ["", "--window-size 7", "--num-query-groups 4", "--num-query-groups 1"])
@pytest.mark.parametrize("documents", [False, True])
def test_whatever_attention_may_see(device: torch.device, dtype: str, flags: str, documents: bool) -> None:
    compare(device, dtype, flags, documents=documents)


@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize("words", ["torch", "compiled", "auto"])
def test_every_choice_of_kernels(device: torch.device, words: str, shape: str) -> None:
    if words == "compiled" and device.type == "cpu":
        pytest.skip("compiles for a minute on a CPU")
    compare(device, "bf16", f"--kernels {words} --z-loss-coeff 1e-3", shape)


def test_dropout_is_the_same_in_every_place(device: torch.device) -> None:
    """Its masks are integers, so the same elements are dropped on every device."""
    compare(device, "fp32", "--hidden-dropout 0.2 --attention-dropout 0.1")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("operation", "name"), [(o, n) for o in {**OPERATIONS, **FP8} for n in KERNEL_CANDIDATES[o.partition(" ")[0]][:-1]]
)
def test_every_kernel_that_is_here(device: torch.device, operation: str, name: str, dtype: str) -> None:
    checked = {**OPERATIONS, **FP8}[operation]
    candidate = checked.candidates[name]
    if reason := candidate.missing(device, DTYPES[dtype]):
        pytest.skip(reason)
    if device.type == "cpu":
        pytest.skip("compiles for long on a CPU; tests/unit/kernels does it there")
    assert check_kernel(checked, candidate.make(), device, DTYPES[dtype], candidate.covers) is None


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize("masked", ["window", "documents", "cached"])
def test_gradients_under_a_mask_with_very_negative_logits(device: torch.device, masked: str, choice: str) -> None:
    """cuDNN's are NaN on Hopper: any mask tensor, 64 tokens more than a multiple of 128 (pytorch#196678)."""
    attend = select_kernels(("torch", f"attention={choice}"), device, torch.bfloat16)[0].attention
    documents = torch.arange(704).div(300, rounding_mode="floor").expand(2, 704)
    pattern, first = AttentionPattern(100 if masked == "window" else None), (64 if masked == "cached" else 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 704, 2, 2, 64, generator=generator)
    q[..., 0], k[..., 0] = 10, -100  # all logits are about -125
    found = []
    for place, dtype in ((device, torch.bfloat16), (torch.device("cpu"), torch.float64)):
        parts = documents.to(place) if masked == "documents" else None
        mask = AttentionMask.of_sequence(704, place, pattern, parts, first)
        q1, k1, v1 = (t.bfloat16().to(place, dtype).requires_grad_() for t in (q[first:], k, v))
        y = (attend if dtype == torch.bfloat16 else sdpa)(q1, k1, v1, mask)
        found.append([g.double().cpu() for g in torch.autograd.grad(y.square().sum(), (q1, k1, v1))])
    for ours, right in zip(*found):
        assert ((ours - right).norm() / right.norm()).item() < 0.1


@pytest.mark.parametrize("name", KERNEL_CANDIDATES["attention"])
def test_gradients_of_long_grouped_attention(device: torch.device, name: str) -> None:
    """Every kernel in bf16 beside PyTorch's in fp32, which is neither cuDNN nor FlashAttention."""
    candidate, length = OPERATIONS["attention"].candidates[name], 8192 if device.type == "cuda" else 256
    if reason := candidate.missing(device, torch.bfloat16):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    shapes = (length, 1, 8, 128), (length, 1, 2, 128), (length, 1, 2, 128), (length, 1, 8, 128)
    q, k, v, dy = (torch.randn(s, generator=generator).bfloat16().to(device) for s in shapes)
    mask, found = AttentionMask.of_sequence(length, device), []
    for attend, dtype in ((candidate.make(), torch.bfloat16), (sdpa, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        found.append(torch.autograd.grad(attend(*leaves, mask), leaves, dy.to(dtype)))
    for ours, right in zip(*found):
        assert ((ours.float() - right).norm() / right.norm()).item() < 2e-2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_embedding_gradient_with_one_frequent_id(device: torch.device, dtype: str, shape: str) -> None:
    trainer = trainer_of(device, "" if dtype == "fp32" else "--bf16", shape)
    frequent = [replace(b, tokens=b.tokens.where(b.tokens % 4 == 1, 7)) for b in batches_of(trainer)]
    (_, found), (_, right) = gradients(trainer, frequent), gradients(twin_of(trainer), frequent)
    (name,) = (name for name in found if "word_embeddings" in name)
    assert distance(found, right)[name] < LIMITS[dtype][1]


def test_products_of_narrow_formats_are_collected_in_fp32(device: torch.device) -> None:
    """512 micro-batches of the same product: a sum in bf16 would stop growing after 256 of them."""
    x, dy = (torch.randn(2, 8, n, dtype=torch.bfloat16, device=device) for n in (64, 96))
    right = 512 * torch.einsum("sbi,sbo->oi", x.double(), dy.double())
    for name, candidate in OPERATIONS["linear"].candidates.items():
        if candidate.missing(device, torch.bfloat16) is None:
            target, multiply = torch.zeros(96, 64, device=device), candidate.make().weight_gradient
            for _ in range(512):
                multiply(target, x, dy)
            assert ((target - right).norm() / right.norm()).item() < 1e-5, name


PATTERNS = ("global", "local:100", "chunked:300", "dilated:40:3", "local:60+first:5", "prefix:200")
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}
"""Relative errors of attention and of its gradients, as norms of whole tensors."""


def attention_inputs(length: int, dtype: str, documents: bool) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys, values and the gradient of the output in fp64, rounded; and packed documents, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = (length, 1, 4, 64), (length, 1, 2, 64), (length, 1, 2, 64), (length, 1, 4, 64)
    tensors = [torch.randn(shape, generator=generator).to(DTYPES[dtype]).double() for shape in shapes]
    ends = torch.rand((1, length), generator=generator) < 8 / length
    return tensors, ends.long().cumsum(1) if documents else None


def dense_attention(tensors: Sequence[Tensor], mask: AttentionMask) -> list[Tensor]:
    """The output and the gradients of the dense mask, in fp64 on the CPU by autograd."""
    q, k, v, dy = tensors
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wide_k, wide_v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in leaves[1:])
    scores = torch.einsum("sbnd,tbnd->bnst", leaves[0], wide_k) * q.shape[3] ** -0.5
    y = torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(~mask.dense(), -torch.inf).softmax(-1), wide_v)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check_close(found: Sequence[Tensor], right: Sequence[Tensor], dtype: str) -> None:
    for ours, exact in zip(found, right, strict=True):
        assert ((ours.double().cpu() - exact).norm() / exact.norm()).item() < ROUNDING[dtype]


def pattern_masks(length: int, text: str, documents: Tensor | None, device: torch.device) -> list[AttentionMask]:
    """The mask of a whole sequence on a device, and on the CPU."""
    pattern, places = AttentionPattern.parse(text), (device, torch.device("cpu"))
    parts = (None if documents is None else documents.to(place) for place in places)
    return [AttentionMask.of_sequence(length, place, pattern, part) for place, part in zip(places, parts)]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
def test_attention_in_tiles(device: torch.device, text: str, documents: bool, dtype: str) -> None:
    """Queries of a context-parallel rank, which has two chunks, and all keys in the order of an all-gather."""
    length = 1024
    tensors, ids = attention_inputs(length, dtype, documents)
    queries, keys = chunks_of(length, 2, 0), chunks_of_all(length, 2)
    rows, columns = (torch.cat([torch.arange(r.start, r.stop) for r in ranges]) for ranges in (queries, keys))
    q, k, v, dy = (t[at] for t, at in zip(tensors, (rows, columns, columns, rows)))
    mask, on_cpu = (whole.part(queries, keys) for whole in pattern_masks(length, text, ids, device))
    leaves = [t.to(device, DTYPES[dtype]).requires_grad_() for t in (q, k, v)]
    y = block_attention(*leaves, mask)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy.to(device, DTYPES[dtype]))]
    check_close(found, dense_attention((q, k, v, dy), on_cpu), dtype)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("text", PATTERNS[2:])
def test_flex_attention(device: torch.device, text: str, documents: bool) -> None:
    candidate, length = OPERATIONS["attention"].candidates["flex"], 1000
    if reason := candidate.missing(device, torch.bfloat16):
        pytest.skip(reason)
    tensors, ids = attention_inputs(length, "bf16", documents)
    mask, on_cpu = pattern_masks(length, text, ids, device)
    attend = candidate.make()
    for _ in range(2):  # the second time with a mask of its own, as in another step
        compiled = counters["stats"]["unique_graphs"]
        leaves = [t.to(device, torch.bfloat16).requires_grad_() for t in tensors[:3]]
        y = attend(*leaves, replace(mask, cache={}))
        found = [y.detach(), *torch.autograd.grad(y, leaves, tensors[3].to(device, torch.bfloat16))]
        check_close(found, dense_attention(tensors, on_cpu), "bf16")
    assert counters["stats"]["unique_graphs"] == compiled, "nothing is compiled again"


@dataclass
class ServedKeyValues:
    """Keys and values of a ring of ranks in one process, and what they gain."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    # Of the keys and values of all ranks, in at least fp32.
    grads: Sequence[list[Tensor]]
    chunks: Sequence[tuple[range, ...]]

    def forward(self, k: Tensor, v: Tensor, mask: AttentionMask, use: Use) -> None:
        for other, positions in enumerate(self.chunks):
            if mask.sees(mask.queries, positions):
                use(self.keys[other], self.values[other], mask.with_keys(positions))

    def backward(self, k: Tensor, v: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        for other, positions in enumerate(self.chunks):
            if mask.sees(mask.queries, positions):
                gained = use(self.keys[other], self.values[other], mask.with_keys(positions))
                for total, grad in zip(self.grads[other], gained):
                    total += grad
        return torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
def test_a_ring_in_one_process(device: torch.device, text: str, documents: bool, ranks: int) -> None:
    """All ranks of context parallelism, one after the other, are the attention of the whole sequence."""
    length = 1024
    tensors, ids = attention_inputs(length, "bf16", documents)
    mask, on_cpu = pattern_masks(length, text, ids, device)
    chunks = [chunks_of(length, ranks, rank) for rank in range(ranks)]
    rows = [torch.cat([torch.arange(r.start, r.stop) for r in pair]) for pair in chunks]
    q, k, v, dy = ([t[at].to(device, torch.bfloat16) for at in rows] for t in tensors)
    grads = [[torch.zeros_like(t, dtype=torch.float32) for t in pair] for pair in zip(k, v)]
    found = [torch.zeros_like(t) for t in (tensors[0], *tensors[:3])]
    for rank, at in enumerate(rows):
        served, leaf = ServedKeyValues(k, v, grads, chunks), q[rank].requires_grad_()
        y = block_attention(leaf, k[rank], v[rank], mask.part(chunks[rank], chunks[rank]), None, served)
        (dq,) = torch.autograd.grad(y, leaf, dy[rank])
        found[0][at], found[1][at] = y.detach().double().cpu(), dq.double().cpu()
    for at, (dk, dv) in zip(rows, grads):
        found[2][at], found[3][at] = dk.double().cpu(), dv.double().cpu()
    check_close(found, dense_attention(tensors, on_cpu), "bf16")
