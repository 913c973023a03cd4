"""Bugs of generation and of the loss: what a model computes of tokens, against plain formulas."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.dataset import Sample
from megatron.data.loader import build_data
from megatron.distributed.micro_batch import MicroBatch
from megatron.inference.generate import SamplingParams, generate
from megatron.layers.kv_cache import KVCache
from megatron.layers.loss import OutputLayer
from megatron.model.objective import NextTokenPrediction
from tests.distributed import faults
from tests.kit.solo import TINY, Solo
from tests.known_bugs.alone import alone
from tests.known_bugs.bug import KnownBug
from tests.unit.data import pairs

PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3], [50]]
NEW = 6
LENGTH = 16


def generated(rank: int, world_size: int) -> float:
    """Share of greedy tokens of prompts in one batch that are not those of the whole text so far, each alone."""
    chunk = Solo.build(TINY).chunk
    found = generate(chunk, PROMPTS, NEW, SamplingParams(0.0))
    wrong = 0
    for prompt, new in zip(PROMPTS, found, strict=True):
        text = list(prompt)
        for token in new:
            best = int(chunk.logits(torch.tensor([text]))[-1, 0].argmax())
            wrong += token != best
            text.append(best)
    return wrong / (NEW * len(PROMPTS))


def positions_of_the_batch() -> AbstractContextManager[Any]:
    """The positions of shorter prompts count their padding."""

    def positions(cache: KVCache, tokens_BS: Tensor) -> Tensor:
        return torch.arange(cache.length, cache.length + tokens_BS.shape[1]).expand_as(tokens_BS)

    return patch.object(KVCache, "positions", positions)


def padding_attended_to() -> AbstractContextManager[Any]:
    """Tokens of shorter prompts attend to their padding."""
    return patch.object(KVCache, "documents", lambda cache, tokens_BS: None)


def predicted(rank: int, world_size: int) -> float:
    """The loss of a text whose ids count up, from torch's cross-entropy of each id plus 1, over the vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = pairs.write(Path(folder) / "text", [list(range(TINY.vocab))], np.int32)
        training = TrainingConfig(seq_length=LENGTH, train_samples=4, micro_batch_size=4, global_batch_size=4)
        source = build_data(DataConfig(data_path=(str(prefix),), split="1"), training, TINY.vocab, 1)
        batch = source.micro_batch("train", range(4), 0)
    solo = Solo.build(TINY)
    loss = solo.backward([batch])
    solo.chunk.eval()
    logits_BSV = solo.chunk.logits(batch.tokens).transpose(0, 1)[..., : TINY.vocab]
    expected = F.cross_entropy(logits_BSV.flatten(0, 1), batch.tokens.flatten() + 1)
    return abs(loss.item() / expected.item() - 1.0)


def labels_shifted_again() -> AbstractContextManager[Any]:
    """The data shift the labels, and so does the model."""
    original = NextTokenPrediction.__call__

    def call(self: NextTokenPrediction, hidden: Tensor, batch: MicroBatch, output_layer: OutputLayer) -> Any:
        return original(self, hidden, replace(batch, labels=batch.labels.roll(-1, 1)), output_layer)

    return patch.object(NextTokenPrediction, "__call__", call)


def labels_not_shifted() -> AbstractContextManager[Any]:
    """The model learns to repeat its input."""

    def of(text: NDArray[np.int64]) -> Sample:
        return Sample(text[:-1], text[:-1])

    return patch.object(Sample, "of", of)


ALONE = "greedy text of three prompts in one batch against the best next token of each text alone, without a cache"
COUNTING = "the loss of a text of ids that count up, against torch's cross-entropy of each id plus 1"

BUGS = {
    "positions-count-padding": KnownBug(
        reports=("unslothai/unsloth#3699", "ndif-team/nnsight#673"),
        kind="Generation",
        bug="shorter prompts of a batch got the positions of the longest, so their text was wrong",
        check=ALONE,
        detector=alone(generated),
        plant=positions_of_the_batch,
    ),
    "padding-attended-to": KnownBug(
        reports=("huggingface/optimum-neuron#264", "turboderp/exllama#101"),
        kind="Generation",
        bug="prompts attended to the padding before them",
        check=ALONE,
        detector=alone(generated),
        plant=padding_attended_to,
    ),
    "labels-shifted-twice": KnownBug(
        reports=("huggingface/transformers#44642",),
        kind="Loss",
        bug="the data shifted the labels and so did the model, which learned the token after the next",
        check=COUNTING,
        detector=alone(predicted),
        plant=labels_shifted_again,
    ),
    "labels-not-shifted": KnownBug(
        reports=("macrocosm-os/pretraining#64",),
        kind="Loss",
        bug="nobody shifted the labels: the model was trained and scored on repeating its input",
        check=COUNTING,
        detector=alone(predicted),
        plant=labels_not_shifted,
    ),
    "padded-vocabulary-counts": KnownBug(
        reports=("verl-project/verl#5349", "unslothai/unsloth#10616"),
        kind="Loss",
        bug="rows beyond the vocabulary added to the sum of the softmax",
        check=COUNTING,
        detector=alone(predicted),
        plant=faults.padding_in_the_partition_function,
    ),
}
