"""Activations: the planner's sum of kept tensors, and the live memory of real steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.arguments.cli import parse
from megatron.config.parallel import CP_COMM_TYPES
from megatron.config.run import RunConfig
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.mixers.activations import ActivationShape
from megatron.pipeline.actions import Action
from megatron.pipeline.schedules import SCHEDULES
from megatron.planner.activations import (
    activation_memory,
    peak_activations,
    peak_host_activations,
)
from megatron.training.build import build_trainer
from tests.kit.pool import Pool
from tests.kit.short import one_in

TINY = (
    "--mock-data --vocab-size 257 --train-iters 1 --seq-length 64 --device cpu --num-layers 2 --hidden-size 32"
    " --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 2 --hidden-dropout 0 --attention-dropout 0"
)
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --num-query-groups 2"
EXPERTS = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2"
MANY_EXPERTS = f"{LLAMA} --hidden-size 32 --num-experts 64 --moe-ffn-hidden-size 8 --moe-router-topk 4"


def config_of(flags: str, ranks: int = 1) -> RunConfig:
    """Products are PyTorch's on every processor: oneDNN computes weight gradients in blocks."""
    kernels = ["--kernels", "linear=torch", "grouped_linear=torch"]
    return parse([*TINY.split(), *kernels, *flags.split()], {"RANK": "0", "WORLD_SIZE": str(ranks)}).config


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations have allocated and that are still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self.storages = {at: found for at, found in self.storages.items() if not found[0].expired()}
        return sum(size for _, size in self.storages.values())


def several_documents(batch: MicroBatch) -> MicroBatch:
    """The batch in documents of about 50 tokens, with positions of their own."""
    starts = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.02
    documents = starts.cumsum(1)
    return replace(batch, documents=documents, host_documents=documents, positions=torch.zeros_like(batch.tokens))


def measured(rank: int, ranks: int, flags: tuple[str, ...]) -> list[tuple[list[int], int]]:
    """Return the bytes live after every action, and the most at any time in the pipeline of a step, for each run."""
    found = []
    for each in flags:
        trainer = build_trainer(config_of(each, ranks), rank, ranks)
        trainer.start_at(0, 0)
        batches = trainer.next_batches()
        if trainer.config.data.reset_attention_mask:  # generated samples are one document
            batches = [several_documents(batch) for batch in batches]
        trainer.buckets.start_step(len(batches))
        after: list[int] = []
        with LiveMemory() as memory:

            @contextmanager
            def record(action: Action, memory: LiveMemory = memory, after: list[int] = after) -> Iterator[None]:
                yield
                after.append(memory.live())

            trainer.pipeline.record = record
            trainer.compute(batches, torch.ones(()))
        found.append((after, memory.peak))
    return found


LONG = (
    "--seq-length 1024 --micro-batch-size 1 --global-batch-size 1 --hidden-size 128 --vocab-size 32"
    " --cross-entropy-chunk-size 64"
)
"""Attention and the MLP decide the peak, not the loss."""

