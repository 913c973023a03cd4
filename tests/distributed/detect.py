"""Small jobs that detect faults of a layout; every mutant must fail one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.errors import UserError
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import GradCompression, ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.data.dataset import MockDataset, SourceUsage
from megatron.data.errors import DataError
from megatron.data.loader import MaskBuilder, build_data
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.launch import run_on_rank0, world_group
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.param_layout import MatrixBlock
from megatron.inference.generate import PipelinedModel
from megatron.inference.harness import SharedModel
from megatron.inference.scoring import record, score_tokens
from megatron.layers.loss import VocabularyShard, linear_cross_entropy, token_losses
from megatron.optimizer.grad_compression import Int8Reduction, PowerSGD, TopK
from megatron.pipeline.actions import COMPUTE_KINDS
from megatron.pipeline.plan import build_program
from megatron.pipeline.recorder import record_timeline
from megatron.pipeline.schedules import make_schedule
from megatron.training.batch_reader import check_same_data
from megatron.training.build import build_trainer
from megatron.training.build_model import check_same_kernels, check_same_schedule
from megatron.training.callbacks.health import check_weight_copies, explain_nonfinite
from megatron.training.checkpointer import choose_resume_source
from megatron.training.components.source_losses import SourceLosses
from megatron.training.components.times import StartupReport
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.main import new_run_id
from megatron.training.metrics import MetricsWindow, RankStats, StepMetrics, gather_rank_stats
from megatron.training.startup import PHASES, StartupTimer
from megatron.training.step import train_step
from megatron.training.stop import StopRequest
from tests.distributed.faults import infinite_gradient
from tests.distributed.grid import STATES
from tests.distributed.vitals import Balance, difference, expert_balance, joined_balance, report, router_losses
from tests.kit.cases import MODEL, RATES, Case, batches_of, compare_with_twin, run_case, run_in_small_tiles
from tests.kit.solo import Gradients, mesh_of
from tools.lib.verify_parallel import RankTrace, join_traces

TOLERANCE, TOLERANCE_BF16 = 1e-8, 0.02
LATE_SECONDS = 1.0


@dataclass(frozen=True)
class Detector:
    """``function(rank, world_size, *args)`` on every rank, and whether the ranks' results are what they should be."""

    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    right: Callable[[Sequence[Any]], bool]


def compressed_sums(rank: int, world_size: int) -> list[torch.Tensor]:
    """Sums in int8, and of methods that lose nothing here: all elements but the smallest, and the full rank."""
    group, blocks = world_group(rank, world_size), [MatrixBlock("layers.0.weight", 0, 0, 1, 8, 8)]
    x, alone = addend(rank), Group()
    reductions = (
        Int8Reduction(alone, group, 1, 2),
        TopK(alone, group, blocks, x, GradCompression("topk", ratio=0.98)),
        PowerSGD(alone, group, blocks, x, GradCompression("powersgd", rank=8), 1, 2),
    )
    return [reduction.start_all_reduce(addend(rank)).wait().double() for reduction in reductions]


def addend(rank: int) -> torch.Tensor:
    x = torch.randn(128, generator=torch.Generator().manual_seed(rank))
    x[5] = 0.0
    return x


def _are_sums(ranks: Sequence[list[torch.Tensor]]) -> bool:
    total = torch.stack([addend(rank).double() for rank in range(len(ranks))]).sum(0)
    bounds = (0.1, 1e-5, 1e-4)
    return all((x - total).abs().max() < bound for found in ranks for x, bound in zip(found, bounds))


def trains_like_one_process(case: Case, ranks: Sequence[list[RankTrace]]) -> bool:
    steps = [join_traces(step) for step in zip(*ranks)]
    same = all(d.error <= TOLERANCE for d in compare_with_twin(steps, case))
    return same and not any(step.drifted for step in steps)


def training(case: Case, function: Callable[..., Any] = run_case) -> Detector:
    return Detector(case.world_size, function, (case,), partial(trains_like_one_process, case))


def ask_for_a_stop(rank: int, world_size: int) -> int:
    """Return the stop code of this rank after only the last rank got SIGTERM."""
    mesh = mesh_of(rank, world_size)
    request = StopRequest(mesh.world, torch.device("cpu"))
    request.restore()
    request._signal = 15 if rank == world_size - 1 else 0
    return request.poll()


