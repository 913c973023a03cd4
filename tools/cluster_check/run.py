"""Check a cluster before it is trusted with a run, and report the result as Markdown and JSON.

`ClusterCheck` runs the parts one after the other: machines and file system, layouts against one process, a killed and
resumed run (`InterruptTest`), and the bandwidth of the collectives. Each part starts programs on all ranks through a
`RankLauncher`, with a time limit; a failure in one part does not stop the others. The report is rewritten after every
part.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.privacy import redact
from megatron.config.text import counted, echo
from megatron.training.loggers.run_folder import read_history
from tools.cluster_check import checks, filesystem
from tools.cluster_check.checks import MODEL_FLAGS, STAGES, TENSOR, ZERO_1, batch_flags, layout_cases
from tools.cluster_check.report import OK, SKIPPED, WARNING, CheckResult, CheckSection, ClusterReport

PROGRAM = "tools/acceptance.py"
TRAINING_PROGRAM = "pretrain_gpt.py"
LAYOUT_STARTS = 3  # starts of the remaining layouts after one has failed
# A rank waits this long for the others' files: the first import of torch from a network file system takes minutes.
VISIBLE_SECONDS = 300.0
# With less than this share of the InfiniBand ports' rate between nodes, traffic most likely takes another route.
FABRIC_SHARE = 0.25
BETWEEN_NODES = "between nodes"  # the name in benchmarks/bandwidth.py
MAX_CLOCK_OFFSET = 1.0  # seconds; beyond, logs of several nodes are hard to read together

ROOT = Path(__file__).parents[2]
FIRST_PORT = 29600
TORCHRUN_REPORT = "torch/distributed/elastic/"  # marks the first line of torchrun's failure report
TAIL_LINES = 25
GRACE_SECONDS = 45.0  # seconds a launcher gets to end its ranks; torchrun gives hanging ones 30 before it kills them


@dataclass(frozen=True)
class LaunchResult:
    """How a program ended."""

    status: int | None  # exit status of the launcher; None if it timed out
    seconds: float
    log: Path  # its output

    @property
    def ended(self) -> str:
        """The exit status, or that it timed out, in words."""
        return f"timed out after {self.seconds:.0f} s" if self.status is None else f"exit status {self.status}"

    def tail(self) -> str:
        """Return the end of the ranks' output, without torchrun's own report, which adds nothing."""
        lines = self.log.read_text(errors="replace").splitlines()
        reports = (i for i, line in enumerate(lines) if TORCHRUN_REPORT in line)
        return "\n".join(lines[: next(reports, len(lines))][-TAIL_LINES:])


@dataclass
class RankLauncher:
    """Starts programs one after the other."""

    command: Sequence[str]  # starts the Python file that follows on every rank; ``{port}`` is a new port every time
    logs: Path  # folder of the programs' output
    starts: int = 0  # programs started so far

    def run(self, name: str, program: Sequence[str | Path], seconds: float) -> LaunchResult:
        """Run ``program``, a Python file of the repository and its arguments, on all ranks; wait for its end."""
        self.starts += 1
        port = str(FIRST_PORT + (os.getpid() * 16 + self.starts) % 2000)
        words = [word.replace("{port}", port) for word in self.command]
        command = [*words, str(ROOT / program[0]), *map(str, program[1:])]
        log = self.logs / f"{self.starts:02d}-{name}.log"
        start = time.monotonic()
        with log.open("w") as file:
            file.write(f"$ {redact(shlex.join(command))}\n")
            file.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=launch_environment(port),
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                terminate(process)
        return LaunchResult(status, time.monotonic() - start, log)


def launch_environment(port: str) -> dict[str, str]:
    """Return the programs' environment: the library's path, and the rendezvous port for launchers that set none."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path, "MASTER_PORT": port}


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher that still runs, and every process of its session on this machine."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # the launcher forwards it to ranks on other machines too
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_outcome(part: CheckSection, what: str, outcome: LaunchResult, good: bool, detail: str) -> bool:
    """Record a check of a program, with the end of its output if it failed; return ``good``."""
    if not part.add(what, good, detail):
        part.log = outcome.tail()
    return good


