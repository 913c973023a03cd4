"""Router of a mixture of experts: the experts of every token, their weights, and the losses that balance them.

Logits become scores; the best experts are chosen by scores, bias and groups; their scores become weights; choices
beyond the capacity are dropped; losses balance the experts.

Shapes: S sequence (a part of it under sequence parallelism), B batch, H hidden, T = S x B tokens of this rank,
E experts, K chosen per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.config.router import LOSS_NAMES, PADDING
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.random import stable_hash
from megatron.kernels.linear import TORCH_LINEAR, LinearKernel
from megatron.layers.context import DTYPES, BuildContext, ForwardContext, Losses
from megatron.layers.recompute import is_recomputing

SINKHORN_ITERATIONS = 16
"""Of the normalisation of rows and columns, whose choices then no longer change; a fixed number needs no host."""


class Routing(NamedTuple):
    """The router's decision for every token, and its losses."""

    # Indices of the chosen experts [T, K], best first.
    experts: Tensor
    # Their weights [T, K], in at least fp32; 0 for choices that are dropped.
    weights: Tensor
    # This rank's parts of the losses, times their coefficients. Like the token losses they are sums: divided by the
    # tokens of the global batch they become means over it.
    losses: Losses
    # bool [T, K], False for choices beyond the capacity of an expert; None if nothing is dropped.
    kept: Tensor | None = None


@dataclass(frozen=True)
class ExpertLoads:
    """Choices of the experts of a layer, int64, without those of samples that pad the batch."""

    # Of this rank's tokens in a step: choices of each expert [E], as they are made, and as the scores alone would make
    # them, if the global balancing loss needs these; and all that were dropped [].
    chosen: Tensor
    best: Tensor | None
    dropped: Tensor
    # By the scores alone, of the global batch of the step before [E].
    before: Tensor

    @classmethod
    def zeros(cls, experts: int, global_loss: bool, device: torch.device) -> ExpertLoads:
        """Return loads of nothing."""
        chosen, best, before = (torch.zeros(experts, dtype=torch.int64, device=device) for _ in range(3))
        return cls(chosen, best if global_loss else None, chosen.new_zeros(()), before)

    def counted(self) -> list[Tensor]:
        """Return what is counted in a step."""
        return [self.chosen, self.dropped, *([] if self.best is None else [self.best])]

    def add(self, real_B: Tensor, chosen_BE: Tensor, best_BE: Tensor, kept_TK: Tensor | None) -> None:
        """Add the choices of the samples for which ``real_B`` is True."""
        self.chosen.add_((chosen_BE * real_B.unsqueeze(1)).sum(0))
        if self.best is not None:
            self.best.add_((best_BE * real_B.unsqueeze(1)).sum(0))
        if kept_TK is not None:
            dropped_B = (~kept_TK).view(-1, len(real_B), kept_TK.shape[1]).sum((0, 2))
            self.dropped.add_(torch.where(real_B, dropped_B, 0).sum())

    def fractions(self) -> Tensor:
        """Return ``E f_e`` of the global batch of the step before, fp64 ``[E]``; 1 before the first step."""
        before_E = self.before.double()
        total = before_E.sum()
        return torch.where(total > 0, before_E * len(before_E) / total.clamp(min=1.0), 1.0)


