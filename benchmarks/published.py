"""Compare the planner's predictions with published training runs: FLOPs, pipeline bubbles, memory and time of a step.

Every usable row of ``published.json`` becomes the flags of a run of this project, which are parsed, checked and
predicted. What a row leaves open, and what another framework does differently, is stated once per source
(:data:`SOURCES`). ``--rows FILE`` reads other rows of the same form, ``--list`` prints every row.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import options, run, table
from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import resolve_pipeline
from megatron.pipeline.simulate import StageCosts
from megatron.planner.flops import FlopsPerToken
from megatron.planner.hardware import Accelerator, Cluster, accelerators
from megatron.planner.memory import peaks_by_rank
from megatron.planner.search import HEADROOM
from megatron.planner.step_time import StepTime, step_time, step_timeline

ROWS = Path(__file__).with_name("published.json")
"""A compact copy of the published rows that can be predicted; :func:`compact` writes it."""

Row = Mapping[str, Any]


class UnusableRowError(ValueError):
    """A row that lacks what a prediction needs."""


class Source(NamedTuple):
    """Properties that all runs of a source share and that its rows do not state."""

    # Beginnings of the source's name and of the row's id.
    name: str
    # Flags that describe the framework of these runs.
    flags: str
    # How the source counts FLOPs: a field of FlopsPerToken; "positions" is full, with learned positions as weights.
    flops: str = "full"
    id: str = ""
    # Bytes per second of an accelerator to other nodes; None: as is usual for it.
    network: float | None = None
    # Sequence parallelism wherever TP is used.
    sequence_parallel: bool = True
    # The embedding and the output layer count as a block each when blocks are divided over stages.
    counts_embeddings: bool = False
    # Sends between stages that computing waits for: of each TP rank, the share of a message.
    sends: float = 0.0
    # Share of the peak that the attention kernel of that time reaches, by beginning of the GPU's name.
    attention: Mapping[str, float] = {}
    # Beginning of the rows' precision.
    precision: str = ""
    # Bytes per parameter of a rank that the framework keeps more than this project, replicated and sharded.
    more_replicated: float = 0.0
    more_sharded: float = 0.0
    # Share of the activations of this project that the framework keeps in FP8.
    fp8_activations: float = 1.0
    # Bytes per logit that exist at once; this project computes the loss in chunks.
    logits: float = 0.0


UNFUSED = "--kernels attention=torch"
"""Attention that writes its scores to memory, as before FlashAttention."""

EAGER = "--kernels torch --kernels attention=flash_attn"
"""PyTorch without fused kernels but that of attention."""

MEGATRON = "--use-distributed-optimizer --overlap-param-gather --grad-reduce-in-bf16"
"""Megatron-Core of 2025, which keeps gradients in bf16 (2 bytes less), and with TransformerEngine's FP8 the inputs of
linears in 8 bits: 6.25 of 36 bytes per token and hidden channel of a Llama layer less."""

FLASH_1 = {"A100": 0.36, "H100": 0.19}
"""FlashAttention of 2022, causal, head dimension 128: 110 TFLOP/s on an A100 (arXiv:2307.08691, figure 5), and hardly
more on an H100, whose new instructions it does not use."""

FLASH_2 = {"A100": 0.6, "H100": 0.38}
"""FlashAttention-2, the same (arXiv:2307.08691, figure 5; arXiv:2407.08608, figure 5), which is PyTorch's."""

SOURCES = (
    # DeepSpeed's ZeRO-3 of 2020 gathers every tensor by broadcasts, for which a node uses one card at a time.
    Source("Narayanan et al. SC21 Table 2", UNFUSED, "hardware", "sc21-t2-ZeRO-3", 25e9 / 8, False, more_sharded=-2),
    # fp16 gradients without a copy in fp32.
    Source("Narayanan et al. SC21 Fig 18", UNFUSED, "hardware", "", 25e9, False, False, 1),
    Source("Narayanan et al. SC21", UNFUSED, "hardware", "", 25e9, False, False, 1 / 8, more_replicated=-2),
    # DeepSpeed keeps fp16 gradients. With bf16, which rows of 02-28 have, 6 bytes more than here are seen.
    Source("BigScience BLOOM", UNFUSED, "hardware", "", 6.25e9, False, True, 1, precision="bf16", more_replicated=6),
    Source("BigScience BLOOM", UNFUSED, "hardware", "", 6.25e9, False, True, 1, more_replicated=-2),
    Source("Zero Bubble", UNFUSED, "full", "", None, False, True, logits=12),
    # FSDP shards fp32 weights and gradients, without bf16 weights beside them.
    Source("llm-foundry", EAGER, "positions", attention=FLASH_1, more_sharded=-2, logits=4),
    Source("torchtitan", "", "full", "", 50e9, attention=FLASH_2, more_sharded=-2, logits=12),
    Source("torchao", "", "full", "", 50e9, attention=FLASH_2, more_sharded=-2, logits=8),
    Source("Megatron-Bridge", MEGATRON, "megatron", more_replicated=-2, fp8_activations=0.83),
    Source("Megatron-LM examples", MEGATRON, more_replicated=-2, fp8_activations=0.83),
    Source("DeepSpeed on Azure", UNFUSED, "hardware", "", 25e9, False),
    Source("GPT-NeoX", UNFUSED, "hardware", "", 25e9, False),
    Source("nanoGPT", "", attention=FLASH_1),
)

