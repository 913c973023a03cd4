"""The global batch as a pure function of consumed samples."""

from __future__ import annotations

from megatron.config.run import TrainingConfig


def global_batch(config: TrainingConfig, data_parallel_size: int) -> int:
    """Samples per step once any ramp is over."""
    return config.global_batch_size or config.micro_batch_size * data_parallel_size


def microbatches(config: TrainingConfig, data_parallel_size: int, batch: int | None = None) -> int:
    """Those of ``batch``, or of the full one, on each data-parallel rank; the last of them may be padded."""
    samples = global_batch(config, data_parallel_size) if batch is None else batch
    unit = config.micro_batch_size * data_parallel_size
    return -(-samples // unit) if config.pad_global_batch else samples // unit


def padding(config: TrainingConfig, data_parallel_size: int, batch: int) -> int:
    """Samples that ``--pad-global-batch`` computes besides those of ``batch``, and that do not count."""
    if not config.pad_global_batch:
        return 0
    return microbatches(config, data_parallel_size, batch) * config.micro_batch_size * data_parallel_size - batch


def batch_stages(config: TrainingConfig, data_parallel_size: int) -> list[tuple[int, int]]:
    """The ramp as ``[(first sample, batch), ...]``, ending with the full batch; one entry without a ramp.

    The rises from start to full are spread evenly over the ramp's samples: with ``n`` of them, the batch of rise
    ``i`` holds for every step that starts from sample ``i/n`` of the ramp on. A step never straddles two stages, and
    a stage that would begin within the last step of the one before is left out.
    """
    full = global_batch(config, data_parallel_size)
    if config.rampup_batch_size is None:
        return [(0, full)]
    start, increment, samples = config.rampup_batch_size
    rises = (full - start) // increment
    stages, at = [], 0
    for i in range(rises):
        size = start + i * increment
        end = -(-samples * (i + 1) // rises)
        if at < end:
            stages.append((at, size))
            at += -(-(end - at) // size) * size
    return [*stages, (at, full)]


def batch_at(config: TrainingConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Samples of the step that starts after ``consumed_samples``."""
    return next(b for at, b in reversed(batch_stages(config, data_parallel_size)) if at <= consumed_samples)


def in_full_batches(config: TrainingConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Samples that the steps would have used which ``consumed_samples`` make, had there been no ramp."""
    stages = batch_stages(config, data_parallel_size)
    ends = [*(at for at, _ in stages[1:]), consumed_samples]
    full = stages[-1][1]
    used = [(max(0, min(consumed_samples, end) - at), size) for (at, size), end in zip(stages, ends)]
    return sum(samples * full // size for samples, size in used)


def total_samples(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Samples the whole run is planned for: ``train_samples``, or what ``train_iters`` steps consume.

    Args:
        config: how long, and in which batches.
        data_parallel_size: copies of the model.
        iteration: steps taken before the run goes on with ``config``, perhaps in other batches.
        consumed_samples: samples they used.

    """
    return config.train_samples or trained_samples(config, data_parallel_size, iteration, consumed_samples)


def trained_samples(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Samples consumed when the run ends, up to a batch fewer than ``train_samples``; see `total_samples`."""
    return _end(config, data_parallel_size, iteration, consumed_samples)[1]


def total_steps(config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0) -> int:
    """Steps taken when the run ends; a last step that is not full is not taken. See `total_samples`."""
    return _end(config, data_parallel_size, iteration, consumed_samples)[0]


def _end(config: TrainingConfig, data_parallel_size: int, iteration: int, consumed: int) -> tuple[int, int]:
    """Steps and samples at the end of a run that goes on after ``iteration`` steps and ``consumed`` samples.

    That point need not be one where a run with this ramp would have been: the step that crosses into the next stage
    is then taken whole, as `batch_at` has it.
    """
    stages = batch_stages(config, data_parallel_size)
    ends = [at for at, _ in stages[1:]]
    for i, (_, size) in enumerate(stages):
        if config.train_samples is None:
            steps = (config.train_iters or 0) - iteration
        else:
            steps = (config.train_samples - consumed) // size
        if i < len(ends):
            steps = min(steps, -(-(ends[i] - consumed) // size))
        steps = max(0, steps)
        iteration, consumed = iteration + steps, consumed + steps * size
    return iteration, consumed
