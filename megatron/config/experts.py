"""Mixture of experts: its options, which are those of the model, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MAX_LAYERS, MAX_SIZE, ZERO_IS_NONE, Run, option
from megatron.config.router import EXPERTS
from megatron.config.text import counted, divisors, flag_fixes, multiples_as_fixes, nearest, selected_layers

expert_layers = partial(selected_layers, longest=MAX_LAYERS, first=True)
"""Parse ``--moe-layer-freq``: 1 for layers with experts, to be repeated."""

FEW_TOKENS = 64
"""Rows of a tile of a matrix product on a GPU: experts with fewer tokens use a part of it."""


def tokens_per_expert(config: Run) -> float | None:
    """Return the tokens of a micro-batch that an expert gets if all are chosen equally often; None without experts."""
    model, parallel, training = config.model, config.parallel, config.training
    if model.num_experts is None:
        return None
    ranks = parallel.expert_model_parallel_size * parallel.expert_tp  # which send tokens to an expert
    shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size  # parts of a sequence
    tokens = training.micro_batch_size * training.seq_length / shared
    return float(tokens * model.moe_router_topk * ranks / model.num_experts)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ExpertOptions:
    """Options of the experts that take the place of a block's MLP."""

    num_experts: int | None = option(None, role="shape", at_least=2, at_most=MAX_SIZE, megatron=ZERO_IS_NONE)
    """Number of experts per block, in place of the MLP (mixture of experts). Default: none."""
    moe_layer_freq: str | None = option(None, role="shape", check=expert_layers, needs=EXPERTS)
    """Layers with experts: the first of every N, or a list with 1 for them and 0 for layers with an MLP, repeated over
    the layers. Default: all. Example: '[0]*3+[1]*58'."""
    moe_ffn_hidden_size: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE, needs=EXPERTS)
    """Hidden width of an expert. Default: that of the MLP."""
    moe_shared_expert_intermediate_size: int | None = option(
        None, role="shape", at_least=1, at_most=MAX_SIZE, needs=EXPERTS
    )
    """Hidden width of a shared expert, which processes every token. Default: no shared expert."""
    moe_shared_expert_gate: bool = option(False, role="shape", needs=(EXPERTS, "moe_shared_expert_intermediate_size"))
    """Multiply the output of the shared expert by a gate, the sigmoid of a linear of the hidden state with one output
    (Qwen2-MoE)."""
    moe_latent_size: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE, needs=EXPERTS)
    """Width of the space in which the experts work: the hidden state is projected to it before it is sent to the
    experts, and their sum is projected back. The router and the shared expert take the hidden state (Nemotron 3
    Super). Default: the hidden size."""

    refused: ClassVar = """
    not num_experts and expert_model_parallel_size>1
    E213 expert parallelism of {expert_model_parallel_size} needs experts
      fix: --num-experts {expert_model_parallel_size*4} | --expert-model-parallel-size 1

    num_experts and moe_shared_expert_intermediate_size%tensor_model_parallel_size
    E204 a shared expert of width {moe_shared_expert_intermediate_size} does not divide over TP
    {tensor_model_parallel_size}
      fix: --moe-shared-expert-intermediate-size {moe_shared_expert_intermediate_size%tensor_model_parallel_size}

    num_experts and expert_ffn%expert_tp
    E213 experts of width {expert_ffn} do not divide over TP {expert_tp}
      fix: --moe-ffn-hidden-size {expert_ffn%expert_tp} | --expert-tensor-parallel-size 1

    num_experts and add_bias_linear and not moe_latent_size and hidden_size%expert_tp
    E213 biases of experts of hidden size {hidden_size} do not divide over TP {expert_tp}
      fix: --hidden-size {hidden_size%expert_tp} | --disable-bias-linear

    num_experts and add_bias_linear and moe_latent_size%expert_tp
    E213 biases of experts of latent size {moe_latent_size} do not divide over TP {expert_tp}
      fix: --moe-latent-size {moe_latent_size%expert_tp} | --disable-bias-linear

    num_experts and tensor_model_parallel_size>1 and not sequence_parallel
    E214 experts with TP {tensor_model_parallel_size} need sequence parallelism
      fix: --sequence-parallel | --tensor-model-parallel-size 1

    fp8_format and num_experts and fp8_recipe=mxfp8
    E922 --fp8-recipe mxfp8 does not support --num-experts: experts have no product in mxfp8
      fix: --fp8-recipe rowwise | --fp8-recipe blockwise
    """

    def check_expert_layout(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that experts divide over EP, and that EP x expert TP divides a pipeline stage."""
        parallel, model = config.parallel, config.model
        ep = parallel.expert_model_parallel_size
        if model.num_experts is None:
            return
        tp = parallel.expert_tp
        ranks = world_size // parallel.pipeline_model_parallel_size
        fit = [n for n in divisors(model.num_experts) if ranks % (n * tp) == 0]
        smaller = flag_fixes("--expert-model-parallel-size", nearest(ep, fit))
        if model.num_experts % ep:
            fixes = multiples_as_fixes("--num-experts", model.num_experts, ep) + smaller
            yield Problem("E213", f"{model.num_experts} experts do not divide over EP {ep}", fixes)
        if world_size % parallel.model_ranks == 0 and ranks % (ep * tp):
            sentence = f"EP {ep} x expert TP {tp} does not divide the {ranks} ranks of a pipeline stage"
            narrower = nearest(tp, [n for n in divisors(tp) if ranks % (ep * n) == 0])
            yield Problem("E213", sentence, (*flag_fixes("--expert-tensor-parallel-size", narrower), *smaller))

    def check_expert_layers(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that a list of layers with experts has no more entries than the model has layers, and selects some."""
        model, text = config.model, self.moe_layer_freq
        if model.num_experts is None or text is None:
            return
        freq, drop, layers = f"--moe-layer-freq {text}", "drop --moe-layer-freq", model.num_layers
        if (entries := len(expert_layers(text))) > layers and not text.isdecimal():
            sentence = f"{freq} is for {entries} layers, and the model has {layers}"
            yield Problem("E214", sentence, (drop, f"--num-layers {entries}"))
        elif model.dense_layers == layers:
            yield Problem("E214", f"{freq} leaves no layer for the {model.num_experts} experts", (drop,))

    def note_experts_in_fp8(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note about what FP8 means for experts."""
        precision = config.precision
        if self.num_experts is None or precision.fp8_format is None:
            return
        differences = []
        if precision.fp8_recipe == "tensorwise":
            differences.append("a scale for each row (as rowwise)")
        if precision.fp8_wgrad:
            differences.append(f"weight gradients in {precision.params_dtype}")
        if differences:
            yield f"--fp8-recipe {precision.fp8_recipe}: experts have {' and '.join(differences)}"

    def note_repeated_layers(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note if a list of layers with experts is shorter than the model, so that dense layers come again."""
        text, layers = self.moe_layer_freq, config.model.num_layers
        if self.num_experts is None or text is None or text.isdecimal():
            return
        if (entries := len(expert_layers(text))) < layers:
            yield f"--moe-layer-freq {text} has {entries} entries, which repeat over {layers} layers"

    def note_few_tokens(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note if the experts get so few tokens of a micro-batch that their products are slow on a GPU."""
        if config.training.device == "cpu" or (tokens := tokens_per_expert(config)) is None or tokens >= FEW_TOKENS:
            return
        what = f"fewer than the {FEW_TOKENS} rows of a tile of a product"
        yield f"at balance an expert gets {tokens:.4g} tokens of a micro-batch, {what}: larger micro-batches are faster"

    def row_experts(self, config: Run, world_size: int) -> str:
        """Return the shape of the experts, those of a rank, and their tokens."""
        model, parallel, tokens = config.model, config.parallel, tokens_per_expert(config)
        if model.num_experts is None or tokens is None:
            return ""
        shape = f"{model.moe_router_topk} of {model.num_experts} {model.activation} experts of {model.expert_ffn}"
        shape += f" in a space of {model.moe_latent_size}" if model.moe_latent_size else ""
        shared, gated = model.moe_shared_expert_intermediate_size, "gated " * model.moe_shared_expert_gate
        shape += f" and a {gated}shared one of {shared}" if shared else ""
        shape += f" (in {counted(model.dense_layers, 'layer')} an MLP of {model.ffn})" if model.dense_layers else ""
        shape += ", chosen at random" * model.moe_router_force_load_balancing
        part = f"1/{parallel.expert_tp} of " if parallel.expert_tp > 1 else ""
        held = f"{part}{model.num_experts // parallel.expert_model_parallel_size} on a rank"
        return f"{shape}; {held}, {tokens:,.4g} tokens each at balance"

    def row_ranks(self, config: Run, world_size: int) -> str:
        """Return the grid of the ranks for experts."""
        parallel, ep = config.parallel, config.parallel.expert_model_parallel_size
        if self.num_experts is None:
            return ""
        copies = world_size // (parallel.pipeline_model_parallel_size * ep * parallel.expert_tp)
        return f"experts: DP {copies} x EP {ep} x TP {parallel.expert_tp}"