RESUME_FORMATS = {"cpu": "", "cuda": "--bf16"}
RESUME_TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}
"""Allowed relative errors of losses in another layout."""


@dataclass(frozen=True)
class InterruptPlan:
    """The run, and the moment at which a rank is killed."""

    steps: int  # of the run
    every: int  # steps between saves
    killed: int  # step in which the rank is killed
    rank: int  # the rank that is killed
    within: int  # milliseconds after that step has started

    @property
    def last_complete_save(self) -> int:
        """The newest step whose checkpoint was complete when the rank was killed."""
        return (self.killed - 2) // self.every * self.every

    @classmethod
    def draw(cls, steps: int, ranks: int, seed: int) -> InterruptPlan:
        """Draw a moment after the first save and before the last."""
        chance, every = random.Random(seed), max(2, steps // 5)
        return cls(
            steps, every, chance.randint(every + 1, steps - every), chance.randrange(ranks), chance.randrange(20)
        )


def killed_run_layout(ranks: int) -> str:
    """Return the layout flags of the run that is killed."""
    return f"{ZERO_1} {TENSOR} 2 --sequence-parallel" if ranks % 2 == 0 else ZERO_1


def resumed_run_layout(ranks: int) -> str:
    """Return the layout flags of the run that loads its checkpoint."""
    return f"--pipeline-model-parallel-size 2 {STAGES}" if ranks % 2 == 0 else ""


@dataclass
class InterruptTest:
    """The runs of this part. Each has its folder, and computes the same in every layout."""

    launcher: RankLauncher
    folder: Path  # contains the run folders
    device: str  # cpu or cuda
    ranks: int
    plan: InterruptPlan
    seconds: float  # time limit of each run

    def undisturbed(self, part: CheckSection) -> bool:
        """Run the reference of the other runs."""
        words = self._flags("undisturbed", killed_run_layout(self.ranks))
        return self._train(part, "undisturbed", [*words, "--async-save"], f"{self.plan.steps} steps")

    def interrupted(self, part: CheckSection) -> None:
        """Kill a rank, restart the run, and compare its losses."""
        plan, folder = self.plan, self.folder / "killed"
        words = self._flags("killed", killed_run_layout(self.ranks))
        fault = ["rank", "train", str(plan.rank), str(plan.killed), str(plan.within), *words]
        outcome = self.launcher.run("killed", [PROGRAM, *fault], self.seconds)
        reached = max(_losses(folder), default=0)
        died = outcome.status not in (0, None) and plan.killed - 2 <= reached < plan.steps
        sentence = f"{outcome.ended}, with step {reached} as the last in the log"
        if not check_outcome(part, f"rank {plan.rank} killed in step {plan.killed}", outcome, died, sentence):
            return
        if not self._train(part, "resumed", words, "started again"):
            return
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        resumed_at = max((line["iteration"] for line in lines if line.get("event") == "start"), default=0)
        good = max(plan.last_complete_save, 1) <= resumed_at <= reached
        part.add("resumed from the newest checkpoint", good, f"it continued after step {resumed_at} of {reached}")
        self._compare(part, "losses as undisturbed", _losses(folder), range(1, plan.steps + 1), 0.0)

    def elsewhere(self, part: CheckSection) -> None:
        """Load an asynchronously saved checkpoint of the reference run in another layout."""
        at, layout = self.plan.steps - self.plan.every, resumed_run_layout(self.ranks)
        load = ["--load", str(self.folder / "undisturbed" / "checkpoints"), "--ckpt-step", str(at)]
        words = [*self._flags("elsewhere", layout), *load]
        if self._train(part, "elsewhere", words, f"step {at} loaded with {layout or 'none'}"):
            losses, steps = _losses(self.folder / "elsewhere"), range(at + 1, self.plan.steps + 1)
            self._compare(part, "losses as before", losses, steps, RESUME_TOLERANCE[self.device])

    def _flags(self, name: str, layout: str) -> list[str]:
        folder, plan = self.folder / name, self.plan
        words = f"{MODEL_FLAGS} {batch_flags(self.ranks)} --lr 1e-3 --lr-warmup-iters 5 --deterministic"
        words += f" --log-interval 1 --device {self.device} --train-iters {plan.steps} --distributed-timeout-minutes 5"
        saves = ["--run-dir", str(folder), "--save", str(folder / "checkpoints"), "--save-interval", str(plan.every)]
        return [*f"{words} {RESUME_FORMATS[self.device]} {layout}".split(), *saves]

    def _train(self, part: CheckSection, name: str, words: Sequence[str], what: str) -> bool:
        """Train with these flags, record how that ended as check ``what``, and return whether it succeeded."""
        outcome = self.launcher.run(name, [TRAINING_PROGRAM, *words], self.seconds)
        sentence = f"{outcome.ended} after {outcome.seconds:.0f} s"
        return check_outcome(part, what, outcome, outcome.status == 0, sentence)

    def _compare(self, part: CheckSection, what: str, losses: dict[int, float], steps: range, allowed: float) -> None:
        """Check that the losses are those of the reference run."""
        expected = _losses(self.folder / "undisturbed")
        missing = [step for step in steps if step not in losses or step not in expected]
        if missing:
            part.add(what, False, f"no loss was recorded for step {missing[0]}")
            return
        errors = {step: abs(losses[step] - expected[step]) / abs(expected[step]) for step in steps}
        worst = max(errors, key=lambda step: errors[step])
        part.facts[what] = {"steps": [steps.start, steps.stop - 1], "error": errors[worst], "at step": worst}
        good = all(error <= allowed for error in errors.values())
        limit = f"allowed: {allowed:g}" if allowed else "they must be bitwise equal"
        sentence = f"steps {steps.start} to {steps.stop - 1} differ by {errors[worst]:.1e} at most ({limit})"
        part.add(what, good, "bitwise equal" if good and not errors[worst] else sentence)


def _losses(folder: Path) -> dict[int, float]:
    """Read the loss by step from a run's folder; empty if it has none."""
    try:
        return {point.iteration: point.loss for point in read_history(folder / "metrics.jsonl").train}
    except ValueError:
        return {}


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
        echo(f"{time.strftime('%H:%M:%S')} {name} ...", flush=True)
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
                echo(f"         {check.verdict} {check.what}: {check.detail}", flush=True)

    def machine(self, part: CheckSection) -> None:
        """Check installed versions, machines and the file system."""
        folder = self._folder("machine")
        wait = min(VISIBLE_SECONDS, self.seconds / 2)
        outcome = self.launcher.run(
            "machine", [PROGRAM, "rank", "machine", folder, self.device, str(wait)], self.seconds
        )
        facts_by_rank = checks.check_machines(part, folder)
        if outcome.status != 0:
            check_outcome(part, "launcher", outcome, False, outcome.ended)
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
        count = f"{counted(self.ranks, 'rank')} on {counted(len(nodes), 'node')}"
        commit = f"commit {first['commit'][:12]}" if first["commit"] else "no git checkout"
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self.about = f"{count}: {gpus}; torch {first['torch']}; {kind or 'an unknown'} file system; {commit}; {when}."

    def layouts(self, part: CheckSection) -> None:
        """Compare layouts with one process, in every format."""
        cases = layout_cases(self.ranks, self.per_node)[: self.most]
        for dtype in self.formats:
            folder, left = self._folder("layouts"), cases
            for _ in range(LAYOUT_STARTS):
                args = [",".join(str(cases.index(case)) for case in left), str(self.per_node)]
                program: list[str | Path] = [PROGRAM, "rank", "layouts", folder, dtype, self.device, *args]
                outcome = self.launcher.run(f"layouts-{dtype}", program, self.seconds)
                done = [checks.is_done(folder, case, dtype, self.ranks) for case in left]
                if all(done):
                    check_outcome(part, f"ranks exit cleanly, {dtype}", outcome, outcome.status == 0, outcome.ended)
                    break
                failed, left = left[done.index(False)], left[done.index(False) + 1 :]
                sentence = f"{outcome.ended}; see {outcome.log.name}"
                check_outcome(part, f"{failed.name}, {dtype}", outcome, False, sentence)
                if not left:
                    break
            else:
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
        if not check_outcome(part, "collectives give correct results", outcome, outcome.status == 0, outcome.ended):
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
