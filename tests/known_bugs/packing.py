"""Bugs of documents that share a sample: nothing of one may reach another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config.model import ModelConfig
from megatron.config.multi_token import LATER_MASK, LATER_WEIGHTS
from megatron.data.later_tokens import columns_of_samples
from megatron.data.loader import BatchArrays, MaskBuilder
from megatron.distributed.micro_batch import MicroBatch
from tests.distributed import faults_of_contexts, faults_of_recurrences
from tests.distributed.grid import STATES
from tests.kit.solo import TINY, Solo, tiny
from tests.known_bugs.alone import alone, distance
from tests.known_bugs.bug import KnownBug

END = 100
"""Ends a document; no other token is one."""
APART = MaskBuilder(eod=END, reset_positions=True, reset_attention=True, mask_eod_loss=True)
LENGTHS = (5, 8, 3)

RECURRENT = {"num_layers": 1, "position_embedding_type": "none", "normalization": "RMSNorm"}
MAMBA = tiny(token_mixers=("mamba2",), **RECURRENT, **STATES["mamba2"])
PREDICTS_MORE = tiny(mtp_num_layers=2, position_embedding_type="rope")


def packed(rank: int, world_size: int, config: ModelConfig) -> float:
    """Loss and gradients of documents that share a sample, from those of each in a sample of its own."""
    random = np.random.RandomState(1)
    documents = [np.append(random.randint(0, END, length - 1), END) for length in LENGTHS]
    solo = Solo.build(config)
    texts = [[np.concatenate(documents)], documents]
    (loss, grads), (expected_loss, expected) = (train(solo, each, masks) for each, masks in zip(texts, MASKS))
    return max(distance(grads, expected), abs(loss / expected_loss - 1.0))


MASKS = (APART, MaskBuilder())


def train(solo: Solo, texts: Sequence[NDArray[np.int64]], masks: MaskBuilder) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of texts, each a micro-batch of one sample."""
    depths = solo.chunk.config.mtp_num_layers or 0
    batches = [batch_of(text, masks, depths) for text in texts]
    if depths:
        labels = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
        later = torch.stack([batch.extra[LATER_MASK].sum((0, 1)) for batch in batches]).sum(0)
        for batch in batches:
            batch.extra[LATER_WEIGHTS] = (labels / later).double()
    return solo.backward(batches).item(), solo.snapshot()


def batch_of(text: NDArray[np.int64], masks: MaskBuilder, depths: int) -> MicroBatch:
    """A text as a sample, with the later tokens that a model predicts."""
    columns = masks.build(text[None, :-1], text[None, 1:])
    extra = columns_of_samples(depths, columns, masks.eod) if depths else {}
    tokens, labels, mask = (torch.from_numpy(column) for column in columns[:3])
    positions, documents = (None if column is None else torch.from_numpy(column) for column in columns[3:5])
    later = {name: torch.from_numpy(column) for name, column in extra.items()}
    return MicroBatch(tokens, labels, mask, torch.arange(1), 0, positions, documents, extra=later)


def _without(**columns: Any) -> AbstractContextManager[Any]:
    """Replace columns of what masks are built into."""
    original = MaskBuilder.build
    return patch.object(MaskBuilder, "build", lambda self, *given: original(self, *given)._replace(**columns))


def attention_across_documents() -> AbstractContextManager[Any]:
    """Tokens attend to those of the documents before."""
    return _without(documents=None, boundaries=None)


def positions_of_the_sample() -> AbstractContextManager[Any]:
    """Positions count from the beginning of the sample."""
    return _without(positions=None)


def first_tokens_predicted() -> AbstractContextManager[Any]:
    """The last token of a document is trained to predict the first one of the next."""
    original = MaskBuilder.build

    def build(self: MaskBuilder, tokens: NDArray[np.int64], *rest: Any) -> BatchArrays:
        return original(self, tokens, *rest)._replace(loss_mask=np.ones(tokens.shape, np.float32))

    return patch.object(MaskBuilder, "build", build)


SAME = "loss and every gradient of three documents in one sample, against each document in a sample of its own"

BUGS = {
    "documents-attend": KnownBug(
        reports=("huggingface/nanoVLM#204", "huggingface/trl#784", "huggingface/transformers#25452"),
        kind="Packed documents",
        bug="tokens attended to the other documents of their sample",
        check=SAME,
        detector=alone(packed, TINY),
        plant=attention_across_documents,
    ),
    "positions-run-on": KnownBug(
        reports=("hiyouga/LlamaFactory#7318", "huggingface/nanoVLM#201"),
        kind="Packed documents",
        bug="position ids were not reset, so later documents were trained at positions that inference never uses",
        check=SAME,
        detector=alone(packed, TINY),
        plant=positions_of_the_sample,
    ),
    "first-tokens-predicted": KnownBug(
        reports=("pytorch/torchtitan#4075", "alex-hh/profam#504"),
        kind="Packed documents",
        bug="the last token of a document was trained to predict the first one of the next",
        check=SAME,
        detector=alone(packed, TINY),
        plant=first_tokens_predicted,
    ),
    "convolution-crosses-documents": KnownBug(
        reports=("huggingface/transformers#46588",),
        kind="Packed documents",
        bug="attention kept documents apart, but the short convolution slid across their boundaries",
        check=f"{SAME} (Mamba-2)",
        detector=alone(packed, MAMBA),
        plant=faults_of_recurrences.convolution_of_other_documents,
    ),
    "state-crosses-documents": KnownBug(
        reports=("NovaSky-AI/SkyRL#2056",),
        kind="Packed documents",
        bug="the recurrent state of Mamba layers flowed from one document into the next",
        check=f"{SAME} (Mamba-2)",
        detector=alone(packed, MAMBA),
        plant=faults_of_recurrences.state_not_reset_in_a_chunk,
    ),
    "later-tokens-cross-documents": KnownBug(
        reports=("NVIDIA/Megatron-LM#6205", "areal-project/AReaL#1445"),
        kind="Packed documents",
        bug="multi-token prediction rolled its labels across the boundaries of packed sequences",
        check=f"{SAME} (two further predictions)",
        detector=alone(packed, PREDICTS_MORE),
        plant=faults_of_contexts.later_tokens_of_the_next_document,
    ),
}
