"""Update rules, learning-rate and weight-decay schedules, and factors by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MegatronOption, Need, Run, WithPluginOptions, option
from megatron.config.plugins import registered
from megatron.config.training import MAX_BATCH

RULE_STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("exp_avg",),
}
"""State of each built-in update rule per element. Muon updates the matrices of blocks, and adam the rest."""


def state_kinds(rule: str) -> tuple[str, ...]:
    """Return what an update rule, built in or registered by a plugin, keeps of every element."""
    return RULE_STATE[rule] if rule in RULE_STATE else getattr(registered("optimizer").get(rule), "state_kinds", ())


MOMENTS = MegatronOption(
    missing={"fp16": "moments in fp16 are not implemented", "fp8": "moments in fp8 are not implemented"}
)

LR_SCALING = Need("lr_scaling=linear|sqrt")
LR_DECAY = Need("lr_decay_style!=constant", "a learning rate that decays")
WSD = Need("lr_decay_style=WSD")
WARMUP = Need("lr_warmup_fraction>0 or lr_warmup_iters>0 or lr_warmup_samples>0", "a warm-up")
PARAM_REMAINDERS = Need("params_dtype=bf16 and optimizer!=muon", "--bf16 and --optimizer adam, lion or sgd")
FIRST_MOMENT = Need("first_moment", "--optimizer adam or lion")
SECOND_MOMENT = Need("second_moment", "--optimizer adam")


@dataclass(frozen=True)
class OptimizerConfig(WithPluginOptions):
    """Optimizer, learning rate and weight decay schedules. Schedules count samples, not steps."""

    optimizer: str = option(
        "adam",
        role="state",
        choices=tuple(RULE_STATE),
        kind="optimizer",
        megatron=MegatronOption(
            values={"dist_muon": "muon"},
            missing={"soap": "SOAP is not implemented", "adaptive_muon": "adaptive Muon is not implemented"},
        ),
    )
    """Update rule; adam is AdamW."""
    lr: float = option(1e-4, role="schedule", at_least=0)
    """Peak learning rate."""
    min_lr: float = option(0.0, role="schedule", at_least=0, needs=LR_DECAY)
    """Learning rate at the end of the decay."""
    lr_scaling: str = option("none", role="schedule", choices=("none", "linear", "sqrt"))
    """Multiply lr, min_lr and their decoupled forms by the full global batch / lr_base_batch_size (linear, for sgd), or
    by its square root (sqrt, for adam). Not lr_warmup_init."""
    lr_base_batch_size: int | None = option(None, role="schedule", at_least=1, at_most=MAX_BATCH, needs=LR_SCALING)
    """Global batch, in samples, for which lr was chosen."""
    lr_decay_style: str = option(
        "linear",
        role="schedule",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        kind="lr_schedule",
    )
    """Shape of the decay."""
    lr_wsd_decay_style: str = option(
        "exponential", role="schedule", choices=("exponential", "linear", "cosine", "minus_sqrt"), needs=WSD
    )
    """Shape of the final decay of WSD."""
    lr_decay_iters: int | None = option(None, role="schedule", at_least=1)
    """Steps until min_lr. Default: the whole run."""
    lr_decay_samples: int | None = option(None, role="schedule", at_least=1)
    """Samples until min_lr. Default: the whole run."""
    lr_wsd_decay_iters: int | None = option(None, role="schedule", at_least=1, needs=WSD)
    """Steps of WSD's final decay."""
    lr_wsd_decay_samples: int | None = option(None, role="schedule", at_least=1, needs=WSD)
    """Samples of WSD's final decay."""
    lr_warmup_fraction: float | None = option(
        None, role="schedule", at_least=0, below=1, example=0.01, spellings=("--warmup",)
    )
    """Warm-up length as a fraction of the decay length."""
    lr_warmup_iters: int = option(0, role="schedule", at_least=0)
    """Warm-up steps."""
    lr_warmup_samples: int = option(0, role="schedule", at_least=0)
    """Warm-up samples."""
    lr_warmup_init: float = option(0.0, role="schedule", at_least=0, needs=WARMUP)
    """Learning rate at the start of the warm-up."""
    schedule_tokens: tuple[int, int, int, int] | None = option(None, role="schedule", at_least=0)
    """WARMUP DECAY FINAL END: ends of warm-up and decay, length of WSD's final decay (or 0) and end of the run, in
    tokens since its beginning. Default: schedules begin with the phase."""
    weight_decay: float = option(
        0.01, role="schedule", at_least=0, needs=Need("weight_decay_incr_style=constant", "a constant weight decay")
    )
    """Weight decay, decoupled in adam and added to the gradient in sgd. Biases and other 1-D parameters have none."""
    start_weight_decay: float | None = option(None, role="schedule", at_least=0)
    """Initial weight decay of weight_decay_incr_style."""
    end_weight_decay: float | None = option(None, role="schedule", at_least=0)
    """Final weight decay of weight_decay_incr_style."""
    weight_decay_incr_style: str = option("constant", role="schedule", choices=("constant", "linear", "cosine"))
    """Shape of the weight decay schedule."""
    clip_grad: float = option(1.0, role="schedule", at_least=0)
    """Clip the global gradient norm to this; 0 turns clipping off."""
    adam_beta1: float = option(0.9, role="schedule", at_least=0, below=1, needs="optimizer=adam|muon")
    """Decay rate of the first moment."""
    adam_beta2: float = option(0.999, role="schedule", at_least=0, below=1, needs="optimizer=adam|muon")
    """Decay rate of the second moment."""
    adam_eps: float = option(1e-8, role="schedule", above=0, needs="optimizer=adam|muon")
    """Epsilon added to the square root of the second moment."""
    sgd_momentum: float = option(0.9, role="schedule", at_least=0, below=1, needs="optimizer=sgd")
    """Momentum of sgd."""
    lion_beta1: float = option(0.95, role="schedule", at_least=0, below=1, needs="optimizer=lion")
    """Weight of the momentum in lion's update direction."""
    lion_beta2: float = option(0.98, role="schedule", at_least=0, below=1, needs="optimizer=lion")
    """Decay rate of lion's momentum."""
    muon_momentum: float = option(0.9, role="schedule", at_least=0, below=1, needs="optimizer=muon")
    """Momentum of muon."""
    muon_nesterov: bool = option(False, role="schedule", needs="optimizer=muon")
    """Use Nesterov momentum in muon."""
    muon_num_ns_steps: int = option(5, role="schedule", at_least=1, needs="optimizer=muon")
    """Newton-Schulz iterations of muon."""
    muon_fp32_matmul_prec: str = option(
        "medium",
        role="free",
        choices=("medium", "high"),
        needs="optimizer=muon",
        megatron=MegatronOption(missing={"low": "products of muon in low precision are not implemented"}),
    )
    """Matrix products of muon's iterations on a GPU: medium (rounded to bf16) or high (fp32). CPUs use fp32."""
    muon_scale_mode: str = option(
        "spectral", role="schedule", choices=("spectral", "unit_rms_norm", "shape_scaling"), needs="optimizer=muon"
    )
    """Scale of muon's update of a matrix [m, n]: max(m, n)^0.5, (m/n)^0.5, or max(1, m/n)^0.5."""
    muon_extra_scale_factor: float = option(1.0, role="schedule", above=0, needs="optimizer=muon")
    """Extra factor of muon's updates."""
    muon_split_qkv: bool = option(True, role="schedule", aliases={"--muon-no-split-qkv": False}, needs="optimizer=muon")
    """Treat the query, key and value weights as separate matrices in muon."""
    store_param_remainders: bool = option(False, role="free", needs=PARAM_REMAINDERS)
    """With bf16 weights, store only the lower 16 bits of each fp32 main param."""
    exp_avg_dtype: str = option("fp32", role="free", choices=("fp32", "bf16"), needs=FIRST_MOMENT, megatron=MOMENTS)
    """Data type of adam's and lion's first moment."""
    exp_avg_sq_dtype: str = option("fp32", role="free", choices=("fp32", "bf16"), needs=SECOND_MOMENT, megatron=MOMENTS)
    """Data type of adam's second moment."""
    optimizer_cpu_offload: bool = option(False, role="free")
    """Keep main params, moments and averages in host memory, and update them on the CPU. Muon's matrices stay on the
    device."""
    optimizer_offload_fraction: float = option(
        1.0, role="free", at_least=0, at_most=1, needs=Need("optimizer_cpu_offload")
    )
    """Fraction of each rank's shards to offload; whole parameters, those first whose gradients backward completes
    first."""
    decoupled_lr: float | None = option(None, role="schedule", at_least=0)
    """Peak learning rate of the embeddings and the output layer. Default: lr."""
    decoupled_min_lr: float | None = option(None, role="schedule", at_least=0, needs=Need("decoupled_lr"))
    """Final value of decoupled_lr. Default: min_lr."""
    lr_factors: tuple[str, ...] = option((), role="schedule")
    """PATTERN=FACTOR: multiply the learning rate of parameters whose names match. The last match wins."""
    weight_decay_factors: tuple[str, ...] = option((), role="schedule")
    """PATTERN=FACTOR: multiply the weight decay of parameters whose names match. The last match wins. Default: 1 for
    matrices, 0 for biases, norms and other 1-D parameters."""
    ema_decay: float | None = option(None, role="schedule", above=0, below=1, example=0.999)
    """Keep an exponential moving average of the weights with this decay per step."""
    skip_spikes: float | None = option(None, role="schedule", above=0, example=6)
    """A step is a spike if its loss or gradient norm is this many standard deviations above the mean of spike_window.
    on_spike is what follows."""
    spike_window: int = option(128, role="schedule", at_least=2, needs=Need("skip_spikes"))
    """Previous steps over which skip_spikes computes mean and standard deviation."""

    state_copies: ClassVar = {"average": ("ema_decay", 1)}

    refused: ClassVar = """
    cuda_graph=optimizer|step and weight_decay_incr_style!=constant
    E908 --cuda-graph {cuda_graph} needs a constant weight decay, and --weight-decay-incr-style
      {weight_decay_incr_style} changes it
      fix: --weight-decay-incr-style constant | --cuda-graph none

    cuda_graph=optimizer|step and optimizer_cpu_offload
    E940 --cuda-graph {cuda_graph} cannot capture the updates of --optimizer-cpu-offload, which the host computes
      fix: --cuda-graph none | drop --optimizer-cpu-offload
    """

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the window of loss, gradient norm and step of ``skip_spikes``, and of what it has found last."""
        return 0 if self.skip_spikes is None else 8 * (3 * self.spike_window + 7)

    @property
    def first_moment(self) -> bool:
        """True if the update rule keeps a first moment that may be stored in bf16."""
        return self.optimizer != "muon" and "exp_avg" in state_kinds(self.optimizer)

    @property
    def second_moment(self) -> bool:
        """True if the update rule keeps a second moment."""
        return "exp_avg_sq" in state_kinds(self.optimizer)

    def check_weight_decay(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that a constant weight decay has one value, and a changing one a start and an end."""
        style = self.weight_decay_incr_style
        ends = {"--start-weight-decay": self.start_weight_decay, "--end-weight-decay": self.end_weight_decay}
        for name, value in ends.items():
            if style == "constant" and value is not None:
                fixes = ("--weight-decay-incr-style linear", f"drop {name} and use --weight-decay {value:g}")
                yield Problem("E405", f"{name} has no effect on a constant weight decay", fixes)
            elif style != "constant" and value is None:
                fixes = (f"{name} {self.weight_decay:g}", "--weight-decay-incr-style constant")
                yield Problem("E405", f"a {style} weight decay needs {name}", fixes)


def parse_factor(text: str) -> tuple[str, float]:
    """Parse a text such as ``layers.*.bias=0.5`` into pattern and factor.

    Raises:
        ValueError: with a message that completes a sentence that begins with the text.
    """
    pattern, equals, number = text.rpartition("=")
    if not (equals and pattern):
        raise ValueError("has no '=' between a pattern of parameter names and a factor")
    try:
        factor = float(number)
    except ValueError:
        raise ValueError(f"ends with '{number}', which is not a number") from None
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"has the factor {number}, which must be finite and at least 0")
    return pattern, factor


def matching_factor(name: str, factors: Iterable[tuple[str, float]], default: float) -> float:
    """Return the factor of the last shell pattern that matches a parameter's name, or the default."""
    found = default
    for pattern, factor in factors:
        if fnmatchcase(name, pattern):
            found = factor
    return found
