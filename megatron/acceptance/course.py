"""The course of an acceptance: part after part, each bounded in time, none ended by another's failure."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.acceptance import filesystem, machine, matrix
from megatron.acceptance.interruption import Plan, Trial
from megatron.acceptance.launcher import Launcher
from megatron.acceptance.layouts import layouts
from megatron.acceptance.report import OK, SKIPPED, WARNING, Check, Part, Report

PROGRAM = "tools/acceptance.py"
TRIES = 3
"""How often the layouts that are left are started again after one that failed."""
VISIBLE_SECONDS = 300.0
"""How long a rank waits for the others' files: the first import of torch from a network file system takes minutes."""
FABRIC_SHARE = 0.25
"""Of what the InfiniBand ports of a node carry: with less between nodes, the traffic most likely takes another way."""
BETWEEN = "between nodes"
"""As benchmarks/bandwidth.py calls it."""
CLOCKS_APART = 1.0
"""Seconds from which logs of several nodes are hard to read together."""


@dataclass
class Course:
    """What all parts share.

    Attributes:
        launcher: starts programs on all ranks.
        folder: of the report; all nodes have it.
        device: ``auto``, ``cpu`` or ``cuda``; known better once the machines were looked at.
        seconds: that a program may take.
        formats: in which layouts are compared.
        most: layouts that are tried; None for all.
        steps: of the run that is killed.
        seed: of the moment at which it is.
        ranks: of the cluster, as far as they were heard of.
        per_node: of them, on every node.
        fabric: what the InfiniBand ports of a node carry, 10^9 bytes a second; 0 for one node, or without.
        about: the cluster, in a line.
        parts: so far.
    """

    launcher: Launcher
    folder: Path
    device: str
    seconds: float
    formats: Sequence[str]
    most: int | None
    steps: int
    seed: int
    ranks: int = 0
    per_node: int = 0
    fabric: float = 0.0
    about: str = "nothing is known of the machines"
    parts: list[Part] = field(default_factory=list)

    def run(self, names: Sequence[str], command: str) -> Report:
        """Go through the parts of these names, after the machines, without which nothing is known."""
        todo: dict[str, Callable[[Part], None]] = {
            "machine": self.machine,
            "layouts": self.layouts,
            "interruption": self.interruption,
            "bandwidth": self.bandwidth,
        }
        chosen = [name for name in todo if name == "machine" or name in names]
        unasked = [name for name in todo if name not in chosen]
        for number, name in enumerate(chosen, 1):
            self._go(name, todo[name])
            report = Report(self.about, command, self.parts, chosen[number:], unasked)
            report.write(self.folder)
        return report

    def _go(self, name: str, act: Callable[[Part], None]) -> None:
        part = Part(name)
        self.parts.append(part)
        print(f"{time.strftime('%H:%M:%S')} {name} ...", flush=True)
        begun = time.monotonic()
        try:
            if name != "machine" and self.ranks == 0:
                part.checks.append(Check(name, SKIPPED, "no rank has started"))
            elif name in ("layouts", "bandwidth") and self.ranks == 1:
                part.checks.append(Check(name, SKIPPED, "one rank alone has nobody to communicate with"))
            else:
                act(part)
        except Exception as error:  # what nobody foresaw in one part must not end the others
            part.add(name, False, f"{type(error).__name__}: {error}")
        part.seconds = time.monotonic() - begun
        for check in part.checks:
            if check.verdict not in (OK, SKIPPED):
                print(f"         {check.verdict} {check.what}: {check.told}", flush=True)

    def machine(self, part: Part) -> None:
        """Installed versions, machines, file system."""
        folder = self._folder("machine")
        wait = min(VISIBLE_SECONDS, self.seconds / 2)
        outcome = self.launcher.run(
            "machine", [PROGRAM, "rank", "machine", folder, self.device, str(wait)], self.seconds
        )
        told = machine.examine(part, folder)
        if outcome.status != 0:
            part.add("the launcher's end", False, outcome.ended)
            part.log = outcome.tail()
        if not told:
            return
        nodes = [told[rank] for rank in sorted(told) if told[rank]["local_rank"] == 0]
        if not nodes:
            return
        self.ranks, self.per_node = nodes[0]["size"], max(Counter(facts["host"] for facts in told.values()).values())
        self.fabric = min(map(machine.fabric_rate, nodes)) if len(nodes) > 1 else 0.0
        first = nodes[0]
        machine.have_gpus(part, nodes, self.device)
        self.device = "cuda" if self.device == "cuda" or first["gpus"] else "cpu"
        gpus = "no GPU found" if self.device == "cuda" else "CPUs alone (gloo)"
        if first["gpus"]:
            gpus = f"{first['gpus'][0]}, CUDA {first['cuda']}, NCCL {first['nccl']}"
        kind = filesystem.kind(self.folder)
        part.facts["file system"] = kind
        count = (
            f"{self.ranks} rank{'' if self.ranks == 1 else 's'} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        )
        commit = f"commit {first['commit'][:12]}" if first["commit"] else "no git checkout"
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self.about = f"{count}: {gpus}; torch {first['torch']}; {kind or 'an unknown'} file system; {commit}; {when}."

    def layouts(self, part: Part) -> None:
        """Layouts against one process, in every format."""
        cases = layouts(self.ranks, self.per_node)[: self.most]
        for dtype in self.formats:
            folder, left = self._folder("layouts"), cases
            for number in range(TRIES):
                words = [",".join(str(cases.index(case)) for case in left), str(self.per_node)]
                program: list[str | Path] = [PROGRAM, "rank", "layouts", folder, dtype, self.device, *words]
                outcome = self.launcher.run(f"layouts-{dtype}", program, self.seconds)
                done = [matrix.is_done(folder, case, dtype, self.ranks) for case in left]
                if all(done):
                    if not part.add(f"ranks end well, {dtype}", outcome.status == 0, outcome.ended):
                        part.log = outcome.tail()
                    break
                part.log = outcome.tail()
                failed = left[done.index(False)]
                matrix.not_done(part, failed, dtype, f"{outcome.ended}; see {outcome.log.name}")
                left = left[done.index(False) + 1 :]
                if not left:
                    break
                if number == TRIES - 1:
                    matrix.not_tried(part, left, dtype, "too many others have failed")
            matrix.examine(part, folder, dtype, cases, self.ranks)

    def interruption(self, part: Part) -> None:
        """A rank killed and the run resumed; a checkpoint loaded in another layout."""
        plan = Plan.draw(self.steps, self.ranks, self.seed)
        part.facts["seed"] = self.seed
        trial = Trial(self.launcher, self._folder("runs"), self.device, self.ranks, plan, self.seconds)
        if trial.undisturbed(part):
            trial.interrupted(part)
            trial.elsewhere(part)

    def bandwidth(self, part: Part) -> None:
        """What the collectives carry, and how far the nodes' clocks are apart."""
        path = self.folder / "bandwidth.json"
        program: list[str | Path] = ["benchmarks/bandwidth.py", "--device", self.device, "--json", path]
        outcome = self.launcher.run("bandwidth", program, self.seconds)
        if not part.add("collectives give right results", outcome.status == 0, outcome.ended):
            part.log = outcome.tail()
            return
        told = json.loads(path.read_text())
        part.facts |= told
        apart = told["clocks_apart"]
        part.add("clocks", apart < CLOCKS_APART, f"apart by {1000 * apart:.0f} ms at most", otherwise=WARNING)
        if self.fabric and self.device == "cuda":
            carried = carried_between(told["figures"], self.per_node)
            sentence = f"{carried:.3g} of {self.fabric:.3g} GB/s that a node's InfiniBand ports carry at best"
            part.add("fabric between nodes", carried >= FABRIC_SHARE * self.fabric, sentence, otherwise=WARNING)
        part.tables = bandwidth_tables(told["figures"])

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder


def carried_between(figures: Sequence[dict[str, Any]], per_node: int) -> float:
    """10^9 bytes a second that leave a node, at the best of the measured figures.

    Between nodes, as many groups as a node has ranks are at it at the same time; all ranks together are one ring.
    """
    between = [per_node * figure["bus"] for figure in figures if figure["where"] == BETWEEN]
    return max(between or [figure["bus"] for figure in figures])


def bandwidth_tables(figures: Sequence[dict[str, Any]]) -> dict[str, list[Sequence[str]]]:
    """Bus bandwidths by operation and size, a table for each kind of group."""
    tables: dict[str, list[Sequence[str]]] = {}
    for where in dict.fromkeys(figure["where"] for figure in figures):
        here = [figure for figure in figures if figure["where"] == where]
        sizes = list(dict.fromkeys(figure["megabytes"] for figure in here))
        by = {(figure["operation"], figure["megabytes"]): f"{figure['bus']:.3g}" for figure in here}
        rows: list[Sequence[str]] = [("", *(f"{size:g} MB" for size in sizes))]
        rows += [(name, *(by[name, size] for size in sizes)) for name in dict.fromkeys(f["operation"] for f in here)]
        ways = " (send/receive: one way after the other)" if here[0]["ranks"] == 2 else ""
        tables[f"Bus bandwidth (nccl-tests), GB/s, {where}, groups of {here[0]['ranks']}{ways}"] = rows
    return tables
