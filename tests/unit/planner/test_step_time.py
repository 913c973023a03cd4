"""The predicted time of a step: measured steps, the simulator, counted bytes, and what holds of any time."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from megatron.arguments.cli import parse
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.convert.huggingface.config import read_model_values
from megatron.pipeline.plan import build_program
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.planner.communication import DATA, step_collectives
from megatron.planner.hardware import Accelerator, Cluster, Link, accelerators
from megatron.planner.pipeline_time import pipeline_end
from megatron.planner.step_time import AXES, PARTS, step_time, step_timeline

H100 = accelerators()["h100-80g"]
LLAMA = "--preset llama3-8b --vocab-size 128256"


def config_of(flags: str, ranks: int = 1) -> RunConfig:
    environment = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    return parse(
        [*f"--mock-data --train-iters 1 --bf16 {flags}".split()], environment, read_model=read_model_values
    ).config


MEASURED = {
    "124M": (117.3, "--preset gpt2-124m --seq-length 1024 --vocab-size 50257 --micro-batch-size 64", 1),
    "8B, 8 layers": (863.2, f"{LLAMA} --num-layers 8 --seq-length 8192 --micro-batch-size 1", 4),
}
"""Milliseconds of a step on one H200, flags and micro-batches (``benchmarks/results/gpu.md``)."""


@pytest.mark.parametrize("name", MEASURED)
def test_steps_take_what_was_measured_on_one_gpu(name: str) -> None:
    measured, flags, microbatches = MEASURED[name]
    config = config_of(flags)
    batch = config.training.micro_batch_size * microbatches
    config = replace(config, training=replace(config.training, global_batch_size=batch))
    predicted = step_time(config, 1, Cluster.of(replace(H100, bandwidth=4.8e12)))
    assert predicted.seconds * 1e3 == pytest.approx(measured, rel=0.05)
    assert predicted.tokens == batch * config.training.seq_length


SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1)]
SCHEDULES += [("zb-v", 2), ("dualpipe-v", 2)]


def ends(name: str, chunks: int, ranks: int, microbatches: int, costs: StageCosts) -> tuple[Sequence[float], ...]:
    """Return when each rank is done, as predicted and as simulated."""
    parallel = ParallelConfig(
        pipeline_model_parallel_size=ranks, num_virtual_stages_per_pipeline_rank=chunks, pipeline_schedule=name
    )
    timeline, end = simulate(build_program(parallel, microbatches), costs), pipeline_end(parallel, microbatches, costs)
    assert end.busy == pytest.approx(timeline.busy, rel=1e-9)
    return end.ends, [intervals[-1].end for intervals in timeline.intervals]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_pipelines_end_when_the_simulator_says(name: str, chunks: int) -> None:
    dice = random.Random(name + str(chunks))
    for ranks, microbatches in ((2, 2), (2, 6), (4, 8), (4, 32), (8, 64)):
        stages = ranks * chunks
        costs = [[dice.choice((1.0, 1.0, dice.uniform(1, 1.1))) for _ in range(stages)] for _ in range(3)]
        found = ends(name, chunks, ranks, microbatches, StageCosts(*map(tuple, costs), transfer=dice.choice((0, 0.3))))
        # Extended from few micro-batches, before all ranks wait for the slowest one.
        assert max(found[0]) == pytest.approx(max(found[1]), rel=1e-9 if microbatches <= 2 * ranks else 0.03)
        if name not in ("zb-v", "dualpipe-v"):  # exact where the ends of the model differ from other stages
            forward, back = (1.0,) * (stages - 1) + (dice.uniform(1, 1.5),), (1.0,) * stages
            found = ends(name, chunks, ranks, microbatches, StageCosts(forward, back, back, transfer=0.02))
            assert found[0] == pytest.approx(found[1], rel=1e-9)


LAYOUTS = {
    "TP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "TP2 overlap": "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
    "PP4": "--pipeline-model-parallel-size 4",
    "PP2 VPP2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "zb": "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1",
    "CP2": "--context-parallel-size 2",
    "CP2 a2a": "--context-parallel-size 2 --cp-comm-type a2a",
    "ZeRO-1": "--use-distributed-optimizer --overlap-param-gather",
    "ZeRO-2": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
    "ZeRO-3": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
    "HSDP": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    " --num-distributed-optimizer-instances 2",
    "bf16 gradients": "--use-distributed-optimizer --grad-reduce-in-bf16",
    "recomputation": "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "selective": "--recompute-granularity selective --recompute-modules mlp core_attn",
    "offload": "--optimizer-cpu-offload --cpu-offloading-num-layers 4",
    "FP8": "--fp8-format hybrid",
    "unfused": "--kernels attention=torch",
    "muon": "--optimizer muon",
}
MODELS = {
    "dense": "--preset llama3-8b --num-layers 8 --vocab-size 128256 --seq-length 4096",
    "tied": "--preset gpt2-124m --num-layers 8 --vocab-size 50257 --seq-length 1024",
    "experts": "--preset mixtral-8x7b --num-layers 8 --vocab-size 32000 --seq-length 4096"
    " --expert-model-parallel-size 2",
}


def layouts() -> list[tuple[str, str]]:
    """Return pairs of models and layouts, of which some are no run."""
    return [(model, layout) for model in MODELS for layout in LAYOUTS]


def config_in(model: str, layout: str, ranks: int = 16, batch: int = 64) -> RunConfig:
    return config_of(f"{MODELS[model]} {LAYOUTS[layout]} --global-batch-size {batch}", ranks)


@pytest.mark.parametrize(("model", "layout"), layouts())
def test_parts_are_never_negative_and_fall_with_faster_hardware(model: str, layout: str) -> None:
    config, dice = config_in(model, layout), random.Random(model + layout)
    slow = Cluster.of(H100, node_size=4, network=dice.choice((2e9, 50e9)))
    one = step_time(config, 16, slow)
    assert tuple(one.parts) == PARTS
    assert min([*one.parts.values(), *one.sent.values(), *one.communicating.values()]) >= 0
    assert one.seconds == pytest.approx(sum(one.parts.values()))
    for faster in (1.3, 10.0):
        for name, cluster in faster_clusters(slow, faster).items():
            assert step_time(config, 16, cluster).seconds <= one.seconds * (1 + 1e-9), name


def faster_clusters(cluster: Cluster, times: float) -> Mapping[str, Cluster]:
    """Return clusters of which one thing is faster."""
    chip = cluster.accelerator

    def of(changed: Accelerator) -> Cluster:
        return replace(cluster, accelerator=changed)

    def faster(link: Link) -> Link:
        return Link(link.latency / times, link.bandwidth * times)

    return {
        "flops": of(replace(chip, flops={format: rate * times for format, rate in chip.flops.items()})),
        "memory": of(replace(chip, bandwidth=chip.bandwidth * times)),
        "host": of(replace(chip, host=faster(chip.host))),
        "link": replace(cluster, link=faster(cluster.link)),
        "network": replace(cluster, network=faster(cluster.network)),
        "launch": replace(cluster, efficiency=replace(cluster.efficiency, launch=cluster.efficiency.launch / times)),
    }


@pytest.mark.parametrize("layout", ["TP2 SP", "PP2 VPP2", "CP2", "ZeRO-1", "ZeRO-2", "HSDP", "bf16 gradients"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_between_replicas_are_those_of_the_buckets(model: str, layout: str) -> None:
    config, cluster = config_in(model, layout), Cluster.of(H100)
    ranks = config.parallel.pipeline_model_parallel_size
    counted = sum(
        each.sent for rank in range(ranks) for each in step_collectives(config, 16, rank) if each.axis == DATA
    )
    # ZeRO-3 keeps the last block, and gathers a tied embedding twice, which is not predicted.
    within = 0.1 if config.parallel.zero_stage == 3 else 0.01
    assert step_time(config, 16, cluster).sent[DATA] == pytest.approx(counted / ranks, rel=within)


def test_costs_of_stages_are_kept_for_equal_options_only() -> None:
    """Predictions in any order are those of a fresh process: nothing that matters is missing in the cache's key."""
    cluster, seen = Cluster.of(H100, node_size=4), dict[tuple[str, str], float]()
    for model, layout in layouts():
        seen[model, layout] = step_time(config_in(model, layout), 16, cluster).seconds
    for model, layout in reversed(layouts()):
        fresh = Cluster.of(H100, node_size=4)  # which shares no cache
        assert step_time(config_in(model, layout), 16, fresh).seconds == seen[model, layout]


