"""The memory forecast of a rank against its allocations."""

from __future__ import annotations

import cProfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.config.optimizer import RULE_STATE
from megatron.config.run import RunConfig
from megatron.distributed.launch import fake_process_group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import CHANNEL_USES
from megatron.layers.parameters import num_parameters
from megatron.optimizer import grad_buffer
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.sharded_parameter_store import ShardedWeightBuffer
from megatron.planner.memory import (
    checkpoint_bytes,
    communicator_bytes,
    communicators,
    gathered_weight_bytes,
    max_peak_bytes,
    max_rank_parameters,
    max_state_bytes,
    peaks_by_rank,
    rank_host_bytes,
    rank_state_bytes,
    reduction_buffer_bytes,
)
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import local_tensors, parameter_name
from megatron.training.components.average import AverageWeights
from megatron.training.diloco.component import Diloco
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool

TINY = (
    "--mock-data --vocab-size 257 --train-iters 1 --seq-length 16 --device cpu --num-layers 2 --hidden-size 32"
    " --num-attention-heads 4"
)
EXPERTS = "--num-experts 4 --disable-bias-linear --normalization RMSNorm --swiglu --moe-ffn-hidden-size 24"


def config_of(flags: str, ranks: int = 1) -> RunConfig:
    environment = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    return parse([*TINY.split(), *flags.split()], environment).config


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory that tensors lie in, by its address; of single numbers none."""
    spaces = {t.untyped_storage().data_ptr(): (t.untyped_storage().nbytes(), t.itemsize) for t in tensors}
    return {at: size for at, (size, of_number) in spaces.items() if size > of_number}


def tensors_of(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Return all tensors of an object and of the objects that it has."""
    if id(thing) in seen or isinstance(thing, type | str | bytes | int | float | RunConfig):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing.detach()
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple | set | frozenset):
        for value in thing:
            yield from tensors_of(value, seen)
    elif type(thing).__module__.startswith(("megatron.", "torch.nn")) or is_dataclass(thing):
        yield from tensors_of(getattr(thing, "__dict__", {}), seen)


def compression_of(trainer: Trainer) -> Iterator[Tensor]:
    """Errors and factors of compressed gradients."""
    for reduction in (bucket.reduction for bucket in trainer.buckets.buckets):
        yield from () if reduction.error is None else (reduction.error,)
        yield from (q for _, q in reduction.factors())


def averages_of(trainer: Trainer) -> Mapping[str, Tensor]:
    """Return the moving average of the weights by name; empty without one."""
    return next((c.average for c in trainer.components if isinstance(c, AverageWeights)), {})


def outer_tensors(diloco: Diloco) -> Iterable[Tensor]:
    return tensors_of(vars(diloco.outer) | {"main_params": None}, set())


def allocated(trainer: Trainer) -> dict[str, int]:
    """Bytes of a trainer's memory by part: every piece of it that can be reached from the trainer is in one."""
    optimizer, everything = trainer.optimizer, storages(tensors_of(vars(trainer) | {"reader": None}, set()))
    moments = (t for tensors in optimizer.state().values() for t in tensors.values())
    remainders = optimizer.main_params.remainders
    masters = (
        optimizer.main_params[name] if name not in remainders else remainders[name] for name in optimizer.main_params
    )
    parts: dict[str, Iterable[Tensor]] = {
        "weights": (buffer.part for buffer in optimizer.weights.buffers),
        "gradients": (bucket.shard for bucket in trainer.buckets.buckets),
        "main params": masters,
        "moments": moments,
        "average": averages_of(trainer).values(),
        "compression": compression_of(trainer),
        "outer": [t for c in trainer.components if isinstance(c, Diloco) for t in outer_tensors(c)],
    }
    found = {}
    for part, tensors in parts.items():
        mine = [at for at in storages(tensors) if at in everything]
        found[part] = sum(everything.pop(at) for at in mine)
    return found | {"buffers": sum(everything.values())}


OPTIMIZERS = [
    *RULE_STATE,
    "adam --exp-avg-dtype bf16",
    "adam --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --ema-decay 0.99 --position-embedding-type rope",
    "lion --exp-avg-dtype bf16 --lr-factors *.bias=2 --skip-spikes 6",
    "sgd --ema-decay 0.9",
    "adam --diloco-sync-interval 4 --diloco-fragments 2 --diloco-server localhost:1",
]


