"""Health of NVIDIA GPUs, as ``nvidia-smi`` and the kernel's log report it. Does not import torch, and needs no root.

The XML of ``nvidia-smi -q -x`` differs between versions of the driver: what a version lacks is left out. Meanings of
Xid numbers are those of NVIDIA's catalog (https://docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from megatron.config.machine import DEVICE_FILES, ROOT
from tools.lib.findings import BAD, NOTE, OK, Finding, output_of

GROUP = "GPUs"
REPLACE = "exclude this node from jobs, run `dcgmi diag -r 3`, and have the GPU replaced if it fails"
RESET = "drain the node, then `nvidia-smi --gpu-reset` or reboot"

XIDS: dict[int, tuple[str, str]] = {
    13: (NOTE, "exception in a kernel; most often a fault of a program"),
    31: (NOTE, "access to memory that is not mapped; most often a fault of a program"),
    43: (NOTE, "a program's context was stopped after its fault"),
    45: (NOTE, "a program's work was removed after its fault or its kill"),
    48: (BAD, "uncorrectable error of memory (two bits)"),
    61: (BAD, "breakpoint of an internal controller"),
    62: (BAD, "halt of an internal controller"),
    63: (NOTE, "a row of memory was remapped; takes effect at the next reset"),
    64: (BAD, "a row of memory could not be remapped"),
    74: (BAD, "error of an NVLink"),
    79: (BAD, "the GPU has fallen off the bus"),
    92: (NOTE, "many corrected errors of memory"),
    94: (NOTE, "uncorrectable error of memory, contained to one program"),
    95: (BAD, "uncorrectable error of memory, not contained"),
    119: (BAD, "no answer of the GPU's system processor"),
    120: (BAD, "error of the GPU's system processor"),
    140: (BAD, "uncorrectable error of memory that ECC has not recovered"),
}
"""Verdict and meaning of the numbers that concern training; others are a note."""

THROTTLES = {
    "hw_thermal_slowdown": (BAD, "the hardware slows it down: too hot", "check fans, coolant and dust of this node"),
    "hw_power_brake_slowdown": (BAD, "the power supply slows it down", "check power supplies of this node or rack"),
    "sw_thermal_slowdown": (BAD, "the driver slows it down: too hot", "check fans, coolant and dust of this node"),
    "hw_slowdown": (BAD, "the hardware slows it down", "check temperature and power supplies of this node"),
    "sw_power_cap": (
        NOTE,
        "it runs at its power limit",
        "`nvidia-smi -q -d POWER` shows the limit and who may raise it",
    ),
    "applications_clocks_setting": (
        NOTE,
        "its clocks were limited by an administrator",
        "`nvidia-smi -rac`, with rights",
    ),
}
"""Reasons of low clocks, the most precise first; of each GPU the first one of the hardware is printed."""

NEAR_LIMIT = 5.0
"""Degrees below the temperature at which the GPU slows down."""

FOREIGN_MEMORY = 1024
"""MiB of other processes that a run would miss."""


def has_driver(root: Path = ROOT) -> bool:
    """Return True if this machine has files of a driver of NVIDIA's GPUs."""
    return any(any(root.glob(pattern)) for pattern in DEVICE_FILES if "nvidia" in pattern)


def gpu_findings() -> Iterator[Finding]:
    """Ask ``nvidia-smi``; yield findings on driver, GPUs and links."""
    report = output_of("nvidia-smi", "-q", "-x", seconds=3.5)
    if report is None:
        if has_driver():
            sentence = "there is a driver of NVIDIA, but nvidia-smi is missing, fails or does not answer within 3.5 s"
            yield Finding(
                GROUP, "nvidia-smi", BAD, sentence, "`nvidia-smi` shows its error; `dmesg | grep NVRM`; reboot"
            )
        else:
            yield Finding(GROUP, "GPUs", OK, "none of NVIDIA: a run computes on the CPU")
        return
    yield from report_findings(report)
    links = {flag: output_of("nvidia-smi", "nvlink", flag, seconds=2.0) or "" for flag in ("-s", "-e")}
    yield from nvlink_findings(links["-s"], links["-e"])


def report_findings(report: str) -> Iterator[Finding]:
    """Yield findings on each GPU in the output of ``nvidia-smi -q -x``."""
    root = ElementTree.fromstring(report)
    gpus = root.findall("gpu")
    versions = f"driver {_text(root, 'driver_version')}, CUDA up to {_text(root, 'cuda_version')}"
    facts = {"driver": _text(root, "driver_version"), "cuda": _text(root, "cuda_version"), "gpus": len(gpus)}
    yield Finding(GROUP, "driver", OK if gpus else BAD, f"{versions}, {len(gpus)} GPUs", facts=facts)
    names = Counter(_text(gpu, "product_name") for gpu in gpus)
    if len(names) > 1:
        seen = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding(
            GROUP, "different GPUs", NOTE, f"{seen}: a run is as fast as the slowest", "CUDA_VISIBLE_DEVICES=..."
        )
    for index, gpu in enumerate(gpus):
        yield _summary(index, gpu)
        yield from _faults(index, gpu)
        yield from _clocks(index, gpu)
        yield from _settings(index, gpu)


