"""A run of megatron-core that moves here and back, against the same run that never moves.

``python -m tests.megatron_core.moves [CASE ...]`` moves all cases, or some, and writes the lines of
tests/golden/megatron_moves.txt. A run takes steps 1 to 25 there, 26 to 75 here, from its checkpoint, and 51 to 100
there, from the export of step 50, with its optimizer each time.
"""

from __future__ import annotations

import fcntl
import sys
import tempfile
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from tests.golden.provenance import provenance
from tests.megatron_core.beside import Difference, difference, missing, run_core, run_ours
from tests.megatron_core.forms import DATA, FLAGS, FORMS, LLAMA, MIXTURE, STEPS, write_data
from tools.convert_checkpoint import main as convert

FILE = Path(__file__).parents[1] / "golden" / "megatron_moves.txt"
HEAD = """Data and checkpoints moved between megatron-core 0.16.1 and this package. Each line was written by
`python -m tests.megatron_core.sample_orders` or `python -m tests.megatron_core.moves CASE`.
"""
LEAVES, RETURNS, ENDS, LAST = 25, 50, 75, 100
"""The steps of the checkpoint loaded here, of the export, and of the ends here and there."""
DENSE_BATCH = "--make-vocab-size-divisible-by 64 --use-distributed-optimizer"


@dataclass(frozen=True)
class Move:
    """A model, and the layouts of megatron-core before it leaves and after it returns: flags and ranks."""

    flags: str
    before: tuple[str, int] = ("", 1)
    after: tuple[str, int] = ("", 1)


TP2, PP2 = ("--tensor-model-parallel-size 2", 2), ("--pipeline-model-parallel-size 2", 2)
EP2, DP2 = ("--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 2), ("", 2)
EXPERTS = f"{LLAMA} {MIXTURE}"
MOVES = {
    "gpt": Move(""),
    "llama": Move(FORMS["llama"]),
    "qk norm and biases": Move(FORMS["qk norm"]),
    "llama, TP 2 to PP 2": Move(FORMS["llama"], TP2, PP2),
    "llama, PP 2 to TP 2": Move(FORMS["llama"], PP2, TP2),
    "gpt, DP 2 to TP 2": Move("", DP2, TP2),
    "experts": Move(EXPERTS),
    "experts, PP 2 to DP 2": Move(EXPERTS, PP2, DP2),
    "experts, EP 2 to DP 2": Move(EXPERTS, EP2, DP2),
    "shared expert and z-loss": Move(FORMS["shared experts"]),
    "sigmoid router with biases": Move(FORMS["expert bias"]),
    "dense and expert layers": Move(FORMS["dense and experts"]),
    "fp16": Move(f"{FORMS['llama']} --fp16 --initial-loss-scale 4096"),
    "bf16": Move(f"{FORMS['llama']} --bf16"),
}


def read() -> dict[str, str]:
    """Return the lines by name: result, and by whom it was written."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return dict(line.split(" | ", 1) for line in lines if " | " in line)


def record(name: str, result: str) -> None:
    """Write a line in place of the old one of the same name."""
    with Path(f"{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read() | {name: f"{result} | {provenance()}"}
        order = [name for name in [*MOVES, *rows] if name in rows]
        FILE.write_text("\n".join([HEAD, *(f"{name} | {rows[name]}" for name in dict.fromkeys(order)), ""]))
    Path(f"{FILE}.lock").unlink()


def move(folder: Path, case: Move) -> tuple[Difference, Difference]:
    """Move a run; return its differences to one that never moves, here and after it is back.

    Args:
        folder: empty, and the current one.
        case: to move.

    Raises:
        RuntimeError: if a program fails.
        ValueError: if the runs take other steps.
    """
    write_data(folder)
    own = f"{FLAGS} {DATA} {case.flags} {DENSE_BATCH}".replace(f"--train-iters {STEPS}", f"--train-iters {LAST}")
    layouts = [f"{own} {flags}".split() for flags, _ in (case.before, case.after)]
    stays = run_core(folder, layouts[0], case.before[1], save={str(LEAVES): "theirs"})
    here = own.replace("--expert-model-parallel-size 2", "").split()
    here += [
        "--load",
        "megatron:theirs",
        "--save",
        "ours",
        "--save-interval",
        str(LEAVES),
        "--exit-interval",
        str(ENDS),
    ]
    ours = run_ours(folder, here)
    if convert(["--load", f"ours/iter_{RETURNS:07d}", "--save-megatron", "export"]) != 0:
        raise RuntimeError("the export failed")
    back = run_core(folder, layouts[1], case.after[1], load=f"export/iter_{RETURNS:07d}")
    return difference(stays[LEAVES:ENDS], ours), difference(back, [as_ours(step) for step in stays[RETURNS:]])


def as_ours(step: dict[str, float]) -> dict[str, float]:
    """Return a step with the names of a record here."""
    return {"lm loss": step["lm loss"], "grad-norm": step["grad_norm"], "batch-size": step["batch_size"]}


def describe(found: tuple[Difference, Difference]) -> str:
    """Describe the differences in a line."""
    here, back = (f"{each.steps} steps, loss {each.loss:.1e}, gradient norm {each.grad_norm:.1e}" for each in found)
    return f"here: {here} | back there: {back}"


def main() -> int:
    """Move the cases; return 1 if a program fails."""
    if why := missing():
        sys.exit(why)
    failed = 0
    for name in sys.argv[1:] or MOVES:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            try:
                line = describe(move(Path(folder), MOVES[name]))
            except (RuntimeError, ValueError) as error:
                failed += 1
                print(f"{name}: {error}", flush=True)
                continue
        print(name, line, flush=True)
        record(name, line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
