"""Seconds to equal loss of data parallelism over a slow link (Linux, as root, with iproute2).

    python -m benchmarks.slow_links

Two replicas of a small Llama train on the quickstart's corpus, each on a core and in a network namespace of its own.
The namespaces are joined by a pair of virtual interfaces whose rate `tc` limits on both ends. The first run, plain data
parallelism at the lowest rate, takes a fixed number of steps. Its last validation loss is the target: every other run
stops once it has reached it. Evaluations do not count as time. Namespaces and interfaces are made for each run and
removed after it, also on Ctrl-C; no interface of the machine is touched. With DiLoCo, each replica is a run of its own,
evaluated right after it has synchronised.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import RESULTS, conditions, options, run, table
from megatron.arguments.cli import parse
from megatron.layers.parameters import num_parameters

ROOT = Path(__file__).parents[1]
STEPS, MOST, INTERVAL = 80, 3, 5
"""Steps of the first run; the most steps of another one, in multiples of these; steps between evaluations."""

MODEL = (
    "--preset tiny-llama --hidden-size 256 --num-layers 6 --num-attention-heads 4 --num-query-groups 4 "
    "--ffn-hidden-size 688 --device cpu --micro-batch-size 2"
)
SCHEDULE = (
    f"--lr-decay-style constant --lr-warmup-fraction 0.03 --log-interval 1 --train-iters {MOST * STEPS} --split 90,10,0"
)
TOGETHER = f"--global-batch-size 4 --eval-interval {INTERVAL} --eval-iters 2"
ALONE = f"--global-batch-size 2 --eval-interval {2 * INTERVAL} --eval-iters 4 --diloco-server 10.0.0.1:29400"
"""Options of two ranks of one run, and of two replicas; both evaluate on 8 samples."""
PREFERRED = "200mbit"
"""The rate at which methods are compared; the first of :data:`CASES`."""


class Case(NamedTuple):
    """A method and the rate of its link, in the words of ``tc``; None does not limit it."""

    method: str
    flags: str
    rate: str | None = PREFERRED

    @property
    def is_diloco(self) -> bool:
        """True if each replica is a run of its own."""
        return "--diloco" in self.flags


PLAIN = "plain data parallelism"
CASES = (
    Case(PLAIN, ""),
    Case("gradients as bf16", "--grad-reduce-in-bf16"),
    Case("int8", "--grad-compression int8"),
    Case("PowerSGD", "--grad-compression powersgd:4"),
    Case("top-k", "--grad-compression topk:0.01"),
    Case("DiLoCo", f"--diloco-sync-interval {2 * INTERVAL}"),
    Case("DiLoCo, int8", f"--diloco-sync-interval {2 * INTERVAL} --diloco-int8"),
    Case(PLAIN, "", "1gbit"),
    Case(PLAIN, "", None),
)
"""The first one sets the target."""


@contextmanager
def namespaces(rate: str | None) -> Iterator[tuple[str, str]]:
    """Make two network namespaces joined by a link, and remove them; yields their names.

    Each holds ``veth`` with the address 10.0.0.1 or 10.0.0.2. Removing a namespace removes its interfaces.

    Args:
        rate: of each direction, in the words of ``tc``; None does not limit it.
    """
    names = f"slow-links-{os.getpid()}-a", f"slow-links-{os.getpid()}-b"
    with ExitStack() as stack:
        for name in names:
            stack.callback(subprocess.run, ["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            _run("ip netns add", name)
        _run(f"ip -n {names[0]} link add veth type veth peer name veth netns", names[1])
        for number, name in enumerate(names, 1):
            _run(f"ip -n {name} address add 10.0.0.{number}/24 dev veth")
            if rate is not None:
                _run(f"tc -n {name} qdisc add dev veth root tbf rate {rate} burst 64kb latency 50ms")
            for interface in ("lo", "veth"):  # of the namespace
                _run(f"ip -n {name} link set {interface} up")
        yield names


def _run(command: str, *words: str) -> str:
    """Return the output of a command that must succeed."""
    return subprocess.run([*command.split(), *words], check=True, capture_output=True, text=True).stdout


def sent(namespace: str) -> int:
    """Return the bytes that have left a namespace, with the headers of the network."""
    (link,) = json.loads(_run(f"ip -n {namespace} -j -s link show veth"))
    return int(link["stats64"]["tx"]["bytes"])


def run_case(case: Case, corpus: Path, folder: Path, target: float | None) -> dict[str, Any]:
    """Train until the validation loss is ``target``, or for :data:`STEPS` steps; return the figures of the run.

    Raises:
        RuntimeError: when a process fails.
    """
    stop, metrics = folder / "stop", folder / "0" / "metrics.jsonl"
    ranks = list[subprocess.Popen[bytes]]()
    with namespaces(case.rate) as names, ExitStack() as stack:

        def start(number: int, script: str, flags: str, **variables: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{Path(script).stem}{number}.log").open("wb"))
            entered = ["ip", "netns", "exec", names[number], "taskset", "-c", str(number), sys.executable]
            places = os.environ | {"GLOO_SOCKET_IFNAME": "veth", "OMP_NUM_THREADS": "1"} | variables
            command = [*entered, str(ROOT / script), *flags.split()]
            process = subprocess.Popen(command, cwd=ROOT, env=places, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)  # before waiting: callbacks run backwards
            return process

        if case.is_diloco:
            start(0, "tools/diloco_server.py", "--host 10.0.0.1 --port 29400")
        for rank in range(2):
            flags = f"{MODEL} {SCHEDULE} {case.flags} --data-path {corpus} --stop-file {stop} --run-dir {folder}/{rank}"
            if case.is_diloco:
                place = {"RANK": "0", "WORLD_SIZE": "1"}
                flags += f" {ALONE} --diloco-replica {rank}"
            else:
                place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
                flags += f" {TOGETHER}"
            ranks.append(start(rank, "pretrain_gpt.py", flags, LOCAL_RANK="0", **place))
        while any(process.poll() is None for process in ranks):
            time.sleep(0.5)
            if any(process.poll() for process in ranks):
                raise RuntimeError(f"{case}: {(folder / 'pretrain_gpt0.log').read_text()[-3000:]}")
            if metrics.exists() and not stop.exists() and _is_done(curve(metrics), target):
                stop.touch()
        on_link = sent(names[0])
    points = curve(metrics)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "iteration-time" in row]
    counted = sum(row.get("diloco-sent-bytes", 0) for row in rows)
    counted += sum(value for row in steps for name, value in row.items() if name.startswith("sent-bytes-"))
    last = len(steps)
    figures = {"curve": points, "sent": counted / last, "on link": on_link / last}
    return {"method": case.method, "flags": case.flags, "rate": case.rate} | figures


def _is_done(points: Sequence[tuple[int, float, float]], target: float | None) -> bool:
    """Return True if a run has taken :data:`STEPS` steps, or reached the target if there is one."""
    if not points:
        return False
    return points[-1][0] >= STEPS if target is None else points[-1][2] <= target


def curve(metrics: Path) -> list[tuple[int, float, float]]:
    """Return steps, seconds of these steps after the first, and validation loss of every evaluation."""
    points, seconds = list[tuple[int, float, float]](), 0.0
    whole_lines, _, _ = metrics.read_text().rpartition("\n")
    for row in map(json.loads, whole_lines.splitlines()):
        if row.get("iteration", 1) > 1:  # the first step includes part of the start
            seconds += row.get("iteration-time", 0.0)
        if "lm loss validation" in row:
            points.append((row["iteration"], seconds, row["lm loss validation"]))
    return points


def reached(points: Sequence[Sequence[float]], target: float) -> tuple[float, float] | None:
    """Return steps and seconds at which a curve reaches the target, between evaluations by linear interpolation."""
    for (step, second, loss), (next_step, next_second, next_loss) in zip(points, points[1:]):
        if next_loss <= target:
            part = (loss - target) / (loss - next_loss)
            return step + part * (next_step - step), second + part * (next_second - second)
    return None


def link(rate: str | None) -> str:
    """Return the rate of a link in words."""
    return "not limited" if rate is None else rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    target, rows = result["target"], []
    _, first = reached(result["rows"][0]["curve"], target) or (0, 0.0)
    for row in result["rows"]:
        found = reached(row["curve"], target)
        steps, seconds = row["curve"][-1][:2]
        cells = [link(row["rate"]), row["method"] + (f" `{row['flags']}`" if row["flags"] else "")]
        if found is None:
            lowest = min(loss for *_, loss in row["curve"])
            cells += [f"{steps}: {lowest:.2f} only", f"{seconds / (steps - 1):.2f}", f"({seconds:.0f})", ""]
        else:
            steps, seconds = found
            cells += [f"{steps:.0f}", f"{seconds / (steps - 1):.2f}", f"{seconds:.0f}", f"{first / seconds:.2f}"]
        rows.append([*cells, f"{row['sent'] / 1e6:.2f} ({row['on link'] / 1e6:.2f})"])
    heads = ("link", "method", "steps", "seconds a step", "seconds", "plain at 200 Mbit/s / this", "sent, MB a step")
    model = parse([*MODEL.split(), *["--vocab-size", "4096", "--mock-data", "--train-iters", "1"]], {}).config.model
    text = [
        "# Seconds to equal loss on slow links",
        *table(heads, rows, "llrrrrr"),
        "",
        f"Until the validation loss is {target:.2f}, that of plain data parallelism after {STEPS} steps; between "
        f"evaluations, interpolated. Two replicas of {num_parameters(model):,} fp32 parameters, 512 tokens each a "
        "step, one core each, gloo over TCP, one run each. Seconds are those of the steps after the first. MB are "
        "10^6 bytes of the first rank, as the run counts them, and in brackets as they left its network interface, "
        f"start and evaluations included. `python -m benchmarks.slow_links`. {conditions(result)}",
        "",
        "![validation loss over seconds](slow_links.png)",
    ]
    return "\n".join(text)


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw the loss over the seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in result["rows"]:
        _, seconds, losses = zip(*row["curve"])
        style = "-" if row["rate"] == PREFERRED else "--"
        axes.plot(seconds, losses, style, label=f"{row['method']}, {link(row['rate'])}")
    axes.axhline(result["target"], color="grey", linewidth=0.8)
    axes.set(xlabel="seconds of training", ylabel="validation loss")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def make_corpus(folder: Path) -> Path:
    """Write the quickstart's corpus, Python's standard library, as token files; return their prefix."""
    text = ["--input", sysconfig.get_path("stdlib"), "--suffix", ".py"]
    text += ["--exclude", "test", "tests", "site-packages", "dist-packages"]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    train = ["tools/train_tokenizer.py", *text, "--vocab-size", "4096", "--output", str(folder / "tokenizer")]
    write = ["tools/preprocess_data.py", *text, *tokenizer, "--append-eod", "--output-prefix", str(folder / "corpus")]
    for command in (train, write):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=sys.stderr)
    return folder / "corpus_text_document"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all cases; the first sets the target."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    rows, target = list[dict[str, Any]](), None
    with tempfile.TemporaryDirectory() as name:
        corpus = args.corpus.resolve() if args.corpus else make_corpus(Path(name))
        for number, case in enumerate(CASES):
            folder = Path(name, str(number))
            folder.mkdir()
            rows.append({"load": os.getloadavg()[0]} | run_case(case, corpus, folder, target))
            target = target or rows[0]["curve"][-1][2]
            steps, seconds, loss = rows[-1]["curve"][-1]
            print(f"{case.rate} {case.method}: {steps} steps, {seconds:.0f} s, loss {loss:.3f}", file=sys.stderr)
    result = {"rows": rows, "target": target}
    if args.write:
        draw(result, RESULTS / "slow_links.png")
    return result


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=None)
    parser.add_argument("--corpus", type=Path, help="prefix of token files (default: the quickstart's)")
    if os.geteuid():
        parser.error("network namespaces need root")
    return run("slow_links", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