@pytest.mark.parametrize(
    ("dtype", "optimizer"), [*product(("fp32", "bf16"), OPTIMIZERS), ("fp64", "adam"), ("fp16", OPTIMIZERS[5])]
)
def test_bytes_of_each_part_match_the_allocations_of_a_run(dtype: str, optimizer: str) -> None:
    config = config_of(f"--params-dtype {dtype} --optimizer {optimizer}")
    trainer = build_trainer(config, 0, 1)
    assert allocated(trainer) == max_state_bytes(config, 1) == rank_state_bytes(config, 1, 0)
    whole = (
        trainer.specs[parameter_name(name)].numel * tensor.itemsize for name, tensor in local_tensors(trainer).items()
    )
    assert sum(whole) == checkpoint_bytes(config)
    assert sum(p.numel() for p in trainer.params.values()) == max_rank_parameters(config)


ADAPTED = "--lora-rank 3 --lora-dora --pretrained-checkpoint NOT_READ"


BLOCKS_OF_64 = "--hidden-size 64 --ffn-hidden-size 128 --frozen-weights-precision"


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--swiglu --lora-target linear_fc1.up",
        "--bf16 --store-param-remainders",
        f"--optimizer muon --bf16 {EXPERTS}",
        f"{BLOCKS_OF_64} int8 --bf16",
        f"{BLOCKS_OF_64} nf4 --swiglu",
    ],
)
def test_frozen_weights_have_weights_alone(more: str) -> None:
    config = config_of(f"{ADAPTED} {more}")
    trainer = build_trainer(config, 0, 1)
    assert allocated(trainer) == max_state_bytes(config, 1)
    whole = (t.numel() * t.itemsize for t in local_tensors(trainer).values())
    assert sum(whole) == checkpoint_bytes(config)
    assert sum((s.dense or s).numel for s in trainer.specs.values()) == num_parameters(config.model)


@pytest.mark.parametrize("optimizer", ["adam", "lion --exp-avg-dtype bf16", "sgd"])
def test_masters_as_remainders_are_two_bytes(optimizer: str) -> None:
    config = config_of(f"--bf16 --store-param-remainders --optimizer {optimizer}")
    assert allocated(build_trainer(config, 0, 1)) == max_state_bytes(config, 1)


def every_rank(rank: int, world_size: int, flags: tuple[str, ...]) -> list[dict[str, int]]:
    return [allocated(build_trainer(config_of(f, world_size), rank, world_size)) for f in flags]


STAGES = (
    "no_shard",
    "optim",
    "optim_grads",
    "optim --num-distributed-optimizer-instances 2",
    "optim_grads --num-distributed-optimizer-instances 2 --overlap-param-gather",
    "optim_grads_params",
    "optim_grads_params --num-distributed-optimizer-instances 2 --no-reshard-after-forward",
)
SMALL = "--ddp-bucket-size 3000 --global-batch-size 4 --data-parallel-sharding-strategy"
CUT = (
    *(f"{SMALL} {stage} --bf16 --optimizer adam --exp-avg-dtype bf16" for stage in STAGES),
    *(f"{SMALL} {stage} --optimizer muon {EXPERTS} --ema-decay 0.9" for stage in (STAGES[1], *STAGES[4:])),
    *(
        f"{SMALL} {stage} --bf16 --store-param-remainders {EXPERTS} --expert-model-parallel-size 2 --sequence-parallel "
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --position-embedding-type rope"
        for stage in (*STAGES[1:3], STAGES[5])
    ),
    f"{SMALL} optim --pipeline-model-parallel-size 2 --optimizer lion --num-virtual-stages-per-pipeline-rank 1",
    f"{SMALL} optim_grads --pipeline-model-parallel-size 2 --optimizer sgd --params-dtype fp64",
    f"{SMALL} optim_grads_params --pipeline-model-parallel-size 2 --optimizer sgd --params-dtype fp64",
    f"{SMALL} no_shard --bf16 --grad-compression powersgd:2",
    f"{SMALL} no_shard --grad-compression int8",
    f"{SMALL} {STAGES[3]} --grad-compression powersgd:3 {EXPERTS} --expert-model-parallel-size 2",
    f"{SMALL} {STAGES[4]} --grad-compression topk:0.1 --optimizer muon",
    f"{SMALL} no_shard --grad-compression powersgd:2 --tensor-model-parallel-size 2",
    f"{SMALL} optim_grads_params --pipeline-model-parallel-size 2 --bf16 --hybrid-layer-pattern **-|-*/-",
    *(f"{SMALL} {stage} {ADAPTED} --bf16 --swiglu --tensor-model-parallel-size 2" for stage in STAGES[:6:5]),
    f"{SMALL} optim_grads {ADAPTED} --lora-target layers.1.* --pipeline-model-parallel-size 2 --ema-decay 0.9",
)


