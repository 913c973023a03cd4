"""The tool that checks a user's layout: it names faults, and prints nothing otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.training.build import build_trainer
from tests.distributed import faults
from tests.distributed.sites import ROOT
from tests.kit.pool import Pool
from tools.lib.verify_parallel import RankTrace, trace_steps
from tools.verify_parallel import Launcher, main, prepare_runs

FLAGS = [
    *("--preset", "tiny-llama", "--world-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--num-layers", "2", "--seq-length", "32", "--global-batch-size", "2", "--lr-warmup-iters", "0"),
]


def no_fault() -> AbstractContextManager[Any]:
    return patch.dict(os.environ)


def one_gradient_doubled() -> AbstractContextManager[Any]:
    """The weight gradient of one linear, in the last layer, is twice what it should be."""
    original = GradAccumulator.accumulate_wgrad

    def add(self: GradAccumulator, name: str, x: WgradOperand, dy: WgradOperand) -> None:
        original(self, name, x, WgradOperand(2.0 * dy.wait()) if name == "layers.1.mlp.linear_fc2.weight" else dy)

    return patch.object(GradAccumulator, "accumulate_wgrad", add)


def one_rank_fails() -> AbstractContextManager[Any]:
    return patch.object(GradAccumulator, "accumulate_wgrad", side_effect=RuntimeError("out of luck"))


FAULTS = {
    f.__name__: f
    for f in (
        no_fault,
        one_gradient_doubled,
        one_rank_fails,
        faults.kv_copies_not_summed,
        faults.tied_weight_not_summed,
    )
}


def traced(rank: int, world_size: int, config: RunConfig, steps: int, fault: str) -> list[RankTrace]:
    with FAULTS[fault]():
        return trace_steps(build_trainer(config, rank, world_size), steps)


def on(pool: Pool, fault: str = "no_fault") -> Launcher:
    return lambda config, world_size, steps: pool.run(world_size, traced, config, steps, fault)


def test_a_right_layout_passes(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FLAGS, on(pool)) == 0
    out = capsys.readouterr().out
    notes = [line.removeprefix("note: not given, so assumed: ") for line in out.splitlines()[:3]]
    assert notes == ["--train-iters 100", "--mock-data", "--vocab-size 257"]
    assert "1 process against 2: DP 1 x TP 2 + sequence parallel\n" in out
    assert "reference: 2 steps on 1 process ...\nlayout: 2 steps on 2 processes ...\n" in out
    assert "equal: 15 gradients agree to 1e-10, copies to the bit\n" in out


PIPELINES = {
    "PP 2 (1f1b) x DP 1 x TP 1": "--pipeline-model-parallel-size 2",
    "PP 2 x VPP 2 (interleaved) x DP 1 x TP 2 + sequence parallel": "--pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 2 --sequence-parallel --num-layers 5",
    "PP 2 x VPP 2 (zb-v) x DP 2 x TP 1": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
    "PP 4 (zb-h1) x DP 1 x TP 1": "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 "
    "--no-untie-embeddings-and-output-weights",
    "PP 2 (1f1b) x DP 1 x CP 2 (a2a) x TP 1": "--pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--cp-comm-type a2a --seq-length 66",
}


SHORT = ("PP 2 (1f1b) x DP 1 x TP 1", "PP 2 x VPP 2 (zb-v) x DP 2 x TP 1", "PP 2 (1f1b) x DP 1 x CP 2 (a2a) x TP 1")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in PIPELINES]
)
def test_pipelines(pool: Pool, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    ranks = "2" if layout.endswith("(1f1b) x DP 1 x TP 1") else "4"
    flags = ["--preset", "tiny-llama", "--world-size", ranks, "--steps", "1", "--shrink", *PIPELINES[layout].split()]
    assert main(flags, on(pool)) == 0
    out = capsys.readouterr().out
    assert f"1 process against {ranks}: {layout}\n" in out
    assert " gradients agree to 1e-10, copies to the bit\n" in out


def test_a_tied_weight_whose_copies_are_not_summed(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "tiny-llama", "--world-size", "2", *PIPELINES["PP 2 (1f1b) x DP 1 x TP 1"].split()]
    tied = "--no-untie-embeddings-and-output-weights"
    assert main([*flags, "--shrink", "--steps", "1", tied], on(pool, "tied_weight_not_summed")) == 1
    out = capsys.readouterr().out
    assert "first the gradient of embedding.word_embeddings.weight" in out
    assert "not the same on all ranks that share it: gradient of embedding.word_embeddings.weight, ..." in out


def test_the_first_parameter_that_differs_is_named(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FLAGS, on(pool, "one_gradient_doubled")) == 1
    out = capsys.readouterr().out
    assert "differs in step 1: first the gradient of layers.1.mlp.linear_fc2.weight, error 1.0e+00" in out
    assert "2 quantities differ in all\n" in out  # and the gradient norm


def test_copies_that_are_not_summed(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--num-query-groups", "1"], on(pool, "kv_copies_not_summed")) == 1
    out = capsys.readouterr().out
    assert "first the gradient of layers.0.self_attention.linear_qkv.weight" in out
    assert "not the same on all ranks that share it: gradient of layers.0.self_attention.linear_qkv.weight, ..." in out


def test_a_rank_that_fails_is_reported(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FLAGS, on(pool, "one_rank_fails")) == 1
    assert "out of luck" in capsys.readouterr().err


def test_flags_that_cannot_work_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "3", "--preset", "tiny-llama", "--tensor-model-parallel-size", "3"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("E203 8 heads do not divide over TP 3\n  fix: ")
    assert "E501" not in err  # missing data are assumed, not complained about


@pytest.mark.parametrize(("size", "fix"), [("3", "--world-size 6"), ("16", "--world-size 16")])
def test_fixes_speak_of_the_ranks_that_this_tool_starts(
    capsys: pytest.CaptureFixture[str], size: str, fix: str
) -> None:
    flags = ["--preset", "tiny-llama", "--num-attention-heads", "48", "--hidden-size", "192"]
    assert main(["--world-size", "4", *flags, "--tensor-model-parallel-size", size]) == 2
    err = capsys.readouterr().err
    assert f"E202 4 ranks are not a multiple of TP = {size}\n  fix: --tensor-model-parallel-size" in err
    assert f" | {fix}\n" in err


def test_long_runs_are_made_short_on_request(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    size = [
        "--num-layers",
        "9",
        "--seq-length",
        "99",
        "--global-batch-size",
        "64",
        "--rampup-batch-size",
        "8",
        "8",
        "99",
    ]
    short = "num_layers=2, seq_length=64, global_batch_size=4, rampup_batch_size=null"
    flags = ["--preset", "tiny-llama", "--world-size", "2", "--shrink", "--steps", "1", *size]
    assert main(flags, on(pool)) == 0
    assert f"note: shrunk: {short}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "shrunk"),
    [
        ("--pipeline-model-parallel-size 2", "num_layers=2, seq_length=64, global_batch_size=4"),
        ("--num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2", "num_layers=6, "),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto", "num_layers=2, "),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*7L", "seq_length=64, "),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5", "seq_length=64, "),
    ],
)
def test_a_short_pipeline_keeps_its_stages(flags: str, shrunk: str) -> None:
    size = "--num-layers 12 --seq-length 99 --max-position-embeddings 99 --global-batch-size 64"
    argv = ["--preset", "tiny-llama", *size.split(), *flags.split()]
    check = prepare_runs(argv, world_size=2, steps=1, dtype="fp64", shrink=True)
    (note,) = [note for note in check.notes if note.startswith("shrunk: ")]
    assert note.startswith(f"shrunk: {shrunk}")


@pytest.mark.slow
def test_as_a_person_runs_it() -> None:
    command = [sys.executable, "tools/verify_parallel.py", *FLAGS, "--steps", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("equal: 15 gradients")
