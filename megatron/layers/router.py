"""Which experts compute a token, how much each counts, and what keeps them all busy.

T = S x B tokens of this rank (S a part of the sequence under sequence parallelism), E experts, K of them chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.parallel import comm
from megatron.parallel.build import BuildContext
from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.shard import Init


class Routing(NamedTuple):
    """What the router says of every token.

    Attributes:
        experts: numbers of the chosen experts ``[T, K]``, the best first.
        weights: how much each counts ``[T, K]``, in at least fp32.
        losses: ``[2]``, this rank's part of the balancing loss and of the z-loss, times their coefficients, in units
            of the summed token loss: divided by the tokens of the global batch they are means over it.
    """

    experts: Tensor
    weights: Tensor
    losses: Tensor


class Router(nn.Module):
    """``logits = W x`` in at least fp32, a softmax over the experts, and the largest K of it (arXiv 1701.06538)."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        shape = (config.num_experts or 0, config.hidden_size)
        spec = context.shard.replicate(shape, Init(config.init_method_std), partial=context.sequence_parallel)
        self.weight = context.parameter("weight", spec, autograd=True)

    def forward(self, x_SBH: Tensor, batch: MicroBatch) -> Routing:
        """Choose experts for the tokens of a micro-batch."""
        wide = torch.promote_types(x_SBH.dtype, torch.float32)
        logits_SBE = F.linear(x_SBH.to(wide), self.weight.to(wide))
        probs_SBE = logits_SBE.softmax(-1)
        best, experts = logits_SBE.flatten(0, 1).topk(self.config.moe_router_topk)
        weights = (
            probs_SBE.flatten(0, 1).gather(-1, experts) if self.config.moe_router_pre_softmax else best.softmax(-1)
        )
        return Routing(experts, weights, self._losses(logits_SBE, probs_SBE, experts, batch))

    def _losses(self, logits_SBE: Tensor, probs_SBE: Tensor, experts_TK: Tensor, batch: MicroBatch) -> Tensor:
        c, none = self.config, logits_SBE.new_zeros(())
        if not self.training:
            return torch.stack([none, none])
        balances = c.moe_aux_loss_coeff > 0 and c.moe_router_load_balancing_type != "none"
        balance = self._balance(probs_SBE, experts_TK, batch) if balances else none
        z = self._z(logits_SBE, batch) if c.moe_z_loss_coeff else none
        return torch.stack([c.moe_aux_loss_coeff * balance, (c.moe_z_loss_coeff or 0.0) * z])

    def _balance(self, probs_SBE: Tensor, experts_TK: Tensor, batch: MicroBatch) -> Tensor:
        """``E sum_e f_e P_e`` (arXiv 2101.03961) of every sequence, times its tokens that count in the loss.

        ``f_e`` is the share of the sequence's choices that fell on expert e, ``P_e`` its mean probability. It is linear
        in P, so that ranks that share a sequence each have a part of the loss, once they know the choices of all.
        """
        rows, samples, experts = probs_SBE.shape
        length, tp = batch.tokens.shape[1], self.context.tp
        chosen_BE = F.one_hot(experts_TK, experts).sum(1).view(rows, samples, experts).sum(0).to(probs_SBE.dtype)
        if self.context.sequence_parallel:
            comm.all_reduce(chosen_BE, tp)
        counted_B = batch.loss_mask.sum(1).to(probs_SBE.dtype)
        f_BE = chosen_BE * (experts / (self.config.moe_router_topk * length))
        if self.config.moe_router_load_balancing_type == "aux_loss":
            counts_B = (counted_B > 0).to(f_BE.dtype)  # a sample that pads the batch is no part of the mean
            share_B = counts_B / counts_B.sum().clamp(min=1.0)
            f_BE, counted_B = share_B @ f_BE, counts_B * (share_B @ counted_B)
        return (f_BE * probs_SBE.sum(0) * counted_B.unsqueeze(-1)).sum() / length

    def _z(self, logits_SBE: Tensor, batch: MicroBatch) -> Tensor:
        """The squared log-partition of every token that counts in the loss (arXiv 2202.08906)."""
        rows = logits_SBE.shape[0]
        first = self.context.tp.rank * rows if self.context.sequence_parallel else 0
        mask_SB = batch.loss_mask.t()[first : first + rows]
        return (logits_SBE.logsumexp(-1).square() * mask_SB).sum()
