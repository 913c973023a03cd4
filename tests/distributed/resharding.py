"""Runs that are saved on one layout and go on on another, whatever is cut: layouts drawn at random, by a seed.

A layout is ranks, TP, SP, PP, stages, schedule, EP, expert TP, what data-parallel ranks cut among themselves and in how
many copies, the size of buckets, and what overlaps. Whatever breaks a rule of the configuration is drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.arguments.sources import resolve
from megatron.arguments.validate import find_problems
from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from tests.distributed.drive import MODEL, SEQ_LENGTH
from tests.distributed.resume import AFTER, BEFORE

MAX_RANKS = 8
MAX_MICROBATCHES = 4

DENSE: dict[str, Sequence[Any]] = {
    "num_layers": (4, 3, 2),
    "num_query_groups": (4, 2, 1),
    "vocab_size": (101, 128, 13),
    "untie_embeddings_and_output_weights": (False, True),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("rope", "learned_absolute"),
    "activation": ("gelu_tanh", "swiglu"),
    "add_bias_linear": (True, False),
}
EXPERTS: dict[str, Sequence[Any]] = {
    "add_bias_linear": (False,),
    "num_experts": (4,),
    "moe_router_topk": (2, 1),
    "moe_ffn_hidden_size": (24,),
    "moe_shared_expert_intermediate_size": (None, 16),
    "moe_aux_loss_coeff": (1e-2,),
}
OPTIMIZER: dict[str, Sequence[Any]] = {
    "optimizer": ("adam", "muon"),
    "exp_avg_dtype": ("fp32", "bf16"),
    "exp_avg_sq_dtype": ("fp32", "bf16"),
    "ema_decay": (None, 0.9),
}
LAYOUT: dict[str, Sequence[Any]] = {
    "tensor_model_parallel_size": (1, 2, 4),
    "sequence_parallel": (True, False),
    "pipeline_model_parallel_size": (1, 2, 4),
    "num_virtual_stages_per_pipeline_rank": (1, 2),
    "pipeline_schedule": ("1f1b", "interleaved", "zb-h1", "zb-v"),
    "expert_model_parallel_size": (1, 2, 4),
    "expert_tensor_parallel_size": (None, 1),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads"),
    "num_distributed_optimizer_instances": (1, 2),
    "overlap_param_gather": (False, True),
    "overlap_grad_reduce": (True, False),
    "ddp_bucket_size": (4000, 40_000_000),
}

Fixed = Mapping[str, Any]
ANY: Fixed = MappingProxyType({})


@dataclass(frozen=True)
class Reshard:
    """A run, and the layout on which it goes on: configurations, and how many ranks each has."""

    before: RunConfig
    after: RunConfig
    ranks: tuple[int, int]

    def __str__(self) -> str:
        return "->".join(label(config, n) for config, n in zip((self.before, self.after), self.ranks))

    @property
    def exact(self) -> bool:
        """Whether losses are those of the other layout to rounding of fp64, not of the weights' format."""
        return self.before.precision.params_dtype == "fp64"


def label(config: RunConfig, ranks: int) -> str:
    """A layout, for people."""
    p, o = config.parallel, config.optimizer
    sp = "sp" if p.sequence_parallel else ""
    words = [f"{ranks}ranks", f"tp{p.tensor_model_parallel_size}{sp}"]
    if p.pipeline_model_parallel_size > 1:
        words.append(f"pp{p.pipeline_model_parallel_size}-{p.pipeline_schedule}")
    if config.model.num_experts:
        words.append(f"ep{p.expert_model_parallel_size}")
    words.append(f"zero{p.zero_stage}" + ("hsdp" if p.num_distributed_optimizer_instances > 1 else ""))
    if o.optimizer != "adam":
        words.append(o.optimizer)
    return "-".join(words)


