"""Health of a machine: cores, memory, limits, clock, names, network interfaces, settings of libraries.

Reads files of Linux below a root, so that tests can plant them. Does not import torch, and needs no root.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megatron.config.errors import UserError
from megatron.config.launch import Launch, threads_exceed_cores
from megatron.config.machine import memory_bytes
from megatron.config.text import format_bytes
from tools.lib.findings import BAD, NOTE, OK, Finding

GROUP, NETWORK = "machine", "network"
ROOT = Path("/")
SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which NCCL and workers may fail; containers have 64 MB by default."""
OPEN_FILES = 4096
SECONDS_TO_CONNECT = 1.5


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel, without spaces around it; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nvidia_driver_version(root: Path = ROOT) -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", text_of(root / "proc/driver/nvidia/version"))
    return found[1] if found else None


def infiniband_ports(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """List InfiniBand ports with rate and state: ``mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE``."""
    ports = sorted(root.glob("*/ports/*"))
    return [f"{p.parts[-3]}:{p.name} {text_of(p / 'rate')} {text_of(p / 'state').partition(': ')[2]}" for p in ports]


def network_interfaces(root: Path = Path("/sys/class/net")) -> list[str]:
    """List network interfaces that are up, with their speed if known: ``eth0 100000 Mb/s``."""
    up = [p for p in sorted(root.glob("*")) if p.name != "lo" and text_of(p / "operstate") == "up"]
    speeds = {p.name: text_of(p / "speed") for p in up}
    return [f"{name} {speed} Mb/s" if speed.isdecimal() else name for name, speed in speeds.items()]


def cpu_findings(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Iterator[Finding]:
    """Yield findings on cores, their clocks, vector units and threads."""
    info = text_of(root / "proc/cpuinfo")
    model = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", info, re.MULTILINE)
    present, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    share = _quota(root)
    flags = set((re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE) or [""])[0].split())
    vector = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve") if name in flags]
    units = " ".join(vector) or "no vector units known"
    sentence = f"{model[1] if model else 'unknown'}: {usable} of {present} cores, {units}"
    facts = {"cores": present, "usable": usable, "quota": share, "vector": vector}
    yield Finding(GROUP, "cores", OK, sentence, facts=facts)
    if share is not None and share < usable:
        sentence = f"the control group allows {share:g} of {usable} cores"
        yield Finding(GROUP, "core limit", NOTE, sentence, "raise the limit of the container or job")
    paths = root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    governors = {text_of(path) for path in paths} - {""}
    if "powersave" in governors:
        todo = "cpupower frequency-set -g performance, with rights"
        yield Finding(GROUP, "governor", NOTE, "powersave: cores may keep low clocks", todo)
    if threads_exceed_cores(environ):
        sentence = f"OMP_NUM_THREADS is {environ.get('OMP_NUM_THREADS', 'not set')}: more threads than cores"
        yield Finding(GROUP, "threads", NOTE, sentence, f"export OMP_NUM_THREADS={max(1, usable // _ranks(environ))}")


def _ranks(environ: Mapping[str, str]) -> int:
    return Launch.read(environ).local_size


def _quota(root: Path) -> float | None:
    """Return the cores that the control group of version 2, or 1, allows; None without a limit."""
    quota, _, period = text_of(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = (text_of(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def memory_findings(root: Path = ROOT) -> Iterator[Finding]:
    """Yield findings on memory, its errors, /dev/shm and huge pages."""
    sizes = {
        name: int(number) << 10
        for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    }
    total, free, limit = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0), memory_bytes(root)
    yield Finding(
        GROUP, "memory", OK, f"{format_bytes(free)} free of {format_bytes(total)}", facts={"free": free, "bytes": total}
    )
    swap = sizes.get("SwapTotal", 0)
    if limit is not None and limit - swap < total:
        sentence = f"the control group allows {format_bytes(limit - swap)} of {format_bytes(total)}"
        yield Finding(GROUP, "memory limit", NOTE, sentence, "raise the limit of the container or job (--mem of Slurm)")
    if sizes.get("HardwareCorrupted", 0):
        sentence = f"{format_bytes(sizes['HardwareCorrupted'])} were taken out after errors of hardware"
        yield Finding(GROUP, "memory errors", BAD, sentence, "exclude this node; `rasdaemon` names the module")
    errors = {
        kind: sum(int(text_of(path) or 0) for path in root.glob(f"sys/devices/system/edac/mc/mc*/{kind}_count"))
        for kind in ("ue", "ce")
    }
    if errors["ue"]:
        todo = "exclude this node, and have the module replaced"
        yield Finding(GROUP, "memory errors", BAD, f"{errors['ue']} uncorrectable", todo, dict(errors))
    elif errors["ce"]:
        yield Finding(
            GROUP,
            "memory errors",
            NOTE,
            f"{errors['ce']} corrected",
            "numbers that grow name a bad module",
            dict(errors),
        )
    pages = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if pages:
        yield Finding(GROUP, "huge pages", OK, f"transparent: {pages[1]}")


def shared_memory_finding(total: int, free: int) -> Finding:
    """Return whether /dev/shm is large enough; ``total`` and ``free`` are bytes."""
    sentence = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < SHARED_MEMORY:
        todo = "docker run --ipc=host or --shm-size=16g; delete what old jobs left in /dev/shm"
        return Finding(GROUP, "/dev/shm", NOTE, f"{sentence}: too small for NCCL between many GPUs", todo)
    return Finding(GROUP, "/dev/shm", OK, sentence)


def shm_findings() -> Iterator[Finding]:
    """Yield the finding on /dev/shm of this machine."""
    there = os.statvfs("/dev/shm")
    yield shared_memory_finding(there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize)


def limit_findings(root: Path = ROOT) -> Iterator[Finding]:
    """Yield findings on the limits of this process."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < OPEN_FILES:
        todo = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        yield Finding(GROUP, "open files", NOTE, f"at most {files}: many ranks need more", todo)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if infiniband_ports(root / "sys/class/infiniband") and locked != resource.RLIM_INFINITY:
        todo = "ulimit -l unlimited; in Slurm PropagateResourceLimitsExcept=MEMLOCK"
        yield Finding(GROUP, "locked memory", BAD, f"at most {format_bytes(locked)}: InfiniBand needs more", todo)
    yield Finding(
        GROUP, "limits", OK, f"{files} open files, {'any' if locked < 0 else format_bytes(locked)} locked memory"
    )


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux, of which only the first fields are named."""

    _fields_ = (
        *(("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long)),
        *(("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_long * 40)),
    )


def clock_findings() -> Iterator[Finding]:
    """Yield whether the kernel's clock is synchronised (``adjtimex``, which needs no rights to read)."""
    state = _Timex()
    status = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    if status < 0:
        return
    if status == 5 or state.status & 0x40:  # TIME_ERROR, STA_UNSYNC
        todo = "timedatectl set-ntp true, or start chronyd; logs of nodes are compared by time"
        yield Finding(GROUP, "clock", NOTE, "not synchronised", todo)
    else:
        yield Finding(GROUP, "clock", OK, f"synchronised, at most {state.maxerror / 1000:.0f} ms off")


def network_findings(root: Path = ROOT) -> Iterator[Finding]:
    """Yield findings on interfaces, InfiniBand ports and firewalls."""
    found = network_interfaces(root / "sys/class/net")
    yield Finding(NETWORK, "interfaces", OK, ", ".join(found) or "none that is up", facts={"interfaces": found})
    ports = infiniband_ports(root / "sys/class/infiniband")
    down = [port for port in ports if not port.endswith(" ACTIVE")]
    if ports:
        facts = {"ports": ports}
        verdict = BAD if down else OK
        sentence = f"not active: {', '.join(down)}" if down else ", ".join(ports)
        yield Finding(
            NETWORK, "InfiniBand", verdict, sentence, "`ibstat`; check the cable and the switch" if down else "", facts
        )
        if (root / "proc/driver/nvidia").exists() and not (root / "sys/module/nvidia_peermem").exists():
            sentence = "nvidia_peermem is not loaded: without dma-buf, data pass through host memory"
            yield Finding(NETWORK, "GPUDirect", NOTE, sentence, "modprobe nvidia_peermem, with rights")
    for counter in ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors"):
        paths = root.glob(f"sys/class/infiniband/*/ports/*/counters/{counter}")
        sick = {path.parts[-5]: number for path in paths if (number := int(text_of(path) or 0))}
        if sick:
            sentence = f"{counter} {', '.join(f'{port} {number}' for port, number in sick.items())}"
            yield Finding(
                NETWORK, "InfiniBand", NOTE, sentence, "numbers that grow name a bad cable: `perfquery -x`", dict(sick)
            )
    walls = [name for name, path in FIREWALLS.items() if (root / path).exists()]
    walls = [name for name in walls if name != "ufw" or "ENABLED=yes" in text_of(root / FIREWALLS["ufw"])]
    if walls:
        sentence = f"{', '.join(walls)} is on: ranks connect to each other at any port"
        yield Finding(NETWORK, "firewall", NOTE, sentence, "allow all TCP ports between the nodes of a job")


FIREWALLS = {"firewalld": "run/firewalld", "ufw": "etc/ufw/ufw.conf"}


def name_findings(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield findings on this machine's name and the address of rank 0."""
    host = socket.gethostname()
    addresses = _resolve(host)
    if addresses is None:
        todo = f"add `ADDRESS {host}` to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding(NETWORK, "host name", NOTE, f"{host} has no address: gloo may not find its interface", todo)
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        sentence = f"{host} is {addresses[0]}: other machines cannot use this address"
        yield Finding(
            NETWORK, "host name", NOTE, sentence, "with several nodes: export GLOO_SOCKET_IFNAME=eth0 (its interface)"
        )
    else:
        yield Finding(NETWORK, "host name", OK, f"{host} is {', '.join(addresses)}")
    try:
        launch = Launch.read(environ)
        problems = [*launch.problems()]
    except UserError as error:
        problems = [*error.problems]
    yield from (Finding(NETWORK, problem.code, BAD, problem.sentence, "; ".join(problem.fixes)) for problem in problems)
    if not problems and "MASTER_ADDR" in environ:
        hosts_store = launch.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        yield from _master(launch.master or "", launch.port, hosts_store)


def _resolve(name: str) -> list[str] | None:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return None


def _master(address: str, port: int, hosts_store: bool) -> Iterator[Finding]:
    """Yield whether rank 0 can be reached, or its port be used by this process, which then is rank 0."""
    name = "MASTER_ADDR"
    if _resolve(address) is None:
        todo = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1), or an IP address'
        yield Finding(NETWORK, name, BAD, f"{address} has no address here", todo)
        return
    low, high = (text_of(ROOT / "proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split()
    if hosts_store and int(low) <= port <= int(high):
        sentence = f"MASTER_PORT {port} is among those that other connections get ({low} to {high})"
        yield Finding(NETWORK, name, NOTE, sentence, "export MASTER_PORT=29500")
    try:
        with socket.create_connection((address, port), SECONDS_TO_CONNECT):
            sentence = f"port {port} of {address} is in use" if hosts_store else f"{address}:{port} answers"
            todo = (
                f"`ss -ltnp | grep {port}` names the process; or export MASTER_PORT={port + 1}" if hosts_store else ""
            )
            yield Finding(NETWORK, name, BAD if hosts_store else OK, sentence, todo)
    except ConnectionRefusedError:
        yield Finding(NETWORK, name, OK, f"{address} can be reached; nothing uses port {port} yet")
    except OSError as error:
        sentence = f"{address}:{port} cannot be reached: {error}"
        yield Finding(NETWORK, name, BAD, sentence, "check that node, routes, and firewalls between the nodes")


def setting_findings(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Iterator[Finding]:
    """Yield environment variables that slow a run down or cannot work here."""
    known = {path.name for path in root.glob("sys/class/net/*")}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = [part for part in environ.get(name, "").split(",") if part and part[0] not in "^="]
        missing = [part for part in wanted if not any(each.startswith(part) for each in known)]
        if missing:
            sentence = f"{name}={environ[name]}, but there is no {', '.join(missing)}"
            yield Finding(
                NETWORK, name, BAD, sentence, f"export {name}=INTERFACE, of {', '.join(sorted(known - {'lo'}))}"
            )
    for name, (harmless, sentence) in SLOW_SETTINGS.items():
        if environ.get(name, harmless) != harmless:
            yield Finding(NETWORK, name, NOTE, f"{name}={environ[name]}: {sentence}", f"unset {name}")
    with suppress(OSError):
        if environ.get("NCCL_TOPO_FILE") and not Path(environ["NCCL_TOPO_FILE"]).exists():
            yield Finding(
                NETWORK, "NCCL_TOPO_FILE", BAD, f"{environ['NCCL_TOPO_FILE']} does not exist", "unset NCCL_TOPO_FILE"
            )


SLOW_SETTINGS = {
    "NCCL_IB_DISABLE": ("0", "NCCL does not use InfiniBand"),
    "NCCL_P2P_DISABLE": ("0", "GPUs of a node exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("0", "GPUs of a node exchange data through the network"),
    "CUDA_LAUNCH_BLOCKING": ("0", "the host waits for every kernel"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "every collective is checked"),
    "NCCL_DEBUG": ("WARN", "NCCL prints at every start"),
}
"""Variables with the value that costs nothing, and what others cost."""
