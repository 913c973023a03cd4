"""GPT model, or the consecutive blocks of it that form a pipeline stage (a model chunk)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.context_parallel import rows_between
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.attention_mask import AttentionMask
from megatron.kernels.qkv import RotaryEmbedding
from megatron.layers import parameters
from megatron.layers.context import BuildContext, ForwardContext, Losses
from megatron.layers.embedding import Embedding
from megatron.layers.kv_cache import KVCache
from megatron.layers.loss import OutputLayer
from megatron.layers.mixers.registry import auxiliary_losses, rotary_tables
from megatron.layers.norm import Norm, Residual
from megatron.layers.providers import GROUPED_PROVIDERS, PROVIDERS
from megatron.layers.recompute_plan import RecomputePlan
from megatron.model.block import build_block, embedding_noise, hidden_dropout
from megatron.model.head_kinds import build_heads
from megatron.model.objective import make_objective
from megatron.model.segments import compose_blocks
from megatron.pipeline.partition import StageLayers, stages_from_counts


@dataclass
class LossSums:
    """Sums of a chunk's losses for reporting; device tensors, never read inside a step."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add to the sum ``name``."""
        self.values[name] = self.values[name] + value.detach() if name in self.values else value.detach()

    def pop(self) -> dict[str, Tensor]:
        """Return the sums, and reset them."""
        taken, self.values = self.values, {}
        return taken


