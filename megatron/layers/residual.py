"""The residual stream between layers, and what a mixer adds to it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.kernels.bias import with_bias_gradient


class MixerOutput(NamedTuple):
    """What a mixer returns."""

    # ``[S(/tp), B, H]``, added to the residual stream.
    y: Tensor
    # The bias that y contains, if its gradient is still to be taken (see :mod:`megatron.kernels.bias`).
    bias: Tensor | None = None
    # Losses of a router ``[2]``, summed over the layers; None without.
    losses: Tensor | None = None

    def sum(self) -> Tensor:
        """Return ``y`` with the gradient of its bias."""
        return with_bias_gradient(self.y, self.bias)


class Residual(NamedTuple):
    """The hidden state as a sum ``x + y`` that is still to be taken: the next norm takes it in its own kernel."""

    x: Tensor
    # Output of a mixer; None if there is nothing to add.
    y: Tensor | None = None
    # The bias that y contains, if its gradient is still to be taken.
    y_bias: Tensor | None = None

    def sum(self) -> Tensor:
        """Return ``x + y``."""
        return self.x if self.y is None else self.x + with_bias_gradient(self.y, self.y_bias)


def add_losses(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of the losses of layers, of which some have none."""
    return b if a is None else a if b is None else a + b
