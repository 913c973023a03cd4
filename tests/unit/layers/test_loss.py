"""The chunked cross-entropy against the plain one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.cross_entropy import EAGER_CROSS_ENTROPY
from megatron.kernels.registry import Kernels
from megatron.layers.loss import VocabularyShard, linear_cross_entropy, token_losses
from megatron.pipeline.actions import BACKWARD, FORWARD, Action
from megatron.pipeline.runtime import Pipeline
from tests.kit.solo import Allocations, Gradients, Solo, random_batch, tiny

TOKENS, HELD, PADDING, HIDDEN = 21, 37, 3, 8
SEED = 1.7  # what backward multiplies by


@dataclass
class Result:
    objective: Tensor
    cross_entropy: Tensor
    dx: Tensor
    dw: Tensor


def inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x``, weight with padding rows that hold anything, labels, mask with zeros and fractions."""
    torch.manual_seed(0)
    x = (scale * torch.randn(TOKENS, HIDDEN, dtype=torch.float64)).to(dtype)
    weight = torch.randn(HELD + PADDING, HIDDEN, dtype=torch.float64).to(dtype)
    mask = torch.randint(0, 3, (TOKENS,)) / 2.0
    return x, weight, torch.randint(0, HELD, (TOKENS,)), mask


def chunked(
    x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, chunk: int, z_coeff: float, softcap: float | None = None
) -> Result:
    grad_accumulator, x = GradAccumulator(), x.detach().requires_grad_()
    dw = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    grad_accumulator.bind(Gradients({"w": dw}))
    vocabulary = VocabularyShard(0, HELD, Group(), grad_accumulator, "w", chunk_tokens=chunk, softcap=softcap)
    objective, entropy, _ = linear_cross_entropy(x, weight.detach().requires_grad_(), labels, mask, vocabulary, z_coeff)
    objective.backward(torch.tensor(SEED, dtype=objective.dtype))
    assert x.grad is not None
    return Result(objective.detach(), entropy, x.grad, dw)