def test_more_replicas_of_the_same_work_change_communication_alone() -> None:
    config = config_in("dense", "ZeRO-1", 16, 64)
    double = config_in("dense", "ZeRO-1", 32, 128)
    one, two = (step_time(each, n, Cluster.of(H100)) for each, n in ((config, 16), (double, 32)))
    assert one.stages == two.stages
    assert two.tokens == 2 * one.tokens
    assert [one.parts[name] for name in PARTS if name not in (*AXES, "optimizer")] == [
        two.parts[name] for name in PARTS if name not in (*AXES, "optimizer")
    ]


def test_the_timeline_of_a_step_has_its_bubble() -> None:
    config = config_in("dense", "PP4")
    time = step_time(config, 16, Cluster.of(H100, node_size=4, network=1e15))
    timeline = step_timeline(config, time.microbatches, time.stages)
    assert time.parts["bubble"] + time.parts["pipeline"] == pytest.approx(timeline.bubble * timeline.makespan)


def test_formulas_have_the_numbers_of_the_parts() -> None:
    config = config_in("dense", "TP2 SP")
    time = step_time(config, 16, Cluster.of(H100))
    lines = time.explanation
    assert lines[0] == "a micro-batch: 1 x 4,096 tokens / CP 1 = 4,096; 8 of them a step"
    assert "block 0, 8 like it:" in lines
    assert any("linear_fc1: [4,096, 4,096] x [4,096, 14,336], 2mnk = 0.481 TFLOP" in line for line in lines)
    stated = sum(float(word) for word in re.findall(r"([0-9.]+) ms", lines[-1]))
    assert stated / 1e3 == pytest.approx(time.seconds, abs=1e-5)
