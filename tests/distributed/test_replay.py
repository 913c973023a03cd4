"""A step is taken again to the bit from the checkpoint before it, and what is wrong in it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.training.incidents import read_incidents, read_step_record
from megatron.training.module_trace import first_out_of_line, suspicious_samples
from megatron.training.replay import Replay, ReplayOptions, read_only_config, replay
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import FLAGS, before_step, contents, start, tiny_run
from tools.lib.replayed_step import compare, find_source, read_target

ROOT = Path(__file__).resolve().parents[2]

STEP = 5
SAVES = (
    "--save-interval 3 --hidden-dropout 0.1 --skip-spikes 4 --spike-window 4 --on-nonfinite stop "
    "--untie-embeddings-and-output-weights"
)

LAYOUTS = {
    "one rank": (1, "--micro-batch-size 2"),
    "dp2": (2, "--use-distributed-optimizer"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}

EMBEDDING, FC2 = "embedding.word_embeddings", "layers.1.mlp.linear_fc2"


def rare_token(trainer: Trainer) -> tuple[int, int]:
    """Return an id that one sample of the next step alone reads, and the sample."""
    train, first = trainer.data.datasets["train"], trainer.consumed_samples
    rows = {i: {*train[i].tokens.tolist()} for i in range(first, first + 4)}
    return next((t, i) for i in rows for t in sorted(rows[i]) if not any(t in rows[j] for j in rows if j != i))


def nan_in_embedding(trainer: Trainer) -> None:
    """Make the embedding of an id NaN that one sample of the step reads."""
    name, (token, _) = f"{EMBEDDING}.weight", rare_token(trainer)
    if name in trainer.params and not trainer.specs[name].counted_elsewhere:
        for piece in trainer.specs[name].pieces:
            row = token - piece.global_box.start[0]
            if 0 <= row < piece.global_box.size[0]:
                trainer.params[name].data[piece.local_box.start[0] + row] = torch.nan


def huge_weight(trainer: Trainer) -> None:
    """Multiply the weights of an MLP, and of the output layer, which makes the loss large."""
    for name in (f"{FC2}.weight", "output_layer.weight"):
        if name in trainer.params:
            trainer.params[name].data.mul_(300.0)


def flipped_gradient(trainer: Trainer) -> None:
    """Change the last bit of an element of a gradient before it is compared; make it 1 if it is NaN."""
    reduce = trainer.optimizer.reduce_gradients

    def reduce_and_flip(*clock: Any) -> None:
        reduce(*clock)
        for name, gradient in trainer.optimizer.grads.items():
            if name == f"{FC2}.weight":
                first = gradient.view(-1)[:1]
                first.nan_to_num_(1.0).view(torch.int32).bitwise_xor_(1)

    trainer.optimizer.reduce_gradients = reduce_and_flip  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[Trainer], None], str, str]] = {
    "nonfinite": (nan_in_embedding, EMBEDDING, "not finite"),
    "spike": (huge_weight, FC2, "times what it is compared with"),
}


class Found(NamedTuple):
    """What rank 0 has found."""

    differences: list[str]  # first differences: of the replay, without the fault, with another one
    compared: int
    module: str
    why: str
    samples: list[int]


def run_with_fault(rank: int, world_size: int, folder: Path, kind: str, flags: str) -> list[int]:
    """Run, with the fault right before the step; return the exit status and the sample that it hits."""
    expected = list[int]()

    def spoil(trainer: Trainer) -> None:
        expected[:] = [rare_token(trainer)[1]]
        FAULTS[kind][0](trainer)

    run = tiny_run(folder / "run", f"{SAVES} {flags} --save {folder}/saved", world_size)
    outcome = start(run, before_step(STEP, spoil), rank, world_size)
    return [int(outcome.status or 0), *expected]


def replay_faults(rank: int, world_size: int, folder: Path, kind: str) -> Found:
    """Replay the step with the fault, without it, and with another one as well; then with the fault by samples."""

    def spoil_and_flip(trainer: Trainer) -> None:
        FAULTS[kind][0](trainer)
        flipped_gradient(trainer)

    spoiled, replays, differences, compared = before_step(STEP, FAULTS[kind][0]), list[Replay](), list[str](), 0
    target = read_target(next(iter(read_incidents(folder / "run")))[0], None, ())
    source, config = find_source(target, None), read_only_config(target.config)
    for event in (spoiled, nullcontext(), before_step(STEP, spoil_and_flip)):
        with event:
            replays.append(replay(config, source, ReplayOptions(STEP, modules=True), rank, world_size))
        if rank == 0:
            result = compare(target, replays[-1], True, 0.0)
            differences.append(result.first_difference)
            compared = compared or result.compared
    with before_step(STEP, FAULTS[kind][0]):
        alone = replay(config, source, ReplayOptions(STEP, samples=EMBEDDING), rank, world_size)
    if rank:
        return Found([], 0, "", "", [])
    suspicion = first_out_of_line(replays[0].modules, replays[0].modules_before)
    blamed = [sample.sample for sample in suspicious_samples(alone.samples)]
    module, why = ("", "") if suspicion is None else (suspicion.module.name, suspicion.why)
    return Found(differences, compared, module, why, blamed)


SHORT = {("one rank", "spike"), ("tp2", "nonfinite"), ("pp2", "nonfinite")}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in SHORT else pytest.mark.slow)
        for layout in LAYOUTS
        for kind in FAULTS
    ],
)
def test_a_step_is_taken_again_to_the_bit_and_its_fault_named(
    pool: Pool, tmp_path: Path, layout: str, kind: str
) -> None:
    ranks, flags = LAYOUTS[layout]
    status, sample = pool.run(ranks, run_with_fault, tmp_path, kind, flags)[0]
    assert status == (1 if kind == "nonfinite" else 0)
    [(folder, incident)] = read_incidents(tmp_path / "run")
    assert (incident.kind, incident.step) == (kind, STEP)
    before = contents(tmp_path)

    found = pool.run(ranks, replay_faults, tmp_path, kind)[0]
    assert contents(tmp_path) == before
    replayed, healthy, flipped = found.differences
    assert replayed == ""
    assert found.compared > 2 * 20
    assert healthy
    assert flipped.startswith(f"gradients {FC2}.weight")
    _, module, why = FAULTS[kind]
    assert found.module == module
    assert why in found.why
    if kind == "nonfinite":
        assert found.samples == [sample]
        record = read_step_record(folder)
        assert sorted(entry["sample"] for entry in record["samples"]) == [16, 17, 18, 19]
        assert record["layers"]["embedding"] == "nan"


PLUGIN = """
import torch
from megatron.config.plugins import register
from megatron.training.callbacks.base import Callback

