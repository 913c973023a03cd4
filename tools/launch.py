"""Write the script that starts a run: ``python tools/launch.py slurm --preset llama3-8b --nodes 4 > mine.sh``.

    slurm   an sbatch script like those in slurm/, with this cluster's partition, account and container
    ssh     one torchrun on each of --hosts, for machines without a scheduler
    local   for this machine and its GPUs, or one process on its CPU

Cluster settings (partition, account, ...) are asked for once, on a terminal, and stored in a file (--cluster). Flags of
the run follow as for pretrain_gpt.py and are checked before the script is written. Without layout flags, the smallest
layout is chosen whose weights, gradients and optimizer state take at most half of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import ParsedArguments, parse
from megatron.arguments.presets import PRESETS
from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_json, read_small
from megatron.config.text import echo, format_bytes, shell_word
from megatron.convert.huggingface.config import read_model_values
from megatron.planner.memory import max_state_bytes

ROOT = Path(__file__).resolve().parents[1]
LAYOUT_FLAGS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--config", "--set")
MAX_STATE_FRACTION = 0.5
"""Fraction of a GPU's memory for the state of a chosen layout; the rest is for activations and temporary buffers."""

NETWORKS = ("infiniband", "roce", "ethernet", "efa", "slingshot")
"""Values of NETWORK in slurm/lib.sh."""

ENVIRONMENT = (
    "if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi"
    " && export PYTHONPATH=. OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
)
"""Shell commands that prepare the environment of torchrun."""


def setting(default: Any, words: str, pattern: str, rule: str, choices: tuple[str, ...] = ()) -> Any:
    """Declare a cluster setting: its default, help text, what values match, that in words, and values to choose from.

    Values become options of sbatch and words of a shell, so none may hold a space or line end that begins another one.
    """
    return field(default=default, metadata={"help": words, "pattern": pattern, "rule": rule, "choices": choices})


