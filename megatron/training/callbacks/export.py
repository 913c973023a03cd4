"""Export checkpoints to Hugging Face while training goes on (``--save-hf-interval``).

Rank 0 starts ``tools/convert_checkpoint.py`` on a checkpoint that it has saved, in a process of low priority without a
GPU, one at a time; of the checkpoints that wait meanwhile, the newest. Retention keeps both checkpoints until their
processes end. A failed export is a warning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.durable_files import make_folder
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MARKER
from megatron.checkpoint.location import Location
from megatron.checkpoint.publish import is_complete
from megatron.config.text import shell_word
from megatron.convert.huggingface.config import CONFIG_FILE
from megatron.convert.huggingface.convert import withdraw_export
from megatron.distributed.launch import run_on_rank0
from megatron.training.callbacks.base import Callback
from megatron.training.resume_source import step_of
from megatron.training.trainer import Trainer

FOLDER = "hf"
"""Folder of the exported models in the ``--save`` folder; they have the names of the checkpoints."""

LOWEST_PRIORITY = 19

END_WITH_PARENT = """
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the run has ended")
runpy.run_module("megatron", run_name="__main__", alter_sys=True)
"""
"""As ``-m megatron``, after the process id of the parent, even one that gets SIGKILL. A ``preexec_fn`` would run
between fork and exec, which is unsafe with threads."""

WAIT_SECONDS = 30.0
"""Seconds between messages of rank 0 to the other ranks while all wait for the last export."""


@dataclass(frozen=True)
class Export:
    """An export in progress."""

    step: int
    target: Path
    process: subprocess.Popen[bytes]
    started: float


class HuggingFaceExport(Callback):
    """Export every checkpoint whose step is a multiple of the interval."""

    pauses = False

    def __init__(self, trainer: Trainer, save: Path, every: int) -> None:
        """Export from ``save`` to the folder ``hf`` in it, ``every`` so many steps."""
        super().__init__(trainer)
        self._save, self._every = save.absolute(), every
        self._waiting: int | None = None  # step of the checkpoint to export next
        self._running: Export | None = None

    def on_train_start(self) -> None:
        """Continue what an earlier start of the run has left: the newest export, and those that were interrupted."""
        if self.trainer.mesh.world.rank != 0:
            return
        steps = [step for step, path in CheckpointFolder(self._save).named() if is_complete(path)]
        steps = [step for step in steps if 0 < step <= self.trainer.iteration]
        for step in steps:
            self._withdraw_outdated(step)
        newest = [step for step in steps if step % self._every == 0][:1]
        missing = [step for step in newest if not self._target(step).exists()]
        for step in sorted({*missing, *(step for step in steps if self._staging(step).exists())}):
            self._add(step)

    def on_save(self, path: Location) -> None:
        """Export the checkpoint, after the one in progress; also if an earlier one of its step was exported."""
        if self.trainer.mesh.world.rank != 0:
            return
        step = step_of(path)
        self._withdraw_outdated(step)
        if step % self._every == 0 or self._staging(step).exists():
            self._add(step)

    def on_iteration_end(self) -> None:
        """Report an export that has ended, and start the next one."""
        self._poll()

    def on_stop(self, error: BaseException | None) -> None:
        """Wait for all exports after the last step; collective. If steps are left, the next start continues."""
        if error is None and self.trainer.iteration >= self.trainer.total_steps:
            while run_on_rank0(self._wait, self.trainer.mesh.world):
                pass
        elif self._running is not None:
            self._running.process.terminate()
            self._running.process.wait()
            if error is None:
                self.log.note(f"the export of step {self._running.step} is interrupted; the next start continues it")

    def _wait(self) -> bool:
        """Wait a while for the exports; return True if there are more."""
        self._poll()
        if self._running is None:
            return False
        waiting = "" if self._waiting is None else f"; then that of step {self._waiting}"
        seconds = time.monotonic() - self._running.started
        if seconds > WAIT_SECONDS:
            self.log.note(f"waiting for the export of step {self._running.step}: {seconds:.0f}s so far{waiting}")
        with suppress(subprocess.TimeoutExpired):
            self._running.process.wait(WAIT_SECONDS)
        return True

    def _target(self, step: int) -> Path:
        return self._save / FOLDER / f"iter_{step:07d}"

    def _staging(self, step: int) -> Path:
        target = self._target(step)
        return target.with_name(f"{target.name}.tmp")

    def _log_file(self, step: int) -> Path:
        """Return the file for what the converter prints; it is kept if the export fails."""
        return self._target(step).with_suffix(".log")

    def _withdraw_outdated(self, step: int) -> None:
        """Withdraw the export of a step whose checkpoint is newer: the run has gone back and taken the step again."""
        target, marker = self._target(step), self._save / f"iter_{step:07d}" / MARKER
        config = target / CONFIG_FILE
        try:
            if not config.exists() or config.stat().st_mtime_ns < marker.stat().st_mtime_ns:
                withdraw_export(target)
        except OSError as error:
            self.log.warning(f"{target} is of an earlier checkpoint of step {step}, and is not replaced: {error}")

    def _add(self, step: int) -> None:
        """Export a step next, instead of one that waits already. Until its end, the next start continues."""
        self._poll()
        if self._running is not None and self._waiting not in (None, step):
            self.log.warning(
                f"step {self._waiting} is not exported: the export of step {self._running.step} is not finished\n"
                f"  fix: --save-hf-interval {2 * self._every}"
            )
            shutil.rmtree(self._staging(self._waiting), ignore_errors=True)
            self._drop(self._waiting)
        self.trainer.held_checkpoints.add(step)
        self._waiting = step
        with suppress(OSError):  # reported when the export starts
            make_folder(self._staging(step))
        self._poll()

    def _drop(self, step: int) -> None:
        """Release the checkpoint of a step that is not exported."""
        self.trainer.held_checkpoints.discard(step)
        with suppress(OSError):  # it is gone, or holds files of a conversion that was killed
            self._staging(step).rmdir()

    def _poll(self) -> None:
        """Report an export that has ended, and start the next one; only rank 0 has any."""
        if self._running is not None and self._running.process.poll() is not None:
            ended, self._running = self._running, None
            self._report(ended)
            self._drop(ended.step)
        if self._running is None and self._waiting is not None:
            step, self._waiting = self._waiting, None
            try:
                self._running = self._start(step)
            except OSError as error:
                self._drop(step)
                self.log.warning(f"step {step} is not exported: {error}")

    def _start(self, step: int) -> Export:
        source, target = CheckpointFolder(self._save).path(step), self._target(step)
        make_folder(target.parent)
        flags = ["--load", str(source), "--save-hf", str(target)]
        if plugins := self.trainer.config.compute.plugin:
            flags += ["--plugin", *plugins]
        package = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", END_WITH_PARENT, str(os.getpid()), "convert", *flags]
        with self._log_file(step).open("wb") as output:
            # in a session of its own: Ctrl-C in a terminal stops the run, which ends the export
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
        return Export(step, target, process, time.monotonic())

    def _report(self, ended: Export) -> None:
        log = self._log_file(ended.step)
        if ended.process.returncode == 0:
            log.unlink(missing_ok=True)
            self.log.note(f"exported {ended.target} in {time.monotonic() - ended.started:.0f}s")
            return
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        messages = [i for i, line in enumerate(lines) if line.startswith("convert_checkpoint: ")]
        reason = f"the conversion ended with status {ended.process.returncode}: {' '.join(lines[-1:])}; see {log}"
        if messages and "Traceback (most recent call last):" not in lines and ended.process.returncode > 0:
            reason = "\n".join(lines[messages[-1] :]).removeprefix("convert_checkpoint: ")
            command = f"python tools/convert_checkpoint.py --load {shell_word(f'{self._save}/iter_{ended.step:07d}')}"
            reason = reason.replace("fix: --save-hf", f"fix: {command} --save-hf")
        self.log.warning(f"step {ended.step} is not exported: {reason}")
