"""tools/doctor.py on one machine: its findings on planted files and outputs, its limits of time, and its statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.config.compute import KERNEL_CANDIDATES
from tests.unit.doctor import gpus
from tools import doctor
from tools.lib import disk_health, gpu_health, installed, machine_health
from tools.lib.findings import BAD, NOTE, OK, Finding, Probe, examine, output_of

ROOT = Path(__file__).parents[3]


def troubles(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """Name, verdict and sentence of what is not in order."""
    return [(each.name, each.verdict, each.sentence) for each in findings if each.verdict != OK]


# ---- GPUs


def test_gpus_in_good_order() -> None:
    found = [*gpu_health.report_findings(gpus.REPORT), *gpu_health.nvlink_findings(gpus.nvlink_status(), "")]
    assert troubles(found) == []
    assert found[0].sentence == "driver 570.86.15, CUDA up to 12.8, 2 GPUs"
    assert found[1].sentence == "NVIDIA H100 80GB HBM3: 1 of 81559 MiB, 1980 of 1980 MHz, 70.12 of 700 W, 33 C"
    assert found[-1].sentence == "4 active links on each GPU"


FAULTS = {
    "<dram_uncorrectable>0</dram_uncorrectable>\n      </volatile>": ("2</dram_unc", BAD, "2 uncorrectable errors"),
    "<dram_uncorrectable>0</dram_uncorrectable><!-- ever -->": (
        "5</dram_unc",
        NOTE,
        "5 uncorrectable errors of memory in",
    ),
    "<sram_threshold_exceeded>No": ("Yes", BAD, "exceed NVIDIA's threshold"),
    "<remapped_row_pending>No": ("Yes", BAD, "waits to be remapped"),
    "<remapped_row_failure>No": ("Yes", BAD, "could not be remapped"),
    "<channel_repair_pending>No": ("Yes", BAD, "waits to be repaired"),
    "<reset_required>No": ("Yes", BAD, "asks for a reset"),
    "<gpu_recovery_action>None": ("Reboot", BAD, "the driver asks for: Reboot"),
    "<current_link_width>16x": ("8x", BAD, "PCIe uses 8 of 16 lanes"),
    "<state>Completed": ("In Progress", BAD, "NVSwitch fabric: In Progress"),
    "<clocks_event_reason_hw_thermal_slowdown>Not Active": ("Active", BAD, "too hot"),
    "<clocks_event_reason_hw_power_brake_slowdown>Not Active": ("Active", BAD, "power supply"),
    "<clocks_event_reason_sw_power_cap>Not Active": ("Active", NOTE, "at its power limit"),
    "<gpu_temp_tlimit>51": ("2", NOTE, "4 degrees below"),
    "<current_ecc>Enabled": ("Disabled", NOTE, "ECC is off"),
    "<current_power_limit>700.00": ("350.00", NOTE, "its power limit is 350 W, 700 W by default"),
    "<compute_mode>Default": ("Prohibited", BAD, "may not compute"),
    "<current_mig>Disabled": ("Enabled", NOTE, "MIG"),
}
"""Text of the report: what replaces its value, the verdict, and words of the sentence."""


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_of_one_gpu_is_named(text: str) -> None:
    value, verdict, words = FAULTS[text]
    old = text.split("\n")[0]
    new = re.sub(r">[^<]+", ">" + value.split("<")[0], old, count=1)
    at = gpus.REPORT.rindex(text)  # in the second GPU
    report = gpus.REPORT[:at] + text.replace(old, new) + gpus.REPORT[at + len(text) :]
    ((name, found, sentence),) = troubles(gpu_health.report_findings(report))
    assert (name, found) == ("GPU 1", verdict)
    assert words in sentence


def test_names_of_older_drivers() -> None:
    found = [*gpu_health.report_findings(gpus.OLD)]
    assert found[1].sentence == "Tesla V100: ? MiB, ? MHz, 250.5 of 300 W, 88 C"
    assert [verdict for _, verdict, _ in troubles(found)] == [BAD, NOTE]


def test_memory_that_other_processes_hold_is_noted() -> None:
    process = "<processes><process_info><used_memory>40000 MiB</used_memory></process_info></processes>"
    report = gpus.REPORT.replace("<processes></processes>", process, 1)
    assert troubles(gpu_health.report_findings(report)) == [("GPU 0", NOTE, "processes use 40000 MiB of its memory")]


def test_links_of_gpus() -> None:
    found = gpu_health.nvlink_findings(gpus.nvlink_status((1, 0), (1, 3)), gpus.NVLINK_ERRORS)
    assert troubles(found) == [
        ("GPU 1", BAD, "2 of 4 NVLinks are active"),
        ("GPU 1", NOTE, "NVLink: 7 replay errors, 1 recovery errors since the last reset"),
    ]


def test_errors_in_the_log_of_the_kernel() -> None:
    found = [*gpu_health.log_findings(gpus.KERNEL_LOG + "oom-kill:constraint=x\n")]
    assert [(each.verdict, each.facts.get("xid")) for each in found] == [
        (BAD, 79),
        (NOTE, 13),
        (NOTE, 999),
        (NOTE, None),
    ]
    assert found[1].sentence.startswith("2 x Xid 13 on 0000:2a:00: exception in a kernel")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one that is searched besides that of the shell."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path / "bin"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_programs_of_the_driver_are_run(programs: Path) -> None:
    for name, text in {"report": gpus.REPORT, "links": gpus.nvlink_status((0, 2)), "errors": ""}.items():
        (programs / name).write_text(text)
    here = programs
    cases = f'case "$*" in "-q -x") cat {here}/report;; "nvlink -s") cat {here}/links;; *) cat {here}/errors;; esac'
    program(programs / "nvidia-smi", cases)
    assert troubles(gpu_health.gpu_findings()) == [("GPU 0", BAD, "3 of 4 NVLinks are active")]
    (programs / "log").write_text(gpus.KERNEL_LOG)
    program(programs / "journalctl", f"cat {here}/log")
    assert len(troubles(gpu_health.xid_findings())) == 3


def test_a_program_that_hangs_is_left_behind(programs: Path) -> None:
    program(programs / "stuck", "exec sleep 60")
    begun = time.monotonic()
    assert output_of("stuck", seconds=0.2) is None
    assert output_of("no-such-program") is None
    assert time.monotonic() - begun < 5


# ---- Software


@pytest.mark.parametrize(
    ("torch", "cuda", "gpu", "driver", "driver_cuda", "verdict"),
    [
        ("2.13.0+cpu", None, False, None, None, OK),
        ("2.13.0+cpu", None, True, "570.86.15", "12.8", BAD),
        ("2.13.0+cu128", "12.8", True, "570.86.15", "12.8", OK),
        ("2.13.0+cu128", "12.8", True, "535.104.05", "12.2", NOTE),
        ("2.13.0+cu130", "13.0", True, "570.86.15", "12.8", BAD),
        ("2.13.0+cu128", "12.8", True, "470.1", None, BAD),
    ],
)
def test_torch_has_to_fit_the_driver(
    torch: str, cuda: str | None, gpu: bool, driver: str | None, driver_cuda: str | None, verdict: str
) -> None:
    assert installed.torch_finding(torch, cuda, gpu, driver, driver_cuda).verdict == verdict


def test_the_build_of_torch_is_read_from_its_files() -> None:
    import torch

    assert installed.cuda_of_torch() == torch.version.cuda


def test_optional_packages_buy_nothing_where_they_cannot_be_used() -> None:
    on_cpu, on_gpu = ({each.name.split()[0]: each for each in installed.package_findings(gpu)} for gpu in (False, True))
    assert on_cpu["apex"].sentence.startswith("nothing on a CPU")
    assert (on_cpu["apex"].verdict, on_gpu["apex"].verdict) == (OK, NOTE)
    assert "not measured here" in on_gpu["apex"].sentence
    assert on_gpu["transformer-engine"].sentence == "nothing: this program does not use it"
    assert on_gpu["flash-attn"].todo == "pip install flash-attn --no-build-isolation"
    assert on_cpu["matplotlib"].verdict == OK, "it is installed with the tools of developers"


def test_every_optional_package_is_listed_and_its_figure_is_on_a_page() -> None:
    names = {package.name.replace("-", "_") for package in installed.PACKAGES}
    kernels = {name for candidates in KERNEL_CANDIDATES.values() for name in candidates}
    optional = {"apex", "flash_attn", "triton", "mamba_ssm", "causal_conv1d"} & kernels
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[>=\[]", line)[0].replace("-", "_")
        for name, lines in extras.items()
        if name != "dev"
        for line in lines
    }
    assert optional | wanted <= names
    for package in installed.PACKAGES:
        figure, _, page = package.measured.partition("; ")
        assert not figure or figure.split(" ", 1)[0] in (ROOT / page).read_text(), package.name
        assert package.used or not package.buys


# ---- Machine


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cores_and_memory_of_a_container(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "proc/cpuinfo": "model name\t: AMD EPYC 9654\nflags\t\t: fpu avx2 avx512f\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "proc/meminfo": "MemTotal:  1000000 kB\nMemAvailable: 500000 kB\nHardwareCorrupted: 4 kB\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1048576\n",
            "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
            "sys/devices/system/edac/mc/mc1/ue_count": "3\n",
            "sys/devices/system/edac/mc/mc0/ce_count": "9\n",
        },
    )
    found = [*machine_health.cpu_findings({"OMP_NUM_THREADS": "4096"}, root), *machine_health.memory_findings(root)]
    assert found[0].sentence.startswith("AMD EPYC 9654: ")
    assert found[0].sentence.endswith("cores, avx2 avx512f")
    assert [(name, verdict) for name, verdict, _ in troubles(found)] == [
        ("core limit", NOTE),
        ("governor", NOTE),
        ("threads", NOTE),
        ("memory limit", NOTE),
        ("memory errors", BAD),
        ("memory errors", BAD),
    ]


def test_a_healthy_machine_has_no_troubles(tmp_path: Path) -> None:
    root = plant(tmp_path, {"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\n", "proc/cpuinfo": ""})
    one_thread = {"OMP_NUM_THREADS": "1"}
    looks = (machine_health.memory_findings(root), machine_health.cpu_findings(one_thread, root))
    assert troubles(each for look in looks for each in look) == []
    assert troubles([*machine_health.network_findings(root), *machine_health.setting_findings({}, root)]) == []
    assert machine_health.shared_memory_finding(1 << 40, 1 << 40).verdict == OK
    assert machine_health.shared_memory_finding(64 << 20, 64 << 20).verdict == NOTE


def test_ports_firewalls_and_settings(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_{}/ports/1"
    root = plant(
        tmp_path,
        {
            f"{port.format(0)}/rate": "400 Gb/sec (4X NDR)",
            f"{port.format(0)}/state": "4: ACTIVE",
            f"{port.format(0)}/counters/symbol_error": "7\n",
            f"{port.format(1)}/rate": "400 Gb/sec (4X NDR)",
            f"{port.format(1)}/state": "1: DOWN",
            "etc/ufw/ufw.conf": "ENABLED=yes\n",
            "proc/driver/nvidia/version": "x",
            "sys/class/net/eth0/operstate": "up\n",
        },
    )
    assert [(name, verdict) for name, verdict, _ in troubles(machine_health.network_findings(root))] == [
        ("InfiniBand", BAD),
        ("GPUDirect", NOTE),
        ("InfiniBand", NOTE),
        ("firewall", NOTE),
    ]
    environ = {
        "NCCL_SOCKET_IFNAME": "eth,ib0",
        "GLOO_SOCKET_IFNAME": "^lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
    }
    assert troubles(machine_health.setting_findings(environ, root)) == [
        ("NCCL_SOCKET_IFNAME", BAD, "NCCL_SOCKET_IFNAME=eth,ib0, but there is no ib0"),
        ("NCCL_IB_DISABLE", NOTE, "NCCL_IB_DISABLE=1: NCCL does not use InfiniBand"),
    ]


def master(environ: dict[str, str]) -> list[tuple[str, str, str]]:
    found = machine_health.name_findings({"RANK": "0", "WORLD_SIZE": "2", **environ})
    return [each for each in troubles(found) if each[0] != "host name"]


def test_the_address_of_rank_0() -> None:
    import socket

    assert master({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1024"}) == []
    (unknown,) = master({"MASTER_ADDR": "no-such-host.invalid"})
    assert unknown == ("MASTER_ADDR", BAD, "no-such-host.invalid has no address here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        used = master({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        assert used[-1] == ("MASTER_ADDR", BAD, f"port {port} of 127.0.0.1 is in use")
        assert master({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1"}) == []
    several = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
    }
    assert [name for name, *_ in troubles(machine_health.name_findings(several)) if name != "host name"] == ["E009"]


# ---- Disks


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_health, "SECONDS", 0.02)
    space, speed = disk_health.disk_findings("--save", str(tmp_path / "new" / "run"))
    assert space.facts["path"] == str(tmp_path)
    assert space.facts["bytes"] == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert 1e5 < speed.facts["write_bytes_per_s"] < 1e11
    assert list(tmp_path.iterdir()) == []


def test_disks_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_health, "SECONDS", 0.02)
    full = OSError(28, "No space left on device")
    with patch.object(os, "pwrite", side_effect=full):
        assert troubles(disk_health.disk_findings("--save", str(tmp_path)))[-1][1] == BAD
    monkeypatch.setattr(disk_health, "installed", lambda name: None)
    assert troubles(disk_health.disk_findings("--save", "s3://b/r")) == [
        ("--save", BAD, "s3://b/r needs s3fs, which is not installed")
    ]


def test_token_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_health, "SECONDS", 0.02)
    (tmp_path / "x.bin").write_bytes(bytes(100_000))
    (found,) = disk_health.data_findings(str(tmp_path / "x"))
    assert found.verdict == OK
    assert "97.66 KiB" in found.sentence
    assert troubles(disk_health.data_findings(str(tmp_path / "y")))[0][1] == BAD


def test_the_type_of_a_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\nserver:/x /shared\\040disk nfs4 rw 0 0\nt /shar tmpfs rw 0 0\n")
    assert disk_health.file_system(Path("/shared disk/runs"), mounts) == "nfs4"
    assert disk_health.file_system(Path("/shared"), mounts) == "ext4"


# ---- The whole


def test_a_probe_that_hangs_or_fails_costs_only_its_own_line() -> None:
    forever = threading.Event()

    def hangs() -> Iterator[Finding]:
        yield Finding("disks", "a", OK, "first")
        forever.wait()

    def fails() -> Iterator[Finding]:
        raise ValueError("no such thing")
        yield

    good = Finding("disks", "good", OK, "fine")
    begun = time.monotonic()
    found = examine(
        [
            Probe("disks", "dead", hangs, 0.2),
            Probe("disks", "alone", hangs, 0.2, alone=True),
            Probe("disks", "odd", fails),
            Probe("disks", "good", lambda: [good]),
        ]
    )
    assert time.monotonic() - begun < 3
    assert [(each.name, each.verdict) for each in found] == [
        *(("a", OK), ("dead", BAD), ("a", OK), ("alone", BAD), ("odd", NOTE), ("good", OK))
    ]
    forever.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_health, "SECONDS", 0.02)


def test_the_report_and_its_status(quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "1"}
    assert doctor.main(["--run-dir", str(tmp_path)], environ) == 0
    text = capsys.readouterr().out
    assert re.search(r"^software\n  ok   python +3\.", text, re.MULTILINE)
    assert f"--run-dir            {tmp_path} (" in text
    assert "transformer-engine" not in text, "it buys nothing"
    assert re.search(r"\n0 bad, \d+ notes, \d+ ok; --all also shows the \d+ that buy nothing here\n$", text)
    assert doctor.main(["--json", "--data-path", str(tmp_path / "none"), "--run-dir", str(tmp_path)], environ) == 1
    whole = json.loads(capsys.readouterr().out)
    assert whole["counts"]["bad"] == 1
    (bad,) = (each for each in whole["findings"] if each["verdict"] == "bad")
    assert (bad["name"], bad["todo"]) == ("--data-path", f"python tools/inspect_dataset.py {tmp_path / 'none'}")
    assert doctor.main([], {"RANK": "x", "WORLD_SIZE": "2"}) == 2
    with pytest.raises(SystemExit, match=r"^2$"):
        doctor.main(["--data", "x"], environ)


def test_one_machine_is_examined_without_torch() -> None:
    code = (
        "import sys; from tools import doctor; from tools.lib import disk_health; disk_health.SECONDS = 0.01; "
        "doctor.main(['--all'], {}); sys.exit(3 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "transformer-engine" in done.stdout
