"""Steps that are computed again: flipped bits are found, a run stays the same, restarts begin before a corruption."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.rewinds import REWINDS_FILE, read_rewinds, record_corruption
from megatron.config import plugins
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import UserError
from megatron.config.plugins import register
from megatron.config.run import RunConfig
from megatron.training.callbacks.base import Callback
from megatron.training.components.state_checksums import StateChecksums
from megatron.training.digests import digest
from megatron.training.incidents import read_incidents, read_step_record
from megatron.training.loggers.run_folder import METRICS_FILE, read_json_lines
from megatron.training.metrics import StepMetrics
from megatron.training.replay_check import component
from megatron.training.replay_check.recorder import FORWARD, GOT, GRADIENT, REDUCED
from megatron.training.replay_check.verdict import (
    NONDETERMINISTIC,
    TRANSIENT,
    UNSTABLE,
    Difference,
    RankReport,
    judge,
    odd_one_out,
)
from megatron.training.resume_source import find_resume_source, preview_start, refuse_suspects
from megatron.training.trainer import Trainer
from tests.distributed.corruption import COMMON, LAYOUTS, MOE, Fault, run_layout, run_rank
from tests.kit.pool import Pool
from tests.kit.runs import (
    KilledError,
    Outcome,
    before_step,
    checkpoint,
    differences,
    part_of,
    saved_steps,
    start,
    tiny_run,
)

SAVES = "--save {0}/saved --save-interval 2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize(("size", "offset"), [(3003, 0), (8200, 0), (8200, 1)])
def test_a_flipped_bit_changes_a_digest(dtype: torch.dtype, size: int, offset: int) -> None:
    """Of words as long as an element, and of 64 bits: in whole rows, after them, and not aligned."""
    x = torch.randn(offset + size).to(dtype)[offset:]
    words = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    before = digest(x)
    rng = random.Random(0)
    for _ in range(100):
        place, bit = rng.randrange(size), rng.randrange(8 * x.element_size())
        mask = torch.tensor(1, dtype=words.dtype) << bit
        words[place] ^= mask
        assert digest(x) != before
        words[place] ^= mask
    assert digest(x) == before


def report(rank: int, first: Difference | None, *given: str) -> RankReport:
    return RankReport(rank, f"node{rank}", 0, "cpu", first, given)


def at(kind: str, label: str = "", action: str = "0F1") -> Difference:
    return Difference(kind, "layers.0", action, label, "")


@pytest.mark.parametrize(
    ("reports", "ranks"),
    [
        # What a rank has computed itself, and others have got from it.
        ([report(0, at(GOT, "a")), report(1, at(FORWARD), "a"), report(2, None)], [1]),
        ([report(0, at(REDUCED)), report(1, at(GRADIENT)), report(2, at(REDUCED))], [1]),
        # All gave the same, and one got something else, which it then gives to another.
        ([report(0, at(GOT, "a"), "b"), report(1, at(GOT, "b")), report(2, None)], [0]),
        ([report(0, None), report(1, at(REDUCED, action=""))], [1]),
        ([report(0, at(GOT, "a")), report(1, at(GOT, "a"))], [0, 1]),
    ],
)
def test_the_rank_at_fault_is_named(reports: list[RankReport], ranks: list[int]) -> None:
    verdict = judge(reports, 7, 3, 0, True)
    assert (verdict.ranks, verdict.cause) == (ranks, TRANSIENT)
    assert verdict.hosts == [f"node{rank}" for rank in ranks]


def test_hardware_is_not_accused_of_what_is_not_deterministic() -> None:
    assert odd_one_out([[0, 0, 0, 0], [0, 1, 1, 1]]) == 0
    assert odd_one_out([[0, 0, 2, 0], [0, 0, 0, 0]]) == 2
    assert odd_one_out([[0, 1, 2, 3], [0, 0, 0, 0]]) is None
    one, several = [report(0, at(FORWARD)), report(1, None)], [report(0, at(FORWARD)), report(1, at(FORWARD))]
    assert judge(one, 7, 3, None, True).cause == UNSTABLE
    assert judge(one, 7, 3, None, False).cause == NONDETERMINISTIC
    assert judge(several, 7, 3, None, True).cause == NONDETERMINISTIC
    assert not judge(several, 7, 3, None, True).is_hardware

    drifted = [replace(report(rank, None), found=[("state", "weight a")]) for rank in (0, 1)]
    assert judge(drifted, 7, 0, None, True).cause == NONDETERMINISTIC
    assert judge([drifted[0], report(1, None)], 7, 0, None, True).cause == TRANSIENT
    assert judge([drifted[0], report(1, None)], 7, 0, None, False).cause == NONDETERMINISTIC
    stale = [replace(each, found=[("gather", "part of rank 2")]) for each in drifted]
    assert judge(stale, 7, 0, None, True).is_hardware


class Clamp(Callback):
    """Changes weights after the update."""

    interval = 1

    def on_step_end(self, metrics: StepMetrics) -> None:
        for x in self.trainer.optimizer.weights.shards.values():
            x.data.clamp_(-0.01, 0.01)


def test_a_callback_that_changes_weights_is_no_fault_of_hardware(tmp_path: Path) -> None:
    with patch.dict(plugins._registered, {"callback": {}}):
        register("callback", "clamp")(Clamp)
        outcome = resume(tmp_path, "--on-corruption exclude")
    assert outcome.status == 1
    assert "E983 state differs in the check of step 2" in outcome.err
    assert "a callback or plugin" in outcome.err
    assert not (tmp_path / "saved" / REWINDS_FILE).exists()
    assert "device" not in (tmp_path / "run" / "failures.jsonl").read_text()


@pytest.mark.parametrize("policy", ["stop", "exclude"])
def test_the_error_names_the_cause_the_incident_and_how_to_go_on(tmp_path: Path, policy: str) -> None:
    def flip(trainer: Trainer) -> None:
        next(iter(trainer.optimizer.weights.shards.values())).data.view(-1)[0] += 1

    flags = COMMON.replace("--on-corruption report", f"--on-corruption {policy}") + f" {SAVES}".format(tmp_path)
    outcome = start(tiny_run(tmp_path / "run", flags), before_step(5, flip))
    ((folder, incident),) = read_incidents(tmp_path / "run")
    assert incident.sentence.endswith("; a transient fault of hardware")
    more = " with --on-corruption exclude" if policy == "stop" else ""
    assert outcome.err.endswith(
        f"E982 {incident.sentence}; the last step that was found clean is 4\n"
        f"  samples and configuration of the step: {folder}\n"
        f"  go on: the same command{more}, which resumes from step 4 or before\n"
    )


def check_flips(pool: Pool, layout: str, steps: int) -> None:
    score = run_layout(pool, layout, steps, count=steps - 4, seed=3)
    assert score.planted.total() >= steps - 6
    assert score.found == score.planted
    assert score.clean.total() >= 4
    assert score.alarms == 0


def test_flipped_bits_are_found_with_rank_and_place(pool: Pool) -> None:
    check_flips(pool, "DP2, ZeRO-1", 13)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name, (ranks, _) in LAYOUTS.items() if ranks == 8])
def test_flipped_bits_are_found_in_every_layout(pool: Pool, layout: str) -> None:
    check_flips(pool, layout, 40)


def take(rank: int, world_size: int, config: RunConfig) -> Outcome:
    return start(config, rank=rank, world_size=world_size)


def test_a_checked_run_is_bitwise_the_same(pool: Pool, tmp_path: Path) -> None:
    layout = f"{MOE} --expert-model-parallel-size 2 --use-distributed-optimizer"
    flags = f"{layout} --hidden-dropout 0.1 --train-iters 3 --save {{0}} --save-interval 3"
    for name, more in (("plain", ""), ("checked", "--replay-check 1")):
        config = tiny_run(tmp_path / f"{name}-run", f"{flags} {more}".format(tmp_path / name), 2)
        outcomes = pool.run(2, take, config)
        assert [outcome.status for outcome in outcomes] == [0, 0]
    assert "checks     every 1 step, the first and those that are saved are computed again" in outcomes[0].out
    assert "--replay-check: 3 steps checked from step 1 on; the last that was found clean is 3" in outcomes[0].out
    lines = [line for line in read_json_lines(tmp_path / "checked-run" / METRICS_FILE) if line and "lm loss" in line]
    assert [(line["replay-checks"], line["replay-clean-step"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    found = differences(tmp_path / "checked" / "iter_0000003", tmp_path / "plain" / "iter_0000003")
    assert found == ["replay_check"]
    assert checkpoint(tmp_path / "checked" / "iter_0000003")[1]["replay_check"] == {"clean": 3}


@pytest.mark.parametrize("transient", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_is_replayed(tmp_path: Path, transient: bool) -> None:
    def spoil(trainer: Trainer) -> None:
        calls: list[int] = []

        def spoil_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            calls.append(trainer.iteration)
            spoils = len(calls) == 1 if transient else trainer.iteration == 3
            return output * torch.nan if spoils else output

        next(iter(trainer.chunks.values())).embedding.register_forward_hook(spoil_output)

    flags = "--replay-check 100 --on-nonfinite skip --global-batch-size 1"
    assert start(tiny_run(tmp_path, flags), before_step(4, spoil)).status == 0
    (incident,) = (incident for _, incident in read_incidents(tmp_path))
    expected = "its replay has other gradients" if transient else "its replay is the same to the bit"
    assert expected in incident.sentence


@pytest.mark.parametrize(("skipped", "checks"), [("3", 4), ("4 7", 3)])
def test_state_is_not_compared_with_that_of_an_earlier_check(tmp_path: Path, skipped: str, checks: int) -> None:
    outcome = start(tiny_run(tmp_path, f"--replay-check 4 --train-iters 10 --iterations-to-skip {skipped}"))
    assert outcome.status == 0, outcome.err
    assert f"{checks} steps checked from step 1 on" in outcome.out


def test_nothing_is_observed_after_an_error(tmp_path: Path) -> None:
    trainers: list[Trainer] = []

    def fail(*arguments: Any) -> None:
        raise OSError

    def spoil(trainer: Trainer) -> None:
        trainers.append(trainer)
        next(iter(trainer.chunks.values())).output_layer.register_forward_hook(fail)

    assert start(tiny_run(tmp_path, "--replay-check 1"), before_step(2, spoil)).status == 1
    [trainer] = trainers
    assert trainer.mesh.meter.observer is None
    assert sum(len(module._forward_hooks) for chunk in trainer.chunks.values() for module in chunk.modules()) == 1


@pytest.mark.parametrize(("step", "steps"), [(4, [4]), (5, [])])
def test_state_is_compared_before_a_step_that_is_checked(tmp_path: Path, step: int, steps: list[int]) -> None:
    config = tiny_run(tmp_path, COMMON.replace("--replay-check 1", "--replay-check 2"))
    run_rank(0, 1, config, [Fault(step, 0, "state", 7)])
    assert [incident.step for _, incident in read_incidents(tmp_path)] == steps


def corrupt(folder: Path, flags: str = "", step: int = 5, **patches: Any) -> int | None:
    """Run with a bit that flips in an activation; return 1 after an error, None if the run was killed."""
    text = COMMON.replace("--on-corruption report", "") + f" {SAVES} {flags}".format(folder)
    config = tiny_run(folder / "run", text)
    with patch.multiple(component, DEVICE="device", **patches):
        try:
            run_rank(0, 1, config, [Fault(step, 0, "activation", 7)])
        except RuntimeError:
            return 1
    return None


def resume(folder: Path, flags: str) -> Outcome:
    text = COMMON.replace("--on-corruption report", "") + f" {SAVES} {flags}".format(folder)
    return start(tiny_run(folder / "run", text))


def killed(*arguments: Any) -> None:
    raise KilledError


@pytest.mark.parametrize("kill", [False, True])
def test_a_restart_begins_before_the_corruption(tmp_path: Path, kill: bool) -> None:
    # one that is killed has recorded, before anything else, that later checkpoints are suspect
    patches = {"record_incident": killed} if kill else {}
    assert corrupt(tmp_path, **patches) == (None if kill else 1)
    (record,) = read_rewinds(tmp_path / "saved")
    assert (record.kind, record.limit, record.step) == ("corruption", 4, 5)
    if not kill:
        line = json.loads((tmp_path / "run" / "failures.jsonl").read_text().splitlines()[-1])
        assert (line["kind"], line["rank"]) == ("device", 0)
        [(folder, _)] = read_incidents(tmp_path / "run")
        assert [each["sample"] for each in read_step_record(folder)["samples"]] == [16, 17, 18, 19]
    refused = resume(tmp_path, "")
    assert refused.status == 2
    assert "E984" in refused.err
    with pytest.raises(UserError, match="E984"):  # with --check-config
        preview_start(tiny_run(tmp_path / "run", f"{SAVES} --replay-check 1".format(tmp_path)), 1)
    excludes = tiny_run(tmp_path / "run", f"{SAVES} --replay-check 1 --on-corruption exclude".format(tmp_path))
    source = find_resume_source(excludes.resume_options)
    with patch.object(Manifest, "open", side_effect=OSError):
        refuse_suspects(excludes, source)  # reads no checkpoint
    outcome = resume(tmp_path, "--on-corruption exclude")
    assert outcome.status == 0
    assert "step 4, 16 samples" in outcome.out
    assert resume(tmp_path, "").status == 0, "a checkpoint since then lists the corruption"


def test_suspect_checkpoints_are_passed_over_by_every_reader(tmp_path: Path) -> None:
    assert resume(tmp_path, "").status == 0
    saved = tmp_path / "saved"
    assert saved_steps(saved) == [2, 4, 6]
    record_corruption(saved, 2, 6)
    for options in (CheckpointConfig(save=str(saved)), CheckpointConfig(load=str(saved))):
        source = find_resume_source(options)
        assert [path.name for path in source.paths] == ["iter_0000002"]
        assert "corruption was found in step 6, and step 2 is the last one known to be clean" in source.notes[0]
    manifest, passed_over = CheckpointFolder(saved).newest()  # as conversion and serving do
    assert (manifest.path.name, len(passed_over)) == ("iter_0000002", 2)
    again = resume(tmp_path, "--on-corruption exclude")
    assert again.status == 0
    assert "leaves out" not in again.out
    assert CheckpointFolder(saved).newest()[0].path.name == "iter_0000006"


def checksums(rank: int, world_size: int, config: RunConfig) -> Any:
    from megatron.training.build import build_trainer
    from megatron.training.features import build_components

    trainer = build_trainer(config, rank, world_size)
    trainer.components = build_components(trainer)
    sums = part_of(trainer, StateChecksums)
    state = sums.state_dict()
    sums.load_state_dict(state)
    name = next(iter(trainer.optimizer.main_params))
    words = trainer.optimizer.main_params[name].view(torch.int32).view(-1)
    words[3] ^= 1 << 20
    with pytest.raises(DamagedCheckpointError, match="main float32"):
        sums.load_state_dict(state)
    words[3] ^= 1 << 20
    words[:2] = words[:2].flip(0)
    with pytest.raises(DamagedCheckpointError, match="main float32"):
        sums.load_state_dict(state)
    return state


def test_checksums_of_state_know_no_layout(pool: Pool, tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2"
    (two, same), one = (
        pool.run(2, checksums, tiny_run(tmp_path / "two", flags, 2)),
        checksums(0, 1, tiny_run(tmp_path / "one")),
    )
    assert two == same == one
    assert one.keys() == {"main float32", "exp_avg float32", "exp_avg_sq float32"}