class GPTChunk(nn.Module):
    """Consecutive blocks of the model, with the embedding in the first chunk and the loss in the last.

    Called as ``chunk(x, micro_batch) -> (out, aux)``. ``x`` is None for the first chunk. ``out`` is the hidden state
    ``[S(/tp), B, H]`` or, for the last chunk, the summed loss of the micro-batch. ``aux`` is the scalar sum of
    auxiliary losses. Backward starts from both.
    """

    def __init__(
        self, config: ModelConfig, training: TrainingConfig, context: BuildContext, stage: StageLayers
    ) -> None:
        """Build the chunk.

        Args:
            config: of the whole model.
            training: recomputation, the objective and the chunk size of the loss.
            context: mesh, gradient accumulator, dtype.
            stage: the chunk's blocks, and whether it has the embedding or the loss.
        """
        super().__init__()
        self.config, self.context, self.sums = config, context, LossSums()
        # Specs and parameters of all chunks of this rank, by global name.
        self.specs, self.params = context.specs, context.params
        plan = RecomputePlan.from_config(training, len(stage.layers))
        self.last, self.neftune_alpha = stage.last, training.neftune_alpha
        kinds = stage.kinds(config.head_layers)
        self.patterns = {config.pattern(i) for i in kinds}
        self.embedding = Embedding(config, context.submodule("embedding")) if stage.first else None
        blocks = {str(i): build_block(config, context.block(i), i, plan) for i in stage.layers}
        self.layers, self.run_blocks = nn.ModuleDict(blocks), compose_blocks([*blocks.values()], plan, context)
        self.final_layernorm: Norm | None = None
        self.output_layer: OutputLayer | None = None
        if self.last:
            self.final_layernorm = Norm(config, context.submodule("final_layernorm"))
            self.output_layer = OutputLayer(
                config, context.submodule("output_layer"), training.cross_entropy_chunk_size
            )
        # Further predictions of the last chunk, in training.
        self.heads = build_heads(config, training, context) if self.last else None
        # Keys and values of earlier tokens, of a pass that generates text.
        self.cache: KVCache | None = None
        # Only the last chunk computes the loss, but all need the weights of micro-batches in it.
        self.objective = make_objective(config, training, context)
        # Of the whole model too: what a step logs beside the loss, and coefficients by name.
        self.loss_names = (*self.objective.metric_names, *config.head_losses)
        self.auxiliary_losses = auxiliary_losses(config)
        self.rotary = {
            table: RotaryEmbedding(config, table, context.dtype, context.device)
            for table in rotary_tables(config, kinds)
        }

    @property
    def device(self) -> torch.device:
        """Device of the chunk."""
        return self.context.device

    @property
    def parts(self) -> list[nn.Module]:
        """The submodules in the order in which forward calls them; together they have all parameters."""
        heads = () if self.heads is None else self.heads.parts
        parts = (self.embedding, *self.layers.values(), self.final_layernorm, *heads, self.output_layer)
        return [part for part in parts if part is not None]

    def forward(self, x_SBH: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Run the chunk on a micro-batch."""
        ctx = self._forward_context(batch, self.cache)
        if self.embedding is not None:
            x_SBH = self._embed(self.embedding, ctx)
        if x_SBH is None:
            raise ValueError("only the first chunk runs without an input")
        residual, losses = self.run_blocks(Residual(x_SBH), {}, ctx)
        out, losses = self._loss(residual, losses, ctx) if self.last else (residual.sum(), losses)
        for name, loss in losses.items():
            self.sums.add(name, loss)
        zero = torch.zeros((), dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        return out, sum(losses.values(), zero)

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor, cache: KVCache | None = None, last: int = 0) -> Tensor:
        """Return next-token logits ``[S, B, vocab]`` in at least fp32, without dropout.

        Args:
            tokens_BS: int64 ids; with a cache, the tokens that follow the cached ones.
            cache: keys and values of earlier tokens; these tokens are added.
            last: number of last tokens to return logits for; 0 for all.

        Raises:
            ValueError: when the chunk is not the whole model, or not in evaluation mode.
        """
        if self.embedding is None or self.final_layernorm is None or self.output_layer is None or self.training:
            raise ValueError("logits are those of a whole model after .eval()")
        batch = MicroBatch.of_tokens(tokens_BS, cache.positions(tokens_BS) if cache is not None else None)
        ctx = self._forward_context(batch, cache)
        residual, _ = self.run_blocks(Residual(self._embed(self.embedding, ctx)), {}, ctx)
        if cache is not None:
            cache.advance(tokens_BS.shape[1])
        _, n_SBH = self.final_layernorm(Residual(residual.sum()[-last:]))  # -0 is the first row
        return self.output_layer.logits(n_SBH)

    def log_probs(self, logits_BV: Tensor, ids_B: Tensor) -> Tensor:
        """Return the log-probability of an id under each row of :meth:`logits`, ``[B]``.

        Raises:
            ValueError: when the chunk has no output layer.
        """
        if self.output_layer is None:
            raise ValueError("only the last chunk has an output layer")
        return self.output_layer.log_probs(logits_BV, ids_B)

    def _forward_context(self, batch: MicroBatch, cache: KVCache | None = None) -> ForwardContext:
        s, device, context = batch.tokens.shape[1], batch.tokens.device, self.context
        rotary = {table: embedding(s, batch.positions) for table, embedding in self.rotary.items()}
        cached, documents = (0, batch.documents) if cache is None else (cache.length, cache.documents(batch.tokens))
        length = batch.seq_length or s
        tokens, queries = (range(cached + length),), (range(cached, cached + length),)
        known = documents, batch.host_documents, batch.boundaries, batch.pattern_restarts or cache is not None
        masks = {pattern: AttentionMask(queries, tokens, device, pattern, *known) for pattern in self.patterns}
        rows = (range(s),) if context.cp is None or batch.seq_length is None else context.cp.rows(length)
        if context.sequence_parallel:
            share = s // context.tp.size
            rows = rows_between(rows, context.tp.rank * share, (context.tp.rank + 1) * share)
        return ForwardContext(batch, masks, rotary, cache, context.seed, self.training, rows, context.kernels)

    def _embed(self, embedding: Embedding, ctx: ForwardContext) -> Tensor:
        x_SBH = embedding(ctx.batch.tokens, ctx.batch.positions)
        if torch.is_grad_enabled() and not x_SBH.requires_grad:  # of frozen weights: backward goes through all blocks
            x_SBH.requires_grad_()
        x_SBH = embedding_noise(x_SBH, self.neftune_alpha, ctx)
        return hidden_dropout(x_SBH, self.config.hidden_dropout, ctx, "embedding_dropout")

    def _loss(self, residual: Residual, losses: Losses, ctx: ForwardContext) -> tuple[Tensor, Losses]:
        if self.final_layernorm is None or self.output_layer is None:
            raise ValueError("only the last chunk has a loss")
        _, n_SBH = self.final_layernorm(residual)
        heads, states = self.heads if self.training else None, []
        if heads is not None:  # all blocks first, then all uses of the output layer
            states, losses = heads(n_SBH, losses, ctx)
        loss, metrics = self.objective(n_SBH, ctx.batch, self.output_layer)
        metrics = {"lm loss": loss, **metrics}
        if heads is not None:
            added, more = heads.loss(states, ctx.batch, self.output_layer)
            loss, metrics = loss + added, {**metrics, **more}
        for name, value in metrics.items():
            self.sums.add(name, value)
        return loss, losses


def build_gpt(config: ModelConfig, training: TrainingConfig, context: BuildContext) -> GPTChunk:
    """Build the whole model as one chunk.

    Raises:
        RuntimeError: when the layers do not build the parameters that are declared.
    """
    return build_chunks(config, training, context, dict(enumerate(stages_from_counts([config.num_layers]))))[0]


def build_chunks(
    config: ModelConfig, training: TrainingConfig, context: BuildContext, stages: Mapping[int, StageLayers]
) -> dict[int, GPTChunk]:
    """Build a rank's chunks, by stage number; they share the specs and parameters of ``context``.

    Raises:
        RuntimeError: when the layers do not build the parameters that are declared.
    """
    layers = [layer for stage in stages.values() for layer in stage.layers]
    first, last = any(stage.first for stage in stages.values()), any(stage.last for stage in stages.values())
    specs = parameters.gpt(config, context.sharding, layers, first, last)
    context = replace(context, model=config, providers=PROVIDERS, grouped_providers=GROUPED_PROVIDERS).declare(specs)
    chunks = {index: GPTChunk(config, training, context, stage) for index, stage in stages.items()}
    if missing := [name for name in context.specs if name not in context.params]:
        raise RuntimeError(f"the layers do not build parameters that are declared: {', '.join(missing)}")
    for declared, built in zip(context.specs, context.params):
        if declared != built:
            raise RuntimeError(f"the layers build {built} where {declared} is declared: put them in the same order")
    return chunks
