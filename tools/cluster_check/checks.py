"""The checks of a cluster: what each rank runs, and how the results are judged.

Machines: versions and hardware on every node, compared between nodes. File system: visibility, atomic renames and
locks, tested through the folder alone, so that it also works where collectives fail. Layouts: a few training steps in
several layouts, under the cluster's own backend, compared with one process; every rank writes what it computed to a
file, and the files are compared without the collectives under test. Interruption: a rank kills itself during a step.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.arguments.cli import parse
from megatron.checkpoint.durable_files import durable_rename, publish_file
from megatron.config.compute import ComputeConfig
from megatron.config.errors import UserError
from megatron.config.launch import Launch
from megatron.config.privacy import secret_variables
from megatron.config.run import RunConfig
from megatron.distributed.launch import destroy_distributed
from megatron.distributed.sharding import Box
from megatron.kernels.registry import select_kernels
from megatron.training.build import build_trainer
from megatron.training.build_model import join_distributed
from megatron.training.failure_report import host_name
from megatron.training.loggers.run_folder import environment_info, git_state
from megatron.training.main import run
from megatron.training.trainer import Trainer
from tools.cluster_check.filesystem import FileSystemProbe, check_file_system
from tools.cluster_check.report import FAILED, OK, WARNING, CheckSection
from tools.lib.machine_health import infiniband_ports, network_interfaces, nvidia_driver_version
from tools.lib.verify_parallel import RankTrace, StepTrace, TracedPiece, compare_traces, join_traces, trace_steps

REPORTED_VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|FI|OMP|CUDA|CUBLAS|SLURM)_\w+|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|\w+_TF32_\w*OVERRIDE"
)
"""Environment variables for the report, unless they may hold credentials."""
SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
    "SLURM_RESTART_COUNT",
)

COMPARED_FACTS = (
    *("python", "torch", "cuda", "nccl", "driver", "kernel", "packages", "gpus", "infiniband", "kernels", "commit"),
    "environment",
)
"""Facts that should be the same on every node."""
REQUIRED_EQUAL = ("python", "torch", "cuda", "nccl", "commit")
"""Of these, the ones that must be: with different versions, ranks may compute different results."""


def write_machine_facts(folder: Path, device: str, seconds: float) -> None:
    """Write this rank's facts to ``machine.RANK.json`` in ``folder``, without any collective."""
    launch, hostname = Launch.read(os.environ), host_name(os.environ)
    prober = FileSystemProbe(
        folder / "probe", launch.rank, launch.world_size, hostname, launch.local_rank == 0, seconds
    )
    prober.folder.mkdir(exist_ok=True)
    facts: dict[str, Any] = {"files": prober.probe(256 if torch.cuda.is_available() else 16)}
    facts |= {"rank": launch.rank, "size": launch.world_size, "host": hostname, "local_rank": launch.local_rank}
    if launch.local_rank == 0:  # the kernel checks take time, so run them once per node
        facts |= machine_facts(device)
    publish_file(folder / f"machine.{launch.rank}.json", json.dumps(facts).encode())


def machine_facts(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return this machine's software and hardware."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    name, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    try:  # those that a run selects here by default, and those it rejects
        kernels = select_kernels(ComputeConfig().kernels, torch.device(name), dtype)[1]
    except UserError as error:
        kernels = [str(error)]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if on_gpu else []
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": nvidia_driver_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "packages": environment_info("", 1)["packages"],
        "kernels": kernels,
        "infiniband": infiniband_ports(),
        "network": network_interfaces(),
        "environment": reported_environment(environ),
        "commit": git_state(Path(__file__).parent)[0],
    }


