"""A rank of a disturbed run: ``pretrain_gpt.py`` with saves that can be made to fail from outside.

Started by torchrun as ``-m tests.soaking.rank FLAGS``. What happens is in files in ``RUN_DIR/soak``, looked at
before each call to the file system that touches a checkpoint: ``full`` (there is no room, for any rank), and
``kill.R`` (rank R is killed at the call whose number, counted from now, is in the file).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron.config.launch import exit_process
from pretrain_gpt import main
from tests.kit.watched_calls import refuse, watched_calls

FOLDER = "soak"
FULL = "full"
STRUCK = "struck"


def kill_at(folder: Path, rank: int, call: int) -> None:
    """Have a rank of the run in ``folder`` killed at a call."""
    made = folder / FOLDER / f"kill.{rank}.new"
    made.write_text(str(call))
    made.rename(folder / FOLDER / f"kill.{rank}")


class Saboteur:
    """Stands between a rank and the file system."""

    def __init__(self, folder: Path, saved: Path, rank: int) -> None:
        self._full, self._kill = folder / FOLDER / FULL, folder / FOLDER / f"kill.{rank}"
        self._struck, self._left, self._under = folder / FOLDER / STRUCK, -1, f"{saved}/"

    def standing_there(self) -> AbstractContextManager[None]:
        """Inside, saves are disturbed."""
        return watched_calls(lambda path: path.startswith(self._under) and "/iter_" in path, self._before)

    def _before(self, name: str, path: str, _: tuple[Any, ...]) -> None:
        if not self._kill.exists():
            self._left = -1
        else:
            self._left = int(self._kill.read_text()) if self._left < 0 else self._left - 1
            if self._left <= 0:
                self._die(f"{name} {path}")
        if self._full.exists():
            refuse(name, path)

    def _die(self, where: str) -> None:
        self._kill.unlink()
        self._struck.write_text(f"{time.time()} {where}\n")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    argv = sys.argv[1:]
    run_dir, saved = (Path(argv[argv.index(flag) + 1]) for flag in ("--run-dir", "--save"))
    with Saboteur(run_dir, saved, int(os.environ["RANK"])).standing_there():
        exit_process(main(argv))
