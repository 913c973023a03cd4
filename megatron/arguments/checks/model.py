"""Checks of the model's shape, its positions, and its experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.errors import Problem, divisors, flag_fixes, nearest, nearest_multiples
from megatron.config.run import RunConfig


def check_head_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Without ``kv_channels``, check that the heads divide the hidden size."""
    model = config.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        heads = flag_fixes("--num-attention-heads", nearest(model.num_attention_heads, divisors(model.hidden_size)))
        sizes = flag_fixes("--hidden-size", nearest_multiples(model.hidden_size, model.num_attention_heads))
        width = f"--kv-channels {max(1, model.hidden_size // model.num_attention_heads)}"
        yield Problem(
            "E101",
            f"hidden size {model.hidden_size} does not divide into {model.num_attention_heads} heads",
            (*heads, *sizes, width),
        )


def check_query_groups(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every key/value head serves the same number of query heads."""
    model = config.model
    if model.num_attention_heads % model.kv_groups:
        yield Problem(
            "E102",
            f"{model.num_attention_heads} query heads cannot share {model.kv_groups} key/value heads evenly",
            flag_fixes("--num-query-groups", nearest(model.kv_groups, divisors(model.num_attention_heads))),
        )


def check_mlp_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the MLP has a width: the default of a gated MLP is rounded down to a multiple of 64."""
    model = config.model
    if model.ffn < 1:
        sentence = f"hidden size {model.hidden_size} with swiglu: the MLP's width, 8/3 of it rounded down to 64s, is 0"
        yield Problem("E103", sentence, (f"--ffn-hidden-size {4 * model.hidden_size}", "--hidden-size 24"))


def check_vocab_size(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the size of the vocabulary is given or known from a tokenizer."""
    model, data = config.model, config.data
    if model.vocab_size is not None:
        return
    if data.tokenizer_type == "NullTokenizer":
        yield Problem("E104", "NullTokenizer does not know the size of the vocabulary", ("--vocab-size 50257",))
    elif data.mock_data and data.tokenizer_type is None:
        fixes = ("--vocab-size 50257", "--tokenizer-type ByteTokenizer")
        yield Problem("E104", "the size of the vocabulary is unknown: generated tokens have no tokenizer", fixes)


def check_positions(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the sequence length is at most the number of positions."""
    limit = config.model.max_position_embeddings
    length = config.training.seq_length
    if limit is not None and length > limit:
        fixes = (f"--seq-length {limit}", f"--max-position-embeddings {length}")
        yield Problem("E105", f"samples of {length} tokens exceed the model's {limit} positions", fixes)


def check_rotary_channels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that an even number of channels is rotated."""
    model = config.model
    if model.position_embedding_type not in ("rope", "yarn"):
        return
    if model.rotary_dim < 2 or model.rotary_dim % 2:
        whole = (f"--kv-channels {model.head_dim + 1}",) if model.head_dim % 2 else ()
        # rounded up, because the number of channels is rounded down
        shares = (
            math.ceil(10_000 * n / model.head_dim) / 10_000
            for n in nearest(model.rotary_dim, range(2, model.head_dim + 1, 2))
        )
        sentence = f"{model.rotary_dim} of {model.head_dim} channels per head would be rotated; the number must be even"
        yield Problem("E106", sentence, (*whole, *(f"--rotary-percent {share:g}" for share in shares)))


def check_rope_scaling(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the bounds of RoPE frequency scaling and the options of YaRN."""
    model = config.model
    if model.use_rope_scaling and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        sentence = f"rope_low_freq_factor {model.rope_low_freq_factor:g} is not below rope_high_freq_factor"
        fixes = ("--rope-low-freq-factor 1 --rope-high-freq-factor 4",)
        yield Problem("E107", f"{sentence} {model.rope_high_freq_factor:g}", fixes)
    if model.position_embedding_type != "yarn":
        return
    if model.yarn_original_max_position_embeddings is None:
        fixes = (f"--yarn-original-max-position-embeddings {config.training.seq_length}",)
        yield Problem("E107", "yarn needs the context length of the model before its extension", fixes)
    if model.yarn_beta_slow >= model.yarn_beta_fast:
        sentence = f"yarn_beta_slow {model.yarn_beta_slow:g} is not below yarn_beta_fast {model.yarn_beta_fast:g}"
        yield Problem("E107", sentence, ("--yarn-beta-slow 1 --yarn-beta-fast 32",))


MODEL_CHECKS = (
    check_head_width,
    check_query_groups,
    check_mlp_width,
    check_vocab_size,
    check_positions,
    check_rotary_channels,
    check_rope_scaling,
)


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
            *flag_fixes("--num-experts", nearest_multiples(model.num_experts, ep)),
            *flag_fixes("--expert-model-parallel-size", nearest(ep, fit)),
        )
        yield Problem("E213", f"{model.num_experts} experts do not divide over EP {ep}", fixes)
    if model.expert_ffn % tp:
        fixes = flag_fixes("--moe-ffn-hidden-size", nearest_multiples(model.expert_ffn, tp))
        yield Problem("E213", f"experts of width {model.expert_ffn} do not divide over TP {tp}", fixes)
    if world_size % parallel.model_ranks == 0 and ranks % (ep * tp):
        sentence = f"EP {ep} x expert TP {tp} does not divide the {ranks} ranks of a pipeline stage"
        yield Problem("E213", sentence, flag_fixes("--expert-model-parallel-size", nearest(ep, fit)))


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