class Router(nn.Module):
    """``logits = W x + b`` in at least fp32, scores of them, and the K best experts (arXiv 1701.06538)."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.config, self.context, self.coefficients = config, context, config.router_losses
        self.weight, self.bias = context.parameter("weight", autograd=True), context.bias(autograd=True)
        self.expert_bias: nn.Parameter | None = None
        if config.moe_router_enable_expert_bias:
            self.expert_bias = context.parameter("expert_bias")
        # Counted in training, for :mod:`megatron.training.components.expert_loads`.
        self.loads = ExpertLoads.zeros(config.num_experts or 0, config.has_global_loss, context.device)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> Routing:
        """Choose experts for the tokens of a micro-batch."""
        config, topk = self.config, self.config.moe_router_topk
        logits_SBE = self._logits(x_SBH, ctx)
        scores_SBE = expert_scores(logits_SBE, config.moe_router_score_function, self.context.kernels.linear)
        keys_TE = self._keys(logits_SBE, scores_SBE).flatten(0, 1)
        experts_TK = choose(
            keys_TE, topk, config.moe_router_num_groups, config.moe_router_group_topk, config.group_score_topk
        )
        weights_TK = self._weights(logits_SBE.flatten(0, 1), scores_SBE.flatten(0, 1), experts_TK)
        weights_TK = weights_TK.to(torch.promote_types(x_SBH.dtype, torch.float32))
        kept_TK = None
        if config.moe_expert_capacity_factor is not None:
            kept_TK = within_capacity(experts_TK, weights_TK, self._capacity(len(keys_TE)), config)
            weights_TK = weights_TK * kept_TK
        losses: Losses = {}
        if self.training:
            losses = self._balance(logits_SBE, scores_SBE, experts_TK, kept_TK, ctx.batch)
        return Routing(experts_TK, weights_TK, losses, kept_TK)

    # ---- Scores

    def _logits(self, x_SBH: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the logits ``[S, B, E]``; random ones if the balance is forced."""
        dtype = torch.promote_types(x_SBH.dtype, DTYPES[self.config.moe_router_dtype])
        bias = None if self.bias is None else self.bias.to(dtype)
        logits_SBE = self.context.kernels.linear.differentiable(x_SBH.to(dtype), self.weight.to(dtype), bias)
        if not self.config.moe_router_force_load_balancing:
            return logits_SBE
        key = stable_hash(ctx.seed, ctx.batch.step, self.context.name("weight"))
        drawn_SBE = self.context.kernels.rows.random_logits(
            key, ctx.batch.sample_ids, ctx.row_positions, logits_SBE.shape[-1]
        )
        random_SBE: Tensor = _StraightThrough.apply(logits_SBE, drawn_SBE)
        return random_SBE

    # ---- Choice

    def _keys(self, logits_SBE: Tensor, scores_SBE: Tensor) -> Tensor:
        """Return the numbers ``[S, B, E]`` by which experts are chosen, without a gradient."""
        config = self.config
        logits_SBE, scores_SBE = logits_SBE.detach(), scores_SBE.detach()
        if self._uses_sinkhorn:
            balanced = self.training and not config.moe_router_force_load_balancing
            return sinkhorn(scores_SBE, self._sequence_group) if balanced else logits_SBE
        if self.expert_bias is not None:
            return scores_SBE + self.expert_bias.to(scores_SBE.dtype)
        if config.moe_router_score_function != "softmax":
            return scores_SBE
        # the softmax keeps the order of experts, but not that of sums over groups
        in_groups = config.moe_router_pre_softmax and config.moe_router_num_groups is not None
        return scores_SBE if in_groups else logits_SBE

    @property
    def _uses_sinkhorn(self) -> bool:
        return "sinkhorn" in self.config.moe_router_load_balancing_type

    @property
    def _sequence_group(self) -> Group:
        """The ranks that hold a sequence together."""
        mesh = self.context.mesh
        return mesh.group("cp", "tp") if self.context.sequence_parallel else mesh.group("cp")

    # ---- Weights

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the weights of the chosen experts."""
        config, several = self.config, self.config.moe_router_topk > 1
        if self._uses_sinkhorn:
            sigmoid_TE = scores_TE if several else self.context.kernels.linear.elementwise(torch.sigmoid, logits_TE)
            return sigmoid_TE.gather(-1, experts_TK)
        if config.moe_router_score_function != "softmax":
            weights_TK = scores_TE.gather(-1, experts_TK)
            weights_TK = normalized(weights_TK) if several else weights_TK
        elif config.moe_router_pre_softmax:
            weights_TK = scores_TE.gather(-1, experts_TK)
        else:
            weights_TK = logits_TE.gather(-1, experts_TK).softmax(-1)
        factor = config.moe_router_topk_scaling_factor
        return weights_TK if factor is None else weights_TK * factor

    def _capacity(self, tokens: int) -> int:
        """Return the number of choices that an expert keeps, of those of this rank's tokens."""
        mean = tokens * self.config.moe_router_topk / (self.config.num_experts or 1)
        return min(tokens, math.ceil(mean * (self.config.moe_expert_capacity_factor or 1.0)))

    # ---- Balance

    def _balance(
        self, logits_SBE: Tensor, scores_SBE: Tensor, experts_TK: Tensor, kept_TK: Tensor | None, batch: MicroBatch
    ) -> Losses:
        """Count the choices of each expert, and return the losses."""
        losses: dict[str, Tensor] = {}
        config = self.config
        # unmasked tokens of each sample: none for one that pads the batch, which then does not count
        sums, real_SB = [batch.loss_mask.sum(1).to(scores_SBE.dtype)], None
        if (padding_BS := batch.extra.get(PADDING)) is not None:  # nor do tokens that pad a sample
            sums.append((~padding_BS).sum(1).to(scores_SBE.dtype))
            real_SB = ~self._own_rows(padding_BS, len(scores_SBE))
            scores_SBE = scores_SBE * real_SB.unsqueeze(-1)
            kept_TK = None if kept_TK is None else kept_TK | ~real_SB.view(-1, 1)
        counted_B, *lengths = comm.all_reduce(torch.stack(sums), self.context.mesh.group("cp"))
        length_B1 = lengths[0].clamp(min=1.0).unsqueeze(-1) if lengths else batch.length
        chosen_BE = best_BE = count_choices(experts_TK, scores_SBE, real_SB)
        by_more = config.moe_router_enable_expert_bias or config.moe_router_num_groups is not None
        if by_more and config.balancing_losses:
            best_TK = scores_SBE.detach().flatten(0, 1).topk(config.moe_router_topk).indices
            best_BE = count_choices(best_TK, scores_SBE, real_SB)
        if not is_recomputing():
            self.loads.add(counted_B > 0, chosen_BE, best_BE, kept_TK)
        for name, coefficient in self.coefficients.items():
            if name == "z_loss":
                losses[name] = coefficient * self._z_loss(logits_SBE, batch)
            else:
                losses[name] = coefficient * self._balancing_loss(name, scores_SBE, best_BE, counted_B, length_B1)
        return losses

    def _balancing_loss(
        self, name: str, scores_SBE: Tensor, chosen_BE: Tensor, counted_B: Tensor, length_B1: int | Tensor
    ) -> Tensor:
        """Return ``E sum_e f_e P_e`` (arXiv 2101.03961) of every sequence, times its unmasked tokens, summed.

        ``f_e`` is the fraction of choices that fell on expert e: of the sequence, of all of the micro-batch, or of the
        global batch of the step before. ``P_e`` is the expert's mean probability in the sequence. The choices are those
        of the scores alone, without bias and groups, and the probabilities the scores divided by their sum, as in
        DeepSeek-V3 (arXiv 2412.19437). The loss is linear in P: once the choices are summed over the ranks of a
        sequence, each computes its part.
        """
        softmax, experts = self.config.moe_router_score_function == "softmax", scores_SBE.shape[-1]
        probs_SBE = scores_SBE if softmax else normalized(scores_SBE)
        if name == LOSS_NAMES["global_aux_loss"]:
            f_BE = self.loads.fractions().to(probs_SBE.dtype).unsqueeze(0)
        else:
            chosen_BE = comm.all_reduce(chosen_BE.to(probs_SBE.dtype), self._sequence_group)
            f_BE = chosen_BE * (experts / (self.config.moe_router_topk * length_B1))
        counted_B1 = counted_B.unsqueeze(-1)
        if name == LOSS_NAMES["aux_loss"]:
            # samples that pad the batch do not enter the mean
            tokens_B1 = (counted_B1 > 0).to(f_BE.dtype) * length_B1
            total = tokens_B1.sum().clamp(min=1.0)
            f_BE, counted_B1 = (tokens_B1 / total).t() @ f_BE, tokens_B1 * (counted_B1.sum() / total)
        return (f_BE * probs_SBE.sum(0) * (counted_B1 / length_B1)).sum()

    def _z_loss(self, logits_SBE: Tensor, batch: MicroBatch) -> Tensor:
        """Return the squared log-partition summed over unmasked tokens (arXiv 2202.08906)."""
        mask_SB = self._own_rows(batch.loss_mask, len(logits_SBE))
        return (logits_SBE.logsumexp(-1).square() * mask_SB).sum()

    def _own_rows(self, column_BS: Tensor, rows: int) -> Tensor:
        """Return the rows of this rank, ``[S(/tp), B]``."""
        first = self.context.tp.rank * rows if self.context.sequence_parallel else 0
        return column_BS.t()[first : first + rows]


