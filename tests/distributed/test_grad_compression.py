"""Compressed gradients: sums against all ranks' tensors in one process, error feedback, checkpoints, bytes."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.config.parallel import GradCompression, ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.distributed import comm
from megatron.distributed.comm import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Group
from megatron.distributed.launch import world_group
from megatron.distributed.param_layout import MatrixBlock, matrix_blocks, pack
from megatron.kernels.dropout import mix, random_bits
from megatron.optimizer.build import build_reduction
from megatron.optimizer.grad_buffer import BucketLayout
from megatron.optimizer.grad_compression import (
    INT8_BLOCK,
    ROUNDING,
    PowerSGD,
    dequantize,
    int8_all_reduce,
    quantize,
)
from megatron.planner.memory import checkpoint_bytes, data_parallel_traffic
from megatron.training.build import build_trainer
from megatron.training.checkpointer import Checkpointer, choose_resume_source
from megatron.training.components.grad_compression import CompressionState
from megatron.training.components.nonfinite import NonFiniteCheck
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.distributed.resume import advance
from tests.distributed.test_local_tier import go_on as local_go_on
from tests.distributed.test_local_tier import run_of as local_run
from tests.distributed.test_optimizer_shards import MICROBATCHES, SPECS, Cut
from tests.distributed.test_traffic import config_of, of_axes, ring, step
from tests.distributed.test_zero import MIXED, PP2, SHARED, STAGE_1, STAGE_2, TP2_SP, case
from tests.kit.cases import RATES, batches_of, run_on
from tests.kit.pool import Pool
from tests.kit.runs import differences, tiny_run
from tests.kit.short import one_in

METHODS = ("powersgd:2", "topk:0.1")
STEPS = 3
SPOILT = 1
"""Step of which the update is skipped, because a gradient is not finite on one rank."""


# ---- int8


def int8_by_hand(x: Tensor, key: int, source: int) -> tuple[Tensor, Tensor]:
    """Values of a message and their largest error, block by block, from the definition."""
    values, bounds = torch.empty_like(x), torch.empty_like(x)
    hashed = mix(mix(torch.tensor(key)) ^ (torch.tensor(key) >> 32))
    for number, first in enumerate(range(0, len(x), INT8_BLOCK)):
        block = x[first : first + INT8_BLOCK]
        row = torch.tensor([(source << 32) + number])
        bits = random_bits(ROUNDING, hashed, row, torch.arange(INT8_BLOCK))[0, : len(block)]
        unit = block.abs().max() / 127
        chance = (bits % 2**24) * 2.0**-24
        scaled = block * unit.reciprocal() if unit > 0 else block
        values[first : first + INT8_BLOCK] = torch.floor(scaled + chance).clamp(-127, 127) * unit
        bounds[first : first + INT8_BLOCK] = unit
    return values, bounds


def addend(rank: int, length: int) -> Tensor:
    x = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    x[64:128] = 0.0
    return x * torch.logspace(-6, 3, length)


def sum_in_int8(rank: int, size: int, length: int, keys: list[int]) -> list[Tensor]:
    return [int8_all_reduce(addend(rank, length), world_group(rank, size), torch.tensor(key)) for key in keys]


@pytest.mark.parametrize(("size", "length"), [(2, 256), (3, 1000), (4, 70)])
def test_int8_sums_match_one_process(pool: Pool, size: int, length: int) -> None:
    """Bit by bit, on all ranks; within the stated error."""
    keys = [5, 2**62 + 12345]
    ranks = pool.run(size, sum_in_int8, length, keys)
    padded = -(-length // (INT8_BLOCK * size)) * INT8_BLOCK * size
    for number, key in enumerate(keys):
        total = torch.zeros(padded)
        bound = torch.zeros(padded)
        for rank in range(size):
            x = torch.cat([addend(rank, length), torch.zeros(padded - length)])
            values, units = int8_by_hand(x, key, rank)
            total, bound = total + values, bound + units
        parts = [int8_by_hand(part, key, size + rank) for rank, part in enumerate(total.chunk(size))]
        expected = torch.cat([values for values, _ in parts])[:length]
        bound = (bound + torch.cat([units for _, units in parts]))[:length]
        assert all(torch.equal(found[number], expected) for found in ranks)
        exact = torch.stack([addend(rank, length).double() for rank in range(size)]).sum(0)
        assert ((expected - exact).abs() <= bound * (1 + 1e-5)).all()
        assert not torch.equal(expected, exact.float())
    assert not torch.equal(ranks[0][0], ranks[0][1]), "another key rounds otherwise"


def test_int8_is_exact_in_the_mean() -> None:
    """For every element, over keys; neighbours are rounded independently."""
    x, count = addend(0, 320).view(1, -1), 4000
    found = torch.stack([dequantize(quantize(x, torch.tensor(key), 3)[0]) for key in range(count)]).double()
    unit = x.view(-1, INT8_BLOCK).abs().amax(1).double().repeat_interleave(INT8_BLOCK) / 127
    error = (found - x) / unit.clamp(min=1e-30)
    assert error.mean(0).abs().max() < 4.5 * 0.5 / count**0.5
    noisy = error[:, error.std(0) > 0.1]
    together = torch.corrcoef(noisy.T).fill_diagonal_(0.0)
    assert together.abs().max() < 6 / count**0.5


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_int8_passes_on_nonfinite_values(spoilt: float) -> None:
    """Non-finite values stay non-finite, so that every rank skips the step; other blocks are unchanged."""
    x = torch.randn(1, 4 * INT8_BLOCK)
    plain = dequantize(quantize(x, torch.tensor(1), 0)[0])
    x[0, INT8_BLOCK + 3] = spoilt
    found = dequantize(quantize(x, torch.tensor(1), 0)[0])
    assert not found[INT8_BLOCK : 2 * INT8_BLOCK].isfinite().any()
    assert torch.equal(found[:INT8_BLOCK], plain[:INT8_BLOCK])
    assert torch.equal(found[2 * INT8_BLOCK :], plain[2 * INT8_BLOCK :])


# ---- Error feedback against one process


@dataclass(frozen=True)
class Held:
    """A rank's state after a step, by parameter: index of the shard's first element, sums and errors."""

    first: dict[str, int]
    sums: dict[str, Tensor]
    errors: dict[str, Tensor]
    # by parameter and first element
    factors: dict[tuple[str, int], Tensor]


def fine(rank: int, name: str, number: int) -> Tensor:
    """A gradient whose elements have few equal magnitudes."""
    generator = torch.Generator().manual_seed(rank + 31 * number + 1009 * [*SPECS].index(name))
    return torch.randn(SPECS[name].local_shape, generator=generator, dtype=torch.float64)


def reduced(rank: int, size: int, cut: Cut, method: str) -> list[Held]:
    """The start, and the state after each step."""
    buckets, accumulator = cut.build(rank, size, torch.float64, ddp_bucket_size=10**6, grad_compression=method)

    def held() -> Held:
        reductions = [bucket.reduction for bucket in buckets.buckets]
        kept = {n: e for n in buckets.shards if (e := buckets.reduction_of(n).error) is not None}
        errors = {n: buckets.shard_view(error, n).clone().flatten() for n, error in kept.items()}
        assert errors.keys() == buckets.shards.keys()
        factors = {(b.name, b.first): q.clone() for r in reductions for b, q in r.factors()}
        sums = {n: buckets.grads[n].clone().flatten() for n in buckets.shards}
        return Held({n: share.start for n, share in buckets.shards.items()}, sums, errors, factors)

    found = [held()]
    for number in range(STEPS):
        for _ in range(2):  # the first is aborted, and leaves nothing
            buckets.start_step(MICROBATCHES, number)
            for name, index in contributions(number):
                whole = fine(rank, name, index)
                if (number, rank, name) == (SPOILT, size - 1, "layers.1.matrix"):
                    whole[3, 3] = torch.nan
                accumulator.accumulate(name, whole)
            buckets.finish()
        for bucket in buckets.buckets:
            bucket.reduction.commit(torch.tensor(float(number == SPOILT)))
        found.append(held())
    return found


def contributions(number: int) -> list[tuple[str, int]]:
    """Parameter and index of every contribution to a step, micro-batch by micro-batch."""
    turns = range(number * MICROBATCHES, (number + 1) * MICROBATCHES)
    return [(n, turn * s.contributions + i) for turn in turns for n, s in SPECS.items() for i in range(s.contributions)]


def whole_rows(name: str, start: int, stop: int) -> list[tuple[int, int, int]]:
    """First element, rows and columns of the matrices among elements of a parameter, row by row."""
    spec = SPECS[name]
    if len(spec.shape) == 1:
        return []
    columns, height = spec.local_view[-1], prod(spec.local_view[spec.matrices : -1])
    found: list[tuple[int, int, int]] = []
    rows = [r for r in range(prod(spec.local_view[:-1])) if start <= r * columns and (r + 1) * columns <= stop]
    for matrix in sorted({r // height for r in rows}):
        mine = [r for r in rows if r // height == matrix]
        found.append((mine[0] * columns, len(mine), columns))
    return found


def bucket(name: str, cut: Cut) -> tuple[object, ...]:
    """Parameters of one bucket have the same."""
    spec = SPECS[name]
    return spec.tied, spec.expert, name in cut.uncut, cut.strategy == "optim_grads" and len(spec.shape) == 1


Shards = dict[str, Tensor]
"""Of a rank, by parameter."""


def powersgd_by_hand(rank: int, deltas: list[Shards], first: dict[str, int], factors: Any) -> Any:
    """Sum, next errors and next factors of replicas."""
    sums = {n: torch.stack([d[n] for d in deltas]).sum(0) for n in deltas[0]}
    errors = [{n: torch.zeros_like(x) for n, x in d.items()} for d in deltas]
    following = {key: q.clone() for key, q in factors.items()}
    for name in sums:
        for begin, rows, columns in whole_rows(name, first[name], first[name] + len(sums[name])):
            if rank * (rows + columns) >= rows * columns:
                continue
            # Whole matrices that follow each other are one entry.
            entry = max((key for key in factors if key[0] == name and key[1] <= begin), key=lambda key: key[1])
            at = (begin - entry[1]) // (rows * columns)
            inside = slice(begin - first[name], begin - first[name] + rows * columns)
            each = [d[name][inside].view(rows, columns) for d in deltas]
            basis = torch.linalg.qr(sum((x @ factors[entry][at] for x in each), torch.zeros(())))[0]
            right = sum((x.T @ basis for x in each), torch.zeros(()))
            sums[name][inside] = (basis @ right.T).flatten()
            for error, x in zip(errors, each):
                error[name][inside] = (x - basis @ (basis.T @ x)).flatten()
            following[entry][at] = right
    return sums, errors, following


def topk_by_hand(ratio: float, cut: Cut, deltas: list[Shards], first: dict[str, int], factors: Any) -> Any:
    """Do the same, element by element."""
    sums = {n: torch.stack([d[n] for d in deltas]).sum(0) for n in deltas[0]}
    errors = [{n: torch.zeros_like(x) for n, x in d.items()} for d in deltas]
    for key in {bucket(n, cut) for n in sums}:
        inside = [
            (n, i - first[n])
            for n in sums
            if bucket(n, cut) == key
            for begin, rows, columns in whole_rows(n, first[n], first[n] + len(sums[n]))
            for i in range(begin, begin + rows * columns)
        ]
        for n, i in inside:
            sums[n][i] = 0.0
        for delta, error in zip(deltas, errors):
            ordered = sorted(inside, key=lambda place: -abs(float(delta[place[0]][place[1]])))
            for place, (n, i) in enumerate(ordered):
                (sums if place < ceil(ratio * len(inside)) else error)[n][i] += delta[n][i]
    return sums, errors, factors


CUTS = {
    "nothing": (3, Cut()),
    "nothing, no overlap": (2, Cut(overlap=False)),
    "states": (4, Cut("optim", 2)),
    "gradients": (4, Cut("optim_grads", 2)),
    "whole matrices": (4, Cut("optim", 2, uncut=("layers.0.matrix", "layers.1.matrix", "layers.0.experts"))),
}


@pytest.mark.parametrize(("name", "text"), one_in(2, product(CUTS, METHODS)))
def test_sums_and_errors_match_one_process(pool: Pool, name: str, text: str) -> None:
    """Also after a step that was skipped. All replicas have the same bits."""
    size, cut = CUTS[name]
    ranks = pool.run(size, reduced, cut, text)
    shards = 1 if cut.strategy == "no_shard" else size // cut.instances
    errors_found = sum(check_replicas(ranks[shard::shards], shard, shards, cut, text) for shard in range(shards))
    assert errors_found > 1000


def check_replicas(replicas: list[list[Held]], shard: int, shards: int, cut: Cut, text: str) -> int:
    """Compare ranks that hold the same shards with one process; return the number of errors that are not 0."""
    method, nonzero = GradCompression.parse(text), 0
    assert method is not None
    first, factors = replicas[0][0].first, replicas[0][0].factors
    errors = [replica[0].errors for replica in replicas]
    for number in range(STEPS):
        deltas = []
        for instance, error in enumerate(errors):
            totals = {n: torch.zeros(spec.local_shape, dtype=torch.float64) for n, spec in SPECS.items()}
            for rank, (n, index) in product(range(instance * shards, (instance + 1) * shards), contributions(number)):
                totals[n] += fine(rank, n, index)
            deltas.append(
                {n: totals[n].flatten()[start : start + len(error[n])] + error[n] for n, start in first.items()}
            )
        if method.method == "topk":
            sums, following, next_factors = topk_by_hand(method.ratio, cut, deltas, first, factors)
        else:
            sums, following, next_factors = powersgd_by_hand(method.rank, deltas, first, factors)
        if number != SPOILT:
            errors, factors = following, next_factors
            for found in (replica[number + 1] for replica in replicas):
                check_close(found.sums, sums)
                assert all(torch.equal(x, replicas[0][number + 1].sums[n]) for n, x in found.sums.items())
        for found, error in zip((replica[number + 1] for replica in replicas), errors):
            check_close(found.errors, error)
            check_close(found.factors, factors)
            nonzero += sum(int((x != 0).sum()) for x in error.values())
    return nonzero


def check_close(found: Any, expected: Any) -> None:
    """With errors of rounding only."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.allclose(found[name], x, rtol=1e-9, atol=1e-11), name


