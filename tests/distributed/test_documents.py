"""Documents that share a sample do not see each other: runs on several layouts, in fp64.

A sample of four documents from token files is compared with the documents run alone, and packed conversations with
the same conversations packed otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.arguments.sources import resolve
from megatron.config.data import DataConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.kit.cases import FP64, LR, MODEL, OPTIMIZER, RATES, TRAINING
from tests.kit.pool import Pool
from tests.kit.runs import tiny_run
from tools.lib.verify_parallel import RankTrace, compare_traces, join_traces, trace_step

EOD = 7
LENGTHS = (6, 4, 8, 6)
"""Tokens of the documents, the end included; they fill a sample, and the sequence-parallel ranks."""
SEQ_LENGTH = sum(LENGTHS)
SEPARATE = {
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "reset_attention_pattern": True,
    "eod_mask_loss": True,
}


@dataclass(frozen=True)
class Layout:
    """A model, and how it is cut and computed."""

    model: dict[str, Any]
    tp: int = 1
    training: TrainingConfig = TRAINING
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Return their number."""
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
PATTERNS = {"attention_pattern": "chunked:3,local:2+first:1"}
LAYOUTS = {
    "learned": Layout({}),
    "learned, patterns": Layout(PATTERNS),
    "rope, patterns on CP 3": Layout({**ROPE, **PATTERNS}, cp=3),
    "learned, a prefix on TP 2 and CP 2": Layout(
        {"attention_pattern": "local:2+prefix:2,dilated:2:2+first:1"}, 2, cp=2
    ),
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
        counts[0, : max(config.model.attention_prefix - 1, 0)] = 0  # the prefix shows these
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
    got = join_traces(pool.run(layout.ranks, packed, config))
    assert got.drifted == []
    assert [d for d in compare_traces(0, got, reference, 1e-5, LR) if d.error > 1e-10] == []


@pytest.mark.parametrize("left_out", SEPARATE)
def test_each_flag_is_needed_for_that(pool: Pool, tmp_path: Path, left_out: str) -> None:
    config = LAYOUTS["learned, patterns"].config(write(tmp_path / "a", text()), **(SEPARATE | {left_out: False}))
    worst = max(
        compare_traces(0, join_traces(pool.run(1, packed, config)), join_traces([alone(config)]), 1e-5, LR),
        key=lambda d: d.error,
    )
    assert worst.error > 1e-3


CONVERSATIONS = "--fp64 --vocab-size 257 --tokenizer-type ByteTokenizer --no-mock-data --global-batch-size 8"
ANSWERS = [("ab"[i % 2], "bc" * (i % 4 + 1), "d" * (i % 5 + 2)) for i in range(7)]
OBJECTIVES = {
    "sft": [{"prompt": prompt, "completion": chosen} for prompt, chosen, _ in ANSWERS],
    "dpo": [
        {"prompt": p, "chosen": c, "rejected": r, "ref_chosen_logps": -3.0 * len(c), "ref_rejected_logps": -2.0}
        for p, c, r in ANSWERS
    ],
    "dpo of ties": [
        {"prompt": p, "chosen": c, "rejected": r, "ref_chosen_logps": -2.0, "ref_rejected_logps": -2.0 - lead}
        for p, c, _ in ANSWERS
        for r, lead in ((c, 0.0), (f"{c}e", 90.0 if p == "a" else -90.0))
    ],
}
CP = "--context-parallel-size"
PACKINGS = {
    "another length": ("--seq-length 96", 1),
    "CP 2": (f"--seq-length 48 {CP} 2", 2),
    "CP 2, heads": (f"--seq-length 96 {CP} 2 --cp-comm-type a2a", 2),
    "CP 2, gathered, TP 2": (f"{CP} 2 --cp-comm-type all_gather --tensor-model-parallel-size 2", 4),
    "CP 4, both": (f"--seq-length 48 {CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
}


def conversations_of(folder: Path, objective: str, pattern: str, flags: str, ranks: int = 1) -> RunConfig:
    """A step on all conversations, in samples of 24 positions by default."""
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in OBJECTIVES[objective]))
    kind = "" if objective == "sft" else " --objective dpo"
    data = f"{CONVERSATIONS}{kind} --set data.chat_data_path={path} --data-cache-path {folder}"
    sizes = "--max-position-embeddings 96 --seq-length 24"
    return tiny_run(folder, f"{data} {sizes} --attention-pattern {pattern} {flags}", ranks)


@pytest.mark.parametrize(
    ("objective", "positions", "pattern"),
    [
        ("sft", "learned_absolute", "chunked:5,local:3+first:2"),
        ("dpo", "rope", "chunked:4+first:1,dilated:3:2+first:3"),
    ],
)
def test_training_does_not_depend_on_packing(
    pool: Pool, tmp_path: Path, objective: str, positions: str, pattern: str
) -> None:
    def config(flags: str = "", ranks: int = 1) -> RunConfig:
        more = f"--position-embedding-type {positions} {flags}"
        return conversations_of(tmp_path, objective, pattern, more, ranks)

    reference = join_traces([packed(0, 1, config())])
    for name, (flags, ranks) in PACKINGS.items():
        got = join_traces(pool.run(ranks, packed, config(flags, ranks)))
        assert got.drifted == []
        assert [d for d in compare_traces(0, got, reference, 1e-5, LR) if d.error > 1e-12] == [], name


def accuracy(rank: int, world_size: int, config: RunConfig) -> float:
    trainer = build_trainer(config, rank, world_size)
    return train_step(trainer, trainer.next_batches(), RATES).extra["rewards/accuracies"].item()


def test_pairs_of_equal_answers_are_ties_in_every_layout(pool: Pool, tmp_path: Path) -> None:
    """Half of the pairs: their rewards differ by what rounding makes of the places of the answers."""
    for flags, ranks in (("", 1), PACKINGS["CP 2"], PACKINGS["CP 2, gathered, TP 2"]):
        config = conversations_of(tmp_path, "dpo of ties", "local:3", flags, ranks)
        found = pool.run(ranks, accuracy, config)
        assert found == [pytest.approx(3 / 14, rel=1e-12)] * ranks, flags
