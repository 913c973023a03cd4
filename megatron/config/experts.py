"""Mixture of experts: its options, which are those of the model, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MAX_LAYERS, MAX_SIZE, ZERO_IS_NONE, MegatronOption, Need, Run, option
from megatron.config.text import divisors, flag_fixes, multiples_as_fixes, nearest, selected_layers

EXPERTS = Need("num_experts")


@cache
def expert_layers(text: str) -> tuple[int, ...]:
    """Parse ``--moe-layer-freq``; return 1 for layers with experts, to be repeated over the layers.

    Raises:
        ValueError: for anything else.
    """
    return selected_layers(text, MAX_LAYERS, first=True)


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


SEVERAL_LOSSES = "several balancing losses at once are not implemented"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ExpertOptions:
    """Options of the experts that take the place of a block's MLP."""

    num_experts: int | None = option(None, role="shape", at_least=2, at_most=MAX_SIZE, megatron=ZERO_IS_NONE)
    """Number of experts per block, in place of the MLP (mixture of experts). Default: none."""
    moe_router_topk: int = option(2, role="function", at_least=1, at_most=MAX_SIZE, needs="num_experts")
    """Number of experts per token."""
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
    moe_router_pre_softmax: bool = option(False, role="function", needs=EXPERTS)
    """Apply the softmax over all experts before the top-k, instead of over the chosen experts."""
    moe_router_load_balancing_type: str = option(
        "seq_aux_loss",
        role="schedule",
        choices=("seq_aux_loss", "aux_loss", "none"),
        needs="num_experts",
        megatron=MegatronOption(
            "aux_loss",
            "the loss does not depend on the layout; with --moe-aux-loss-coeff the default is aux_loss here, too",
            missing={
                "sinkhorn": "sinkhorn routing is not implemented",
                "global_aux_loss": "a balancing loss over the global batch is not implemented",
                "quantile_balancing": "quantile balancing is not implemented",
                "several": SEVERAL_LOSSES,
            },
        ),
    )
    """Scope of the load-balancing loss: each sequence (seq_aux_loss), or, as in the Switch Transformer, each
    micro-batch of a rank (aux_loss), which makes it depend on the layout."""
    moe_aux_loss_coeff: float = option(
        0.0, role="schedule", at_least=0, needs=EXPERTS, megatron=MegatronOption(missing={"several": SEVERAL_LOSSES})
    )
    """Weight of the load-balancing loss."""
    moe_z_loss_coeff: float | None = option(None, role="schedule", at_least=0, needs=EXPERTS)
    """Weight of ST-MoE's z-loss, the squared log-partition of the router's logits. Default: 0."""

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
      fix: --moe-ffn-hidden-size {expert_ffn%expert_tp}

    num_experts and add_bias_linear and not moe_latent_size and hidden_size%expert_tp
    E213 biases of experts of hidden size {hidden_size} do not divide over TP {expert_tp}
      fix: --hidden-size {hidden_size%expert_tp} | --disable-bias-linear

    num_experts and add_bias_linear and moe_latent_size%expert_tp
    E213 biases of experts of latent size {moe_latent_size} do not divide over TP {expert_tp}
      fix: --moe-latent-size {moe_latent_size%expert_tp} | --disable-bias-linear

    num_experts and tensor_model_parallel_size>1 and not sequence_parallel
    E214 experts with TP {tensor_model_parallel_size} need sequence parallelism
      fix: --sequence-parallel | --tensor-model-parallel-size 1

    fp8_format and num_experts
    E922 --fp8-format does not support --num-experts: experts are not multiplied in FP8
      fix: drop --fp8-format

    cuda_graph=step and num_experts
    E214 --cuda-graph step does not support experts: their numbers of tokens differ in every step
      fix: --cuda-graph none

    num_experts and moe_router_topk>num_experts
    E214 --moe-router-topk {moe_router_topk} exceeds the {num_experts} experts
      fix: --moe-router-topk {num_experts}
    """

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has experts."""
        layers = expert_layers(self.moe_layer_freq or "1")
        return self.num_experts is not None and bool(layers[layer % len(layers)])

    @property
    def router_losses(self) -> dict[str, float]:
        """Coefficients of the losses of routers that are not 0, by Megatron-LM's names."""
        names = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
        coefficients = {"z_loss": self.moe_z_loss_coeff or 0.0}
        if self.moe_router_load_balancing_type in names:
            coefficients = {names[self.moe_router_load_balancing_type]: self.moe_aux_loss_coeff} | coefficients
        return {name: coefficient for name, coefficient in coefficients.items() if coefficient}

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
            yield Problem("E213", sentence, smaller)

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

    def note_experts(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield notes about losses that depend on the layout, unbalanced experts, and routers without a gradient."""
        model = config.model
        if model.num_experts is None:
            return
        if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
            other = "every weight is 1, so the router gets no gradient (use --moe-router-pre-softmax)"
            yield f"--moe-router-topk 1: {other}"
        missing = [] if model.moe_aux_loss_coeff > 0 else ["--moe-aux-loss-coeff 0.01"]
        if model.moe_router_load_balancing_type == "none":
            missing.append("--moe-router-load-balancing-type seq_aux_loss")
        if missing:
            yield f"no balancing loss ({' '.join(missing)}): a few experts may get all tokens"
        elif model.moe_router_load_balancing_type == "aux_loss":
            what = "the loss depends on the micro-batches, and so on the layout"
            yield f"--moe-router-load-balancing-type aux_loss: {what}"

    def note_few_tokens(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note if the experts get so few tokens of a micro-batch that their products are slow on a GPU."""
        if config.training.device == "cpu" or (tokens := tokens_per_expert(config)) is None or tokens >= FEW_TOKENS:
            return
        what = f"fewer than the {FEW_TOKENS} rows of a tile of a product"
        yield f"at balance an expert gets {tokens:.4g} tokens of a micro-batch, {what}: larger micro-batches are faster"

    def row_experts(self, config: Run, world_size: int) -> str:
        """Return the experts of a rank, and their tokens."""
        parallel, tokens = config.parallel, tokens_per_expert(config)
        if self.num_experts is None or tokens is None:
            return ""
        ep, tp = parallel.expert_model_parallel_size, parallel.expert_tp
        ranks = f" (those of a layer are on {ep * tp} neighbouring ranks)" if ep * tp > 1 else ""
        part = f", 1/{tp} of each" if tp > 1 else ""
        held = f"{self.num_experts // ep} of {self.num_experts} on a rank{part}{ranks}"
        return f"{held}; at balance each gets {tokens:,.4g} tokens of a micro-batch"

    def row_ranks(self, config: Run, world_size: int) -> str:
        """Return the grid of the ranks for experts."""
        parallel, ep = config.parallel, config.parallel.expert_model_parallel_size
        if self.num_experts is None:
            return ""
        copies = world_size // (parallel.pipeline_model_parallel_size * ep * parallel.expert_tp)
        return f"experts: DP {copies} x EP {ep} x TP {parallel.expert_tp}"
