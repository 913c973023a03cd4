"""Heads of the last stage: what training predicts beside the objective, from the same hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import ForwardContext, Losses
from megatron.layers.loss import OutputLayer


class Heads(nn.Module):
    """The heads of a model; their parameters are declared by :func:`megatron.layers.parameters.heads_of`."""

    @property
    @abstractmethod
    def parts(self) -> list[nn.Module]:
        """The submodules in the order in which forward calls them; together they have all parameters."""

    @abstractmethod
    def forward(self, h_SBH: Tensor, losses: Losses, ctx: ForwardContext) -> tuple[Sequence[Tensor], Losses]:
        """Return a hidden state of each head ``[S(/tp), B, H]``, and the auxiliary losses so far.

        Args:
            h_SBH: output of the model, after the final norm.
            losses: auxiliary losses of the model's blocks.
            ctx: of the model's blocks.
        """

    @abstractmethod
    def loss(
        self, states_SBH: Sequence[Tensor], batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return what is added to the summed loss of a micro-batch, and detached sums by the names of the losses.

        Both are in units of the objective's: the step divides them by the objective's weight of the global batch. The
        output layer is called once for each head, after all its other calls.
        """
