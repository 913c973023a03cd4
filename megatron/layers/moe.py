"""Mixture of experts (MoE): top-k router with its losses, token dispatch, and the experts.

Experts are distributed over EP ranks, and each may be sharded over expert-TP. An all-to-all sends every token to the
ranks of its experts and back; the output of a token is the weighted sum of its experts' outputs, plus the shared
expert's. No token is dropped, so message sizes depend on the data and the host waits for the counts once per layer.

Shapes: T = S x B tokens of this rank (S is a part of the sequence under sequence parallelism), E experts, K chosen per
token, C = K x expert-TP, R rows that this rank receives, sorted by expert; I in, O out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.linear import column_sum
from megatron.layers.context import BuildContext, ForwardContext, Losses, MixerOutput
from megatron.layers.mlp import MLP
from megatron.layers.recompute import recompute_producer
from megatron.layers.recompute_plan import RecomputePlan


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


class _Permute(torch.autograd.Function):
    """``y[i] = x[order[i]]``, backward ``dx[order[i]] = dy[i]``.

    Both directions are gathers rather than scatters with atomics, so results are bitwise reproducible on GPUs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy[ctx.saved_tensors[0]], None, None


@dataclass(frozen=True)
class Permutation:
    """A permutation of rows and its inverse."""

    order: Tensor
    inverse: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> Permutation:
        """Return the stable permutation that sorts ``keys``."""
        order = keys.argsort(stable=True)
        return cls(order, order.argsort())

    def __call__(self, x: Tensor) -> Tensor:
        """Permute the rows of ``x``."""
        y: Tensor = _Permute.apply(x, self.order, self.inverse)
        return y

    def undo(self, y: Tensor) -> Tensor:
        """Restore the original order of the rows of ``y``."""
        x: Tensor = _Permute.apply(y, self.inverse, self.order)
        return x


@dataclass(frozen=True)
class DispatchPlan:
    """The all-to-all of one MoE layer and micro-batch.

    A token is sent to all expert-TP ranks that hold one of its experts. Each computes a partial sum, and the rank that
    sent the token adds them up.
    """

    # Sorts this rank's T x C rows by target rank, then by expert.
    by_target: Permutation
    # Rows sent to and received from each rank.
    sent: tuple[int, ...]
    received: tuple[int, ...]
    # Sorts the R received rows by expert.
    by_expert: Permutation
    # Rows received for each expert of this rank.
    counts: tuple[int, ...]
    # The ranks that together hold all experts, ordered by EP first, then by expert-TP.
    group: Group

    @classmethod
    def plan(cls, experts_TK: Tensor, experts: int, tp_size: int, group: Group) -> DispatchPlan:
        """Exchange row counts and plan the all-to-all. Collective; synchronises host and device.

        Args:
            experts_TK: indices of the chosen experts.
            experts: number of experts.
            tp_size: expert-TP.
            group: the ranks that together hold all experts.

        """
        local = experts * tp_size // group.size  # experts per rank
        ranks = experts_TK.unsqueeze(-1) // local * tp_size + torch.arange(tp_size, device=experts_TK.device)
        keys = (ranks * local + experts_TK.unsqueeze(-1) % local).flatten()
        sent_counts = keys.new_zeros(group.size * local).index_add_(0, keys, torch.ones_like(keys))
        sent_counts = sent_counts.view(group.size, local)
        received_counts = comm.start_all_to_all(sent_counts, group).wait()
        # One transfer, so that the host waits once.
        on_host = torch.cat((sent_counts.sum(1), received_counts.sum(1), received_counts.sum(0))).tolist()
        sent, received, counts = on_host[: group.size], on_host[group.size : -local], on_host[-local:]
        local_experts = torch.arange(local, device=keys.device).repeat(group.size)
        received_experts = local_experts.repeat_interleave(received_counts.flatten(), output_size=sum(received))
        by_expert = Permutation.sorting(received_experts)
        return cls(Permutation.sorting(keys), tuple(sent), tuple(received), by_expert, tuple(counts), group)

    def dispatch(self, x_TH: Tensor) -> Tensor:
        """Send every token to its experts: ``[T, H] -> [R, H]``, sorted by expert."""
        copies = len(self.by_target.order) // x_TH.shape[0]
        rows = self.by_target(x_TH.unsqueeze(1).expand(-1, copies, -1).flatten(0, 1))
        return self.by_expert(mappings.all_to_all(rows, self.sent, self.received, self.group))

    def combine(self, y_RH: Tensor, tokens: int) -> Tensor:
        """Return results to the ranks of their tokens: ``[R, H] -> [T, C, H]``."""
        rows = mappings.all_to_all(self.by_expert.undo(y_RH), self.received, self.sent, self.group)
        return self.by_target.undo(rows).unflatten(0, (tokens, -1))