def _summary(index: int, gpu: Element) -> Finding:
    draw, limit = _power(gpu)
    used, whole = (_number(gpu, f"fb_memory_usage/{of}") for of in ("used", "total"))
    clock, fastest = (_number(gpu, f"{of}/sm_clock") for of in ("clocks", "max_clocks"))
    celsius, name = _number(gpu, "temperature/gpu_temp"), _text(gpu, "product_name")
    sentence = f"{name}: {_of(used, whole)} MiB, {_of(clock, fastest)} MHz, {_of(draw, limit)} W, {_of(celsius)} C"
    facts = {"name": name, "uuid": _text(gpu, "uuid"), "serial": _text(gpu, "serial"), "celsius": celsius}
    facts |= {"watts": draw, "watts_limit": limit, "mhz": clock, "mhz_max": fastest, "mib_used": used, "mib": whole}
    return Finding(GROUP, f"GPU {index}", OK, sentence, facts=facts)


def _faults(index: int, gpu: Element) -> Iterator[Finding]:
    """Yield what hardware or driver report as broken."""
    name = f"GPU {index}"
    now, ever = (
        sum(_number(gpu, f"ecc_errors/{since}/{kind}") or 0 for kind in UNCORRECTABLE)
        for since in ("volatile", "aggregate")
    )
    if now:
        sentence = f"{now:g} uncorrectable errors of memory since the driver was loaded"
        yield Finding(GROUP, name, BAD, sentence, REPLACE, {"uncorrectable": now})
    elif ever:
        yield Finding(
            GROUP, name, NOTE, f"{ever:g} uncorrectable errors of memory in its life", facts={"uncorrectable": ever}
        )
    for path, sentence, todo in FAULTS:
        if _text(gpu, path) == "Yes":
            yield Finding(GROUP, name, BAD, sentence, todo)
    action = _text(gpu, "gpu_recovery_action")
    if action not in ("", "None", "N/A"):
        yield Finding(GROUP, name, BAD, f"the driver asks for: {action}", RESET)
    width, widest = (_number(gpu, f"pci/pci_gpu_link_info/link_widths/{of}_link_width") for of in ("current", "max"))
    if width and widest and width < widest:
        yield Finding(GROUP, name, BAD, f"PCIe uses {width:g} of {widest:g} lanes", "reseat the GPU or its riser")
    state, status = _text(gpu, "fabric/state"), _text(gpu, "fabric/status")
    if state not in ("", "N/A", "Completed", "Not Supported") or status not in ("", "N/A", "Success"):
        sentence = f"NVSwitch fabric: {state}, {status}; CUDA cannot start before it is completed"
        yield Finding(GROUP, name, BAD, sentence, "systemctl status nvidia-fabricmanager")


UNCORRECTABLE = (
    *("dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded"),
    "double_bit/total",  # of older drivers
)
FAULTS = (
    ("ecc_errors/aggregate/sram_threshold_exceeded", "errors of its SRAM exceed NVIDIA's threshold", REPLACE),
    ("remapped_rows/remapped_row_failure", "a row of memory could not be remapped", REPLACE),
    ("remapped_rows/remapped_row_pending", "a faulty row of memory waits to be remapped", RESET),
    ("retired_pages/pending_retirement", "a faulty page of memory waits to be retired", RESET),
    ("ecc_errors/channel_repair_pending", "a channel of memory waits to be repaired", RESET),
    ("ecc_errors/tpc_repair_pending", "a unit of computation waits to be repaired", RESET),
    ("gpu_reset_status/reset_required", "the driver asks for a reset", RESET),
)
"""Elements of the report that are ``Yes``, with what that means and what to do."""


def _clocks(index: int, gpu: Element) -> Iterator[Finding]:
    """Yield why the clocks are low, and temperatures near the limit."""
    name, braked = f"GPU {index}", False
    for reason, (verdict, sentence, todo) in THROTTLES.items():
        states = (_text(gpu, f"clocks_{kind}_reasons/clocks_{kind}_reason_{reason}") for kind in ("event", "throttle"))
        if "Active" in states and not (braked and reason == "hw_slowdown"):
            braked = braked or reason.startswith("hw")
            yield Finding(GROUP, name, verdict, sentence, todo, {"reason": reason})
    hot, slow = _number(gpu, "temperature/gpu_temp"), _number(gpu, "temperature/gpu_temp_slow_threshold")
    left, limit = (_number(gpu, f"temperature/{key}") for key in ("gpu_temp_tlimit", "gpu_temp_slow_tlimit_threshold"))
    margin = left - (limit or 0.0) if left is not None else slow - hot if slow is not None and hot is not None else None
    if margin is not None and margin <= NEAR_LIMIT:
        yield Finding(
            GROUP, name, NOTE, f"{margin:g} degrees below the temperature that slows it down", "check the cooling"
        )


