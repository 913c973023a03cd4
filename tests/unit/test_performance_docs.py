"""The conventions, names and choices in docs/performance.md match the code."""

from __future__ import annotations

import re

from megatron.arguments.cli import parse
from megatron.config.compute import KERNEL_CANDIDATES
from megatron.config.parallel import ZERO_STAGES
from megatron.planner.flops import FlopsPerToken, matmul_parameters
from megatron.planner.memory import data_parallel_traffic
from megatron.training.loggers.console import METRICS
from tests.unit.pages import ROOT, page, rows

TEXT = page("performance")
PLAIN = TEXT.replace("`", "")


def test_flops_of_the_presets() -> None:
    for preset, seq_length, *message in rows(PLAIN, "model"):
        argv = ["--preset", preset, "--seq-length", seq_length, "--mock-data", "--train-iters", "1"]
        config = parse([*argv, "--recompute-granularity", "full"], {}).config
        flops = FlopsPerToken.from_config(config)
        counts = (flops.full, flops.causal, flops.hardware, flops.megatron)
        assert message == [f"{matmul_parameters(config.model) / 1e6:.1f}M", *(f"{count / 1e9:.3f}" for count in counts)]


def test_the_table_lists_all_kernels() -> None:
    assert {operation: tuple(names.split(", ")) for operation, names in rows(PLAIN, "operation")} == KERNEL_CANDIDATES


def test_metrics_of_the_tables_exist() -> None:
    logged = METRICS.keys() | {"communication-tp"}
    for _, metrics, _ in rows(PLAIN, "column"):
        assert set(re.findall(r"[a-z][a-z-]+", metrics.replace("...", ""))) <= logged
    assert {metric for metric, *_ in rows(PLAIN, "metric")} <= logged


def test_bytes_of_zero_match_the_formula() -> None:
    run = "--preset llama2-7b --bf16 --mock-data --train-iters 1 --micro-batch-size 1 --world-size 8 --check-config"
    strategies = dict(zip("012", ZERO_STAGES))
    for stage, instances, *cells in rows(PLAIN, "ZeRO"):
        for microbatches, cell in zip((1, 4, 16), cells, strict=True):
            flags = f"--data-parallel-sharding-strategy {strategies[stage]} --global-batch-size {8 * microbatches}"
            flags += f" --num-distributed-optimizer-instances {instances}"
            configs = [parse(f"{run} {flags} {wire}".split(), {}).config for wire in ("", "--grad-reduce-in-bf16")]
            assert cell == " / ".join(f"{sum(data_parallel_traffic(c, 8).values()) / 2**30:.1f}" for c in configs)


def test_every_figure_has_its_command() -> None:
    for _, commands, result in rows(PLAIN, "what"):
        name = re.findall(r"python -m benchmarks\.(\w+)", commands)[0]
        assert (ROOT / "benchmarks" / f"{name}.py").exists()
        assert result == f"[{name}](../benchmarks/results/{name}.md)"
    assert {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md")} <= {
        re.findall(r"benchmarks\.(\w+)", commands)[0] for _, commands, _ in rows(PLAIN, "what")
    }