def test_matrices_are_the_whole_rows_of_a_part() -> None:
    """Against a search row by row, in parts of any size."""

    for shards in (1, 2, 3, 5):
        packing = pack({n: prod(s.local_shape) for n, s in SPECS.items()}, shards, 2)
        for part in range(shards):
            found = matrix_blocks(packing, SPECS, part, shards)
            expected = set()
            for n, spec in SPECS.items():
                share = packing.shard_in_part(n, prod(spec.local_shape), part, shards)
                if share is not None:
                    expected |= {(n, b, r, c) for b, r, c in whole_rows(n, share.start, share.stop)}
            rows = {
                (b.name, b.first + i * b.rows * b.columns, b.rows, b.columns) for b in found for i in range(b.count)
            }
            assert rows == expected
            length = packing.size // shards
            assert all(b.place == packing.offsets[b.name] + b.first - part * length for b in found)


# ---- A convex problem


def descend(rank: int, size: int, method: str, feedback: bool) -> float:
    """Distance to the optimum of least squares, relative to the start: SGD of which gradients are compressed."""
    generator = torch.Generator().manual_seed(rank)
    specs = {"layers.1.matrix": SPECS["layers.1.matrix"]}
    rows, columns = specs["layers.1.matrix"].local_shape
    packing = pack({"layers.1.matrix": rows * columns}, 1, size)
    x, world = torch.zeros(packing.size, dtype=torch.float64), world_group(rank, size)
    layout = BucketLayout(specs, packing, Group(), world, Group(), x.dtype, x.device)
    reduction = build_reduction(ParallelConfig(grad_compression=method), layout, 0)
    # Each rank pulls to another point: gradients of ranks do not vanish at the optimum, only their sum does.
    scale = 0.5 + torch.rand(rows * columns, generator=generator, dtype=torch.float64)
    target = torch.randn(rows * columns, generator=generator, dtype=torch.float64)
    scales, targets = (torch.stack(world_gather(each, world)) for each in (scale, target))
    optimum = (scales * targets).sum(0) / scales.sum(0)
    w = torch.zeros(rows * columns, dtype=torch.float64)
    for number in range(150):
        reduction.start_step(number)
        x.zero_()
        x[: len(w)] = scale * (w - target)
        total = reduction.start_all_reduce(x).wait()
        reduction.commit(torch.zeros(()))
        if reduction.error is not None and not feedback:
            reduction.error.zero_()
        w -= 0.12 * 0.972**number * total[: len(w)]  # errors are as large as a step
    return float((w - optimum).norm() / optimum.norm())