def test_so_they_are_on_every_rank_whatever_is_cut(pool: Pool) -> None:
    found = pool.run(4, every_rank, CUT)
    for number, flags in enumerate(CUT):
        config = config_of(flags, 4)
        predicted = [rank_state_bytes(config, 4, rank) for rank in range(4)]
        assert [rank[number] for rank in found] == predicted, flags
        assert max(predicted, key=lambda parts: sum(parts.values())) == max_state_bytes(config, 4), flags


def test_peaks_of_pipeline_ranks_fall_with_the_micro_batches_in_flight() -> None:
    """Rank r of p holds p - r micro-batches of 1F1B; the last one computes the loss (arXiv 2104.04473)."""
    flags = "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 8 --bf16 --device cuda"
    config = config_of(f"{flags} --tensor-model-parallel-size 2 --vocab-size 50000", 16)
    peaks = peaks_by_rank(config, 16)
    sbh = 16 * 32
    block = (8 + 8 // 2 + 16 // 2) * sbh  # the 32 sbh of a block, all but those of its norms divided by TP
    held = [peak["activations"] for peak in peaks]
    for pp, kept in enumerate(held[:-1]):
        assert kept == pytest.approx((4 - pp) * 2 * block, rel=0.1)
    assert [peak["logits"] > 0 for peak in peaks] == [False] * 3 + [True]
    assert {peak["pipeline buffers"] for peak in peaks} == {2 * 2 * sbh}
    ranks = [rank_state_bytes(config, 16, 4 * pp) for pp in range(4)]
    assert [{part: peak[part] for part in state} for peak, state in zip(peaks, ranks)] == ranks
    assert max_peak_bytes(config, 16) == max(peaks, key=lambda peak: sum(peak.values()))


@pytest.mark.parametrize(
    "flags",
    [
        f"{EXPERTS} --expert-model-parallel-size 4 --optimizer adam --exp-avg-dtype bf16 --bf16",
        f"{EXPERTS} --expert-model-parallel-size 2 --num-distributed-optimizer-instances 3 --ddp-bucket-size 9000",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.3 --bf16 --num-layers 3",
    ],
)
def test_the_fullest_rank_is_that_of_all_ranks(flags: str) -> None:
    """Ranks are not compared one by one: shards inside of one parameter are alike."""
    config = config_of(f"{flags} --use-distributed-optimizer --global-batch-size 96 --ddp-bucket-size 20000", 96)
    every = [rank_state_bytes(config, 96, rank) for rank in range(96)]
    assert len({sum(each.values()) for each in every}) > 1
    assert max_state_bytes(config, 96) == max(every, key=lambda each: sum(each.values()))


def test_the_forecast_of_more_ranks_takes_no_longer() -> None:
    """Counted in calls of functions, most of which come from what is planned once."""
    calls = []
    for ranks in (64, 16384):
        config = config_of(f"--num-layers 16 --use-distributed-optimizer --global-batch-size {8 * ranks}", ranks)
        profile = cProfile.Profile()
        profile.runcall(peaks_by_rank, config, ranks)
        calls.append(sum(each.callcount for each in profile.getstats()))
    assert calls[1] < 1.5 * calls[0]


def allocated_in_two(trainer: Trainer) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a trainer's memory by part, on the device and on the host."""
    optimizer, memory = trainer.optimizer, trainer.optimizer.memory
    memory._scalars = torch.zeros(())  # type: ignore[attr-defined]  # scalars are left out
    remainders, on_host = optimizer.main_params.remainders, memory.on_host
    everything = storages(tensors_of(vars(trainer) | {"reader": None}, set()))
    averages = averages_of(trainer)

    def parts(names: Iterable[str], weights: Iterable[Tensor], gradients: Iterable[Tensor]) -> dict[str, int]:
        named = [*names]
        main = [remainders[name] if name in remainders else optimizer.main_params[name] for name in named]
        tensors: dict[str, Iterable[Tensor]] = {
            "weights": weights,
            "gradients": gradients,
            "main params": main,
            "moments": [kind[name] for kind in optimizer.state().values() for name in named if name in kind],
            "average": [averages[name] for name in named if name in averages],
        }
        return {part: sum(everything.pop(at, 0) for at in storages(of_part)) for part, of_part in tensors.items()}

    host = parts(on_host, (memory.weights[n] for n in on_host), (memory.grads[n] for n in on_host))
    host["buffers"] = sum(
        everything.pop(at)
        for group, rule in optimizer.groups
        if group.offloaded
        for at in storages(x for x in tensors_of(vars(rule), set()) if x.dtype == torch.int64)  # global indices
    )
    weights = [each for buffer in optimizer.weights.buffers for each in (buffer.whole, buffer.part)]
    left = [name for name in optimizer.main_params if name not in on_host]
    device = parts(left, weights, (bucket.shard for bucket in trainer.buckets.buckets))
    return device | {"buffers": sum(everything.values())}, host


OFFLOADED = (
    f"{SMALL} no_shard --optimizer-cpu-offload",
    f"{SMALL} optim --bf16 --optimizer-cpu-offload --ema-decay 0.9 --exp-avg-dtype bf16",
    f"{SMALL} optim_grads --bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.4",
    f"{SMALL} optim_grads_params --bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.7",
    f"{SMALL} optim_grads_params --bf16 --optimizer-cpu-offload --param-cpu-offload",
    f"{SMALL} optim --bf16 --optimizer-cpu-offload --store-param-remainders --optimizer lion",
    f"{SMALL} optim --optimizer-cpu-offload --optimizer muon --optimizer-offload-fraction 0.5",
    f"{SMALL} optim {EXPERTS} --expert-model-parallel-size 2 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
)


def offloaded_state(rank: int, world_size: int, flags: str) -> tuple[dict[str, int], dict[str, int]]:
    return allocated_in_two(build_trainer(config_of(flags, world_size), rank, world_size))


@pytest.mark.parametrize("flags", OFFLOADED)
def test_offloaded_state_is_on_the_host(pool: Pool, flags: str) -> None:
    config = config_of(flags, 2)
    nothing = dict.fromkeys(("compression", "outer"), 0)
    for rank, (device, host) in enumerate(pool.run(2, offloaded_state, flags)):
        assert device | nothing == rank_state_bytes(config, 2, rank)
        assert host | nothing | {"activations": 0} == rank_host_bytes(config, 2, rank)
        assert sum(host.values()) > 0


def lent(rank: int, world_size: int, flags: str) -> tuple[int, int]:
    """Bytes of the whole buckets that ZeRO-2 has made in a step of several micro-batches, and of its gradients."""
    trainer = build_trainer(config_of(flags, world_size), rank, world_size)
    made: list[int] = []

    def noted(room: grad_buffer.BucketLayout, elements: int) -> Tensor:
        made.append(elements * room.dtype.itemsize)
        return torch.zeros(elements, dtype=room.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_buffer.BucketLayout, "zeros", noted)
        train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.0))
    return sum(made), sum(p.numel() * 4 for p in trainer.params.values())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("more", ["", "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", EXPERTS])
