"""Global batch size and schedule lengths as pure functions of the consumed samples.

Nothing here has state: the batch size of a step follows from the samples consumed before it, including during a
batch-size ramp, so a run resumes at any point with the same batches. `schedule_lengths` converts the lengths of warm-up
and decay, given in steps, samples or as a fraction, to samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig, parse_batch_steps


@dataclass(frozen=True)
class Origin:
    """Beginning of the current phase of a run; zeros for a run of one phase.

    Lengths, batch sizes and places of samples are counted from here; steps, samples and tokens of logs and checkpoints
    from the beginning of the run.
    """

    iteration: int = 0  # steps taken before
    samples: int = 0  # consumed by these steps
    tokens: int = 0  # in these samples
    read: int = 0  # samples of the phase's data read before: those of the phase before, which it continues
    digest: int = 0  # of the samples before those
    sources: Mapping[str, int] = field(default_factory=dict)  # tokens read of each source of the data, by its key

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Origin:
        """Return the origin of the phase in which a checkpoint was saved, from the state in its manifest."""
        saved = state.get("phase")
        if not saved:  # a run of one phase
            return cls()
        position = saved["iteration"], saved["consumed_samples"], saved["consumed_tokens"]
        return cls(*position, saved["read"], int(saved["digest"], 16), dict(saved["sources"]))

    def to_state(self) -> dict[str, Any]:
        """Return it as part of the state of a checkpoint."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.samples,
            "consumed_tokens": self.tokens,
            "read": self.read,
            "digest": f"{self.digest:016x}",
            "sources": dict(self.sources),
        }

    def local(self, iteration: int, consumed_samples: int) -> tuple[int, int]:
        """Return steps and samples since the phase began."""
        return iteration - self.iteration, consumed_samples - self.samples

    def tokens_at(self, consumed_samples: int, seq_length: int) -> int:
        """Return the tokens of the run after ``consumed_samples``; ``seq_length`` is that of the phase."""
        return self.tokens + (consumed_samples - self.samples) * seq_length


WHOLE_RUN = Origin()
"""Origin of a run of one phase."""


def full_global_batch_size(config: TrainingConfig, data_parallel_size: int) -> int:
    """Return the samples per step after any batch-size ramp."""
    if config.step_batch_size_schedule:
        return parse_batch_steps(config.step_batch_size_schedule)[-1][1]
    return config.global_batch_size or config.micro_batch_size * data_parallel_size


