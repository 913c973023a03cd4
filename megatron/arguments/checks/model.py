"""Checks of the model's shape, and of its parallel layout: mesh axes, pipeline schedule and stages, experts, and ZeRO.

Tensor and sequence parallelism are checked against the model and the number of ranks; pipeline parallelism
against its layers and every batch of the run; ZeRO against the data-parallel ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.arguments.checks.training import batch_multiple
from megatron.config.attention_pattern import AttentionPattern, format_layers, parse_layers, split_layers
from megatron.config.batch import batch_size_stages, get_num_microbatches
from megatron.config.errors import Problem
from megatron.config.launch import Launch
from megatron.config.model import no_rope_layers
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import (
    divisors,
    flag,
    flag_fixes,
    format_bytes,
    multiples_as_fixes,
    nearest,
    nearest_multiples,
)
from megatron.distributed.layout import Layout
from megatron.layers.mixers.registry import find_mixer
from megatron.layers.parameters import block_of_any_kind, gpt
from megatron.pipeline import plan
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.partition import AUTO, parse_layout
from megatron.planner.memory import bucket_shapes, data_parallel_traffic

MAX_ELEMENTS = 2**48
"""Elements of a tensor: more than those of all tensors of the largest published models."""


def check_head_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Without ``kv_channels``, check that the heads divide the hidden size."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is None and hidden % heads:
        fixes = (
            *flag_fixes("--num-attention-heads", nearest(heads, divisors(hidden))),
            *multiples_as_fixes("--hidden-size", hidden, heads),
            f"--kv-channels {max(1, hidden // heads)}",
        )
        yield Problem("E101", f"hidden size {hidden} does not divide into {heads} heads", fixes)


def check_query_groups(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every key/value head serves the same number of query heads."""
    heads, groups = config.model.num_attention_heads, config.model.kv_groups
    if heads % groups:
        fixes = flag_fixes("--num-query-groups", nearest(groups, divisors(heads)))
        yield Problem("E102", f"{heads} query heads cannot share {groups} key/value heads evenly", fixes)


def check_mlp_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the MLP has a width: the default of a gated MLP is rounded down to a multiple of 64."""
    hidden = config.model.hidden_size
    if config.model.ffn < 1:
        sentence = (
            f"hidden size {hidden} with {config.model.activation}: the MLP's width, 8/3 of it rounded down to 64s, is 0"
        )
        yield Problem("E103", sentence, (f"--ffn-hidden-size {4 * hidden}", "--hidden-size 24"))


def check_vocab_size(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the size of the vocabulary is given or known from a tokenizer."""
    data = config.data
    if config.model.vocab_size is not None:
        return
    if data.tokenizer_type == "NullTokenizer":
        yield Problem("E104", "NullTokenizer does not know the size of the vocabulary", ("--vocab-size 50257",))
    elif data.mock_data and data.tokenizer_type is None:
        fixes = ("--vocab-size 50257", "--tokenizer-type ByteTokenizer")
        yield Problem("E104", "the size of the vocabulary is unknown: generated tokens have no tokenizer", fixes)


