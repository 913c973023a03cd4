"""Test the shards of data-parallel ranks: sums, weights and Muon's matrices, on real ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import DenseSharding, ExpertSharding, Init, ShardSpec
from megatron.optimizer.build import build_grad_buffer
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.planner.memory import checkpoint_bytes
from megatron.training.build import build_trainer
from megatron.training.callbacks import health
from megatron.training.checkpoint_contents import tensors_to_save, total_bytes
from megatron.training.components.average import AverageWeights
from megatron.training.step import evaluate, train_step
from megatron.training.trainer import Trainer
from tests.kit.cases import MODEL, RATES, Case, batches_of, compare_with_twin, run_on
from tests.kit.pool import Pool
from tests.kit.runs import part_of

INIT = Init()
SHARD = DenseSharding(0, 1)
SPECS: dict[str, ShardSpec] = {
    "tied": replace(SHARD.split((37, 5), 0, INIT), contributions=2, tied=True),
    "layers.0.bias": SHARD.split((70,), 0, INIT),
    "layers.0.matrix": SHARD.split((33, 9), 0, INIT),
    "layers.0.experts": ExpertSharding(0, 1, 0, 1).split((2, 7, 6), 2, INIT),
    "layers.1.matrix": SHARD.split((20, 20), 0, INIT),
    "norm": SHARD.split((3,), 0, INIT),
}
MICROBATCHES = 3
Sums = dict[str, tuple[int, int, Tensor]]
"""Of every parameter that a rank has a share of: its first and last element, and the sums."""


@dataclass(frozen=True)
class Cut:
    """Sharding of the buckets."""

    strategy: str = "no_shard"
    instances: int = 1
    overlap: bool = True
    in_bf16: bool = False
    uncut: tuple[str, ...] = ()

    def build(self, rank: int, size: int, dtype: torch.dtype, **rest: Any) -> tuple[GradBuffer, GradAccumulator]:
        """Return the gradient buffer of a rank, and what adds to it; ``rest`` is of the `ParallelConfig`."""
        config = ParallelConfig(
            data_parallel_sharding_strategy=self.strategy,
            num_distributed_optimizer_instances=self.instances,
            overlap_grad_reduce=self.overlap,
            grad_reduce_in_bf16=self.in_bf16,
            **rest,
        )
        mesh = Mesh(Layout.from_config(config, size), rank, optimizer_instances=config.optimizer_instances)
        accumulator, dtypes = GradAccumulator(), dict.fromkeys(SPECS, dtype)
        device = torch.device("cpu")
        return build_grad_buffer(SPECS, dtypes, mesh, accumulator, device, config, self.uncut), accumulator


def gradient(rank: int, name: str, number: int) -> Tensor:
    """The ``number``-th contribution of a rank: whole numbers, which bf16 has and of which sums are exact."""
    seed = rank + 31 * number + 1009 * [*SPECS].index(name)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 21, SPECS[name].local_shape, generator=generator).float()


def sums(rank: int, size: int, cut: Cut) -> Sums:
    """Two steps of gradients that come out of turn."""
    buckets, grad_accumulator = cut.build(rank, size, torch.float32, ddp_bucket_size=300)
    for step in range(2):
        buckets.start_step(MICROBATCHES)
        turns = [name for name, spec in SPECS.items() for _ in range(MICROBATCHES * spec.contributions)]
        counts = dict.fromkeys(SPECS, 0)
        for place in torch.randperm(len(turns), generator=torch.Generator().manual_seed(step)).tolist():
            name = turns[place]
            grad_accumulator.accumulate(name, gradient(rank, name, counts[name]))
            counts[name] += 1
        buckets.finish()
    return {n: (s.start, s.stop, buckets.grads[n].clone().flatten()) for n, s in buckets.shards.items()}


CUTS = {
    "nothing": (4, Cut("no_shard")),
    "states": (4, Cut("optim")),
    "states, no overlap": (2, Cut("optim", overlap=False)),
    "states of three": (3, Cut("optim")),
    "states of two halves": (4, Cut("optim", instances=2)),
    "gradients": (4, Cut("optim_grads")),
    "gradients, no overlap": (3, Cut("optim_grads", overlap=False)),
    "gradients of two halves": (4, Cut("optim_grads", instances=2)),
    "whole matrices": (3, Cut("optim", uncut=("layers.0.matrix", "layers.1.matrix", "layers.0.experts"))),
    "whole matrices, gradients": (4, Cut("optim_grads", 2, uncut=("layers.0.matrix", "layers.1.matrix"))),
    "nothing, bf16": (3, Cut("no_shard", in_bf16=True)),
    "states, bf16": (4, Cut("optim", instances=2, in_bf16=True)),
    "gradients, bf16": (2, Cut("optim_grads", in_bf16=True)),
}


@pytest.mark.parametrize("name", CUTS)
def test_sums_of_all_ranks_reach_the_owner(pool: Pool, name: str) -> None:
    size, cut = CUTS[name]
    ranks = pool.run(size, sums, cut)
    owners = size if cut.strategy == "no_shard" else cut.instances
    for parameter, spec in SPECS.items():
        numbers = range(MICROBATCHES * spec.contributions)
        addends = [torch.stack([gradient(r, parameter, i) for i in numbers]).sum(0) for r in range(size)]
        whole = torch.stack(addends).sum(0).flatten()
        covered = torch.zeros(len(whole), dtype=torch.int64)
        for held in ranks:
            if parameter in held:
                start, stop, got = held[parameter]
                covered[start:stop] += 1
                if not cut.in_bf16:  # whole numbers up to 8 bits are sent as they are, their sums are not
                    assert torch.equal(got, whole[start:stop]), parameter
                bound = 2.0**-7 * torch.stack([a.abs() for a in addends]).sum(0).flatten()[start:stop]
                assert ((got - whole[start:stop]).abs() <= bound).all()
                assert parameter not in cut.uncut or stop - start == len(whole)
        assert (covered == owners).all(), "every element has its owners"


PLAIN = comm.start_all_gather


class Late(Pending):
    """A gather that begins only in the wait for it: until then the weights of other ranks are old."""

    def __init__(self, part: Tensor, group: Group, out: Tensor) -> None:
        super().__init__(out)
        self.of = part.clone(), group

    def wait(self) -> Tensor:
        """Gather the values at the start."""
        part, group = self.of
        return PLAIN(part, group, self.result).wait()


def late(part: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Stands in for a gather into the weights' buffer."""
    return PLAIN(part, group) if out is None or group.size == 1 else Late(part, group, out)