def world_gather(x: Tensor, group: Group) -> list[Tensor]:
    return list(comm.all_gather(x, group).chunk(group.size))


@pytest.mark.parametrize("method", ["powersgd:2", "topk:0.3"])
def test_error_feedback_reaches_the_optimum(pool: Pool, method: str) -> None:
    """Without error feedback the same method stops far from the optimum."""
    found = pool.run(3, descend, method, True)
    assert found[0] == found[1] == found[2] < 0.005
    assert pool.run(3, descend, method, False)[0] > 10 * found[0]


def test_int8_stays_near_the_optimum(pool: Pool) -> None:
    assert pool.run(3, descend, "int8", True)[0] < 0.005


def test_a_reset_forgets_errors_and_draws_the_first_factors() -> None:
    part, blocks = torch.randn(64), [MatrixBlock("layers.0.w", 0, 0, 1, 8, 8)]
    compression = GradCompression("powersgd", rank=2)
    fresh, used = (PowerSGD(Group(), Group(), blocks, part, compression, 1, 2) for _ in range(2))
    for x in (used.error, *used.warm_starts):
        x.fill_(3.0)
    used.reset()
    assert not used.error.any()
    assert all(map(torch.equal, used.warm_starts, fresh.warm_starts))


# ---- Whole runs