def test_whole_buckets_of_gradients_are_within_the_forecast(pool: Pool, more: str, stage: int) -> None:
    ranks = 2 if not more.startswith("--pipe") else 4
    flags = f"{SMALL} {STAGES[2 * stage - 2 + (stage > 2)]} --global-batch-size 8 --num-layers 8 {more}"
    bound = reduction_buffer_bytes(config_of(flags, ranks), ranks)
    for made, gradients in pool.run(ranks, lent, flags):
        assert 0 < made <= bound
        if not more:
            assert bound < gradients, "sharding has to need less than the gradients"


LARGE_VOCABULARY = (
    "--vocab-size 3000 --num-layers 3 --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --disable-bias-linear --untie-embeddings-and-output-weights --data-parallel-sharding-strategy optim_grads_params"
)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_whole_buckets_of_a_large_vocabulary_match_the_forecast(pool: Pool, microbatches: int) -> None:
    """Embedding and output layer use one buffer, unless the embedding of another micro-batch is in flight."""
    flags = f"{LARGE_VOCABULARY} --global-batch-size {2 * microbatches}"
    for made, _ in pool.run(2, lent, flags):
        assert made == reduction_buffer_bytes(config_of(flags, 2), 2)
    large = 4 * 3000 * 32
    assert microbatches * large < made < microbatches * large + 200_000


