"""Whether a mixture of experts can be built, and dealt out over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.numbers import beside, divisors, multiples_beside, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def there_are_some(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Expert parallelism deals out experts."""
    p, m = config.parallel, config.model
    if m.num_experts is not None:
        return
    if p.expert_model_parallel_size > 1:
        fixes = (f"--num-experts {4 * p.expert_model_parallel_size}", "--expert-model-parallel-size 1")
        yield Problem("E213", f"expert parallelism of {p.expert_model_parallel_size}, and there are no experts", fixes)
    if p.expert_tensor_parallel_size not in (None, p.tensor_model_parallel_size):
        sentence = f"expert tensor parallelism of {p.expert_tensor_parallel_size}, and there are no experts"
        yield Problem("E213", sentence, (f"--expert-tensor-parallel-size {p.tensor_model_parallel_size}",))


def dealt_out(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every rank of EP gets as many experts, TP cuts each evenly, and whole sets of experts fill all ranks."""
    p, m = config.parallel, config.model
    if m.num_experts is None:
        return
    ep, tp, ranks = p.expert_model_parallel_size, p.expert_tp, world_size // p.pipeline_model_parallel_size
    fit = [n for n in divisors(m.num_experts) if ranks % (n * tp) == 0]
    if m.num_experts % ep:
        fixes = (
            *offers("--num-experts", multiples_beside(m.num_experts, ep)),
            *offers("--expert-model-parallel-size", beside(ep, fit)),
        )
        yield Problem("E213", f"{m.num_experts} experts do not divide over EP {ep}", fixes)
    if m.expert_ffn % tp:
        fixes = offers("--moe-ffn-hidden-size", multiples_beside(m.expert_ffn, tp))
        yield Problem("E213", f"experts of width {m.expert_ffn} do not divide over TP {tp}", fixes)
    if world_size % p.model_ranks == 0 and ranks % (ep * tp):
        sentence = f"EP {ep} x expert TP {tp} does not divide the {ranks} ranks of a pipeline stage"
        yield Problem("E213", sentence, offers("--expert-model-parallel-size", beside(ep, fit)))


def built(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """What experts are not built with."""
    p, m = config.parallel, config.model
    if m.num_experts is None:
        return
    if m.moe_router_topk > m.num_experts:
        sentence = f"each token is to be computed by {m.moe_router_topk} of {m.num_experts} experts"
        yield Problem("E214", sentence, (f"--moe-router-topk {m.num_experts}",))
    if m.add_bias_linear:
        yield Problem(
            "E214", "experts have no biases", ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias")
        )
    if p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        sentence = f"with experts, the {p.tensor_model_parallel_size} ranks of TP each need tokens of their own"
        yield Problem("E214", sentence, ("--sequence-parallel", "--tensor-model-parallel-size 1"))
    if config.compute.cuda_graph == "step":
        sentence = "--cuda-graph step would repeat how many tokens went to each expert in one step"
        yield Problem("E214", sentence, ("--cuda-graph none",))


def remarks(config: RunConfig) -> Iterator[str]:
    """Lines on what makes the numbers depend on the layout, on idle experts, and on routers that cannot learn."""
    m = config.model
    if m.num_experts is None:
        return
    if m.moe_router_topk == 1 and not m.moe_router_pre_softmax:
        yield "one expert for each token, and its weight is 1: the loss teaches no router (--moe-router-pre-softmax)"
    missing = [] if m.moe_aux_loss_coeff > 0 else ["--moe-aux-loss-coeff 0.01"]
    missing += ["--moe-router-load-balancing-type seq_aux_loss"] if m.moe_router_load_balancing_type == "none" else []
    if missing:
        yield f"no balancing loss ({' '.join(missing)}): a few experts may end up with all tokens"
    elif m.moe_router_load_balancing_type == "aux_loss":
        yield "--moe-router-load-balancing-type aux_loss: the loss depends on the micro-batches, and so on the layout"


CHECKS = (there_are_some, dealt_out, built)
