"""Try a cluster before it is trusted with a run, and write one page about it to attach to a bug report.

    sbatch slurm/acceptance.sh                                                      # under Slurm
    python tools/acceptance.py --nproc 4                                            # on one machine
    python tools/acceptance.py --launch "srun --ntasks-per-node=8 python"           # by any other launcher

Looks at what is installed and at the machines, compares layouts under the cluster's own backend with one process,
kills a rank and resumes, loads a checkpoint in another layout, and measures the collectives. Each part is bounded in
time, and the others are tried whatever becomes of it. The page is acceptance.md in the folder --out, all numbers are in
acceptance.json beside it, and what the programs wrote is in logs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.config.errors import Problem, UserError
from megatron.config.launch import exit_process
from tools.cluster_check.report import MARKDOWN

PARTS = ("machine", "layouts", "interruption", "bandwidth")
FORMATS = ("fp32", "bf16")
MIN_STEPS = 6
TORCHRUN = "-m torch.distributed.run --nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --nproc-per-node"


def main(argv: Sequence[str]) -> int:
    """Try everything and report.

    Returns:
        0 when all is as it must be, 1 when something is not, 2 for wrong flags.

    """
    if list(argv[:1]) == ["rank"]:
        return as_rank(argv[1], argv[2:])
    args = build_parser().parse_args(list(argv))
    try:
        check(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    from tools.cluster_check.launcher import RankLauncher
    from tools.cluster_check.run import ClusterCheck  # torch: only for flags known to be good

    words = shlex.split(args.launch) if args.launch else [sys.executable, *TORCHRUN.split(), str(args.nproc)]
    folder = args.out.resolve()
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        problem = Problem("E002", f"--out {args.out} cannot be made: {error.strerror}", ("--out runs/acceptance-2",))
        print(UserError([problem]), file=sys.stderr)
        return 2
    course = ClusterCheck(
        RankLauncher(words, folder / "logs"),
        folder,
        args.device,
        seconds=60 * args.minutes,
        formats=args.formats,
        most=args.layouts,
        steps=args.steps,
        seed=args.seed,
    )
    report = course.run(args.parts, shlex.join(["python", "tools/acceptance.py", *argv]))
    print(f"\n{report.markdown()}\nwritten to {args.out / MARKDOWN}")
    return int(report.failed)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work.

    Raises:
        UserError: with all that is wrong.

    """
    problems = []
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        problems.append(Problem("E002", f"--out {args.out} holds something already", (f"--out {args.out}-2",)))
    for flag, value in (("--nproc", args.nproc), ("--layouts", args.layouts), ("--minutes", args.minutes)):
        if value is not None and value <= 0:
            problems.append(Problem("E002", f"{flag} {value} must be above 0", (f"{flag} 2",)))
    if args.steps < MIN_STEPS:
        why = f"--steps {args.steps} leaves no step to be killed in, after one save and before another"
        problems.append(Problem("E002", why, (f"--steps {MIN_STEPS}",)))
    if problems:
        raise UserError(problems)


def build_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, how = parser.add_argument, parser.add_mutually_exclusive_group()
    how.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks on this machine, started by torchrun (2)")
    how.add_argument(
        "--launch", metavar="WORDS", help="what starts a Python file on every rank; {port} is another port every time"
    )
    default = Path(time.strftime("runs/acceptance-%Y%m%d-%H%M%S"))
    add("--out", type=Path, default=default, metavar="DIR", help="a new folder that all nodes share (below runs)")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (auto)")
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="WORD", help="of numbers (fp32 bf16)")
    add("--layouts", type=int, metavar="N", help="compare the first N layouts only")
    add("--steps", type=int, default=50, metavar="N", help="of the run in which a rank is killed (50)")
    add("--seed", type=int, default=int(time.time()), metavar="N", help="of the moment at which it is (the time)")
    add("--minutes", type=float, default=10.0, metavar="X", help="that a program may take (10)")
    return parser


def as_rank(what: str, words: Sequence[str]) -> int:
    """One rank of a program that this tool has started."""
    if what == "machine":
        from tools.cluster_check.checks import write_machine_facts

        write_machine_facts(Path(words[0]), words[1], float(words[2]))
        return 0
    if what == "layouts":
        from tools.cluster_check.checks import trace_selected_layouts

        trace_selected_layouts(Path(words[0]), *words[1:])
        return 0
    from tools.cluster_check.checks import train_until_killed

    return train_until_killed(words)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