@register("callback", "spoil")
class Spoil(Callback):
    def on_step_start(self):
        name = "layers.1.mlp.linear_fc2.weight"
        if self.trainer.iteration == 4 and name in self.trainer.params:
            self.trainer.params[name].data.view(-1)[:1] = torch.nan
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_the_tool_starts_the_layout_of_the_run_as_processes(tmp_path: Path, layout: str) -> None:
    """With gloo between processes, as in the run; and on one rank, up to rounding."""
    (tmp_path / "spoil.py").write_text(PLUGIN)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    flags = [*FLAGS.split(), *SAVES.split(), *LAYOUTS[layout][1].split(), "--plugin", "spoil"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launch, str(ROOT / "pretrain_gpt.py"), *flags, "--save", "run/saved", "--run-dir", "run"]
    ended = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    [(folder, _)] = read_incidents(tmp_path / "run")
    before = contents(tmp_path / "run")
    tool = [sys.executable, str(ROOT / "tools/replay_step.py"), str(folder), "--bisect"]
    for more, words in (([], "equal to the bit"), (["--one-process"], "equal within 1e-05")):
        found = subprocess.run([*tool, *more], env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        assert words in found.stdout.splitlines()[-1]
        assert f"first out of line: the output of {FC2}, not finite" in found.stdout
    assert contents(tmp_path / "run") == before
