"""Check a cluster before a long run, and write one page about it to attach to a bug report.

    sbatch slurm/acceptance.sh                                                      # under Slurm
    python tools/acceptance.py --nproc 4                                            # on one machine
    python tools/acceptance.py --launch "srun --ntasks-per-node=8 python"           # by any other launcher

Records software and hardware, compares layouts under the cluster's own backend with one process, kills a rank and
resumes, loads a checkpoint in another layout, and measures the collectives. Each part has a time limit, and a failure
in one part does not stop the others. The page is acceptance.md in the folder --out, all numbers are in acceptance.json
beside it, and the programs' output is in logs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.checkpoint.durable_files import make_folder
from megatron.config.errors import Problem, UserError
from megatron.config.launch import exit_process
from megatron.config.privacy import check_access
from megatron.config.text import echo
from tools.cluster_check.report import MARKDOWN

PARTS = ("machine", "layouts", "interruption", "bandwidth")
FORMATS = ("fp32", "bf16")
MIN_STEPS = 6
TORCHRUN = "-m torch.distributed.run --nnodes 1 --master-port {port} --nproc-per-node"


def main(argv: list[str]) -> int:
    """Check the cluster and report.

    Returns:
        The exit status: 1 if a check failed, 2 for wrong flags.
    """
    if argv[:1] == ["rank"]:
        return run_rank(argv[1], argv[2:])
    args = build_parser().parse_args(argv)
    try:
        check_flags(args)
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    from tools.cluster_check.run import ClusterCheck, RankLauncher  # imports torch, so only when the flags are valid

    words = shlex.split(args.launch) if args.launch else [sys.executable, *TORCHRUN.split(), str(args.nproc)]
    folder = args.out.resolve()
    try:
        make_folder(folder, private=True)
        check_access(folder)
        (folder / "logs").mkdir()
    except OSError as error:
        problem = Problem("E002", f"--out {args.out} cannot be used: {error.strerror}", ("--out runs/acceptance-2",))
        echo(UserError([problem]), file=sys.stderr)
        return 2
    cluster = ClusterCheck(
        RankLauncher(words, folder / "logs"),
        folder,
        args.device,
        seconds=60 * args.minutes,
        formats=args.formats,
        most=args.layouts,
        steps=args.steps,
        seed=args.seed,
    )
    report = cluster.run(args.parts, shlex.join(["python", "tools/acceptance.py", *argv]))
    echo(f"\n{report.markdown()}\nwritten to {args.out / MARKDOWN}")
    return int(report.failed)


def check_flags(args: argparse.Namespace) -> None:
    """Check the values of the flags."""
    problems = []
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        problems.append(Problem("E002", f"--out {args.out} exists and is not empty", (f"--out {args.out}-2",)))
    for flag, value in (("--nproc", args.nproc), ("--layouts", args.layouts), ("--minutes", args.minutes)):
        if value is not None and value <= 0:
            problems.append(Problem("E002", f"{flag} {value} must be above 0", (f"{flag} 2",)))
    if args.steps < MIN_STEPS:
        why = f"--steps {args.steps} leaves no step between two saves in which a rank can be killed"
        problems.append(Problem("E002", why, (f"--steps {MIN_STEPS}",)))
    if problems:
        raise UserError(problems)


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, how = parser.add_argument, parser.add_mutually_exclusive_group()
    how.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks on this machine, started by torchrun (2)")
    launch = "command that starts a Python file on every rank; {port} is a new port every time"
    how.add_argument("--launch", metavar="WORDS", help=launch)
    default = Path(time.strftime("runs/acceptance-%Y%m%d-%H%M%S"))
    add("--out", type=Path, default=default, metavar="DIR", help="a new folder that all nodes share (below runs)")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (auto)")
    formats = "number formats of the layouts (fp32 bf16)"
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="WORD", help=formats)
    add("--layouts", type=int, metavar="N", help="compare the first N layouts only")
    add("--steps", type=int, default=50, metavar="N", help="of the run in which a rank is killed (50)")
    add(
        "--seed", type=int, default=int(time.time()), metavar="N", help="of the moment at which it is killed (the time)"
    )
    add("--minutes", type=float, default=10.0, metavar="X", help="time limit of each program (10)")
    return parser


def run_rank(program: str, args: Sequence[str]) -> int:
    """Run one rank of a program that this tool has started."""
    from tools.cluster_check import checks

    if program == "machine":
        checks.write_machine_facts(Path(args[0]), args[1], float(args[2]))
    elif program == "layouts":
        checks.trace_selected_layouts(Path(args[0]), *args[1:])
    else:
        return checks.train_until_killed(args)
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