LAYOUTS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "nothing": (4, SHARED, {}),
    "instances": (4, SHARED, STAGE_1 | {"num_distributed_optimizer_instances": 2}),
    "gradients of instances": (4, SHARED, STAGE_2 | {"num_distributed_optimizer_instances": 2}),
    "TP": (2, SHARED, {"tensor_model_parallel_size": 2}),
    "TP, SP": (2, SHARED, TP2_SP),
    "pipeline, tied": (2, SHARED, PP2),
    "experts": (4, MIXED, {"expert_model_parallel_size": 2}),
}


WAYS = list(product(LAYOUTS, (*METHODS, "int8")))


@pytest.mark.parametrize(
    ("name", "method"),
    one_in(7, WAYS),
)
def test_copies_of_the_weights_stay_equal(pool: Pool, name: str, method: str) -> None:
    """On replicas, tensor-parallel ranks and stages, with losses near an uncompressed run."""
    dp, model, parallel = LAYOUTS[name]
    plain = replace(case(dp, model, **parallel), precision=PrecisionConfig(params_dtype="bf16"), steps=4)
    compressed = replace(plain, parallel=replace(plain.parallel, grad_compression=method))
    found, expected = run_on(pool, compressed), run_on(pool, plain)
    assert [step.drifted for step in found] == [[]] * 4
    assert found[0].loss == expected[0].loss
    assert found[-1].loss != expected[-1].loss
    assert abs(found[-1].loss - expected[-1].loss) < (0.01 if method == "int8" else 0.3)


