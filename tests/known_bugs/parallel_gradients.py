"""Bugs of gradients and of their norm: not summed over the ranks that share a parameter, or counted wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed import mappings
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import ShardSpec
from megatron.layers import latent_attention, loss
from megatron.layers.router import Router
from megatron.optimizer import distributed_optimizer
from megatron.optimizer.distributed_optimizer import PartialGradReducer
from megatron.optimizer.grad_buffer import Bucket, BufferPool, Reduction
from tests.distributed import detect, faults, faults_of_shares
from tests.distributed.detect import DETECTORS, recurrence_of, training
from tests.distributed.grid import ATTENTION
from tests.kit.cases import MODEL, Case
from tests.known_bugs.bug import KnownBug

TENSOR, EXPERT, PIPELINE = "Tensor parallelism", "Expert parallelism", "Pipeline parallelism"
NORM, ACCUMULATION = "Gradient norm", "Gradient accumulation"

SINKS_TP2 = Case(replace(MODEL, softmax_type="learnable"), detect.TP2.parallel, steps=1)
MOE_EP2_TP2 = replace(
    detect.MOE_TP2,
    parallel=ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    ),
    steps=1,
)
MOE_ETP2 = replace(detect.MOE_EP2, parallel=ParallelConfig(expert_tensor_parallel_size=2), steps=1)
PP2_TIED = Case(MODEL, ParallelConfig(pipeline_model_parallel_size=2), steps=1)
PP2_TIED_SHARDS = replace(
    PP2_TIED, parallel=replace(PP2_TIED.parallel, data_parallel_sharding_strategy="optim_grads"), dp=2
)
PP2_MTP = replace(
    PP2_TIED,
    model=replace(MODEL, position_embedding_type="rope", mtp_num_layers=1, untie_embeddings_and_output_weights=True),
)
MLA = replace(MODEL, **ATTENTION["latent"], position_embedding_type="rope")
MLA_TP2 = Case(MLA, detect.TP2.parallel, steps=1)
GDN_TP2 = training(replace(recurrence_of("gated-delta-net", detect.TP2.parallel), steps=1))


# ---- Of gradients that are not summed


def input_gradient_of_a_rank(module: ModuleType) -> AbstractContextManager[Any]:
    """Layers of a module pass on the gradient of a rank's own rows of the vocabulary, or of its own heads."""
    kept = SimpleNamespace(copy_to_region=lambda x, group: x, gather_rows=mappings.gather_rows)
    return patch.object(module, "mappings", kept)


def router_detached_from_the_loss() -> AbstractContextManager[Any]:
    """The weights of the chosen experts pass no gradient to the router."""
    original = Router._weights
    return patch.object(Router, "_weights", lambda self, *arguments: original(self, *arguments).detach())


def experts_scaled_by_their_ranks() -> AbstractContextManager[Any]:
    """Gradients of experts are a sum over the tokens of all ranks, and divided by fewer."""
    init, reduce = PartialGradReducer.__init__, PartialGradReducer.reduce

    def keep(self: Any, specs: Mapping[str, ShardSpec], buckets: Any, mesh: Any) -> None:
        init(self, specs, buckets, mesh)
        self.experts = [grad for name, grad in buckets.grads.items() if specs[name].expert]
        self.ranks = mesh.group("ep", "etp").size

    def scale(self: Any) -> None:
        reduce(self)
        torch._foreach_mul_(self.experts, self.ranks)

    return patch.multiple(PartialGradReducer, __init__=keep, reduce=scale)


