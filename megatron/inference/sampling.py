"""Choosing the next token from a model's logits.

Shapes: B prompts, V entries of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.errors import InferenceError
from megatron.parallel.random import hash_of


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; what the filters leave keeps its proportions.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: only this many of the likeliest tokens, and what is as likely as the last of them; None for all.
        top_p: only the fewest of the likeliest tokens that together have this probability; None for all.
        seed: of the draws.

    Raises:
        InferenceError: when a number is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
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
        """Whether nothing is drawn."""
        return self.temperature == 0.0


def sample(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """One token per prompt: int64 ``[B]``.

    Args:
        logits_BV: of the next token.
        sampling: how to choose.
        draws_B: fp64 numbers in [0, 1), one per prompt: the token is where the cumulative probability passes it.

    Raises:
        InferenceError: when the logits are not numbers.
    """
    if not logits_BV.isfinite().all():
        raise InferenceError(
            "the model's logits are not finite: its weights are, or became in 16 bits, NaN or infinite"
        )
    if sampling.greedy:
        return logits_BV.argmax(-1)
    cumulative_BV = filter_logits(logits_BV, sampling).softmax(-1).cumsum(-1)
    cumulative_BV /= cumulative_BV[:, -1:].clone()  # ends in exactly 1, which no draw reaches
    return torch.searchsorted(cumulative_BV, draws_B.unsqueeze(1), right=True).squeeze(1)


def filter_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, in fp64 and less the largest; -inf where a token is left out.

    First by top-k, then by top-p of what remains. The order, and what happens to equal logits under top-k, are those
    of `transformers`.
    """
    logits_BV = logits_BV.double()
    below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # first, so that 0 stays 0 however small the temperature
    logits_BV = below_BV / below_BV.new_tensor(sampling.temperature)  # CUDA multiplies by a plain number's reciprocal
    if sampling.top_k is not None:
        kth_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        logits_BV = _nucleus(logits_BV, sampling.top_p)
    return logits_BV


def _nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """Top-p (Holtzman et al. 2020): a token stays if the likelier ones together have less than ``top_p``."""
    sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(-1)
    likelier_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    likelier_BV = torch.empty_like(likelier_BV).scatter_(1, order_BV, likelier_BV)  # back into the ids' order
    return logits_BV.masked_fill(likelier_BV >= top_p, float("-inf"))


def draw(seed: int, prompt: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` of prompt ``prompt``: the same whatever else is generated."""
    return (hash_of("sample", seed, prompt, position) >> 10) * 2.0**-53
