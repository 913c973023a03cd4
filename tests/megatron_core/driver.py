"""Run Megatron-LM itself on CPUs: ``python driver.py ITS_FOLDER STEPS.json ITS_FLAGS ...``, or under torchrun.

It runs in an environment of its own, and imports nothing of this package but ``no_gpu`` beside it. ``STEPS.json``
receives the loss and the gradient norm of each step from the last rank, exact to the last digit.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

CPU_FLAGS = """--distributed-backend gloo --no-gradient-accumulation-fusion --no-rope-fusion
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-dropout-fusion --no-check-for-nan-in-loss-and-grad"""
"""Options that switch off features without a kernel for CPUs."""


def record_steps(path: Path) -> None:
    """Write loss and gradient norm of each step."""
    from megatron.training import training

    steps: list[dict[str, float]] = []
    step = training.train_step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        losses, norm = found[0], next(x for x in found[5:] if isinstance(x, float))
        steps.append({name: float(loss) for name, loss in losses.items()} | {"grad_norm": norm})
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            path.write_text(json.dumps(steps))
        return found

    training.train_step = recorded


def main() -> None:
    """Run its pretrain_gpt.py, or pretrain_hybrid.py for a pattern of layers."""
    folder, steps, *flags = sys.argv[1:]
    os.environ.setdefault("MASTER_PORT", "29551")
    beside = ("no_gpu", "stand_in", "recurrences")  # files
    no_gpu, stand_in, recurrences = map(importlib.import_module, beside)
    sys.path[0] = folder
    no_gpu.replace_cuda()
    if "transformer_engine" in flags:
        stand_in.install()
        recurrences.install()
    no_gpu.replace_optimizer()
    record_steps(Path(steps))
    entry = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in flags else "pretrain_gpt.py"
    sys.argv = [entry, *flags, *CPU_FLAGS.split()]
    program = Path(folder) / entry
    exec(compile(program.read_text(), program, "exec"), {"__name__": "__main__", "__file__": str(program)})


if __name__ == "__main__":
    main()
