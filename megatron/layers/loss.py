"""Output projection and cross-entropy in one, over a vocabulary split between ranks.

Logits exist for one chunk of tokens at a time; the gradient is taken while they are there, so neither full fp32
logits nor their gradient ever do.

Shapes: T tokens, C tokens of a chunk, H hidden, V this rank's vocabulary rows, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.kernels.cross_entropy import IN_PLACE, CrossEntropy
from megatron.layers.embedding import vocabulary_spec
from megatron.parallel import collectives, comm
from megatron.parallel.build import BuildContext
from megatron.parallel.comm import Group
from megatron.parallel.grads import GradSink
from megatron.parallel.microbatch import MicroBatch


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the output projection.

    Attributes:
        first: global id of row 0.
        held: rows that are real; the rest is padding.
        group: ranks that hold the other rows.
    """

    first: int
    held: int
    group: Group


@dataclass(frozen=True)
class LossConfig:
    """How the loss is taken: tokens per chunk and the weight of the squared log-partition."""

    chunk_tokens: int = 1024
    z_coeff: float = 0.0


class OutputLayer(nn.Module):
    """Hidden states ``[S(/tp), B, H]`` -> sum of the micro-batch's token losses.

    Args:
        config: of the model.
        context: of this module.
        loss: how the loss is taken.

    """

    def __init__(self, config: ModelConfig, context: BuildContext, loss: LossConfig) -> None:
        super().__init__()
        self.context, self.loss = context, loss
        spec = vocabulary_spec(config, context)
        held = sum(piece.place.size[0] for piece in spec.pieces)
        self.entries = spec.shape[0]
        self.vocabulary = Vocabulary(context.tp.rank * spec.local_view[0], held, context.tp)
        owner = context.root.at("embedding.word_embeddings") if spec.tied else context
        self.name, self.weight = owner.name("weight"), owner.parameter("weight", spec)

    def forward(self, x_SBH: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """``(objective, cross_entropy)`` of :func:`linear_cross_entropy`."""
        enter = collectives.gather_rows if self.context.sequence_parallel else collectives.copy
        x_TH = enter(x_SBH, self.context.tp).flatten(0, 1)
        labels_T, mask_T = batch.labels.t().flatten(), batch.loss_mask.t().flatten()
        return linear_cross_entropy(
            x_TH,
            self.weight,
            labels_T,
            mask_T,
            self.vocabulary,
            self.loss,
            self.context.sink,
            self.name,
            self.context.kernels.cross_entropy,
        )

    @torch.no_grad()
    def logits(self, x_SBH: Tensor) -> Tensor:
        """``[S, B, H]`` -> ``[S, B, entries of the vocabulary]`` in at least fp32, the same on all TP ranks.

        Raises:
            ValueError: with sequence parallelism, where a rank has only some of the rows.
        """
        if self.context.sequence_parallel:
            raise ValueError("logits are for inference, which runs without sequence parallelism")
        wide = torch.promote_types(x_SBH.dtype, torch.float32)
        local_SBV = x_SBH.matmul(self.weight.t()).to(wide)
        parts_PSBV = collectives.gather_rows(local_SBV.unsqueeze(0), self.context.tp)
        return parts_PSBV.movedim(0, 2).flatten(2)[..., : self.entries]


def linear_cross_entropy(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    mask_T: Tensor,
    vocabulary: Vocabulary,
    config: LossConfig,
    sink: GradSink,
    name: str,
    kernel: CrossEntropy = IN_PLACE,
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of ``mask * (log Z - logit[label] + z_coeff * (log Z)^2)``, ``Z = sum_v exp(logit_v)``.

    The gradient of the weight goes to ``sink`` under ``name``; that of ``x`` is this rank's partial sum over its
    vocabulary rows, to be reduced by whoever spread ``x``.

    Returns:
        ``(objective, cross_entropy)``, scalars in at least fp32, equal on all ranks of the group; the second is the
        objective without the z term, for reporting, and does not differentiate.

    """
    objective, cross_entropy = _LinearCrossEntropy.apply(
        x_TH, weight_VH, labels_T, mask_T, vocabulary, config, sink, name, kernel, torch.is_grad_enabled()
    )
    return objective, cross_entropy


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        vocabulary: Vocabulary,
        config: LossConfig,
        sink: GradSink,
        name: str,
        kernel: CrossEntropy,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        objective, cross_entropy = torch.zeros(2, dtype=wide, device=x_TH.device).unbind()
        dx_TH = torch.empty_like(x_TH) if differentiate else None
        dw_VH = torch.empty_like(weight_VH, dtype=wide) if differentiate else None
        for at in range(0, x_TH.shape[0], config.chunk_tokens):
            part = slice(at, at + config.chunk_tokens)
            logits_CV = x_TH[part].matmul(weight_VH.t())
            chunk = _sum_over_vocabulary(kernel, logits_CV, labels_T[part], mask_T[part].to(wide), vocabulary)
            del logits_CV  # where they were widened, this frees them
            entropy = (chunk.loss * chunk.mask).sum()
            cross_entropy = cross_entropy + entropy
            objective = objective + entropy + config.z_coeff * (chunk.log_z.square() * chunk.mask).sum()
            if dx_TH is not None and dw_VH is not None:
                d_CV = chunk.gradient(config.z_coeff, x_TH.dtype)
                torch.mm(d_CV, weight_VH, out=dx_TH[part])
                sink.multiply(dw_VH, x_TH[part], d_CV, beta=float(at > 0))
                del d_CV
            del chunk  # before the next one's logits are made
        ctx.save_for_backward(dx_TH, dw_VH)
        ctx.sink, ctx.name = sink, name
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, seed: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dw_VH = ctx.saved_tensors
        dw = ctx.sink.accumulate(ctx.name, dw_VH, seed)
        wide_dx_TH = dx_TH.to(seed.dtype)  # or CUDA would round the seed to dx's format first
        return (wide_dx_TH * seed).to(dx_TH.dtype), dw, *(None,) * 8


@dataclass(frozen=True)
class _Chunk:
    """A chunk of tokens, its losses over the whole vocabulary, and what their gradient needs: ``[C]``, work ``[C, V]``.

    Attributes:
        kernel: what passes over the logits.
        held: rows of the vocabulary that are real.
        work: what the kernel's last pass left.
        top: largest logit, subtracted so that nothing overflows.
        z: sum over the vocabulary of ``exp(logit - top)``.
        loss: ``log Z - logit[label]``.
        mask: weight of every token.
        row: row of the label, 0 where it is not held here.
        mine: whether it is.
    """

    kernel: CrossEntropy
    held: int
    work: Tensor
    top: Tensor
    z: Tensor
    loss: Tensor
    mask: Tensor
    row: Tensor
    mine: Tensor

    @property
    def log_z(self) -> Tensor:
        """Log of the sum over the vocabulary of ``exp(logit)``."""
        return self.z.log() + self.top

    def gradient(self, z_coeff: float, dtype: torch.dtype) -> Tensor:
        """Of ``mask * (loss + z_coeff * (log Z)^2)`` by the logits, whose place it may take."""
        scale_C = self.mask * (1.0 + 2.0 * z_coeff * self.log_z) / self.z
        return self.kernel.gradient(self.work, self.top, scale_C, self.mask, self.row, self.mine, self.held, dtype)


def _sum_over_vocabulary(
    kernel: CrossEntropy, logits_CV: Tensor, labels_C: Tensor, mask_C: Tensor, vocabulary: Vocabulary
) -> _Chunk:
    """The losses of a chunk from this rank's logits, which are given away."""
    row_C, mine_C = _local_labels(labels_C, vocabulary)
    work_CV, top_C = kernel.top(logits_CV, vocabulary.held)
    top_C = comm.all_reduce(top_C, vocabulary.group, op="max")
    sums_2C = kernel.sums(work_CV, top_C, row_C, mine_C, vocabulary.held)
    z_C, target_C = comm.all_reduce(sums_2C, vocabulary.group).unbind()
    return _Chunk(kernel, vocabulary.held, work_CV, top_C, z_C, z_C.log() - target_C, mask_C, row_C, mine_C)


def _local_labels(labels_C: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """``(row, held here)`` of each label; the row is 0 where it is not."""
    local_C = labels_C - vocabulary.first
    mine_C = (local_C >= 0) & (local_C < vocabulary.held)
    return local_C.where(mine_C, 0), mine_C
