"""Training steps of the layout tests, on generated micro-batches with masks, documents and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.compute import ComputeConfig
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.multi_token import LATER_MASK
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.plugins import load_plugins
from megatron.config.precision import PrecisionConfig
from megatron.config.router import PADDING
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.data.later_tokens import columns_of_samples
from megatron.data.loader import BatchArrays, MaskBuilder, rank_micro_batches
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels import block_attention
from megatron.layers.parameters import gpt, trainable
from megatron.optimizer.lr_scheduler import Rates
from megatron.pipeline.plan import resolve_pipeline
from megatron.training.build import build_trainer
from megatron.training.components.adapter_base import initialize_magnitudes
from megatron.training.frozen_models import FrozenModelInputs
from megatron.training.step import evaluate, train_step
from megatron.training.trainer import Trainer
from tests.kit.pool import PATIENCE, Pool
from tests.kit.runs import part_of
from tests.kit.shared_memory_group import BACKEND
from tools.lib.verify_parallel import RankTrace, StepDeviation, StepTrace, compare_traces, join_traces, trace_step

SEQ_LENGTH = 24
"""Context parallelism of 2, 3 and 4 cuts it, and TP of up to 8 / CP cuts each part."""
GLOBAL_BATCH = 4
"""Default number of samples."""
LR = 1e-2
RATES = Rates(LR, 0.1, decoupled_lr=LR / 4)


def context_parallel(method: str, *sizes: int, ranks: int = 2, **rest: Any) -> dict[str, Any]:
    """Return options of context parallelism, and others; ``sizes`` are those of a2a+p2p."""
    return {
        "context_parallel_size": ranks,
        "cp_comm_type": method,
        "hierarchical_context_parallel_sizes": sizes,
        **rest,
    }


def selective(*modules: str, **rest: Any) -> dict[str, Any]:
    """Return the options that recompute some modules, and others."""
    return {"recompute_granularity": "selective", "recompute_modules": modules, **rest}


MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    vocab_size=101,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=SEQ_LENGTH,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.2,
)
ONE_RANK = ParallelConfig()
FP64 = PrecisionConfig(params_dtype="fp64")
TRAINING = TrainingConfig()
ONE_DOCUMENT = MaskBuilder()
STOCK = ComputeConfig()


@dataclass(frozen=True)
class PackedConversations(MaskBuilder):
    """Masks of samples that conversations share: documents of many lengths, answers in each, and padding at the end."""

    reset_positions: bool = True
    reset_attention: bool = True
    reset_pattern: bool = True

    def build(
        self,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        loss_mask: NDArray[np.float32] | None = None,
        documents: NDArray[np.int64] | None = None,
    ) -> BatchArrays:
        """Derive the masks from the ids, so that they are the same wherever the sample is read."""
        loss_mask, documents = np.empty(tokens.shape, np.float32), np.empty(tokens.shape, np.int64)
        padding = np.empty(tokens.shape, np.bool_)
        for i, row in enumerate(tokens):
            random, length = np.random.RandomState(row.sum()), len(row)
            cuts = np.sort(random.choice(np.arange(1, length), random.randint(1, 6), replace=False))
            documents[i] = np.searchsorted(cuts, np.arange(length), side="right")
            padding[i] = documents[i] == len(cuts)  # the last one
            loss_mask[i] = (random.rand(length) < 0.5) & ~padding[i]
        return super().build(tokens, labels, loss_mask, documents)._replace(extra={PADDING: padding})


OPTIMIZER = OptimizerConfig(adam_eps=1e-5)
OF_COMPUTING = [
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("cpu_offloading_num_layers", "min_offloaded_tensor_size", "cross_entropy_chunk_size", "mlp_chunk_size"),
    *("pad_global_batch", "global_batch_size", "seq_length", "device"),
]
"""Options of training that do not change its numbers, or that a case sets itself."""


@dataclass(frozen=True)
class Case:
    """A run on ``tp * pp * dp`` ranks.

    Attributes:
        samples: of a global batch.
        masked: some labels do not count, and not equally many in every sample.
        documents: where an end of a document is named, samples are several documents, and this is made of them.
        length: tokens of a sample.
        late_labels: of the first sample only the last quarter counts, and so nothing on some context-parallel ranks.
    """

    model: ModelConfig = MODEL
    parallel: ParallelConfig = ONE_RANK
    precision: PrecisionConfig = FP64
    training: TrainingConfig = TRAINING
    optimizer: OptimizerConfig = OPTIMIZER
    dp: int = 1
    samples: int = GLOBAL_BATCH
    masked: bool = True
    documents: MaskBuilder = ONE_DOCUMENT
    steps: int = 2
    compute: ComputeConfig = STOCK
    length: int = SEQ_LENGTH
    late_labels: bool = False

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.parallel.model_ranks * self.dp

    def config(self) -> RunConfig:
        """The whole configuration."""
        training = replace(
            self.training,
            seq_length=self.length,
            global_batch_size=self.samples,
            train_iters=self.steps,
            device="cpu",
        )
        data = DataConfig(mock_data=True)
        return RunConfig(
            self.model,
            self.parallel,
            self.precision,
            training,
            optimizer=self.optimizer,
            data=data,
            compute=self.compute,
        )

    def twin(self) -> Case:
        """The same numbers on one process in one micro-batch, by stock PyTorch, keeping all activations.

        FP8 quantises by micro-batch: these are the same.
        """
        stock = {name: getattr(TRAINING, name) for name in OF_COMPUTING}
        whole = self.samples if self.precision.fp8_format is None else self.training.micro_batch_size
        training = replace(self.training, micro_batch_size=whole, **stock)
        return replace(self, parallel=ONE_RANK, training=training, dp=1, compute=STOCK)


def pipeline(
    ranks: int, schedule: str | None = None, stages: int | None = None, samples: int = 4, layers: int = 2, **rest: Any
) -> Case:
    """A case of micro-batches of one sample; ``rest`` is of the model, or of how it is cut."""
    cut = {name: rest.pop(name) for name in [*rest] if name in ParallelConfig.__dataclass_fields__}
    model = replace(MODEL, num_layers=layers, **rest)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=ranks,
        num_virtual_stages_per_pipeline_rank=stages,
        pipeline_schedule=schedule,
        **cut,
    )
    return Case(model, resolve_pipeline(model, parallel), samples=samples)


def run_case(rank: int, world_size: int, case: Case) -> list[RankTrace]:
    """Train ``case.steps`` steps on this rank and note each."""
    load_plugins(case.compute.plugin)
    trainer = build_trainer(case.config(), rank, world_size)
    if case.model.lora_dora:
        initialize_magnitudes(trainer)
    own = case.training.objective == "dpo" and case.model.lora_rank
    if own or case.training.reference_model or case.training.teacher_model:
        part_of(trainer, FrozenModelInputs).on_start(lambda: False)
    traces = []
    for step in range(case.steps):
        batches = trainer.complete(batches_of(trainer, case, step))
        metrics = train_step(trainer, batches, RATES)
        traces.append(trace_step(trainer, metrics))
    return traces


def run_in_small_tiles(rank: int, world_size: int, case: Case) -> list[RankTrace]:
    """Do the same with several tiles in every part of the attention mask."""
    with patch.multiple(block_attention, BLOCK=8, UNFUSED_BLOCK=8):
        return run_case(rank, world_size, case)


def evaluation(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """Loss on generated validation data before and after a step."""
    config = case.config()
    config = replace(config, training=replace(config.training, eval_iters=2))
    trainer = build_trainer(config, rank, world_size)
    before = evaluate(trainer).item()
    train_step(trainer, trainer.complete(batches_of(trainer, case, 0)), RATES)
    return before, evaluate(trainer).item()


def run_on(pool: Pool, case: Case, timeout: float = PATIENCE, backend: str = BACKEND) -> list[StepTrace]:
    """The steps of a case, each put together from all its ranks, which have ``timeout`` seconds for it."""
    ranks = pool.run(case.world_size, run_in_small_tiles, case, timeout=timeout, backend=backend)
    return [join_traces(step) for step in zip(*ranks)]


@cache
def reference(twin: Case) -> list[StepTrace]:
    """The steps of a case on one process, this one."""
    return [join_traces([step]) for step in run_case(0, 1, twin)]


def compare_with_twin(steps: Sequence[StepTrace], case: Case, gradient_floor: float = 1e-5) -> list[StepDeviation]:
    """All quantities of all steps against the case's twin."""
    pairs = zip(steps, reference(case.twin()), strict=True)
    return [d for i, (got, ref) in enumerate(pairs) for d in compare_traces(i, got, ref, gradient_floor, LR)]


