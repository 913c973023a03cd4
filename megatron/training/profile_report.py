"""A profile as a table: where the time of its steps went."""

from __future__ import annotations

from torch.profiler import profile

from megatron.config.run import ProfilingConfig

ROWS = 30


def report(trace: profile, steps: int, config: ProfilingConfig) -> str:
    """Text: the phases of ``steps`` steps, then the operations that took longest."""
    averages = trace.key_averages()
    total = sum(e.cpu_time_total for e in averages if e.key.startswith("step "))
    lines = [f"{steps} steps, {total / 1e3 / steps:.3f} ms each"]
    ranges = [e for e in averages if e.is_user_annotation and not e.key.startswith("step ")]
    for e in sorted(ranges, key=lambda e: -e.cpu_time_total):
        lines.append(f"{e.key:40} {e.cpu_time_total / 1e3 / steps:12.3f} ms {e.cpu_time_total / total:7.1%}")
    return "\n".join([*lines, "", averages.table(sort_by="self_cpu_time_total", row_limit=ROWS)])