def gather_startup_times(rank: int, world_size: int, case: Case) -> float:
    """Return the longest import time, which must be the 100 s of the last rank on every rank."""
    trainer, printed = build_trainer(case.config(), rank, world_size), list[Mapping[str, float]]()
    startup = StartupTimer()
    startup.seconds |= dict.fromkeys(PHASES, 0.0) | {"imports": 100.0 if rank == world_size - 1 else 3.0}
    report, metrics = StartupReport(trainer, startup), cast(StepMetrics, None)
    trainer.components.append(report)
    report.log = cast(RunLogger, SimpleNamespace(start_up=lambda mine, longest: printed.append(longest)))
    report.on_step_end(metrics)
    return printed[0]["imports"]


def name_the_run(rank: int, world_size: int) -> str:
    """The run's name, which must be one on all ranks."""
    return run_on_rank0(new_run_id, mesh_of(rank, world_size).world)


def explain(rank: int, world_size: int, case: Case) -> str:
    """Return this rank's report of a loss that is not finite on the last rank only."""
    trainer = build_trainer(case.config(), rank, world_size)
    if rank == world_size - 1:
        torch.nn.init.constant_(trainer.chunks[0].get_parameter("layers.1.mlp.linear_fc1.weight"), float("nan"))
    return explain_nonfinite(trainer, batches_of(trainer, case, 0))


def skip_together(rank: int, world_size: int, case: Case) -> bool:
    """The last rank's gradient is infinite; whether this rank's weights stay as they are, as everyone's must."""
    trainer = build_trainer(case.config(), rank, world_size)
    before = [weight.clone() for weight in trainer.optimizer.main_params.values()]
    with infinite_gradient() if rank == world_size - 1 else nullcontext():
        train_step(trainer, batches_of(trainer, case, 0), RATES)
    return all(map(torch.equal, before, trainer.optimizer.main_params.values()))


def find_the_beginning(rank: int, world_size: int) -> bool:
    """Return True if this rank learns that rank 0 has found no checkpoint."""
    mesh = mesh_of(rank, world_size)
    try:
        return choose_resume_source(CheckpointConfig(), mesh.world).fresh
    except TypeError:
        return False


def is_refused(act: Callable[..., object], *arguments: Any) -> bool:
    """Return True if a call ends with an error for a user."""
    try:
        act(*arguments)
    except (UserError, DataError):
        return True
    return False


def compare_data(rank: int, world_size: int) -> bool:
    """Return True if this rank detects that the last rank reads other samples."""
    training = TrainingConfig(seq_length=8, train_iters=1, seed=int(rank == world_size - 1))
    data = build_data(DataConfig(mock_data=True), training, 31, world_size)
    return is_refused(check_same_data, data, mesh_of(rank, world_size).world)


def compare_kernels(rank: int, world_size: int) -> bool:
    """Return True if this rank detects that the last rank uses other kernels."""
    kernels = "compiled" if rank == world_size - 1 else "torch"
    return is_refused(check_same_kernels, kernels, mesh_of(rank, world_size).world)


def compare_schedules(rank: int, world_size: int) -> bool:
    """Return True if this rank detects that the last rank has another schedule."""
    schedule = make_schedule("gpipe" if rank == world_size - 1 else "1f1b", 2, 1, 4)
    return is_refused(check_same_schedule, schedule, mesh_of(rank, world_size).world)


def factors_of_another_stage(rank: int, world_size: int, case: Case) -> bool:
    """Return True if this rank starts with a learning-rate pattern that only matches the other stage."""
    return not is_refused(build_trainer, case.config(), rank, world_size)


def timeline_of_a_step(rank: int, world_size: int, case: Case) -> bool:
    """Return True if this rank's timeline has the actions of all ranks."""
    trainer = build_trainer(case.config(), rank, world_size)
    batches = batches_of(trainer, case, 0)
    with record_timeline(trainer.pipeline, trainer.mesh.group("pp"), trainer.device) as recorder:
        train_step(trainer, batches, RATES)
    program = build_program(case.parallel, len(batches)).only(COMPUTE_KINDS)
    printed = [[interval.action for interval in intervals] for intervals in recorder.timeline("").intervals]
    return printed == [list(actions) for actions in program.ranks]