ONE_RANK = [
    "",
    "--hidden-dropout 0.1",
    "--qk-layernorm --num-query-groups 2 --activation relu2",
    "--attention-dropout 0.1 --hidden-dropout 0.1",
    f"{LLAMA} --qk-layernorm",
    LLAMA,
    f"{LLAMA} --layernorm-placement post --qk-layernorm --qk-layernorm-scope all --logits-scaling 2",
    f"{LLAMA.replace('--swiglu', '--activation geglu')} --layernorm-placement sandwich --apply-layernorm-1p",
    f"{LLAMA} --parallel-attention --residual-multiplier 0.5",
    "--layernorm-placement post --hidden-dropout 0.1",
    "--parallel-attention --layernorm-placement sandwich --apply-layernorm-1p",
    "--position-embedding-type rope --rotary-base-local 5 --attention-pattern local:64,global",
    *(
        f"{LLAMA} {placed} --recompute-granularity selective --recompute-modules {modules}"
        for placed in ("--layernorm-placement post", "--layernorm-placement sandwich", "--parallel-attention")
        for modules in ("mlp", "layernorm activation core_attn")
    ),
    f"{LLAMA} --attention-dropout 0.1 --recompute-granularity selective --recompute-modules core_attn",
    EXPERTS,
    f"{EXPERTS} --moe-shared-expert-intermediate-size 40",
    *(
        f"{model} --recompute-granularity selective --recompute-modules {modules}"
        for model in ("", LLAMA)
        for modules in ("layernorm activation", "core_attn", "mlp", "layernorm activation core_attn mlp")
    ),
    f"{EXPERTS} --recompute-granularity selective --recompute-modules layernorm activation",
    *(f"{LLAMA} --mtp-num-layers {more}" for more in ("1", "2 --hidden-dropout 0.1", "2 --recompute-granularity full")),
    f"{LLAMA} --mtp-num-layers 3 --mtp-use-repeated-layer --mtp-detach-heads --hidden-dropout 0.1",
    f"{LLAMA} --recompute-granularity full",
    f"--num-layers 4 {LLAMA} --recompute-granularity full --recompute-num-layers 3",
    f"--num-layers 4 {LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    *(
        f"{LONG} --mlp-chunk-size {size} {model}"
        for size in (100, 2000)
        for model in (
            "",
            LLAMA,
            f"{EXPERTS} --moe-shared-expert-intermediate-size 400",
            f"{LLAMA} --recompute-granularity selective --recompute-modules layernorm activation mlp",
            "--recompute-granularity full",
        )
    ),
    f"{LONG} --window-size 100",
    f"{LONG} --attention-pattern local:100,chunked:300 --num-query-groups 2 --position-embedding-type rope",
    f"{LONG} --reset-attention-mask --reset-position-ids --num-query-groups 2 --position-embedding-type rope",
    f"{LONG} --attention-dropout 0.1",
    f"{LONG} --attn-logit-softcapping 30 --window-size 100",
    f"{LONG} --attn-logit-softcapping 30 --attention-dropout 0.1",
    f"{LONG} --softmax-type learnable --num-query-groups 2 --position-embedding-type rope",
    "--final-logit-softcapping 30 --vocab-size 4000",
    *(
        f"--quick-geglu {options}"
        for options in ("", "--glu-linear-offset 1", "--glu-linear-offset 1 --activation-func-clamp-value 2")
    ),
    f"{EXPERTS.replace('--swiglu --disable-bias-linear', '--quick-geglu')} --activation-func-clamp-value 2",
    f"{LONG} --seq-length 2048 --num-attention-heads 2 --attention-dropout 0.1 --mlp-chunk-size 200"
    " --micro-batch-size 2 --global-batch-size 2",
    f"{MANY_EXPERTS} --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss",
    f"{MANY_EXPERTS} --moe-z-loss-coeff 0.1 --moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias",
    f"{MANY_EXPERTS} --moe-router-dtype fp64 --moe-router-load-balancing-type sinkhorn",
    f"{MANY_EXPERTS} --num-layers 3 --recompute-granularity full --recompute-num-layers 2",
    f"{MANY_EXPERTS} --recompute-granularity full --bf16",
    f"{MANY_EXPERTS} --recompute-granularity selective --recompute-modules layernorm --bf16",
    f"{MANY_EXPERTS} --cpu-offloading-num-layers 1 --min-offloaded-tensor-size 1000000",
    f"{EXPERTS} --layernorm-placement post --moe-router-dtype fp64 --moe-router-force-load-balancing",
    f"{EXPERTS} --moe-expert-capacity-factor 1 --recompute-granularity selective --recompute-modules moe",
    f"{EXPERTS} --moe-latent-size 16 --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    f"{EXPERTS} --moe-latent-size 48 --moe-layer-freq [0,1]",
]


