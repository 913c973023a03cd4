"""Model architecture as independent options; there are no model families."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from megatron.config.adapters import AdapterOptions
from megatron.config.attention_pattern import AttentionPattern, format_layers, parse_layers, split_layers
from megatron.config.errors import Problem
from megatron.config.experts import ExpertOptions, expert_layers
from megatron.config.gated_delta_net import GatedDeltaNetOptions
from megatron.config.latent_attention import LATENT_ATTENTION, SCALED, YARN, LatentAttentionOptions
from megatron.config.layer_pattern import (
    DEPTH,
    TOKEN_MIXERS,
    LayerPatternOptions,
    PatternError,
    parse_head,
    parse_pattern,
)
from megatron.config.mamba import MambaOptions
from megatron.config.multi_token import MultiTokenOptions
from megatron.config.option import MAX_LAYERS, MAX_SIZE, MegatronOption, Need, Run, WithPluginOptions, option
from megatron.config.router import RouterOptions
from megatron.config.text import divisors, flag_fixes, multiples_as_fixes, nearest, selected_layers

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
"""Activations whose first projection has a second half, the gate."""


ROTARY = Need("position_embedding_type=rope|yarn or has_latent_attention", "rotary positions")
ROPE = Need("position_embedding_type=rope or rope_type=rope", "--position-embedding-type rope")
ROPE_SCALING = Need("use_rope_scaling")
QK_NORM = Need("qk_layernorm")
ATTENTION = Need("has_attention", "attention without a latent")
ROTARY_HEADS = (Need("position_embedding_type=rope|yarn"), ATTENTION)
GATED = Need(f"activation={'|'.join(GATED_ACTIVATIONS)}", "a gated activation")
CROSS_ENTROPY = Need("objective!=dpo|distillation", "--objective next_token")


def _window(text: str) -> int | None:
    """Parse a window size in tokens, or Megatron-LM's ``left,right`` as ``L,0`` or ``(L, 0)``; -1 is no limit."""
    try:
        left, *right = (int(n) for n in text.strip("() ").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is neither a number of tokens nor Megatron-LM's left,right") from None
    if not right:
        return None if left == -1 else left
    if right != [0] or left < -1:
        raise ValueError(f"{text!r}: a causal window is left,0 with left >= 0, or -1 for no limit")
    return None if left == -1 else left + 1


no_rope_layers = partial(selected_layers, longest=MAX_LAYERS, first=False)
"""Parse ``--no-rope-freq``: 1 for layers without RoPE, to be repeated."""


def window_layers(text: str) -> tuple[int, ...]:
    """Parse ``--window-attn-skip-freq``: 1 for layers with the window, to be repeated. A number ``N`` skips layers."""
    layers = selected_layers(text, MAX_LAYERS, first=False)
    return tuple(1 - layer for layer in layers) if text.isdecimal() else layers


@dataclass(frozen=True, init=False, eq=False, repr=False)
class TransformerOptions(WithPluginOptions):
    """Shape and arithmetic of a decoder-only transformer."""

    num_layers: int = option(2, role="shape", at_least=1, at_most=MAX_LAYERS, spellings=("--encoder-num-layers",))
    """Number of transformer blocks."""
    hidden_size: int = option(128, role="shape", at_least=1, at_most=MAX_SIZE)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE)
    """Hidden width of the MLP. Default: 4 x hidden_size; gated 2/3 of that, rounded down to a multiple of 64."""
    num_attention_heads: int = option(4, role="shape", at_least=1, at_most=MAX_SIZE)
    """Number of query heads."""
    num_query_groups: int | None = option(
        None,
        role="shape",
        at_least=1,
        at_most=MAX_SIZE,
        needs=ATTENTION,
        megatron=MegatronOption("1, with --group-query-attention", "one per query head"),
    )
    """Number of key/value heads. Default: one per query head (MHA); 1 is MQA."""
    kv_channels: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE, needs=ATTENTION)
    """Channels per head. Default: hidden_size / num_attention_heads."""
    vocab_size: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE)
    """Vocabulary size. Default: that of the tokenizer."""
    make_vocab_size_divisible_by: int = option(128, role="free", at_least=1, at_most=MAX_SIZE)
    """Pad the embedding rows to a multiple of this x TP. The model never sees the padding."""
    untie_embeddings_and_output_weights: bool = option(False, role="shape")
    """Give the output layer a weight of its own."""
    embedding_multiplier: float = option(1.0, role="function", above=0)
    """Multiply the word embeddings by this, rounded to the data type of the parameters."""
    residual_multiplier: float = option(1.0, role="function", above=0)
    """Multiply what each residual branch adds."""
    logits_scaling: float = option(1.0, role="function", above=0)
    """Divide the logits by this."""

    position_embedding_type: str = option(
        "learned_absolute",
        role="shape",
        choices=("learned_absolute", "rope", "yarn", "none"),
        same_shapes=(("rope", "yarn", "none"),),
        aliases={"--use-rotary-position-embeddings": "rope"},
        megatron=MegatronOption(
            missing={
                "alibi": "ALiBi positions are not implemented",
                "relative": "relative position biases are not implemented",
                "mrope": "multimodal rotary positions are not implemented",
            }
        ),
    )
    """Position embedding."""
    max_position_embeddings: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE)
    """Longest supported sequence. Default: seq_length."""
    rotary_base: float = option(10000.0, role="function", above=1, needs=ROTARY)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = option(1.0, role="function", above=0, at_most=1, needs=ROTARY_HEADS)
    """Fraction of a head's channels that are rotated. Latent attention rotates those of --qk-pos-emb-head-dim."""
    rotary_interleaved: bool = option(False, role="function", needs=ROTARY_HEADS)
    """Rotate channel pairs (0,1), (2,3), ... instead of (i, i+d/2). Latent attention always does."""
    rotary_base_local: float | None = option(None, role="function", above=1, needs=ROTARY)
    """Base of the rotary frequencies of layers with a sliding window, which then have no scaling. Default: as the
    others."""
    rotary_seq_len_interpolation_factor: float = option(1.0, role="function", at_least=1, needs=ROPE)
    """Divide positions by this factor (linear interpolation)."""
    no_rope_freq: str | None = option(None, role="function", check=no_rope_layers, needs=ROTARY)
    """Layers without rotary embedding: every N-th, or a list with 1 for them and 0 for the others, repeated over the
    layers. Example: '[0]*3+[1]'."""
    use_rope_scaling: bool = option(False, role="function", needs=ROPE)
    """Apply Llama-3's scaling of the rotary frequencies."""
    rope_scaling_factor: float = option(8.0, role="function", at_least=1, needs=ROPE_SCALING)
    """Llama-3 scaling: context extension factor."""
    rope_original_max_position: int = option(8192, role="function", at_least=1, at_most=MAX_SIZE, needs=ROPE_SCALING)
    """Llama-3 scaling: original context length."""
    rope_low_freq_factor: float = option(1.0, role="function", above=0, needs=ROPE_SCALING)
    """Llama-3 scaling: wavelengths above original/low are divided by the factor."""
    rope_high_freq_factor: float = option(4.0, role="function", above=0, needs=ROPE_SCALING)
    """Llama-3 scaling: wavelengths below original/high are unchanged."""
    rotary_scaling_factor: float = option(1.0, role="function", at_least=1, needs=SCALED)
    """YaRN: context extension factor."""
    yarn_original_max_position_embeddings: int | None = option(
        None, role="function", at_least=1, at_most=MAX_SIZE, needs=YARN
    )
    """YaRN: original context length. Required by --position-embedding-type yarn; 4096 for latent attention."""
    yarn_beta_fast: float = option(32.0, role="function", above=0, needs=YARN)
    """YaRN: channels with more rotations than this are unchanged."""
    yarn_beta_slow: float = option(1.0, role="function", above=0, needs=YARN)
    """YaRN: channels with fewer rotations than this are interpolated."""
    yarn_correction_range_round_to_int: bool = option(True, role="function", needs=YARN)
    """YaRN: round the first and the last channel between them to whole ones."""
    window_size: int | None = option(None, role="function", at_least=1, at_most=MAX_SIZE, parse=_window)
    """Sliding window: a token attends to itself and the window_size - 1 tokens before it. Megatron-LM's form L,0 means
    L+1, and -1 no limit."""
    window_attn_skip_freq: str | None = option(None, role="function", check=window_layers, needs="window_size")
    """Layers with the sliding window: all but every N-th, or a list with 1 for them and 0 for the others, repeated over
    the layers. Example: '[1]*5+[0]'. Default: all."""
    attention_pattern: str | None = option(None, role="function", check=parse_layers)
    """Attention of each layer, repeated over the layers: global, local:WINDOW, chunked:SIZE, dilated:WINDOW:STEP,
    prefix:TOKENS, or the name of a plugin's pattern. A part +first:TOKENS keeps the first tokens visible, *N repeats.
    Example: 'local:4096*5,global'."""

    token_mixers: tuple[str, ...] = option(("attention",), role="shape", choices=TOKEN_MIXERS, kind="mixer")
    """Mixers of the tokens, the residual layers before the MLPs, repeated over the layers: attention, latent-attention,
    mamba2, gated-delta-net, or the name of a plugin's mixer. Example: mine mine mine attention."""
    softmax_scale: float | None = option(None, role="function", above=0, example=0.0625)
    """Factor on the products of queries and keys. Default: 1/sqrt(channels of a key)."""
    attention_output_gate: bool = option(False, role="shape", needs=ATTENTION)
    """Multiply the output of attention by the sigmoid of a gate for each of its channels, which the QKV projection
    gives too."""
    attn_logit_softcapping: float | None = option(None, role="function", above=0, example=50)
    """Cap the scores of attention smoothly, before the mask: cap x tanh(score / cap), as Gemma 2."""
    softmax_type: str = option(
        "vanilla",
        role="shape",
        choices=("vanilla", "learnable", "off-by-one"),
        same_shapes=(("vanilla", "off-by-one"),),
    )
    """Sink of attention: another score of each head that the softmax sums, without a value. learnable is a parameter of
    each head (GPT-OSS), off-by-one is 0, vanilla is none."""
    final_logit_softcapping: float | None = option(None, role="function", above=0, example=30)
    """Cap the logits of the output layer in the same way."""

    normalization: str = option("LayerNorm", role="shape", choices=("LayerNorm", "RMSNorm"))
    """Normalization layer."""
    layernorm_placement: str = option("pre", role="shape", choices=("pre", "post", "sandwich"))
    """Norms of a block: before attention and MLP (pre), x + f(norm(x)); after them (post), x + norm(f(x)); or both
    (sandwich)."""
    apply_layernorm_1p: bool = option(False, role="function")
    """Multiply by 1 + weight in all norms; weights start at 0."""
    parallel_attention: bool = option(False, role="function")
    """Compute attention and MLP of a block from the same input: x + attention(norm(x)) + mlp(norm(x))."""
    norm_epsilon: float = option(1e-5, role="function", above=0)
    """Epsilon added to the variance."""
    qk_layernorm: bool = option(False, role="shape")
    """Normalize queries and keys, before the rotary embedding; in latent attention the latents."""
    qk_layernorm_scope: str = option("head", role="shape", choices=("head", "all"), needs=(QK_NORM, ATTENTION))
    """Normalize the queries of each head, or those of all heads of the layer at once; keys likewise."""
    activation: str = option(
        "gelu_tanh",
        role="shape",
        choices=("gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh", "quick_geglu", "relu2"),
        same_shapes=(GATED_ACTIVATIONS, ("gelu", "gelu_tanh", "relu2")),
        aliases={
            "--swiglu": "swiglu",
            "--quick-geglu": "quick_geglu",
            "--squared-relu": "relu2",
            "--openai-gelu": "gelu_tanh",
        },
    )
    """Activation of the MLP. gelu_tanh is what Megatron-LM's fused bias-gelu computes; swiglu and geglu are gated by
    SiLU and GELU, quick_geglu by x sigmoid(1.702 x)."""
    activation_func_clamp_value: float | None = option(None, role="function", above=0, needs=GATED, example=7)
    """Limit the gate of a gated activation to at most this value before its function, and the other half to this
    distance from 0."""
    glu_linear_offset: float = option(0.0, role="function", needs=GATED)
    """Add this to the half of a gated activation that is not the gate, after its limits."""
    add_bias_linear: bool = option(True, role="shape", aliases={"--disable-bias-linear": False})
    """Use biases in all linear layers, those of experts and routers included."""
    add_qkv_bias: bool = option(False, role="shape", needs=ATTENTION)
    """Use a bias in the QKV projection even without add_bias_linear."""
    hidden_dropout: float = option(0.1, role="schedule", at_least=0, below=1)
    """Dropout rate of the embeddings and of each block's two residual branches."""
    attention_dropout: float = option(0.1, role="schedule", at_least=0, below=1)
    """Dropout rate of attention weights. Above 0, attention is not fused."""
    init_method_std: float = option(0.02, role="free", at_least=0)
    """Standard deviation of the initial weights; output projections use std/sqrt(number of residual layers)."""
    z_loss_coeff: float = option(0.0, role="schedule", at_least=0, needs=CROSS_ENTROPY)
    """Weight of PaLM's z-loss, the squared log-partition of the logits."""

    other_meanings: ClassVar = """
    --num-query-groups and not --group-query-attention and num_attention_heads>kv_groups
      --num-query-groups is in effect, and the model has as many heads of keys and values; Megatron-LM would ignore it
      without --group-query-attention

    --rope-scaling-factor and use_rope_scaling and not rope_scaling_factor=8.0
      --rope-scaling-factor is in effect; Megatron-LM reads it and scales by 8

    --openai-gelu and --no-bias-gelu-fusion
      activation is gelu_tanh; Megatron-LM without fused biases computes the exact form: --activation gelu

    --disable-bias-linear and activation=gelu_tanh and not --activation
      activation is gelu_tanh; Megatron-LM without biases computes the exact form: --activation gelu
    """

    refused: ClassVar = """
    ffn=0
    E103 hidden size {hidden_size} with {activation}: the MLP's width, 8/3 of it rounded down to 64s, is 0
      fix: --ffn-hidden-size {hidden_size*4} | --hidden-size 24

    dense_layers>0 and ffn%tensor_model_parallel_size
    E204 an MLP of width {ffn} does not divide over TP {tensor_model_parallel_size}
      fix: --ffn-hidden-size {ffn%tensor_model_parallel_size}

    not vocab_size and tokenizer_type=NullTokenizer
    E104 NullTokenizer does not know the size of the vocabulary
      fix: --vocab-size 50257

    not vocab_size and generated and not tokenizer_type
    E104 the size of the vocabulary is unknown: generated tokens have no tokenizer
      fix: --vocab-size 50257 | --tokenizer-type ByteTokenizer

    seq_length>max_position_embeddings
    E105 samples of {seq_length} tokens exceed the model's {max_position_embeddings} positions
      fix: --seq-length {max_position_embeddings} | --max-position-embeddings {seq_length}

    use_rope_scaling and rotary_seq_len_interpolation_factor!=1.0
    E107 --use-rope-scaling and --rotary-seq-len-interpolation-factor both stretch the rotary frequencies
      fix: drop --use-rope-scaling | drop --rotary-seq-len-interpolation-factor

    use_rope_scaling and rope_low_freq_factor>=rope_high_freq_factor
    E107 --rope-low-freq-factor {rope_low_freq_factor} is not below --rope-high-freq-factor {rope_high_freq_factor}
      fix: --rope-low-freq-factor 1 --rope-high-freq-factor 4

    position_embedding_type=yarn and has_attention and not yarn_original_max_position_embeddings
    E107 yarn needs the context length of the model before its extension
      fix: --yarn-original-max-position-embeddings {seq_length}

    position_embedding_type=yarn and yarn_beta_slow>yarn_beta_fast
    E107 --yarn-beta-slow {yarn_beta_slow} is above --yarn-beta-fast {yarn_beta_fast}
      fix: --yarn-beta-slow 1 --yarn-beta-fast 32

    window_size and attention_pattern
    E109 --window-size {window_size} and --attention-pattern both set what a token attends to
      fix: drop --window-size | drop --attention-pattern

    cuda_graph=step and attn_logit_softcapping
    E917 --cuda-graph step is untested with --attn-logit-softcapping {attn_logit_softcapping}
      fix: --cuda-graph optimizer | --cuda-graph none

    cuda_graph=step and softmax_type!=vanilla
    E917 --cuda-graph step is untested with --softmax-type {softmax_type}
      fix: --cuda-graph optimizer | --cuda-graph none

    qk_layernorm and qk_layernorm_scope=all and normalization!=RMSNorm
    E110 --qk-layernorm-scope all divides by an RMS, which --normalization {normalization} does not
      fix: --qk-layernorm-scope head | --normalization RMSNorm

    cuda_graph=step and hidden_dropout>0 or cuda_graph=step and attention_dropout>0
    E907 --cuda-graph step does not support dropout: every step would drop the same elements
      fix: --hidden-dropout 0 --attention-dropout 0 | --cuda-graph optimizer | --cuda-graph none
    """


