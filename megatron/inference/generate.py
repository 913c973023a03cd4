"""Autoregressive generation with a key/value cache.

Shapes: S tokens, B prompts, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from megatron.config.model import ModelConfig
from megatron.inference.errors import InferenceError
from megatron.inference.sampling import Sampling, draw, sample
from megatron.layers.cache import KVCache
from megatron.model.gpt import GPTChunk

OnToken = Callable[[int, int, bool], None]
"""Called with the prompt's index, the token, and whether it is the prompt's last."""


def generate(
    chunk: GPTChunk,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    on_token: OnToken | None = None,
    batch_size: int = 8,
) -> list[list[int]]:
    """Generate a continuation of each prompt. Collective over the tensor-parallel ranks; the result is equal on all.

    A continuation depends on the prompt, its index and the seed, not on the other prompts of its batch.

    Args:
        chunk: the whole model; it is set to evaluation mode.
        prompts: token IDs, at least one per prompt.
        max_new_tokens: maximum length of a continuation, at least 1.
        sampling: sampling parameters.
        stop_ids: tokens that end a continuation; the last one is included.
        on_token: called with every token as soon as it is chosen.
        batch_size: number of prompts computed together.

    Returns:
        The new token IDs of each prompt.

    Raises:
        InferenceError: if the model cannot continue the prompts, or its logits are not finite.

    """
    check(chunk.config, prompts, max_new_tokens)
    chunk.eval()
    new: list[list[int]] = [[] for _ in prompts]

    def add_token(prompt: int, token: int) -> bool:
        """Store a token; return True if it is the prompt's last."""
        new[prompt].append(token)
        last = token in stop_ids or len(new[prompt]) == max_new_tokens
        if on_token is not None:
            on_token(prompt, token, last)
        return last

    for first in range(0, len(prompts), batch_size):
        _generate_batch(chunk, prompts[first : first + batch_size], first, max_new_tokens, sampling, add_token)
    return new


def _generate_batch(
    chunk: GPTChunk,
    prompts: Sequence[Sequence[int]],
    first: int,
    max_new_tokens: int,
    sampling: Sampling,
    add_token: Callable[[int, int], bool],
) -> None:
    """Continue the prompts from index ``first`` together until ``add_token`` has returned True for each."""
    device = chunk.context.device
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padding_B = torch.tensor([longest - length for length in lengths], device=device)
    cache = KVCache(longest + max_new_tokens, padding_B if min(lengths) < longest else None)
    tokens_BS = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    unfinished = set(range(len(prompts)))
    while unfinished:
        logits_BV = chunk.logits(tokens_BS, cache, last=1)[0]
        draws = [draw(sampling.seed, first + index, position) for index, position in enumerate(lengths)]
        draws_B = torch.tensor(draws, dtype=torch.float64).to(device)
        chosen_B = sample(logits_BV, sampling, draws_B)
        for index, token in enumerate(chosen_B.tolist()):
            if index in unfinished and add_token(first + index, token):
                unfinished.discard(index)
        tokens_BS = chosen_B.unsqueeze(1)
        lengths = [length + 1 for length in lengths]


def check(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that the model can continue the prompts.

    Raises:
        InferenceError: if a prompt is empty, has IDs outside the vocabulary, or leaves too few positions for the new
            tokens.

    """
    if max_new_tokens < 1:
        raise InferenceError(f"--max-new-tokens {max_new_tokens}: must be at least 1", "--max-new-tokens 100")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InferenceError(f"prompt {number} is empty: it needs at least one token")
        wrong = next((token for token in prompt if not 0 <= token < config.vocab), None)
        if wrong is not None:
            raise InferenceError(f"prompt {number} has id {wrong}, but the model's ids are 0..{config.vocab - 1}")
        length = len(prompt)
        limit = config.max_position_embeddings
        if limit is None or length + max_new_tokens <= limit:
            continue
        if length >= limit:
            raise InferenceError(
                f"prompt {number} has {length} tokens; the model has {limit} positions for prompt and new tokens",
                f"a prompt of at most {limit - 1} tokens",
            )
        raise InferenceError(
            f"prompt {number} has {length} tokens; {max_new_tokens} more would exceed the model's {limit} positions",
            f"--max-new-tokens {limit - length}",
        )
