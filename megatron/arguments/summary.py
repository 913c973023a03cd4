"""The summary of a configuration, printed by ``--check-config`` and before the first step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.attention_pattern import parse_layers
from megatron.config.batch import (
    batch_size_stages,
    final_consumed_samples,
    final_iteration,
    full_global_batch_size,
    get_num_microbatches,
    lr_scale,
    padding_samples,
)
from megatron.config.conditions import group_methods
from megatron.config.latent_attention import LATENT_ATTENTION
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.text import counted, format_bytes
from megatron.distributed.sharding import padded_vocab_size
from megatron.layers.mixers.registry import find_mixer
from megatron.layers.parameters import num_parameters, num_trainable
from megatron.pipeline.partition import format_layout
from megatron.pipeline.plan import (
    is_split_by_cost,
    peak_counts,
    resolve_pipeline,
    simulated_bubble,
    stage_costs,
    stage_layers,
    virtual_stages,
)
from megatron.planner.memory import STATE_KINDS, checkpoint_bytes, max_host_bytes, max_peak_bytes, max_rank_parameters

if TYPE_CHECKING:
    from megatron.planner.hardware import Cluster

MAX_SYMBOLS = 40
"""Symbols of a layer pattern that are shown."""


def summary(
    config: RunConfig,
    world_size: int,
    iteration: int = 0,
    consumed_samples: int = 0,
    cluster: Cluster | None = None,
) -> str:
    """Return at most eighteen lines, from ranks and pipeline to precision and checkpoints.

    Args:
        config: resolved or not.
        world_size: number of ranks.
        iteration: steps taken before, possibly with other batch sizes.
        consumed_samples: samples used before.
        cluster: that it runs on, for a forecast of its time; None if it is not known.
    """
    memory, peak, host = _memory(config, world_size)
    rows = {
        "ranks": _ranks(config, world_size),
        "pipeline": _pipeline(config, world_size),
        "model": _model(config.model),
        "layers": _layers(config.model),
        "mixers": "" if len(mixers := describe_mixers(config.model)) == 1 else "; ".join(mixers),
        "attention": _attention(config.model),
        "parameters": _parameters(config),
        "memory": memory,
        "peak": peak,
        "host": host,
        **_training_rows(config, world_size, iteration, consumed_samples),
        "forecast": _forecast(config, world_size, cluster, iteration, consumed_samples),
        "saves": _saves(config, world_size),
    }
    shown = _with_rows_of_options(rows, config, world_size)
    return "\n".join(f"{name:<11}{row}" for name, row in shown.items() if row)


def training_rows(config: RunConfig, world_size: int) -> dict[str, str]:
    """Return the rows on batches, optimizer and precision, by name."""
    return _with_rows_of_options(_training_rows(config, world_size), config, world_size)


def _with_rows_of_options(rows: dict[str, str], config: RunConfig, world_size: int) -> dict[str, str]:
    """Return the rows with what classes of options add to them, and with rows of their own."""
    for row in group_methods(config, "row_"):
        name = row.__name__.removeprefix("row_")
        rows[name] = "; ".join(filter(None, (rows.get(name), row(config, world_size))))
    return rows


def _training_rows(config: RunConfig, world_size: int, *begin: int) -> dict[str, str]:
    """Return those rows without what classes of options add; ``begin``: steps and samples before."""
    return {
        "batch": _batch(config, world_size),
        "ramp": _ramp(config, world_size),
        "length": _length(config, world_size, *begin),
        "optimizer": _optimizer(config, world_size),
        "precision": _precision(config),
    }


def _ranks(config: RunConfig, world_size: int) -> str:
    parallel = config.parallel
    pp = parallel.pipeline_model_parallel_size
    tp = parallel.tensor_model_parallel_size
    chunks = virtual_stages(config.model, parallel)
    stages = f"pipeline, VPP {chunks}" if chunks > 1 else "pipeline"
    pipeline = f"PP {pp} ({stages}) x " if pp > 1 else ""
    sharing = "tensor and sequence parallel" if parallel.sequence_parallel and tp > 1 else "tensor parallel"
    dp = parallel.data_parallel_size(world_size)
    cp, groups = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    hierarchy = f" {' x '.join(map(str, groups))}" if parallel.cp_comm_type == "a2a+p2p" else ""
    context = f"CP {cp} ({parallel.cp_comm_type}{hierarchy}) x " if cp > 1 else ""
    held = "copies of the model" if parallel.zero_stage < 3 else "shards of the model"
    return f"{world_size} = {pipeline}DP {dp} ({held}) x {context}TP {tp} ({sharing})"


def _pipeline(config: RunConfig, world_size: int) -> str:
    """Return schedule, stages, bubble of the full batch (communication excluded), and activations kept."""
    model = config.model
    parallel = resolve_pipeline(model, config.parallel)
    length = config.training.seq_length
    stages, by_cost = stage_layers(model, parallel, length), is_split_by_cost(model, parallel, length)
    if len(stages) == 1:
        return ""
    sizes = {stage.count for stage in stages}
    if len(sizes) == 1:
        noun = "layer" if model.hybrid_layer_pattern is None else "block"
        layers = f"{len(stages)} stages of {counted(sizes.pop(), noun)}"
    elif model.vocab_size is None and by_cost:
        layers = f"{len(stages)} stages of equal cost; the cost of the output layer depends on the tokenizer"
    else:
        layers = f"{len(stages)} stages {format_layout(stages, model.prediction_depths)}{' by cost' * by_cost}"
    count = get_num_microbatches(config.training, parallel.data_parallel_size(world_size))
    same = f"{simulated_bubble(parallel, count):.1%}"
    bubble = f"bubble {same}"
    if model.vocab_size is None:
        bubble += " where stages cost the same"
    else:
        real = f"{simulated_bubble(parallel, count, stage_costs(model, stages, length)):.1%}"
        bubble += f" ({real} as these stages cost)" if real != same else ""
    kept = f"at most {max(peak_counts(parallel, count).both)} micro-batches of a stage kept"
    return f"{parallel.pipeline_schedule}, {layers}, {bubble}, {kept}"


def _model(model: ModelConfig) -> str:
    mixers = describe_mixers(model)
    parts = [f"{model.residual_layers if model.hybrid_layer_pattern else model.num_layers} layers"]
    parts += [f"hidden {model.hidden_size}", *(mixers if len(mixers) == 1 else ())]
    if model.hybrid_layer_pattern is None and model.repeated_token_mixers != type(model).token_mixers:
        parts.append(f"mixers {' '.join(model.repeated_token_mixers)} (repeated)")
    if model.dense_layers and model.num_experts is None:
        parts.append(f"{model.activation} MLP of {model.ffn}")
    return ", ".join([*parts, model.normalization, f"positions {model.position_embedding_type}"])


def _layers(model: ModelConfig) -> str:
    """Return the pattern of a hybrid model, shortened if it is long, and how often it has each mixer."""
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return ""
    counts = Counter(name for layer in range(model.num_layers) for name in model.mixers(layer))
    shown = pattern if len(pattern) <= MAX_SYMBOLS else f"{pattern[:MAX_SYMBOLS]}..."
    each = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{shown}: {each}, in {counted(model.num_layers, 'block')}"


def describe_mixers(model: ModelConfig) -> list[str]:
    """Return the sizes of the mixers of the tokens that state them, after their names unless all are attention."""
    names = dict.fromkeys(mixers[0] for mixers in model.kinds_of_layers)
    sizes = {name: text for name in names if (text := find_mixer(name).describe(model))}
    if {*sizes} <= {"attention", LATENT_ATTENTION}:
        return [*sizes.values()]
    return [f"{name}: {text}" for name, text in sizes.items()]


def _attention(model: ModelConfig) -> str:
    """Return the attention patterns of the layers, unless all layers see all earlier tokens."""
    text = model.attention_pattern
    if text is None:
        some = (
            model.window_attn_skip_freq and f" in the layers of --window-attn-skip-freq {model.window_attn_skip_freq}"
        )
        return "" if model.window_size is None else f"local:{model.window_size}{some or ''}"
    parts = [" x ".join(part.strip().split("*")) for part in text.split(",")]
    repeated = 1 < len(parse_layers(text)) < model.listed_layers
    return ", ".join(parts) + (" (repeated)" if repeated else "")


def _parameters(config: RunConfig) -> str:
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    if model.vocab_size is None:
        blocks = num_parameters(replace(model, vocab_size=0, max_position_embeddings=0))
        return f"{blocks:,} and the embeddings, whose size depends on the tokenizer"
    held = max_rank_parameters(config)
    padded = padded_vocab_size(model.vocab, model.make_vocab_size_divisible_by, tp)
    padding = f"; vocabulary {model.vocab:,}" + (f" padded to {padded:,}" if padded != model.vocab else "")
    active = "" if model.num_experts is None else f"{num_parameters(model, active=True):,} active per token, "
    trained = "" if model.lora_rank is None else f"{num_trainable(model):,} trained, "
    return f"{num_parameters(model):,} ({trained}{active}{held:,} on {_holder(config)}){padding}"


def _memory(config: RunConfig, world_size: int) -> tuple[str, str, str]:
    """Return the state of the rank that needs most, what a step adds at its peak, and what is offloaded."""
    if config.model.vocab_size is None:
        return "", "", ""
    parts = max_peak_bytes(config, world_size)
    shown = {name: f"{name} {format_bytes(held)}" for name, held in parts.items() if held >= 2**10}
    kept = ", ".join(text for name, text in shown.items() if name in STATE_KINDS)
    added = ", ".join(text for name, text in shown.items() if name not in STATE_KINDS)
    state = format_bytes(sum(parts[name] for name in STATE_KINDS))
    holder = "the fullest rank" if config.parallel.zero_stage else _holder(config)
    moved = max_host_bytes(config, world_size)
    offloaded = ", ".join(f"{name} {format_bytes(held)}" for name, held in moved.items() if held)
    host = f"{format_bytes(sum(moved.values()))} of host memory for {holder}: {offloaded}" if offloaded else ""
    peak = f"{format_bytes(sum(parts.values()))} in a step: {added} are added"
    return f"{state} on {holder}: {kept}", peak, host


def _holder(config: RunConfig) -> str:
    return "each rank" if config.parallel.pipeline_model_parallel_size == 1 else "the fullest rank"


def _batch(config: RunConfig, world_size: int) -> str:
    training = config.training
    dp = config.parallel.data_parallel_size(world_size)
    full = full_global_batch_size(training, dp)
    count = counted(get_num_microbatches(training, dp), "micro-batch")
    tokens = f"{full * training.seq_length:,} tokens"
    row = f"{full:,} samples x {training.seq_length} = {tokens} a step: "
    row += f"{count} of {training.micro_batch_size} on each DP rank"
    extra = padding_samples(training, dp, full)
    if extra:
        whole = full + extra
        row += f", {extra:,} of {whole:,} samples padding ({extra / whole:.1%} of the work)"
    return row


def _ramp(config: RunConfig, world_size: int) -> str:
    training = config.training
    dp = config.parallel.data_parallel_size(world_size)
    stages = batch_size_stages(training, dp)
    if len(stages) == 1:
        return ""
    shown = [f"{size} from sample {at:,}" for at, size in stages]
    if len(shown) > 4:
        shown[2:-1] = [f"... {len(shown) - 3} more ..."]
    most = max((size for _, size in stages), key=lambda size: padding_samples(training, dp, size) / size)
    extra = padding_samples(training, dp, most)
    return ", ".join(shown) + (f"; at most {extra / (most + extra):.1%} of the work is padding" if extra else "")


def _length(config: RunConfig, world_size: int, *begin: int) -> str:
    training = config.training
    dp = config.parallel.data_parallel_size(world_size)
    steps = final_iteration(training, dp, *begin)
    samples = final_consumed_samples(training, dp, *begin)
    row = f"{steps:,} steps, {samples:,} samples, {samples * training.seq_length:,} tokens"
    if training.eval_iters:
        interval = f"every {training.eval_interval} steps and at the end" if training.eval_interval else "at the end"
        row += f"; evaluation on {counted(training.eval_iters, 'batch')} {interval}"
    return row


def _optimizer(config: RunConfig, world_size: int) -> str:
    optimizer, parallel = config.optimizer, config.parallel
    shards = parallel.weight_replicas(world_size) // parallel.num_distributed_optimizer_instances
    sharing = f", ZeRO-{parallel.zero_stage} over {counted(shards, 'rank')}" if parallel.zero_stage else ""
    if parallel.zero_stage == 3:
        sharing += f" (weights {'freed after forward' if parallel.reshards_after_forward else 'kept within a step'})"
    dp = parallel.data_parallel_size(world_size)
    scale = lr_scale(config, dp)
    rate = f"{optimizer.lr:g}"
    if optimizer.lr_scaling != "none":
        batches = f"batch {full_global_batch_size(config.training, dp):,} over {optimizer.lr_base_batch_size:,}"
        rate += f" x {scale:g} ({optimizer.lr_scaling}, {batches}) = {optimizer.lr * scale:g}"
    row = f"{optimizer.optimizer}{sharing}, learning rate {rate} {optimizer.lr_decay_style}"
    if optimizer.lr_decay_style != "constant":
        row += f" to {optimizer.min_lr * scale:g}"
    if optimizer.lr_warmup_fraction:
        row += f", warm-up {100 * optimizer.lr_warmup_fraction:.3g}% of the decay"
    elif optimizer.lr_warmup_samples:
        row += f", warm-up {optimizer.lr_warmup_samples:,} samples"
    elif optimizer.lr_warmup_iters:
        row += f", warm-up {optimizer.lr_warmup_iters:,} steps"
    return f"{row}, clip {optimizer.clip_grad:g}"


def _precision(config: RunConfig) -> str:
    precision = config.precision
    row = precision.params_dtype
    if precision.fp8_format is not None:
        row += f", linears in FP8 ({precision.fp8_format}, {precision.fp8_recipe})"
    if precision.params_dtype in ("fp64", "fp32"):
        return row
    row += ", main parameters and gradients fp32"
    if precision.params_dtype == "fp16":
        row += f", loss scale {'dynamic' if precision.loss_scale is None else precision.loss_scale}"
    return row


def _forecast(config: RunConfig, world_size: int, cluster: Cluster | None, *begin: int) -> str:
    if cluster is None or config.model.vocab_size is None:
        return ""
    from megatron.arguments.planning import forecast  # the planner is loaded only where it is used

    try:
        return forecast(config, world_size, cluster, *begin)
    except Exception as error:  # a run does not depend on its forecast
        return f"none: {error!r}"


def _saves(config: RunConfig, world_size: int) -> str:
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return "none: --save is not set"
    size = f"{format_bytes(checkpoint_bytes(config, world_size))} each, " if config.model.vocab_size is not None else ""
    interval = f"every {counted(checkpoint.save_interval, 'step')} and " if checkpoint.save_interval else ""
    row = f"{interval}at the end, {size}to {checkpoint.save}"
    if checkpoint.keep_last is not None:
        row += f"; the last {checkpoint.keep_last:,} are kept" if checkpoint.keep_last > 1 else "; the last is kept"
        row += f", and those of every {checkpoint.keep_every:,} steps" if checkpoint.keep_every else ""
    if checkpoint.local_save is not None:
        steps = counted(checkpoint.local_save_interval or 1, "step")
        row += f"; on the nodes every {steps}, to {checkpoint.local_save}"
    return row