def errors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the errors of this rank by parameter; none for a method without errors."""
    kept = [component for component in trainer.components if isinstance(component, CompressionState)]
    return {name: own.error for component in kept for name, own in component.errors().items()}


def skip_a_step(rank: int, size: int, method: str, how: str) -> bool:
    """Return True if a skipped step changed the errors."""
    run = replace(case(size, grad_compression=method), precision=PrecisionConfig(params_dtype="fp32"))
    trainer = build_trainer(run.config(), rank, size)
    check = NonFiniteCheck(trainer)
    trainer.components.append(check)
    train_step(trainer, batches_of(trainer, run, 0), RATES)
    before = {n: error.clone() for n, error in errors_of(trainer).items()}
    assert any(bool((x != 0).any()) for x in before.values())
    check.halted.fill_(float(how == "skipped"))
    metrics = train_step(trainer, batches_of(trainer, run, 1), RATES)
    assert bool(metrics.skipped) == (how == "skipped")
    return all(torch.equal(error, before[n]) for n, error in errors_of(trainer).items())


@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_step_leaves_no_error(pool: Pool, method: str) -> None:
    assert pool.run(2, skip_a_step, method, "skipped") == [True, True]
    assert pool.run(2, skip_a_step, method, "taken") == [False, False]


# ---- Checkpoints


def run_of(folder: Path, flags: str, ranks: int) -> RunConfig:
    return tiny_run(folder, f"--save {folder}/saved --train-iters 8 --params-dtype fp32 {flags}", ranks)


def save_and_go_on(rank: int, size: int, config: RunConfig) -> tuple[list[float], dict[str, Tensor]]:
    trainer = build_trainer(config, rank, size)
    advance(trainer, 4)
    Checkpointer(trainer).write()
    return advance(trainer, 3), errors_of(trainer)


Loaded = tuple[list[float], dict[str, Tensor], list[str], Tensor, bool]


def load_and_go_on(rank: int, size: int, config: RunConfig) -> Loaded:
    """Losses and errors after it, notes; errors of positions as loaded, and whether TP ranks add up their gradients.

    A checkpoint is written at once.
    """
    source = choose_resume_source(config.checkpoint, world_group(rank, size))
    trainer = build_trainer(config, rank, size, fresh=source.fresh)
    notes = Checkpointer(trainer).load(source)
    trainer.progress.iteration += 1  # of another name
    saved = Checkpointer(trainer).write()
    padding = 2 * 16 * 4  # factors of rows that only pad the vocabulary, counted but not saved
    assert checkpoint_bytes(config, size) - saved.bytes in (0, padding)
    trainer.progress.iteration -= 1
    name = "embedding.position_embeddings.weight"
    loaded = errors_of(trainer).get(name, torch.zeros(())).clone()
    added = name in trainer.specs and any(piece.partial for piece in trainer.specs[name].pieces)
    losses = advance(trainer, 3)
    return losses, errors_of(trainer), notes, loaded, added


COMPRESSED = {
    "powersgd": "--grad-compression powersgd:2 --ddp-bucket-size 3000",
    "instances": (
        "--grad-compression powersgd:2 --use-distributed-optimizer --num-distributed-optimizer-instances 2 "
        "--ddp-bucket-size 3000"
    ),
    "pipeline": "--grad-compression topk:0.05 --pipeline-model-parallel-size 2",
    "tied factors": "--grad-compression powersgd:2 --pipeline-model-parallel-size 2",
    "int8": "--grad-compression int8 --use-distributed-optimizer",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("powersgd", "pipeline") else ()) for n in COMPRESSED]
)
def test_a_run_goes_on_to_the_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    config = run_of(tmp_path, COMPRESSED[name], 4)
    whole = pool.run(4, save_and_go_on, config)
    again = pool.run(4, load_and_go_on, config)
    for (losses, errors), (losses_again, errors_again, notes, *_) in zip(whole, again):
        assert losses == losses_again
        assert all(torch.equal(error, errors_again[n]) for n, error in errors.items())
        assert not [note for note in notes if "errors" in note or "PowerSGD" in note]


def sum_of_errors(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return the sum of the errors of all replicas in a checkpoint by parameter, and the number of error tensors."""
    manifest, found, count = Manifest.open(path), defaultdict[str, list[Tensor]](list), 0
    for name in manifest.tensors:
        if name.startswith("optim.grad_error_"):
            found[name.split(".", 2)[2]].append(CheckpointReader(manifest).read(name).double())
            count += 1
    return {n: torch.stack(each).sum(0) for n, each in found.items()}, count


