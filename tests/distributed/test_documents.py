"""Documents that share a sample do not see each other: a run from token files, on several layouts, in fp64.

A sample of four documents is compared with the documents run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.arguments.sources import resolve
from megatron.config.parallel import ParallelConfig
from megatron.config.run import DataConfig, RunConfig, TrainingConfig
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.distributed.drive import FP64, LR, MODEL, OPTIMIZER, RATES, TRAINING
from tests.distributed.pool import Pool
from tools.lib.verify_parallel import RankTrace, compare_traces, join_traces, trace_step

EOD = 7
LENGTHS = (6, 4, 8, 6)
"""Tokens of the documents, the end included; they fill a sample, and the sequence-parallel ranks."""
SEQ_LENGTH = sum(LENGTHS)
SEPARATE = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@dataclass(frozen=True)
class Layout:
    """A model, and how it is cut and computed."""

    model: dict[str, Any]
    tp: int = 1
    training: TrainingConfig = TRAINING
    cp: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tp * self.cp

    def config(self, prefix: Path, **flags: bool) -> RunConfig:
        """One step on the only sample of a file."""
        training = replace(
            self.training, seq_length=SEQ_LENGTH, global_batch_size=1, train_iters=1, device="cpu", micro_batch_size=1
        )
        model = replace(MODEL, **self.model, max_position_embeddings=SEQ_LENGTH)
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tp, sequence_parallel=self.tp > 1, context_parallel_size=self.cp
        )
        data = DataConfig(data_path=(str(prefix),), split="1", eod_id=EOD, **flags)
        return resolve(RunConfig(model, parallel, FP64, training, optimizer=OPTIMIZER, data=data), self.ranks)


ROPE = {"position_embedding_type": "rope", "num_query_groups": 2}
LAYOUTS = {
    "learned": Layout({}),
    "rope, window": Layout({**ROPE, "window_size": 3}),
    "learned, MQA on TP 2": Layout({"num_query_groups": 1}, 2),
    "rope, GQA on TP 2, everything recomputed": Layout(ROPE, 2, TrainingConfig(recompute_granularity="full")),
    "learned, on CP 3": Layout({}, cp=3),
    "rope, GQA, window on TP 2 and CP 2": Layout({**ROPE, "window_size": 3}, 2, cp=2),
    "rope, GQA, window on TP 2, attention recomputed": Layout(
        {**ROPE, "window_size": 3},
        2,
        TrainingConfig(recompute_granularity="selective", recompute_modules=("core_attn",)),
    ),
}


def text() -> list[int]:
    """The ids of the documents, and the first one of another, which the last label asks for."""
    random = np.random.default_rng(3)
    documents = [[*random.integers(EOD + 1, MODEL.vocab, length - 1).tolist(), EOD] for length in LENGTHS]
    return [i for document in documents for i in document] + [EOD + 1]


def write(prefix: Path, ids: list[int]) -> Path:
    """One sequence, so that the only sample is all of it in its order."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(ids)
    return prefix


def one_step(trainer: Trainer, batches: list[MicroBatch]) -> RankTrace:
    return trace_step(trainer, train_step(trainer, batches, RATES))


def packed(rank: int, world_size: int, config: RunConfig) -> RankTrace:
    """A step on the sample."""
    trainer = build_trainer(config, rank, world_size)
    return one_step(trainer, trainer.next_batches())


def alone(config: RunConfig) -> RankTrace:
    """A step on each of its documents as a micro-batch of its own, made by hand."""
    ids, batches, start = torch.tensor([text()]), [], 0
    for length in LENGTHS:
        tokens, labels = ids[:, start : start + length], ids[:, start + 1 : start + length + 1]
        counts = torch.ones(1, length)
        counts[0, -1] = 0  # what follows the end of a document
        batches.append(MicroBatch(tokens, labels, counts, torch.tensor([0])))
        start += length
    training = TrainingConfig(seq_length=SEQ_LENGTH, global_batch_size=1, train_iters=1, device="cpu")
    plain = replace(config, parallel=ParallelConfig(), training=training)
    return one_step(build_trainer(replace(plain, data=DataConfig(mock_data=True)), 0, 1), batches)


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_in_one_sample_train_like_documents_alone(pool: Pool, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    config = layout.config(write(tmp_path / "a", text()), **SEPARATE)
    reference = join_traces([alone(config)])
    got = join_traces(pool.run(layout.ranks, packed, config, check_collectives=False))
    assert got.drifted == []
    assert [d for d in compare_traces(0, got, reference, 1e-5, LR) if d.error > 1e-10] == []


@pytest.mark.parametrize("left_out", SEPARATE)
def test_each_flag_is_needed_for_that(pool: Pool, tmp_path: Path, left_out: str) -> None:
    config = LAYOUTS["learned"].config(write(tmp_path / "a", text()), **(SEPARATE | {left_out: False}))
    worst = max(
        compare_traces(0, join_traces(pool.run(1, packed, config)), join_traces([alone(config)]), 1e-5, LR),
        key=lambda d: d.error,
    )
    assert worst.error > 1e-3