@pytest.mark.parametrize("flags", one_in(2, ONE_RANK))
def test_kept_tensors_match_a_step(flags: str) -> None:
    (((kept, _), peak),) = measured(0, 1, (flags,))
    (((forward, _)),) = activation_memory(config_of(flags), 1)
    assert kept == pytest.approx(forward.after, rel=0.02)
    (predicted,) = peak_activations(config_of(flags), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


IN_16_BITS = (
    *ONE_RANK[1:28:2],
    *ONE_RANK[-2:],
    f"{MANY_EXPERTS} --moe-aux-loss-coeff 0.1",
    f"{LONG} --mlp-chunk-size 100",
    f"{LONG} {LLAMA} --mlp-chunk-size 100",
    f"{LONG} --mlp-chunk-size 2000",
    f"{LONG} --seq-length 512 --attn-logit-softcapping 30",
)


@pytest.mark.parametrize("flags", IN_16_BITS)
def test_kept_tensors_in_16_bits_match_a_step(flags: str) -> None:
    """Norms compute in fp32, for which some keep a copy, and so do products of 16 bits on CPUs, which copy."""
    (((kept, _), peak),) = measured(0, 1, (f"{flags} --bf16",))
    (((forward, _)),) = activation_memory(config_of(f"{flags} --bf16"), 1)
    assert kept == pytest.approx(forward.after, rel=0.02)
    (predicted,) = peak_activations(config_of(f"{flags} --bf16"), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


@pytest.mark.parametrize("more", ["", f"{LLAMA} --bf16", f"{LLAMA} --lora-dora", f"{LLAMA} --lora-target linear_qkv"])
def test_memory_with_adapters_is_within_the_forecast(more: str) -> None:
    """Frozen norms and linears without adapters keep less than trained ones."""
    flags = f"--lora-rank 4 --pretrained-checkpoint NOT_READ {more}"
    (((kept, _), peak),) = measured(0, 1, (flags,))
    (((forward, _)),) = activation_memory(config_of(flags), 1)
    assert 0.7 * forward.after < kept < 1.02 * forward.after
    (predicted,) = peak_activations(config_of(flags), 1)
    assert 0.7 * sum(predicted.values()) < peak < 1.1 * sum(predicted.values())


TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2 --global-batch-size 8"
ALL_EXPERTS = f"{EXPERTS} --moe-router-topk 4 --global-batch-size 4 --expert-model-parallel-size 2"
"""The numbers of rows do not depend on the router."""
TWO_RANKS = (
    TP,
    f"{TP} --sequence-parallel {LLAMA}",
    f"{TP} --sequence-parallel {EXPERTS}",
    f"{TP} --sequence-parallel {EXPERTS} --moe-latent-size 16 --moe-shared-expert-intermediate-size 40"
    " --moe-shared-expert-gate",
    *(
        f"{ALL_EXPERTS} --moe-exchange {exchange}"
        for exchange in ("exact", "bounded", "bounded --moe-exchange-bound 1")
    ),
    f"{EXPERTS} --global-batch-size 4 --expert-model-parallel-size 2 --moe-exchange bounded",
    PP,
    f"{PP} --num-layers 4 {LLAMA} --num-virtual-stages-per-pipeline-rank 2",
    f"{PP} {LLAMA} --pipeline-schedule zb-h1",
    f"{PP} {EXPERTS} --pipeline-schedule zb-h1",
    f"{PP} --recompute-granularity full",
    f"{PP} {LLAMA} --pipeline-schedule zb-h1 --mlp-chunk-size 16",
    f"{TP} --num-query-groups 1 --mlp-chunk-size 10 --sequence-parallel",
    f"{TP} --sequence-parallel {LLAMA} --mtp-num-layers 2",
    f"{PP} {LLAMA} --mtp-num-layers 2 --mtp-use-repeated-layer --pipeline-schedule zb-h1",
    f"{PP} {LLAMA} --hybrid-layer-pattern **-|--*/- --pipeline-schedule zb-h1",
    f"{TP} --sequence-parallel {EXPERTS} --hybrid-layer-pattern **E-E",
)
CP = f"{LONG} --mlp-chunk-size 100 --context-parallel-size 2"
GROUPED = "--num-query-groups 2 --position-embedding-type rope"
CONTEXT_PARALLEL = {
    2: (
        *(f"{CP} --cp-comm-type {comm_type} {model}" for comm_type in CP_COMM_TYPES[:3] for model in ("", GROUPED)),
        f"{CP} --cp-comm-type a2a --qk-layernorm --num-query-groups 1",
        f"{CP} --cp-comm-type a2a {GROUPED} --recompute-granularity selective --recompute-modules core_attn",
        f"{CP} --attention-dropout 0.1",
    ),
    4: (
        f"{CP} --context-parallel-size 4",
        f"{CP} --context-parallel-size 4 --cp-comm-type all_gather {GROUPED}",
        f"{CP} --context-parallel-size 4 --cp-comm-type a2a {GROUPED}",
        f"{CP} --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        f"{CP} {TP} --sequence-parallel",
    ),
}


def test_kept_tensors_match_every_rank(pool: Pool) -> None:
    found = pool.run(2, measured, TWO_RANKS)
    for number, flags in enumerate(TWO_RANKS):
        config = config_of(flags, 2)
        by_stage = activation_memory(config, config.parallel.data_parallel_size(2))
        shape, pipelined = ActivationShape.of(config), len(by_stage) > 1
        for rank in range(2):
            pairs = zip(found[rank][number][0], by_stage[rank % len(by_stage)], strict=True)
            for index, (live, at) in enumerate(pairs):
                # Gloo's threads keep what was communicated for a while, and what is sent upstream until the step ends.
                messages = (index + 2) * shape.residual * pipelined
                late = 4 * shape.tokens * shape.model.hidden_size * shape.width * (index > 0)
                assert at.after * 0.98 <= live <= at.after * 1.02 + messages + late + 100, (flags, str(at.action))


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.slow if n == 2 else ()) for n in CONTEXT_PARALLEL])
def test_context_parallel_ranks_keep_their_part(pool: Pool, ranks: int) -> None:
    flags = CONTEXT_PARALLEL[ranks]
    found = pool.run(ranks, measured, flags)
    for number, each in enumerate(flags):
        config = config_of(each, ranks)
        ((forward, _),) = activation_memory(config, 1)
        (predicted,) = peak_activations(config, 1)
        for kept, _ in (of_rank[number] for of_rank in found):
            assert kept[0] == pytest.approx(forward.after, rel=0.02), each
        assert max(of_rank[number][1] for of_rank in found) == pytest.approx(sum(predicted.values()), rel=0.1), each