def reported_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the environment variables for the report: relevant to a run, and not secret."""
    secret = secret_variables(environ)
    return {
        name: value
        for name, value in sorted(environ.items())
        if REPORTED_VARIABLES.fullmatch(name)
        and name not in secret
        and (not name.startswith("SLURM_") or name in SLURM_VARIABLES)
    }


def check_machines(part: CheckSection, folder: Path) -> dict[int, dict[str, Any]]:
    """Check the facts that the ranks wrote, record the checks in ``part``, and return the facts by rank."""
    by_rank = {facts["rank"]: facts for facts in (json.loads(p.read_text()) for p in folder.glob("machine.*.json"))}
    part.facts["ranks"] = [by_rank[rank] for rank in sorted(by_rank)]
    size = max((facts["size"] for facts in by_rank.values()), default=0)
    missing = sorted(set(range(size)) - by_rank.keys())
    if not by_rank:
        seen = "none did; see the log below"
    else:
        seen = f"no report from ranks {', '.join(map(str, missing))}" if missing else f"{len(by_rank)} did"
    if not part.add("all ranks start", bool(by_rank) and not missing, seen):
        return by_rank
    nodes = {facts["host"]: facts for facts in by_rank.values() if facts["local_rank"] == 0}
    for name in COMPARED_FACTS:
        nodes_by_value: dict[str, list[str]] = {}
        for node, facts in nodes.items():
            nodes_by_value.setdefault(json.dumps(facts[name]), []).append(node)
        if len(nodes_by_value) > 1:
            seen = "; ".join(f"{', '.join(found)}: {value}" for value, found in nodes_by_value.items())
            part.add(f"{name} the same on all nodes", False, seen, FAILED if name in REQUIRED_EQUAL else WARNING)
    hosts = {rank: facts["host"] for rank, facts in by_rank.items()}
    files = {rank: facts["files"] for rank, facts in by_rank.items()}
    check_file_system(part, files, hosts)
    part.tables["Nodes"] = _nodes(nodes, hosts)
    part.tables["Software"] = _software(next(iter(nodes.values())))
    return by_rank


def check_gpus(part: CheckSection, nodes: Sequence[Mapping[str, Any]], device: str) -> None:
    """Record a failure for nodes without GPUs that should have some.

    They should if CUDA was requested, if other nodes have GPUs, or if an NVIDIA driver is installed.

    Args:
        part: receives the check.
        nodes: facts of every node.
        device: the requested device.
    """
    any_gpus = any(facts["gpus"] for facts in nodes)
    expected = [facts for facts in nodes if device == "cuda" or (device == "auto" and (any_gpus or facts["driver"]))]
    without = [facts for facts in expected if not facts["gpus"]]
    if without:
        hosts, first = ", ".join(facts["host"] for facts in without), without[0]
        built = f"built for CUDA {first['cuda']}" if first["cuda"] else "built without CUDA"
        driver = f"driver {first['driver']}" if first["driver"] else "no driver"
        seen = f"none found on {hosts}: torch {first['torch']} is {built}, and there is {driver} (or give --device cpu)"
        part.add("GPUs", False, seen)


def fabric_rate(facts: Mapping[str, Any]) -> float:
    """Return the rate of a node's active InfiniBand ports, 10^9 bytes a second; 0 if NCCL must not use them."""
    if facts["environment"].get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return 0.0
    up = [re.search(r" (\d+(?:\.\d+)?) Gb/sec", port) for port in facts["infiniband"] if port.endswith(" ACTIVE")]
    return sum(float(found[1]) for found in up if found) / 8


