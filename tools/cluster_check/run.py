"""Check a cluster before it is trusted with a run, and report the result as Markdown and JSON.

`ClusterCheck` runs the parts one after the other: machines and file system, layouts against one process, a killed and
resumed run, and the bandwidth of the collectives. Each part starts programs on all ranks through a `RankLauncher`,
with a time limit; a failure in one part does not stop the others. The report is rewritten after every part.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.errors import pluralize
from tools.cluster_check import checks, filesystem
from tools.cluster_check.checks import InterruptPlan, InterruptTest, layout_cases
from tools.cluster_check.launcher import RankLauncher
from tools.cluster_check.report import OK, SKIPPED, WARNING, CheckResult, CheckSection, ClusterReport

PROGRAM = "tools/acceptance.py"
LAYOUT_STARTS = 3  # starts of the remaining layouts after one has failed
# A rank waits this long for the others' files: the first import of torch from a network file system takes minutes.
VISIBLE_SECONDS = 300.0
# With less than this share of the InfiniBand ports' rate between nodes, traffic most likely takes another route.
FABRIC_SHARE = 0.25
BETWEEN_NODES = "between nodes"  # the name in benchmarks/bandwidth.py
MAX_CLOCK_OFFSET = 1.0  # seconds; beyond, logs of several nodes are hard to read together


@dataclass
class ClusterCheck:
    """A cluster check: its settings, and what it knows of the cluster so far."""

    launcher: RankLauncher  # starts programs on all ranks
    folder: Path  # of the report, shared by all nodes
    device: str  # auto, cpu or cuda; auto is replaced once the machines are known
    seconds: float  # time limit of each program
    formats: Sequence[str]  # in which layouts are compared
    most: int | None  # layouts to compare; None for all
    steps: int  # of the run that is killed
    seed: int  # draws the moment at which it is killed
    ranks: int = 0  # world size; 0 until it is known
    per_node: int = 0  # ranks per node
    fabric: float = 0.0  # rate of a node's InfiniBand ports, 10^9 bytes a second; 0 for one node, or without
    about: str = "the machines are unknown"  # the cluster in one line
    parts: list[CheckSection] = field(default_factory=list)  # parts run so far

    def run(self, names: Sequence[str], command: str) -> ClusterReport:
        """Run the selected parts, always starting with ``machine``, and write the report after each."""
        available: dict[str, Callable[[CheckSection], None]] = {
            "machine": self.machine,
            "layouts": self.layouts,
            "interruption": self.interruption,
            "bandwidth": self.bandwidth,
        }
        chosen = [name for name in available if name == "machine" or name in names]
        unasked = [name for name in available if name not in chosen]
        for number, name in enumerate(chosen, 1):
            self._run_part(name, available[name])
            report = ClusterReport(self.about, command, self.parts, chosen[number:], unasked)
            report.write(self.folder)
        return report

    def _run_part(self, name: str, run: Callable[[CheckSection], None]) -> None:
        part = CheckSection(name)
        self.parts.append(part)
        print(f"{time.strftime('%H:%M:%S')} {name} ...", flush=True)
        start = time.monotonic()
        try:
            if name != "machine" and self.ranks == 0:
                part.checks.append(CheckResult(name, SKIPPED, "no rank has started"))
            elif name in ("layouts", "bandwidth") and self.ranks == 1:
                part.checks.append(CheckResult(name, SKIPPED, "needs more than one rank"))
            else:
                run(part)
        except Exception as error:  # an unexpected error in one part must not end the others
            part.add(name, False, f"{type(error).__name__}: {error}")
        part.seconds = time.monotonic() - start
        for check in part.checks:
            if check.verdict not in (OK, SKIPPED):
                print(f"         {check.verdict} {check.what}: {check.detail}", flush=True)

    def machine(self, part: CheckSection) -> None:
        """Check installed versions, machines and the file system."""
        folder = self._folder("machine")
        wait = min(VISIBLE_SECONDS, self.seconds / 2)
        outcome = self.launcher.run(
            "machine", [PROGRAM, "rank", "machine", folder, self.device, str(wait)], self.seconds
        )
        facts_by_rank = checks.check_machines(part, folder)
        if outcome.status != 0:
            part.add("launcher", False, outcome.ended)
            part.log = outcome.tail()
        nodes = [facts for _, facts in sorted(facts_by_rank.items()) if facts["local_rank"] == 0]
        if not nodes:
            return
        self.ranks = nodes[0]["size"]
        self.per_node = max(Counter(facts["host"] for facts in facts_by_rank.values()).values())
        self.fabric = min(map(checks.fabric_rate, nodes)) if len(nodes) > 1 else 0.0
        first = nodes[0]
        checks.check_gpus(part, nodes, self.device)
        self.device = "cuda" if self.device == "cuda" or first["gpus"] else "cpu"
        gpus = "no GPU found" if self.device == "cuda" else "CPUs alone (gloo)"
        if first["gpus"]:
            gpus = f"{first['gpus'][0]}, CUDA {first['cuda']}, NCCL {first['nccl']}"
        kind = filesystem.file_system_type(self.folder)
        part.facts["file system"] = kind
        count = f"{pluralize(self.ranks, 'ranks')} on {pluralize(len(nodes), 'nodes')}"
        commit = f"commit {first['commit'][:12]}" if first["commit"] else "no git checkout"
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self.about = f"{count}: {gpus}; torch {first['torch']}; {kind or 'an unknown'} file system; {commit}; {when}."

    def layouts(self, part: CheckSection) -> None:
        """Compare layouts with one process, in every format."""
        cases = layout_cases(self.ranks, self.per_node)[: self.most]
        for dtype in self.formats:
            folder, left = self._folder("layouts"), cases
            for number in range(LAYOUT_STARTS):
                args = [",".join(str(cases.index(case)) for case in left), str(self.per_node)]
                program: list[str | Path] = [PROGRAM, "rank", "layouts", folder, dtype, self.device, *args]
                outcome = self.launcher.run(f"layouts-{dtype}", program, self.seconds)
                done = [checks.is_done(folder, case, dtype, self.ranks) for case in left]
                if all(done):
                    if not part.add(f"ranks exit cleanly, {dtype}", outcome.status == 0, outcome.ended):
                        part.log = outcome.tail()
                    break
                part.log = outcome.tail()
                failed = left[done.index(False)]
                part.add(f"{failed.name}, {dtype}", False, f"{outcome.ended}; see {outcome.log.name}")
                left = left[done.index(False) + 1 :]
                if not left:
                    break
                if number == LAYOUT_STARTS - 1:
                    for case in left:
                        part.add(f"{case.name}, {dtype}", False, "skipped after too many failures", SKIPPED)
            checks.check_layouts(part, folder, dtype, cases, self.ranks)

    def interruption(self, part: CheckSection) -> None:
        """Kill a rank and resume the run; load a checkpoint in another layout."""
        plan = InterruptPlan.draw(self.steps, self.ranks, self.seed)
        part.facts["seed"] = self.seed
        test = InterruptTest(self.launcher, self._folder("runs"), self.device, self.ranks, plan, self.seconds)
        if test.undisturbed(part):
            test.interrupted(part)
            test.elsewhere(part)

    def bandwidth(self, part: CheckSection) -> None:
        """Measure the collectives' bandwidth and the offset between the nodes' clocks."""
        path = self.folder / "bandwidth.json"
        program: list[str | Path] = ["benchmarks/bandwidth.py", "--device", self.device, "--json", path]
        outcome = self.launcher.run("bandwidth", program, self.seconds)
        if not part.add("collectives give correct results", outcome.status == 0, outcome.ended):
            part.log = outcome.tail()
            return
        results = json.loads(path.read_text())
        part.facts |= results
        apart = results["clocks_apart"]
        part.add("clocks", apart < MAX_CLOCK_OFFSET, f"apart by {1000 * apart:.0f} ms at most", otherwise=WARNING)
        if self.fabric and self.device == "cuda":
            carried = internode_rate(results["figures"], self.per_node)
            sentence = f"{carried:.3g} of {self.fabric:.3g} GB/s that a node's InfiniBand ports carry at best"
            part.add("fabric between nodes", carried >= FABRIC_SHARE * self.fabric, sentence, otherwise=WARNING)
        part.tables = bandwidth_tables(results["figures"])

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder


def internode_rate(figures: Sequence[dict[str, Any]], per_node: int) -> float:
    """Return the best rate at which a node sends to other nodes, in 10^9 bytes a second.

    Between nodes, as many groups as a node has ranks are measured at the same time; all ranks together form one ring.
    """
    between = [per_node * figure["bus"] for figure in figures if figure["where"] == BETWEEN_NODES]
    return max(between or [figure["bus"] for figure in figures])


def bandwidth_tables(figures: Sequence[dict[str, Any]]) -> dict[str, list[Sequence[str]]]:
    """Return bus bandwidths by operation and size, a table for each kind of group."""
    tables: dict[str, list[Sequence[str]]] = {}
    for where in dict.fromkeys(figure["where"] for figure in figures):
        here = [figure for figure in figures if figure["where"] == where]
        sizes = list(dict.fromkeys(figure["megabytes"] for figure in here))
        rates = {(figure["operation"], figure["megabytes"]): f"{figure['bus']:.3g}" for figure in here}
        rows: list[Sequence[str]] = [("", *(f"{size:g} MB" for size in sizes))]
        rows += [(name, *(rates[name, size] for size in sizes)) for name in dict.fromkeys(f["operation"] for f in here)]
        note = " (send/receive: one way after the other)" if here[0]["ranks"] == 2 else ""
        tables[f"Bus bandwidth (nccl-tests), GB/s, {where}, groups of {here[0]['ranks']}{note}"] = rows
    return tables
