"""The shape of a model, described by independent switches; no family is known by name."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option

GATED_ACTIVATIONS = ("swiglu",)
"""Activations that multiply a gate into the MLP's first projection."""


def _window(text: str) -> int | None:
    """Keys a token sees. Megatron-LM counts those to the left and right of it: ``L,0``, ``(L, 0)``; -1 is all.

    Raises:
        ValueError: when the text is neither, or a token would see what comes after it.
    """
    numbers = text.strip("() ").split(",")
    try:
        left, *right = (int(n) for n in numbers)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number of keys nor Megatron-LM's left,right") from None
    if not right:
        return left
    if right != [0] or left < -1:
        raise ValueError(f"{text!r}: a causal window is left,0 with left from 0, or -1 for all")
    return None if left == -1 else left + 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attention heads share key/value heads in groups (``n`` = num_attention_heads, ``g`` = num_query_groups)::

        MHA: g = n      GQA: 1 < g < n      MQA: g = 1
        q q q q         q q q q             q q q q
        | | | |          \\|   |/             \\ \\/ /
        k k k k          k     k               k
    """

    num_layers: int = option(2, "Transformer blocks.", at_least=1)
    hidden_size: int = option(128, "Width of the residual stream.", at_least=1)
    ffn_hidden_size: int | None = option(
        None,
        "Width inside the MLP. Default: 4 x hidden; with swiglu 2/3 of that, rounded down to a multiple of 64.",
        at_least=1,
    )
    num_attention_heads: int = option(4, "Query heads.", at_least=1)
    num_query_groups: int | None = option(
        None, "Key/value heads. Default: one per query head (MHA); 1 is MQA.", at_least=1
    )
    kv_channels: int | None = option(None, "Width of one head. Default: hidden_size / num_attention_heads.", at_least=1)
    vocab_size: int | None = option(None, "Entries of the vocabulary. Default: what the tokenizer has.", at_least=1)
    make_vocab_size_divisible_by: int = option(
        128,
        "Each rank's embedding rows are padded so that the whole is a multiple of this x TP; padding is never seen.",
        at_least=1,
    )
    untie_embeddings_and_output_weights: bool = option(False, "Give the output layer its own weight.")

    position_embedding_type: str = option(
        "learned_absolute",
        "How positions enter.",
        choices=("learned_absolute", "rope", "yarn", "none"),
        aliases={"--use-rotary-position-embeddings": "rope"},
    )
    max_position_embeddings: int | None = option(
        None, "Longest sequence the model knows. Default: seq_length.", at_least=1
    )
    rotary_base: float = option(10000.0, "Base of the rotary frequencies (theta).", above=1)
    rotary_percent: float = option(1.0, "Share of a head's channels that rotate.", above=0, at_most=1)
    rotary_interleaved: bool = option(False, "Rotate channel pairs (0,1),(2,3).. instead of (i, i+d/2).")
    use_rope_scaling: bool = option(False, "Llama-3 frequency scaling of rope.")
    rope_scaling_factor: float = option(8.0, "Factor of the Llama-3 scaling.", at_least=1)
    rope_original_max_position: int = option(8192, "Context length before the Llama-3 scaling.", at_least=1)
    rope_low_freq_factor: float = option(
        1.0, "Llama-3 scaling: wavelengths above original/low are divided by the factor.", above=0
    )
    rope_high_freq_factor: float = option(
        4.0, "Llama-3 scaling: wavelengths below original/high stay as they are.", above=0
    )
    rotary_scaling_factor: float = option(1.0, "Context extension factor of YaRN.", at_least=1)
    yarn_original_max_position_embeddings: int | None = option(
        None, "Context length before YaRN. Required by yarn.", at_least=1
    )
    yarn_beta_fast: float = option(32.0, "YaRN: rotations above which a channel is kept.", above=0)
    yarn_beta_slow: float = option(1.0, "YaRN: rotations below which a channel is interpolated.", above=0)
    window_size: int | None = option(
        None,
        "Sliding window: a token attends to itself and the window_size - 1 before it. L,0 is L+1, as in Megatron-LM.",
        at_least=1,
        parse=_window,
    )

    normalization: str = option("LayerNorm", "Kind of norm.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = option(1e-5, "Added to the variance inside norms.", above=0)
    qk_layernorm: bool = option(False, "Normalise queries and keys per head, before rotation.")
    activation: str = option(
        "gelu_tanh",
        "Nonlinearity of the MLP. gelu_tanh is what Megatron-LM's fused bias-gelu computes.",
        choices=("gelu", "gelu_tanh", "swiglu", "relu2"),
        aliases={
            "--swiglu": "swiglu",
            "--squared-relu": "relu2",
            "--openai-gelu": "gelu_tanh",
        },
    )
    add_bias_linear: bool = option(True, "Biases in all linear layers.", aliases={"--disable-bias-linear": False})
    add_qkv_bias: bool = option(False, "Bias in the QKV projection even without add_bias_linear.")
    hidden_dropout: float = option(0.1, "Dropout of embeddings and of each block's two outputs.", at_least=0, below=1)
    attention_dropout: float = option(
        0.1, "Dropout of attention weights; above 0 attention is not fused.", at_least=0, below=1
    )
    init_method_std: float = option(
        0.02, "Standard deviation of the initial weights; output projections use std/sqrt(2L).", at_least=0
    )
    z_loss_coeff: float = option(
        0.0, "Weight of the squared log-partition added to the loss (PaLM's z-loss).", at_least=0
    )

    num_experts: int | None = option(
        None, "Experts of every block, in place of its MLP (mixture of experts). Default: none.", at_least=2
    )
    moe_router_topk: int = option(2, "Experts that compute each token.", at_least=1)
    moe_ffn_hidden_size: int | None = option(
        None, "Width inside an expert. Default: ffn_hidden_size, or what that is by default.", at_least=1
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "Width of an expert that computes all tokens besides. Default: there is none.", at_least=1
    )
    moe_router_pre_softmax: bool = option(
        False, "Weigh experts by the softmax over all of them, instead of over those that were chosen."
    )
    moe_router_load_balancing_type: str = option(
        "seq_aux_loss",
        "What the balancing loss compares the experts' shares over: each sequence, or (as in the Switch Transformer) "
        "each micro-batch of a rank, which makes it depend on the layout.",
        choices=("seq_aux_loss", "aux_loss", "none"),
    )
    moe_aux_loss_coeff: float = option(0.0, "Weight of the load-balancing loss.", at_least=0)
    moe_z_loss_coeff: float | None = option(
        None, "Weight of the squared log-partition of the router's logits (ST-MoE's z-loss). Default: 0.", at_least=0
    )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.kv_groups

    @property
    def gated(self) -> bool:
        """Whether the MLP's first projection has a gate beside it."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def ffn(self) -> int:
        """Width inside the MLP."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(8 * self.hidden_size / 3) // 64 * 64 if self.gated else 4 * self.hidden_size

    @property
    def expert_ffn(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn

    @property
    def vocab(self) -> int:
        """Entries of the vocabulary, once they are known.

        Raises:
            ValueError: when neither a flag nor the tokenizer has said it yet.
        """
        if self.vocab_size is None:
            raise ValueError("vocab_size is not known yet: pass --vocab-size or a tokenizer")
        return self.vocab_size

    @property
    def qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate; 0 without rotary positions."""
        if self.position_embedding_type not in ("rope", "yarn"):
            return 0
        return int(self.head_dim * self.rotary_percent)

    def num_parameters(self, active: bool = False) -> int:
        """Trainable parameters, vocabulary padding excluded (closed formula, asserted against the built model).

        Args:
            active: of the experts, only as many as compute a token.
        """
        idle = self.layer_parameters() - self.layer_parameters(active)
        return self.part_parameters(self.num_layers, first=True, last=True) - self.num_layers * idle

    def part_parameters(self, layers: int, first: bool, last: bool) -> int:
        """Those of some blocks, with what stands before the first and behind the last; a tied weight counts once.

        Raises:
            ValueError: while the vocabulary or the number of positions is not known.
        """
        tables = first + last if self.untie_embeddings_and_output_weights else first or last
        count = layers * self.layer_parameters() + (self.vocab * self.hidden_size * tables if tables else 0)
        if first and self.position_embedding_type == "learned_absolute":
            if self.max_position_embeddings is None:
                raise ValueError("max_position_embeddings is not known yet")
            count += self.max_position_embeddings * self.hidden_size
        return count + (self.norm_parameters() if last else 0)

    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    def layer_parameters(self, active: bool = False) -> int:
        """Parameters of one transformer block; ``active``: of its experts, as many as compute a token."""
        h, d, bias = self.hidden_size, self.head_dim, int(self.add_bias_linear)
        qkv_rows = (self.heads_per_group + 2) * self.kv_groups * d
        attention = qkv_rows * (h + int(self.qkv_bias)) + self.num_attention_heads * d * h + bias * h
        if self.qk_layernorm:
            attention += 2 * d * (2 if self.normalization == "LayerNorm" else 1)
        return attention + self.mlp_parameters(active) + 2 * self.norm_parameters()

    def mlp_parameters(self, active: bool = False) -> int:
        """Those of a block's MLP, or of its router and experts; ``active``: of as many experts as compute a token."""
        h, matrices = self.hidden_size, 3 if self.gated else 2
        if self.num_experts is None:
            bias = (matrices - 1) * self.ffn + h if self.add_bias_linear else 0
            return matrices * self.ffn * h + bias
        experts = self.moe_router_topk if active else self.num_experts
        shared = self.moe_shared_expert_intermediate_size or 0
        return self.num_experts * h + matrices * h * (experts * self.expert_ffn + shared)