def _settings(index: int, gpu: Element) -> Iterator[Finding]:
    """Yield settings that cost speed or safety."""
    name = f"GPU {index}"
    if _text(gpu, "ecc_mode/current_ecc") == "Disabled":
        yield Finding(GROUP, name, NOTE, "ECC is off: errors of memory stay silent", "nvidia-smi -e 1, then a reset")
    limit, default = _power(gpu)[1], _number(gpu, "gpu_power_readings/default_power_limit")
    if limit and default and limit < default:
        sentence = f"its power limit is {limit:g} W, {default:g} W by default"
        yield Finding(GROUP, name, NOTE, sentence, f"nvidia-smi -i {index} -pl {default:g}, with rights")
    if _text(gpu, "compute_mode") == "Prohibited":
        yield Finding(GROUP, name, BAD, "programs may not compute on it", f"nvidia-smi -i {index} -c 0, with rights")
    if _text(gpu, "mig_mode/current_mig") == "Enabled":
        yield Finding(GROUP, name, NOTE, "it is divided by MIG: a run gets one part", f"nvidia-smi -i {index} -mig 0")
    used = sum(_number(process, "used_memory") or 0 for process in gpu.findall("processes/process_info"))
    if used > FOREIGN_MEMORY:
        sentence = f"processes use {used:g} MiB of its memory"
        yield Finding(GROUP, name, NOTE, sentence, "nvidia-smi shows them; end what a lost job has left")


def nvlink_findings(status: str, errors: str) -> Iterator[Finding]:
    """Yield findings in the outputs of ``nvidia-smi nvlink -s`` and ``-e``."""
    links = {gpu: [*re.findall(r"Link (\d+): (.*)", block)] for gpu, block in _blocks(status)}
    active = {gpu: sum("inactive" not in state.lower() for _, state in found) for gpu, found in links.items()}
    most = max(active.values(), default=0)
    if most:
        lowest = min(active.values())
        yield Finding(
            GROUP,
            "NVLink",
            OK,
            f"{lowest} active links on each GPU" if lowest == most else f"{most} links",
            facts=active,
        )
    for gpu, count in active.items():
        if count < most:
            sentence = f"{count} of {most} NVLinks are active"
            yield Finding(GROUP, f"GPU {gpu}", BAD, sentence, f"{RESET}; if it stays, have the board replaced")
    for gpu, block in _blocks(errors):
        kinds = Counter[str]()
        for kind, number in re.findall(r"Link \d+: *([A-Za-z ]+?)(?: Count)?: *(\d+)", block):
            kinds[kind.strip()] += int(number)
        seen = ", ".join(f"{count} {kind.lower()}" for kind, count in kinds.items() if count)
        if seen:
            todo = "compare after an hour: numbers that grow name a bad link"
            yield Finding(GROUP, f"GPU {gpu}", NOTE, f"NVLink: {seen} since the last reset", todo, dict(kinds))


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the number of each GPU and the lines below it."""
    parts = re.split(r"^GPU (\d+):", text, flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2])


def xid_findings() -> Iterator[Finding]:
    """Search the kernel's log for errors of the driver."""
    log = output_of("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "cat", seconds=2.0)
    log = log or output_of("dmesg", seconds=1.0)
    if log is None:
        if has_driver():
            todo = "`sudo dmesg | grep -i xid`, or membership of the group systemd-journal"
            yield Finding(GROUP, "Xid", NOTE, "the kernel's log cannot be read by this user", todo)
        return
    yield from log_findings(log)


def log_findings(log: str) -> Iterator[Finding]:
    """Yield findings on the Xid errors of a kernel's log, by GPU and number."""
    found = Counter(re.findall(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)", log))
    for (address, number), count in found.items():
        verdict, meaning = XIDS.get(int(number), (NOTE, "see NVIDIA's catalog of Xid errors"))
        sentence = f"{count} x Xid {number} on {address}: {meaning}"
        yield Finding(
            GROUP, "Xid", verdict, sentence, REPLACE if verdict == BAD else "", {"xid": int(number), "gpu": address}
        )
    if re.search(r"Out of memory: Killed process|oom-kill:", log):
        sentence = "the kernel has ended processes for lack of memory since the machine started"
        yield Finding("machine", "memory", NOTE, sentence, "`journalctl -k | grep -i oom` names them")


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(element: Element, path: str) -> float | None:
    """Return the number that a text such as ``1980 MHz`` begins with; None without one."""
    found = re.match(r"-?\d+(?:\.\d+)?", _text(element, path))
    return float(found[0]) if found else None


def _power(gpu: Element) -> tuple[float | None, float | None]:
    """Return draw and limit in watts, under the names of newer and older drivers."""
    draws = ("power_draw", "instant_power_draw", "average_power_draw")
    limits = ("current_power_limit", "power_limit", "enforced_power_limit")
    found = [
        next((value for key in keys for of in POWERS if (value := _number(gpu, f"{of}/{key}")) is not None), None)
        for keys in (draws, limits)
    ]
    return found[0], found[1]


POWERS = ("gpu_power_readings", "power_readings")


def _of(value: float | None, whole: float | None = None) -> str:
    shown = "?" if value is None else f"{value:g}"
    return shown if whole is None else f"{shown} of {whole:g}"