def assert_like_one_process(ranks: Sequence[Sequence[RankTrace]], case: Case) -> None:
    """Assert that ranks have the numbers of one process in fp64: loss, norm, every gradient and weight."""
    deviations = compare_with_twin([join_traces(step) for step in zip(*ranks)], case)
    assert len(deviations) > 2 * len(trainable(gpt(case.model)))
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation


def batches_of(trainer: Trainer, case: Case, step: int, whole: MicroBatch | None = None) -> list[MicroBatch]:
    """This rank's micro-batches of a step: micro-batch ``m`` of the global batch goes to replica ``m % dp``.

    Where the case pads its batch, what is missing of a micro-batch is the sample before it again, of which no label
    counts. ``whole`` is the global batch, by default that of the step.
    """
    mesh, size = trainer.mesh, trainer.config.training.micro_batch_size
    whole, padded = whole or global_batch(case, step), trainer.config.training.pad_global_batch
    places = rank_micro_batches(0, case.samples, size, mesh.dp_rank, mesh.dp_size, padded)
    batches = [_rows(whole, mine, size) for mine in places]
    if trainer.reader.cp is None:
        return batches
    rows = trainer.reader.cp.rows(case.length)
    return [_tokens(batch, case.length, rows) for batch in batches]


def global_batch(case: Case, step: int) -> MicroBatch:
    """All samples of a step."""
    generator = torch.Generator().manual_seed(step)
    shape = (case.samples, case.length)
    ids = torch.randint(0, case.model.vocab, (case.samples, case.length + 1), generator=generator)
    mask = torch.ones(shape)
    if case.masked:  # the later the sample, the fewer of its labels count
        chances = torch.linspace(0.9, 0.3, case.samples).unsqueeze(1)
        mask = (torch.rand(shape, generator=generator) < chances).float()
    if case.late_labels:
        mask[0, : 3 * case.length // 4] = 0.0
    if case.documents.eod is not None:
        ends = torch.rand(ids.shape, generator=generator) < 0.25
        ids = ids.masked_fill(ends, case.documents.eod)
    batch = batch_of(case, ids, mask, step)
    return with_pairs(batch, generator) if case.training.objective == "dpo" else batch


def batch_of(case: Case, ids: Tensor, mask: Tensor, step: int = 0) -> MicroBatch:
    """Samples of ``ids [b, s + 1]`` as a batch of a case; ``mask`` has the labels that count."""
    columns = case.documents.build(ids[:, :-1].numpy(), ids[:, 1:].numpy())
    tokens, labels, counts = (torch.from_numpy(column) for column in columns[:3])
    positions, documents = (None if c is None else torch.from_numpy(c) for c in columns[3:5])
    samples = torch.arange(case.samples) + step * case.samples
    restarts = case.documents.reset_pattern
    extra = {name: torch.from_numpy(column) for name, column in columns.extra.items()}
    batch = MicroBatch(
        tokens, labels, mask * counts, samples, step, positions, documents, pattern_restarts=restarts, extra=extra
    )
    if case.model.mtp_num_layers:
        arrays = columns._replace(loss_mask=batch.loss_mask.numpy())
        later = columns_of_samples(case.model.mtp_num_layers, arrays, case.documents.eod)
        batch = replace(batch, extra=extra | {name: torch.from_numpy(column) for name, column in later.items()})
    return batch


def with_pairs(batch: MicroBatch, generator: torch.Generator) -> MicroBatch:
    """The same tokens as answers of random lengths, two pairs to a sample and one to the last; the rest is padding."""
    shape = batch.tokens.shape
    answer, positions, pairs = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    documents, mask = torch.full(shape, 4), torch.zeros(shape)
    for row in range(len(answer)):
        place = 0
        for number in range(4 if row + 1 < len(answer) else 2):
            length = int(torch.randint(3, shape[1] // 4 + 1, (), generator=generator))
            end, prompt = place + length, 1 + number % 2
            documents[row, place:end] = number
            positions[row, place:end] = torch.arange(length)
            answer[row, place + prompt : end] = number
            mask[row, place + prompt : end] = 1.0
            pairs[row, end - 1] = 1 - number % 2
            place = end
        positions[row, place:] = torch.arange(shape[1] - place)
    reference = 3 * torch.randn(shape, dtype=torch.float64, generator=generator)
    extra = {"answer": answer, "pairs": pairs, "reference_logps": reference}
    return replace(batch, loss_mask=mask, positions=positions, documents=documents, extra=extra)


def _rows(batch: MicroBatch, rows: range, size: int) -> MicroBatch:
    ids = [*rows, *[rows.stop - 1] * (size - len(rows))]
    cut: dict[str, Any] = {name: x[ids] for name, x in vars(batch).items() if isinstance(x, Tensor)}
    extra = {name: x[ids] for name, x in batch.extra.items()}
    for mask in [cut["loss_mask"], *(extra[name] for name in extra if name == LATER_MASK)]:
        mask[len(rows) :] = 0.0
    return replace(batch, **cut, extra=extra)


def _tokens(batch: MicroBatch, length: int, rows: tuple[range, ...]) -> MicroBatch:
    """The tokens at these positions of every sample, as a context-parallel rank has them."""
    places = torch.tensor([i for part in rows for i in part])
    positions = places.expand(len(batch.tokens), -1) if batch.positions is None else batch.positions[:, places]
    cut = {name: getattr(batch, name)[:, places] for name in ("tokens", "labels", "loss_mask")}
    extra = {name: x[:, places] for name, x in batch.extra.items()}
    return replace(batch, **cut, positions=positions, seq_length=length, extra=extra)