FITS = (
    ("A100", "matmul", "llm-foundry"),
    ("A100", "link", r"Narayanan et al. SC21 \(Megatron-LM\)"),
    ("H100-HBM2e-500W", "matmul", "titan-asynctp-.*bf16"),
    ("B200", "matmul", "Megatron-Bridge performance summary 25.11"),
    ("GB200", "matmul", "Megatron-Bridge performance summary 25.11"),
    ("GB300", "matmul", "Megatron-Bridge performance summary 25.11"),
)
"""Efficiencies of the hardware table that ``--fit`` finds: of a GPU, and the rows, by an expression for their source or
id, that they are fitted to. All other rows of the GPU test them. An H100 has the default."""

GPUS = {
    "A100": "a100-{mem}g",
    "H100": "h100-80g",
    "H100-HBM2e-500W": "h100-96g",
    "H200": "h200-141g",
    "B200": "b200-180g",
    "B300": "b300-288g",
    "GB200": "gb200-186g",
    "GB300": "gb300-288g",
}
"""Names of accelerators in the hardware table."""

PRESETS = {
    "DeepSeekV3": "--preset deepseek-v3",
    "DeepSeekV3 (w/ MTP)": "--preset deepseek-v3",
    "DeepSeekV3 (w/o MTP)": "--preset deepseek-v3 --set model.mtp_num_layers=null",
    "Qwen3_30B_a3B": "--preset qwen3-30b-a3b",
    "Qwen3_235B_a22B": "--preset qwen3-30b-a3b --num-layers 94 --hidden-size 4096 --num-attention-heads 64"
    " --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536",
    # Attention with sinks, for which Megatron-Bridge's fused kernels are not used.
    "GPT OSS 120B": "--preset gpt-oss-20b --num-layers 36 --num-experts 128 --kernels attention=torch",
    "Nemotron_3_Nano": "--preset nemotron-3-nano-30b-a3b",
}
"""Models that rows name without their sizes; the files of these models on Hugging Face have the sizes."""

FORMATS = {
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise",
    "mx": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "fp8": "--fp8-format hybrid",
    "float8": "--fp8-format hybrid",
}
"""Flags of FP8 by a word of the row's precision; the first one found counts."""

OP_RECOMPUTE = 0.36
"""Share of a block that torchtitan's selective recomputation of operations computes again: every second product of
wq, wk, wv, wo, w1, w3, w2 (wk, wo, w3), by FLOPs of Llama-3-8B."""


OP_KEPT = 0.69
"""Bytes that this keeps over those that the same share of whole blocks would: per token of a Llama-3-8B layer the
outputs of the other products and of attention, and the input, 31,744 elements, instead of 64% of 69,632 and 36% of
4,096."""


def accelerator(row: Row) -> Accelerator:
    """Return the accelerator of a row."""
    gpu, known = row["hw"]["gpu"], accelerators()
    if gpu == "B200" and row["source"].startswith("torchao"):
        raise UnusableRowError("power limited, by how much is not stated")
    if gpu == "H100" and row["source"].startswith("torchao"):
        gpu = "H100-HBM2e-500W"  # the machines of the same authors
    name = GPUS.get(gpu, "").format(mem=row["hw"].get("mem_gb", 80))
    if name not in known:
        raise UnusableRowError(f"{gpu} is not in the hardware table")
    return known[name]


def cluster_of(row: Row, source: Source) -> Cluster:
    """Return the cluster of a row."""
    cluster, gpu = Cluster.of(accelerator(row), network=source.network), row["hw"]["gpu"]
    attention = next((share for name, share in source.attention.items() if gpu.startswith(name)), None)
    if attention is None:
        return cluster
    return replace(cluster, efficiency=replace(cluster.efficiency, attention=attention))


def is_fitted(row: Row) -> bool:
    """Return True for a row that an efficiency of its GPU is fitted to."""
    return any(gpu == row["hw"]["gpu"] and _matches(row, rows) for gpu, _, rows in FITS)


def _matches(row: Row, expression: str) -> bool:
    return any(re.match(expression, row[name]) is not None for name in ("source", "id"))


def source_of(row: Row) -> Source:
    """Return the description of a row's source."""
    precision = str(row["precision"])
    found = [
        each
        for each in SOURCES
        if row["source"].startswith(each.name)
        and row["id"].startswith(each.id)
        and precision.startswith(each.precision)
    ]
    if not found:
        raise UnusableRowError("source without a description")
    return found[0]


