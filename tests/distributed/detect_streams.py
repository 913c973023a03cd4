"""Small jobs that detect faults in the communication of streamed weights; like the jobs in ``detect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from megatron.config.parallel import ParallelConfig
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from megatron.training.weight_stream import stream_weights
from tests.distributed.detect import Detector
from tests.kit.cases import MODEL, RATES, Case, batches_of

Sums = dict[str, float]


def stream(rank: int, world_size: int, case: Case, everywhere: bool) -> Sums:
    """A number per tensor that depends on its elements and their order; adapters are merged."""
    trainer = build_trainer(case.config(), rank, world_size)
    train_step(trainer, batches_of(trainer, case, 0), RATES)
    found = {}
    for name, tensor in stream_weights(trainer, everywhere=everywhere, bucket_bytes=20_000):
        found[name] = float(tensor.flatten() @ torch.arange(1.0, tensor.numel() + 1, dtype=tensor.dtype))
    return found


@cache
def expected(case: Case) -> Sums:
    """The numbers of one process."""
    return stream(0, 1, case, False)


def are_those_of_one_process(case: Case, everywhere: bool, ranks: Sequence[Sums]) -> bool:
    sums = expected(case.twin())
    receivers = ranks if everywhere else ranks[:1]
    return not any(ranks[len(receivers) :]) and all(
        found.keys() == sums.keys() and all(abs(found[n] - sums[n]) <= 1e-8 * (1 + abs(sums[n])) for n in sums)
        for found in receivers
    )


def streaming(case: Case, everywhere: bool) -> Detector:
    right = partial(are_those_of_one_process, case, everywhere)
    return Detector(case.world_size, stream, (case, everywhere), right)


ADAPTERS = replace(MODEL, lora_rank=2, lora_target=("linear_qkv", "linear_proj"))
TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)

STREAMS = {
    "weights to rank 0": streaming(Case(MODEL, TP2), everywhere=False),
    "weights with adapters to all": streaming(Case(ADAPTERS, TP2), everywhere=True),
}