CHANGES = {
    "fewer": ("", 4, "", 2),
    "more": ("", 2, "", 3),
    "instances": ("", 4, "--use-distributed-optimizer --num-distributed-optimizer-instances 2", 4),
    "TP": ("", 2, "--tensor-model-parallel-size 2", 4),
    "TP, SP": ("", 2, "--tensor-model-parallel-size 2 --sequence-parallel", 4),
    "stages": ("--pipeline-model-parallel-size 2", 4, "", 2),
    "more stages": ("", 2, "--pipeline-model-parallel-size 2", 4),
}


SLOW_CHANGES = "fewer", "more", "TP", "stages", "more stages"


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(name, "topk:0.05", marks=pytest.mark.slow if name in SLOW_CHANGES else ()) for name in CHANGES]
    + [("fewer", "powersgd:2")],
)
def test_another_layout_keeps_the_sum_of_errors(pool: Pool, tmp_path: Path, name: str, method: str) -> None:
    """Positions are learned: with TP their gradient is not compressed, and their error is sent at once."""
    before, ranks, after, others = CHANGES[name]
    flags = f"--grad-compression {method} --global-batch-size 12"
    pool.run(ranks, save_and_go_on, run_of(tmp_path, f"{flags} {before}", ranks))
    found = pool.run(others, load_and_go_on, run_of(tmp_path, f"{flags} {after}", others))
    saved, count = sum_of_errors(tmp_path / "saved/iter_0000004")
    kept, new_count = sum_of_errors(tmp_path / "saved/iter_0000005")
    assert saved.keys() == kept.keys()
    assert sum(float(x.abs().sum()) for x in saved.values()) > 0.01
    for n, total in saved.items():
        assert torch.allclose(kept[n], total, rtol=1e-5, atol=1e-8), n
    assert (count == new_count) == (name in ("TP", "TP, SP"))
    if name in ("TP", "TP, SP"):
        assert all(added == (name == "TP, SP") for *_, added in found)
        total = torch.stack([positions for *_, positions, _ in found]).sum(0).flatten()
        copies = 1 if name == "TP, SP" else 2
        assert torch.allclose(total.double(), copies * saved["embedding.position_embeddings.weight"].flatten())
        assert total.abs().sum() > 0
    notes = [note for _, _, notes, *_ in found for note in notes if "added up" in note]
    assert bool(notes) == (name not in ("TP", "TP, SP"))


