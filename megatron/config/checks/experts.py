"""Checks of mixture-of-experts models: their shape, and how experts divide over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.numbers import beside, divisors, multiples_beside, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def check_experts_exist(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that expert parallelism is used only with experts."""
    parallel, model = config.parallel, config.model
    if model.num_experts is not None:
        return
    if parallel.expert_model_parallel_size > 1:
        fixes = (f"--num-experts {4 * parallel.expert_model_parallel_size}", "--expert-model-parallel-size 1")
        yield Problem("E213", f"expert parallelism of {parallel.expert_model_parallel_size} needs experts", fixes)
    if parallel.expert_tensor_parallel_size not in (None, parallel.tensor_model_parallel_size):
        sentence = f"expert tensor parallelism of {parallel.expert_tensor_parallel_size} needs experts"
        yield Problem("E213", sentence, (f"--expert-tensor-parallel-size {parallel.tensor_model_parallel_size}",))


def check_experts_divide(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that experts divide over EP, each of them over expert TP, and EP x expert TP divides a pipeline stage."""
    parallel, model = config.parallel, config.model
    if model.num_experts is None:
        return
    ep = parallel.expert_model_parallel_size
    tp = parallel.expert_tp
    ranks = world_size // parallel.pipeline_model_parallel_size
    fit = [n for n in divisors(model.num_experts) if ranks % (n * tp) == 0]
    if model.num_experts % ep:
        fixes = (
            *offers("--num-experts", multiples_beside(model.num_experts, ep)),
            *offers("--expert-model-parallel-size", beside(ep, fit)),
        )
        yield Problem("E213", f"{model.num_experts} experts do not divide over EP {ep}", fixes)
    if model.expert_ffn % tp:
        fixes = offers("--moe-ffn-hidden-size", multiples_beside(model.expert_ffn, tp))
        yield Problem("E213", f"experts of width {model.expert_ffn} do not divide over TP {tp}", fixes)
    if world_size % parallel.model_ranks == 0 and ranks % (ep * tp):
        sentence = f"EP {ep} x expert TP {tp} does not divide the {ranks} ranks of a pipeline stage"
        yield Problem("E213", sentence, offers("--expert-model-parallel-size", beside(ep, fit)))


def check_expert_options(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject options that experts do not support."""
    parallel, model = config.parallel, config.model
    if model.num_experts is None:
        return
    if model.moe_router_topk > model.num_experts:
        sentence = f"--moe-router-topk {model.moe_router_topk} exceeds the {model.num_experts} experts"
        yield Problem("E214", sentence, (f"--moe-router-topk {model.num_experts}",))
    if model.add_bias_linear:
        yield Problem(
            "E214", "experts do not support biases", ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias")
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        sentence = f"experts with TP {parallel.tensor_model_parallel_size} need sequence parallelism"
        yield Problem("E214", sentence, ("--sequence-parallel", "--tensor-model-parallel-size 1"))
    if config.compute.cuda_graph == "step":
        sentence = "--cuda-graph step does not support experts: their numbers of tokens differ in every step"
        yield Problem("E214", sentence, ("--cuda-graph none",))


def expert_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes about losses that depend on the layout, unbalanced experts, and routers without a gradient."""
    model = config.model
    if model.num_experts is None:
        return
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        yield "--moe-router-topk 1: every weight is 1, so the router gets no gradient (use --moe-router-pre-softmax)"
    missing = [] if model.moe_aux_loss_coeff > 0 else ["--moe-aux-loss-coeff 0.01"]
    missing += (
        ["--moe-router-load-balancing-type seq_aux_loss"] if model.moe_router_load_balancing_type == "none" else []
    )
    if missing:
        yield f"no balancing loss ({' '.join(missing)}): a few experts may get all tokens"
    elif model.moe_router_load_balancing_type == "aux_loss":
        yield "--moe-router-load-balancing-type aux_loss: the loss depends on the micro-batches, and so on the layout"


EXPERT_CHECKS = (check_experts_exist, check_experts_divide, check_expert_options)
