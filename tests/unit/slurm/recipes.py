"""The recipes of ``slurm/``: the runs that each would start, and the arithmetic of its header."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments.cli import parse
from megatron.config.batch import final_consumed_samples, final_iteration
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.pipeline import plan
from megatron.planner.flops import FlopsPerToken
from megatron.planner.memory import checkpoint_bytes, max_peak_bytes, max_state_bytes

ROOT = Path(__file__).parents[3]
TRAINING = sorted(path.stem for path in (ROOT / "slurm").glob("train_*.sh"))

GB = 2**30
H100_FLOPS = 989.4e12
"""Of an H100's tensor cores in bf16, without sparsity: NVIDIA's data sheet."""

DISK_BYTES = 50 * GB
"""A second, written by all nodes together."""

FAILURES, DAYS, GPUS = 419, 54, 16384
"""Unplanned interruptions in the training of Llama 3 405B: Grattafiori et al. 2024, section 3.3.4."""


@dataclass(frozen=True)
class Started:
    """The command that a recipe starts.

    Attributes:
        words: of the whole command, srun's first.
        flags: of the program.
        world_size: ranks.
    """

    words: list[str]
    flags: list[str]
    world_size: int

    @classmethod
    def by(cls, recipe: str, *arguments: str, **environ: str) -> Started:
        """Run ``DRY_RUN=1 bash slurm/RECIPE.sh`` without a Slurm, and return the command that it prints."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "NCCL_"))}
        command = ["bash", f"slurm/{recipe}.sh", *arguments]
        environ = {**own, "DRY_RUN": "1", **environ}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        words = shlex.split(done.stdout)
        options = dict(word.partition("=")[::2] for word in words if word.startswith("--") and "=" in word)
        tasks, each = int(options["--ntasks"]), int(options.get("--nproc-per-node", 1))
        return cls(words, words[words.index("pretrain_gpt.py") + 1 :], tasks * each)

    def config(self) -> RunConfig:
        """Return the configuration that the flags set, with generated data in the place of a corpus.

        Raises:
            UserError: when they are refused.
        """
        flags = [*self.flags, "--check-config", "--world-size", str(self.world_size)]
        for name, words in {"--data-path": 2, "--split": 2, "--stop-file": 2}.items():
            if name in flags:
                at = flags.index(name)
                del flags[at : at + words]
        mock = [] if "--mock-data" in flags else ["--mock-data"]
        return parse([*flags, *mock], environ={}).config


def header(recipe: str) -> list[str]:
    """The lines of arithmetic: between the first empty comment and what Slurm reads."""
    text = (ROOT / "slurm" / f"{recipe}.sh").read_text()
    lines = text.partition("\n#\n")[2].partition("\n#SBATCH")[0].splitlines()
    return [line.removeprefix("# ") for line in lines]


def planned_mfu(recipe: str) -> float:
    """The model FLOPs utilisation that a header plans with, and that is nowhere else."""
    found = re.search(r"at MFU (\d+)%", "\n".join(header(recipe)))
    return int(found[1]) / 100 if found else 0.4


def step_seconds(config: RunConfig, world_size: int, mfu: float) -> float:
    """Of a step in the full batch, at a model FLOPs utilisation."""
    training = config.training
    flops = FlopsPerToken.from_config(config).full * training.seq_length * (training.global_batch_size or 0)
    return flops / (world_size * H100_FLOPS * mfu)


