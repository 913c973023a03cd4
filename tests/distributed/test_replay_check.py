"""Steps that are computed again: flipped bits are found, a run stays the same, restarts begin before a corruption."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.suspects import CORRUPTION_FILE, read_corruption, record_corruption, rename_suspects
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.training.components.state_checksums import StateChecksums
from megatron.training.loggers.run_folder import METRICS_FILE, read_json_lines
from megatron.training.replay_check import component
from megatron.training.replay_check.recorder import FORWARD, GOT, GRADIENT, REDUCED, digest, word_sum
from megatron.training.replay_check.verdict import (
    NONDETERMINISTIC,
    TRANSIENT,
    UNSTABLE,
    Difference,
    RankReport,
    judge,
    odd_one_out,
)
from tests.distributed.corruption import COMMON, LAYOUTS, Fault, Score, run_layout, run_rank
from tests.kit.pool import Pool
from tests.kit.runs import KilledError, Outcome, checkpoint, differences, part_of, saved_steps, start, tiny_run

SAVES = "--save {0}/saved --save-interval 2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_flipped_bit_changes_a_digest(dtype: torch.dtype) -> None:
    x = torch.randn(3, 1001).to(dtype)
    words = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    before = digest(x), word_sum(x)
    rng = random.Random(0)
    for _ in range(100):
        row, column, bit = rng.randrange(3), rng.randrange(1001), rng.randrange(8 * x.element_size())
        mask = torch.tensor(1, dtype=words.dtype) << bit
        words[row, column] ^= mask
        assert digest(x) != before[0]
        assert word_sum(x) != before[1]
        words[row, column] ^= mask
    assert (digest(x), word_sum(x)) == before


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


@pytest.mark.parametrize("layout", ["TP2 SP x DP2, ZeRO-1"])
def test_flipped_bits_are_found_with_rank_and_place(pool: Pool, layout: str) -> None:
    score = Score(Counter(), Counter())
    run_layout(pool, layout, steps=14, count=10, seed=3, score=score)
    assert score.planted.total() >= 8
    assert score.found == score.planted
    assert score.wrong == 0


def take(rank: int, world_size: int, config: RunConfig) -> Outcome:
    return start(config, rank=rank, world_size=world_size)


def test_a_checked_run_is_bitwise_the_same(pool: Pool, tmp_path: Path) -> None:
    flags = f"{LAYOUTS['EP2 x DP2'][1]} --hidden-dropout 0.1 --train-iters 3 --save {{0}} --save-interval 3"
    for name, more in (("plain", ""), ("checked", "--replay-check 1")):
        config = tiny_run(tmp_path / f"{name}-run", f"{flags} {more}".format(tmp_path / name), 2)
        outcomes = pool.run(2, take, config)
        assert [outcome.status for outcome in outcomes] == [0, 0]
    assert "checks     every 1 step, the first and those that are saved are computed again" in outcomes[0].out
    assert "--replay-check: 3 steps of this start checked; the last that was found clean is 3" in outcomes[0].out
    lines = [line for line in read_json_lines(tmp_path / "checked-run" / METRICS_FILE) if line and "lm loss" in line]
    assert [(line["replay-checks"], line["replay-clean-step"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    found = differences(tmp_path / "checked" / "iter_0000003", tmp_path / "plain" / "iter_0000003")
    assert found == ["replay_check"]
    assert checkpoint(tmp_path / "checked" / "iter_0000003")[1]["replay_check"] == {"clean": 3}


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
    record = read_corruption(tmp_path / "saved")
    assert record is not None
    assert (record["clean"], record["found"]) == (4, 5)
    if not kill:
        line = json.loads((tmp_path / "run" / "failures.jsonl").read_text().splitlines()[-1])
        assert (line["kind"], line["rank"]) == ("device", 0)
        assert len([*(tmp_path / "run" / "incidents").iterdir()]) == 1
    refused = resume(tmp_path, "")
    assert refused.status == 2
    assert "E984" in refused.err
    outcome = resume(tmp_path, "--on-corruption exclude")
    assert outcome.status == 0
    assert "step 4, 16 samples" in outcome.out
    assert not (tmp_path / "saved" / CORRUPTION_FILE).exists()


def test_suspect_checkpoints_are_set_aside_even_after_a_crash(tmp_path: Path) -> None:
    assert resume(tmp_path, "").status == 0
    saved = tmp_path / "saved"
    assert saved_steps(saved) == [2, 4, 6]
    record_corruption(saved, 2, 6, "rank 3")
    with pytest.raises(UserError, match="E984"):
        rename_suspects(saved, "stop")
    renamed: list[Path] = []

    def rename_one(source: Path, target: Path) -> None:
        if renamed:
            raise KilledError
        source.rename(target)
        renamed.append(target)

    with patch("megatron.checkpoint.suspects.durable_rename", rename_one), pytest.raises(KilledError):
        rename_suspects(saved, "exclude")
    assert saved_steps(saved) == [2, 4]
    assert len(rename_suspects(saved, "exclude")) == 1
    assert saved_steps(saved) == [2]
    assert rename_suspects(saved, "exclude") == ()


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
    return state


def test_checksums_of_state_know_no_layout(pool: Pool, tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2"
    (two, same), one = (
        pool.run(2, checksums, tiny_run(tmp_path / "two", flags, 2)),
        checksums(0, 1, tiny_run(tmp_path / "one")),
    )
    assert two == same == one
    assert one.keys() == {"main float32", "exp_avg float32", "exp_avg_sq float32"}
