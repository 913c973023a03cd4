"""Global batch size as a pure function of the consumed samples."""

from __future__ import annotations

from megatron.config.run import TrainingConfig


def global_batch(config: TrainingConfig, data_parallel_size: int) -> int:
    """Return the samples per step after any batch-size ramp."""
    return config.global_batch_size or config.micro_batch_size * data_parallel_size


def microbatches(config: TrainingConfig, data_parallel_size: int, batch: int | None = None) -> int:
    """Return the micro-batches per data-parallel rank of a global batch (default: the full one).

    With ``--pad-global-batch`` the last one may be padded.
    """
    samples = global_batch(config, data_parallel_size) if batch is None else batch
    unit = config.micro_batch_size * data_parallel_size
    return -(-samples // unit) if config.pad_global_batch else samples // unit


def padding(config: TrainingConfig, data_parallel_size: int, batch: int) -> int:
    """Return the number of samples that ``--pad-global-batch`` adds to a global batch; the loss excludes them."""
    if not config.pad_global_batch:
        return 0
    return microbatches(config, data_parallel_size, batch) * config.micro_batch_size * data_parallel_size - batch


def batch_stages(config: TrainingConfig, data_parallel_size: int) -> list[tuple[int, int]]:
    """Return the batch-size ramp as ``[(first sample, batch size), ...]``; one entry without a ramp.

    The batch size rises ``n = (full - start) / increment`` times, evenly over the samples of the ramp: the i-th size
    holds for every step that starts in the i-th of ``n`` equal parts. A step belongs to one stage only, and a stage
    that would begin within the last step of the previous stage is left out.
    """
    full = global_batch(config, data_parallel_size)
    if config.rampup_batch_size is None:
        return [(0, full)]
    start, increment, samples = config.rampup_batch_size
    rises = (full - start) // increment
    stages = []
    first_sample = 0
    for i in range(rises):
        size = start + i * increment
        end = -(-samples * (i + 1) // rises)
        if first_sample < end:
            stages.append((first_sample, size))
            first_sample += -(-(end - first_sample) // size) * size
    return [*stages, (first_sample, full)]


def batch_at(config: TrainingConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Return the global batch size of the step that starts after ``consumed_samples``."""
    stages = batch_stages(config, data_parallel_size)
    return next(size for first_sample, size in reversed(stages) if first_sample <= consumed_samples)


def in_full_batches(config: TrainingConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Return the samples that the steps up to ``consumed_samples`` would have consumed without a ramp."""
    stages = batch_stages(config, data_parallel_size)
    ends = [*(first_sample for first_sample, _ in stages[1:]), consumed_samples]
    full = stages[-1][1]
    used = [(max(0, min(consumed_samples, end) - start), size) for (start, size), end in zip(stages, ends)]
    return sum(samples * full // size for samples, size in used)


def total_samples(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the planned length of the run: ``train_samples``, or the samples of ``train_iters`` steps.

    Args:
        config: run length and batch size.
        data_parallel_size: replicas of the model.
        iteration: steps taken before the run continued with ``config``, possibly with other batch sizes.
        consumed_samples: samples consumed by those steps.
    """
    return config.train_samples or trained_samples(config, data_parallel_size, iteration, consumed_samples)


def trained_samples(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the samples consumed at the end of the run, up to a batch fewer than ``train_samples``.

    Arguments as for :func:`total_samples`.
    """
    return _end(config, data_parallel_size, iteration, consumed_samples)[1]


def total_steps(config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0) -> int:
    """Return the steps taken at the end of the run. An incomplete last batch is not trained on.

    Arguments as for :func:`total_samples`.
    """
    return _end(config, data_parallel_size, iteration, consumed_samples)[0]


def _end(config: TrainingConfig, data_parallel_size: int, iteration: int, consumed: int) -> tuple[int, int]:
    """Return steps and samples at the end of a run that continues after ``iteration`` steps, ``consumed`` samples.

    The start need not be a point that a run with this ramp would have reached. The step that crosses into the next
    stage is taken completely, as in :func:`batch_at`.
    """
    stages = batch_stages(config, data_parallel_size)
    ends = [first_sample for first_sample, _ in stages[1:]]
    for i, (_, size) in enumerate(stages):
        if config.train_samples is None:
            steps = (config.train_iters or 0) - iteration
        else:
            steps = (config.train_samples - consumed) // size
        if i < len(ends):
            steps = min(steps, -(-(ends[i] - consumed) // size))
        steps = max(0, steps)
        iteration += steps
        consumed += steps * size
    return iteration, consumed
