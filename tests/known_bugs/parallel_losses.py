"""Bugs of losses on several ranks: divided by the wrong number of tokens, scaled by ranks, or of another mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.config.multi_token import LATER_WEIGHTS
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.router import PADDING
from megatron.config.training import TrainingConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers import loss
from megatron.layers.context import Losses
from megatron.layers.router import Router
from megatron.model.gpt import GPTChunk
from megatron.training import step
from megatron.training.components import head_weights
from megatron.training.components.head_weights import HeadWeights
from megatron.training.trainer import Trainer
from tests.distributed import faults_of_shares
from tests.distributed.detect import DETECTORS, training
from tests.distributed.detect_experts import EXPERTS
from tests.kit.cases import MODEL, Case
from tests.kit.solo import Solo, random_batch, tiny
from tests.known_bugs.alone import alone, distance
from tests.known_bugs.bug import KnownBug, UncoveredBug
from tests.known_bugs.parallel_gradients import ACCUMULATION, EXPERT, LIKE_ONE

TOKENS, CONTEXT, VOCABULARY = "Loss and number of tokens", "Context parallelism", "Vocabulary parallelism"

UNCLIPPED = OptimizerConfig(adam_eps=1e-5, clip_grad=0.0)
MICRO_BATCHES = Case(MODEL, training=TrainingConfig(micro_batch_size=1), steps=1)
TP2_CP2 = Case(MODEL, ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2), steps=1)
CP2 = Case(MODEL, ParallelConfig(context_parallel_size=2), late_labels=True, steps=1, optimizer=UNCLIPPED)
MTP_DP2 = Case(replace(MODEL, position_embedding_type="rope", mtp_num_layers=2), dp=2, steps=1)


@contextmanager
def mean_of_microbatches() -> Iterator[None]:
    """The loss of a step is the mean of its micro-batches' means, whatever their numbers of tokens."""
    chunk_forward, count = GPTChunk.forward, step.count_tokens
    mean: dict[str, Tensor] = {}

    def count_tokens(trainer: Trainer, batches: Sequence[MicroBatch]) -> Tensor:
        tokens = count(trainer, batches)
        mean["tokens"] = tokens / (len(batches) * trainer.mesh.dp_cp.size)
        return tokens

    def forward(self: GPTChunk, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        mask = batch.loss_mask * (mean["tokens"] / batch.loss_mask.sum())
        return chunk_forward(self, x, replace(batch, loss_mask=mask))

    with patch.object(step, "count_tokens", count_tokens), patch.object(GPTChunk, "forward", forward):
        yield


def loss_of_a_context_rank() -> AbstractContextManager[Any]:
    """The logged loss is the sum of one rank's part of the sequences."""

    def mean_loss(trainer: Trainer, sums: Mapping[str, Tensor], tokens: Tensor, name: str = "lm loss") -> Tensor:
        return comm.all_reduce(sums[name], trainer.mesh.pipeline) / tokens

    return patch.object(step, "mean_loss", mean_loss)


def gradients_divided_by_context_ranks() -> AbstractContextManager[Any]:
    """Context-parallel ranks are averaged like replicas, and the loss is divided by their tokens too."""
    original = step.weigh_batch

    def weigh(trainer: Trainer, *arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, loss_grad = original(trainer, *arguments)
        return tokens, loss_grad / trainer.mesh.group("cp").size

    return patch.object(step, "weigh_batch", weigh)


def _later_weights(change: Callable[[Tensor, Trainer], Tensor]) -> AbstractContextManager[Any]:
    original = HeadWeights.on_batches

    def on_batches(self: HeadWeights, batches: list[MicroBatch]) -> list[MicroBatch]:
        weighed = original(self, batches)
        weights = change(weighed[0].extra[LATER_WEIGHTS], self._trainer)
        return [replace(batch, extra={**batch.extra, LATER_WEIGHTS: weights}) for batch in weighed]

    return patch.object(HeadWeights, "on_batches", on_batches)


def later_losses_divided_by_context_ranks() -> AbstractContextManager[Any]:
    """Multi-token losses are divided by the context-parallel ranks once more."""
    return _later_weights(lambda weights, trainer: weights / trainer.mesh.group("cp").size)


def later_tokens_counted_locally() -> AbstractContextManager[Any]:
    """Multi-token losses are means over the predictions of a rank."""
    local = SimpleNamespace(all_reduce=lambda x, group: x)
    return patch.object(head_weights, "comm", local)


def _balancing_loss_times(factor: Callable[[Router], float]) -> AbstractContextManager[Any]:
    original = Router._balancing_loss

    def balancing_loss(self: Router, *arguments: Any) -> Tensor:
        return original(self, *arguments) * factor(self)

    return patch.object(Router, "_balancing_loss", balancing_loss)


def balancing_loss_times_tensor_ranks() -> AbstractContextManager[Any]:
    """Each rank's part of the balancing loss is weighted by the tokens of all."""
    return _balancing_loss_times(lambda router: router.context.tp.size)


def balancing_loss_divided_by_context_ranks() -> AbstractContextManager[Any]:
    """The balancing loss is divided by the context-parallel ranks once more."""
    return _balancing_loss_times(lambda router: 1.0 / router.context.mesh.group("cp").size)


def mask_of_other_rows() -> AbstractContextManager[Any]:
    """Ranks mask their rows by the mask of the first rank's rows."""
    original = Router._z_loss

    def z_loss(self: Router, logits: Tensor, batch: MicroBatch) -> Tensor:
        mask, rows = batch.loss_mask, len(logits)
        first = mask[:, :rows].repeat(1, mask.shape[1] // rows)
        return original(self, logits, replace(batch, loss_mask=first))

    return patch.object(Router, "_z_loss", z_loss)


def whole_logits_summed() -> AbstractContextManager[Any]:
    """Every rank adds up all exponentials, and the sum over the ranks counts them as often as there are ranks."""

    def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
        total = comm.all_reduce(x, group, op)
        if op == "sum":
            total[0] *= group.size
        return total

    return patch.object(loss, "comm", SimpleNamespace(**vars(comm) | {"all_reduce": all_reduce}))


PADDED = tiny(
    num_experts=4,
    add_bias_linear=False,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type=("seq_aux_loss", "aux_loss"),
    moe_aux_loss_coeff=(0.5, 0.5),
)


def padded(rank: int, world_size: int) -> float:
    """Gradients and loads of experts with samples that are padded, from those with the same samples as they are."""
    short, long = random_batch(PADDED, length=10), random_batch(PADDED, length=16, seed=1)
    for column in ("tokens", "labels", "loss_mask"):
        getattr(long, column)[:, :10] = getattr(short, column)
    long.loss_mask[:, 10:] = 0.0
    padding = torch.arange(16).expand(2, -1) >= 10
    found = []
    for batch in (replace(long, extra={PADDING: padding}), short):
        solo = Solo.build(PADDED)
        solo.backward([batch])
        routers = {n: m for n, m in solo.chunk.named_modules() if isinstance(m, Router)}
        found.append(solo.snapshot() | {name: router.loads.chosen.double() for name, router in routers.items()})
    return distance(*found)


def padding_balanced() -> AbstractContextManager[Any]:
    """Routers take tokens of padding for tokens of text."""
    original = Router._balance

    def balance(self: Router, *arguments: Any) -> Losses:
        *scores, batch = arguments
        return original(self, *scores, replace(batch, extra={}))

    return patch.object(Router, "_balance", balance)


BUGS = {
    "mean-of-microbatches": KnownBug(
        reports=("huggingface/transformers#34191", "karpathy/nanochat#59"),
        kind=ACCUMULATION,
        bug="Each micro-batch was divided by its own number of tokens and the means were averaged, so with sequences "
        "of many lengths accumulation trained another loss.",
        check=f"four micro-batches with different numbers of labels {LIKE_ONE} with one micro-batch",
        detector=training(MICRO_BATCHES),
        plant=mean_of_microbatches,
    ),
    "local-token-count": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 3)", "NVIDIA/Megatron-LM#2417", "NVIDIA/Megatron-LM#3159"),
        kind=TOKENS,
        bug="Losses of multi-token prediction were divided by the tokens that a rank counts: a gradient of 14/3 "
        "instead of 4 where ranks count different numbers.",
        check=f"two replicas with different numbers of labels {LIKE_ONE}",
        detector=training(MTP_DP2),
        plant=later_tokens_counted_locally,
    ),
    "half-the-loss": KnownBug(
        reports=("pytorch/torchtitan#3329", "pytorch/torchtitan#3280", "pytorch/torchtitan#3313"),
        kind=CONTEXT,
        bug="With TP and CP together the logged loss was not summed over the context-parallel ranks: about half of it "
        "with CP 2.",
        check=f"TP 2 x CP 2 on four ranks {LIKE_ONE}",
        detector=training(TP2_CP2),
        plant=loss_of_a_context_rank,
    ),
    "context-ranks-averaged": KnownBug(
        reports=("NVIDIA/Megatron-LM#906", "verl-project/verl#4250", "NovaSky-AI/SkyRL#1420"),
        kind=CONTEXT,
        bug="Loss and gradients were scaled for different groups, with and without the context-parallel ranks: "
        "gradients were CP times too large or too small.",
        check=f"CP 2, labels of one sample on one of the ranks only, {LIKE_ONE}",
        detector=training(CP2),
        plant=gradients_divided_by_context_ranks,
    ),
    "later-losses-context": KnownBug(
        reports=("NVIDIA/Megatron-LM#3959",),
        kind=CONTEXT,
        bug="The gradient of multi-token losses was divided by the context-parallel ranks once more.",
        check="multi-token prediction with CP 2 against one process: loss, norm, the losses of all depths",
        detector=EXPERTS["heads-cp2"],
        plant=later_losses_divided_by_context_ranks,
    ),
    "balancing-loss-context": KnownBug(
        reports=("NVIDIA/Megatron-LM#2217",),
        kind=EXPERT,
        bug="The gradient of the balancing loss was divided by the context-parallel ranks once more.",
        check=f"a mixture with CP 2 {LIKE_ONE}",
        detector=DETECTORS["moe-cp2"],
        plant=balancing_loss_divided_by_context_ranks,
    ),
    "balancing-loss-tensor": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 10)", "NVIDIA/Megatron-LM#7481", "NVIDIA/Megatron-LM#5047"),
        kind=EXPERT,
        bug="An all-reduce in place overwrote the number of a rank's own tokens with that of all ranks, by which the "
        "balancing loss was then multiplied: its gradient doubled with TP 2.",
        check=f"a mixture with TP 2 and sequence parallelism {LIKE_ONE}",
        detector=DETECTORS["moe-tp2"],
        plant=balancing_loss_times_tensor_ranks,
    ),
    "mask-of-other-rows": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 5)", "NVIDIA/Megatron-LM#5563"),
        kind=EXPERT,
        bug="The mask of padding was sharded over another group than the hidden states, or not at all, so losses of "
        "the router masked other tokens.",
        check=f"a mixture with TP 2, sequence parallelism and masked labels {LIKE_ONE}",
        detector=DETECTORS["moe-tp2"],
        plant=mask_of_other_rows,
    ),
    "padding-balanced": KnownBug(
        reports=(
            "NVIDIA/Megatron-LM#1984",
            "NVIDIA/Megatron-LM#4777",
            "NVIDIA-NeMo/Megatron-Bridge#5744",
            "pytorch/torchtitan#4594",
        ),
        kind=EXPERT,
        bug="Tokens that pad a sample counted in the balancing losses and in the loads that move the biases of "
        "experts.",
        check="padded samples against the same samples without padding: every gradient, the loads",
        detector=alone(padded),
        plant=padding_balanced,
        mended="with `--packing best-fit`, and in fine-tuning.",
    ),
    "loads-of-a-rank": KnownBug(
        reports=("pytorch/torchtitan#4154",),
        kind=EXPERT,
        bug="Biases of experts moved by the loads of a rank's own tokens, because these were not summed over TP.",
        check="choices, loads and biases with TP 2 against one process, to the bit",
        detector=DETECTORS["balance-tp2"],
        plant=faults_of_shares.loads_of_experts_local,
    ),
    "whole-logits-summed": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 2)",),
        kind=VOCABULARY,
        bug="The cross-entropy over a sharded vocabulary took logits of the whole vocabulary: the loss was off by "
        "log(TP), and its gradient was wrong.",
        check=f"TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=whole_logits_summed,
    ),
}

UNCOVERED = [
    UncoveredBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 1)", "NVIDIA/Megatron-LM#737"),
        bug="Label smoothing spread over a rank's own rows of the vocabulary.",
        why="No objective here smooths labels over the vocabulary.",
    ),
    UncoveredBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 6)",),
        bug="Cross-attention gathered its input over the global group instead of its own.",
        why="No model here has cross-attention.",
    ),
    UncoveredBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 7)",),
        bug="A vision-language model scattered embeddings over the global group instead of its own.",
        why="No model here has images.",
    ),
]