def steps_of_all_stages(rank: int, world_size: int, case: Case) -> int:
    """The updates that a checkpoint records after a step, where the first rank updates nothing."""
    trainer = build_trainer(case.config(), rank, world_size)
    train_step(trainer, batches_of(trainer, case, 0), RATES)
    (optimizer,) = (component for component in trainer.components if component.name == "optimizer")
    steps: int = optimizer.state_dict()["steps"]
    return steps


def passes(rank: int, world_size: int, case: Case) -> list[list[float]]:
    """Scores of texts that end with each token in turn, and the likeliest tokens, which the last stage has."""
    trainer = build_trainer(case.config(), rank, world_size)
    requests = [([*range(3, 3 + length), token], 2) for length in (2, 6) for token in range(case.model.vocab)]
    scores = score_tokens(trainer, requests, batch_size=64)
    batch = MicroBatch.of_tokens(torch.tensor([[3, 4, 5]]))
    tops = record(trainer, [batch], lambda hidden, _, output: output.top_logits(hidden, 5))
    found = [x for log_probs, greedy in scores for x in (*log_probs, *map(float, greedy))]
    likeliest = [x for top in tops for values in top for x in values.flatten().tolist()]
    return [found, likeliest]


def continuations(rank: int, world_size: int, case: Case) -> list[list[int]]:
    """The likeliest tokens that follow some texts, which ranks share between them."""
    shared = SharedModel(build_trainer(case.config(), rank, world_size), None, (), 2)
    return shared.continue_texts([[3, 4], [5], [6, 7, 8]], 3, (), {"temperature": 0.0})


def logits_of_stages(rank: int, world_size: int, case: Case) -> list[list[float]]:
    """The logits that all stages get."""
    trainer = build_trainer(case.config(), rank, world_size)
    return [PipelinedModel(trainer).logits(torch.tensor([[3, 4, 5]]), last=1).flatten().tolist()]


def finds_like_one_process(function: Callable[..., Any], case: Case, ranks: Sequence[list[list[float]]]) -> bool:
    alone = function(0, 1, case.twin())
    pairs = [(own, found) for rank in ranks for own, found in zip_longest(alone, rank) if found != []]
    return all(own == pytest.approx(found, rel=TOLERANCE) for own, found in pairs)


class Listener(SharedModel):
    """Model that records the argument of its last call."""

    def receive(self, word: str) -> None:
        self.word = word


def receive_passes(rank: int, world_size: int) -> str:
    """Return the call that this rank receives when rank 0 starts a pass."""
    mesh: Any = SimpleNamespace(mesh=mesh_of(rank, world_size))
    listener = Listener(mesh, None, (), 1)
    listener.word = ""
    with suppress(ValueError):
        listener.run(lambda: listener.call("receive", "pass"))
    return listener.word


def digest_of_a_step(rank: int, world_size: int, case: Case) -> bool:
    """Return True if the digest of a step matches the samples of all ranks."""
    trainer = build_trainer(case.config(), rank, world_size)
    trainer.next_batches()
    trainer.progress.consumed_samples += trainer.reader.next_batch_size
    try:
        return trainer.reader.consumed_digest() == trainer.data.digest("train", 0, trainer.consumed_samples)
    except RuntimeError:
        return False


class OneSource(MockDataset):
    """Generated data with a name."""

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        return (SourceUsage("web", samples, 1),)

    def source_of(self, i: int) -> str:
        return "web"


def loss_of_a_source(rank: int, world_size: int, case: Case) -> list[list[float]]:
    """Return the loss of the only source in a step."""
    trainer = build_trainer(case.config(), rank, world_size)
    config = trainer.config
    dataset = OneSource(config.model.vocab, config.training.seq_length, 100, 1)
    trainer.reader.source = replace(trainer.data, datasets={"train": dataset})
    losses = SourceLosses(trainer)
    losses.on_train_start()
    train_step(trainer, trainer.next_batches(), RATES)
    return [[float(losses.metrics()["source loss web"])]]


def gather_stats_of_ranks(rank: int, world_size: int) -> list[RankStats]:
    """Return the times of all ranks; each rank contributes different ones."""
    mesh = mesh_of(rank, world_size)
    return gather_rank_stats(_times_of(rank), mesh.world, torch.device("cpu"))


def _times_of(rank: int) -> RankStats:
    return {"iteration-time": 1.0 + rank, "communication-dp": 0.5 + rank, "mem-max-allocated-bytes": 10 + rank}


