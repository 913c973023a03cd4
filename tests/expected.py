"""What every script that trains is expected to do: ``expected/SCRIPT.json`` in its folder.

``python -m tests.expected`` writes options, memory and time of all files anew, as the planner predicts them today, and
keeps their losses. ``python -m tests.expected --measure train_tiny_gpt2 --steps 100 --out DIR`` trains the script on
the text of ``examples/data`` with three seeds, continues what is in DIR, and writes the band of its losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.arguments.cli import parse
from megatron.arguments.sources import flat_values
from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.planner.hardware import Cluster, find_accelerator
from megatron.planner.memory import max_peak_bytes
from megatron.planner.step_time import step_time
from megatron.training.loggers.run_folder import DATA_FILE, ENVIRONMENT_FILE, METRICS_FILE, read_history
from tests.unit.slurm.recipes import Started
from tools.lib.expected_curve import OTHER_RUN, ROOT

TEXT = ROOT / "examples" / "data" / "shakespeare.jsonl"
PREPARE = (
    f"python tools/preprocess_data.py --input {TEXT.relative_to(ROOT)} --output-prefix runs/shakespeare "
    "--tokenizer-type ByteTokenizer --append-eod"
)
"""Makes the token files of the shipped text, the first quarter of Tiny Shakespeare: plays in the public domain."""

GPU = "h100-80g"
"""The accelerator of the predictions."""

SEEDS = (1234, 1, 2)
LOG_INTERVAL = 10
DEVIATIONS = 4.5
"""Half of the width of a band, in standard deviations of one more run around the mean of the seeds. A run of another
seed is outside of a band of 10 spans in about one of 1,000 cases, were the losses normally distributed."""

COMPOUND = {
    "quickstart": "--preset tiny-llama --vocab-size 4096 --global-batch-size 8 --train-iters 600 --micro-batch-size 4 "
    "--device cpu",
    "finetune_chat": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 128 "
    "--max-position-embeddings 128 --vocab-size 257 --train-iters 150 --global-batch-size 8 --micro-batch-size 8 "
    "--lr 3e-3 --device cpu",
    "diloco": "--preset tiny-gpt2 --vocab-size 256 --seq-length 64 --device cpu --global-batch-size 8 "
    "--train-iters 100 --diloco-sync-interval 20 --diloco-fragments 2 --diloco-server 127.0.0.1:29400",
    "train_tiny_llama_phases": "--config examples/configs/tiny-llama.yaml --num-layers 2 --hidden-size 64 "
    "--ffn-hidden-size 192 --vocab-size 257 --seq-length 128 --max-position-embeddings 128 --global-batch-size 16 "
    "--device cpu",
}
"""Flags of the training in scripts that do more than start one run: of the base model, of a replica, of the first
phase. What the script learns from its data is given."""

COMPOUND_RANKS = {"quickstart": 2, "finetune_chat": 1, "diloco": 1, "train_tiny_llama_phases": 2}


def scripts() -> list[Path]:
    """Return the scripts that train, of ``examples/`` and ``slurm/``."""
    found = [*(ROOT / "examples").glob("*.sh"), *(ROOT / "slurm").glob("train_*.sh")]
    trains = re.compile(r"train\.sh\"|examples/train\.sh|pretrain_gpt\.py --|pretrain_gpt\.py \"|^train ", re.MULTILINE)
    return sorted(path for path in found if path.name != "train.sh" and trains.search(path.read_text()))


def expectation_file(script: Path) -> Path:
    """Return the file of a script."""
    return script.parent / "expected" / f"{script.stem}.json"


def started(script: Path) -> tuple[RunConfig, int]:
    """Return the configuration and the number of ranks that a script starts."""
    if script.parent.name == "slurm":
        recipe = Started.by(script.stem)
        return recipe.config(), recipe.world_size
    if script.stem in COMPOUND:
        flags, ranks = COMPOUND[script.stem].split(), COMPOUND_RANKS[script.stem]
    else:
        environ = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "GPUS": "0"}
        done = subprocess.run(["bash", script], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
        flags = shlex.split(done.stdout.split("pretrain_gpt.py")[1])
        ranks = ranks_of((ROOT / flags[flags.index("--config") + 1]).read_text())
    mock = [] if "--mock-data" in flags else ["--mock-data"]
    return parse([*flags, *mock, "--check-config", "--world-size", str(ranks)], {}).config, ranks


def ranks_of(configuration: str) -> int:
    """Return the ranks for which the first line of a file of ``examples/configs`` is."""
    found = re.search(r"for (?:one node of )?([\d,]+|one) GPUs?", configuration.splitlines()[0])
    return int(found[1].replace(",", "").replace("one", "1")) if found else 1


def planned(script: Path) -> dict[str, Any]:
    """Return what the planner predicts of a script, and the options that make it what it is."""
    config, ranks = started(script)
    on_cpu = config.training.device == "cpu" or script.stem.startswith("train_tiny")
    command = f"python -m tests.expected --print {script.relative_to(ROOT)}"
    peak = int(sum(max_peak_bytes(config, ranks).values()))
    cluster = Cluster.of(find_accelerator(GPU), None, None, ranks)
    seconds = step_time(config, ranks, cluster).seconds
    no_time = {"absent": "the planner has no figures of CPUs"}
    return {
        "script": str(script.relative_to(ROOT)),
        "device": "cpu" if on_cpu else GPU,
        "ranks": ranks,
        "options": {name: as_json(value) for name, value in counted_options(config)},
        "memory_per_rank": {"bytes": peak, "kind": "prediction", "command": command},
        "time_per_step": no_time
        if on_cpu
        else {"seconds": float(f"{seconds:.4g}"), "gpu": GPU, "kind": "prediction", "command": command},
    }


def counted_options(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the options that are not the defaults and change what a run computes, apart from seed and data."""
    for name, value in flat_values(config).items():
        setting = SETTINGS[name]
        counts = setting.option.role not in (Role.FREE, Role.START) and setting.flag not in OTHER_RUN
        if counts and value != setting.default:
            yield name, value


