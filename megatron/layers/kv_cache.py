"""Key/value cache for generation.

Shapes: S new tokens, T tokens read so far plus the new ones, B prompts, G this rank's key/value heads, D channels of
a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of up to ``capacity`` tokens per prompt, for every attention layer.

    Prompts of different lengths end together: shorter ones begin with padding, which is masked.
    """

    def __init__(self, capacity: int, padding_B: Tensor | None = None) -> None:
        """Create an empty cache.

        Args:
            capacity: tokens per prompt, padding included.
            padding_B: int64, tokens of padding at the start of each prompt; None when there is none.
        """
        self.capacity, self.padding_B = capacity, padding_B
        # Tokens read.
        self.length = 0
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}
        # States of constant size, of the mixers that keep one, by the global name of the module.
        self.states: dict[str, Tensor] = {}

    def extend(self, layer: str, k_SBGD: Tensor, v_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values of the next S tokens; return those of all tokens, ``[T, B, G, D]`` each.

        They may differ in heads and channels.

        The new tokens count as read once :meth:`advance` is called, after every layer has stored them.

        Raises:
            ValueError: when the capacity is exceeded.
        """
        stop = self.length + len(k_SBGD)
        if stop > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, not for {stop}")
        if layer not in self._layers:
            k, v = (t.new_empty(*t.shape[1:3], self.capacity, t.shape[3]) for t in (k_SBGD, v_SBGD))
            self._layers[layer] = k, v
        for stored_BGTD, new_SBGD in zip(self._layers[layer], (k_SBGD, v_SBGD)):
            stored_BGTD[:, :, self.length : stop] = new_SBGD.permute(1, 2, 0, 3)
        k_TBGD, v_TBGD = (stored[:, :, :stop].permute(2, 0, 1, 3) for stored in self._layers[layer])
        return k_TBGD, v_TBGD

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        stored = [each for layer in self._layers.values() for each in layer]
        return sum(each.nbytes for each in (*stored, *self.states.values()))

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more tokens as read, in every layer."""
        self.length += tokens

    def positions(self, tokens_BS: Tensor) -> Tensor:
        """Return the position ``[B, S]`` of each new token in its own prompt; 0 for padding."""
        slots = torch.arange(self.length, self.length + tokens_BS.shape[1], device=tokens_BS.device)
        return (slots.expand_as(tokens_BS) - self._padding(tokens_BS)).clamp(min=0)

    def documents(self, tokens_BS: Tensor) -> Tensor | None:
        """Return 1 for prompt tokens and 0 for padding, ``[B, T]``; None without padding."""
        if self.padding_B is None:
            return None
        slots = torch.arange(self.length + tokens_BS.shape[1], device=tokens_BS.device)
        return (slots >= self._padding(tokens_BS)).long()

    def _padding(self, tokens_BS: Tensor) -> Tensor:
        """Return the length of each prompt's padding, ``[B, 1]``."""
        none = torch.zeros_like(tokens_BS[:, 0])
        return (none if self.padding_B is None else self.padding_B).unsqueeze(1)