def begin_a_window(rank: int, world_size: int) -> float:
    """The last rank comes late; when, by the machine's clock, this one was let into its window of steps."""
    mesh = mesh_of(rank, world_size)
    time.sleep(LATE_SECONDS if rank == world_size - 1 else 0.0)
    MetricsWindow(torch.device("cpu"), 8, world=mesh.world)
    return time.monotonic()


def large_logits(rank: int, world_size: int) -> tuple[float, torch.Tensor]:
    """Twice the cross-entropy of logits around +-1000, whose exponentials do not exist, and this rank's part of dx."""
    mesh = mesh_of(rank, world_size, tensor_model_parallel_size=world_size)
    x, weight, labels = _extreme()
    rows = weight.shape[0] // world_size
    mine = weight[rank * rows : (rank + 1) * rows].clone()
    grad_accumulator = GradAccumulator()
    grad_accumulator.bind(Gradients({"weight": torch.zeros_like(mine)}))
    vocabulary = VocabularyShard(rank * rows, rows, mesh.tp, grad_accumulator, "weight")
    x.requires_grad_()
    mask = torch.ones(x.shape[0], dtype=torch.float64)
    loss, *_ = linear_cross_entropy(x, mine, labels, mask, vocabulary)
    of_tokens = token_losses(x, mine, labels.unsqueeze(1), mask.unsqueeze(1), vocabulary).sum()
    (loss + of_tokens).backward()
    return (loss + of_tokens).item(), x.grad if x.grad is not None else torch.zeros_like(x)


def _extreme() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64) * 40
    weight = torch.randn(8, 3, generator=generator, dtype=torch.float64) * 40
    return x, weight, torch.tensor([0, 7, 3, 4, 5])


def _is_plain_cross_entropy(ranks: Sequence[tuple[float, torch.Tensor]]) -> bool:
    x, weight, labels = _extreme()
    x.requires_grad_()
    loss = 2 * F.cross_entropy(x @ weight.t(), labels, reduction="sum")
    loss.backward()
    same = all(abs(got - loss.item()) <= TOLERANCE * loss.item() for got, _ in ranks)
    dx = torch.stack([part for _, part in ranks]).sum(0)
    return same and x.grad is not None and torch.allclose(dx, x.grad, rtol=TOLERANCE, atol=TOLERANCE)


def reports_like_one_process(case: Case, ranks: Sequence[list[dict[str, float]]]) -> bool:
    pairs = [pair for got in ranks for pair in zip(got, healthy(case.twin()), strict=True)]
    return all(difference(*pair, zeros=False) <= TOLERANCE for pair in pairs)


def routes_like_one_process(case: Case, ranks: Sequence[list[dict[str, float]]]) -> bool:
    """Return True if the loss and the router losses equal the ones of one process."""
    alone = router_losses(0, 1, case.twin())
    pairs = [
        (got[name], step[name]) for steps in ranks for got, step in zip(steps, alone, strict=True) for name in step
    ]
    return all(abs(ours - theirs) <= TOLERANCE * theirs for ours, theirs in pairs)


def balances_like_one_process(case: Case, ranks: Sequence[list[Balance]]) -> bool:
    """Return True if choices, loads and biases of experts are those of one process."""
    return joined_balance(ranks) == expert_balance(0, 1, case.twin())


@cache
def healthy(twin: Case) -> list[dict[str, float]]:
    """Return the report of one process, this one, on every layer."""
    return report(0, 1, twin)


def flipped_bit(rank: int, world_size: int, case: Case) -> str:
    """Return this rank's report after a bit of the last rank's weight flips."""
    trainer = build_trainer(case.config(), rank, world_size)
    if rank == world_size - 1:
        trainer.chunks[0].get_parameter(FLIPPED).detach().view(torch.int64)[0] ^= 1
    try:
        check_weight_copies(trainer)
    except UserError as error:
        return error.problems[0].sentence
    return ""


def nearly_like_one_process(case: Case, ranks: Sequence[list[RankTrace]]) -> bool:
    """Up to the rounding of every gradient to bf16 on its way."""
    steps = [join_traces(step) for step in zip(*ranks)]
    same = all(d.error <= TOLERANCE_BF16 for d in compare_with_twin(steps, case, gradient_floor=1e-2))
    return same and not any(step.drifted for step in steps)