def plain(
    x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, z_coeff: float, softcap: float | None = None
) -> Result:
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = x @ weight[:HELD].t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    entropy = (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
    objective = entropy + z_coeff * (logits.logsumexp(-1).square() * mask).sum()
    objective.backward(torch.tensor(SEED, dtype=torch.float64))
    assert x.grad is not None
    assert weight.grad is not None
    return Result(objective.detach(), entropy.detach(), x.grad, weight.grad)


def assert_same(ours: Result, reference: Result, tolerance: float) -> None:
    for name, expected in vars(reference).items():
        error = (getattr(ours, name).double() - expected).norm() / expected.norm()
        assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_coeff", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 5, 7, 20, 21, 1000])
def test_values_and_gradients(chunk: int, z_coeff: float, softcap: float | None) -> None:
    arguments = inputs()
    ours = chunked(*arguments, chunk, z_coeff, softcap)
    assert_same(ours, plain(*arguments, z_coeff, softcap), 1e-13)
    assert not ours.dw[HELD:].any(), "padding rows have a gradient"


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("targets", [1, 4])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_losses_of_tokens(chunk: int, targets: int, softcap: float | None) -> None:
    x, weight, _, _ = inputs()
    labels = torch.rand(TOKENS, HELD).argsort(1)[:, :targets]
    weights, upstream = torch.rand(TOKENS, targets, dtype=torch.float64), torch.randn(TOKENS, dtype=torch.float64)
    dw, ours_x = torch.zeros_like(weight), x.clone().requires_grad_()
    grad_accumulator = GradAccumulator()
    grad_accumulator.bind(Gradients({"w": dw}))
    vocabulary = VocabularyShard(0, HELD, Group(), grad_accumulator, "w", chunk_tokens=chunk, softcap=softcap)
    losses = token_losses(ours_x, weight.clone().requires_grad_(), labels, weights, vocabulary)
    (losses.square() * upstream).sum().backward()

    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight[:HELD].t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = -(logits.log_softmax(-1).gather(1, labels) * weights).sum(1)
    (expected.square() * upstream).sum().backward()
    for ours, reference in ((losses, expected), (ours_x.grad, x.grad), (dw, weight.grad)):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_other_precisions(dtype: torch.dtype, tolerance: float, softcap: float | None) -> None:
    arguments = inputs(dtype)
    ours = chunked(*arguments, chunk=5, z_coeff=1e-2, softcap=softcap)
    assert_same(ours, plain(*arguments, 1e-2, softcap), tolerance)
    assert (ours.objective.dtype, ours.dw.dtype, ours.dx.dtype) == (torch.float32, torch.float32, dtype)


class OnGpu:
    """Stands for hidden states ``[tokens, H]`` of 16 bits on a GPU."""

    is_cuda = True

    def __init__(self, tokens: int) -> None:
        self.shape = (tokens, 8)

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"), [(32768, 50304, 8192), (8192, 128256, 4096), (700, 128256, 1024)]
)
def test_chunks_on_gpus_are_large_and_equal(tokens: int, rows: int, expected: int) -> None:
    """At most 1 GiB of bf16 logits, or of fp32 copies of them; a chunk size that is given counts on any device."""
    compiled = replace(EAGER_CROSS_ENTROPY)  # another one than the eager kernel
    vocabulary = VocabularyShard(0, rows, Group(), GradAccumulator(), "w", Kernels(cross_entropy=compiled))
    eager = replace(vocabulary, kernels=Kernels())
    assert vocabulary.tokens_per_chunk(cast(Tensor, OnGpu(tokens)), rows) == expected
    for kind, size in ((vocabulary, 2), (eager, 4)):
        chunk = kind.tokens_per_chunk(cast(Tensor, OnGpu(tokens)), rows)
        assert chunk % 1024 == 0
        assert chunk * rows * size <= 1 << 30
        count = -(-tokens // chunk)
        assert count == -(-tokens // ((1 << 30) // (rows * size) // 1024 * 1024))
    assert vocabulary.tokens_per_chunk(torch.empty(tokens, 8), rows) == 1024
    assert replace(vocabulary, chunk_tokens=7).tokens_per_chunk(cast(Tensor, OnGpu(tokens)), rows) == 7


def test_large_logits_do_not_overflow() -> None:
    arguments = inputs(torch.float32, scale=1000.0)
    assert (arguments[0] @ arguments[1].t()).exp().isinf().any()
    for softcap in (None, 30.0):
        assert_same(chunked(*arguments, 5, 1e-4, softcap), plain(*arguments, 1e-4, softcap), 1e-5)


def test_full_logits_never_exist() -> None:
    """Neither do their gradients; the plain loss, measured the same way, does make them."""
    config = tiny(vocab_size=1000, hidden_size=16)
    batch = random_batch(config, samples=4, length=16)
    full_logits = batch.labels.numel() * 1000 * 4
    solo = Solo.build(config, torch.float32)
    output = solo.chunk.output_layer
    assert output is not None
    output.vocabulary = replace(output.vocabulary, chunk_tokens=6)
    x = torch.randn(16, 4, 16, requires_grad=True)
    solo.buckets.start_step(1)
    with Allocations() as made:
        output(x, batch.labels, batch.loss_mask)[0].backward()
    # dW is as large as the weight, whatever the number of tokens.
    assert made.largest <= max(6, 16) * 1000 * 4 < full_logits / 3
    with Allocations() as made:
        F.cross_entropy(x.flatten(0, 1) @ output.weight.t(), batch.labels.flatten()).backward()
    assert made.largest >= full_logits


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_logits_match_the_loss(softcap: float | None) -> None:
    """For every real entry of the vocabulary and none of its padding."""
    config = tiny(final_logit_softcapping=softcap)
    chunk = Solo.build(config).chunk.eval()
    batch = random_batch(config)
    logits = chunk.logits(batch.tokens)
    assert logits.shape == (16, 2, config.vocab)
    token_losses = F.cross_entropy(logits.permute(1, 2, 0), batch.labels, reduction="none")
    with torch.no_grad():
        expected, _ = chunk(None, batch)
    assert (token_losses * batch.loss_mask).sum().item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(chunk.logits(batch.tokens, last=3), logits[-3:], rtol=1e-12, atol=1e-12)


def gradients_of_gpipe(config: ModelConfig, dtype: torch.dtype, early: bool) -> tuple[Solo, int]:
    """Four forwards, then four backwards; also the bytes of saved tensors as large as the output weight."""
    solo = Solo.build(config, dtype)
    batches = [random_batch(config, seed=seed) for seed in range(4)]
    actions = [Action(0, kind, mb) for kind in (FORWARD, BACKWARD) for mb in range(4)]
    seed = torch.tensor(3.0 / sum(batch.loss_mask.sum().item() for batch in batches), dtype=torch.float64)
    output = solo.chunk.output_layer
    assert output is not None
    kept = []

    def pack(saved: Tensor) -> Tensor:
        if saved.shape == output.weight.shape and saved.untyped_storage().data_ptr() != output.weight.data_ptr():
            kept.append(saved.nbytes)
        return saved

    for bucket in solo.buckets.buckets:
        bucket.shard.fill_(torch.nan)  # what an earlier step left must not be added to
    solo.buckets.start_step(4)

    def chunk(x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = solo.chunk(x, batch if early else replace(batch, loss_grad=None))
        return found

    pipeline = Pipeline({0: chunk}, (0,), 0, {}, lambda batch: torch.empty(0), solo.grad_accumulator)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        pipeline.run(actions, batches, seed)
    solo.buckets.finish()
    return solo, sum(kept)


TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_gradient_of_the_weight_is_kept_until_backward(dtype: torch.dtype, untied: bool) -> None:
    """The seed is known before the first forward, so the gradient is accumulated there."""
    config = tiny(untie_embeddings_and_output_weights=untied, z_loss_coeff=1e-2)
    (early, kept_early), (late, kept_late) = (gradients_of_gpipe(config, dtype, early) for early in (True, False))
    weight = early.params["output_layer.weight" if untied else "embedding.word_embeddings.weight"]
    wide = torch.promote_types(dtype, torch.float32).itemsize
    assert (kept_early, kept_late) == (0, 4 * weight.numel() * wide)
    for name, grad in early.buckets.grads.items():
        expected = late.buckets.grads[name]
        assert expected.any()
        assert (grad - expected).norm() <= TOLERANCE[dtype] * expected.norm(), name