NAMES = r"[\w.,:@+-]*", "letters, digits and . , : @ + - _ without spaces"
TIME = r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
IMAGE = r"[^\s\x00-\x1f\x7f-\x9f]*", "a path or name without spaces"
HOST = r"(\w[\w.-]*@)?\w[\w.:-]*"


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a cluster; empty strings if not needed."""

    partition: str = setting("", "Slurm partition, empty for the default", *NAMES)
    account: str = setting("", "Slurm account, empty if there are none", *NAMES)
    time: str = setting("24:00:00", "time limit of a job, in Slurm's format", *TIME)
    container: str = setting("", "image for pyxis, FILE.sif for apptainer, empty for .venv", *IMAGE)
    network: str = setting(
        "infiniband", ", ".join(NETWORKS), "|".join(NETWORKS), f"one of {', '.join(NETWORKS)}", NETWORKS
    )
    gpus_per_node: int = setting(8, "also the ranks per node; local: looked up", r"[1-9]\d{0,3}", "a number from 1")
    gpu_memory_gb: int = setting(80, "of each GPU; local: looked up; 0 without GPUs", r"\d{1,5}", "a number from 0")

    def __post_init__(self) -> None:
        """Raise UserError for values that would be anything else in a script."""
        for option in fields(self):
            value = getattr(self, option.name)
            if type(value) is not type(option.default) or not is_valid(option, str(value)):
                flag = f"--{option.name.replace('_', '-')}"
                sentence = f"{flag}: {value!r:.80} is not {option.metadata['rule']}"
                raise UserError([Problem("E006", sentence, (f"{flag} {option.default or 'NAME'}",))])


def is_valid(option: Field[Any], text: str) -> bool:
    """Return True for a value of a cluster setting, as text."""
    return re.fullmatch(option.metadata["pattern"], text, re.ASCII | re.IGNORECASE) is not None


def main(argv: Sequence[str]) -> int:
    """Print the script, and a summary of the run to stderr; return the exit status."""
    options, flags = parse_options(argv)
    try:
        cluster = load_or_ask_cluster(options)
        if options.where == "local" and options.gpus_per_node is None:
            cluster = with_local_gpus(cluster, options.gpu_memory_gb)
        ranks = options.nodes * cluster.gpus_per_node
        run = [*run_flags(options, flags, cluster), *choose_layout(options, flags, cluster)]
        parsed = checked_config(options, run, ranks)
        script = {"slurm": slurm_script, "ssh": ssh_script, "local": local_script}[options.where](options, cluster, run)
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    echo(parsed.summary(), file=sys.stderr)
    config, p = parsed.config, parsed.config.parallel
    context = f"CP{p.context_parallel_size} x " if p.context_parallel_size > 1 else ""
    grid = f"TP{p.tensor_model_parallel_size} x {context}PP{p.pipeline_model_parallel_size}"
    grid += f" x DP{p.data_parallel_size(ranks)}"
    title = f"# {options.preset} on {options.nodes} x {ranks // options.nodes} ranks = {grid}"
    if config.model.vocab_size is not None:
        title += f"; state of a rank: {format_bytes(sum(max_state_bytes(config, ranks).values()))}"
    echo("#!/usr/bin/env bash", title, script, sep="\n")
    return 0


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse our options and return them with the flags of the run."""
    parser = argparse.ArgumentParser(
        "launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("where", choices=("slurm", "ssh", "local"))
    parser.add_argument("--preset", choices=[*PRESETS], required=True, help="the model")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines (1)")
    parser.add_argument("--hosts", default="", help="for ssh: host names, NAME,NAME; the first is the head node")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    cluster_file = folder / "megatron-pretrain" / "cluster.json"
    parser.add_argument("--cluster", type=Path, default=cluster_file, help="file of cluster settings (%(default)s)")
    for option in fields(ClusterSettings):
        choices = option.metadata["choices"] or None
        shown_default = f" ({option.default})" if option.default else ""
        words = f"{option.metadata['help']}{shown_default}"
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=type(option.default), choices=choices, help=words
        )
    options, flags = parser.parse_known_args(argv)
    if options.where == "local":
        options.nodes = 1
    if options.where == "ssh":
        options.nodes = len(options.hosts.split(","))
        if not all(re.fullmatch(HOST, host, re.ASCII) for host in options.hosts.split(",")):
            parser.error("ssh needs --hosts NAME,NAME: letters, digits and . : - _, USER@NAME")
    if options.nodes < 1:
        parser.error("--nodes must be at least 1")
    return options, flags


def load_or_ask_cluster(options: argparse.Namespace) -> ClusterSettings:
    """Return the cluster settings from flags and file, or, if there is no file, ask on the terminal and write it.

    Raises:
        UserError: if the file cannot be read or written.
    """
    path = options.cluster
    flags = {option.name: getattr(options, option.name) for option in fields(ClusterSettings)}
    given = {name: value for name, value in flags.items() if value is not None}
    if path.exists():
        try:
            return ClusterSettings(**{**parse_json(read_small(path)), **given})
        except (OSError, ValueError, TypeError) as error:
            sentence = f"{path} is not a file of cluster settings: {error!s:.200}"
            raise UserError([Problem("E006", sentence, (f"rm {shell_word(str(path))}",))]) from error
    if options.where == "local" or not sys.stdin.isatty():
        return ClusterSettings(**given)
    asked = {option.name: ask(option) for option in fields(ClusterSettings) if option.name not in given}
    cluster = ClusterSettings(**given, **asked)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(cluster), indent=2) + "\n")
    except OSError as error:
        raise UserError([Problem("E006", f"{path}: {error.strerror}", ("--cluster ANOTHER_FILE",))]) from error
    echo(f"saved in {path}; edit or remove it to change the settings", file=sys.stderr)
    return cluster