def get_num_microbatches(config: TrainingConfig, data_parallel_size: int, batch: int | None = None) -> int:
    """Return the micro-batches per data-parallel rank of a global batch (default: the full one).

    With ``--pad-global-batch`` the last one may be padded.
    """
    samples = full_global_batch_size(config, data_parallel_size) if batch is None else batch
    unit = config.micro_batch_size * data_parallel_size
    return -(-samples // unit) if config.pad_global_batch else samples // unit


def padding_samples(config: TrainingConfig, data_parallel_size: int, batch: int) -> int:
    """Return the number of samples that ``--pad-global-batch`` adds to a global batch; the loss excludes them."""
    if not config.pad_global_batch:
        return 0
    return -batch % (config.micro_batch_size * data_parallel_size)


def batch_size_stages(config: TrainingConfig, data_parallel_size: int) -> list[tuple[int, int]]:
    """Return the global batch sizes of the run as ``[(first sample, batch size), ...]``; one entry without a schedule.

    With ``rampup_batch_size`` the batch size rises ``n = (full - start) / increment`` times, evenly over the samples of
    the ramp: the i-th size holds for every step that starts in the i-th of ``n`` equal parts. A step belongs to one
    stage only, and a stage that would begin within the last step of the previous stage is left out.
    """
    sizes, ends = [full_global_batch_size(config, data_parallel_size)], list[int]()
    if config.step_batch_size_schedule:
        steps = parse_batch_steps(config.step_batch_size_schedule)
        sizes, ends = [size for _, size in steps], [tokens // config.seq_length for tokens, _ in steps[1:]]
    elif config.rampup_batch_size is not None:
        start, increment, samples = config.rampup_batch_size
        rises = (sizes[0] - start) // increment
        sizes = [start + i * increment for i in range(rises)] + sizes
        ends = [-(-samples * (i + 1) // rises) for i in range(rises)]
    stages = []
    first_sample = 0
    for size, end in zip(sizes, ends):
        if first_sample < end:
            stages.append((first_sample, size))
            first_sample += -(-(end - first_sample) // size) * size
    return [*stages, (first_sample, sizes[-1])]


def global_batch_size_at(config: TrainingConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Return the global batch size of the step that starts after ``consumed_samples``."""
    stages = batch_size_stages(config, data_parallel_size)
    return next(size for first_sample, size in reversed(stages) if first_sample <= consumed_samples)


def samples_without_rampup(config: TrainingConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Return the samples that the steps up to ``consumed_samples`` would have consumed without a ramp."""
    stages = batch_size_stages(config, data_parallel_size)
    ends = [*(first_sample for first_sample, _ in stages[1:]), consumed_samples]
    full = stages[-1][1]
    used = [(max(0, min(consumed_samples, end) - start), size) for (start, size), end in zip(stages, ends)]
    return sum(samples * full // size for samples, size in used)


def planned_samples(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the planned length of the run: ``train_samples``, or the samples of ``train_iters`` steps.

    Args:
        config: run length and batch size.
        data_parallel_size: replicas of the model.
        iteration: steps taken before the run continued with ``config``, possibly with other batch sizes.
        consumed_samples: samples consumed by those steps.
    """
    return config.train_samples or final_consumed_samples(config, data_parallel_size, iteration, consumed_samples)


def final_consumed_samples(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the samples consumed at the end of the run, up to a batch fewer than ``train_samples``.

    Arguments as for :func:`planned_samples`.
    """
    return _end(config, data_parallel_size, iteration, consumed_samples)[1]


def final_iteration(
    config: TrainingConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> int:
    """Return the steps taken at the end of the run. An incomplete last batch is not trained on.

    Arguments as for :func:`planned_samples`.
    """
    return _end(config, data_parallel_size, iteration, consumed_samples)[0]


def _end(config: TrainingConfig, data_parallel_size: int, iteration: int, consumed: int) -> tuple[int, int]:
    """Return steps and samples at the end of a run that continues after ``iteration`` steps, ``consumed`` samples.

    The start need not be a point that a run with this ramp would have reached. The step that crosses into the next
    stage is taken completely, as in :func:`global_batch_size_at`.
    """
    stages = batch_size_stages(config, data_parallel_size)
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


def lr_scale(config: RunConfig, data_parallel_size: int) -> float:
    """Return the factor of ``--lr-scaling`` on peak and minimum learning rates; 1 without it.

    It is ``k`` = full global batch / ``--lr-base-batch-size`` (linear: Goyal et al. 2017, arXiv 1706.02677), or its
    square root (Krizhevsky 2014, arXiv 1404.5997; for Adam, Malladi et al. 2022, arXiv 2205.10330). It is constant
    during a batch ramp.
    """
    scaling, base = config.optimizer.lr_scaling, config.optimizer.lr_base_batch_size
    if scaling == "none" or base is None:  # checks refuse a rule without its base
        return 1.0
    return (full_global_batch_size(config.training, data_parallel_size) / base) ** (1.0 if scaling == "linear" else 0.5)


class ScheduleLengths(NamedTuple):
    """Lengths of the learning-rate schedule, in samples from its start, which is that of the phase or of the run."""

    warmup: float  # end of the warm-up
    decay: float  # end of the decay
    final: float | None  # length of WSD's final decay; None if not set
    total: float  # end of the run


def schedule_lengths(
    config: RunConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0
) -> ScheduleLengths:
    """Return the schedule lengths of a run. Lengths in steps are converted at the full global batch size.

    Args:
        config: the run's options.
        data_parallel_size: replicas of the model.
        iteration: steps taken before the run had its present batch size. Each counts as many samples as these steps
            consumed on average, so that a warm-up or decay that has ended stays ended.
        consumed_samples: samples consumed by those steps.
    """
    optimizer = config.optimizer
    if optimizer.schedule_tokens is not None:
        in_samples = [tokens / config.training.seq_length for tokens in optimizer.schedule_tokens]
        return ScheduleLengths(in_samples[0], in_samples[1], in_samples[2] or None, in_samples[3])
    samples_per_step = full_global_batch_size(config.training, data_parallel_size)
    consumed = samples_without_rampup(config.training, data_parallel_size, consumed_samples)

    def end(samples: int | None, steps: int | None) -> int | None:
        if samples is not None or steps is None:
            return samples
        if steps >= iteration:
            return consumed + (steps - iteration) * samples_per_step
        return consumed * steps // iteration

    total = planned_samples(config.training, data_parallel_size, iteration, consumed_samples)
    decay = end(optimizer.lr_decay_samples, optimizer.lr_decay_iters)
    if decay is None:
        decay = total
    warmup = end(optimizer.lr_warmup_samples or None, optimizer.lr_warmup_iters) or 0
    final = optimizer.lr_wsd_decay_samples
    if final is None and optimizer.lr_wsd_decay_iters is not None:
        final = optimizer.lr_wsd_decay_iters * samples_per_step
    return ScheduleLengths(
        warmup if optimizer.lr_warmup_fraction is None else optimizer.lr_warmup_fraction * decay, decay, final, total
    )


def schedule_start(config: RunConfig, origin: Origin) -> float:
    """Return the samples of the run that are consumed when its schedule starts.

    With ``--schedule-tokens`` the samples of earlier phases count as many of this phase as have their tokens.
    """
    if config.optimizer.schedule_tokens is None:
        return origin.samples
    return origin.samples - origin.tokens / config.training.seq_length


LOSS_CHUNK_TOKENS, LOSS_CHUNK_BYTES = 1024, 1 << 30
"""Unit of the tokens per chunk of the loss, and the most bytes of a chunk's logits on a GPU."""


@lru_cache
def loss_chunk_tokens(tokens: int, bytes_per_token: int, on_gpu: bool) -> int:
    """Return the default of ``--cross-entropy-chunk-size``, the tokens whose logits exist at a time.

    On a GPU chunks are about equal, and as large as :data:`LOSS_CHUNK_BYTES` allows: fewer chunks are larger matrix
    products, and fewer passes over the weight's gradient.

    Args:
        tokens: of a micro-batch.
        bytes_per_token: of a rank's logits.
        on_gpu: on a CPU, a chunk is one unit.
    """
    if not on_gpu:
        return LOSS_CHUNK_TOKENS
    most, units = max(1, LOSS_CHUNK_BYTES // (bytes_per_token * LOSS_CHUNK_TOKENS)), -(-tokens // LOSS_CHUNK_TOKENS)
    return LOSS_CHUNK_TOKENS * -(-units // -(-units // most))
