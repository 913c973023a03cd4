"""TensorBoard logger: event files over steps, and over consumed samples in the subfolder `samples`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.training.loggers.base import Metrics, scalar_metrics

PROGRESS_METRICS = ("consumed-samples", "consumed-tokens", "time")
BY_SAMPLES = "samples"
FLUSH_SECONDS = 30


class TensorBoardLogger:
    """Writes event files over steps to ``folder``, and over consumed samples to its subfolder ``samples``.

    The latter are named "... vs samples", as in Megatron-LM. They need their own folder because a restart discards the
    points from a step on (``purge_step``), and a folder has one such step.
    """

    def __init__(self, folder: Path, resolved_config: str, iteration: int, consumed_samples: int) -> None:
        """Open the event files; points after ``iteration`` steps and ``consumed_samples`` are discarded."""
        self._by_step = _writer(folder, iteration + 1)
        self._by_samples = _writer(folder / BY_SAMPLES, consumed_samples + 1)
        verbatim = "\n".join(f"    {line}" for line in resolved_config.splitlines())  # in Markdown
        self._by_step.add_text("config", verbatim, iteration)
        self.flush()

    def log(self, step: int, metrics: Metrics) -> None:
        """Add a point to the curve of every metric."""
        samples = int(metrics["consumed-samples"])
        for name, number in scalar_metrics(metrics).items():
            if name not in PROGRESS_METRICS:
                self._by_step.add_scalar(name, number, step)
                self._by_samples.add_scalar(f"{name} vs samples", number, samples)

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Add errors and warnings as text."""
        if kind in ("warning", "error"):
            self._by_step.add_text(kind, fields["text"], step)

    def flush(self) -> None:
        """Write buffered points."""
        self._by_step.flush()
        self._by_samples.flush()

    def close(self) -> None:
        """Close the event files."""
        self._by_step.close()
        self._by_samples.close()


def _writer(folder: Path, purge_step: int) -> Any:
    """Open a writer that discards earlier points from ``purge_step`` on."""
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