class _GroupedLinearFunction(torch.autograd.Function):
    """``y_e = x_e W_e^T + b_e`` for every expert e; backward ``dx_e = dy_e W_e``, ``dW_e = dy_e^T x_e``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sequence[int], layer: GroupedLinear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.layer, ctx.has_bias = rows, layer, bias is not None
        by_expert = zip(x.split(list(rows)), weight.chunk(len(rows)), strict=True)
        y = torch.cat([layer.kernel.forward(x_e, w_e, None) for x_e, w_e in by_expert])
        if bias is not None:
            for y_e, b_e in zip(y[:, layer.columns].split(list(rows)), bias.chunk(len(rows)), strict=True):
                y_e += b_e
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows: Sequence[int] = ctx.rows
        layer: GroupedLinear = ctx.layer
        grads = layer.grad_accumulator
        dw = None
        if ctx.needs_input_grad[1]:
            dw = grads.accumulate_wgrad(layer.name, grads.wgrad_input(x, None), WgradOperand(dy), rows)
        by_expert = zip(dy.split(list(rows)), weight.chunk(len(rows)), strict=True)
        dx = torch.cat([layer.kernel.input_gradient(dy_e, w_e) for dy_e, w_e in by_expert])
        db = torch.cat([*map(column_sum, dy[:, layer.columns].split(list(rows)))]) if ctx.has_bias else None
        return dx, dw, db, None, None


class GroupedLinear(nn.Module):
    """``[R, I] -> [R, O]``: every row is multiplied by the weight of its expert, whose bias is added.

    If the inputs are sharded over expert-TP, outputs are partial sums, and each rank adds a part of the bias.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        if self.bias is not None:
            width, spec = self.weight.shape[0], context.spec("bias")
            experts = spec.local_view[0]
            width, held = width // experts, self.bias.numel() // experts
            first = spec.pieces[0].global_box.start[-1] if held < width else 0
            self.columns = slice(first, first + held)
        self.kernel, self.name = context.kernels.linear, context.name("weight")
        self.grad_accumulator = context.grad_accumulator

    def forward(self, x_RI: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply the layer; ``rows`` is the number of rows of each expert."""
        y: Tensor = _GroupedLinearFunction.apply(x_RI, self.weight, self.bias, rows, self)
        return y


class Experts(nn.Module):
    """The MLPs of this rank's experts: ``[R, H] -> [R, H]``, partial sums under expert-TP."""

    def __init__(self, config: ModelConfig, context: BuildContext, drop_activation: bool) -> None:
        super().__init__()
        self.activation, self.drop_activation = config.activation_options, drop_activation
        self.kernels = context.kernels
        self.linear_fc1 = GroupedLinear(context.submodule("linear_fc1"))
        self.linear_fc2 = GroupedLinear(context.submodule("linear_fc2"))

    def forward(self, x_RH: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply every expert to its rows."""
        up, down = self.linear_fc1(x_RH, rows), partial(self.linear_fc2, rows=rows)
        return recompute_producer(self._activate, up, down) if self.drop_activation else down(self._activate(up))

    def _activate(self, x: Tensor) -> Tensor:
        return self.kernels.activation(x, None, *self.activation)


class MixtureOfExperts(nn.Module):
    """``[S(/tp), B, H] -> [S(/tp), B, H]``, and the router's losses; TP ranks route their part."""

    def __init__(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.group, self.tp_size = context.mesh.group("ep", "etp"), context.mesh.layout.sizes["etp"]
        self.router = Router(config, context.submodule("router"))
        self.experts = Experts(config, context.submodule("experts"), plan.drops_activation)
        self.shared_experts: MLP | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(config, context.submodule("shared_experts"), layer, plan)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Route every token, and apply its experts."""
        routing = self.router(x_SBH, ctx.batch)
        x_TH = x_SBH.flatten(0, 1)
        plan = DispatchPlan.plan(routing.experts, self.config.num_experts or 0, self.tp_size, self.group)
        parts_TCH = plan.combine(self.experts(plan.dispatch(x_TH), plan.counts), len(x_TH))
        weights_TC = routing.weights.repeat_interleave(self.tp_size, dim=1)
        y = torch.einsum("tc,tch->th", weights_TC, parts_TCH.to(weights_TC.dtype)).to(x_TH.dtype).view_as(x_SBH)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x_SBH, ctx).sum()
        return MixerOutput(y, losses=routing.losses)