@pytest.mark.parametrize(
    ("schedule", "ranks", "group"),
    [*((name, 4, None) for name in SCHEDULES), ("interleaved", 4, 6), ("interleaved", 8, 8)],
)
def test_peaks_are_those_of_the_whole_step(schedule: str, ranks: int, group: int | None) -> None:
    """The forecast looks at a few micro-batches only, whatever is left over after whole groups."""
    chunks = SCHEDULES[schedule].chunks or 2
    flags = f"--pipeline-model-parallel-size {ranks} --pipeline-schedule {schedule} --num-layers {ranks * chunks}"
    for count in (1, 5, 40, 41, 43, 87):
        config = config_of(
            f"{flags} --num-virtual-stages-per-pipeline-rank {chunks} --global-batch-size {2 * count}", ranks
        )
        if group is not None:
            parallel = replace(config.parallel, microbatch_group_size_per_virtual_pipeline_stage=group)
            config = replace(config, parallel=parallel)
        most = [max(at.kept + at.wgrad + at.temporary + at.messages for at in m) for m in activation_memory(config, 1)]
        assert [sum(peak.values()) for peak in peak_activations(config, 1)] == most


OFFLOADED = (
    LLAMA,
    f"{LLAMA} --bf16 --recompute-granularity selective",
    f"--num-layers 4 {LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    f"--num-layers 4 {LLAMA} --recompute-granularity full --recompute-num-layers 3",
    "--pipeline-model-parallel-size 2 --num-layers 4",
    "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule zb-v",
)


def host_pools(rank: int, ranks: int, flags: tuple[str, ...]) -> list[int]:
    """Return the bytes of host buffers after a step, for each run."""
    sizes = []
    for each in flags:
        trainer = build_trainer(config_of(each, ranks), rank, ranks)
        trainer.start_at(0, 0)
        batches = trainer.next_batches()
        trainer.buckets.start_step(len(batches))
        trainer.compute(batches, torch.ones(()))
        offload = next(iter(trainer.chunks.values())).context.offload
        sizes.append(offload.pool.size)
    return sizes


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_counts_offloaded_tensors(pool: Pool, ranks: int) -> None:
    some = [each for each in OFFLOADED if ("pipeline" in each) == (ranks == 2)]
    flags = tuple(
        f"{each} --global-batch-size 8 --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 2000" for each in some
    )
    found = pool.run(ranks, host_pools, flags)
    for number, each in enumerate(flags):
        predicted = peak_host_activations(config_of(each, ranks), 1)
        for rank, size in enumerate(predicted):
            assert found[rank][number] == pytest.approx(size, rel=0.02), each
            assert size > 0


@pytest.mark.parametrize("layers", [1, 3, 5])
@pytest.mark.parametrize("model", ["", LLAMA])
def test_offloaded_blocks_are_on_the_device_two_at_a_time(model: str, layers: int) -> None:
    """Host buffers are memory too here; they are all in use when the device has most."""
    flags = f"{LONG} {model} --num-layers 5 --cpu-offloading-num-layers {layers} --min-offloaded-tensor-size 1000"
    (((_, peak),)) = measured(0, 1, (flags,))
    (predicted,), (host,) = (of(config_of(flags), 1) for of in (peak_activations, peak_host_activations))
    assert peak - host == pytest.approx(sum(predicted.values()), rel=0.05)


@pytest.mark.parametrize("layers", [1, 3])
def test_offloaded_blocks_are_on_the_device_beside_the_logits(layers: int) -> None:
    flags = f"{LONG} {LLAMA} --vocab-size 8000 --cross-entropy-chunk-size 1024 --num-layers 3"
    flags += f" --cpu-offloading-num-layers {layers} --min-offloaded-tensor-size 1000"
    (((_, peak),)) = measured(0, 1, (flags,))
    (predicted,), (host,) = (of(config_of(flags), 1) for of in (peak_activations, peak_host_activations))
    assert predicted["logits"] > 0
    assert peak - host == pytest.approx(sum(predicted.values()), rel=0.02)
