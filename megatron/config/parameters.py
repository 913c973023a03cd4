"""Names and shapes of the parameters of a rank, computed from the configuration without torch.

The layers declare their own parameters; a test compares this list with them. The order is that of declaration, because
buckets are filled in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.shard import DENSE, EXPERT, padded_vocabulary
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import placement, stage_layers, virtual_stages

WORDS = "embedding.word_embeddings.weight"
"""Name of the word embeddings; with tied embeddings also the output layer."""


@dataclass(frozen=True)
class Parameter:
    """Shape of a rank's part of a parameter."""

    name: str  # global name
    shape: tuple[int, ...]  # of the local tensor as stored: 1-D or 2-D, with padding
    axes: tuple[str, ...] = DENSE  # axes of the rank grid over which its gradients are summed
    tied: bool = False  # both embedding and output layer

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def vector(self) -> bool:
        """True for a 1-D parameter."""
        return len(self.shape) == 1

    @property
    def of_block(self) -> bool:
        """True for a matrix of a block, as opposed to the embeddings and the output layer."""
        return self.name.startswith("layers.") and not self.vector


def stages_by_rank(model: ModelConfig, parallel: ParallelConfig) -> list[list[StageLayers]]:
    """Return the stages of each pipeline rank.

    Raises:
        ScheduleError: when the pipeline cannot distribute the layers.
    """
    stages: list[list[StageLayers]] = [[] for _ in range(parallel.pipeline_model_parallel_size)]
    ranks = placement(parallel, virtual_stages(model, parallel))
    for rank, stage in zip(ranks, stage_layers(model, parallel), strict=True):
        stages[rank].append(stage)
    return stages


def parameters(model: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> tuple[Parameter, ...]:
    """Return the parameters of a pipeline rank, in the order of declaration.

    They are the same on all ranks along the other axes. A tied weight appears once.

    Raises:
        ValueError: when the vocabulary size is not set.
        ScheduleError: when the pipeline cannot distribute the layers.
    """
    shapes = _Shapes(model, parallel)
    declared = (p for stage in stages_by_rank(model, parallel)[pp_rank] for p in shapes.of_stage(stage))
    return tuple({parameter.name: parameter for parameter in declared}.values())


@dataclass(frozen=True)
class _Shapes:
    """Local parameter shapes of each module."""

    model: ModelConfig
    parallel: ParallelConfig

    @property
    def _tp(self) -> int:
        return self.parallel.tensor_model_parallel_size

    def of_stage(self, stage: StageLayers) -> Iterator[Parameter]:
        """Yield the parameters of a stage, with embeddings in the first and final norm and output layer in the last."""
        m = self.model
        if stage.first:
            yield self._words(WORDS)
            if m.position_embedding_type == "learned_absolute":
                shape = m.max_position_embeddings or 0, m.hidden_size
                yield Parameter("embedding.position_embeddings.weight", shape)
        for layer in stage.layers:
            yield from self._block(f"layers.{layer}")
        if stage.last:
            yield from self._norm("final_layernorm", m.hidden_size)
            yield self._words("output_layer.weight" if m.untie_embeddings_and_output_weights else WORDS)

    def _words(self, name: str) -> Parameter:
        m = self.model
        rows = padded_vocabulary(m.vocab, m.make_vocab_size_divisible_by, self._tp) // self._tp
        return Parameter(name, (rows, m.hidden_size), tied=not m.untie_embeddings_and_output_weights)

    def _block(self, name: str) -> Iterator[Parameter]:
        h = self.model.hidden_size
        yield from self._norm(f"{name}.input_layernorm", h)
        yield from self._attention(f"{name}.self_attention")
        yield from self._norm(f"{name}.pre_mlp_layernorm", h)
        if self.model.num_experts is None:
            yield from self._mlp(f"{name}.mlp", self.model.ffn)
        else:
            yield from self._experts(f"{name}.mlp", self.model.num_experts)

    def _norm(self, name: str, width: int) -> Iterator[Parameter]:
        yield Parameter(f"{name}.weight", (width,))
        if self.model.normalization == "LayerNorm":
            yield Parameter(f"{name}.bias", (width,))

    def _attention(self, name: str) -> Iterator[Parameter]:
        m = self.model
        # with more TP ranks than key/value heads, each rank holds a copy of one
        queries, groups = m.num_attention_heads // self._tp, max(1, m.kv_groups // self._tp)
        yield from self._linear(f"{name}.linear_qkv", (queries + 2 * groups) * m.head_dim, m.hidden_size, m.qkv_bias)
        yield from self._linear(f"{name}.linear_proj", m.hidden_size, queries * m.head_dim, m.add_bias_linear)
        if m.qk_layernorm:
            yield from self._norm(f"{name}.q_layernorm", m.head_dim)
            yield from self._norm(f"{name}.k_layernorm", m.head_dim)

    def _mlp(self, name: str, ffn: int) -> Iterator[Parameter]:
        m, width = self.model, ffn // self._tp
        yield from self._linear(f"{name}.linear_fc1", self._fc1_rows(width), m.hidden_size, m.add_bias_linear)
        yield from self._linear(f"{name}.linear_fc2", m.hidden_size, width, m.add_bias_linear)

    def _experts(self, name: str, experts: int) -> Iterator[Parameter]:
        m = self.model
        local = experts // self.parallel.expert_model_parallel_size
        width = m.expert_ffn // self.parallel.expert_tp
        yield Parameter(f"{name}.router.weight", (experts, m.hidden_size))
        yield Parameter(f"{name}.experts.linear_fc1.weight", (local * self._fc1_rows(width), m.hidden_size), EXPERT)
        yield Parameter(f"{name}.experts.linear_fc2.weight", (local * m.hidden_size, width), EXPERT)
        if m.moe_shared_expert_intermediate_size:
            yield from self._mlp(f"{name}.shared_experts", m.moe_shared_expert_intermediate_size)

    def _fc1_rows(self, width: int) -> int:
        return width * 2 if self.model.gated else width

    def _linear(self, name: str, outputs: int, inputs: int, bias: bool) -> Iterator[Parameter]:
        yield Parameter(f"{name}.weight", (outputs, inputs))
        if bias:
            yield Parameter(f"{name}.bias", (outputs,))