def as_json(value: Any) -> Any:
    """Return a value as it is after JSON."""
    return json.loads(json.dumps(value))


def write(script: Path, changes: Mapping[str, Any]) -> None:
    """Change a file; the losses stay as they are unless they change."""
    file = expectation_file(script)
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= changes
    content.setdefault("loss", {"absent": "not measured yet"})
    file.parent.mkdir(exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    # a line for each point, and for each list of options
    text = re.sub(r"\{\s*(\"tokens\": [^{}]*?)\s*\}", lambda found: "{" + " ".join(found[1].split()) + "}", text)
    file.write_text(re.sub(r"\[\s*([^\[\]{}]*?)\s*\]", lambda found: "[" + " ".join(found[1].split()) + "]", text))
    print(file.relative_to(ROOT))


def measure(script: Path, steps: int, seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """Train a script with several seeds up to a step, unless that was done, and return the band of its losses."""
    environ = os.environ | {"DATA": "runs/shakespeare_text_document", "GPUS": "0", "OMP_NUM_THREADS": "1"}
    if not (ROOT / "runs" / "shakespeare_text_document.idx").exists():
        subprocess.run(shlex.split(PREPARE), cwd=ROOT, check=True)
    runs = [out / script.stem / str(seed) for seed in seeds]
    for seed, run in zip(seeds, runs):
        lines = read_history(run / METRICS_FILE).train if (run / METRICS_FILE).exists() else []
        if not lines or lines[-1].iteration < steps:
            flags = f"--seed {seed} --exit-interval {steps} --log-interval {LOG_INTERVAL} --save-interval 1000000"
            folders = ["--run-dir", str(run), "--save", str(run / "checkpoints")]
            subprocess.run(["bash", script, *flags.split(), *folders], cwd=ROOT, env=environ, check=True)
    return band(script, steps, seeds, runs)


def band(script: Path, steps: int, seeds: Sequence[int], runs: Sequence[Path]) -> dict[str, Any]:
    """Return the ``loss`` of a file from finished runs: mean of the seeds and the spread of one more run around it."""
    curves = [
        {p.tokens: float(p.line["lm loss"]) for p in read_history(run / METRICS_FILE).train if p.iteration <= steps}
        for run in runs
    ]
    tokens = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = {at: sum(curve[at] for curve in curves) / len(curves) for at in tokens}
    squares = sum((curve[at] - means[at]) ** 2 for curve in curves for at in tokens)
    deviation = math.sqrt(squares / (len(tokens) * (len(curves) - 1)) * (1 + 1 / len(curves)))
    half = DEVIATIONS * deviation
    environment = json.loads((runs[0] / ENVIRONMENT_FILE).read_text())
    fingerprint = json.loads((runs[0] / DATA_FILE).read_text())["train"]["fingerprint"]
    date = time.strftime("%Y-%m-%d", time.gmtime((runs[0] / METRICS_FILE).stat().st_mtime))
    return {
        "kind": "mean of the training loss over the steps since the point before",
        "points": [
            {"tokens": at, **{n: round(x, 4) for n, x in zip(("low", "mean", "high"), (m - half, m, m + half))}}
            for at, m in means.items()
        ],
        "data": {
            "name": str(TEXT.relative_to(ROOT)),
            "fingerprint": fingerprint,
            "prepare": PREPARE,
            "command": f"DATA=runs/shakespeare_text_document bash {script.relative_to(ROOT)}",
        },
        "measured": {
            "command": f"python -m tests.expected --measure {script.stem} --steps {steps} --out DIR",
            "commit": environment["git_commit"][:8],
            "date": date,
            "device": f"cpu, torch {environment['packages']['torch']}",
            "seeds": [*seeds],
            "deviation": round(deviation, 5),
            "band": f"mean of the seeds +- {DEVIATIONS} standard deviations of one more run ({deviation:.4f})",
        },
    }


def main(argv: Sequence[str]) -> int:
    """Write the files."""
    parser = argparse.ArgumentParser("python -m tests.expected", description=__doc__)
    parser.add_argument("--print", type=Path, metavar="SCRIPT", help="print the predictions of one script")
    parser.add_argument("--measure", nargs="+", metavar="NAME", help="train these examples")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/expected"), help="folder of the runs")
    options = parser.parse_args(argv)
    if options.print:
        print(json.dumps(planned(ROOT / options.print), indent=1))
    elif options.measure:
        for name in options.measure:
            script = ROOT / "examples" / f"{name}.sh"
            write(script, planned(script) | {"loss": measure(script, options.steps, options.seeds, options.out)})
    else:
        for script in scripts():
            write(script, planned(script))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
