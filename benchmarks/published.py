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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import options, run, table
from megatron.arguments.cli import parse
from megatron.config.batch import get_num_microbatches
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import resolve_pipeline
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
    """What all runs of a source have in common and their rows do not state."""

    # Beginnings of the source's name and of the row's id.
    name: str
    # Flags that describe the framework of these runs.
    flags: str
    # How the source counts FLOPs: a field of FlopsPerToken.
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
    # Bytes per parameter of a rank that the framework keeps more than this project, replicated and sharded.
    more_replicated: float = 0.0
    more_sharded: float = 0.0
    # Share of the activations of this project that the framework keeps in FP8.
    fp8_activations: float = 1.0
    # Bytes per logit that exist at once; this project computes the loss in chunks.
    logits: float = 0.0
    # Bytes per attention score that are kept, of layers that are not recomputed.
    scores: float = 0.0


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
    # DeepSpeed keeps fp16 gradients; with bf16 it keeps those, sums in fp32, and flat copies of both.
    Source("BigScience BLOOM", UNFUSED, "hardware", "", 6.25e9, False, True, 1, more_replicated=-2),
    Source("Zero Bubble", UNFUSED, "full", "", None, False, True, scores=4, logits=12),
    # FSDP shards fp32 weights and gradients, without bf16 weights beside them.
    Source("llm-foundry", EAGER, attention=FLASH_1, more_sharded=-2, logits=8),
    Source("torchtitan", "", "full", "", 50e9, attention=FLASH_2, more_sharded=-2, logits=12),
    Source("torchao", "", "full", "", 50e9, attention=FLASH_2, more_sharded=-2, logits=8),
    Source("Megatron-Bridge", MEGATRON, "megatron", more_replicated=-2, fp8_activations=0.83),
    Source("Megatron-LM examples", MEGATRON, more_replicated=-2, fp8_activations=0.83),
    Source("DeepSpeed on Azure", UNFUSED, "hardware", "", 25e9, False),
    Source("GPT-NeoX", UNFUSED, "hardware", "", 25e9, False),
    Source("nanoGPT", "", attention=FLASH_1),
)

EFFICIENCY: dict[str, float] = {}
"""Share of the peak that large matrix products reach, by GPU, fitted with ``--fit`` to :data:`FITTED`."""

FITTED = {"A100": "llm-foundry", "H100": "llm-foundry", "H100-HBM2e-500W": "torchtitan"}
"""Source of the rows that the efficiency of a GPU is fitted to; those of the other sources test it."""

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
    "DeepSeekV3 (w/ MTP)": "--preset deepseek-v3 --mtp-num-layers 1",
    "DeepSeekV3 (w/o MTP)": "--preset deepseek-v3",
    "Qwen3_30B_a3B": "--preset qwen3-30b-a3b",
    "Qwen3_235B_a22B": "--preset qwen3-30b-a3b --num-layers 94 --hidden-size 4096 --num-attention-heads 64"
    " --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536",
    "GPT OSS 120B": "--preset gpt-oss-20b --num-layers 36 --num-experts 128",
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


def cluster_of(row: Row, source: Source, matmul: float | None = None) -> Cluster:
    """Return the cluster of a row; ``matmul`` replaces the fitted efficiency."""
    cluster, gpu = Cluster.of(accelerator(row), network=source.network), row["hw"]["gpu"]
    efficiency = cluster.efficiency
    attention = next((s for name, s in source.attention.items() if gpu.startswith(name)), efficiency.attention)
    matmul = matmul or EFFICIENCY.get(gpu) or efficiency.matmul
    return replace(cluster, efficiency=replace(efficiency, matmul=matmul, attention=attention))


def source_of(row: Row) -> Source:
    """Return the description of a row's source."""
    found = [each for each in SOURCES if row["source"].startswith(each.name) and row["id"].startswith(each.id)]
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


def recompute_flags(row: Row, layers: int) -> list[list[str]]:
    """Return the flags of a row's recomputation, or of those that it may have had; ``layers`` are those of a stage."""
    kind, full = row["recompute"], ["--recompute-granularity", "full"]
    if kind is None:
        offload = ["--cpu-offloading-num-layers", str(layers)]
        return [[], ["--recompute-granularity", "selective"], offload, full]
    share = OP_RECOMPUTE if re.search(r"\bop\b", kind, re.I) else 0.5 if "layer" in kind and "full" not in kind else 0
    if share:
        return [[*full, "--recompute-method", "block", "--recompute-num-layers", str(max(1, round(share * layers)))]]
    return [full if kind.startswith("full") else []]


