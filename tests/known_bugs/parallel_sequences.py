"""Bugs of packed documents on context-parallel ranks, and of random numbers that ranks have in common or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron.distributed.context_parallel import ContextParallel
from megatron.kernels.attention_mask import AttentionMask
from megatron.layers.context import ForwardContext
from megatron.model.gpt import GPTChunk
from tests.distributed import detect, faults, faults_of_contexts, faults_of_recurrences
from tests.distributed.detect import DETECTORS, OF_RECURRENCES, training
from tests.distributed.detect_experts import EXPERTS
from tests.kit.cases import MODEL, Case, run_in_small_tiles
from tests.known_bugs.bug import KnownBug
from tests.known_bugs.parallel_gradients import LIKE_ONE

DOCUMENTS, RANDOM = "Packed documents under context parallelism", "Random numbers of ranks"

RING = Case(MODEL, detect.CP2_LATE.parallel, documents=detect.CP2_LATE.documents, steps=1)


def one_document() -> AbstractContextManager[Any]:
    """Context-parallel attention knows no documents."""
    original = ContextParallel.attention

    def attention(self: ContextParallel, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *rest: Any) -> Tensor:
        whole = replace(mask, documents=None, host_documents=None, known_boundaries=None)
        return original(self, q, k, v, whole, *rest)

    return patch.object(ContextParallel, "attention", attention)


@contextmanager
def one_document_of_recurrences() -> Iterator[None]:
    """States and convolutions run on from one document to the next."""
    with ExitStack() as faulty:
        for fault in (
            faults_of_recurrences.state_not_reset_in_a_chunk,
            faults_of_recurrences.state_not_reset_between_chunks,
            faults_of_recurrences.convolution_of_other_documents,
        ):
            faulty.enter_context(fault())
        yield


def other_seeds_on_tensor_ranks() -> AbstractContextManager[Any]:
    """Tensor-parallel ranks, whose hidden states are equal, drop different elements of them."""
    original = GPTChunk._forward_context

    def shifted(self: GPTChunk, *arguments: Any) -> ForwardContext:
        context = original(self, *arguments)
        return replace(context, seed=context.seed + self.context.tp.rank)

    return patch.object(GPTChunk, "_forward_context", shifted)


BUGS = {
    "attention-across-documents": KnownBug(
        reports=("axolotl-ai-cloud/axolotl#3608", "huggingface/trl#6843"),
        kind=DOCUMENTS,
        bug="Ring attention had no way to be given the ends of documents, so each document saw those before it: 1.83 "
        "times the loss with five documents.",
        check=f"samples of several documents with CP 2 in a ring {LIKE_ONE}",
        detector=training(RING, run_in_small_tiles),
        plant=one_document,
    ),
    "mamba-across-documents": KnownBug(
        reports=("PrimeIntellect-ai/prime-rl#3001", "NovaSky-AI/SkyRL#2056"),
        kind=DOCUMENTS,
        bug="After the exchange of rows for heads, Mamba convolved and scanned the sequence as one document.",
        check=f"Mamba-2 on samples of several documents with CP 2 by exchange of heads {LIKE_ONE}",
        detector=OF_RECURRENCES["mamba2-cp2-heads"],
        plant=one_document_of_recurrences,
    ),
    "delta-net-across-documents": KnownBug(
        reports=("hiyouga/LlamaFactory#10787",),
        kind=DOCUMENTS,
        bug="The ends of documents did not reach the gated DeltaNet layers, three quarters of the model, which carried "
        "their state on.",
        check=f"a gated DeltaNet on samples of several documents with CP 2 {LIKE_ONE}",
        detector=OF_RECURRENCES["gated-delta-net-cp2"],
        plant=one_document_of_recurrences,
    ),
    "later-tokens-across-documents": KnownBug(
        reports=("NVIDIA/Megatron-LM#4495", "NVIDIA/Megatron-LM#6205"),
        kind=DOCUMENTS,
        bug="Multi-token prediction shifted packed tokens by other ends of documents than those in memory, so labels "
        "came from the next document.",
        check="multi-token prediction on several documents with CP 2 against one process: loss, norm, all depths",
        detector=EXPERTS["heads-cp2"],
        plant=faults_of_contexts.later_tokens_of_the_next_document,
    ),
    "labels-shifted-after-the-cut": KnownBug(
        reports=("verl-project/verl#4250",),
        kind=DOCUMENTS,
        bug="Labels were shifted after the sequence was cut for the ranks: the last token of each part got a "
        "label from its own rank.",
        check="multi-token prediction with CP 2 against one process: loss, norm, all depths",
        detector=EXPERTS["heads-cp2"],
        plant=faults_of_contexts.later_tokens_of_own_rows,
    ),
    "replicas-drop-the-same": KnownBug(
        reports=("huggingface/accelerate#114", "huggingface/transformers#31412"),
        kind=RANDOM,
        bug="All replicas had the same random state, so they dropped the same elements of their different samples.",
        check=f"dropout on two replicas {LIKE_ONE}",
        detector=DETECTORS["dp2"],
        plant=faults.dropout_by_local_sample,
    ),
    "rows-drop-the-same": KnownBug(
        reports=("PaddlePaddle/PaddleFleetX#1005",),
        kind=RANDOM,
        bug="Sequence-parallel ranks dropped the same rows of their different parts.",
        check=f"dropout with TP 2 and sequence parallelism {LIKE_ONE}",
        detector=DETECTORS["tp2-sp"],
        plant=faults.dropout_by_local_row,
    ),
    "heads-drop-the-same": KnownBug(
        reports=("tenstorrent/tt-metal#55947",),
        kind=RANDOM,
        bug="Ranks with equal local shapes dropped the same attention weights of their different heads.",
        check=f"attention dropout with TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=faults.dropout_by_local_head,
    ),
    "copies-drop-differently": KnownBug(
        reports=("NVIDIA/Megatron-LM#206", "bigscience-workshop/Megatron-DeepSpeed#276"),
        kind=RANDOM,
        bug="A data loader drew from the random state of one tensor-parallel rank only, so ranks dropped different "
        "elements of hidden states that should be equal.",
        check=f"dropout with TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=other_seeds_on_tensor_ranks,
    ),
}
