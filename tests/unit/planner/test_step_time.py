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
from megatron.planner.network import seconds
from megatron.planner.pipeline_time import pipeline_end
from megatron.planner.stage_time import CONTENTION
from megatron.planner.step_time import AXES, PARTS, StepTime, step_time, step_timeline

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
        found = ends(
            name, chunks, ranks, microbatches, StageCosts(*map(tuple, costs), transfer=dice.choice((0, 0.3, 2.5)))
        )
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
    "dualpipe-v": "--pipeline-model-parallel-size 4 --pipeline-schedule dualpipe-v",
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
    "recomputed MLP": "--recompute-granularity selective --recompute-modules mlp",
    "micro-batches of 2": "--micro-batch-size 2",
    "one micro-batch": "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --micro-batch-size 8"
    " --use-distributed-optimizer --overlap-param-gather",
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
    slow = replace(slow, link=Link(2e-6, dice.choice((1e10, 4.5e11))))
    one = step_time(config, 16, slow)
    assert tuple(one.parts) == PARTS
    assert min([*one.parts.values(), *one.sent.values(), *one.communicating.values()]) >= 0
    assert one.seconds == pytest.approx(sum(one.parts.values()))
    for name, cluster in faster_clusters(slow, dice.choice((1.3, 10.0))).items():
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


def exposure(layout: str, model: str = "dense", more: str = "") -> StepTime:
    """Return the time of a micro-batch of 8 layers on one node, on which nothing but two links takes time."""
    config = config_of(f"{MODELS[model]} {layout} {more} --global-batch-size 8", 8)
    return step_time(config, 8, Cluster.of(H100))


def all_gather(megabytes: float, ranks: int) -> float:
    return seconds(Cluster.of(H100), "all-gather", megabytes * 1e6, Cluster.of(H100).group(ranks, 1))


def test_six_of_ten_transfers_of_tensor_parallelism_are_not_hidden() -> None:
    """As counted by the order of streams: 4 of 6 gathers, and 2 of 4 reductions, of every layer (benchmarks of TP)."""
    time = exposure(LAYOUTS["TP2 SP"])
    rows = 4096 * 4096 * 2 / 1e6
    once, layers = all_gather(rows, 2), 8 * time.microbatches
    ends = time.parts["tensor"] - layers * (6 + 4 * CONTENTION) * once
    # Beside the layers: the embedding, the output layer, and the sums of the loss.
    assert 0 < ends < 8 * time.microbatches * once
    overlapped = exposure(LAYOUTS["TP2 overlap"])
    assert overlapped.parts["tensor"] < 0.7 * time.parts["tensor"]
    assert overlapped.communicating["tensor"] == pytest.approx(time.communicating["tensor"])
    assert overlapped.parts["compute"] == pytest.approx(time.parts["compute"])


def test_rings_hide_behind_attention_and_exchanges_of_heads_do_not() -> None:
    ring, heads = (exposure("--context-parallel-size 4 " + more) for more in ("", "--cp-comm-type a2a"))
    assert ring.parts["context"] < 0.5 * ring.communicating["context"]
    assert heads.parts["context"] == pytest.approx(heads.communicating["context"])


def test_experts_wait_for_their_rows_unless_halves_overlap() -> None:
    bare, halves = (exposure("", "experts", more) for more in ("", "--overlap-moe-expert-parallel-comm"))
    assert bare.parts["expert"] == pytest.approx(bare.communicating["expert"])
    assert halves.parts["expert"] < 0.4 * bare.parts["expert"]


def test_recomputation_costs_the_forward_of_its_blocks() -> None:
    none, full = exposure(""), exposure("--recompute-granularity full --recompute-method uniform")
    assert full.parts["recompute"] > 0 == none.parts["recompute"]
    blocks = [time.stages.input[0] for time in (none, full)]
    assert full.parts["recompute"] == pytest.approx((blocks[1] - blocks[0]) * full.microbatches)
    # Products and attention of forward are a third of all; other operations have fewer passes in forward.
    assert 0.25 < full.parts["recompute"] / (none.parts["compute"]) < 0.34


def test_selective_recomputation_costs_the_forward_of_its_modules() -> None:
    full, mlp = exposure("--recompute-granularity full --recompute-method uniform"), exposure(LAYOUTS["recomputed MLP"])
    share = mlp.parts["recompute"] / full.parts["recompute"]
    # 176 of 218 million weights; attention has its scores besides, and is slower.
    assert 0.6 < share < 176 / 218


def test_products_without_arithmetic_take_the_time_of_their_bytes() -> None:
    config = config_of(f"{MODELS['dense']} --global-batch-size 1")
    chip = replace(H100, flops=dict.fromkeys(H100.flops, 1e30))
    cluster = replace(Cluster.of(chip), efficiency=replace(H100.efficiency, launch=0.0))
    rows, shapes = 4096, ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    # Operands of 2 bytes; the main gradient of 4 is read and written.
    moved = 8 * sum(rows * (k + n) * 2 + k * n * 8 for k, n in shapes)
    weight = step_time(config, 1, cluster).stages.weight[0]
    assert weight == pytest.approx(moved / (H100.bandwidth * H100.efficiency.memory), rel=1e-6)


def test_gradients_hide_behind_the_last_backward() -> None:
    apart, hidden = (exposure("", more=more) for more in ("--no-overlap-grad-reduce", ""))
    assert apart.parts["data"] == pytest.approx(apart.communicating["data"])
    assert hidden.parts["data"] < 0.35 * apart.parts["data"]


def test_unfused_attention_moves_its_scores() -> None:
    """Scores are written and read by two products and by softmax: 2 + 2 passes of 2 bytes in forward, 9 in all."""
    fused, unfused = exposure(""), exposure(LAYOUTS["unfused"])
    scores = 32 * 4096 * 4096
    least = 8 * unfused.microbatches * scores * 2 * (2 + 3) / (H100.bandwidth * H100.efficiency.memory)
    assert unfused.seconds - fused.seconds > least


def test_sharded_state_is_updated_in_parallel_and_offloaded_state_on_the_host() -> None:
    whole, shards = exposure(""), exposure("--use-distributed-optimizer")
    host = exposure("--use-distributed-optimizer --optimizer-cpu-offload")
    assert shards.parts["optimizer"] == pytest.approx(whole.parts["optimizer"] / 8, rel=0.02)
    parameters, bandwidth = 8 * 218.1e6 + 2 * 128256 * 4096, H100.bandwidth * H100.efficiency.memory
    assert whole.parts["optimizer"] == pytest.approx(38 * parameters / bandwidth, rel=0.01)
    assert host.parts["optimizer"] > 8 * shards.parts["optimizer"]