def with_local_gpus(cluster: ClusterSettings, memory_gb: int | None) -> ClusterSettings:
    """Return the settings with this machine's number of GPUs, and their memory unless given; 1 and 0 without a GPU."""
    import torch  # takes seconds

    count = torch.cuda.device_count()
    found = torch.cuda.get_device_properties(0).total_memory // 2**30 if count else 0
    return replace(cluster, gpus_per_node=max(1, count), gpu_memory_gb=memory_gb or found)


def ask(option: Field[Any]) -> Any:
    """Ask for a setting until the answer is valid; an empty answer means the default shown."""
    default = option.default
    while True:
        question = f"{option.name.replace('_', ' ')} ({option.metadata['help']}) [{default}]: "
        echo(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip()
        if not answer:
            return default
        if is_valid(option, answer):
            return int(answer) if isinstance(default, int) else answer
        echo(f"{answer} is not {option.metadata['rule']}", file=sys.stderr)


def run_flags(options: argparse.Namespace, flags: Sequence[str], cluster: ClusterSettings) -> list[str]:
    """Return the flags of the run: model, given flags, and defaults for dtype (bf16 on GPUs) and save interval."""
    given = {"--bf16", "--fp16", "--fp64", "--params-dtype"} & {*flags}
    dtype = ["--bf16"] if not given and cluster.gpu_memory_gb else []
    saves = [] if "--save-interval" in flags else ["--save-interval", "500"]
    return ["--preset", options.preset, *dtype, *flags, *saves]


def choose_layout(options: argparse.Namespace, flags: Sequence[str], cluster: ClusterSettings) -> list[str]:
    """Return the flags of the smallest model-parallel layout whose state fits; none if the flags define a layout.

    Tensor parallelism stays within a node, where links are fast, and is preferred to a pipeline, which has a bubble.

    Raises:
        UserError: if none fits.
    """
    if not cluster.gpu_memory_gb or any(flag.partition("=")[0] in LAYOUT_FLAGS for flag in flags):
        return []
    ranks = options.nodes * cluster.gpus_per_node
    limit = MAX_STATE_FRACTION * cluster.gpu_memory_gb * 2**30
    powers = [2**i for i in range(ranks.bit_length())]
    sizes = [(tp, pp) for pp in powers for tp in powers if tp <= cluster.gpus_per_node and ranks % (tp * pp) == 0]
    least = float("inf")
    for tp, pp in sorted(sizes, key=lambda size: (size[0] * size[1], size[1])):
        chosen = ["--tensor-model-parallel-size", str(tp), "--sequence-parallel"] if tp > 1 else []
        chosen += ["--pipeline-model-parallel-size", str(pp)] if pp > 1 else []
        chosen += ["--use-distributed-optimizer", "--overlap-param-gather"] if ranks > tp * pp else []
        try:
            config = checked_config(options, [*run_flags(options, flags, cluster), *chosen], ranks).config
        except UserError:
            if (tp, pp) == (1, 1):
                raise  # other layouts have the same problem
            continue
        if config.model.vocab_size is None:
            return []
        state = sum(max_state_bytes(config, ranks).values())
        least = min(least, state)
        if state <= limit:
            return chosen
    sentence = (
        f"weights, gradients and optimizer state of {options.preset} take at least {format_bytes(least)} of a GPU"
    )
    more = f"--nodes {2 * options.nodes}" if options.where == "slurm" else "more machines"
    raise UserError([Problem("E008", f"{sentence} on {ranks}, more than half of it", (more, "specify a layout"))])


def checked_config(options: argparse.Namespace, run: Sequence[str], ranks: int) -> ParsedArguments:
    """Return the checked flags of the run.

    Raises:
        UserError: if the flags are invalid.
    """
    run = [*run, *folder_flags(options.preset, run)]
    return parse([*run, "--check-config", "--world-size", str(ranks)], {}, read_model=read_model_values)


def slurm_script(options: argparse.Namespace, cluster: ClusterSettings, run: Sequence[str]) -> str:
    """Return an sbatch script like those in slurm/.

    Raises:
        UserError: if a flag names a folder that the script takes from its environment.
    """
    for flag in run:
        if flag.partition("=")[0] in ("--run-dir", "--save", "--stop-file"):
            sentence = f"{flag}: the job writes to one folder, given by RUN when it is submitted"
            raise UserError([Problem("E003", sentence, ("RUN=FOLDER sbatch mine.sh",))])
    sbatch = [f"--job-name={options.preset}"]
    sbatch += [f"--account={cluster.account}"] if cluster.account else []
    sbatch += [f"--partition={cluster.partition}"] if cluster.partition else []
    sbatch.append(f"--nodes={options.nodes} --ntasks-per-node=1 --gpus-per-node={cluster.gpus_per_node}")
    sbatch.append("--exclusive --mem=0")
    sbatch.append(f"--time={cluster.time} --signal=B:USR1@300 --requeue")
    sbatch.append(f"--output={shlex.quote(str(ROOT / 'runs'))}/%x-%j.out --open-mode=append")
    if not str(ROOT).isprintable():
        raise UserError([Problem("E006", f"{str(ROOT)!r}: no option of sbatch can name this folder", ("rename it",))])
    lines = [f"#SBATCH {option}" for option in sbatch]
    lines.append(f"export NETWORK={shlex.quote(cluster.network)}")
    lines += [f"export CONTAINER={shlex.quote(cluster.container)}"] if cluster.container else []
    lines.append(f"source {shlex.quote(str(ROOT / 'slurm' / 'lib.sh'))}")
    return "\n".join([*lines, f'train {quote_flags(run)} "$@"'])


def ssh_script(options: argparse.Namespace, cluster: ClusterSettings, run: Sequence[str]) -> str:
    """Return a script that runs torchrun on each host and restarts all ranks if one fails.

    Port and id of the rendezvous are random, because whoever reaches it can run code, and in no arguments, which ps
    shows to all. With an id used before, a run would count as a later start and take over that one's checkpoints.
    """
    agent = (
        f"torchrun --nnodes {options.nodes} --nproc-per-node {cluster.gpus_per_node} --max-restarts 3"
        " --rdzv-backend c10d"
    )
    return f"""# This folder, with .venv in it, must be on a disk shared by all hosts.
set -euo pipefail
hosts=({shlex.join(options.hosts.split(","))})
port=${{PORT:-$((10000 + $(od -An -N2 -tu2 /dev/urandom) % 20000))}}
rendezvous="PET_RDZV_ENDPOINT=${{hosts[0]#*@}}:$port PET_RDZV_ID=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
printf -v command '%q ' {agent} pretrain_gpt.py {quote_flags([*run, *folder_flags(options.preset, run)])} "$@"
for host in "${{hosts[@]}}"; do
    ssh -o BatchMode=yes "$host" bash -s \
        <<<"cd {shlex.quote(str(ROOT))} && {ENVIRONMENT} && export $rendezvous && exec $command </dev/null" &
done
trap 'kill $(jobs -p) 2>/dev/null' INT TERM
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "$status\""""


def local_script(options: argparse.Namespace, cluster: ClusterSettings, run: Sequence[str]) -> str:
    """Return a script that runs torchrun on this machine."""
    agent = f"torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node {cluster.gpus_per_node} --max-restarts 3"
    return f"""set -euo pipefail
cd {shlex.quote(str(ROOT))} && {ENVIRONMENT}
exec {agent} pretrain_gpt.py {quote_flags([*run, *folder_flags(options.preset, run)])} "$@\""""


def folder_flags(preset: str, run: Sequence[str]) -> list[str]:
    """Return flags for the run folder and its checkpoints, unless given."""
    places = {"--run-dir": f"runs/{preset}", "--save": f"runs/{preset}/checkpoints"}
    return [word for flag, place in places.items() if flag not in run for word in (flag, place)]


def quote_flags(flags: Sequence[str]) -> str:
    """Quote flags for a shell, one flag with its values per line."""
    text = ""
    for word in flags:
        text += (" \\\n    " if word.startswith("--") else " ") + shell_word(word)
    return text.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