def draw(seed: int, ranks: Sequence[int] = (), model: Fixed = ANY, before: Fixed = ANY, after: Fixed = ANY) -> Reshard:
    """A random model and optimizer, and two random layouts of it.

    Args:
        seed: of everything.
        ranks: before and after; by default any from one to ``MAX_RANKS``.
        model: what is not left to chance, of the model, its optimizer and its precision.
        before: the same of the layout that saves.
        after: and of that which goes on.
    """
    chance = random.Random(seed)
    while True:
        sizes = tuple(ranks) or tuple(chance.randint(1, MAX_RANKS) for _ in range(2))
        run = _draw_run(chance, model)
        try:
            sides = [_draw_side(chance, run, n, fixed) for n, fixed in zip(sizes, (before, after))]
        except _HopelessError:
            continue
        batch = math.lcm(*(config.parallel.data_parallel_size(n) for config, n in zip(sides, sizes)))
        batch *= -(-4 // batch)  # at least four samples
        try:
            first, second = (_with_batch(chance, config, n, batch) for config, n in zip(sides, sizes))
        except _HopelessError:
            continue
        return Reshard(first, second, (sizes[0], sizes[1]))


class _HopelessError(Exception):
    """Nothing that was drawn fits together."""


def _draw_run(chance: random.Random, fixed: Fixed) -> RunConfig:
    experts = fixed.get("num_experts", chance.choice((None, 4)))
    factors = DENSE | (EXPERTS if experts else {})
    values = {name: chance.choice(choices) for name, choices in (factors | OPTIMIZER).items()}
    values = values | {"params_dtype": "fp64", "store_param_remainders": False} | dict(fixed)
    precision = PrecisionConfig(params_dtype=values.pop("params_dtype"))
    optimizer = {name: values.pop(name) for name in (*OPTIMIZER, "store_param_remainders")}
    if optimizer["optimizer"] == "muon":
        optimizer |= {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
    model = replace(MODEL, hidden_dropout=0.1, **values)
    training = TrainingConfig(seq_length=SEQ_LENGTH, train_iters=BEFORE + AFTER, device="cpu")
    rule = OptimizerConfig(lr=1e-2, lr_warmup_iters=1, adam_eps=1e-5, **optimizer)
    return RunConfig(model, ParallelConfig(), precision, training, optimizer=rule, data=DataConfig(mock_data=True))


def _draw_side(chance: random.Random, run: RunConfig, ranks: int, fixed: Fixed) -> RunConfig:
    """The run on a layout that fits its model and the ranks; the batch is one that fits any."""
    for _ in range(2000):
        values = {name: chance.choice(choices) for name, choices in LAYOUT.items()} | dict(fixed)
        if values["pipeline_model_parallel_size"] == 1 and "pipeline_schedule" not in fixed:
            values |= {"pipeline_schedule": None, "num_virtual_stages_per_pipeline_rank": None}
        config = replace(run, parallel=ParallelConfig(**values))
        dp = config.parallel.data_parallel_size(ranks)
        config = _batched(config, 8 * dp, 1)
        if ranks % config.parallel.model_ranks == 0 and not _wrong(config, ranks):
            return config
    raise _HopelessError


def _with_batch(chance: random.Random, config: RunConfig, ranks: int, batch: int) -> RunConfig:
    """The run with a random size of micro-batches that fits."""
    share = batch // config.parallel.data_parallel_size(ranks)
    sizes = [n for n in range(1, share + 1) if share % n == 0 and share // n <= MAX_MICROBATCHES]
    fitting = [c for c in (_batched(config, batch, n) for n in sizes) if not _wrong(c, ranks)]
    if not fitting:
        raise _HopelessError
    return resolve(chance.choice(fitting), ranks)


def _batched(config: RunConfig, batch: int, micro_batch: int) -> RunConfig:
    training = replace(config.training, global_batch_size=batch, micro_batch_size=micro_batch)
    return replace(config, training=training)


def _wrong(config: RunConfig, ranks: int) -> bool:
    try:
        return bool(find_problems(resolve(config, ranks), ranks))
    except UserError:
        return True


def saving(config: RunConfig, folder: Path) -> RunConfig:
    """The run, with its checkpoints in ``folder``."""
    return replace(config, checkpoint=CheckpointConfig(save=str(folder)))


def loading(config: RunConfig, folder: Path) -> RunConfig:
    """The run, begun with the checkpoint in ``folder``."""
    return replace(config, checkpoint=CheckpointConfig(load=str(folder)))


def times_written(manifest: Manifest) -> dict[str, Tensor]:
    """Of every tensor, in its view, how many times each element is in the checkpoint, counted one by one."""
    found = {}
    for name, record in manifest.tensors.items():
        count = torch.zeros(record.view, dtype=torch.int8)
        for chunk in record.chunks:
            count[chunk.box.slices] += 1
        found[name] = count
    return found


def bytes_of_files(manifest: Manifest) -> dict[str, int]:
    """Bytes of tensors in every file, by its name; proves that they overlap nowhere and end where the file does.

    Raises:
        AssertionError: when they do not.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for record in manifest.tensors.values():
        for chunk in record.chunks:
            spans.setdefault(chunk.file, []).append((chunk.offset, chunk.bytes))
    for file, found in spans.items():
        found.sort()
        ends = [offset + n for offset, n in found]
        assert all(end == start for end, (start, _) in zip(ends, found[1:])), f"{file} has holes, or bytes twice"
        assert ends[-1] == Path(str(manifest.path), file).stat().st_size
    return {file: sum(n for _, n in found) for file, found in spans.items()}


LARGE = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=2000,
    max_position_embeddings=SEQ_LENGTH,
    add_bias_linear=False,
)
"""A model whose matrices are large beside its vectors and the ends of buckets."""


def large_run(model: Mapping[str, Any], parallel: Mapping[str, Any], optimizer: str = "adam") -> RunConfig:
    """A run of it on some layout, of which nothing but the saving is of interest."""
    training = TrainingConfig(seq_length=SEQ_LENGTH, global_batch_size=12, train_iters=1, device="cpu")
    return RunConfig(
        replace(LARGE, **model),
        ParallelConfig(**parallel),
        PrecisionConfig(params_dtype="fp32"),
        training,
        optimizer=OptimizerConfig(optimizer=optimizer),
        data=DataConfig(mock_data=True),
    )
