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
from megatron.layers.embedding import vocabulary_spec
from megatron.parallel import collectives, comm
from megatron.parallel.build import BuildContext
from megatron.parallel.comm import Group
from megatron.parallel.grads import GradSink, add_outer
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
            x_TH, self.weight, labels_T, mask_T, self.vocabulary, self.loss, self.context.sink, self.name
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
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of ``mask * (log Z - logit[label] + z_coeff * (log Z)^2)``, ``Z = sum_v exp(logit_v)``.

    The gradient of the weight goes to ``sink`` under ``name``; that of ``x`` is this rank's partial sum over its
    vocabulary rows, to be reduced by whoever spread ``x``.

    Returns:
        ``(objective, cross_entropy)``, scalars in at least fp32, equal on all ranks of the group; the second is the
        objective without the z term, for reporting, and does not differentiate.

    """
    objective, cross_entropy = _LinearCrossEntropy.apply(
        x_TH, weight_VH, labels_T, mask_T, vocabulary, config, sink, name, torch.is_grad_enabled()
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
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        objective, cross_entropy = torch.zeros(2, dtype=wide, device=x_TH.device).unbind()
        dx_TH = torch.empty_like(x_TH) if differentiate else None
        dw_VH = torch.empty_like(weight_VH, dtype=wide) if differentiate else None
        for at in range(0, x_TH.shape[0], config.chunk_tokens):
            part = slice(at, at + config.chunk_tokens)
            logits_CV = x_TH[part].matmul(weight_VH.t()).to(wide)
            mask_C = mask_T[part].to(wide)
            loss_C, top_C, z_C = _exponentiate_in_place(logits_CV, labels_T[part], vocabulary)
            log_z_C = z_C.log() + top_C
            entropy = (loss_C * mask_C).sum()
            cross_entropy = cross_entropy + entropy
            objective = objective + entropy + config.z_coeff * (log_z_C.square() * mask_C).sum()
            if dx_TH is not None and dw_VH is not None:
                scale_C = mask_C * (1.0 + 2.0 * config.z_coeff * log_z_C) / z_C
                d_CV = _logit_gradient(logits_CV, labels_T[part], mask_C, scale_C, vocabulary).to(x_TH.dtype)
                torch.mm(d_CV, weight_VH, out=dx_TH[part])
                add_outer(dw_VH, x_TH[part], d_CV, beta=float(at > 0))
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
        return (wide_dx_TH * seed).to(dx_TH.dtype), dw, *(None,) * 7


def _exponentiate_in_place(
    logits_CV: Tensor, labels_C: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into ``exp(logit - top)``; returns ``(loss, top, z)``, each ``[C]``, over the whole vocabulary.

    ``top`` is the largest logit, subtracted so that nothing overflows, and ``z`` the sum of the exponentials.
    """
    logits_CV[:, vocabulary.held :] = float("-inf")
    top_C = comm.all_reduce(logits_CV.amax(-1), vocabulary.group, op="max")
    local_C, mine_C = _local_labels(labels_C, vocabulary)
    logits_CV.sub_(top_C.unsqueeze(-1))
    target_C = logits_CV.gather(1, local_C.unsqueeze(1)).squeeze(1).where(mine_C, 0.0)
    sums_2C = comm.all_reduce(torch.stack((logits_CV.exp_().sum(-1), target_C)), vocabulary.group)
    z_C, target_C = sums_2C.unbind()
    return z_C.log() - target_C, top_C, z_C


def _logit_gradient(
    exp_CV: Tensor, labels_C: Tensor, mask_C: Tensor, scale_C: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """``scale * exp - mask * onehot(label)``, in place of the exponentials."""
    local_C, mine_C = _local_labels(labels_C, vocabulary)
    exp_CV.mul_(scale_C.unsqueeze(-1))
    return exp_CV.scatter_add_(1, local_C.unsqueeze(1), (-mask_C).where(mine_C, 0.0).unsqueeze(1))


def _local_labels(labels_C: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """``(row, held here)`` of each label; the row is 0 where it is not."""
    local_C = labels_C - vocabulary.first
    mine_C = (local_C >= 0) & (local_C < vocabulary.held)
    return local_C.where(mine_C, 0), mine_C
