"""Examine this machine, or all nodes of a job, and print what is wrong, what it costs and what to do.

    megatron doctor                                                            # this machine, in seconds
    megatron doctor --save /shared/runs/a --data-path PREFIX                   # with these disks
    srun --ntasks-per-node=8 python tools/doctor.py                            # all nodes, and who of them is slow
    torchrun --nproc-per-node 8 tools/doctor.py                                # all GPUs of this machine

Looks at software and what optional packages would buy here, GPUs, cores, memory, limits, names, network and disks. It
needs no rights and changes nothing. With several ranks, every node examines itself; then differences between the nodes
are printed, and ranks compute and send messages at the same time, so that a slow node, rank or link is named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.errors import UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.text import echo
from tools.lib import disk_health, gpu_health, installed, machine_health
from tools.lib.findings import BAD, Finding, Probe, counts, examine, lines_of


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--run-dir", metavar="DIR", help="--run-dir of a run: also examine its disk")
    add("--save", metavar="DIR", help="--save of a run: also examine its disk, or whether its store can be used")
    add("--data-path", nargs="+", default=[], metavar="PREFIX", help="token files of a run: also read from them")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks compute (auto)")
    add("--all", action="store_true", help="also print optional packages that buy nothing here")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Examine and print.

    Returns:
        The exit status: 1 if something is bad, 2 for wrong flags.
    """
    args = build_parser().parse_args(argv)
    try:
        launch = Launch.read(environ)
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    first = launch.world_size == 1 or launch.local_rank == 0  # one rank examines each node
    findings = examine(probes(args, environ)) if first else []
    if launch.world_size > 1:
        from tools.cluster_check.nodes import examine_job  # imports torch

        return examine_job(findings, args.device, launch, environ, as_json=args.json, everything=args.all)
    report(findings, as_json=args.json, everything=args.all)
    return int(any(finding.verdict == BAD for finding in findings))


def probes(args: argparse.Namespace, environ: Mapping[str, str]) -> list[Probe]:
    """Return what to look at, in the order of the report."""
    gpu, driver = gpu_health.has_driver(), machine_health.nvidia_driver_version()
    software, machine, network = installed.GROUP, machine_health.GROUP, machine_health.NETWORK
    disks = {"--run-dir": args.run_dir, "--save": args.save}
    chosen = {name: place for name, place in disks.items() if place}
    return [
        Probe(software, "packages", partial(installed.software_findings, gpu, driver)),
        Probe(installed.OPTIONAL, "packages", partial(installed.package_findings, gpu)),
        Probe(gpu_health.GROUP, "nvidia-smi", gpu_health.gpu_findings, 9.0),
        Probe(gpu_health.GROUP, "kernel log", gpu_health.xid_findings),
        Probe(machine, "cores", partial(machine_health.cpu_findings, environ)),
        Probe(machine, "memory", machine_health.memory_findings),
        Probe(machine, "/dev/shm", machine_health.shm_findings),
        Probe(machine, "limits", machine_health.limit_findings),
        Probe(machine, "clock", machine_health.clock_findings),
        Probe(network, "interfaces", machine_health.network_findings),
        Probe(network, "names", partial(machine_health.name_findings, environ)),
        Probe(network, "settings", partial(machine_health.setting_findings, environ)),
        *(
            Probe(disk_health.GROUP, name, partial(disk_health.disk_findings, name, place), 6.0, alone=True)
            for name, place in (chosen or {"this folder": "."}).items()
        ),
        *(
            Probe(disk_health.GROUP, "--data-path", partial(disk_health.data_findings, prefix), 4.0, alone=True)
            for prefix in args.data_path
        ),
    ]


def report(findings: Sequence[Finding], as_json: bool, everything: bool) -> None:
    """Print findings, as text or as JSON."""
    if as_json:
        echo(
            json.dumps({"findings": [finding.to_json() for finding in findings], "counts": counts(findings)}, indent=1)
        )
        return
    shown = [f for f in findings if everything or f.group != installed.OPTIONAL or f.todo]
    echo("\n".join(lines_of(shown)).lstrip("\n"))
    number = counts(shown)
    hidden = f"; --all also shows the {left} that buy nothing here" if (left := len(findings) - len(shown)) else ""
    echo(f"\n{number['bad']} bad, {number['note']} notes, {number['ok']} ok{hidden}")


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