_SHARED_KV = replace(MODEL, num_query_groups=1, qk_layernorm=True, hidden_dropout=0.1, attention_dropout=0.1)
TP2 = Case(
    replace(_SHARED_KV, z_loss_coeff=1e-3),
    ParallelConfig(tensor_model_parallel_size=2, ddp_bucket_size=4000),
    training=TrainingConfig(micro_batch_size=2),
    steps=2,
)
TP2_SP = replace(TP2, parallel=replace(TP2.parallel, sequence_parallel=True))
DP2 = replace(TP2, parallel=ParallelConfig(ddp_bucket_size=4000), dp=2)
DP2_LATE = replace(DP2, parallel=ParallelConfig(overlap_grad_reduce=False))
TP4_GQA = Case(replace(MODEL, num_query_groups=2), ParallelConfig(tensor_model_parallel_size=4), steps=2)

TP4_NORMS = replace(
    TP4_GQA,
    model=replace(TP4_GQA.model, normalization="RMSNorm", qk_layernorm=True, qk_layernorm_scope="all"),
)

PIPELINE = replace(TP2, model=_SHARED_KV, training=TrainingConfig(micro_batch_size=1))
PP2 = replace(PIPELINE, parallel=ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"))
PP2_V = replace(
    PIPELINE,
    model=replace(_SHARED_KV, num_layers=3, untie_embeddings_and_output_weights=True),
    parallel=ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
)
PP2_TP2 = replace(
    PIPELINE,
    model=replace(_SHARED_KV, num_layers=4),
    parallel=ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=2,
        pipeline_schedule="interleaved",
    ),
)
ZERO1 = replace(DP2, parallel=ParallelConfig(ddp_bucket_size=4000, use_distributed_optimizer=True))
ZERO2 = replace(
    DP2,
    parallel=ParallelConfig(
        ddp_bucket_size=4000, data_parallel_sharding_strategy="optim_grads", overlap_param_gather=True
    ),
    training=TrainingConfig(micro_batch_size=1),
)
ZERO3 = replace(
    ZERO2, parallel=ParallelConfig(ddp_bucket_size=4000, data_parallel_sharding_strategy="optim_grads_params")
)
HSDP = replace(ZERO1, parallel=replace(ZERO1.parallel, num_distributed_optimizer_instances=2), dp=4, samples=8)
BF16_WIRE = replace(DP2, parallel=replace(DP2.parallel, grad_reduce_in_bf16=True), optimizer=OptimizerConfig("sgd"))

_EXPERTS = replace(
    MODEL,
    num_experts=4,
    add_bias_linear=False,
    moe_ffn_hidden_size=24,
    moe_aux_loss_coeff=(0.1,),
    moe_z_loss_coeff=0.01,
)
# FP8 scales depend on the size of a micro-batch. A key/value head that ranks share has gradients in parts.
_FP8 = replace(TP2, model=replace(MODEL, num_query_groups=2), training=TrainingConfig(micro_batch_size=TP2.samples))
FP8_TP2 = replace(_FP8, precision=replace(TP2.precision, fp8_format="hybrid", fp8_recipe="tensorwise"))
FP8_TP2_SP = replace(
    _FP8, parallel=TP2_SP.parallel, precision=replace(TP2.precision, fp8_format="hybrid", fp8_recipe="rowwise")
)
FP8_CP2 = replace(FP8_TP2_SP, parallel=ParallelConfig(context_parallel_size=2))
MOE_EP2 = replace(DP2, model=_EXPERTS, parallel=ParallelConfig(ddp_bucket_size=4000, expert_model_parallel_size=2))
MOE_TP2 = replace(TP2_SP, model=_EXPERTS)
_BALANCED = replace(
    _EXPERTS,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.05,
    moe_router_load_balancing_type=("seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.1),
)
BALANCE_DP2 = replace(DP2, model=_BALANCED)
BALANCE_TP2 = replace(TP2_SP, model=_BALANCED, training=replace(TP2.training, recompute_granularity="full"))
MUON_TP2 = replace(TP2, optimizer=OptimizerConfig("muon", adam_eps=1e-5))

CP3 = replace(
    TP2,
    model=replace(
        _SHARED_KV,
        attention_pattern="local:9+first:2,global",
        attention_dropout=0.0,
        num_query_groups=2,
        softmax_type="learnable",
    ),
    parallel=ParallelConfig(context_parallel_size=3),
    documents=MaskBuilder(5, reset_attention=True),
)
CP2_GATHERED = replace(
    TP2,
    parallel=ParallelConfig(context_parallel_size=2, cp_comm_type="all_gather"),
    documents=MaskBuilder(5, reset_attention=True),
)
CP2_HEADS = replace(CP2_GATHERED, parallel=replace(CP2_GATHERED.parallel, cp_comm_type="a2a"))
CP2_LATE = replace(CP2_HEADS, parallel=ParallelConfig(context_parallel_size=2), late_labels=True)
CP4 = replace(
    CP2_GATHERED,
    parallel=ParallelConfig(
        context_parallel_size=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2)
    ),
)
DORA_TP2_SP = replace(TP2_SP, model=replace(_SHARED_KV, activation="swiglu", lora_rank=2, lora_dora=True))
DORA_TP2 = replace(DORA_TP2_SP, parallel=TP2.parallel)
PP2_LAST_ADAPTED = replace(PP2, model=replace(_SHARED_KV, lora_rank=2, lora_target=("layers.1.*",)))
MOE_CP2 = replace(DP2, model=_EXPERTS, parallel=ParallelConfig(context_parallel_size=2), dp=1)
SINKHORN_CP2 = replace(MOE_CP2, model=replace(_EXPERTS, moe_router_load_balancing_type=("sinkhorn",)))


