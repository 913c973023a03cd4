"""Checkpoints of every layout load on any other, to the bit, and the run continues unchanged.

What is cut differs: by TP, PP, EP, ZeRO and its copies, Muon's whole matrices, bf16 moments, masters as remainders.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.arguments.sources import resolve
from megatron.checkpoint.format import Manifest
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.layers.parameters import num_parameters
from megatron.planner.memory import rank_state_bytes
from megatron.training.build import build_trainer
from megatron.training.checkpointer import Checkpointer
from megatron.training.resume_source import ResumeSource
from tests.distributed.grid import FACTORS, ZERO
from tests.distributed.resharding import (
    Reshard,
    bytes_of_files,
    draw,
    large_run,
    loading,
    saving,
    times_written,
)
from tests.distributed.resume import BEFORE, gathered, load_and_go_on, save_and_go_on, save_at_once
from tests.kit.cases import Case
from tests.kit.pool import Pool
from tests.kit.processes import anonymous_bytes
from tests.kit.runs import checkpoint
from tests.unit.convert.folders import llama, random_weights, write_folder

PLAIN = {"experts": "none", "optimizer": "adam"}
LION = {"optimizer": "lion", "experts": "none", "biases": "no", "qk_norm": "no"}
PAIRS = [
    draw(10, (2, 3), before={"zero": "3 freed"}),
    draw(21, (8, 6), PLAIN, {"zero": "2"}, {"zero": "1"}),
    draw(42, (4, 4), {"experts": "two of four"}, {"pp": 4, "zero": "0"}, {"ep": 2, "zero": "3 kept"}),
    draw(3, (4, 2), PLAIN | {"kv_heads": 2, "biases": "all"}, {"tp": "4"}, {"zero": "0", "dp": 2}),
    draw(4, (4, 1), PLAIN | {"moments": "bf16"}, {"zero": "2 twice"}),
    draw(25, (4, 3), PLAIN | {"kv_heads": 4, "biases": "qkv"}, {"pp": 2, "zero": "1"}, {"zero": "2"}),
    draw(6, (4, 4), {"experts": "none", "optimizer": "muon"}, {"tp": "1", "zero": "3 twice"}, {"pp": 2, "tp": "2sp"}),
    draw(47, (3, 4), PLAIN | {"moments": "bf16"}, {"zero": "1"}, {"schedule": "zb-v", "zero": "3 freed"}, ema=0.9),
    draw(8, (3, 4), PLAIN | {"moments": "fp32"}, {"zero": "3 kept"}, {"tp": "2", "zero": "2"}, half=True),
    draw(29, (6, 4), LION, {"pp": 1}, {"zero": "1"}),
]


def check(pool: Pool, folder: Path, pair: Reshard) -> None:
    before, after = saving(pair.before, folder), loading(pair.after, folder)
    whole = pool.run(pair.ranks[0], save_and_go_on, before)
    other = pool.run(pair.ranks[1], load_and_go_on, after)
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


def check_file(path: Path, reported: set[int], expected: int) -> None:
    """Each element is in the checkpoint once, and nothing besides."""
    manifest = Manifest.open(path)
    assert all(bool((count == 1).all()) for count in times_written(manifest).values())
    assert sum(bytes_of_files(manifest).values()) == expected
    assert reported == {expected}


def test_the_pairs_are_of_all_kinds() -> None:
    sides = [choice for pair in PAIRS for choice in pair.choices]
    configs = [config for pair in PAIRS for config in (pair.before, pair.after)]
    assert {c["tp"][0] for c in sides} == {"1", "2", "4"}
    assert {c["pp"] for c in sides} == set(FACTORS["pp"])
    assert {c["zero"] for c in sides} >= set(ZERO) - {"1 twice", "3"}
    assert {c["ep"] for c in sides} >= {1, 2}
    for switch in ("kv_heads", "untied", "vocab", "biases", "moments", "qk_norm"):
        assert {c[switch] for c in sides} == set(FACTORS[switch]), switch
    assert any(int(c["tp"][0]) > c["kv_heads"] for c in sides)
    assert {c["optimizer"] for c in sides} >= {"adam", "muon", "lion"}
    assert any(pair.before.optimizer.store_param_remainders for pair in PAIRS)
    shares = [c.optimizer.optimizer_cpu_offload * c.optimizer.optimizer_offload_fraction for c in configs]
    assert {*shares} == {0.0, 0.6, 1.0}
    assert any(config.parallel.offloads_weights for config in configs)


LONG = pytest.mark.slow
SHORT = {0}


@pytest.mark.parametrize(
    "pair", [pytest.param(p, marks=() if i in SHORT else LONG, id=str(p)) for i, p in enumerate(PAIRS)]
)
def test_a_run_goes_on_whatever_was_cut(pool: Pool, tmp_path: Path, pair: Reshard) -> None:
    check(pool, tmp_path, pair)


@LONG
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_a_run_goes_on_whatever_was_cut_long(pool: Pool, tmp_path: Path, seed: int) -> None:
    check(pool, tmp_path, draw(seed))


EVEN = {
    "dp4-zero2-hsdp": large_run({}, ZERO["2 twice"]),
    "dp4-muon": large_run({}, ZERO["1"], "muon"),
    "dp2-tp2": large_run({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "dp4-ep2": large_run({"num_experts": 8, "moe_ffn_hidden_size": 32}, {**ZERO["1"], "expert_model_parallel_size": 2}),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in ("dp4-muon", "dp2-tp2") else LONG) for c in EVEN])
def test_the_ranks_share_the_writing_evenly(pool: Pool, tmp_path: Path, case: str) -> None:
    config = replace(EVEN[case], checkpoint=CheckpointConfig(save=str(tmp_path)))
    pool.run(4, save_at_once, resolve(config, 4))
    files = bytes_of_files(Manifest.open(tmp_path / "iter_0000000"))
    assert len(files) == 4
    assert max(files.values()) <= 1.1 * min(files.values()), files


WIDE = llama(num_layers=8, hidden_size=768, ffn_hidden_size=2048, num_attention_heads=12, num_query_groups=12)
"""Weights of 227 MB in fp32."""


def memory_of_start(rank: int, world_size: int, config: RunConfig, hf: Path | None) -> int:
    """Growth of this rank's anonymous memory until the weights are there, at its peak."""
    build_trainer(replace(config, model=llama()), rank, world_size)  # loads libraries
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that new tensors do not reuse memory of earlier ones
    before, peak, stop = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    trainer = build_trainer(config, rank, world_size, fresh=hf is None)
    if hf is not None:
        Checkpointer(trainer).load(ResumeSource(weights=f"hf:{hf}"))
    stop.set()
    watcher.join()
    return max(peak, anonymous_bytes()) - before


@pytest.mark.parametrize("start", [pytest.param("fresh", marks=LONG), "hf"])
def test_no_rank_of_zero_3_ever_holds_the_whole_model(pool: Pool, tmp_path: Path, start: str) -> None:
    """Besides what it keeps (half of weights, gradients and momentum), a rank holds some
    matrices; the other half of the weights would be 0.5 of ``size``.
    """
    case = Case(WIDE, ParallelConfig(**ZERO["3"]), PrecisionConfig(), optimizer=OptimizerConfig("sgd"), dp=2)
    config = resolve(case.config(), 2)
    size = 4 * num_parameters(WIDE)
    assert size > 200 * 2**20
    folder = write_folder(tmp_path / "hf", WIDE, random_weights(WIDE)) if start == "hf" else None
    kept = sum(rank_state_bytes(config, 2, 0).values())
    for peak in pool.run(2, memory_of_start, config, folder):
        assert 0.9 * kept < peak < kept + 0.3 * size
