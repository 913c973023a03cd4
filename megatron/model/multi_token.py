"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the heads of the last stage.

The model maps tokens ``t_0 .. t_i`` to a hidden state ``h^0_i``, from which the output layer predicts ``t_{i+1}``.
Depth k takes the hidden state of depth k - 1 and the embedding of the token k further::

    h^k_i = norm(block(eh_proj [enorm(embedding(t_{i+k})), hnorm(h^{k-1}_i)]))

The output layer predicts ``t_{i+k+1}`` from it. As in Megatron-LM, ``h^0`` is the output of the final norm, and the
norm of a depth is applied before the next depth, too. The block is of the kind of the last layer, or has the layers
that a layer pattern gives it; it attends to the positions to which the last layer attends. All depths may use one
layer.

Detached heads train themselves alone: they get ``h^0`` and the embeddings without a gradient, and the output layer
computes none for its weight.

A micro-batch brings the later tokens, cut like its own (:mod:`megatron.data.later_tokens`), so a context-parallel rank
needs none of another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.multi_token import LATER_MASK, LATER_TOKENS, LATER_WEIGHTS
from megatron.config.training import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.random import stable_hash
from megatron.layers.context import BuildContext, ForwardContext, Losses
from megatron.layers.embedding import Embedding
from megatron.layers.linear import ReplicatedLinear
from megatron.layers.loss import OutputLayer
from megatron.layers.multi_token_parameters import BLOCK, head_names
from megatron.layers.norm import Norm, Residual
from megatron.layers.recompute_plan import RecomputePlan
from megatron.model.block import add_losses, build_block, hidden_dropout
from megatron.model.heads import Heads
from megatron.model.segments import compose_blocks


class Depth(nn.Module):
    """One depth: ``(e, h) -> h'``, all ``[S(/tp), B, H]``."""

    def __init__(self, config: ModelConfig, training: TrainingConfig, context: BuildContext, layer: int) -> None:
        """Build the depth.

        Args:
            config: of the model.
            training: recomputation.
            context: of the depth.
            layer: index of its block, after those of the model.
        """
        super().__init__()
        self.enorm = Norm(config, context.submodule("enorm"))
        self.hnorm = Norm(config, context.submodule("hnorm"))
        self.eh_proj = ReplicatedLinear(context.submodule("eh_proj"))
        plan, inside = RecomputePlan.from_config(training, 1), replace(context.submodule(BLOCK), layer=layer)
        self.block = build_block(config, inside, layer, plan)
        self.run_block = compose_blocks([self.block], plan, replace(inside, offload=None))
        self.final_layernorm = Norm(config, context.submodule("final_layernorm"))
        self.dropout, self.site = config.hidden_dropout, context.name("embedding_dropout")

    def forward(self, e_SBH: Tensor, h_SBH: Tensor, ctx: ForwardContext) -> tuple[Tensor, Losses]:
        """Return the hidden state, and the auxiliary losses of the block."""
        e_SBH = hidden_dropout(e_SBH, self.dropout, ctx, self.site)
        both_SBI = torch.cat((self.enorm.normalize(e_SBH), self.hnorm.normalize(h_SBH)), -1)
        residual, losses = self.run_block(Residual(self.eh_proj(both_SBI)), {}, ctx)
        _, h_SBH = self.final_layernorm(residual)
        return h_SBH, losses


class SharedDepth(nn.Module):
    """One use of a layer that several depths share.

    It is a module of its own because a parameter store completes the weights around calls of modules.
    """

    def __init__(self, shared: Depth, depth: int, depths: int) -> None:
        super().__init__()
        self.shared, self.depth, self.depths = shared, depth, depths

    def forward(self, e_SBH: Tensor, h_SBH: Tensor, ctx: ForwardContext) -> tuple[Tensor, Losses]:
        """See :class:`Depth`. Each depth drops other elements, and the auxiliary losses are a mean over the depths."""
        h_SBH, losses = self.shared(e_SBH, h_SBH, replace(ctx, seed=stable_hash(ctx.seed, self.depth)))
        return h_SBH, {name: loss / self.depths for name, loss in losses.items()}


class MultiTokenPrediction(Heads):
    """The depths, one after the other, and their losses."""

    def __init__(self, config: ModelConfig, training: TrainingConfig, context: BuildContext) -> None:
        """Build the depths, after the output layer. The last stage has the word embeddings, too."""
        super().__init__()
        self.embedding, names = Embedding(config, context.submodule("embedding")), head_names(config)
        kinds = dict(zip(names, config.head_layers))
        layers = {name: Depth(config, training, context.submodule(name), layer) for name, layer in kinds.items()}
        depths: list[nn.Module] = [layers[name] for name in names]
        if len(layers) < len(depths):
            depths = [SharedDepth(layers[name], depth, len(depths)) for depth, name in enumerate(names)]
        self.depths, self.detached = nn.ModuleList(depths), config.mtp_detach_heads
        self.names, self.coefficient = config.head_losses, config.mtp_loss_scaling_factor / len(depths)

    @property
    def parts(self) -> list[nn.Module]:
        """The submodules in the order in which forward calls them."""
        return [self.embedding, *self.depths]

    def forward(self, h_SBH: Tensor, losses: Losses, ctx: ForwardContext) -> tuple[list[Tensor], Losses]:
        """Return the hidden state of each depth, and the auxiliary losses so far; see :class:`Heads`."""
        tokens_BSD = ctx.batch.extra[LATER_TOKENS][..., :-1]
        tokens_DBS = tokens_BSD.permute(2, 0, 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
            e_DSBH = self.embedding(tokens_DBS.flatten(0, 1), None).chunk(len(tokens_DBS), 1)
        states, h_SBH = [], h_SBH.detach() if self.detached else h_SBH
        for depth, e_SBH in zip(self.depths, e_DSBH):
            h_SBH, added = depth(e_SBH, h_SBH, ctx)
            states.append(h_SBH)
            losses = add_losses(losses, added)
        return states, losses

    def loss(
        self, states_SBH: Sequence[Tensor], batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return what is added to the summed loss of a micro-batch, and the losses of the depths by name.

        A depth adds its cross-entropy times ``factor / depths`` and the weight of the depth, which turns the sum over
        its predictions, divided by the weight of the whole loss, into their mean.
        """
        total, sums, labels_BSD = torch.zeros((), device=states_SBH[0].device), {}, batch.extra[LATER_TOKENS][..., 1:]
        for depth, (name, h_SBH) in enumerate(zip(self.names, states_SBH)):
            weight = batch.extra[LATER_WEIGHTS][depth] * self.coefficient
            mask_BS = batch.extra[LATER_MASK][..., depth].to(weight.dtype) * weight
            loss, cross_entropy = output_layer(
                h_SBH, labels_BSD[..., depth], mask_BS, loss_grad=batch.loss_grad, trains_weight=not self.detached
            )
            total, sums[name] = total + loss, cross_entropy / self.coefficient
        return total, sums