def recurrence_of(name: str, parallel: ParallelConfig, **more: Any) -> Case:
    """Two layers of a recurrence, in samples of several documents."""
    model = replace(MODEL, token_mixers=(name,), **STATES[name] | more)
    return replace(CP2_GATHERED, model=model, parallel=parallel)


OF_RECURRENCES: dict[str, Detector] = {
    f"{name}-{layout}": training(recurrence_of(name, case.parallel))
    for name in STATES
    for layout, case in (("cp2", CP2_LATE), ("cp2-heads", CP2_HEADS), ("cp4", CP4))
}
"""They communicate as others do, and notice the faults of recurrences."""
OF_RECURRENCES["mamba2-tp2"] = training(recurrence_of("mamba2", TP2_SP.parallel, mamba_norm_groups=1))

FACTORS_OF_STAGES = ("layers.0.*=0.5", "layers.1.*=0.5")
PP2_FACTORS = replace(PP2, optimizer=replace(PP2.optimizer, lr_factors=FACTORS_OF_STAGES))

NONFINITE = "the loss or gradient of step 1 is not finite; first on rank 1: output of layers.1.mlp.linear_fc1"

FLIPPED = "layers.1.mlp.linear_fc2.bias"
DRIFTED = f"copies of the weights differ after step 0: {FLIPPED} is not the same on ranks 0, 1"