def precision_flags(row: Row) -> list[str]:
    """Return the flags of a row's number formats."""
    kind = str(row["precision"]).lower()
    if "fp4" in kind:
        raise UnusableRowError("NVFP4 is not implemented here")
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
    def of(cls, row: Row, cluster: Cluster | None = None) -> Prediction:
        """Return the prediction of a row: of the choices that it leaves open, the fastest one that fits.

        Raises:
            UnusableRowError: if the row lacks what a prediction needs.
        """
        source = source_of(row)
        cluster = cluster or cluster_of(row, source)
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

    def flops_error(self) -> float | None:
        """Return the relative error of the FLOPs per token; None if the row does not state them independently."""
        result = self.row["result"]
        rate = published_rate(self.row)
        wrong = OLD_COUNT in str(self.row.get("flop_count")) or self.row["model"].get("name") == TWO_OF_THREE
        derived = "formula" in (self.row.get("norm") or {}).get("how", "")
        if rate is None or "tflops_gpu" not in result or derived or wrong:
            return None
        counted = getattr(self.flops, self.source.flops)
        return float(counted / (result["tflops_gpu"] * 1e12 / rate) - 1)

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the sends that the row's framework does not hide."""
        stages = self.config.parallel.num_virtual_stages_per_pipeline_rank or 1
        return self.time.seconds + 2 * stages * self.time.microbatches * self.source.sends * self.time.stages.transfer

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
        """Return ``(span - m (F + I + W)) / span``, as in arXiv:2401.10241, section 5.3."""
        parallel = replace(self.config.parallel, pipeline_schedule=schedule or self.config.parallel.pipeline_schedule)
        config = replace(self.config, parallel=resolve_pipeline(self.config.model, parallel))
        count = get_num_microbatches(config.training, self.world_size // config.parallel.model_ranks)
        timeline = step_timeline(config, count, step_time(config, self.world_size, self.cluster).stages)
        return 1 - max(timeline.busy) / timeline.span

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
        (self.experts if prediction.has_experts else self.dense).extend([] if time is None else [time])
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
    parser.add_argument("--list", action="store_true", help="print a line for every row")
    return run("published", parser, sys.argv[1:] if argv is None else argv, measure, page, packages=())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Predict all rows."""
    by_source: dict[str, Errors] = {}
    left_out: dict[str, int] = {}
    for row in read_rows(args.rows):
        if args.source not in row["source"]:
            continue
        try:
            prediction = Prediction.of(row)
            found = by_source.setdefault(row["source"], Errors()).add(prediction)
        except UnusableRowError as error:
            left_out[str(error)] = left_out.get(str(error), 0) + 1
            continue
        if args.list:
            print(json.dumps({"id": row["id"], **found}))
    return {"sources": {name: vars(errors) for name, errors in by_source.items()}, "left out": left_out}


ABOUT = (
    "",
    "Made by `python -m benchmarks.published --write`. Each published row becomes the flags of a run of this project,",
    "which are parsed and checked, and the planner predicts it. Errors are the median of their sizes, the 90th",
    "percentile, and in parentheses the median with its sign: of FLOPs per token, as the source counts them; of the",
    "idle fraction of a pipeline, in points; of the bytes at the peak; and of the time of a token. Verdicts are rows",
    "that ran out of memory and are predicted to fit, and rows that ran and are predicted not to fit.",
)


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    sources: Mapping[str, Any] = result["sources"]
    total = {key: [x for errors in sources.values() for x in errors[key]] for key in vars(Errors()) if key != "rows"}
    total |= {"rows": sum(errors["rows"] for errors in sources.values())}
    heads = ("source", "rows", "FLOPs", "bubble", "memory", "verdicts", "time, dense", "time, experts")
    rows = [
        [
            name,
            errors["rows"],
            *(spread(errors[key]) for key in ("flops", "bubble", "memory")),
            ", ".join(f"{errors['verdicts'].count(each)} {each}" for each in sorted(set(errors["verdicts"]))),
            *(spread(errors[key]) for key in ("dense", "experts")),
        ]
        for name, errors in [*sources.items(), ("all", total)]
    ]
    left_out = [f"* {reason}: {count}" for reason, count in sorted(result["left out"].items())]
    return (
        "\n".join(
            [
                "# The planner beside published runs",
                *ABOUT,
                *table(heads, rows, "lrrrrlrr"),
                "",
                "Rows left out:",
                "",
                *left_out,
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
