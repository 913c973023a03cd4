"""Write the script that starts a run: ``python tools/launch.py slurm --preset llama3-8b --nodes 4 > mine.sh``.

    slurm   a recipe like those in slurm/, for sbatch, with this cluster's partition, account and container
    ssh     for machines without a scheduler: one torchrun on each of --hosts
    local   for this machine

What a cluster needs (partition, account, ...) is asked for once, at a terminal, and kept in a file (--cluster). Flags
of the run follow as pretrain_gpt.py takes them; where they name no layout, one is chosen whose weights, gradients and
optimizer state take at most half of a GPU. They are checked before anything is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron.config.arguments import parse
from megatron.config.memory import shown, state_bytes
from megatron.config.presets import PRESETS
from megatron.config.problems import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.summary import summary

ROOT = Path(__file__).resolve().parents[1]
LAYOUT_FLAGS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--config", "--set")
SHARE_OF_STATE = 0.5
"""Of a GPU's memory that the state of a chosen layout may take; the rest is for activations and what lives shortly."""

MEANING = {
    "partition": "of Slurm, empty for its default",
    "account": "of Slurm, empty where there are none",
    "time": "limit of a job, as Slurm writes it",
    "container": "image for pyxis, FILE.sif for apptainer, empty for .venv",
    "network": "infiniband or ethernet",
    "gpus_per_node": "which is also the ranks of a node",
    "gpu_memory_gb": "of each GPU",
}
"""Of every field of :class:`Cluster`, for help and questions."""

CHOICES = {"network": ("infiniband", "ethernet")}
"""What a field may be, where not everything is allowed."""


@dataclass(frozen=True)
class Cluster:
    """What is the same for all runs on a cluster, as ``MEANING`` explains it; empty where it need not be said."""

    partition: str = ""
    account: str = ""
    time: str = "24:00:00"
    container: str = ""
    network: str = "infiniband"
    gpus_per_node: int = 8
    gpu_memory_gb: int = 80