DETECTORS: dict[str, Detector] = {
    "tp2": training(TP2),
    "tp2-sp": training(TP2_SP),
    "tp2-overlap": training(replace(TP2_SP, parallel=replace(TP2_SP.parallel, tp_comm_overlap=True))),
    "dp2": training(DP2),
    "dp2-late": training(DP2_LATE),
    "tp4-gqa": training(TP4_GQA),
    "tp4-norms": training(TP4_NORMS),
    "pp2": training(PP2),
    "pp2-v": training(PP2_V),
    "pp2-tp2": training(PP2_TP2),
    "zero1": training(ZERO1),
    "zero2": training(ZERO2),
    "zero3": training(ZERO3),
    "zero3-muon": training(replace(ZERO3, optimizer=OptimizerConfig("muon", adam_eps=1e-5))),
    "hsdp": training(HSDP),
    "compression": Detector(2, compressed_sums, (), _are_sums),
    "bf16-wire": Detector(2, run_case, (BF16_WIRE,), partial(nearly_like_one_process, BF16_WIRE)),
    "fp8-tp2": training(FP8_TP2),
    "fp8-tp2-sp": training(FP8_TP2_SP),
    "fp8-cp2": training(FP8_CP2),
    "moe-ep2": training(MOE_EP2),
    "moe-tp2": training(MOE_TP2),
    "muon-tp2": training(MUON_TP2),
    "dora-tp2": training(DORA_TP2),
    "dora-tp2-sp": training(DORA_TP2_SP),
    "adapters-of-a-stage": Detector(2, steps_of_all_stages, (PP2_LAST_ADAPTED,), lambda ranks: list(ranks) == [1, 1]),
    "preferences-tp2": training(replace(TP2, training=replace(TP2.training, objective="dpo", dpo_beta=0.5))),
    "passes-tp2": Detector(2, passes, (TP2,), partial(finds_like_one_process, passes, TP2)),
    "passes-dp2": Detector(2, passes, (DP2,), partial(finds_like_one_process, passes, DP2)),
    "passes-pp2": Detector(2, passes, (PP2,), partial(finds_like_one_process, passes, PP2)),
    "continuations-dp2": Detector(2, continuations, (DP2,), partial(finds_like_one_process, continuations, DP2)),
    "logits-pp2": Detector(2, logits_of_stages, (PP2,), partial(finds_like_one_process, logits_of_stages, PP2)),
    "start of a pass": Detector(2, receive_passes, (), lambda ranks: list(ranks) == ["pass", "pass"]),
    "cp3": training(CP3, run_in_small_tiles),
    "cp2-gathered": training(CP2_GATHERED, run_in_small_tiles),
    "cp2-heads": training(CP2_HEADS, run_in_small_tiles),
    "cp4": training(CP4, run_in_small_tiles),
    "moe-cp2": training(MOE_CP2),
    "factors": Detector(2, factors_of_another_stage, (PP2_FACTORS,), lambda ranks: list(ranks) == [True, True]),
    "timeline": Detector(2, timeline_of_a_step, (PP2,), lambda ranks: list(ranks) == [True, True]),
    "large-logits": Detector(2, large_logits, (), _is_plain_cross_entropy),
    "stop": Detector(2, ask_for_a_stop, (), lambda ranks: list(ranks) == [143, 143]),
    "start-up": Detector(2, gather_startup_times, (DP2,), lambda ranks: list(ranks) == [100.0, 100.0]),
    "name": Detector(2, name_the_run, (), lambda ranks: len(set(ranks)) == 1),
    "beginning": Detector(2, find_the_beginning, (), lambda ranks: list(ranks) == [True, True]),
    "ranks": Detector(2, gather_stats_of_ranks, (), lambda ranks: list(ranks) == 2 * [[_times_of(0), _times_of(1)]]),
    "window": Detector(2, begin_a_window, (), lambda ranks: max(ranks) - min(ranks) < LATE_SECONDS / 2),
    "data": Detector(2, compare_data, (), lambda ranks: list(ranks) == [True, True]),
    "kernels": Detector(2, compare_kernels, (), lambda ranks: list(ranks) == [True, True]),
    "schedules": Detector(2, compare_schedules, (), lambda ranks: list(ranks) == [True, True]),
    "digest": Detector(2, digest_of_a_step, (DP2,), lambda ranks: list(ranks) == [True, True]),
    "digest-cp2": Detector(2, digest_of_a_step, (CP2_HEADS,), lambda ranks: list(ranks) == [True, True]),
    "sources": Detector(2, loss_of_a_source, (DP2,), partial(finds_like_one_process, loss_of_a_source, DP2)),
    "nonfinite": Detector(2, explain, (DP2,), lambda ranks: all(text.startswith(NONFINITE) for text in ranks)),
    "balance-dp2": Detector(2, expert_balance, (BALANCE_DP2,), partial(balances_like_one_process, BALANCE_DP2)),
    "balance-tp2": Detector(2, expert_balance, (BALANCE_TP2,), partial(balances_like_one_process, BALANCE_TP2)),
    "sinkhorn-cp2": training(SINKHORN_CP2),
    "routers": Detector(2, router_losses, (MOE_TP2,), partial(routes_like_one_process, MOE_TP2)),
    "health": Detector(2, report, (TP2_SP,), partial(reports_like_one_process, TP2_SP)),
    "health-cp2": Detector(2, report, (CP2_HEADS,), partial(reports_like_one_process, CP2_HEADS)),
    "health-cp2-late": Detector(2, report, (CP2_LATE,), partial(reports_like_one_process, CP2_LATE)),
    "drift": Detector(2, flipped_bit, (DP2,), lambda ranks: list(ranks) == [DRIFTED, DRIFTED]),
    "overflow": Detector(2, skip_together, (TP2,), lambda ranks: list(ranks) == [True, True]),
}
