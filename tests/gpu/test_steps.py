"""Whole steps: equal runs, recomputation, recorded steps, checkpoints, memory, and no wait for the GPU in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.arguments.cli import parse
from megatron.planner.memory import max_state_bytes
from megatron.training.build import build_trainer
from megatron.training.cuda_graphs import StepRunner
from megatron.training.step import evaluate, train_step
from megatron.training.trainer import Trainer
from tests.gpu.models import (
    COMMON,
    RATES,
    SHAPES,
    SIZES,
    batches_of,
    config_of,
    distance,
    gradients,
    train,
    trainer_of,
    weights,
)
from tests.kit.runs import differences, start
from tests.unit.training.test_cuda_graphs import Tape, state_of

pytestmark = pytest.mark.gpu


def runner_of(trainer: Trainer, recorded: str) -> StepRunner:
    """Return an object that takes steps with a recording; on a CPU, with one that only looks like it."""
    trainer.config = replace(trainer.config, compute=replace(trainer.config.compute, cuda_graph=recorded))
    return StepRunner(trainer, None if trainer.device.type == "cuda" else Tape(lambda: state_of(trainer)))


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--fp16",
        "--bf16 --kernels compiled",
        "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1",
        "--bf16 --recompute-granularity full",
        "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "--bf16 --optimizer lion",
        "--bf16 --optimizer sgd",
        "--bf16 --skip-spikes 6 --ema-decay 0.99 --decoupled-lr 1e-4 --lr-factors *norm*=0.5",
    ],
)
@pytest.mark.parametrize("recorded", ["none", "optimizer", "step"])
def test_nothing_waits_for_the_gpu_inside_a_step(device: torch.device, flags: str, recorded: str) -> None:
    if device.type == "cpu" and "compiled" in flags:
        pytest.skip("compiles for a minute on a CPU")
    if recorded == "step" and "dropout" in flags:
        pytest.skip("is refused")
    trainer = trainer_of(device, flags)
    step = runner_of(trainer, recorded)
    rates = replace(RATES, decoupled_lr=2.0**-11 if "decoupled" in flags else None)
    for _ in range(5):  # compiles, and records where something is recorded
        step(trainer.next_batches(), rates)
    with no_waiting(device):
        for _ in range(3):
            metrics = step(trainer.next_batches(), rates)
    assert torch.isfinite(metrics.loss)


@pytest.mark.parametrize("dtype", ["--bf16", ""])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_equal_runs_are_equal_to_the_bit(device: torch.device, deterministic: None, dtype: str, shape: str) -> None:
    steps = 100 if device.type == "cuda" else 5
    runs = []
    for _ in range(2):
        trainer = trainer_of(device, f"{dtype} --deterministic", shape)
        runs.append((train(trainer, steps, partial(train_step, trainer)), weights(trainer)))
    (printed, after), (reported_again, after_again) = runs
    assert printed == reported_again
    assert all(torch.equal(after[name], after_again[name]) for name in after)
    assert printed[-1][0] < printed[0][0] + 1.0  # and it did not run away


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full",
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules layernorm activation core_attn",
        "--recompute-granularity selective --recompute-modules mlp",
    ],
)
@pytest.mark.parametrize("dtype", ["--bf16", ""])
def test_recomputation_changes_no_bit(device: torch.device, deterministic: None, flags: str, dtype: str) -> None:
    plain, frugal = trainer_of(device, dtype), trainer_of(device, f"{dtype} {flags}")
    batches = batches_of(plain)
    loss, right = gradients(plain, batches)
    loss_again, found = gradients(frugal, batches)
    assert loss_again == loss
    assert distance(found, right)["all"] == 0.0


def test_recomputation_saves_memory(gpu: torch.device) -> None:
    peaks = []
    for flags in ("", "--recompute-granularity selective", "--recompute-granularity full"):
        trainer = trainer_of(gpu, f"--bf16 --micro-batch-size 8 --global-batch-size 8 {flags}")
        batches = batches_of(trainer, count=1)
        train_step(trainer, batches, RATES)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_step(trainer, batches, RATES)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del trainer
    assert peaks[0] > peaks[1] > peaks[2], peaks


@pytest.mark.parametrize("recorded", ["optimizer", "step"])
@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--fp16 --initial-loss-scale 16384 --loss-scale-window 4",
        "",
        "--bf16 --kernels auto",
        "--bf16 --recompute-granularity full",
        "--bf16 --exp-avg-dtype bf16 --skip-spikes 6 --ema-decay 0.99",
    ],
)
def test_recorded_steps_equal_eager_ones(device: torch.device, deterministic: None, recorded: str, flags: str) -> None:
    def run(graph: str) -> tuple[list[tuple[float, float]], Trainer]:
        trainer = trainer_of(device, flags)
        step = runner_of(trainer, graph)
        printed = [step(batches_of(trainer, count, seed), RATES) for seed, count in enumerate([2] * 8 + [1] * 6)]
        assert step.recording is None or step.recording.recorded
        return [(m.loss.item(), m.grad_norm.item()) for m in printed], trainer

    eager, first = run("none")
    graphed, second = run(recorded)
    assert graphed == eager
    assert all(torch.equal(a, weights(second)[name]) for name, a in weights(first).items())


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_captured_step_after_an_evaluation_equals_an_eager_one(
    device: torch.device, deterministic: None, kernels: str
) -> None:
    """The evaluation allocates and frees memory, and runs the same layers without gradients, between two replays."""

    def run(graph: str) -> tuple[list[float], Trainer]:
        trainer = trainer_of(device, f"--bf16 --kernels {kernels} --eval-iters 2 --eval-interval 100")
        step, losses = runner_of(trainer, graph), []
        for seed in range(8):
            losses.append(step(batches_of(trainer, seed=seed), RATES).loss.item())
            if seed >= 4:
                losses.append(evaluate(trainer).item())
        assert step.recording is None or step.recording.recorded
        return losses, trainer

    (eager, first), (graphed, second) = run("none"), run("step")
    assert graphed == eager
    assert all(torch.equal(a, weights(second)[name]) for name, a in weights(first).items())


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", ""])
def test_a_resumed_run_equals_one_that_was_never_stopped(
    device: torch.device, deterministic: None, flags: str, tmp_path: Path
) -> None:
    def run(name: str, more: str) -> None:
        words = f"{COMMON} {SIZES[device.type]} {SHAPES['llama']} --device {device.type} {flags} --train-iters 6 {more}"
        argv = [*words.split(), "--save", str(tmp_path / name), "--run-dir", str(tmp_path / f"{name}-run")]
        printed = start(parse(argv, {}).config)
        assert printed.status == 0, printed.err

    run("whole", "")
    run("parts", "--exit-interval 3")
    run("parts", "")
    whole, parts = (max((tmp_path / name).glob("iter_*")) for name in ("whole", "parts"))
    assert [d for d in differences(whole, parts) if d not in ("goodput", "run_id")] == []


@pytest.mark.parametrize("flags", ["--bf16", "", "--bf16 --exp-avg-dtype bf16 --ema-decay 0.9", "--optimizer lion"])
def test_memory_matches_the_formula(device: torch.device, flags: str) -> None:
    config = config_of(device, flags)
    gc.collect()  # of tests before
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    trainer = build_trainer(config, 0, 1)
    o = trainer.optimizer
    if device.type == "cuda":
        held = torch.cuda.memory_allocated() - before
    else:
        moments = [t for c in trainer.components for kind in c.tensors().values() for t in kind.values()]
        kept = [
            *trainer.params.values(),
            *(b.shard for b in trainer.buckets.buckets),
            *moments,
            *o.main_params.values(),
        ]
        held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
        held += max_state_bytes(config, 1)["buffers"]
    expected = sum(max_state_bytes(config, 1).values())
    assert expected <= held < 1.05 * expected + 512 * 8 * len(trainer.params)  # CUDA allocates in steps of 512 bytes


def test_a_rate_in_gpu_memory_is_the_same_rate(device: torch.device) -> None:
    plain, placed = trainer_of(device), trainer_of(device)
    rates = replace(RATES, lr=torch.full((), float(RATES.lr), device=device))
    for seed in range(3):
        train_step(plain, batches_of(plain, seed=seed), RATES)
        train_step(placed, batches_of(placed, seed=seed), rates)
    assert distance(*({n: w.cpu().double() for n, w in weights(t).items()} for t in (plain, placed)))["all"] < 1e-6
