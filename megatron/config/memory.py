"""What a rank holds for the whole run, in closed form. Activations come on top of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import MOMENTS, OptimizerConfig, RunConfig
from megatron.parallel.shard import padded_vocabulary
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import placement, stage_layers, virtual_stages

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Of a number in each format."""


def state_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes on the fullest rank, by part, the alignment of gradient buffers left out.

    fp32 and fp64 weights are their own masters.

    Raises:
        ValueError: while the vocabulary's size is not known.
    """
    elements = rank_parameters(config.model, config.parallel)
    narrow = BYTES[config.precision.params_dtype]
    wide = max(narrow, BYTES["fp32"])
    return {
        "weights": elements * narrow,
        "gradients": elements * wide,
        "masters": elements * wide if narrow < wide else 0,
        "moments": elements * _moments(config.optimizer, wide),
        "average": elements * wide if config.optimizer.ema_decay is not None else 0,
    }


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the tensors of a checkpoint: what is kept of every parameter in full, whatever the layout.

    Raises:
        ValueError: while the vocabulary's size is not known.
    """
    wide = max(BYTES[config.precision.params_dtype], BYTES["fp32"])
    weights = wide * (2 if config.optimizer.ema_decay is not None else 1)
    return config.model.num_parameters() * (weights + _moments(config.optimizer, wide))


def _moments(config: OptimizerConfig, wide: int) -> int:
    """Bytes of the moments of one element; ``wide`` is that of its master."""
    formats = (config.exp_avg_dtype, config.exp_avg_sq_dtype)[: MOMENTS[config.optimizer]]
    if config.optimizer == "sgd":  # whose momentum has no format of its own
        formats = ("fp32",)
    return sum(BYTES["bf16"] if name == "bf16" else wide for name in formats)


def rank_parameters(m: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements of the parameters on the fullest rank, vocabulary padding included.

    A tied weight is on the ranks of the first and of the last stage, once on either.

    Raises:
        ValueError: while the vocabulary's size is not known, or when the pipeline cannot share the blocks.
    """
    held: dict[int, list[StageLayers]] = defaultdict(list)
    ranks = placement(parallel, virtual_stages(m, parallel))
    for rank, stage in zip(ranks, stage_layers(m, parallel), strict=True):
        held[rank].append(stage)
    return max(_parameters_of(stages, m, parallel.tensor_model_parallel_size) for stages in held.values())


def _parameters_of(stages: Sequence[StageLayers], m: ModelConfig, tp: int) -> int:
    """Elements of some stages on the fullest of ``tp`` tensor-parallel ranks."""
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    tables = first + last if m.untie_embeddings_and_output_weights else int(first or last)
    count = tables * padded_vocabulary(m.vocab, m.make_vocab_size_divisible_by, tp) // tp * m.hidden_size
    if first and m.position_embedding_type == "learned_absolute":
        count += (m.max_position_embeddings or 0) * m.hidden_size
    layers = sum(stage.count for stage in stages)
    return count + layers * _rank_layer(m, tp) + (m.norm_parameters() if last else 0)


def _rank_layer(m: ModelConfig, tp: int) -> int:
    """One block's share: columns and rows are cut, norms and the biases of row-parallel linears are not."""
    h, d, bias = m.hidden_size, m.head_dim, int(m.add_bias_linear)
    queries, groups = m.num_attention_heads // tp, max(1, m.kv_groups // tp)
    attention = (queries + 2 * groups) * d * (h + int(m.qkv_bias)) + queries * d * h + bias * h
    if m.qk_layernorm:
        attention += 2 * d * (2 if m.normalization == "LayerNorm" else 1)
    width = m.ffn // tp
    mlp = width * (2 if m.gated else 1) * (h + bias) + width * h + bias * h
    return attention + mlp + 2 * m.norm_parameters()


def shown(count: float) -> str:
    """Bytes as people say them, in units of 2^20 or 2^30 as memory is sold: ``12.50 MB``, ``1.87 GB``."""
    unit, name = (2**30, "GB") if count >= 0.1 * 2**30 else (2**20, "MB")
    return f"{count / unit:,.2f} {name}"