def check_positions(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the sequence length is at most the number of positions."""
    limit, length = config.model.max_position_embeddings, config.training.seq_length
    if limit is not None and length > limit:
        fixes = (f"--seq-length {limit}", f"--max-position-embeddings {length}")
        yield Problem("E105", f"samples of {length} tokens exceed the model's {limit} positions", fixes)


def check_rotary_channels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that an even number of channels is rotated."""
    model = config.model
    if model.position_embedding_type not in ("rope", "yarn"):
        return
    rotated, channels = model.rotary_dim, model.head_dim
    if rotated < 2 or rotated % 2:
        whole = (f"--kv-channels {channels + 1}",) if channels % 2 else ()
        even = nearest(rotated, range(2, channels + 1, 2))
        shares = (math.ceil(10_000 * n / channels) / 10_000 for n in even)  # up: the number of channels is rounded down
        sentence = f"{rotated} of {channels} channels per head would be rotated; the number must be even"
        yield Problem("E106", sentence, (*whole, *(f"--rotary-percent {share:g}" for share in shares)))


def check_rope_scaling(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the bounds of RoPE frequency scaling and the options of YaRN."""
    model = config.model
    if model.use_rope_scaling and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        bounds = f"--rope-high-freq-factor {model.rope_high_freq_factor:g}"
        sentence = f"--rope-low-freq-factor {model.rope_low_freq_factor:g} is not below {bounds}"
        yield Problem("E107", sentence, ("--rope-low-freq-factor 1 --rope-high-freq-factor 4",))
    if model.use_rope_scaling and model.rotary_seq_len_interpolation_factor != 1.0:
        sentence = "--use-rope-scaling and --rotary-seq-len-interpolation-factor both stretch the rotary frequencies"
        yield Problem("E107", sentence, ("drop --use-rope-scaling", "drop --rotary-seq-len-interpolation-factor"))
    if model.position_embedding_type != "yarn":
        return
    if model.yarn_original_max_position_embeddings is None:
        fixes = (f"--yarn-original-max-position-embeddings {config.training.seq_length}",)
        yield Problem("E107", "yarn needs the context length of the model before its extension", fixes)
    if model.yarn_beta_slow >= model.yarn_beta_fast:
        sentence = f"--yarn-beta-slow {model.yarn_beta_slow:g} is not below --yarn-beta-fast {model.yarn_beta_fast:g}"
        yield Problem("E107", sentence, ("--yarn-beta-slow 1 --yarn-beta-fast 32",))


def check_attention_pattern(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that attention is given once, that layers have all its patterns, and that labels are left to predict."""
    model, length = config.model, config.training.seq_length
    if model.attention_pattern is None:
        return
    count, prefix = len(parse_layers(model.attention_pattern)), model.attention_prefix
    if model.window_size is not None:
        sentence = f"--window-size {model.window_size} and --attention-pattern both set what a token attends to"
        yield Problem("E109", sentence, ("drop --window-size", "drop --attention-pattern"))
    if count > model.num_layers:
        sentence = f"--attention-pattern has patterns for {count} layers, and the model has {model.num_layers}"
        shorter = format_layers(split_layers(model.attention_pattern)[: model.num_layers])
        yield Problem("E109", sentence, (SETTINGS["attention_pattern"].spell(shorter), f"--num-layers {count}"))
    if prefix >= length:
        shorter = re.sub(
            r"prefix:(\d+)",
            lambda found: found[0] if int(found[1]) < length else f"prefix:{length // 2 or 1}",
            model.attention_pattern,
        )
        sentence = f"--attention-pattern prefix:{prefix} leaves no label of a sample of {length} tokens to predict"
        longer, limit = f"--seq-length {2 * prefix}", model.max_position_embeddings
        if limit is not None and limit < 2 * prefix:
            longer += f" --max-position-embeddings {2 * prefix}"
        yield Problem("E109", sentence, (SETTINGS["attention_pattern"].spell(shorter), longer))


def check_qk_layernorm(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that norms over the queries and keys of all heads are RMSNorms."""
    model = config.model
    if model.qk_layernorm and model.qk_layernorm_scope == "all" and model.normalization != "RMSNorm":
        sentence = f"--qk-layernorm-scope all divides by an RMS, which --normalization {model.normalization} does not"
        yield Problem("E110", sentence, ("--qk-layernorm-scope head", "--normalization RMSNorm"))


def check_no_rope_freq(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that a list of layers without RoPE has at most as many entries as the model has layers."""
    model = config.model
    if model.no_rope_freq is None or (entries := len(no_rope_layers(model.no_rope_freq))) <= model.num_layers:
        return
    sentence = f"--no-rope-freq {model.no_rope_freq} is for {entries} layers, and the model has {model.num_layers}"
    yield Problem("E111", sentence, ("drop --no-rope-freq", f"--num-layers {entries}"))


def check_mixers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the mixers of the layers are right with distributed sequences and with several documents in one."""
    asked = {
        "context parallelism": ("--context-parallel-size 1", config.parallel.context_parallel_size > 1),
        "documents": ("--no-reset-attention-mask", config.data.reset_attention_mask),
    }
    for name in dict.fromkeys(name for mixers in config.model.kinds_of_layers for name in mixers):
        for feature, (fix, is_asked) in asked.items():
            if is_asked and feature not in find_mixer(name).supports:
                yield Problem("E115", f"--token-mixers {name} does not support {feature}", (fix,))


def attention_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about windows that hide nothing, and about patterns that end in the middle."""
    model, length = config.model, config.training.seq_length
    if model.window_size is not None and model.window_size >= length:
        yield f"--window-size {model.window_size} has no effect: samples have {length} tokens"
    if model.attention_pattern is None:
        return
    for text in dict.fromkeys(part.partition("*")[0].strip() for part in model.attention_pattern.split(",")):
        pattern = AttentionPattern.parse(text)
        limits = [limit for limit in (pattern.window, pattern.chunk) if limit is not None]
        if limits and min(limits) >= length and pattern.dilation == 1:
            yield f"--attention-pattern {text} hides nothing: samples have {length} tokens"
    count = len(parse_layers(model.attention_pattern))
    if model.num_layers % count:
        yield f"--attention-pattern: {count} patterns do not divide {model.num_layers} layers; the last repeat is cut"


def check_tensor_sizes(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the elements of every tensor, vocabulary padding included, can be counted and addressed."""
    model = replace(config.model, vocab_size=config.model.vocab_size or 1)
    shapes = {name: spec.local_shape for name, spec in (gpt(model, layers=()) | block_of_any_kind(model)).items()}
    name = max(shapes, key=lambda each: math.prod(shapes[each]))
    if math.prod(shapes[name]) > MAX_ELEMENTS:
        sentence = f"{name} would be of shape {list(shapes[name])}; a tensor has at most {MAX_ELEMENTS:,} elements"
        yield Problem("E108", sentence)


def check_world_size(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the ranks of one model divide the world size."""
    parallel = config.parallel
    if world_size % parallel.model_ranks == 0:
        return
    name = "TP" if parallel.model_ranks == parallel.tensor_model_parallel_size else "TP x PP"
    name += " x CP" if parallel.context_parallel_size > 1 else ""
    ranks = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
    smaller: list[str] = []
    for axis in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = getattr(parallel, axis)
        others = parallel.model_ranks // size
        fit = [n for n in divisors(size) if n < size and world_size % (n * others) == 0]
        smaller += flag_fixes(flag(axis), fit[-1:])
    enough = max(nearest_multiples(world_size, parallel.model_ranks))
    start = f"torchrun --nproc-per-node {enough}" if enough <= 8 else f"start {enough} ranks"
    yield Problem("E202", f"{ranks} not a multiple of {name} = {parallel.model_ranks}", (*smaller, start))


def suggest_nodes(problem: Problem, config: RunConfig, world_size: int, launch: Launch) -> Problem:
    """Rephrase E202 as a number of nodes for a job started by torchrun; return other problems unchanged.

    After the loss of a node, the remaining ranks may not hold whole models, and the fix is a number of nodes.
    """
    each = launch.local_size
    by_nodes = launch.launcher == "torchrun" and launch.world_size == world_size and each > 1 and not world_size % each
    if problem.code != "E202" or not by_nodes:
        return problem
    unit = config.parallel.model_ranks // math.gcd(config.parallel.model_ranks, each)
    if unit == 1:
        return problem
    nodes = world_size // each
    counted = "1 node" if nodes == 1 else f"{nodes} nodes"
    enough = (f"torchrun --nnodes {n}" for n in nearest_multiples(nodes, unit))
    sentence = f"{problem.sentence}: {counted} of {each}, and whole models need a multiple of {unit}"
    return Problem("E202", sentence, (*enough, *(fix for fix in problem.fixes if fix.startswith("--"))))


def check_heads_divide(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the query heads, and that key/value heads and TP divide one another."""
    heads, groups = config.model.num_attention_heads, config.model.kv_groups
    tp = config.parallel.tensor_model_parallel_size
    if heads % tp:
        fit = [n for n in divisors(heads) if world_size % n == 0]
        sizes = flag_fixes("--tensor-model-parallel-size", nearest(tp, fit))
        fixes = sizes + multiples_as_fixes("--num-attention-heads", heads, tp)
        yield Problem("E203", f"{heads} heads do not divide over TP {tp}", fixes)
    elif groups % tp and tp % groups:
        fit = [n for n in divisors(heads) if n % tp == 0 or tp % n == 0]
        sentence = f"{groups} key/value heads and TP {tp}: neither is a multiple of the other"
        yield Problem("E203", sentence, flag_fixes("--num-query-groups", nearest(groups, fit)))


def check_mlp_divides(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the width of the MLP, or of the shared expert that replaces it."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    option, module, width = "--ffn-hidden-size", "an MLP", model.ffn
    if model.num_experts is not None:
        option, module = "--moe-shared-expert-intermediate-size", "a shared expert"
        width = model.moe_shared_expert_intermediate_size or 0
    if width % tp:
        sentence = f"{module} of width {width} does not divide over TP {tp}"
        yield Problem("E204", sentence, multiples_as_fixes(option, width, tp))


def check_sequence_parallel(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the sequence length, or a context-parallel rank's part, under sequence parallelism."""
    parallel, length = config.parallel, config.training.seq_length
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.sequence_parallel and length % (tp * cp):
        over = f"TP {tp}" if cp == 1 else f"TP {tp} x CP {cp}"
        sentence = f"sequence parallelism: samples of {length} tokens do not divide over {over}"
        fixes = (*multiples_as_fixes("--seq-length", length, parallel.sequence_multiple), "--no-sequence-parallel")
        yield Problem("E205", sentence, fixes)


def check_backend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that NCCL is used only on GPUs."""
    if config.parallel.distributed_backend == "nccl" and config.training.device == "cpu":
        yield Problem("E206", "the nccl backend cannot serve CPUs", ("--distributed-backend gloo", "--device cuda"))


def check_expert_layout(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that experts divide over EP, each of them over expert TP, and EP x expert TP divides a pipeline stage."""
    parallel, model = config.parallel, config.model
    ep = parallel.expert_model_parallel_size
    if model.num_experts is None:
        if ep > 1:
            enough = f"--num-experts {4 * ep}"
            sentence = f"expert parallelism of {ep} needs experts"
            yield Problem("E213", sentence, (enough, "--expert-model-parallel-size 1"))
        return
    tp = parallel.expert_tp
    ranks = world_size // parallel.pipeline_model_parallel_size
    fit = [n for n in divisors(model.num_experts) if ranks % (n * tp) == 0]
    smaller = flag_fixes("--expert-model-parallel-size", nearest(ep, fit))
    if model.num_experts % ep:
        fixes = multiples_as_fixes("--num-experts", model.num_experts, ep) + smaller
        yield Problem("E213", f"{model.num_experts} experts do not divide over EP {ep}", fixes)
    if model.expert_ffn % tp:
        sentence = f"experts of width {model.expert_ffn} do not divide over TP {tp}"
        yield Problem("E213", sentence, multiples_as_fixes("--moe-ffn-hidden-size", model.expert_ffn, tp))
    if model.add_bias_linear and model.hidden_size % tp:
        sentence = f"biases of experts of hidden size {model.hidden_size} do not divide over TP {tp}"
        fixes = (*multiples_as_fixes("--hidden-size", model.hidden_size, tp), "--disable-bias-linear")
        yield Problem("E213", sentence, fixes)
    if world_size % parallel.model_ranks == 0 and ranks % (ep * tp):
        sentence = f"EP {ep} x expert TP {tp} does not divide the {ranks} ranks of a pipeline stage"
        yield Problem("E213", sentence, smaller)


def check_expert_options(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject options that experts do not support."""
    parallel, model = config.parallel, config.model
    if model.num_experts is None:
        return
    if model.moe_router_topk > model.num_experts:
        sentence = f"--moe-router-topk {model.moe_router_topk} exceeds the {model.num_experts} experts"
        yield Problem("E214", sentence, (f"--moe-router-topk {model.num_experts}",))
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        sentence = f"experts with TP {parallel.tensor_model_parallel_size} need sequence parallelism"
        yield Problem("E214", sentence, ("--sequence-parallel", "--tensor-model-parallel-size 1"))


def check_graph_experts(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing a step with experts: the host reads how many tokens each expert gets."""
    if config.model.num_experts is not None and config.compute.cuda_graph == "step":
        sentence = "--cuda-graph step does not support experts: their numbers of tokens differ in every step"
        yield Problem("E214", sentence, ("--cuda-graph none",))


def expert_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about losses that depend on the layout, unbalanced experts, and routers without a gradient."""
    model = config.model
    if model.num_experts is None:
        return
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        yield "--moe-router-topk 1: every weight is 1, so the router gets no gradient (use --moe-router-pre-softmax)"
    missing = [] if model.moe_aux_loss_coeff > 0 else ["--moe-aux-loss-coeff 0.01"]
    if model.moe_router_load_balancing_type == "none":
        missing.append("--moe-router-load-balancing-type seq_aux_loss")
    if missing:
        yield f"no balancing loss ({' '.join(missing)}): a few experts may get all tokens"
    elif model.moe_router_load_balancing_type == "aux_loss":
        yield "--moe-router-load-balancing-type aux_loss: the loss depends on the micro-batches, and so on the layout"


SHARDED = "--use-distributed-optimizer"
MAX_PADDING = 0.25
"""Padding of a bucket, relative to its parameters, above which a note is printed."""


def check_strategy(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the sharding options agree, and that options of sharded state are used only with it."""
    parallel = config.parallel
    if parallel.use_distributed_optimizer and parallel.data_parallel_sharding_strategy == "no_shard":
        fixes = ("drop --use-distributed-optimizer", "--data-parallel-sharding-strategy optim")
        yield Problem("E215", "--use-distributed-optimizer and no_shard contradict each other", fixes)
    if parallel.zero_stage:
        return
    if parallel.overlap_param_gather:
        sentence = "--overlap-param-gather needs a sharded optimizer: without one, no weights are gathered"
        yield Problem("E215", sentence, (SHARDED, "--no-overlap-param-gather"))
    if parallel.num_distributed_optimizer_instances > 1:
        sentence = f"{parallel.num_distributed_optimizer_instances} optimizer instances need a sharded optimizer"
        yield Problem("E215", sentence, (SHARDED, "--num-distributed-optimizer-instances 1"))


def _replica_axes(parallel: ParallelConfig) -> str:
    return "DP" if parallel.context_parallel_size == 1 else "DP x CP"


def check_instances(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the optimizer instances divide the data-parallel ranks, and the ranks with the same experts."""
    parallel = config.parallel
    count = parallel.num_distributed_optimizer_instances
    if not parallel.zero_stage or world_size % parallel.model_ranks:
        return
    replicas = parallel.weight_replicas(world_size)
    sizes = {_replica_axes(parallel): replicas}
    experts = parallel.expert_model_parallel_size * parallel.expert_tp * parallel.pipeline_model_parallel_size
    if config.model.num_experts is not None and world_size % experts == 0:
        sizes["expert DP"] = world_size // experts
    for name, size in sizes.items():
        if size % count:
            sentence = f"{count} optimizer instances do not divide {name} = {size}"
            fit = [n for n in divisors(size) if all(other % n == 0 for other in sizes.values())]
            fit = [n for n in fit if n < replicas] or fit  # one rank per instance would shard nothing
            yield Problem("E215", sentence, flag_fixes("--num-distributed-optimizer-instances", nearest(count, fit)))


def check_stages(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the schedule exists, the options agree on the stages, and every stage has layers."""
    model, parallel = config.model, config.parallel
    layout = parallel.pipeline_model_parallel_layout
    problem = _schedule_problem("E208", plan.required_virtual_stages, parallel)
    if layout not in (None, plan.AUTO):
        problem = problem or _schedule_problem("E210", parse_layout, layout, model.num_layers)
    problem = problem or _schedule_problem("E209", plan.virtual_stages, model, parallel)
    if problem:
        yield problem
        return
    known = plan.resolve_pipeline(model, parallel)
    if known.pipeline_schedule != plan.DEFAULT_VIRTUAL_SCHEDULE:  # reported as an unused option
        known = replace(known, microbatch_group_size_per_virtual_pipeline_stage=None)
    problem = _schedule_problem("E210", plan.stage_layers, model, known)
    if problem is None:
        problem = _schedule_problem("E208", plan.peak_counts, known, plan.nearest_num_microbatches(known, 1))
        if problem and str(known.pipeline_schedule).endswith(plan.SCHEDULE_SUFFIX):
            problem = replace(problem, sentence=f"{known.pipeline_schedule}: {problem.sentence}")
    if problem:
        yield problem


def check_batches(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the schedule can run every batch of the run, including those of a ramp."""
    try:
        parallel = plan.resolve_pipeline(config.model, config.parallel)
        plan.stage_layers(config.model, parallel)
        plan.peak_counts(parallel, plan.nearest_num_microbatches(parallel, 1))
    except ScheduleError:  # reported by check_stages
        return
    if world_size % parallel.model_ranks:
        return
    training = config.training
    unit = batch_multiple(config, world_size)
    ranks = parallel.data_parallel_size(world_size)
    ramp = batch_size_stages(training, ranks)
    for sample, size in ramp:
        count = get_num_microbatches(training, ranks, size)
        if not count or (size % unit and not training.pad_global_batch):  # reported by the batch checks
            continue
        full = sample == ramp[-1][0]
        problem = _schedule_problem("E211", plan.peak_counts, parallel, count)
        if problem is None and full and training.eval_iters:
            problem = _schedule_problem("E211", plan.build_program, parallel, count, True)
        if problem:
            batch = f"global batch {size}" + (f" from sample {sample:,} on" if len(ramp) > 1 else "")
            near = (f"--global-batch-size {plan.nearest_num_microbatches(parallel, count) * unit}",) if full else ()
            fixes = (*near, "drop --rampup-batch-size") if len(ramp) > 1 else near
            yield replace(problem, sentence=f"{batch}: {problem.sentence}", fixes=fixes)
            return


def _schedule_problem(code: str, function: Callable[..., object], *arguments: object) -> Problem | None:
    try:
        function(*arguments)
    except ScheduleError as error:
        return Problem(code, error.sentence, error.fixes)
    return None


STAGE_OPTIONS = (
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
"""Options that set several stages per rank or a schedule."""

MIN_BUBBLE_GAIN = 0.03
"""Smallest gain of the layout by cost, as a fraction of the ranks' time, that is worth a note."""


def pipeline_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about uneven or costly stages and about schedules without a benefit."""
    model = config.model
    parallel = plan.resolve_pipeline(model, config.parallel)
    chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    name = parallel.pipeline_schedule
    ranks = parallel.pipeline_model_parallel_size
    if plan.is_split_by_cost(model, parallel) and parallel.pipeline_model_parallel_layout is None:
        sentence = f"{model.num_layers} layers do not divide over {ranks * chunks} stages"
        yield f"{sentence}: they are distributed by cost, as with {AUTO}"
    if ranks > 1 and name == plan.DEFAULT_VIRTUAL_SCHEDULE and chunks == 1:
        yield "--pipeline-schedule interleaved with VPP 1 has the same bubble as 1f1b and keeps more activations"
    if ranks == 1 and (chunks > 1 or name != plan.DEFAULT_SCHEDULE):
        given = (SETTINGS[name] for name in STAGE_OPTIONS)
        flags = [setting.spell(value) for setting in given if (value := setting.value_in(config)) is not None]
        yield f"{' with '.join(flags)} has no effect with --pipeline-model-parallel-size 1"
    if ranks > 1 and model.vocab_size is not None:
        yield from _unbalanced_note(config, parallel, world_size)


def _unbalanced_note(config: RunConfig, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the layout by cost has a much smaller bubble than equal numbers of layers."""
    model = config.model
    if plan.is_split_by_cost(model, parallel) or any(
        getattr(parallel, name) for group in plan.LAYER_SPLIT_OPTIONS for name in group
    ):
        return
    by_cost = plan.stage_layers(model, replace(parallel, pipeline_model_parallel_layout=plan.AUTO))
    equal = plan.stage_costs(model, plan.stage_layers(model, parallel))
    count = get_num_microbatches(config.training, parallel.data_parallel_size(world_size))
    before = plan.simulated_bubble(parallel, count, equal)
    after = plan.simulated_bubble(parallel, count, plan.stage_costs(model, by_cost))
    if before - after > MIN_BUBBLE_GAIN:
        yield f"{AUTO} reduces the bubble from {before:.1%} to {after:.1%}"


NODE_GPUS = 8
"""GPUs of a node that notes assume."""


def sharding_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about bf16 gradient reduction and ZeRO sharding."""
    if config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16: gradients are rounded before the reduction, so the numbers depend on the layout"
    replicas = config.parallel.weight_replicas(world_size)
    on_a_node = NODE_GPUS // config.parallel.tensor_model_parallel_size
    if config.parallel.grad_reduce_in_bf16 and config.training.device != "cpu" and 1 < on_a_node < replicas:
        yield (
            f"--grad-reduce-in-bf16: {on_a_node} of {replicas} data-parallel ranks share a node of {NODE_GPUS}; all of "
            "them send to all other nodes, while in a ring in fp32 only one does"
        )
    if config.parallel.zero_stage and replicas == config.parallel.num_distributed_optimizer_instances:
        axes = _replica_axes(config.parallel)
        yield f"{SHARDED} shards nothing here: each of {replicas} instances has one rank ({axes} {replicas})"
    if config.parallel.zero_stage >= 2 and config.model.vocab_size is not None:
        yield from _traffic_note(config, world_size)
    if config.parallel.zero_stage == 3 and config.parallel.overlap_param_gather:
        yield "--overlap-param-gather has no effect with optim_grads_params, which always overlaps (ZeRO-3)"
    if config.optimizer.optimizer != "muon" or config.parallel.zero_stage not in (1, 2):
        return
    if config.parallel.zero_stage == 2:
        yield (
            "--optimizer muon: buckets of whole matrices are large, and optim_grads keeps several of them at once; "
            "compare --data-parallel-sharding-strategy optim"
        )
    if config.model.vocab_size is not None and (waste := _padding(config, world_size)) > MAX_PADDING:
        yield (
            f"--optimizer muon: matrices are not sharded, so weight and gradient buffers are {1 + waste:.1f} times "
            "as large as their contents; more --num-distributed-optimizer-instances reduce the padding"
        )


def _traffic_note(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if communicating for every micro-batch separately sends more bytes."""
    parallel = config.parallel
    count = get_num_microbatches(config.training, parallel.data_parallel_size(world_size))
    others = {"optim": replace(parallel, data_parallel_sharding_strategy="optim")}
    if parallel.reshards_after_forward:
        others = {"--no-reshard-after-forward": replace(parallel, reshard_after_forward=False), **others}
    ours, *theirs = (
        sum(data_parallel_traffic(replace(config, parallel=p), world_size).values())
        for p in (parallel, *others.values())
    )
    if count > 1 and ours > theirs[-1]:
        what = "is reduced separately"
        if parallel.reshards_after_forward:
            what = "gathers the weights twice and is reduced separately"
        compared = " and ".join(f"with {name} {format_bytes(sent)}" for name, sent in zip(others, theirs))
        yield (
            f"{parallel.data_parallel_sharding_strategy}: each of {count} micro-batches {what}, so a rank sends "
            f"{format_bytes(ours)} in a step; {compared}"
        )


def _padding(config: RunConfig, world_size: int) -> float:
    """Return the padding of buckets of whole matrices, relative to their parameters; the largest of all stages."""
    layout = Layout.from_config(config.parallel, world_size)
    found = [0.0]
    for pp in range(layout.sizes["pp"]):
        uncut = [bucket for bucket in bucket_shapes(config, layout, pp) if bucket.key.uncut]
        held = sum(sum(bucket.sizes.values()) for bucket in uncut)
        if held:
            found.append(sum(bucket.packing.size for bucket in uncut) / held - 1)
    return max(found)