def test_errors_may_be_missing_or_left_over(pool: Pool, tmp_path: Path) -> None:
    plain, compressed = (run_of(tmp_path, f"--grad-compression {m}", 2) for m in ("none", "powersgd:2"))
    pool.run(2, save_and_go_on, plain)
    notes = pool.run(2, load_and_go_on, compressed)[0][2]
    assert [note for note in notes if "no errors of compressed gradients" in note]
    assert [note for note in notes if "random factors" in note]
    notes = pool.run(2, load_and_go_on, plain)[0][2]
    assert [note for note in notes if "are not used" in note]


def test_a_lost_node_loses_no_error(pool: Pool, tmp_path: Path) -> None:
    """Checkpoints on the nodes' disks hold the errors, too."""
    flags = f"--grad-compression topk:0.05 {HSDP}"
    whole, parts = (local_run(tmp_path / name, flags, 4) for name in ("whole", "parts"))
    local_go_on(pool, whole, 2, world_size=4)
    local_go_on(pool, parts, 2, 6, world_size=4)
    shutil.rmtree(tmp_path / "parts/node1")
    printed = local_go_on(pool, parts, 2, world_size=4)
    assert "node0/iter_0000005: step 5," in printed.out
    assert differences(tmp_path / "parts/saved/iter_0000006", tmp_path / "whole/saved/iter_0000006") == []


