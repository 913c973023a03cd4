"""One rank of a large run without allocation, compared with real runs and with the formulas of the model."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import pretrain_gpt
from megatron.arguments.cli import parse, parse_flags
from megatron.config.errors import UserError
from megatron.layers.parameters import num_parameters
from megatron.planner.memory import rank_state_bytes
from megatron.training import fake_world as fake
from megatron.training.fake_world import FakeWorld, fake_world
from tests.kit.pool import Pool
from tests.unit.planner.test_memory import CUT, EXPERTS, config_of, every_rank
from tests.unit.slurm.recipes import Started

ROOT = Path(__file__).parents[3]
MOST_SECONDS = 30
"""Seconds of CPU time for the largest recipe."""

MOST_MEMORY = 2**31
"""Memory limit in bytes: less than the weights of one rank."""

TINY = "--preset tiny-gpt2 --mock-data --vocab-size 257 --train-iters 1"
OF_THE_MODEL = ("model", "parallel", "training", "optimizer", "precision")


COUNTED = ("weights", "gradients", "main params", "moments", "average", "outer")


def counted(state: Mapping[str, int]) -> dict[str, int]:
    """Return the kinds of state that have tensors in a world that is not allocated."""
    return {kind: size for kind, size in state.items() if size and kind in COUNTED}


def world_of(flags: str, ranks: int, rank: int = 0) -> FakeWorld:
    return fake_world(config_of(f"--global-batch-size 48 {flags}", ranks), ranks, rank)


def test_a_rank_holds_the_memory_that_a_run_allocates(pool: Pool) -> None:
    tried = CUT[7], CUT[10], CUT[-2]
    for rank, allocated in enumerate(pool.run(4, every_rank, tried)):
        for flags, held in zip(tried, allocated, strict=True):
            assert counted(fake_world(config_of(flags, 4), 4, rank).chosen.state) == counted(held), (rank, flags)
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def gpt3() -> FakeWorld:
    """Rank 77 of the recipe for 175B parameters; takes seconds and little memory."""
    shown = {"cwd": ROOT, "env": os.environ | {"DRY_RUN": "1"}, "timeout": 120}
    printed = subprocess.run(["bash", "slurm/train_175b.sh"], capture_output=True, text=True, check=True, **shown)
    words = shlex.split(printed.stdout)
    reading = parse_flags(words[words.index("pretrain_gpt.py") + 1 :])
    kept = [flag for flag in reading.given if flag.setting.group in OF_THE_MODEL and flag.setting.name != "stop_file"]
    flags = ["--preset", reading.known.preset, *(word for flag in kept for word in (flag.spelling, *flag.words))]
    flags += ["--mock-data", "--vocab-size", "50257", "--world-size", "1024", "--check-config"]
    memory, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    world = fake_world(parse(flags, {}).config, 1024, 77)
    assert time.process_time() - seconds < MOST_SECONDS
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) < MOST_MEMORY
    return world


def test_every_rank_of_a_pipeline_is_accounted_for(gpt3: FakeWorld) -> None:
    assert [built.layers for built in gpt3.pipeline] == [6] * 16
    assert [built.rank for built in gpt3.pipeline] == [*range(13, 1024, 64)]
    layers = sorted(i for built in gpt3.pipeline for stage in built.stages.values() for i in stage.layers)
    assert layers == [*range(96)]
    of_a_block = (12 * 12288**2 + 13 * 12288, 3 * 12288 + 3 * 12288 + 12288)  # in all, and vectors that are not cut
    cut = 12 * 12288**2 + 7 * 12288  # matrices; biases of QKV and of the MLP's first half
    assert gpt3.chosen.parameters == 6 * (cut // 8 + of_a_block[0] - cut)
    assert sum(gpt3.chosen.whole.values()) == 6 * of_a_block[0]
    assert gpt3.chosen.state["gradients"] == 4 * gpt3.chosen.parameters
    assert gpt3.chosen.state["moments"] == 8 * gpt3.chosen.parameters // 8
    assert {*gpt3.seconds} == {"groups", "kernels", "model", "optimizer", "the rest of its pipeline"}
    report = gpt3.report()
    assert "rank 77 of 1,024, nothing allocated: pp 1, dp 1, cp 0, tp 5\n" in report
    assert "together 96 layers and 174,604,259,328 parameters, each counted once: the model's\n" in report
    held = gpt3.chosen.state
    assert f"weights {held['weights']:,}, gradients {held['gradients']:,}, main params" in report


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        ("train_qwen3_30b_a3b", [1019]),
        ("train_deepseek_v3", [77]),
        pytest.param("train_qwen3_30b_a3b", range(0, 1024, 9), marks=pytest.mark.slow),  # of every place in EP
        pytest.param("train_deepseek_v3", range(0, 128, 3), marks=pytest.mark.slow),
    ],
    ids=["qwen3", "deepseek", "qwen3 many", "deepseek many"],
)
def test_ranks_of_recipes_with_experts(recipe: str, ranks: Iterable[int]) -> None:
    """Each holds the bytes that are predicted, and with those of its pipeline the whole model."""
    started = Started.by(recipe)
    config = started.config()
    parallel = config.parallel
    experts = parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    for rank in ranks:
        world = fake_world(config, started.world_size, rank)
        assert world.parameters == num_parameters(config.model)
        assert len(world.pipeline) == parallel.pipeline_model_parallel_size
        kinds = {group.name: (group.count, group.size) for group in world.chosen.groups}
        assert kinds["ep"] == (started.world_size // parallel.expert_model_parallel_size, 64 if "deep" in recipe else 8)
        assert kinds["edp"] == (experts, started.world_size // experts)


def test_groups_are_counted_as_they_are_made(monkeypatch: pytest.MonkeyPatch, gpt3: FakeWorld) -> None:
    made = Counter[int]()
    create = dist.new_group

    def counting(ranks: list[int], **options: Any) -> Any:
        made[len(ranks)] += 1
        return create(ranks, **options)

    monkeypatch.setattr(dist, "new_group", counting)
    world = world_of("--num-layers 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", 32)
    printed = Counter[int]()
    for groups in world.chosen.groups:
        printed[groups.size] += groups.count
    assert {size: 4 * count for size, count in printed.items()} == made, "every rank of the pipeline makes all of them"
    kinds = {group.name: (group.count, group.size) for group in gpt3.chosen.groups}
    assert kinds["tp"] == kinds["dp"] == kinds["dp gather"] == (128, 8)
    assert kinds["pp"] == kinds["pp up"] == kinds["pp down"] == (64, 16)
    assert (kinds["pp embedding"], kinds["pp-tp"], kinds["world"]) == ((64, 2), (8, 128), (1, 1024))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int]:
    """Draw flags of a small model in a layout of up to 64 ranks, and the number of ranks."""
    tp, pp, dp, vpp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)))
    flags = f"--num-layers 8 --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    if pp > 1:
        flags += f" --num-virtual-stages-per-pipeline-rank {vpp}"
    if tp > 1:
        flags += " --sequence-parallel"
    strategy = draw(st.sampled_from(("no_shard", "optim", "optim_grads")))
    flags += f" --data-parallel-sharding-strategy {strategy}"
    if strategy != "no_shard" and dp > 2:
        flags += f" --num-distributed-optimizer-instances {draw(st.sampled_from((1, 2)))}"
    if draw(st.booleans()):
        flags += (
            f" {EXPERTS} --expert-model-parallel-size {draw(st.sampled_from([n for n in (1, 2, 4) if dp % n == 0]))}"
        )
    if draw(st.booleans()):
        flags += " --untie-embeddings-and-output-weights"
    return (
        f"{flags} {draw(st.sampled_from(('', '--bf16', '--optimizer muon', '--bf16 --ema-decay 0.9')))}",
        tp * pp * dp,
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(layouts(), st.randoms(use_true_random=False))
def test_any_layout_is_built(layout: tuple[str, int], random: Any) -> None:
    flags, ranks = layout
    rank = random.randrange(ranks)
    world = world_of(flags, ranks, rank)
    model = config_of(flags, ranks).model
    assert world.chosen.rank == rank
    assert (world.layers, world.parameters) == (8, num_parameters(model))
    assert f" {num_parameters(model):,} parameters, each counted once" in world.report()


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (
            "--preset llama3-70b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel"
            " --data-parallel-sharding-strategy optim_grads --num-distributed-optimizer-instances 2 --bf16"
            " --store-param-remainders",
            128,
        ),
        (
            f"--num-layers 8 --hidden-size 512 {EXPERTS} --num-experts 64 --expert-model-parallel-size 16"
            " --optimizer muon --tensor-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel"
            " --num-attention-heads 8 --num-query-groups 2 --use-distributed-optimizer",
            64,
        ),
        ("--preset tiny-gpt2", 1),
    ],
    ids=["llama3-70b", "experts", "alone"],
)
def test_known_shapes(flags: str, ranks: int) -> None:
    argv = [*f"--mock-data --vocab-size 128256 --train-iters 1 --seq-length 128 {flags}".split(), "--check-config"]
    config = parse([*argv, "--world-size", str(ranks), "--global-batch-size", "128"], {}).config
    world = fake_world(config, ranks, ranks - 1)
    assert world.parameters == num_parameters(config.model)
    assert counted(world.chosen.state) == counted(rank_state_bytes(config, ranks, ranks - 1))
    assert world.report().count("\n") >= len(world.pipeline)


def test_bytes_that_differ_from_the_prediction_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake, "rank_state_bytes", lambda *args: rank_state_bytes(*args) | {"weights": 0})
    with pytest.raises(RuntimeError, match=r"rank 1 holds {'weights': .* are predicted"):
        world_of("--num-layers 4", 2, 1)
    assert not dist.is_initialized()


def test_a_pattern_that_names_nothing_is_refused_though_another_rank_might_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f"{TINY} --fake-world --world-size 4 --pipeline-model-parallel-size 4 --num-layers 4 --global-batch-size 8"
    argv = [*flags.split(), "--lr-factors"]
    assert pretrain_gpt.main([*argv, "layers.3.*=2"]) == 0
    printed = capsys.readouterr().out
    assert "fake world rank 0 of 4, nothing allocated: pp 0, dp 0, cp 0, tp 0\n" in printed
    assert [*tmp_path.iterdir()] == [], "it leaves no files"
    assert pretrain_gpt.main([*argv, "layers.4.*=2"]) == 2
    assert "E407 'layers.4.*' in --lr-factors matches no parameter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        ("--fake-world", {}, "--fake-world needs --world-size"),
        ("--fake-world --world-size 8 --fake-rank 8", {}, "--fake-rank 8: the ranks of --world-size 8 are 0 to 7"),
        ("--fake-world --world-size 8 --fake-rank -1", {}, "--fake-rank -1: the ranks of --world-size 8 are 0 to 7"),
        ("--fake-rank 3", {}, "--fake-rank 3 needs --fake-world"),
        (
            "--fake-world --world-size 8",
            {"RANK": "1", "WORLD_SIZE": "8"},
            "--fake-world runs in one process, but the launcher started 8",
        ),
    ],
)
def test_contradictory_settings_are_refused(flags: str, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(f"{TINY} {flags}".split(), environ)
    (problem,) = caught.value.problems
    assert (problem.code, problem.sentence) == ("E010", sentence)
    assert problem.fixes
