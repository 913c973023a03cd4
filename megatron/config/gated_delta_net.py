"""Gated DeltaNet: its options, which are those of the model, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, TypeAlias

from megatron.config.errors import Problem
from megatron.config.option import MAX_LAYERS, MAX_SIZE, MegatronOption, Need, Run, option
from megatron.config.text import divisors, flag_fixes, nearest, selected_layers

Model: TypeAlias = Any
"""The model, a :class:`megatron.config.model.ModelConfig`, which inherits the class of options."""

GATED_DELTA_NET = "gated-delta-net"
"""Name of the mixer."""

CHUNK, SEGMENT = 64, 16
"""Tokens of a chunk of the rule in PyTorch, and chunks whose intermediate tensors exist at a time."""

DELTA = Need("has_gated_delta_net", "layers of gated DeltaNet")


def linear_layers(text: str) -> tuple[int, ...]:
    """Parse ``--linear-attention-freq``: 1 for layers with linear attention, to be repeated; N selects N - 1 of N."""
    layers = selected_layers(text, MAX_LAYERS, first=False)
    return tuple(1 - layer for layer in layers) if text.isdecimal() else layers


@dataclass(frozen=True, init=False, eq=False, repr=False)
class GatedDeltaNetOptions:
    """Options of gated DeltaNet (arXiv 2412.06464), linear attention with the gated delta rule."""

    experimental_attention_variant: str | None = option(
        None,
        role="shape",
        choices=("gdn",),
        megatron=MegatronOption(
            values={"gated_delta_net": "gdn"},
            missing={
                "gdn2": "the second version of gated DeltaNet is not implemented",
                "dsa": "DeepSeek sparse attention is not implemented",
            },
        ),
    )
    """Mixer of the layers that --linear-attention-freq selects: gdn is gated DeltaNet."""
    linear_attention_freq: str | None = option(
        None, role="shape", check=linear_layers, needs="experimental_attention_variant"
    )
    """Layers with linear attention: all but every N-th, or a list with 1 for them and 0 for softmax attention, repeated
    over the layers. Example: '[1]*3+[0]'."""
    linear_conv_kernel_dim: int = option(4, role="shape", at_least=1, at_most=64, needs=DELTA)
    """Width of the causal convolution of queries, keys and values: a token and those before it."""
    linear_key_head_dim: int = option(128, role="shape", at_least=1, at_most=MAX_SIZE, needs=DELTA)
    """Channels of a query and of a key."""
    linear_value_head_dim: int = option(128, role="shape", at_least=1, at_most=MAX_SIZE, needs=DELTA)
    """Channels of a value."""
    linear_num_key_heads: int = option(16, role="shape", at_least=1, at_most=MAX_SIZE, needs=DELTA)
    """Number of heads of queries and of keys."""
    linear_num_value_heads: int = option(32, role="shape", at_least=1, at_most=MAX_SIZE, needs=DELTA)
    """Number of heads of values, each with a state. Consecutive ones share a key head."""

    other_meanings: ClassVar = """
    --hybrid-layer-pattern and has_gated_delta_net and normalization=LayerNorm
      normalization is LayerNorm, and RMSNorm inside of gated DeltaNet; it is LayerNorm there, too, in Megatron-LM

    --experimental-attention-variant and has_gated_delta_net and normalization=LayerNorm
      normalization is LayerNorm, and RMSNorm inside of gated DeltaNet; it is LayerNorm there, too, in Megatron-LM

    --apply-layernorm-1p and has_gated_delta_net
      apply_layernorm_1p is not for the norm inside of gated DeltaNet; in Megatron-LM it is
    """

    refused: ClassVar = """
    experimental_attention_variant and not has_gated_delta_net and not linear_attention_freq
    E117 --experimental-attention-variant {experimental_attention_variant} needs the layers that have it
      fix: --linear-attention-freq 4 | drop --experimental-attention-variant

    hybrid_layer_pattern and linear_attention_freq and experimental_attention_variant
    E117 --linear-attention-freq and --hybrid-layer-pattern, with its G, both choose the layers with linear attention
      fix: drop --linear-attention-freq | drop --hybrid-layer-pattern

    has_two_lists_of_mixers
    E117 --token-mixers and --linear-attention-freq both name the mixers of the layers
      fix: drop --linear-attention-freq | drop --token-mixers
    """

    @property
    def repeated_token_mixers(self: Model) -> tuple[str, ...]:
        """Mixers of the tokens, repeated over the layers; ``attention`` may have a latent."""
        if self.selected_linear_layers is None:
            mixers: tuple[str, ...] = self.token_mixers
            return mixers
        return tuple(GATED_DELTA_NET if each else "attention" for each in self.selected_linear_layers)

    @property
    def selected_linear_layers(self) -> tuple[int, ...] | None:
        """1 for each layer with linear attention, to be repeated; None if ``token_mixers`` names the mixers."""
        freq, variant = self.linear_attention_freq, self.experimental_attention_variant
        return None if freq is None or variant is None else linear_layers(freq)

    @property
    def has_two_lists_of_mixers(self: Model) -> bool:
        """True if both ``token_mixers`` and ``linear_attention_freq`` name the mixers."""
        return self.selected_linear_layers is not None and self.token_mixers != type(self).token_mixers

    @property
    def has_gated_delta_net(self: Model) -> bool:
        """True if gated DeltaNet is among the mixers."""
        return any(GATED_DELTA_NET in mixers for mixers in self.kinds_of_layers)

    def check_delta_heads(self: Model, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that key heads divide the value heads, TP the key heads, and ranks of a2a the value heads."""
        keys, values, parallel = self.linear_num_key_heads, self.linear_num_value_heads, config.parallel
        tp, among = parallel.tensor_model_parallel_size, parallel.cp_head_ranks
        if not self.has_gated_delta_net:
            return
        attention = self.num_attention_heads if self.has_attention or self.has_latent_attention else values
        if values % keys:
            fixes = flag_fixes("--linear-num-key-heads", nearest(keys, divisors(values)))
            yield Problem("E102", f"{values} value heads of gated DeltaNet cannot share {keys} key heads evenly", fixes)
        elif keys % tp:
            fit = [n for n in divisors(gcd(keys, attention)) if world_size % n == 0]
            fixes = flag_fixes("--tensor-model-parallel-size", nearest(tp, fit))
            fixes += flag_fixes("--linear-num-key-heads", nearest(keys, [n for n in divisors(values) if n % tp == 0]))
            yield Problem("E203", f"{keys} key heads of gated DeltaNet do not divide over TP {tp}", fixes)
        elif (held := values // tp) % among:
            heads = gcd(held, attention // tp) * tp
            methods = parallel.context_parallel_methods(heads, parallel.context_parallel_size)
            per_rank = " per TP rank" if tp > 1 else ""
            sentence = f"{parallel.cp_comm_type}: {held} value heads of gated DeltaNet{per_rank} do not divide over"
            yield Problem("E201", f"{sentence} {among} ranks", tuple(each.context_parallel_flags for each in methods))

    def check_linear_layers(self: Model, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that a list of layers has at most as many entries as the model has layers."""
        text = self.linear_attention_freq
        if text is None or text.isdecimal() or (entries := len(linear_layers(text))) <= self.num_layers:
            return
        sentence = f"--linear-attention-freq {text} is for {entries} layers, and the model has {self.num_layers}"
        yield Problem("E117", sentence, ("drop --linear-attention-freq", f"--num-layers {entries}"))