def noted(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of what a checkpoint would get from this rank now."""
    entries = tensors_to_save(trainer)
    return {f"{name} {i}": p.resolve().clone() for name, entry in entries.items() for i, p in enumerate(entry.parts)}


def run(rank: int, size: int, case: Case, how: str) -> tuple[list[float], list[dict[str, Tensor]], bool]:
    """Steps with everything between them that reads weights: losses, what is saved, and whether weights were late."""
    config = case.config()
    overlap = replace(case.parallel, overlap_param_gather=how != "plain")
    config = replace(config, parallel=overlap, training=replace(config.training, eval_iters=1))
    numbers, saved, pending = [], [], False
    with pytest.MonkeyPatch.context() as patch:
        if how != "plain":
            patch.setattr(comm, "start_all_gather", late)
        trainer = build_trainer(config, rank, size)
        if how == "no waits":
            for chunk in trainer.chunks.values():
                for part in chunk.parts:
                    part._forward_pre_hooks.clear()
        for step in range(case.steps):
            numbers.append(train_step(trainer, batches_of(trainer, case, step), RATES).loss.item())
            pending |= any(buffer.pending for buffer in trainer.optimizer.weights.buffers)
            saved.append(noted(trainer))
            if step == 1:
                health.check_weight_copies(trainer)
                with part_of(trainer, AverageWeights).in_model():
                    numbers.append(evaluate(trainer).item())
                with part_of(trainer, AverageWeights).in_model():
                    pass  # entering and leaving alone restores the weights
                numbers.append(evaluate(trainer).item())
    return numbers, saved, pending


BF16 = PrecisionConfig(params_dtype="bf16")
FP32 = PrecisionConfig(params_dtype="fp32")
AVERAGED = OptimizerConfig(ema_decay=0.5)


def case_of(strategy: str, dp: int, precision: PrecisionConfig, pp: int = 1, samples: int = 4) -> Case:
    parallel = ParallelConfig(
        data_parallel_sharding_strategy=strategy, pipeline_model_parallel_size=pp, ddp_bucket_size=4000
    )
    return Case(parallel=parallel, dp=dp, precision=precision, optimizer=AVERAGED, samples=samples, steps=4)


OVERLAPPED = {
    "gradients in fp32": case_of("optim_grads", 3, FP32, samples=6),
    "two stages": case_of("optim", 2, BF16, pp=2),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_late_weights_are_waited_for(pool: Pool, name: str) -> None:
    """Steps, saving, evaluation with averages, the comparison of copies: as where nothing is late, to the bit."""
    case = OVERLAPPED[name]
    at_once, delayed = (pool.run(case.world_size, run, case, how) for how in ("plain", "late"))
    for (numbers, saved, _), (late_numbers, late_saved, pending) in zip(at_once, delayed, strict=True):
        assert pending, "no weights were on their way"
        assert numbers == late_numbers
        for before, after in zip(saved, late_saved, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.slow
def test_a_forward_without_waits_for_the_gathers_is_detected(pool: Pool) -> None:
    case = case_of("optim", 2, BF16)
    (right, *_), *_ = pool.run(case.world_size, run, case, "plain")
    (wrong, *_), *_ = pool.run(case.world_size, run, case, "no waits")
    assert right[0] == wrong[0]
    assert right[1] != wrong[1], "the second forward has the old weights of the other rank"


GQA = replace(MODEL, num_query_groups=2, activation="swiglu", add_bias_linear=False)
MQA = replace(MODEL, num_query_groups=1)
EXPERTS = replace(
    GQA,
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    moe_aux_loss_coeff=(0.01,),
)
MUON = OptimizerConfig(optimizer="muon", adam_eps=1e-5, muon_extra_scale_factor=0.1)
FUSED = replace(MUON, muon_split_qkv=False, muon_nesterov=True, muon_scale_mode="unit_rms_norm")
FACTORS = replace(MUON, lr_factors=("layers.1.*=0.5", "*.mlp.*=2"))


def cut(tp: int = 1, strategy: str = "no_shard", sequence: bool = False, **rest: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        data_parallel_sharding_strategy=strategy,
        sequence_parallel=sequence,
        ddp_bucket_size=4000,
        **rest,
    )


MATRICES = {
    "tp2": Case(GQA, cut(2), optimizer=MUON),
    "tp4, heads in copies": Case(GQA, cut(4), optimizer=MUON),
    "tp2, one head, q k v one matrix": Case(MQA, cut(2, sequence=True), optimizer=FUSED),
    "zero 1": Case(GQA, cut(strategy="optim"), optimizer=MUON, dp=3, samples=6),
    "zero 2, tp2": Case(GQA, cut(2, "optim_grads", sequence=True), optimizer=FUSED, dp=2),
    "two instances": Case(GQA, cut(strategy="optim", num_distributed_optimizer_instances=2), optimizer=MUON, dp=4),
    "experts": Case(EXPERTS, cut(strategy="optim", expert_model_parallel_size=2), optimizer=MUON, dp=4),
    "experts cut in halves": Case(
        EXPERTS,
        cut(2, "optim", sequence=True, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
        optimizer=FACTORS,
        dp=2,
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_muon_moves_whole_matrices_however_they_are_cut(pool: Pool, name: str) -> None:
    case = MATRICES[name]
    steps = run_on(pool, case)
    worst = max(compare_with_twin(steps, case), key=lambda difference: difference.error)
    assert worst.error <= 1e-10, worst
    assert [step.drifted for step in steps] == [[]] * len(steps)


def sizes(rank: int, size: int, case: Case) -> tuple[int, int]:
    """Bytes of the tensors of a checkpoint: all that ranks write, and the formula."""
    config = case.config()
    trainer = build_trainer(config, rank, size)
    return total_bytes(tensors_to_save(trainer), trainer.mesh.world), checkpoint_bytes(config)


LEAN = OptimizerConfig(store_param_remainders=True, exp_avg_dtype="bf16", ema_decay=0.9)
SAVED = {
    "muon": Case(EXPERTS, cut(strategy="optim", expert_model_parallel_size=2), BF16, optimizer=MUON, dp=2),
    "muon, averaged": Case(MQA, cut(2), optimizer=replace(MUON, ema_decay=0.9)),
    "masters as remainders": Case(GQA, cut(2, "optim_grads"), BF16, optimizer=LEAN, dp=2),
    "lion": Case(GQA, cut(strategy="optim"), BF16, optimizer=OptimizerConfig(optimizer="lion"), dp=3, samples=6),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_has_the_predicted_size(pool: Pool, name: str) -> None:
    """Masters are saved whole however they are kept, and each rule's moments only where it has them."""
    (written, formula), *others = pool.run(SAVED[name].world_size, sizes, SAVED[name])
    assert written == formula
    assert set(others) <= {(written, formula)}