class RotaryTable(NamedTuple):
    """Cosines and sines that a mixer rotates channels by, which its layers share with others of the same table."""

    # Of :meth:`ModelConfig.rotary_kind`.
    kind: str
    # Rotated channels of a head.
    channels: int
    # ``rope`` or ``yarn``, for the kind ``global``.
    scaling: str = "rope"
    # Rotate channel pairs (0, 1), (2, 3).. instead of (i, i + channels/2).
    interleaved: bool = False


@dataclass(frozen=True)
class ModelConfig(
    AdapterOptions,
    LatentAttentionOptions,
    MambaOptions,
    GatedDeltaNetOptions,
    RouterOptions,
    ExpertOptions,
    MultiTokenOptions,
    LayerPatternOptions,
    TransformerOptions,
):
    """Decoder-only transformer.

    Query heads share key/value heads in groups (``n`` = num_attention_heads, ``g`` = num_query_groups)::

        MHA: g = n      GQA: 1 < g < n      MQA: g = 1
        q q q q         q q q q             q q q q
        | | | |          \\|   |/             \\ \\/ /
        k k k k          k     k               k
    """

    def __post_init__(self) -> None:
        """Set the numbers that the layer pattern determines; leave a text that is none to the checks."""
        if not isinstance(self.hybrid_layer_pattern, str):
            return
        with suppress(PatternError):
            pattern = parse_pattern(self.hybrid_layer_pattern)
            changes: dict[str, object] = {"num_layers": len(pattern.blocks)}
            if DEPTH in self.hybrid_layer_pattern and not self.has_two_heads:
                main, _, _ = self.hybrid_layer_pattern.partition(DEPTH)
                depths, head = len(pattern.heads), next(iter(pattern.heads), None)
                changes |= {"mtp_num_layers": depths or None, "mtp_hybrid_override_pattern": head}
                changes["hybrid_layer_pattern"] = main
            if any(LATENT_ATTENTION in block for block in pattern.blocks):
                changes["multi_latent_attention"] = True
            for name, value in changes.items():
                object.__setattr__(self, name, value)

    def mixers(self, layer: int) -> tuple[str, ...]:
        """Return the names of the mixers of a block, in order: each is a residual layer ``x + mixer(norm(x))``.

        The block after the last one is that of the heads.
        """
        if self.layer_pattern is None:
            words = self.repeated_token_mixers or ("attention",)
            token_mixer = words[self.place(layer) % len(words)]
            if token_mixer == "attention" and self.multi_latent_attention:
                token_mixer = LATENT_ATTENTION
            return token_mixer, "experts" if self._has_experts(layer) else "mlp"
        if layer >= self.num_layers and self.mtp_hybrid_override_pattern is not None:
            return self._existing(parse_head(self.mtp_hybrid_override_pattern))
        return self._existing(self.layer_pattern.blocks[min(layer, self.num_layers - 1)])

    def _existing(self, mixers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of mixers; an MLP in place of experts whose number is missing."""
        return mixers if self.num_experts else tuple("mlp" if name == "experts" else name for name in mixers)

    def has_experts(self, layer: int) -> bool:
        """Return True if a block has experts."""
        return "experts" in self.mixers(layer)

    def _has_experts(self, layer: int) -> bool:
        layers = expert_layers(self.moe_layer_freq or "1")
        return self.num_experts is not None and bool(layers[self.place(layer) % len(layers)])

    def place(self, layer: int) -> int:
        """Return the place of a block in lists of the layers, whose entries are symbols beside a pattern.

        The block of the heads has the place of the last layer.
        """
        layer = min(layer, self.num_layers - 1)
        return layer if self.layer_pattern is None else self.layer_pattern.starts[layer]

    @property
    def listed_layers(self) -> int:
        """Number of layers as lists of them count: the symbols of a pattern, else the blocks."""
        return self.num_layers if self.layer_pattern is None else len(self.layer_pattern.layers)

    @property
    def residual_layers(self) -> int:
        """Number of residual layers: the symbols of a pattern, else two in each block."""
        return 2 * self.num_layers if self.layer_pattern is None else len(self.layer_pattern.layers)

    def residual_layer(self, layer: int) -> int:
        """Return the index of the first residual layer of a block among those of the model."""
        return 2 * layer if self.layer_pattern is None else self.layer_pattern.starts[layer]

    @property
    def head_layers(self) -> tuple[int, ...]:
        """Index of the block of each head, which predicts a further token beside the output layer: after the last."""
        return (self.num_layers,) * self.prediction_depths

    @property
    def head_blocks(self) -> tuple[int, ...]:
        """The same of each block that exists: heads may share one."""
        return self.head_layers[: self.prediction_layers]

    @property
    def kinds_of_layers(self) -> list[tuple[str, ...]]:
        """The different :meth:`mixers` of the blocks, in the order of the first of each; those of the heads last."""
        return [*dict.fromkeys(map(self.mixers, (*range(self.num_layers), *self.head_blocks)))]

    @property
    def dense_layers(self) -> int:
        """Number of blocks with an MLP."""
        return sum("mlp" in self.mixers(layer) for layer in range(self.num_layers))

    @property
    def expert_blocks(self) -> int:
        """Number of blocks with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def heads_per_group(self) -> int:
        """Query heads per key/value head."""
        return self.num_attention_heads // self.kv_groups

    def pattern(self, layer: int) -> AttentionPattern:
        """Return the attention pattern of a layer."""
        if self.attention_pattern is None:
            layers = self.window_layers or (1,)
            return AttentionPattern(self.window_size if layers[self.place(layer) % len(layers)] else None)
        patterns = parse_layers(self.attention_pattern)
        return patterns[self.place(layer) % len(patterns)]

    @property
    def window_layers(self) -> tuple[int, ...] | None:
        """1 for each layer with the sliding window, to be repeated; None for all."""
        return None if self.window_attn_skip_freq is None else window_layers(self.window_attn_skip_freq)

    @property
    def layers_without_rope(self) -> tuple[int, ...] | None:
        """1 for each layer without rotary embedding, to be repeated; None for none."""
        return None if self.no_rope_freq is None else no_rope_layers(self.no_rope_freq)

    @property
    def attention_prefix(self) -> int:
        """First tokens of the sequence that a layer lets see each other in both directions."""
        patterns = () if self.attention_pattern is None else parse_layers(self.attention_pattern)
        return max((pattern.prefix for pattern in patterns), default=0)

    @property
    def gated(self) -> bool:
        """True if the MLP's first projection includes a gate."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def activation_options(self) -> tuple[str, float | None, float]:
        """Name, limit and offset of the MLP's activation: the arguments of its kernel after the tensors."""
        return self.activation, self.activation_func_clamp_value, self.glu_linear_offset

    @property
    def ffn(self) -> int:
        """Hidden width of the MLP."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(8 * self.hidden_size / 3) // 64 * 64 if self.gated else 4 * self.hidden_size

    @property
    def expert_ffn(self) -> int:
        """Hidden width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn

    @property
    def expert_hidden(self) -> int:
        """Width of what an expert takes and gives."""
        return self.moe_latent_size or self.hidden_size

    @property
    def vocab(self) -> int:
        """Vocabulary size; ValueError until a flag or the tokenizer has set it."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not known yet: pass --vocab-size or a tokenizer")
        return self.vocab_size

    @property
    def qkv_bias(self) -> bool:
        """True if the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    def rotary_kind(self, layer: int) -> str | None:
        """Return the rotary embedding of a layer: ``global``, ``local`` (``rotary_base_local``), or None."""
        if self.position_embedding_type not in ("rope", "yarn") and LATENT_ATTENTION not in self.mixers(layer):
            return None
        if (layers := self.layers_without_rope) is not None and layers[self.place(layer) % len(layers)]:
            return None
        local = self.rotary_base_local is not None and self.pattern(layer).window is not None
        return "local" if local else "global"

    @property
    def rotary_dim(self) -> int:
        """Rotated channels per head; 0 without rotary embedding."""
        if self.position_embedding_type not in ("rope", "yarn"):
            return 0
        return int(self.head_dim * self.rotary_percent)

    def check_head_width(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Without ``kv_channels``, check that the heads divide the hidden size."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.has_attention and self.kv_channels is None and hidden % heads:
            fixes = (
                *flag_fixes("--num-attention-heads", nearest(heads, divisors(hidden))),
                *multiples_as_fixes("--hidden-size", hidden, heads),
                f"--kv-channels {max(1, hidden // heads)}",
            )
            yield Problem("E101", f"hidden size {hidden} does not divide into {heads} heads", fixes)

    def check_query_groups(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that every key/value head serves the same number of query heads."""
        heads, groups = self.num_attention_heads, self.kv_groups
        if self.has_attention and heads % groups:
            fixes = flag_fixes("--num-query-groups", nearest(groups, divisors(heads)))
            yield Problem("E102", f"{heads} query heads cannot share {groups} key/value heads evenly", fixes)

    def check_rotary_channels(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that an even number of channels is rotated."""
        if not self.has_attention or self.position_embedding_type not in ("rope", "yarn"):
            return
        rotated, channels = self.rotary_dim, self.head_dim
        if rotated < 2 or rotated % 2:
            whole = (f"--kv-channels {channels + 1}",) if channels % 2 else ()
            even = nearest(rotated, range(2, channels + 1, 2))
            shares = (math.ceil(10_000 * n / channels) / 10_000 for n in even)  # up: channels are rounded down
            sentence = f"{rotated} of {channels} channels per head would be rotated; the number must be even"
            yield Problem("E106", sentence, (*whole, *(f"--rotary-percent {share:g}" for share in shares)))

    def check_no_rope_freq(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that a list of layers without RoPE has at most as many entries as the model has layers."""
        layers = self.listed_layers
        if self.no_rope_freq is None or (entries := len(no_rope_layers(self.no_rope_freq))) <= layers:
            return
        sentence = f"--no-rope-freq {self.no_rope_freq} is for {entries} layers, and the model has {layers}"
        yield Problem("E111", sentence, ("drop --no-rope-freq", f"--num-layers {entries}"))

    def check_heads_divide(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that TP divides the query heads, and that key/value heads and TP divide one another."""
        heads, groups = self.num_attention_heads, self.kv_groups
        tp = config.parallel.tensor_model_parallel_size
        if not (self.has_attention or self.has_latent_attention):
            return
        if heads % tp:
            fit = [n for n in divisors(heads) if world_size % n == 0]
            sizes = flag_fixes("--tensor-model-parallel-size", nearest(tp, fit))
            fixes = sizes + multiples_as_fixes("--num-attention-heads", heads, tp)
            yield Problem("E203", f"{heads} heads do not divide over TP {tp}", fixes)
        elif groups % tp and tp % groups:
            fit = [n for n in divisors(heads) if n % tp == 0 or tp % n == 0]
            sentence = f"{groups} key/value heads and TP {tp}: neither is a multiple of the other"
            yield Problem("E203", sentence, flag_fixes("--num-query-groups", nearest(groups, fit)))

    def check_sequence_parallel(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that TP divides the sequence length, or a context-parallel rank's part, under sequence parallelism."""
        parallel, length = config.parallel, config.training.seq_length
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        if parallel.sequence_parallel and length % (tp * cp):
            over = f"TP {tp}" if cp == 1 else f"TP {tp} x CP {cp}"
            sentence = f"sequence parallelism: samples of {length} tokens do not divide over {over}"
            fixes = (*multiples_as_fixes("--seq-length", length, parallel.sequence_multiple), "--no-sequence-parallel")
            yield Problem("E205", sentence, fixes)

    def check_attention_pattern(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that layers have all patterns of attention, and that labels are left to predict."""
        length, freq, layers = config.training.seq_length, self.window_attn_skip_freq, self.listed_layers
        if freq is not None and not freq.isdecimal() and (entries := len(window_layers(freq))) > layers:
            sentence = f"--window-attn-skip-freq {freq} is for {entries} layers, and the model has {layers}"
            yield Problem("E109", sentence, ("drop --window-attn-skip-freq", f"--num-layers {entries}"))
        if self.attention_pattern is None:
            return
        count, prefix = len(parse_layers(self.attention_pattern)), self.attention_prefix
        if count > layers:
            sentence = f"--attention-pattern has patterns for {count} layers, and the model has {layers}"
            shorter = format_layers(split_layers(self.attention_pattern)[:layers])
            yield Problem("E109", sentence, (f"--attention-pattern {shlex.quote(shorter)}", f"--num-layers {count}"))
        if prefix >= length:
            shorter = re.sub(
                r"prefix:(\d+)",
                lambda found: found[0] if int(found[1]) < length else f"prefix:{length // 2 or 1}",
                self.attention_pattern,
            )
            sentence = f"--attention-pattern prefix:{prefix} leaves no label of a sample of {length} tokens to predict"
            longer, limit = f"--seq-length {2 * prefix}", self.max_position_embeddings
            if limit is not None and limit < 2 * prefix:
                longer += f" --max-position-embeddings {2 * prefix}"
            yield Problem("E109", sentence, (f"--attention-pattern {shlex.quote(shorter)}", longer))

    def note_attention(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield notes about windows that hide nothing, and about patterns that end in the middle."""
        length = config.training.seq_length
        if self.window_size is not None and self.window_size >= length:
            yield f"--window-size {self.window_size} has no effect: samples have {length} tokens"
        if self.attention_pattern is None:
            return
        for text in dict.fromkeys(part.partition("*")[0].strip() for part in self.attention_pattern.split(",")):
            pattern = AttentionPattern.parse(text)
            limits = [limit for limit in (pattern.window, pattern.chunk) if limit is not None]
            if limits and min(limits) >= length and pattern.dilation == 1:
                yield f"--attention-pattern {text} hides nothing: samples have {length} tokens"
        count = len(parse_layers(self.attention_pattern))
        if self.listed_layers % count:
            layers = f"{self.listed_layers} layers; the last repeat is cut"
            yield f"--attention-pattern: {count} patterns do not divide {layers}"
