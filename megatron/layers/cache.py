"""Keys and values of what a model has read, so that generating reads every token once.

Shapes: S new tokens, T tokens read in all, B prompts, G this rank's key/value heads, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Room for ``capacity`` tokens of each prompt, in every attention layer that asks for it.

    Prompts of different lengths end together: the shorter ones begin with padding, which is never looked at.

    Attributes:
        capacity: tokens of a prompt there is room for, padding included.
        padding_B: int64 tokens of padding that each prompt begins with; None when there is none.
        length: tokens read.
    """

    def __init__(self, capacity: int, padding_B: Tensor | None = None) -> None:
        self.capacity, self.padding_B, self.length = capacity, padding_B, 0
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: str, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's keys and values of the next S tokens; returns those of all tokens, ``[T, B, G, D]`` each.

        The tokens count as read once :meth:`advance` says so: every layer takes the same ones.

        Raises:
            ValueError: when there is no room for them.
        """
        s, b, g, d = k_SBGD.shape
        stop = self.length + s
        if stop > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, not for {stop}")
        if layer not in self._layers:
            k, v = (k_SBGD.new_empty(b, g, self.capacity, d) for _ in "kv")
            self._layers[layer] = k, v
        for kept_BGTD, new_SBGD in zip(self._layers[layer], (k_SBGD, v_SBGD)):
            kept_BGTD[:, :, self.length : stop] = new_SBGD.permute(1, 2, 0, 3)
        k_TBGD, v_TBGD = (kept[:, :, :stop].permute(2, 0, 1, 3) for kept in self._layers[layer])
        return k_TBGD, v_TBGD

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has taken."""
        self.length += tokens

    def positions(self, tokens_BS: Tensor) -> Tensor:
        """Position ``[B, S]`` of each of the next tokens in its own prompt; 0 for padding."""
        slots = torch.arange(self.length, self.length + tokens_BS.shape[1], device=tokens_BS.device)
        return (slots.expand_as(tokens_BS) - self._padding(tokens_BS)).clamp(min=0)

    def documents(self, tokens_BS: Tensor) -> Tensor | None:
        """Which of the tokens read and the next ones are a prompt (1) and which padding (0), ``[B, T]``."""
        if self.padding_B is None:
            return None
        slots = torch.arange(self.length + tokens_BS.shape[1], device=tokens_BS.device)
        return (slots >= self._padding(tokens_BS)).long()

    def _padding(self, tokens_BS: Tensor) -> Tensor:
        """``[B, 1]``."""
        none = torch.zeros_like(tokens_BS[:, 0])
        return (none if self.padding_B is None else self.padding_B).unsqueeze(1)
