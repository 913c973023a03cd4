"""What is installed and what the machines are, as every rank sees it; and whether they are alike."""

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
from megatron.acceptance.report import WARNING, Part
from megatron.config.launch import Launch
from megatron.config.problems import UserError
from megatron.config.run import ComputeConfig
from megatron.kernels.registry import choose
from megatron.training.first_cause import host
from megatron.training.run_folder import environment, git_state

SHOWN = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|FI|OMP|CUDA|CUBLAS|SLURM)_\w+|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|\w+_TF32_\w*OVERRIDE"
)
"""Variables of the environment that matter ..."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
"""... and those that are nobody's business."""
OF_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT")

ALIKE = (
    *("python", "torch", "cuda", "nccl", "driver", "kernel", "packages", "gpus", "infiniband", "kernels", "commit"),
    "environment",
)
"""What should be the same on every node."""
MUST_BE_ALIKE = ("python", "torch", "cuda", "nccl", "commit")
"""Without this, ranks may not even compute the same."""


def look(folder: Path, device: str, seconds: float) -> None:
    """One rank: write ``machine.RANK.json`` into ``folder``; no collective is needed."""
    launch, here = Launch.read(os.environ), host(os.environ)
    prober = Prober(folder / "probe", launch.rank, launch.world_size, here, launch.local_rank == 0, seconds)
    prober.folder.mkdir(exist_ok=True)
    facts: dict[str, Any] = {"files": prober.probe(256 if torch.cuda.is_available() else 16)}
    facts |= {"rank": launch.rank, "size": launch.world_size, "host": here, "local_rank": launch.local_rank}
    facts |= facts_of(device) if launch.local_rank == 0 else {}  # kernels take their time to prove themselves
    write_whole(folder / f"machine.{launch.rank}.json", json.dumps(facts))


def facts_of(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What one machine is and has."""
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
    """Which kernels a run in the usual format takes here, and what was left out."""
    try:
        return choose(ComputeConfig().kernels, device, torch.bfloat16 if device.type == "cuda" else torch.float32)[1]
    except UserError as error:
        return [str(error)]


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables worth attaching to a report."""
    named = {name: value for name, value in environ.items() if SHOWN.fullmatch(name) and not SECRET.search(name)}
    return {name: v for name, v in sorted(named.items()) if not name.startswith("SLURM_") or name in OF_SLURM}


def driver(read: Callable[[], str] = Path("/proc/driver/nvidia/version").read_text) -> str | None:
    """Version of the NVIDIA driver."""
    try:
        found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", read())
    except OSError:
        return None
    return found[1] if found else None


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Devices with the rate and the state of their ports: ``mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE``."""
    ports = sorted(root.glob("*/ports/*"))
    return [f"{p.parts[-3]}:{p.name} {_text(p / 'rate')} {_text(p / 'state').partition(': ')[2]}" for p in ports]


def network(root: Path = Path("/sys/class/net")) -> list[str]:
    """Network interfaces that are up, with their speed where the kernel knows it: ``eth0 100000 Mb/s``."""
    up = [p for p in sorted(root.glob("*")) if p.name != "lo" and _text(p / "operstate") == "up"]
    speeds = {p.name: _text(p / "speed") for p in up}
    return [f"{name} {speed} Mb/s" if speed.isdecimal() else name for name, speed in speeds.items()]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def examine(part: Part, folder: Path) -> dict[int, dict[str, Any]]:
    """Tell in ``part`` of what the ranks have written; returns that, by rank."""
    told = {facts["rank"]: facts for facts in map(_load, folder.glob("machine.*.json"))}
    part.facts["ranks"] = [told[rank] for rank in sorted(told)]
    size = max((facts["size"] for facts in told.values()), default=0)
    silent = sorted(set(range(size)) - told.keys())
    if not part.add("all ranks start", bool(told) and not silent, _started(told, silent)):
        return told
    nodes = {facts["host"]: facts for facts in told.values() if facts["local_rank"] == 0}
    for name in ALIKE:
        _compare(part, name, {node: facts[name] for node, facts in nodes.items()})
    hosts = {rank: facts["host"] for rank, facts in told.items()}
    files = {rank: facts["files"] for rank, facts in told.items()}
    for what, good, sentence in filesystem.verdicts(files, hosts):
        part.add(what, good, sentence)
    if all(not entry["missing"] for entry in files.values()):
        part.add("locks", *filesystem.lock_sentence(files, hosts), otherwise=WARNING)
    part.tables["Nodes"] = _nodes(nodes, hosts)
    part.tables["Software"] = _software(next(iter(nodes.values())))
    return told


def have_gpus(part: Part, nodes: Sequence[Mapping[str, Any]], device: str) -> None:
    """Tell of nodes without GPUs where some should be: they are asked for, other nodes have some, or a driver is there.

    Args:
        part: that is told.
        nodes: facts of every node.
        device: that was asked for.

    """
    some = any(facts["gpus"] for facts in nodes)
    wanted = [facts for facts in nodes if device == "cuda" or (device == "auto" and (some or facts["driver"]))]
    blind = [facts for facts in wanted if not facts["gpus"]]
    if blind:
        hosts, first = ", ".join(facts["host"] for facts in blind), blind[0]
        built = f"built for CUDA {first['cuda']}" if first["cuda"] else "built without CUDA"
        driver = f"driver {first['driver']}" if first["driver"] else "no driver"
        told = f"none found on {hosts}: torch {first['torch']} is {built}, and there is {driver} (or give --device cpu)"
        part.add("GPUs", False, told)


def fabric_rate(facts: Mapping[str, Any]) -> float:
    """What the InfiniBand ports of a node that are up carry, 10^9 bytes a second; 0 where NCCL must not use them."""
    if facts["environment"].get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return 0.0
    up = [re.search(r" (\d+(?:\.\d+)?) Gb/sec", port) for port in facts["infiniband"] if port.endswith(" ACTIVE")]
    return sum(float(found[1]) for found in up if found) / 8


def _started(told: Mapping[int, object], silent: list[int]) -> str:
    if not told:
        return "none did; the log below says why"
    return f"nothing was heard of ranks {', '.join(map(str, silent))}" if silent else f"{len(told)} did"


def _compare(part: Part, name: str, by_node: Mapping[str, Any]) -> None:
    """Tell of what differs between nodes; nothing where all have the same."""
    kinds: dict[str, list[str]] = {}
    for node, value in by_node.items():
        kinds.setdefault(json.dumps(value), []).append(node)
    if len(kinds) > 1:
        told = "; ".join(f"{', '.join(nodes)}: {value}" for value, nodes in kinds.items())
        part.add(f"{name} the same on all nodes", False, told, "FAILED" if name in MUST_BE_ALIKE else WARNING)


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


def _load(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts
