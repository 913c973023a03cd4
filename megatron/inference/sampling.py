"""Sample the next token from a model's logits.

Shapes: B prompts, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.errors import InferenceError
from megatron.parallel.random import hash_of


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Invalid values raise InferenceError."""

    temperature: float = 1.0  # divides the logits; 0 is greedy decoding
    top_k: int | None = None  # keep the k most likely tokens and ties with the k-th; None for all
    top_p: float | None = None  # keep the fewest most likely tokens with this total probability; None for all
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InferenceError(f"temperature {self.temperature}: must be at least 0", "--temperature 0.8", "--greedy")
        if self.top_k is not None and self.top_k < 1:
            raise InferenceError(f"top-k {self.top_k}: must be at least 1", "--top-k 50")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InferenceError(f"top-p {self.top_p}: must be above 0 and at most 1", "--top-p 0.95")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def sample(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """Sample one token per prompt, int64 ``[B]``.

    Args:
        logits_BV: logits of the next token.
        sampling: sampling parameters.
        draws_B: fp64 numbers in [0, 1); the token is the first whose cumulative probability exceeds the number.

    Raises:
        InferenceError: if the logits are not finite.

    """
    if not logits_BV.isfinite().all():
        raise InferenceError(
            "the model's logits are not finite: its weights are NaN or infinite, or overflow in 16 bits"
        )
    if sampling.greedy:
        return logits_BV.argmax(-1)
    cumulative_BV = filter_logits(logits_BV, sampling).softmax(-1).cumsum(-1)
    cumulative_BV /= cumulative_BV[:, -1:].clone()  # the last entry is exactly 1, above every draw
    return torch.searchsorted(cumulative_BV, draws_B.unsqueeze(1), right=True).squeeze(1)


def filter_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Scale logits by the temperature and set filtered tokens to -inf; fp64, the largest logit is 0.

    Top-k is applied before top-p. The order and the treatment of ties under top-k are those of `transformers`.
    """
    logits_BV = logits_BV.double()
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # before dividing, so that the largest logit stays 0
    # a tensor, because CUDA replaces the division by a Python number with a multiplication by its reciprocal
    logits_BV = shifted_BV / shifted_BV.new_tensor(sampling.temperature)
    if sampling.top_k is not None:
        kth_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        logits_BV = _filter_top_p(logits_BV, sampling.top_p)
    return logits_BV


def _filter_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """Apply nucleus sampling (Holtzman et al. 2020): keep tokens if all more likely ones sum to less than ``top_p``."""
    sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(-1)
    likelier_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    likelier_BV = torch.empty_like(likelier_BV).scatter_(1, order_BV, likelier_BV)  # back to the order of IDs
    return logits_BV.masked_fill(likelier_BV >= top_p, float("-inf"))


def draw(seed: int, prompt: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends only on seed, prompt index and token position."""
    return (hash_of("sample", seed, prompt, position) >> 10) * 2.0**-53
