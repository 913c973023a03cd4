"""Plugins, determinism, CUDA graphs, and the choice of kernels with its language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import Run, option
from megatron.config.plugins import registered
from megatron.config.text import did_you_mean

NO_CUDA_GRAPH = "--cuda-graph none"


def no_gpu_problem(mode: str) -> Problem:
    """Return the problem of a run that captures ``mode`` on a CPU."""
    return Problem("E906", f"--cuda-graph {mode} needs a GPU, and this run uses a CPU", (NO_CUDA_GRAPH,))


@dataclass(frozen=True)
class ComputeConfig:
    """Plugins, choice of kernels, determinism and CUDA graphs."""

    plugin: tuple[str, ...] = option((), role="free", append=True)
    """Modules to import before other options are checked, or names of entry points of the group megatron.plugins. They
    may register optimizers, kernels and more. Repeated flags add up."""
    kernels: tuple[str, ...] = option(("auto",), role="free")
    """auto (the fastest ones installed that pass the check against PyTorch), torch (plain PyTorch, eager), compiled
    (torch.compile between the matrix products), or OPERATION=NAME. The last one given for an operation wins."""
    deterministic: bool = option(False, role="free", aliases={"--deterministic-mode": True})
    """Make repeated runs bitwise equal, or refuse to run."""
    batch_invariant: bool = option(False, role="free", aliases={"--batch-invariant-mode": True})
    """Compute a token alike whatever is beside it in the batch, so that training, scoring and generation find the same
    log-probabilities to the bit; on CPUs, with kernels of a fixed order of addition."""
    cuda_graph: str = option("auto", role="free", choices=("none", "optimizer", "step", "auto"))
    """Part captured and replayed as a CUDA graph: the optimizer, the whole step, or auto: on GPUs the step where it can
    be captured and micro-batches are so short that the host would be the limit, else none."""
    reduced_precision_reduction: bool = option(False, role="free")
    """Let matrix products on GPUs add partial sums in bf16 or fp16, as PyTorch does by default, instead of fp32."""

    refused: ClassVar = """
    cuda_graph=optimizer|step and device=cpu
    E906 --cuda-graph {cuda_graph} needs a GPU, and this run uses a CPU
      fix: --cuda-graph none

    batch_invariant and device=cuda
    E926 --batch-invariant is for CPUs: on GPUs its kernels have not been tried
      fix: --device cpu | drop --batch-invariant

    batch_invariant and fp8_format
    E926 --batch-invariant does not go with --fp8-format: tokens of a micro-batch share a scale
      fix: drop --fp8-format | drop --batch-invariant

    batch_invariant and attention_dropout>0
    E926 --batch-invariant does not go with --attention-dropout {attention_dropout}: another kernel drops weights
      fix: --attention-dropout 0 | drop --batch-invariant

    batch_invariant and lora_rank
    E926 --batch-invariant does not go with --lora-rank: products with adapters depend on the number of tokens
      fix: drop --batch-invariant

    batch_invariant and moe_expert_capacity_factor
    E926 --batch-invariant does not go with --moe-expert-capacity-factor: other tokens decide which are dropped
      fix: drop --moe-expert-capacity-factor | drop --batch-invariant

    batch_invariant and num_experts and moe_router_load_balancing_type=sinkhorn
    E926 --batch-invariant does not go with sinkhorn: in training, the tokens of a sequence share its normalisation
      fix: drop --batch-invariant
    """

    @property
    def kernel_words(self) -> tuple[str, ...]:
        """The words that choose kernels."""
        return (BATCH_INVARIANT,) if self.batch_invariant else self.kernels

    def check_kernels(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that every word of ``--kernels`` names an operation or an implementation that this model can use."""
        problems = list(kernel_problems(self.kernels))
        if self.batch_invariant and self.kernels != ("auto",):
            seen = f"--batch-invariant chooses the kernels, so --kernels {' '.join(self.kernels)} does not go with it"
            problems.append(Problem("E926", seen, ("--kernels auto", "drop --batch-invariant")))
        yield from problems
        if problems or self.batch_invariant:
            return
        choices = kernel_choices(self.kernel_words)
        for operation, choice in choices.items() if config.training.device == "cpu" else ():
            on_cpu = CPU_KERNELS[:1] if operation == "fp8" else CPU_KERNELS
            if choice.alone and choice.name in KERNEL_CANDIDATES[operation] and choice.name not in on_cpu:
                sentence = f"--kernels {operation}={choice.name} needs a GPU, and this run uses a CPU"
                yield Problem("E903", sentence, (f"--kernels {operation}=auto",))
        parallel, choice, model = config.parallel, choices["attention"], config.model
        if not choice.alone or choice.name == "torch" or not (model.has_attention or model.has_latent_attention):
            return
        if model.attention_dropout > 0.0:
            sentence = (
                f"--kernels attention={choice.name} cannot be used with --attention-dropout "
                f"{model.attention_dropout:g}: only PyTorch's unfused attention drops weights"
            )
            yield Problem("E903", sentence, ("--attention-dropout 0", "--kernels attention=auto"))
            return
        scores = f"--softmax-type {model.softmax_type}" if model.softmax_type != "vanilla" else ""
        if not scores and model.attn_logit_softcapping is not None and choice.name in ("cudnn", "varlen"):
            scores = "--attn-logit-softcapping"
        if scores:
            sentence = f"--kernels attention={choice.name} cannot be used with {scores}"
            yield Problem("E903", sentence, ("--kernels attention=auto",))
        elif parallel.context_parallel_size > parallel.cp_head_ranks:
            sentence = (
                f"--kernels attention={choice.name} cannot be used with --cp-comm-type {parallel.cp_comm_type}: "
                "only PyTorch's attention merges the results for the keys of several ranks"
            )
            yield Problem("E903", sentence, ("--kernels attention=auto", "--cp-comm-type a2a"))

    def check_graph_backend(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Reject gloo: it communicates from the CPU, which a graph does not capture."""
        mode, parallel = self.cuda_graph, config.parallel
        if mode not in ("optimizer", "step") or parallel.distributed_backend != "gloo":
            return
        if (parallel.model_ranks if mode == "optimizer" else world_size) > 1:
            sentence = f"--cuda-graph {mode} cannot capture the communication of --distributed-backend gloo"
            yield Problem("E909", sentence, ("--distributed-backend nccl", NO_CUDA_GRAPH))

    def check_graph_attention(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Reject capturing patterns that need FlexAttention, which is untested."""
        model = config.model
        if self.cuda_graph != "step":
            return
        try:
            windows = all(model.pattern(layer).only_window for layer in range(model.num_layers))
        except ValueError:  # reported by the check of the pattern
            return
        if not windows:
            sentence = f"--cuda-graph step is untested with --attention-pattern {model.attention_pattern}"
            yield Problem("E917", sentence, ("--cuda-graph optimizer", NO_CUDA_GRAPH))

    def note_cuda_graph(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note if health reports keep every step from using the graph."""
        if self.cuda_graph == "step" and config.logging.log_health_interval == 1:
            eager = "--cuda-graph step has no effect, because steps with a health report run eagerly"
            yield f"--log-health-interval 1: {eager}"


KERNEL_CANDIDATES: dict[str, tuple[str, ...]] = {
    "norm": ("triton", "apex", "compiled", "torch"),
    "add_norm": ("triton", "compiled", "torch"),
    "split_qkv": ("triton", "compiled", "torch"),
    "latent_qkv": ("triton", "compiled", "torch"),
    "causal_conv": ("causal_conv1d", "torch"),
    "state_space": ("mamba_ssm", "torch"),
    "gated_delta_rule": ("fla", "torch"),
    "activation": ("triton", "compiled", "batch_invariant", "torch"),
    "dropout": ("compiled", "torch"),
    "cross_entropy": ("compiled", "torch"),
    "attention": ("cudnn", "flash_attn", "varlen", "flex", "batch_invariant", "torch"),
    "linear": ("apex", "addmm", "onednn", "batch_invariant", "torch"),
    "grouped_linear": ("grouped_mm", "triton", "onednn", "batch_invariant", "torch"),
    "rows": ("triton", "torch"),
    "adam": ("triton", "apex", "torch"),
    "fp8": ("compiled", "scaled_mm", "torch"),
    "grouped_fp8": ("scaled_grouped_mm", "triton", "torch"),
}
"""Implementations of every operation, in the order that ``auto`` tries; ``torch`` is always available."""

CPU_KERNELS = ("torch", "compiled", "onednn", "batch_invariant")
"""Implementations that run on CPUs; of ``fp8`` only the first does."""

BATCH_INVARIANT = "batch_invariant"
"""Implementations of --batch-invariant."""

KERNEL_ALIASES = {"weight_gradient": "linear", "rotary": "split_qkv"}
"""Earlier names of operations."""

GLOBAL_KERNEL_CHOICES = ("auto", "torch", "compiled")
"""Choices that apply to every operation."""


@dataclass(frozen=True)
class KernelChoice:
    """Implementation chosen for an operation."""

    name: str = "auto"  # of an implementation, or auto
    alone: bool = False  # chosen as OPERATION=NAME: the run is refused if the implementation is unavailable


def kernel_choices(words: Sequence[str]) -> Mapping[str, KernelChoice]:
    """Return the choice for each operation from valid ``--kernels`` arguments. Later ones win."""
    choices = dict.fromkeys(KERNEL_CANDIDATES, KernelChoice())
    for word in words:
        operation, equals, name = word.partition("=")
        if equals:
            choices[KERNEL_ALIASES.get(operation, operation)] = KernelChoice(name, alone=name != "auto")
        else:
            choices = {
                op: KernelChoice(word if word in (*names, "auto") else "torch", alone=word == BATCH_INVARIANT in names)
                for op, names in KERNEL_CANDIDATES.items()
            }
    return choices


def kernel_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for every argument with an unknown operation or implementation."""
    if not words:
        yield Problem("E901", "--kernels has no value", ("--kernels auto",))
    for word in words:
        given, equals, name = word.partition("=")
        operation = KERNEL_ALIASES.get(given, given)
        plugins = (each.partition("=") for each in registered("kernel"))
        added = (plugin for of, _, plugin in plugins if of == operation)
        names = (*dict.fromkeys([*KERNEL_CANDIDATES.get(operation, ()), *added]), "auto")
        if equals and operation in KERNEL_CANDIDATES and name not in names:
            sentence = f"--kernels {word}: implementations of {operation} are {', '.join(names)}"
            yield Problem("E901", sentence, (f"--kernels {operation}={did_you_mean(name, names) or 'auto'}",))
        elif equals and operation not in KERNEL_CANDIDATES:
            guess = did_you_mean(operation, KERNEL_CANDIDATES)
            sentence = f"--kernels {word}: no operation {operation}; operations are {', '.join(KERNEL_CANDIDATES)}"
            yield Problem("E901", sentence, (f"--kernels {guess}={name}" if guess else "--kernels auto",))
        elif not equals and word not in GLOBAL_KERNEL_CHOICES:
            sentence = f"--kernels {word}: not one of {', '.join(GLOBAL_KERNEL_CHOICES)}, nor OPERATION=NAME"
            fix = f"{word}=torch" if word in KERNEL_CANDIDATES else did_you_mean(word, GLOBAL_KERNEL_CHOICES) or "auto"
            yield Problem("E901", sentence, (f"--kernels {fix}",))