MTP = "--mtp-num-layers 2 --position-embedding-type rope"
GATHERS = (
    "",
    "--param-gather-prefetch 0",
    "--param-gather-prefetch 2 --untie-embeddings-and-output-weights --bf16",
    "--param-gather-prefetch 3 --num-layers 3 --optimizer muon",
    "--no-reshard-after-forward",
    "--recompute-granularity full",
    "--recompute-granularity full --recompute-num-layers 4 --param-gather-prefetch 2",
    "--num-layers 1 --param-gather-prefetch 2",
    f"{EXPERTS} --expert-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --reshard-after-forward --param-gather-prefetch 2",
    "--pipeline-model-parallel-size 2 --reshard-after-forward --num-virtual-stages-per-pipeline-rank 2",
    "--pipeline-model-parallel-size 2",
    "--num-distributed-optimizer-instances 2 --untie-embeddings-and-output-weights",
    *(f"{MTP} {more}" for more in ("", "--untie-embeddings-and-output-weights --param-gather-prefetch 0")),
    f"{MTP} --pipeline-model-parallel-size 2 --reshard-after-forward --untie-embeddings-and-output-weights",
    f"{MTP} --mtp-use-repeated-layer --untie-embeddings-and-output-weights",
    f"{MTP} --mtp-use-repeated-layer --param-gather-prefetch 0",
    "--hybrid-layer-pattern *-**--- --param-gather-prefetch 2",
    "--hybrid-layer-pattern **--|-M*/- --pipeline-model-parallel-size 2 --reshard-after-forward --mamba-num-groups 1",
)


@pytest.mark.parametrize("more", GATHERS)
def test_whole_weights_of_zero_3_match_the_forecast(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(f"{SMALL} optim_grads_params --global-batch-size 8 --num-layers 6 {more}", 4)
    layout = Layout.from_config(config.parallel, 4)
    start, buffers, held = ShardedWeightBuffer.start_gather, list[ShardedWeightBuffer](), list[int]()

    def measure(buffer: ShardedWeightBuffer) -> None:
        start(buffer)
        held.append(sum(storages(each.whole for each in buffers).values()))

    monkeypatch.setattr(ShardedWeightBuffer, "start_gather", measure)
    for pp, rank in enumerate(layout.group_of(0, ("pp",))):
        held.clear()
        with fake_process_group(rank, 4):
            trainer = build_trainer(config, rank, 4, device=torch.device("cpu"))
            buffers[:] = [buffer for buffer in trainer.optimizer.weights.buffers if buffer.group.size > 1]
            trainer.start_at(0, 0)
            train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.0))
        assert not storages(each.whole for each in buffers), "all are free after a step"
        predicted = gathered_weight_bytes(config, layout, pp)
        assert max(held) == predicted or (pp > 0 and max(held) < predicted), (
            "rank 0 has the most micro-batches in flight"
        )


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 4),
        ("--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-param-gather", 8),
        ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2", 8),
        ("--pipeline-model-parallel-size 4 --num-layers 8 --pipeline-schedule zb-v", 4),
        ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2", 4),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 8),
        (f"{EXPERTS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2", 8),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2 --cp-comm-type a2a", 8),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 8),
        ("--context-parallel-size 4 --use-distributed-optimizer --overlap-param-gather", 4),
    ],
)
def test_communicators_match_a_mesh(flags: str, ranks: int) -> None:
    config = config_of(f"{flags} --global-batch-size 32", ranks)
    layout = Layout.from_config(config.parallel, ranks)
    for pp, rank in enumerate(layout.group_of(0, ("pp",))):
        with fake_process_group(rank, ranks):
            mesh = build_trainer(config, rank, ranks, device=torch.device("cpu")).mesh
            handles = [use for (use, _), handle in mesh._handles.items() if handle is not None]
        groups = 1 + sum(use not in CHANNEL_USES for use in handles)
        received, sent = (sum(edge[end] == pp for edge in mesh.channels) for end in (1, 0))
        assert communicators(config, ranks, pp) == (groups, received, sent)


def test_communicators_take_memory_with_nccl_only() -> None:
    flags = "--tensor-model-parallel-size 2"
    assert communicator_bytes(config_of(flags, 2), 2) == 0, "on CPUs"
    assert communicator_bytes(config_of(f"{flags} --device cuda --distributed-backend gloo", 2), 2) == 0
    assert communicator_bytes(config_of(f"{flags} --device cuda", 2), 2) == 2 * 16 * 12 * 2**20, "torch's and TP's"
