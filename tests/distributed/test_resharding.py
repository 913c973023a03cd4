"""Checkpoints of every layout load on any other, to the bit, and the run goes on as if nothing had happened.

What is cut differs: by TP, PP, EP, ZeRO and its copies, Muon's whole matrices, bf16 moments, masters as remainders.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments.sources import resolve
from megatron.checkpoint.format import Manifest
from megatron.config.run import CheckpointConfig, RunConfig
from megatron.training.build import build_trainer
from megatron.training.checkpointer import save_checkpoint
from tests.distributed.pool import Pool
from tests.distributed.resharding import (
    MAX_RANKS,
    Reshard,
    bytes_of_files,
    draw,
    large_run,
    loading,
    saving,
    times_written,
)
from tests.distributed.resume import BEFORE, gathered, load_and_go_on, save_and_go_on
from tests.runs import checkpoint

CUT = {"data_parallel_sharding_strategy": "optim"}
WHOLE = {"data_parallel_sharding_strategy": "no_shard"}
STREAMED = {"data_parallel_sharding_strategy": "optim_grads"}
COPIES = {"num_distributed_optimizer_instances": 2}
FLAT = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
PLAIN = {"num_experts": None, "optimizer": "adam"}
HALF = {"params_dtype": "bf16", "store_param_remainders": True}
BF16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def pipe(ranks: int, stages: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    return {
        "pipeline_model_parallel_size": ranks,
        "num_virtual_stages_per_pipeline_rank": stages,
        "pipeline_schedule": schedule,
    }


TP2 = {"tensor_model_parallel_size": 2}
EP2_TP2 = {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}

PAIRS = [
    draw(0, (2, 3), before=CUT),
    draw(1, (8, 6), model=PLAIN, before=STREAMED, after=CUT),
    draw(2, (4, 4), {"num_experts": 4, "num_layers": 4}, {**pipe(4), **WHOLE}, {**EP2_TP2, **CUT}),
    draw(3, (3, 3), PLAIN, {**FLAT, **WHOLE}, {**FLAT, **STREAMED}),
    draw(4, (4, 1), PLAIN | BF16, {**FLAT, **STREAMED, **COPIES}, {}),
    draw(5, (4, 3), {"num_experts": 4, "optimizer": "adam"}, {**FLAT, **CUT, **COPIES}, {**FLAT, **CUT}),
    draw(6, (4, 3), {"num_experts": None, "num_layers": 4}, {**pipe(2, 2, "interleaved"), **CUT}, STREAMED),
    draw(7, (4, 4), {"num_experts": None, "optimizer": "muon"}, {**FLAT, **CUT}, {**pipe(2), **TP2, **CUT}),
    draw(8, (2, 4), {"num_experts": 4, "optimizer": "muon"}, {**FLAT, **STREAMED}, {**EP2_TP2, **CUT}),
    draw(9, (3, 4), PLAIN | BF16 | {"ema_decay": 0.9}, CUT, {**pipe(2, 2, "zb-v"), **CUT}),
    draw(10, (3, 4), PLAIN | HALF, {**FLAT, **CUT}, {**FLAT, **TP2, **STREAMED}),
    draw(11, (5, 7)),
]


def check(pool: Pool, folder: Path, pair: Reshard) -> None:
    before, after = saving(pair.before, folder), loading(pair.after, folder)
    whole = pool.run(pair.ranks[0], save_and_go_on, before, check_collectives=False, timeout=120)
    other = pool.run(pair.ranks[1], load_and_go_on, after, check_collectives=False, timeout=120)
    saved, loaded = gathered(whole), gathered(other)
    path = folder / f"iter_{BEFORE:07d}"
    stored, _ = checkpoint(path)
    assert stored.keys() == saved.weights.keys() | saved.grads.keys()
    for name, tensor in stored.items():
        for trace in (saved, loaded):
            assert torch.equal((trace.weights | trace.grads)[name], tensor), name
    assert (saved.drifted, loaded.drifted) == ([], [])
    check_file(path, {leg.bytes for leg in whole}, sum(tensor.nbytes for tensor in stored.values()))
    for leg in other:
        assert leg.losses == pytest.approx(whole[0].losses, rel=1e-10 if pair.exact else 2e-2)
        assert leg.digest == whole[0].digest


def check_file(path: Path, told: set[int], expected: int) -> None:
    """Each element is in the checkpoint once, and nothing besides."""
    manifest = Manifest.open(path)
    assert all(bool((count == 1).all()) for count in times_written(manifest).values())
    assert sum(bytes_of_files(manifest).values()) == expected
    assert told == {expected}


def test_the_pairs_are_of_all_kinds() -> None:
    assert len(PAIRS) <= 12
    sides = [side for pair in PAIRS for side in (pair.before, pair.after)]
    assert {side.parallel.zero_stage for side in sides} == {0, 1, 2}
    assert {side.parallel.pipeline_model_parallel_size for side in sides} >= {1, 2, 4}
    assert {side.parallel.tensor_model_parallel_size for side in sides} >= {1, 2}
    assert {side.parallel.expert_model_parallel_size for side in sides} >= {1, 2}
    assert {side.optimizer.optimizer for side in sides} == {"adam", "muon"}
    assert any(side.parallel.num_distributed_optimizer_instances > 1 for side in sides)
    assert any(side.optimizer.store_param_remainders for side in sides)
    assert any(side.optimizer.exp_avg_dtype == "bf16" for side in sides)
    assert len({ranks for pair in PAIRS for ranks in pair.ranks}) == MAX_RANKS


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_run_goes_on_whatever_was_cut(pool: Pool, tmp_path: Path, pair: Reshard) -> None:
    check(pool, tmp_path, pair)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_a_run_goes_on_whatever_was_cut_long(pool: Pool, tmp_path: Path, seed: int) -> None:
    check(pool, tmp_path, draw(seed))


def save_at_once(rank: int, world_size: int, config: RunConfig) -> None:
    save_checkpoint(build_trainer(config, rank, world_size))


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 32}
EVEN = {
    "dp4": large_run({}, WHOLE),
    "dp4-zero1": large_run({}, CUT),
    "dp4-zero2-hsdp": large_run({}, {**STREAMED, **COPIES}),
    "dp4-muon": large_run({}, CUT, "muon"),
    "dp2-tp2": large_run({}, {**CUT, **TP2, "sequence_parallel": True}),
    "dp4-ep2": large_run(EXPERTS, {**CUT, "expert_model_parallel_size": 2}),
}


@pytest.mark.parametrize("case", EVEN)
def test_the_ranks_share_the_writing_evenly(pool: Pool, tmp_path: Path, case: str) -> None:
    config = replace(EVEN[case], checkpoint=CheckpointConfig(save=str(tmp_path)))
    pool.run(4, save_at_once, resolve(config, 4), check_collectives=False)
    files = bytes_of_files(Manifest.open(tmp_path / "iter_0000000"))
    assert len(files) == 4
    assert max(files.values()) <= 1.1 * min(files.values()), files
