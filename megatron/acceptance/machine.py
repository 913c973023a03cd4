"""Collect software versions and hardware on every rank, and compare them between nodes."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.acceptance import filesystem
from megatron.acceptance.filesystem import Prober, write_whole
from megatron.acceptance.report import FAILED, WARNING, Part
from megatron.config.launch import Launch
from megatron.config.problems import UserError
from megatron.config.run import ComputeConfig
from megatron.kernels.registry import choose
from megatron.training.first_cause import host
from megatron.training.run_folder import environment, git_state

SHOWN = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|FI|OMP|CUDA|CUBLAS|SLURM)_\w+|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|\w+_TF32_\w*OVERRIDE"
)
"""Environment variables for the report ..."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
"""... except those that may hold secrets."""
OF_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT")

ALIKE = (
    *("python", "torch", "cuda", "nccl", "driver", "kernel", "packages", "gpus", "infiniband", "kernels", "commit"),
    "environment",
)
"""Facts that should be the same on every node."""
MUST_BE_ALIKE = ("python", "torch", "cuda", "nccl", "commit")
"""Of these, the ones that must be: with different versions, ranks may compute different results."""


def look(folder: Path, device: str, seconds: float) -> None:
    """Write this rank's facts to ``machine.RANK.json`` in ``folder``, without any collective."""
    launch, hostname = Launch.read(os.environ), host(os.environ)
    prober = Prober(folder / "probe", launch.rank, launch.world_size, hostname, launch.local_rank == 0, seconds)
    prober.folder.mkdir(exist_ok=True)
    facts: dict[str, Any] = {"files": prober.probe(256 if torch.cuda.is_available() else 16)}
    facts |= {"rank": launch.rank, "size": launch.world_size, "host": hostname, "local_rank": launch.local_rank}
    if launch.local_rank == 0:  # the kernel checks take time, so run them once per node
        facts |= facts_of(device)
    write_whole(folder / f"machine.{launch.rank}.json", json.dumps(facts))


def facts_of(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return this machine's software and hardware."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if on_gpu else []
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": driver(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "packages": environment("", 1)["packages"],
        "kernels": kernels(torch.device("cuda" if on_gpu else "cpu")),
        "infiniband": infiniband(),
        "network": network(),
        "environment": shown(environ),
        "commit": git_state(Path(__file__).parent)[0],
    }


def kernels(device: torch.device) -> list[str]:
    """Return the kernels that a run selects here by default, and those it rejected."""
    try:
        return choose(ComputeConfig().kernels, device, torch.bfloat16 if device.type == "cuda" else torch.float32)[1]
    except UserError as error:
        return [str(error)]


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the environment variables for the report: relevant to a run, and not secret."""
    named = {name: value for name, value in environ.items() if SHOWN.fullmatch(name) and not SECRET.search(name)}
    return {name: v for name, v in sorted(named.items()) if not name.startswith("SLURM_") or name in OF_SLURM}


def driver(read: Callable[[], str] = Path("/proc/driver/nvidia/version").read_text) -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    try:
        found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", read())
    except OSError:
        return None
    return found[1] if found else None


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """List InfiniBand ports with rate and state: ``mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE``."""
    ports = sorted(root.glob("*/ports/*"))
    return [f"{p.parts[-3]}:{p.name} {_text(p / 'rate')} {_text(p / 'state').partition(': ')[2]}" for p in ports]


def network(root: Path = Path("/sys/class/net")) -> list[str]:
    """List network interfaces that are up, with their speed if known: ``eth0 100000 Mb/s``."""
    up = [p for p in sorted(root.glob("*")) if p.name != "lo" and _text(p / "operstate") == "up"]
    speeds = {p.name: _text(p / "speed") for p in up}
    return [f"{name} {speed} Mb/s" if speed.isdecimal() else name for name, speed in speeds.items()]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def examine(part: Part, folder: Path) -> dict[int, dict[str, Any]]:
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
    for name in ALIKE:
        _compare(part, name, {node: facts[name] for node, facts in nodes.items()})
    hosts = {rank: facts["host"] for rank, facts in by_rank.items()}
    files = {rank: facts["files"] for rank, facts in by_rank.items()}
    for what, good, sentence in filesystem.verdicts(files, hosts):
        part.add(what, good, sentence)
    if all(not entry["missing"] for entry in files.values()):
        part.add("locks", *filesystem.lock_sentence(files, hosts), otherwise=WARNING)
    part.tables["Nodes"] = _nodes(nodes, hosts)
    part.tables["Software"] = _software(next(iter(nodes.values())))
    return by_rank


def have_gpus(part: Part, nodes: Sequence[Mapping[str, Any]], device: str) -> None:
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


def _compare(part: Part, name: str, by_node: Mapping[str, Any]) -> None:
    """Record a check only if the nodes differ."""
    nodes_by_value: dict[str, list[str]] = {}
    for node, value in by_node.items():
        nodes_by_value.setdefault(json.dumps(value), []).append(node)
    if len(nodes_by_value) > 1:
        seen = "; ".join(f"{', '.join(nodes)}: {value}" for value, nodes in nodes_by_value.items())
        part.add(f"{name} the same on all nodes", False, seen, FAILED if name in MUST_BE_ALIKE else WARNING)


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
