"""The global batch as a pure function of consumed samples."""

from __future__ import annotations

from megatron.config.run import TrainingConfig


def global_batch(config: TrainingConfig, data_parallel_size: int) -> int:
    """Samples per step once any ramp is over."""
    return config.global_batch_size or config.micro_batch_size * data_parallel_size


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


def total_samples(config: TrainingConfig, data_parallel_size: int) -> int:
    """Samples the whole run is planned for: ``train_samples``, or what ``train_iters`` steps consume."""
    return config.train_samples or trained_samples(config, data_parallel_size)


def trained_samples(config: TrainingConfig, data_parallel_size: int) -> int:
    """Samples that the whole steps of the run consume: up to a batch fewer than ``train_samples``."""
    consumed, left = 0, total_steps(config, data_parallel_size)
    stages = batch_stages(config, data_parallel_size)
    for (at, size), (end, _) in zip(stages, stages[1:]):
        steps = min(left, (end - at) // size)
        consumed, left = consumed + steps * size, left - steps
    return consumed + left * stages[-1][1]


def total_steps(config: TrainingConfig, data_parallel_size: int) -> int:
    """Steps of the whole run; a last step that is not full is not taken."""
    if config.train_samples is None:
        return config.train_iters or 0
    steps, stages = 0, batch_stages(config, data_parallel_size)
    ends = [at for at, _ in stages[1:]] + [config.train_samples]
    for (at, size), end in zip(stages, ends):
        steps += max(0, min(end, config.train_samples) - at) // size
    return steps