def main(argv: Sequence[str]) -> int:
    """Print the script, and to stderr what the run amounts to; returns the exit status."""
    options, flags = read(argv)
    try:
        cluster = cluster_of(options)
        ranks = options.nodes * cluster.gpus_per_node
        run = [*flags_of(options, flags), *layout_of(options, flags, cluster)]
        config = checked(options, run, ranks)
        script = {"slurm": for_slurm, "ssh": for_ssh, "local": for_local}[options.where](options, cluster, run)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(summary(config, ranks), file=sys.stderr)
    print(header(options, config, ranks), script, sep="\n")
    return 0


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags of the run."""
    parser = argparse.ArgumentParser(
        "launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("where", choices=("slurm", "ssh", "local"))
    parser.add_argument("--preset", choices=[*PRESETS], required=True, help="the model")
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--hosts", default="", help="for ssh: their names, NAME,NAME; the first is the head")
    parser.add_argument("--cluster", type=Path, default=default_file(), help="its file (%(default)s)")
    for field in fields(Cluster):
        kind, choices = type(field.default), CHOICES.get(field.name)
        shown_default = f" ({field.default})" if field.default else ""
        words = f"{MEANING[field.name]}{shown_default}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, choices=choices, help=words)
    options, flags = parser.parse_known_args(argv)
    if options.where == "local":
        options.nodes = 1
    if options.where == "ssh":
        options.nodes = len(options.hosts.split(","))
        if not options.hosts:
            parser.error("ssh needs --hosts NAME,NAME")
    if options.nodes < 1:
        parser.error("--nodes has to be at least 1")
    return options, flags


def default_file() -> Path:
    """Where people keep such things."""
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "megatron-pretrain" / "cluster.json"


def cluster_of(options: argparse.Namespace) -> Cluster:
    """What is known of the cluster: from flags, from its file, and, at a terminal and for lack of a file, from asking.

    Raises:
        UserError: when the file cannot be read or written.
    """
    path, named = options.cluster, {f.name: getattr(options, f.name) for f in fields(Cluster)}
    said = {name: value for name, value in named.items() if value is not None}
    if path.exists():
        return replace(kept(path), **said)
    cluster = Cluster(**said)
    if options.where == "local" or not sys.stdin.isatty():
        return cluster
    cluster = asked(cluster, said)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(cluster), indent=2) + "\n")
    except OSError as error:
        raise UserError([Problem("E006", f"{path}: {error.strerror}", ("--cluster ANOTHER_FILE",))]) from error
    print(f"kept in {path}; edit or remove it to say something else", file=sys.stderr)
    return cluster


def kept(path: Path) -> Cluster:
    """What a file says.

    Raises:
        UserError: when it is no such file.
    """
    try:
        return Cluster(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError([Problem("E006", f"{path} does not describe a cluster: {error}", (f"rm {path}",))]) from error


def asked(cluster: Cluster, said: Mapping[str, object]) -> Cluster:
    """Ask for what was not said; nothing keeps what is shown."""
    for field in fields(Cluster):
        if field.name in said:
            continue
        default = getattr(cluster, field.name)
        question = f"{field.name.replace('_', ' ')} ({MEANING[field.name]}) [{default}]: "
        if answer := ask(question, isinstance(default, int), CHOICES.get(field.name, ())):
            cluster = replace(cluster, **{field.name: type(default)(answer)})
    return cluster


def ask(question: str, number: bool, choices: Sequence[str]) -> str:
    """What a person answers, once it is a number where it has to be, or one of the choices where there are some."""
    while True:
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip()
        if not answer or (answer.isdecimal() if number else not choices or answer in choices):
            return answer
        print(f"{answer} is no number" if number else f"there are {' and '.join(choices)}", file=sys.stderr)


def flags_of(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """The flags of the run: the model, what was said, and where nothing was, a format fit for GPUs, and saves."""
    formats = {"--bf16", "--fp16", "--fp64", "--params-dtype"} & {*flags}
    saves = [] if "--save-interval" in flags else ["--save-interval", "500"]
    return ["--preset", options.preset, *([] if formats else ["--bf16"]), *flags, *saves]


def layout_of(options: argparse.Namespace, flags: Sequence[str], cluster: Cluster) -> list[str]:
    """Flags of the smallest model-parallel layout whose state fits; none where the flags name one.

    Tensor parallelism stays within a node, where links are fast, and comes before the pipeline, which has a bubble.

    Raises:
        UserError: when none fits.
    """
    if any(flag.partition("=")[0] in LAYOUT_FLAGS for flag in flags):
        return []
    ranks, room = options.nodes * cluster.gpus_per_node, SHARE_OF_STATE * cluster.gpu_memory_gb * 2**30
    powers = [2**i for i in range(ranks.bit_length())]
    sizes = [(tp, pp) for pp in powers for tp in powers if tp <= cluster.gpus_per_node and ranks % (tp * pp) == 0]
    least = float("inf")
    for tp, pp in sorted(sizes, key=lambda size: (size[0] * size[1], size[1])):
        chosen = layout_flags(tp, pp, ranks)
        try:
            config = checked(options, [*flags_of(options, flags), *chosen], ranks)
        except UserError:
            if (tp, pp) == (1, 1):
                raise  # the other layouts would only repeat it
            continue
        if config.model.vocab_size is None:
            return []
        state = sum(state_bytes(config, ranks).values())
        least = min(least, state)
        if state <= room:
            return chosen
    sentence = f"weights, gradients and optimizer state of {options.preset} take {shown(least)} of a GPU at best"
    more = f"--nodes {2 * options.nodes}" if options.where == "slurm" else "more machines"
    raise UserError([Problem("E008", f"{sentence} on {ranks}, more than half of it", (more, "name a layout"))])


def layout_flags(tp: int, pp: int, ranks: int) -> list[str]:
    """Of a layout, with what belongs to it."""
    flags = ["--tensor-model-parallel-size", str(tp), "--sequence-parallel"] if tp > 1 else []
    flags += ["--pipeline-model-parallel-size", str(pp)] if pp > 1 else []
    return flags + (["--use-distributed-optimizer", "--overlap-param-gather"] if ranks > tp * pp else [])


def checked(options: argparse.Namespace, run: Sequence[str], ranks: int) -> RunConfig:
    """The configuration of the run.

    Raises:
        UserError: when no start would take these flags.
    """
    run = [*run, *folders(options.preset, run)]
    return parse([*run, "--check-config", "--world-size", str(ranks)], {}).config


def header(options: argparse.Namespace, config: RunConfig, ranks: int) -> str:
    """The first lines of a script."""
    p = config.parallel
    grid = f"TP{p.tensor_model_parallel_size} x PP{p.pipeline_model_parallel_size} x DP{p.data_parallel_size(ranks)}"
    lines = ["#!/usr/bin/env bash", f"# {options.preset} on {options.nodes} x {ranks // options.nodes} ranks = {grid}"]
    if config.model.vocab_size is not None:
        lines[1] += f"; state of a rank: {shown(sum(state_bytes(config, ranks).values()))}"
    return "\n".join(lines)


def for_slurm(options: argparse.Namespace, cluster: Cluster, run: Sequence[str]) -> str:
    """A recipe as those in slurm/ are.

    Raises:
        UserError: when a flag names a folder that the recipe takes from its environment.
    """
    for flag in run:
        if flag.partition("=")[0] in ("--run-dir", "--save", "--stop-file"):
            sentence = f"{flag}: the job keeps what it leaves in one folder, which RUN names when it is submitted"
            raise UserError([Problem("E003", sentence, ("RUN=FOLDER sbatch mine.sh",))])
    asks = [f"--job-name={options.preset}"]
    asks += [f"--account={cluster.account}"] if cluster.account else []
    asks += [f"--partition={cluster.partition}"] if cluster.partition else []
    asks.append(f"--nodes={options.nodes} --ntasks-per-node=1 --gpus-per-node={cluster.gpus_per_node}")
    asks.append("--exclusive --mem=0")
    asks.append(f"--time={cluster.time} --signal=B:USR1@300 --requeue")
    asks.append("--output=slurm-%x-%j.out --open-mode=append")
    words = [f"#SBATCH {ask}" for ask in asks]
    words.append(f"export NETWORK={shlex.quote(cluster.network)}")
    words += [f"export CONTAINER={shlex.quote(cluster.container)}"] if cluster.container else []
    words.append(f"source {shlex.quote(str(ROOT / 'slurm' / 'lib.sh'))}")
    return "\n".join([*words, f'train {in_lines(run)} "$@"'])


def for_ssh(options: argparse.Namespace, cluster: Cluster, run: Sequence[str]) -> str:
    """One torchrun on each host; ranks that fail are started again, all together.

    Each run of the script has an id of its own: one that has that of another would count as a later start of its job,
    and take its checkpoints from it.
    """
    agent = (
        f"torchrun --nnodes {options.nodes} --nproc-per-node {cluster.gpus_per_node} --max-restarts 3"
        f' --rdzv-backend c10d --rdzv-endpoint "${{hosts[0]}}:${{PORT:-29400}}"'
        f' --rdzv-id "{options.preset}-$(date +%s)-$$"'
    )
    return f"""# One folder, this one, has to be the same disk on all of them, with .venv in it.