def other_elements_of_a_tied_weight() -> AbstractContextManager[Any]:
    """The first and the last stage add up gradients of different elements of the embedding."""
    original = PartialGradReducer.__init__

    def init(self: Any, specs: Mapping[str, ShardSpec], buckets: Any, mesh: Any) -> None:
        original(self, specs, buckets, mesh)
        moved = [grad for name, grad in buckets.grads.items() if specs[name].counted_elsewhere]

        def move() -> None:
            for grad in moved:
                grad.copy_(grad.flatten().roll(grad.numel() // 2).view_as(grad))

        self.before_reduce = move

    return patch.object(PartialGradReducer, "__init__", init)


def only_the_last_microbatch() -> AbstractContextManager[Any]:
    """Each micro-batch overwrites the gradients of the one before."""
    original = Bucket.claim

    def claim(self: Bucket, name: str) -> tuple[Tensor, bool]:
        return original(self, name)[0], True

    return patch.object(Bucket, "claim", claim)


def shards_overwritten() -> AbstractContextManager[Any]:
    """The reduced shard of a micro-batch replaces the sum of those before."""
    original = BufferPool.reduce

    def reduce(self: BufferPool, buffer: Tensor, reduction: Reduction, own: Tensor, first: bool) -> None:
        original(self, buffer, reduction, own, first=True)

    return patch.object(BufferPool, "reduce", reduce)


# ---- Of the norm


def _uncounted(left_out: Callable[[str, ShardSpec, Mesh], bool]) -> AbstractContextManager[Any]:
    """Leave parameters out of this rank's part of the norm."""
    original = distributed_optimizer.GradNorm.__init__

    def init(self: Any, specs: Mapping[str, ShardSpec], buckets: Any, mesh: Mesh, *rest: Any) -> None:
        counted = {n: replace(s, counted_elsewhere=True) if left_out(n, s, mesh) else s for n, s in specs.items()}
        original(self, counted, buckets, mesh, *rest)

    return patch.object(distributed_optimizer.GradNorm, "__init__", init)


def sinks_of_other_ranks_not_counted() -> AbstractContextManager[Any]:
    """Only the first tensor-parallel rank counts its attention sinks."""
    return _uncounted(lambda name, spec, mesh: name.endswith("softmax_offset") and mesh.tp.rank > 0)


def experts_of_other_ranks_not_counted() -> AbstractContextManager[Any]:
    """Only the first tensor-parallel rank counts its experts."""
    return _uncounted(lambda name, spec, mesh: spec.expert and mesh.tp.rank > 0)


LIKE_ONE = "against one process"
"""The loss, the gradient norm, every gradient and every weight of all steps, as the page explains."""

BUGS = {
    "row-parallel-bias": KnownBug(
        reports=("PaddlePaddle/Paddle#35186", "awslabs/slapo#10", "huggingface/text-generation-inference#1036"),
        kind=TENSOR,
        bug="The bias of a row-parallel linear was added on every rank before the sum over the ranks.",
        check=f"TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=faults.bias_added_by_every_rank,
    ),
    "router-gradient-tp": KnownBug(
        reports=("NVIDIA/Megatron-LM#619", "pytorch/torchtitan#2387", "pytorch/torchtitan#2416"),
        kind=TENSOR,
        bug="Ranks route their own part of the sequence; the gradient of the router was not summed over them, and the "
        "routers of the ranks drifted apart.",
        check=f"a mixture with TP 2 and sequence parallelism {LIKE_ONE}",
        detector=DETECTORS["moe-tp2"],
        plant=partial(faults.partial_flipped, "layers.0.mlp.router.weight"),
    ),
    "final-norm-gradient-sp": KnownBug(
        reports=("NVIDIA/Megatron-LM#1446",),
        kind=TENSOR,
        bug="With sequence parallelism the gradient of the final norm was that of a rank's own rows.",
        check=f"TP 2 and sequence parallelism {LIKE_ONE}",
        detector=DETECTORS["tp2-sp"],
        plant=partial(faults.partial_flipped, "final_layernorm.weight"),
    ),
    "norm-gradients-sp": KnownBug(
        reports=("EleutherAI/gpt-neox#1257", "EleutherAI/gpt-neox#1259"),
        kind=TENSOR,
        bug="The hooks that sum the gradients of norms over sequence-parallel ranks were never called.",
        check=f"TP 2 and sequence parallelism {LIKE_ONE}",
        detector=DETECTORS["tp2-sp"],
        plant=faults.replicas_not_summed,
    ),
    "qk-norm-gradient-tp": KnownBug(
        reports=("NVIDIA-NeMo/RL#3716",),
        kind=TENSOR,
        bug="The norm of queries sees the heads of a rank; a second path of training left out the sum of its gradient "
        "over the ranks.",
        check=f"TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=partial(faults.partial_flipped, "layers.0.self_attention.q_layernorm.weight"),
    ),
    "shared-key-value-heads": KnownBug(
        reports=("bigcode-project/Megatron-LM#35", "bigcode-project/Megatron-LM#37"),
        kind=TENSOR,
        bug="Ranks that share the only key/value head reduced its gradient at the wrong place; loss 3.74 instead of "
        "2.64 after 5,000 steps.",
        check=f"one key/value head with TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=faults.kv_copies_not_summed,
    ),
    "gated-delta-net-norm": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 11)",),
        kind=TENSOR,
        bug="The output norm of a gated DeltaNet is shared by the heads of all ranks; its gradient was summed over "
        "them with sequence parallelism only.",
        check=f"a gated DeltaNet with TP 2 without sequence parallelism {LIKE_ONE}",
        detector=GDN_TP2,
        plant=partial(faults.partial_flipped, "layers.0.gated_delta_net.norm.weight"),
    ),
    "rotary-key-gradient": KnownBug(
        reports=("NVIDIA/Megatron-LM#1699", "NVIDIA/Megatron-LM#6839"),
        kind=TENSOR,
        bug="The heads of all ranks share the rotary key of latent attention; its gradient was that of a rank's own "
        "heads.",
        check=f"latent attention with TP 2 without sequence parallelism {LIKE_ONE}",
        detector=training(MLA_TP2),
        plant=partial(input_gradient_of_a_rank, latent_attention),
    ),
    "output-layer-input-gradient": KnownBug(
        reports=("NovaSky-AI/SkyRL#1886",),
        kind=TENSOR,
        bug="The output layer received a transposed tensor, of which the sum over ranks reduced a copy: blocks learned "
        "from one rank's rows of the vocabulary.",
        check=f"TP 2 without sequence parallelism {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=partial(input_gradient_of_a_rank, loss),
    ),
    "router-detached": KnownBug(
        reports=("NVIDIA-NeMo/Automodel#2995",),
        kind=EXPERT,
        bug="Router weights were gathered by a collective without a gradient, so routers learned from the balancing "
        "losses only.",
        check=f"EP 2 {LIKE_ONE}",
        detector=DETECTORS["moe-ep2"],
        plant=router_detached_from_the_loss,
    ),
    "experts-scaled": KnownBug(
        reports=("deepspeedai/DeepSpeed#6545", "deepspeedai/DeepSpeed#5618", "NVIDIA/Megatron-LM#5956"),
        kind=EXPERT,
        bug="Gradients of experts were EP times too large: they sum the tokens of all ranks, but were divided by the "
        "ranks that hold the same experts.",
        check=f"EP 2 {LIKE_ONE}",
        detector=DETECTORS["moe-ep2"],
        plant=experts_scaled_by_their_ranks,
    ),
    "expert-tensor-parallel": KnownBug(
        reports=("NVIDIA/Megatron-LM#1628", "NVIDIA/Megatron-LM#5916"),
        kind=EXPERT,
        bug="With expert TP and no EP, gradients of experts were summed over the data-parallel ranks of dense "
        "parameters, which hold other columns.",
        check=f"expert TP 2 on two replicas of the dense layers {LIKE_ONE}",
        detector=training(MOE_ETP2),
        plant=faults_of_shares.experts_summed_over_all_replicas,
    ),
    "replicated-weights-in-the-norm": KnownBug(
        reports=("ROCm/TransformerEngine#715",),
        kind=NORM,
        bug="Weights that all tensor-parallel ranks hold were marked as sharded, so the norm counted them TP times: "
        "1.52 times too large with TP 8.",
        check=f"TP 2 {LIKE_ONE}",
        detector=DETECTORS["tp2"],
        plant=faults.replicas_counted_in_the_norm,
    ),
    "sinks-in-the-norm": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 8)", "NVIDIA/Megatron-LM#7530"),
        kind=NORM,
        bug="Attention sinks are sharded by heads but were not marked so: the clipping norm missed all but the first "
        "rank's.",
        check=f"learnable sinks with TP 2 {LIKE_ONE}",
        detector=training(SINKS_TP2),
        plant=sinks_of_other_ranks_not_counted,
    ),
    "experts-in-the-norm": KnownBug(
        reports=("NVIDIA/Megatron-LM#5916",),
        kind=NORM,
        bug="With EP and TP the clipping norm missed the experts of all but the first tensor-parallel rank.",
        check=f"EP 2 and TP 2 over the same two ranks {LIKE_ONE}",
        detector=training(MOE_EP2_TP2),
        plant=experts_of_other_ranks_not_counted,
    ),
    "tied-weight-shards": KnownBug(
        reports=("NVIDIA/Megatron-LM#844",),
        kind=PIPELINE,
        bug="First and last stage shard their gradient buffers differently; the sum over both stages of the tied "
        "embedding added different elements.",
        check=f"PP 2 with a tied embedding and ZeRO-2 on two replicas {LIKE_ONE}",
        detector=training(PP2_TIED_SHARDS),
        plant=other_elements_of_a_tied_weight,
    ),
    "tied-weight-lost": KnownBug(
        reports=("NVIDIA/Megatron-LM#1548", "uw-syfi/piper#13"),
        kind=PIPELINE,
        bug="The embedding lost the gradient of its use as output layer.",
        check=f"PP 2 with a tied embedding {LIKE_ONE}",
        detector=training(PP2_TIED),
        plant=faults.tied_weight_not_summed,
    ),
    "embedding-of-further-predictions": KnownBug(
        reports=("NVIDIA-NeMo/Megatron-Bridge#5380",),
        kind=PIPELINE,
        bug="Multi-token prediction on a later stage has a copy of the embedding, which was in no group: it drifted "
        "from the first stage's, until a resume made both equal.",
        check=f"PP 2 with multi-token prediction and untied output weights {LIKE_ONE}",
        detector=training(PP2_MTP),
        plant=faults.tied_weight_not_summed,
    ),
    "last-microbatch-only": KnownBug(
        reports=("NVIDIA-NeMo/Automodel#3530",),
        kind=ACCUMULATION,
        bug="Stages were set up anew between micro-batches, which dropped the gradients so far: only the last "
        "micro-batch trained the model.",
        check=f"PP 2 with four micro-batches {LIKE_ONE}",
        detector=training(PP2_TIED),
        plant=only_the_last_microbatch,
    ),
    "gradient-shards-overwritten": KnownBug(
        reports=("ServiceNow/Fast-LLM#551",),
        kind=ACCUMULATION,
        bug="With sharded gradients, the reduced shard of each micro-batch overwrote the sum of those before.",
        check=f"ZeRO-2 on two replicas with two micro-batches each {LIKE_ONE}",
        detector=DETECTORS["zero2"],
        plant=shards_overwritten,
    ),
}