class _StraightThrough(torch.autograd.Function):
    """``y = replacement``, backward ``dx = dy``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, replacement: Tensor) -> Tensor:
        return replacement.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def expert_scores(logits_SBE: Tensor, function: str, kernel: LinearKernel = TORCH_LINEAR) -> Tensor:
    """Return the scores of the experts, of the shape of the logits."""
    if function == "softmax":
        return logits_SBE.softmax(-1)
    score = torch.sigmoid if function == "sigmoid" else lambda x: F.softplus(x).sqrt()
    return kernel.elementwise(score, logits_SBE)


def normalized(scores: Tensor) -> Tensor:
    """Divide scores by their sum over the last dimension."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def choose(
    keys_TE: Tensor, topk: int, groups: int | None = None, group_topk: int | None = None, score_topk: int | None = None
) -> Tensor:
    """Return the ``topk`` experts ``[T, K]`` with the largest keys, best first.

    Args:
        keys_TE: scores or logits.
        topk: K.
        groups: number of equal groups of consecutive experts; None for no groups.
        group_topk: groups to choose first.
        score_topk: number of best keys that are added up to the score of a group (1 in DeepSeek-V2, 2 in V3).
    """
    if groups is not None and group_topk is not None and group_topk < groups:
        keys_TGE = keys_TE.unflatten(-1, (groups, -1))
        of_groups_TG = keys_TGE.topk(min(score_topk or 1, keys_TGE.shape[-1])).values.sum(-1)
        chosen_TG = torch.zeros_like(of_groups_TG, dtype=torch.bool)
        chosen_TG = chosen_TG.scatter(-1, of_groups_TG.topk(group_topk).indices, True)
        keys_TE = keys_TGE.masked_fill(~chosen_TG.unsqueeze(-1), -torch.inf).flatten(-2)
    return keys_TE.topk(topk).indices


