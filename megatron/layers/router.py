"""Router of a mixture of experts: the experts of every token, their weights, and the losses that balance them.

Shapes: S sequence (a part of it under sequence parallelism), B batch, H hidden, T = S x B tokens of this rank,
E experts, K chosen per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext, Losses


class Routing(NamedTuple):
    """The router's decision for every token, and its losses."""

    # Indices of the chosen experts [T, K], best first.
    experts: Tensor
    # Their weights [T, K], in at least fp32.
    weights: Tensor
    # This rank's parts of the losses, times their coefficients. Like the token losses they are sums: divided by the
    # tokens of the global batch they become means over it.
    losses: Losses


class Router(nn.Module):
    """``logits = W x + b`` in at least fp32, a softmax over the experts, and the largest K of it (arXiv 1701.06538)."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.config, self.context, self.coefficients = config, context, config.router_losses
        self.weight, self.bias = context.parameter("weight", autograd=True), context.bias(autograd=True)

    def forward(self, x_SBH: Tensor, batch: MicroBatch) -> Routing:
        """Choose experts for the tokens of a micro-batch."""
        dtype = torch.promote_types(x_SBH.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits_SBE = F.linear(x_SBH.to(dtype), self.weight.to(dtype), bias)
        probs_SBE = logits_SBE.softmax(-1)
        best, experts = logits_SBE.flatten(0, 1).topk(self.config.moe_router_topk)
        weights = (
            probs_SBE.flatten(0, 1).gather(-1, experts) if self.config.moe_router_pre_softmax else best.softmax(-1)
        )
        return Routing(experts, weights, self._losses(logits_SBE, probs_SBE, experts, batch))

    def _losses(self, logits_SBE: Tensor, probs_SBE: Tensor, experts_TK: Tensor, batch: MicroBatch) -> Losses:
        losses: dict[str, Tensor] = {}
        if not self.training:
            return losses
        for name, coefficient in self.coefficients.items():
            if name == "z_loss":
                losses[name] = coefficient * self._z_loss(logits_SBE, batch)
            else:
                losses[name] = coefficient * self._balancing_loss(probs_SBE, experts_TK, batch)
        return losses

    def _balancing_loss(self, probs_SBE: Tensor, experts_TK: Tensor, batch: MicroBatch) -> Tensor:
        """Return ``E sum_e f_e P_e`` (arXiv 2101.03961) of every sequence, times its unmasked tokens, summed.

        ``f_e`` is the fraction of the sequence's choices that fell on expert e, ``P_e`` the expert's mean probability.
        The loss is linear in P: once the choices are summed over the ranks of a sequence, each computes its part.
        """
        rows, samples, experts = probs_SBE.shape
        length = batch.length
        chosen_BE = F.one_hot(experts_TK, experts).sum(1).view(rows, samples, experts).sum(0).to(probs_SBE.dtype)
        mesh, sequence_parallel = self.context.mesh, self.context.sequence_parallel
        cp, sequence = mesh.group("cp"), mesh.group("cp", "tp") if sequence_parallel else mesh.group("cp")
        comm.all_reduce(chosen_BE, sequence)
        counted_B = comm.all_reduce(batch.loss_mask.sum(1).to(probs_SBE.dtype), cp)
        f_BE = chosen_BE * (experts / (self.config.moe_router_topk * length))
        if self.config.moe_router_load_balancing_type == "aux_loss":
            real_B = (counted_B > 0).to(f_BE.dtype)  # samples that pad the batch do not enter the mean
            weight_B = real_B / real_B.sum().clamp(min=1.0)
            f_BE, counted_B = weight_B @ f_BE, real_B * (weight_B @ counted_B)
        return (f_BE * probs_SBE.sum(0) * counted_B.unsqueeze(-1)).sum() / length

    def _z_loss(self, logits_SBE: Tensor, batch: MicroBatch) -> Tensor:
        """Return the squared log-partition summed over unmasked tokens (arXiv 2202.08906)."""
        rows = logits_SBE.shape[0]
        first = self.context.tp.rank * rows if self.context.sequence_parallel else 0
        mask_SB = batch.loss_mask.t()[first : first + rows]
        return (logits_SBE.logsumexp(-1).square() * mask_SB).sum()