set -euo pipefail
hosts=({shlex.join(options.hosts.split(","))})
printf -v command '%q ' {agent} pretrain_gpt.py {in_lines([*run, *folders(options.preset, run)])} "$@"
for host in "${{hosts[@]}}"; do
    ssh -o BatchMode=yes "$host" "cd {shlex.quote(str(ROOT))} && {environment()} && exec $command" </dev/null &
done
trap 'kill $(jobs -p) 2>/dev/null' INT TERM
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "$status\""""


def for_local(options: argparse.Namespace, cluster: Cluster, run: Sequence[str]) -> str:
    """torchrun on this machine."""
    agent = f"torchrun --standalone --nproc-per-node {cluster.gpus_per_node} --max-restarts 3"
    return f"""set -euo pipefail
cd {shlex.quote(str(ROOT))} && {environment()}
exec {agent} pretrain_gpt.py {in_lines([*run, *folders(options.preset, run)])} "$@\""""


def environment() -> str:
    """What a shell needs before torchrun: the virtual environment, if there is one, and what restarts need."""
    activate = "if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi"
    return f"{activate} && export PYTHONPATH=. OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def folders(preset: str, run: Sequence[str]) -> list[str]:
    """Where the run leaves what it leaves, as far as its flags do not say so."""
    places = {"--run-dir": f"runs/{preset}", "--save": f"runs/{preset}/checkpoints"}
    return [word for flag, place in places.items() if flag not in run for word in (flag, place)]


def in_lines(flags: Sequence[str]) -> str:
    """Flags for a shell, each with its values on a line of its own."""
    text = ""
    for word in flags:
        text += (" \\\n    " if word.startswith("--") else " ") + shlex.quote(word)
    return text.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
