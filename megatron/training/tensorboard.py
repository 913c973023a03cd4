"""The numbers of a run as TensorBoard shows them. Imported only where it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.training.sinks import Values, scalars

PLACES = ("iteration", "consumed-samples", "consumed-tokens", "time")
BY_SAMPLES = "samples"
FLUSH_SECONDS = 30


class TensorBoard:
    """Event files in ``folder``, over steps, and in its folder ``samples`` the same over consumed samples.

    The latter are called "... vs samples", as in Megatron-LM. They have a folder of their own because a start tells
    TensorBoard from which place on what earlier starts wrote does not count any more, and a folder has one such place.
    """

    def __init__(self, folder: Path, resolved_config: str, iteration: int, consumed_samples: int) -> None:
        """Go on after ``iteration`` steps and ``consumed_samples``.

        Raises:
            ModuleNotFoundError: when the package is missing.
            OSError: when the folder cannot be written.
        """
        self._by_step = _writer(folder, iteration + 1)
        self._by_samples = _writer(folder / BY_SAMPLES, consumed_samples + 1)
        self._by_step.add_text("config", _as_code(resolved_config), iteration)
        self.flush()

    def record(self, values: Values) -> None:
        """Add a point to the curve of every number."""
        numbers = scalars(values)
        step, samples = int(numbers["iteration"]), int(numbers["consumed-samples"])
        for name, number in numbers.items():
            if name not in PLACES:
                self._by_step.add_scalar(name, number, step)
                self._by_samples.add_scalar(f"{name} vs samples", number, samples)

    def event(self, values: Values) -> None:
        """Show errors and warnings among the texts."""
        if values.get("event") in ("warning", "error"):
            self._by_step.add_text(str(values["event"]), str(values.get("text", "")), int(str(values["iteration"])))

    def flush(self) -> None:
        """Write what waits."""
        self._by_step.flush()
        self._by_samples.flush()

    def close(self, failed: bool) -> None:
        """Write what waits, and close the files."""
        self._by_step.close()
        self._by_samples.close()


def _writer(folder: Path, purge_step: int) -> Any:
    """A writer to ``folder``; what lies there from ``purge_step`` on does not count any more."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"it needs a package that is not installed ({error.name}): pip install tensorboard"
        ) from error
    try:
        return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_SECONDS)
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror or error})"
        raise OSError(f"{why}: --tensorboard-dir ANOTHER_FOLDER") from error


def _as_code(text: str) -> str:
    """Markdown that shows ``text`` as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