def layout(row: Row) -> dict[str, int]:
    """Return the sizes of the rank grid.

    Raises:
        UnusableRowError: if they are not given.
    """
    par, world_size = row["par"], row["hw"].get("n")
    sizes = {axis: par.get(axis) or 1 for axis in ("tp", "pp", "cp", "ep")}
    if not isinstance(world_size, int) or not (par.get("tp") or par.get("dp") or world_size == 1):
        raise UnusableRowError("layout not given")
    model = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if world_size % model or (par.get("dp") or world_size // model) * model != world_size:
        raise UnusableRowError("layout does not fill the ranks")
    return sizes | {"dp": world_size // model, "world": world_size}


def model_flags(row: Row) -> list[str]:
    """Return the flags of a row's model.

    Raises:
        UnusableRowError: if the row lacks a size.
    """
    model = row["model"]
    if model.get("name") in PRESETS:
        return [*PRESETS[model["name"]].split(), "--seq-length", str(model["seq"])]
    if not all(model.get(size) for size in ("layers", "hidden", "heads", "ffn", "seq")):
        raise UnusableRowError("sizes of the model not given")
    sizes = {
        "num-layers": model["layers"],
        "hidden-size": model["hidden"],
        "ffn-hidden-size": model["ffn"],
        "num-attention-heads": model["heads"],
        "num-query-groups": model["kv_heads"] if model["kv_heads"] != model["heads"] else None,
        "seq-length": model["seq"],
        "vocab-size": model.get("vocab") or 50257,
        "num-experts": model.get("experts"),
        "moe-router-topk": model.get("topk"),
        "activation": "swiglu" if model["act"] == "swiglu" else None,
        "position-embedding-type": "rope" if model["pos"] == "rope" else None,
        "normalization": "RMSNorm" if model.get("norm") == "rmsnorm" else None,
    }
    flags = [word for name, value in sizes.items() if value for word in (f"--{name}", str(value))]
    flags += ["--disable-bias-linear"] * (model["act"] == "swiglu")
    flags += ["--untie-embeddings-and-output-weights"] * (not model["tied"])
    return flags + ([] if model.get("dropout") else ["--hidden-dropout", "0", "--attention-dropout", "0"])


def layout_flags(row: Row, source: Source, sizes: Mapping[str, int]) -> list[str]:
    """Return the flags of a row's layout."""
    par, flags = row["par"], []
    for axis in ("tensor", "pipeline"):
        flags += [f"--{axis}-model-parallel-size", str(sizes[axis[0] + "p"])]
    flags += ["--context-parallel-size", str(sizes["cp"])]
    if row["model"].get("experts") or ("ep" in par and sizes["ep"] > 1):
        flags += ["--expert-model-parallel-size", str(sizes["ep"]), "--expert-tensor-parallel-size", "1"]
    if sizes["tp"] > 1 and source.sequence_parallel:
        flags += ["--sequence-parallel"] + ["--tp-comm-overlap"] * bool(par.get("async_tp"))
    zero = str(par.get("zero"))
    if zero == "3" or "FULL_SHARD" in zero or "FSDP2" in zero or par.get("fsdp"):
        flags += ["--data-parallel-sharding-strategy", "optim_grads_params"]
    elif "SHARD_GRAD_OP" in zero or zero == "2":
        flags += ["--data-parallel-sharding-strategy", "optim_grads"]
    elif zero == "1":
        flags += ["--use-distributed-optimizer"]
    layers = row["model"].get("layers")
    if sizes["pp"] > 1 and layers:
        counted = source.counts_embeddings and layers % sizes["pp"] and (layers + 2) % sizes["pp"] == 0
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"] * bool(counted)
    schedule = {"ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}.get(str(par.get("schedule")))
    return flags + (["--pipeline-schedule", schedule] if schedule else [])


def _recomputes_operations(row: Row) -> bool:
    return re.search(r"\bop\b|SAC", str(row["recompute"])) is not None


def recompute_flags(row: Row, layers: int) -> list[list[str]]:
    """Return the flags of a row's recomputation, or of those that it may have had; ``layers`` are those of a stage."""
    kind, full = row["recompute"], ["--recompute-granularity", "full"]
    if kind is None:
        offload = ["--cpu-offloading-num-layers", str(layers)]
        return [[], ["--recompute-granularity", "selective"], offload, full]
    share = OP_RECOMPUTE if _recomputes_operations(row) else 0.5 if "layer" in kind and "full" not in kind else 0
    if share:
        return [[*full, "--recompute-method", "block", "--recompute-num-layers", str(max(1, round(share * layers)))]]
    return [full if kind.startswith("full") else []]


def precision_flags(row: Row) -> list[str]:
    """Return the flags of a row's number formats."""
    kind = str(row["precision"]).lower()
    if "fp4" in kind:
        raise UnusableRowError("NVFP4 is not implemented here")
    if row["model"].get("name") in PRESETS or row["model"].get("experts"):
        kind = kind.replace("mx", "")  # experts have no product in mxfp8 here; one with a scale per tensor stands in
    first = ["--fp16"] if kind.startswith("fp16") else ["--bf16"]
    return first + next((flags.split() for word, flags in FORMATS.items() if word in kind), [])


def virtual_stages(row: Row, pp: int) -> list[int]:
    """Return the stages per pipeline rank of a row, or those that it may have had."""
    vpp, layers = row["par"].get("vpp"), row["model"].get("layers") or 0
    schedule = str(row["par"].get("schedule"))
    if isinstance(vpp, int):
        return [vpp]
    if vpp and "one layer per chunk" in vpp:
        return [(layers + 2) // pp]
    if pp > 1 and (vpp or schedule.startswith("Interleaved")):
        return [count for count in (2, 3, 4) if layers % (pp * count) == 0] or [2]
    return [1]


def flag_sets(row: Row) -> Iterator[list[str]]:
    """Yield the flags of a row; several sets if it leaves out the micro-batch size or the number of stages.

    Raises:
        UnusableRowError: if it leaves out more.
    """
    source, sizes = source_of(row), layout(row)
    batch, dp = row["batch"], sizes["dp"]
    if not batch.get("global_") and not batch.get("micro"):
        raise UnusableRowError("batch size not given")
    common = [*model_flags(row), *layout_flags(row, source, sizes), *source.flags.split(), *precision_flags(row)]
    layers = math.ceil((row["model"].get("layers") or 1) / sizes["pp"])
    if source.name == "torchtitan" and not row["par"].get("compile"):
        common += EAGER.split()
    common += ["--check-config", "--mock-data", "--train-iters", "1", "--world-size", str(sizes["world"])]
    for micro in [batch["micro"]] if batch.get("micro") else [1, 2, 4, 8, 16]:
        if str(row["par"].get("schedule")) in ("1F1B", "Interleaved1F1B") and source.name == "torchtitan":
            micro = max(1, micro // sizes["pp"])  # the row has the samples of a rank, cut into PP micro-batches
        whole = micro * dp
        samples = max(whole, (batch.get("global_") or whole) // whole * whole)
        for count in virtual_stages(row, sizes["pp"]):
            for recompute in recompute_flags(row, layers):
                yield [
                    *common,
                    *recompute,
                    *("--micro-batch-size", str(micro), "--global-batch-size", str(samples)),
                    *(["--num-virtual-stages-per-pipeline-rank", str(count)] if count > 1 else []),
                ]


@dataclass(frozen=True)
class Prediction:
    """A row and what the planner predicts for it."""

    row: Row
    source: Source
    flags: Sequence[str]
    config: RunConfig = field(repr=False)
    cluster: Cluster = field(repr=False)
    world_size: int = 1

    @classmethod
    def of(cls, row: Row) -> Prediction:
        """Return the prediction of a row: of the choices that it leaves open, the fastest one that fits.

        Raises:
            UnusableRowError: if the row lacks what a prediction needs.
        """
        source = source_of(row)
        cluster = cluster_of(row, source)
        found, refused = [], ""
        for flags in flag_sets(row):
            try:
                parsed = parse(flags, {})
                found.append(cls(row, source, flags, parsed.config, cluster, parsed.world_size))
            except (UserError, ScheduleError) as error:
                refused = str(error)
        if not found:
            raise UnusableRowError(f"refused: {refused.splitlines()[0] if refused else ''}")
        if len(found) == 1:
            return found[0]
        found.sort(key=lambda each: each.seconds)
        return next((each for each in found if each.fits), None) or min(found, key=lambda each: each.peak)

    @property
    def fits(self) -> bool:
        """True if the fullest rank has the memory."""
        return self.peak <= HEADROOM * self.memory

    @cached_property
    def time(self) -> StepTime:
        """The predicted time of a step."""
        return step_time(self.config, self.world_size, self.cluster)

    @cached_property
    def peak(self) -> float:
        """Predicted bytes of the fullest rank, with what the row's framework keeps beyond this project."""
        model, training, parallel, source = self.config.model, self.config.training, self.config.parallel, self.source
        parts_by_rank = peaks_by_rank(self.config, self.world_size)
        peaks = [float(sum(parts.values())) for parts in parts_by_rank]
        shards = self.world_size // parallel.model_ranks * parallel.context_parallel_size
        for rank, parts in enumerate(parts_by_rank):
            if self.config.precision.fp8_format is not None:
                peaks[rank] -= parts["activations"] * (1 - source.fp8_activations)
            if _recomputes_operations(self.row):
                peaks[rank] -= parts["activations"] * (1 - OP_KEPT)
            parameters = parts["weights"] / 2 * (shards if parallel.zero_stage == 3 else 1)
            peaks[rank] += parameters * (source.more_replicated + source.more_sharded / shards)
        tokens = training.micro_batch_size * training.seq_length / parallel.context_parallel_size
        peaks[-1] += source.logits * tokens * model.vocab / parallel.tensor_model_parallel_size
        return max(peaks)

    @property
    def memory(self) -> float:
        """Bytes of the accelerator."""
        return self.cluster.accelerator.memory

    @cached_property
    def flops(self) -> FlopsPerToken:
        """FLOPs per token by convention."""
        return FlopsPerToken.from_config(self.config)

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return self.config.model.num_experts is not None

    def with_efficiency(self, name: str, share: float) -> Prediction:
        """Return the prediction with another efficiency."""
        changed = replace(self.cluster, efficiency=replace(self.cluster.efficiency, **{name: share}))
        return replace(self, cluster=changed)

    def flops_error(self) -> float | None:
        """Return the relative error of the FLOPs per token; None if the row does not state them independently."""
        result = self.row["result"]
        rate = published_rate(self.row)
        wrong = OLD_COUNT in str(self.row.get("flop_count")) or self.row["model"].get("name") == TWO_OF_THREE
        derived = "formula" in (self.row.get("norm") or {}).get("how", "")
        if rate is None or "tflops_gpu" not in result or derived or wrong:
            return None
        model, training = self.config.model, self.config.training
        if self.source.flops == "positions":
            counted = self.flops.full + 6 * model.hidden_size * training.seq_length
        else:
            counted = getattr(self.flops, self.source.flops)
        return float(counted / (result["tflops_gpu"] * 1e12 / rate) - 1)

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the sends that the row's framework does not hide."""
        time, stages = self.time, self.config.parallel.num_virtual_stages_per_pipeline_rank or 1
        seconds = time.seconds + 2 * stages * time.microbatches * self.source.sends * time.stages.transfer
        if str(self.row["par"].get("schedule")).startswith("ZB-"):
            # Ranks begin the next step alone: the update is validated afterwards (arXiv:2401.10241, section 4).
            timeline = step_timeline(self.config, time.microbatches, time.stages)
            seconds -= timeline.makespan - timeline.span
        return seconds

    def time_error(self) -> float | None:
        """Return the relative error of the time of a token; None if the row has no speed."""
        rate = published_rate(self.row)
        return None if rate is None else rate / (self.time.tokens / self.seconds / self.world_size) - 1

    def bubble_errors(self) -> dict[str, float]:
        """Return the errors of idle fractions by schedule, each relative to the longest span."""
        result, errors = self.row["result"], {}
        published = {"zb-h1": "bubble_zbh1", "zb-h2": "bubble_zbh2"}
        if self.row["par"].get("schedule") in ("1F1B", "1F1B-I"):
            published[""] = "bubble"
        for schedule, key in published.items():
            if key in result and not (schedule and self.config.parallel.num_virtual_stages_per_pipeline_rank):
                errors[schedule or str(self.row["par"]["schedule"])] = self._bubble(schedule) - result[key]
        return errors

    def _bubble(self, schedule: str) -> float:
        """Return the idle fraction of a step whose stages all take as long as the middle one.

        As in arXiv:2401.10241, section 5.3, which computes it from one time each of F, B, W and of a transfer.
        """
        parallel = replace(self.config.parallel, pipeline_schedule=schedule or self.config.parallel.pipeline_schedule)
        config = replace(self.config, parallel=resolve_pipeline(self.config.model, parallel))
        stages = step_time(config, self.world_size, self.cluster).stages
        count, middle = len(stages.forward), len(stages.forward) // 2
        times = (stages.forward[middle], stages.input[middle], stages.weight[middle])
        alike = StageCosts.uniform(count, *times, stages.latency, stages.transfer)
        return step_timeline(config, self.time.microbatches, alike).span_bubble

    def memory_error(self) -> float | None:
        """Return the relative error of the peak; None if the row has no bytes."""
        measured = published_bytes(self.row)
        return None if measured is None else self.peak / measured - 1

    def verdict(self) -> str | None:
        """Return the mistake of the memory model: "fits" for a row that was out of memory, "impossible" for a run."""
        if self.row["result"].get("oom"):
            return "called fitting" if self.fits else None
        return None if self.fits else "called impossible"


def published_rate(row: Row) -> float | None:
    """Return the tokens per second of an accelerator."""
    result = row["result"]
    if "tok_s_gpu" in result:
        return float(result["tok_s_gpu"])
    rate = (row.get("norm") or {}).get("tok_s_gpu")
    return None if rate is None else float(rate)


OLD_COUNT = "old Megatron-DeepSpeed estimator"
"""Beginning of ``flop_count`` of rows whose FLOPs are about 3 % low, as their source states."""

TWO_OF_THREE = "GPT OSS 120B"
"""Model whose experts Megatron-Bridge counts with two matrices: its gated activation is not "swiglu"."""

CONTEXT = 1.45e9
"""Bytes of a CUDA context, which nvidia-smi counts: 1.3 to 1.6 GB on an A100."""


def published_bytes(row: Row) -> float | None:
    """Return the bytes that PyTorch had allocated at the peak."""
    result = row["result"]
    if "mem_gb_nvidia_smi" in result:
        return float(result["mem_gb_nvidia_smi"]) * 2**30 - CONTEXT
    if "mem_gib" in result:
        return float(result["mem_gib"]) * 2**30
    if "mem_gb" in result:
        return float(result["mem_gb"]) * 1e9
    return None


KEPT = {
    "model": ("name", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "act", "tied", "pos", "norm")
    + ("dropout", "experts", "topk"),
    "hw": ("gpu", "mem_gb", "n"),
    "par": ("tp", "pp", "cp", "ep", "dp", "vpp", "zero", "fsdp", "schedule", "async_tp", "compile"),
    "batch": ("micro", "global_"),
    "result": ("tok_s_gpu", "tflops_gpu", "oom", "mem_gb_nvidia_smi", "mem_gib", "mem_gb", "bubble")
    + ("bubble_zbh1", "bubble_zbh2"),
}
"""Fields of a row that a prediction reads, by group."""


def compact(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the rows that can be described, with the fields that are read; each model and source once."""
    models: dict[str, Any] = {}
    by_source: dict[str, list[Any]] = {}
    for row in rows:
        try:
            flags = list(flag_sets(row))
        except UnusableRowError:
            continue
        if not flags or row["kind"] != "train":
            continue
        kept: dict[str, Any] = {"id": row["id"]}
        for group, names in KEPT.items():
            kept[group] = {name: row[group][name] for name in names if row[group].get(name) is not None}
        model = json.dumps(kept["model"])
        kept["model"] = models.setdefault(model, f"m{len(models)}")
        norm = row.get("norm") or {}
        if "tok_s_gpu" in norm:
            kept["norm"] = {"tok_s_gpu": norm["tok_s_gpu"]}
            if "formula" in norm["how"]:
                kept["norm"]["how"] = "from the formula"
        kept |= {name: row[name] for name in ("recompute", "precision") if row.get(name) is not None}
        kept |= {"flop_count": OLD_COUNT} if OLD_COUNT in str(row["flop_count"]) else {}
        by_source.setdefault(row["source"], []).append(kept)
    return {"models": {name: json.loads(model) for model, name in models.items()}, "sources": by_source}


def write_rows(source: Path, target: Path = ROWS) -> None:
    """Write the compact copy of a file of published rows, a row on a line."""
    kept = compact(read_rows(source))
    parts = [f"{json.dumps(name)}: {json.dumps(model)}" for name, model in kept["models"].items()]
    lists = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "]" for name, rows in kept["sources"].items()
    ]
    text = '{"models": {\n' + ",\n".join(parts) + '},\n"sources": {\n' + ",\n".join(lists) + "}}\n"
    target.write_text(text, "utf-8")


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return the rows of a file, compact or not."""
    found = json.loads(path.read_text("utf-8"))
    if "rows" in found:
        return [row for row in found["rows"] if row["kind"] == "train"]
    return [
        {"recompute": None, "precision": "bf16", **row, "source": source, "model": found["models"][row["model"]]}
        for source, rows in found["sources"].items()
        for row in rows
    ]


@dataclass
class Errors:
    """Errors of some rows."""

    flops: list[float] = field(default_factory=list)
    bubble: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    fitted: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    rows: int = 0

    def add(self, prediction: Prediction) -> dict[str, Any]:
        """Count a row; return its figures."""
        self.rows += 1
        flops, memory, time = prediction.flops_error(), prediction.memory_error(), prediction.time_error()
        bubbles, verdict = prediction.bubble_errors(), prediction.verdict()
        self.flops += [] if flops is None else [flops]
        self.memory += [] if memory is None else [memory]
        self.bubble += bubbles.values()
        self.verdicts += [] if verdict is None else [verdict]
        times = self.experts if prediction.has_experts else self.fitted if is_fitted(prediction.row) else self.dense
        times += [] if time is None else [time]
        parts = {name: round(value, 4) for name, value in prediction.time.parts.items() if value}
        found = {"flops": flops, "memory": memory, "time": time, "verdict": verdict, "parts": parts}
        return found | {"bubble": bubbles, "GB": round(prediction.peak / 1e9, 2)}


def spread(errors: Sequence[float]) -> str:
    """Return the median and the 90th percentile of the sizes of errors, and the median with its sign, in percent."""
    if not errors:
        return ""
    sizes = sorted(map(abs, errors))
    high = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return f"{statistics.median(sizes):.1%}, {high:.1%} ({statistics.median(errors):+.1%})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = options(__doc__, rounds=None)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of published rows")
    parser.add_argument("--source", default="", help="only rows whose source contains this")
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies of accelerators")
    parser.add_argument("--list", action="store_true", help="print a line for every row")
    return run("published", parser, sys.argv[1:] if argv is None else argv, measure, page, packages=())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Predict all rows."""
    by_source: dict[str, Errors] = {}
    by_gpu: dict[str, Errors] = {}
    left_out: Counter[str] = Counter()
    predictions = []
    for row in read_rows(args.rows):
        if args.source not in row["source"]:
            continue
        try:
            prediction = Prediction.of(row)
        except UnusableRowError as error:
            left_out[str(error)] += 1
            continue
        predictions.append(prediction)
        found = by_source.setdefault(row["source"], Errors()).add(prediction)
        by_gpu.setdefault(prediction.cluster.accelerator.name, Errors()).add(prediction)
        if args.list:
            print(json.dumps({"id": row["id"], **found}))
    errors: dict[str, Any] = {
        kind: {name: vars(each) for name, each in some.items()}
        for kind, some in (("sources", by_source), ("accelerators", by_gpu))
    }
    errors["layouts"] = {name: [count, loss] for name, count, loss in ranking(predictions)}
    return errors | {"fits": list(fit(predictions)) if args.fit else [], "left out": dict(left_out)}


def fit(predictions: Sequence[Prediction]) -> Iterator[tuple[str, str, float]]:
    """Yield accelerators, with the efficiency at which the median error of the rows of :data:`FITS` is 0."""
    for gpu, name, expression in FITS:
        of_gpu = [each for each in predictions if each.row["hw"]["gpu"] == gpu and not each.has_experts]
        rows = [each for each in of_gpu if _matches(each.row, expression) and each.time_error() is not None]
        low, high = 0.2, 1.0
        for _ in range(8 if rows else 0):
            middle = (low + high) / 2
            errors = [each.with_efficiency(name, middle).time_error() or 0.0 for each in rows]
            low, high = (middle, high) if statistics.median(errors) > 0 else (low, middle)
        if rows:
            yield rows[0].cluster.accelerator.name, name, round((low + high) / 2, 2)


STUDY = (("model", "layers"), ("model", "hidden"), ("model", "heads"), ("model", "seq"), ("hw", "gpu"), ("hw", "n"))
"""Fields that the rows of a study of layouts have in common, beside source, global batch and precision."""

LAYOUT = (("batch", "micro"), *(("par", name) for name in ("tp", "pp", "dp", "cp", "vpp", "zero", "schedule")))
"""Fields in which they differ."""


def ranking(predictions: Iterable[Prediction]) -> Iterator[tuple[str, int, float]]:
    """Yield studies of at least three layouts, and what the one predicted to be the fastest loses.

    The loss is relative to the one that was measured to be.
    """
    studies: dict[str, dict[str, tuple[float, float]]] = {}
    for each in predictions:
        error, rate, row = each.time_error(), published_rate(each.row), each.row
        if error is None or rate is None:
            continue
        layers, hidden, heads, length, gpu, count = (row[group].get(name) for group, name in STUDY)
        name = f"{row['source'].partition(' (')[0]}: {row['model']['name']}, {layers} x {hidden}, {heads} heads, "
        name += f"{length} tokens, batch {row['batch'].get('global_')}, {row['precision']}, {count} {gpu}"
        layout = json.dumps([row[group].get(field) for group, field in LAYOUT])
        # Of a layout that was measured twice, the last one.
        studies.setdefault(name, {})[layout] = rate / (1 + error), rate
    for name, layouts in studies.items():
        if len(layouts) >= 3:
            yield name, len(layouts), max(rate for _, rate in layouts.values()) / max(layouts.values())[1] - 1


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    sources: Mapping[str, Any] = result["sources"]
    total = {key: [x for errors in sources.values() for x in errors[key]] for key in vars(Errors()) if key != "rows"}
    total |= {"rows": sum(errors["rows"] for errors in sources.values())}
    heads = ("rows", "FLOPs", "bubble", "memory", "verdicts", "time, fitted", "time, tested", "time, experts")
    lines = ["# The planner beside published runs", *ABOUT]
    lines += _error_table(("source", *heads), [*sources.items(), ("all", total)])
    lines += ["", *BY_GPU, *_error_table(("accelerator", *heads), result["accelerators"].items())]
    lines += [f"* fitted: {name}, {field} {share:g}" for name, field, share in result["fits"]]
    rows = [[name, count, f"{loss:.1%}"] for name, (count, loss) in result["layouts"].items()]
    losses = [loss for _, loss in result["layouts"].values()]
    if losses:
        rows.append(["median", "", f"{statistics.median(losses):.1%}"])
    lines += ["", *RANKED, *table(("study", "layouts", "loss"), rows, "lrr")]
    lines += ["", *MECHANISMS, "", "Rows left out:", ""]
    lines += [f"* {reason}: {count}" for reason, count in sorted(result["left out"].items())]
    return "\n".join(lines) + "\n"


def _error_table(heads: Sequence[str], errors: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    rows = [
        [
            name,
            each["rows"],
            *(spread(each[key]) for key in ("flops", "bubble", "memory")),
            ", ".join(f"{each['verdicts'].count(text)} {text}" for text in sorted(set(each["verdicts"]))),
            *(spread(each[key]) for key in ("fitted", "dense", "experts")),
        ]
        for name, each in errors
    ]
    return table(heads, rows, "lrrrrlrrr")


ABOUT = (
    "",
    "Made by `python -m benchmarks.published --fit --write`. Each published row becomes the flags of a run of this",
    "project, which are parsed and checked, and the planner predicts it. Errors are the median of their sizes, the",
    "90th percentile, and in parentheses the median with its sign: of FLOPs per token, as the source counts them; of",
    "the idle fraction of a pipeline, in points; of the bytes at the peak; and of the time of a token, for rows that",
    "an efficiency is fitted to, other dense ones, and those of experts. Verdicts are rows that ran out of memory and",
    "are predicted to fit, and rows that ran and are predicted not to fit.",
)

BY_GPU = (
    "Efficiencies (`megatron/planner/hardware.yaml`) are one record per accelerator, fitted with `--fit` to rows of",
    "one source and tested on those of the others: an A100's to MPT (`matmul`) and to Table 1 of SC21 (`link`), that",
    "of the H100 with 500 W to the bf16 rows of torchtitan's report on asynchronous TP, those of B200, GB200 and GB300",
    "to release 25.11 of Megatron-Bridge. An H100 has the default, which agrees with this project's own measurements",
    "(gpu.md); all its rows are tests.",
)

RANKED = (
    "## Layouts",
    "",
    "Of each study with at least three layouts of one model and batch on equally many ranks: what the one that is",
    "predicted to be the fastest loses to the one that was measured to be.",
)

MECHANISMS = (
    "## What other frameworks do differently",
    "",
    "`SOURCES` in `benchmarks/published.py` states these once per source:",
    "",
    "* SC21, BLOOM, Zero Bubble: unfused attention, no sequence parallelism. Heads whose channels are no multiple of 8",
    "  run without tensor cores (BLOOM, 13824 / 128 = 108).",
    "* SC21 and BLOOM: computing waits for the sends between stages; SC21 sends an 8th of a message from each TP",
    "  rank (scatter/gather), figure 18 without it and BLOOM the whole one, over half a 100 Gb/s card per GPU.",
    "* Zero Bubble's own schedules: a rank begins the next step alone, so a step takes the longest span of a rank.",
    "* ZeRO-3 in SC21's Table 2: tensors are broadcast one by one, for which a node uses one card at a time.",
    "* MPT: eager PyTorch with FlashAttention of 2022; FSDP without bf16 weights beside fp32 shards; logits and their",
    "  gradient at once, in bf16.",
    "* torchtitan: FlashAttention-2; logits of all tokens at once, 12 bytes each; recomputation of every second",
    "  product as 36% of the blocks.",
    "* GPT-OSS in Megatron-Bridge: attention with sinks is not fused, which is half of the step.",
    "* Megatron-Bridge: gradients in bf16, inputs of linears kept in FP8; recomputation is not stated, so it is the",
    "  fastest of none, selective, offload and full that fits.",
    "",
    "What is known and not modelled:",
    "",
    "* BLOOM with TP 8 and small micro-batches is 10 to 20% slower than predicted, also on one node.",
    "* FP8 by rows in torchtitan is 30 to 40% slower than predicted, and its ring attention beyond 2 ranks 40%.",
    "* An H100 of 2023 (MPT) is 14% slower than predicted, with the libraries of that time.",
    "* Experts that are sent to other nodes travel without copies and behind computing in Megatron-Bridge (Qwen3 on",
    "  H100); fine-grained experts on one node are slower than predicted.",
    "* Of Nemotron 3 Nano, Megatron-Bridge counts 7% more FLOPs.",
    "* FLOPs of GPT-OSS are not compared: Megatron-Bridge counts two of the three matrices of its experts.",
    "* Memory of other frameworks: unfused attention keeps its scores in Zero Bubble's runs, FSDP2 frees more than",
    "  whole recomputed blocks do, and what allocators hold beyond tensors is unknown. DeepSpeed with bf16 keeps 6",
    "  bytes per parameter more (added above). Logits at once explain torchtitan's long sequences to 1%.",
)


if __name__ == "__main__":
    raise SystemExit(main())