# ---- Bytes

HSDP = "--data-parallel-sharding-strategy optim --num-distributed-optimizer-instances 2"
SENT = (
    "--grad-compression int8 --global-batch-size 12",
    f"--grad-compression int8 --bf16 {HSDP} --global-batch-size 12",
    "--grad-compression int8 --data-parallel-sharding-strategy optim_grads --global-batch-size 12",
    "--grad-compression powersgd:2 --global-batch-size 12",
    f"--grad-compression powersgd:2 {HSDP} --global-batch-size 12",
    f"--grad-compression topk:0.01 {HSDP} --bf16 --global-batch-size 12",
    "--grad-compression topk:0.01 --global-batch-size 12",
)


def test_bytes_match_the_formulas(pool: Pool) -> None:
    found = pool.run(4, step, SENT)
    for number, flags in enumerate(SENT):
        for rank, sent in enumerate(found):
            expected: dict[str, float] = defaultdict(float, data_parallel_traffic(config_of(flags, 4), 4, rank))
            expected[ALL_REDUCE] += 2 * ring(2 * 8, 4)
            assert of_axes(sent[number], "dp") == pytest.approx(expected, rel=1e-12), flags


def test_only_traffic_between_instances_is_compressed() -> None:
    """The formula of HSDP: the reduce-scatter and the weights as before, the all-reduce many times smaller."""
    flags = f"{HSDP} --global-batch-size 12 --hidden-size 256"
    plain = data_parallel_traffic(config_of(flags, 4), 4)
    powersgd = data_parallel_traffic(config_of(f"{flags} --grad-compression powersgd:2", 4), 4)
    assert (powersgd[REDUCE_SCATTER], powersgd[ALL_GATHER]) == (plain[REDUCE_SCATTER], plain[ALL_GATHER])
    assert powersgd[ALL_REDUCE] < plain[ALL_REDUCE] / 20
    int8 = data_parallel_traffic(config_of(f"{flags} --grad-compression int8", 4), 4)
    weights = plain[ALL_GATHER]
    reductions = plain[REDUCE_SCATTER] + plain[ALL_REDUCE]
    assert int8[ALL_TO_ALL] + int8[ALL_GATHER] - weights == pytest.approx(reductions * (1 + 1 / 16) / 4, rel=1e-12)


def test_method_is_checked() -> None:
    for text in ("powersgd", "powersgd:0", "powersgd:1.5", "topk:1", "topk:0", "topk:x", "int8:4", "fp4", ""):
        with pytest.raises(ValueError, match="powersgd:RANK"):
            GradCompression.parse(text)


def first_gradient(rank: int, size: int, iterations: list[int]) -> list[Tensor]:
    """A gradient of the same batch and weights, as rounded in other steps of a run."""
    run = replace(case(size, grad_compression="int8"), precision=PrecisionConfig(params_dtype="fp32"))
    found = []
    for iteration in iterations:
        trainer = build_trainer(run.config(), rank, size)
        trainer.progress.iteration = iteration
        train_step(trainer, batches_of(trainer, run, 0), RATES)
        found.append(trainer.buckets.grads["layers.0.mlp.linear_fc1.weight"].clone())
    return found


def test_int8_rounds_otherwise_in_every_step(pool: Pool) -> None:
    once, again, later = pool.run(2, first_gradient, [0, 0, 5])[1]
    assert torch.equal(once, again)
    assert float((once != later).float().mean()) > 0.5