def count_choices(experts_TK: Tensor, scores_SBE: Tensor, real_SB: Tensor | None = None) -> Tensor:
    """Return how often each expert is chosen in each sample, int64 ``[B, E]``, by the tokens that are real."""
    rows, samples, experts = scores_SBE.shape
    chosen_SBKE = experts_TK.view(rows, samples, -1, 1) == torch.arange(experts, device=experts_TK.device)
    if real_SB is not None:
        chosen_SBKE = chosen_SBKE & real_SB[..., None, None]
    return chosen_SBKE.sum((0, 2))


@torch.no_grad()
def sinkhorn(probs_SBE: Tensor, sequence: Group) -> Tensor:
    """Scale tokens and experts of each sequence so that all experts have the same sum (arXiv 1306.0895).

    Args:
        probs_SBE: of which every token has the sum 1; a factor of a token does not change the result.
        sequence: the ranks that hold a sequence together.
    """
    scale_BE = torch.ones_like(probs_SBE[0])
    for _ in range(SINKHORN_ITERATIONS):
        tokens_SBE = normalized(probs_SBE * scale_BE)
        scale_BE = scale_BE / (comm.all_reduce(tokens_SBE.sum(0), sequence) + 1e-20)
    return probs_SBE * scale_BE


@torch.no_grad()
def within_capacity(experts_TK: Tensor, weights_TK: Tensor, capacity: int, config: ModelConfig) -> Tensor:
    """Return bool ``[T, K]``, True for the first ``capacity`` choices of each expert, by the drop policy."""
    experts = config.num_experts or 0
    chosen_TE = torch.zeros(len(experts_TK), experts, dtype=torch.bool, device=experts_TK.device)
    chosen_TE.scatter_(1, experts_TK, True)
    if config.moe_token_drop_policy == "position":
        return chosen_TE.cumsum(0).gather(1, experts_TK) <= capacity
    keys_TE = weights_TK.new_full(chosen_TE.shape, -1.0).scatter_(1, experts_TK, weights_TK)
    order_TE = keys_TE.argsort(dim=0, descending=True, stable=True)  # equal weights: the first ones stay
    kept_TE = torch.zeros_like(chosen_TE).scatter_(0, order_TE[:capacity], True)
    return kept_TE.gather(1, experts_TK)
