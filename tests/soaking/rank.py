"""A rank of a run that is disturbed: ``pretrain_gpt.py``, whose saves somebody outside can have go wrong.

Started by torchrun as ``-m tests.soaking.rank FLAGS``. What happens is said by files in ``RUN_DIR/soak``, looked at
before each call to the file system that touches a checkpoint: ``full`` (there is no room, for any rank), and
``kill.R`` (rank R is killed at the call whose number, counted from now, is in the file).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron.config.launch import leave
from pretrain_gpt import main

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
"""Everything a save asks of the system that can leave something behind."""

REFUSED = ("open", "write", "fsync", "mkdir", "rename")
"""Those that a full disk refuses."""

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
        self._struck, self._left, self._open = folder / FOLDER / STRUCK, -1, dict[int, str]()
        self._under, self._stat = f"{saved}/", os.stat
        self._real = {name: getattr(os, name) for name in CALLS}

    def stand_there(self) -> None:
        """From now on, for ever."""
        for name in CALLS:
            setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Any:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            place = self._place(args[0], kwargs.get("dir_fd"))
            if place is not None:
                self._before(name, place)
            result = real(*args, **kwargs)
            if name == "open" and place is not None:
                self._open[result] = place
            if name == "close":
                self._open.pop(args[0], None)
            return result

        return call

    def _place(self, what: Any, folder: int | None) -> str | None:
        """The path that a call is about, if it belongs to a checkpoint."""
        if isinstance(what, int):
            return self._open.get(what)
        if folder is not None:
            return f"{self._open[folder]}/{what}" if folder in self._open else None
        path = os.fsdecode(what)
        return path if path.startswith(self._under) and "/iter_" in path else None

    def _before(self, name: str, place: str) -> None:
        if not self._is_there(self._kill):
            self._left = -1
        else:
            self._left = int(self._kill.read_text()) if self._left < 0 else self._left - 1
            if self._left <= 0:
                self._die(f"{name} {place}")
        if name in REFUSED and self._is_there(self._full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)

    def _is_there(self, file: Path) -> bool:
        try:
            self._stat(file)
        except OSError:
            return False
        return True

    def _die(self, where: str) -> None:
        self._real["unlink"](self._kill)
        note = self._real["open"](self._struck, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._real["write"](note, f"{time.time()} {where}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    argv = sys.argv[1:]
    run_dir, saved = (Path(argv[argv.index(flag) + 1]) for flag in ("--run-dir", "--save"))
    Saboteur(run_dir, saved, int(os.environ["RANK"])).stand_there()
    leave(main(argv))