def _nodes(nodes: Mapping[str, dict[str, Any]], hosts: Mapping[int, str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("node", "ranks", "CPUs", "GPUs", "InfiniBand", "network", "disk, MB/s")]
    for node, facts in nodes.items():
        gpus = f"{len(facts['gpus'])} x {facts['gpus'][0]}" if facts["gpus"] else "none"
        rate = facts["files"].get("write_mb_per_s")
        fabric = ", ".join(facts["infiniband"]) or "none"
        count, cpus = sum(host == node for host in hosts.values()), str(facts["cpus"])
        disk = f"{rate:.0f}" if rate else "not measured"
        rows.append((node, str(count), cpus, gpus, fabric, ", ".join(facts["network"]) or "none", disk))
    return rows


def _software(facts: Mapping[str, Any]) -> list[Sequence[str]]:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    variables = ", ".join(f"{name}={value}" for name, value in facts["environment"].items())
    stack = [f"{name} {facts[key]}" for name, key in (("CUDA", "cuda"), ("NCCL", "nccl"), ("driver", "driver"))]
    gpu = ", ".join(text for text in stack if not text.endswith("None")) or "none"
    return [
        ("", ""),
        ("Python, Linux", f"{facts['python']}, {facts['kernel']}"),
        ("GPU software", gpu),
        ("packages", packages),
        ("kernels", "; ".join(facts["kernels"])),
        ("environment", variables),
    ]


MODEL_FLAGS = (
    "--mock-data --vocab-size 512 --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 "
    "--seq-length 64 --max-position-embeddings 64 --init-method-std 0.05 --seed 1234"
)
"""A model that takes milliseconds per step, with heads and layers that many layouts divide."""

EXPERT_FLAGS = "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 64 --disable-bias-linear"
"""Make the model a mixture of experts. Every token uses all experts: if rounding could choose between two, correct
layouts would differ."""

ZERO_1, ZERO_2 = "--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads --overlap-param-gather"
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CONTEXT = "--context-parallel-size"
STAGES = "--num-virtual-stages-per-pipeline-rank 2"
MAX_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class LayoutCase:
    """One parallel layout."""

    name: str  # in the report
    flags: str  # command-line flags
    experts: bool = False  # whether the model is a mixture of experts


def layout_cases(ranks: int, per_node: int) -> list[LayoutCase]:
    """Return the layouts for ``ranks`` ranks, ``per_node`` on every node; none for a single rank."""
    if ranks == 1:
        return []
    tp, half = widest_divisor(per_node), f"{PIPELINE} 2"
    cases = [
        LayoutCase(f"DP{ranks}", ""),
        LayoutCase(f"DP{ranks}, ZeRO-1", ZERO_1),
        LayoutCase(f"DP{ranks}, ZeRO-2", ZERO_2),
    ]
    if tp > 1:
        cases.append(LayoutCase(f"TP{tp} SP{_dp(ranks // tp)}", f"{TENSOR} {tp} --sequence-parallel"))
    if ranks % 2 == 0:
        cases += [
            LayoutCase(f"PP2{_dp(ranks // 2)}", half),
            LayoutCase(f"PP2 VPP2{_dp(ranks // 2)}, ZeRO-1", f"{half} {STAGES} {ZERO_1}"),
            LayoutCase(f"EP2{_dp(ranks)}", "--expert-model-parallel-size 2", experts=True),
        ]
    if ranks % 4 == 0:
        both = f"{TENSOR} 2 --sequence-parallel"
        cases += [
            LayoutCase(f"TP2 SP PP2 VPP2{_dp(ranks // 4)}, ZeRO-2", f"{both} {half} {STAGES} {ZERO_2}"),
            LayoutCase(f"EP2 TP2 SP{_dp(ranks // 2)}, ZeRO-1", f"{both} --expert-model-parallel-size 2 {ZERO_1}", True),
        ]
    if ranks % 2 == 0:
        cases.append(LayoutCase(f"CP2 p2p{_dp(ranks // 2)}", f"{CONTEXT} 2"))
    if ranks % 4 == 0:
        sizes = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
        cases.append(LayoutCase(f"CP4 a2a+p2p{_dp(ranks // 4)}, ZeRO-1", f"{CONTEXT} 4 {sizes} {ZERO_1}"))
    return cases


def widest_divisor(ranks: int) -> int:
    """Return the largest tensor-parallel size of at most ``MAX_TENSOR_PARALLEL`` that divides the ranks of a node."""
    return max(size for size in (1, 2, 4, MAX_TENSOR_PARALLEL) if ranks % size == 0)


def _dp(size: int) -> str:
    return f" DP{size}" if size > 1 else ""


def batch_flags(ranks: int) -> str:
    """Return a global batch size that all layouts divide and that gives pipelines enough micro-batches."""
    return f"--global-batch-size {2 * ranks}"


STEPS, LR = 3, 1e-3
TRACE_FLAGS = f"--lr {LR} --adam-eps 1e-3 --clip-grad 1.0 --train-iters 100 --distributed-timeout-minutes 5"
"""A large ``--adam-eps``, so that gradients that are only rounding errors move no weight."""

LAYOUT_FORMATS = {"fp32": "--kernels torch", "bf16": "--bf16"}
"""fp32 with reference kernels compares the communication alone, bf16 a run with its usual kernels."""

LAYOUT_TOLERANCE = {
    "fp32": {"loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-5, "weight": 1e-5},
    "bf16": {"loss": 1e-3, "grad_norm": 1e-2, "gradient": 1e-1, "weight": 1e-1},
}
"""Allowed relative errors, in the 2-norm for tensors: about ten times those measured on CPUs with gloo."""

GRADIENT_FLOOR = 1e-2
"""Lower bound of a gradient's norm, relative to all gradients: some are zero up to rounding."""

MODEL_NAMES = {False: "dense", True: "experts"}


@dataclass(frozen=True)
class SingleRankTrace:
    """Results that one rank computed alone. Rank 0's is the reference; the others must agree with it."""

    host: str
    steps: list[RankTrace]


def trace_config(flags: str, experts: bool, dtype: str, device: str, rank: int, ranks: int) -> RunConfig:
    """Return a rank's configuration with the layout ``flags``."""
    args = [MODEL_FLAGS, EXPERT_FLAGS if experts else "", TRACE_FLAGS, LAYOUT_FORMATS[dtype], flags, "--device", device]
    return parse(" ".join(args).split(), {"RANK": str(rank), "WORLD_SIZE": str(ranks)}).config


def trace_selected_layouts(folder: Path, dtype: str, device: str, numbers: str, per_node: str) -> None:
    """Run `trace_layouts` with command-line arguments; ``numbers`` are the layouts' indices, separated by commas."""
    launch = Launch.read(os.environ)
    cases = layout_cases(launch.world_size, int(per_node))
    selected = [cases[int(number)] for number in numbers.split(",")]
    trace_layouts(folder, dtype, device, selected, launch.rank, launch.world_size)
    destroy_distributed()


def trace_layouts(folder: Path, dtype: str, device: str, cases: Sequence[LayoutCase], rank: int, ranks: int) -> None:
    """Trace the single-process reference and then the layouts on this rank; write each trace to ``folder``."""
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images default to TF32, which has 10 bits
    for case in cases:
        path, flags = folder / f"alone.{MODEL_NAMES[case.experts]}.{dtype}.{rank}.pt", batch_flags(ranks)
        config = trace_config(f"{flags} {case.flags}", case.experts, dtype, device, rank, ranks)
        join_distributed(config)
        if not path.exists():
            alone = build_trainer(trace_config(flags, case.experts, dtype, device, 0, 1), 0, 1)
            steps = trace_steps(alone, STEPS)
            if rank:  # loss and gradient norm suffice to compare devices
                steps = [RankTrace(step.loss, step.grad_norm, {}, {}) for step in steps]
            save_atomic(path, SingleRankTrace(host_name(os.environ), steps))
        save_atomic(folder / trace_file_name(case, dtype, rank), trace_steps(build_trainer(config, rank, ranks), STEPS))


def trace_file_name(case: LayoutCase, dtype: str, rank: int) -> str:
    """Return the file name of a rank's trace in a layout."""
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    return f"layout.{name}.{dtype}.{rank}.pt"


def save_atomic(path: Path, value: object) -> None:
    """Write a file atomically."""
    torch.save(value, path.with_suffix(".new"))
    durable_rename(path.with_suffix(".new"), path)


def is_done(folder: Path, case: LayoutCase, dtype: str, ranks: int) -> bool:
    """Return True if every rank finished a layout."""
    return all((folder / trace_file_name(case, dtype, rank)).exists() for rank in range(ranks))


def load_trace(path: Path) -> Any:
    """Read a file written by `save_atomic`: tensors, numbers and texts in these classes, and no other object."""
    with torch.serialization.safe_globals([Box, RankTrace, SingleRankTrace, TracedPiece]):
        return torch.load(path, weights_only=True)


def check_layouts(part: CheckSection, folder: Path, dtype: str, cases: Iterable[LayoutCase], ranks: int) -> None:
    """Compare the traces of the finished layouts with one process, and record the checks in ``part``."""
    rows: list[Sequence[str]] = [("layout", "", "loss", "gradient norm", "gradients", "weights")]
    done = [case for case in cases if is_done(folder, case, dtype, ranks)]
    for model in dict.fromkeys(MODEL_NAMES[case.experts] for case in done):
        check_devices(part, folder, model, dtype, ranks)
    for case in done:
        what = f"{case.name}, {dtype}"
        reference = [
            join_traces([step]) for step in load_trace(folder / f"alone.{MODEL_NAMES[case.experts]}.{dtype}.0.pt").steps
        ]
        try:
            steps = [
                join_traces(step)
                for step in zip(*(load_trace(folder / trace_file_name(case, dtype, r)) for r in range(ranks)))
            ]
            worst, errors = compare_with_reference(dtype, steps, reference)
        except ValueError as error:  # the ranks' shards do not cover the tensors
            part.add(what, False, str(error))
            continue
        part.facts[what] = worst
        for sentence in errors:
            part.add(what, False, sentence)
        rows.append((case.name, FAILED if errors else OK, *(f"{worst[kind]:.1e}" for kind in LAYOUT_TOLERANCE[dtype])))
    passed = sum(row[1] == OK for row in rows)
    if passed:
        limits = ", ".join(f"{kind.replace('_', ' ')} {limit:g}" for kind, limit in LAYOUT_TOLERANCE[dtype].items())
        part.add(
            f"{passed} layouts in {dtype}", True, f"match one process (allowed: {limits}); replicas are bitwise equal"
        )
        part.tables[f"Largest relative errors of {STEPS} steps in {dtype}, against one process"] = rows


def compare_with_reference(
    dtype: str, steps: Sequence[StepTrace], reference: Sequence[StepTrace]
) -> tuple[dict[str, float], list[str]]:
    """Return a layout's largest errors by kind, and a sentence on each difference from one process."""
    pairs = zip(steps, reference, strict=True)
    differences = [
        d for i, (step, ref) in enumerate(pairs, 1) for d in compare_traces(i, step, ref, GRADIENT_FLOOR, LR)
    ]
    allowed = LAYOUT_TOLERANCE[dtype]
    worst = {kind: max(d.error for d in differences if d.kind == kind) for kind in allowed}
    excessive = [d for d in differences if d.error > allowed[d.kind]]
    sentences = []
    if excessive:
        first = excessive[0]
        name = f"{first.kind.replace('_', ' ')} {first.name}".strip()
        sentences.append(f"step {first.step}: {name} is off by {first.error:.1e} (allowed: {allowed[first.kind]:g})")
    drifted = [name for step in steps for name in step.drifted]
    if drifted:
        sentences.append(f"differs between the ranks that share it: {drifted[0]}")
    return worst, sentences


def check_devices(part: CheckSection, folder: Path, model: str, dtype: str, ranks: int) -> None:
    """Check that every rank, computing alone, agrees with rank 0; one that does not has a bad device."""
    by_rank: list[SingleRankTrace] = [load_trace(folder / f"alone.{model}.{dtype}.{rank}.pt") for rank in range(ranks)]
    allowed = LAYOUT_TOLERANCE[dtype]["grad_norm"]
    first = by_rank[0].steps
    for rank, other in enumerate(by_rank):
        pairs = [(a, b) for x, y in zip(other.steps, first) for a, b in ((x.loss, y.loss), (x.grad_norm, y.grad_norm))]
        errors = [abs(a - b) / abs(b) for a, b in pairs]
        worst = max(errors, key=lambda error: (math.isnan(error), error))
        if not worst <= allowed:
            sentence = f"rank {rank} on {other.host} is off by {worst:.1e} (allowed: {allowed:g}) without communication"
            part.add(f"devices compute the same, {model}, {dtype}", False, sentence)
            return
    part.add(f"devices compute the same, {model}, {dtype}", True, "each rank alone, same model and samples")


def kill_in_step(number: int, milliseconds: int) -> None:
    """Kill this process with SIGKILL during a step, so that other ranks notice only that it is silent."""
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        if trainer.iteration + 1 == number:
            timer = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        return original(trainer)

    Trainer.next_batches = next_batches  # type: ignore[assignment, method-assign]  # only this process


def train_until_killed(words: Sequence[str]) -> int:
    """Run one rank; rank ``words[0]`` is killed ``words[2]`` milliseconds after the start of step ``words[1]``."""
    rank, step, milliseconds = map(int, words[:3])
    parsed = parse(words[3:])
    if Launch.read(os.environ).rank == rank:
        kill_in_step(step, milliseconds)
    return run(parsed.config, parsed.notes)