def arithmetic(config: RunConfig, world_size: int, mfu: float) -> list[str]:
    """Compute the figures of the first lines of a header."""
    model, parallel, training = config.model, config.parallel, config.training
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    dp, vpp = parallel.data_parallel_size(world_size), parallel.num_virtual_stages_per_pipeline_rank or 1
    batch, micro = training.global_batch_size or 0, training.micro_batch_size
    count = batch // (dp * micro)
    layers = f"{model.num_layers} layers = {pp} x VPP{vpp} x {model.num_layers // (pp * vpp)}; " if pp > 1 else ""
    if model.num_layers % (pp * vpp):
        counts = [stage.count for stage in plan.stage_layers(model, parallel, training.seq_length)]
        layers = f"{model.num_layers} layers in stages of {min(counts)} to {max(counts)}; "
    if model.num_experts is not None:
        ep = parallel.expert_model_parallel_size
        layers = f"experts EP{ep} x DP{world_size // (pp * ep * parallel.expert_tp)}; {layers}"
    bubble = f"bubble {pp - 1}/({vpp}*{count}+{pp - 1}) = {(pp - 1) / (vpp * count + pp - 1):.1%}; " if pp > 1 else ""
    share = f"{batch}/{dp}" if micro == 1 else f"{batch}/{dp}/{micro}"
    state, kept = sum(max_state_bytes(config, world_size).values()) / GB, activation_bytes(config, count) / GB
    shown = f"{kept:.1f}"
    if model.num_experts is not None:  # the forecast, if each is chosen equally often
        shown = f"{max_peak_bytes(config, world_size)['activations'] / GB:.0f}"
    steps, samples = final_iteration(training, dp), final_consumed_samples(training, dp)
    seconds = step_seconds(config, world_size, mfu)
    each = batch * training.seq_length / world_size / seconds
    hours = samples / batch * seconds / 3600
    return [
        f"{world_size} = TP{tp} x PP{pp} x DP{dp}; {layers}{share} = {count} micro-batches",
        f"{bubble}of 80 GB: state {state:.1f} + activations {shown}; a checkpoint has "
        f"{checkpoint_bytes(config) / GB:,.0f} GB",
        f"{tokens(samples * training.seq_length)} tokens = {steps:,} steps; at MFU {mfu:.0%} "
        f"{shown_seconds(seconds)} a step, {each:,.0f} tokens/s a GPU, {shown_hours(hours)}",
    ]


def saving(config: RunConfig, world_size: int, mfu: float) -> list[str]:
    """Compute the interval between saves of a header as Young 1974 does: sqrt(2 x cost x mean time)."""
    hours = DAYS * 24 * GPUS / FAILURES / world_size
    cost = checkpoint_bytes(config) / DISK_BYTES
    steps = math.sqrt(2 * cost * hours * 3600) / step_seconds(config, world_size, mfu)
    return [
        f"a failure every {hours:.0f} h ({FAILURES} in {DAYS} days on {GPUS:,} H100s: Llama 3); to save takes "
        f"{cost:.0f} s at {DISK_BYTES // GB} GB/s, so",
        f"every sqrt(2 x {cost:.0f} s x {hours:.0f} h) = {steps:.0f} steps is best (Young 1974)",
    ]


def shown_seconds(seconds: float) -> str:
    """``7.6 s``, ``0.19 s``."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def shown_hours(hours: float) -> str:
    """``8.4 days``, ``1.1 hours``."""
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def tokens(count: int) -> str:
    """``300B``, ``1.4T``."""
    return f"{count / 1e12:.3g}T" if count >= 1e12 else f"{count / 1e9:.3g}B"


def activation_bytes(config: RunConfig, microbatches: int) -> float:
    """Of the fullest rank: what forward keeps for backward of all micro-batches that it has under way.

    With sequence parallelism every rank has its part of everything: Korthikanti et al. 2022, arXiv:2205.05198.
    """
    model, parallel, training = config.model, config.parallel, config.training
    tokens = training.seq_length * training.micro_batch_size
    layers = model.num_layers
    if parallel.pipeline_model_parallel_size > 1:
        stages = plan.stage_layers(model, parallel, training.seq_length)
        layers = max(plan.peak_counts(parallel, microbatches).activations) * max(stage.count for stage in stages)
    return tokens * layers * layer_bytes(model) / parallel.tensor_model_parallel_size


def layer_bytes(model: ModelConfig) -> int:
    """Return the bytes that a layer keeps of a token, with torch's own kernels, in bf16 and without dropout.

    The inputs of both norms, of QKV, of attention (queries, keys and values; flash attention keeps no scores), of its
    projection, of the MLP, of the activation and of the second matrix; for GPT-3 that is 32 h. Besides: queries and
    keys before they are rotated, the gate after its SiLU, and of RMSNorm fp32 copies.
    """
    query, key = model.num_attention_heads * model.head_dim, model.kv_groups * model.head_dim
    kept = 4 * model.hidden_size + 2 * query + 2 * key + model.ffn * (4 if model.gated else 2)
    if model.position_embedding_type == "rope":
        kept += query + key
    return 2 * kept + (12 * model.hidden_size if model.normalization == "RMSNorm" else 0)
