"""Numbers and flags of docs/memory.md match the planner and the parser."""

from __future__ import annotations

import re

import pytest

from megatron.arguments.cli import parse
from megatron.config.parallel import ZERO_STAGES
from megatron.config.run import RunConfig
from megatron.planner.memory import STATE_KINDS, data_parallel_traffic, max_host_bytes, max_peak_bytes
from tests.unit.pages import page

TEXT = page("memory")
RANKS, LIMIT = 4, 23
RUN = (
    f"--mock-data --train-iters 1 --check-config --preset llama2-7b --bf16 --global-batch-size 64 --world-size {RANKS}"
)
STANDS_FOR = dict(re.findall(r'"(\w+)"(?: stands)? for\s+`([^`]+)`', TEXT))
ROWS = [row.strip("| ").split(" | ") for row in TEXT.splitlines() if re.search(r"\| (yes|no) \|$", row)]


def config_of(flags: str) -> RunConfig:
    return parse([*RUN.split(), *flags.split()], {}).config


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_forecasts_match_the_planner(row: list[str]) -> None:
    flags, state, peak, host, sent, fits = row
    words = flags.replace("`", "").replace(" full", f" {STANDS_FOR['full']}").replace(" low", f" {STANDS_FOR['Low']}")
    config = config_of(words)
    parts = max_peak_bytes(config, RANKS)
    gibibytes = [
        sum(parts[kind] for kind in STATE_KINDS),
        sum(parts.values()),
        sum(max_host_bytes(config, RANKS).values()),
    ]
    assert [state, peak, host] == [f"{count / 2**30:.2f}" if count else "0" for count in gibibytes]
    assert sent == f"{sum(data_parallel_traffic(config, RANKS).values()) / 2**30:.1f}"
    assert fits == ("yes" if float(peak) < LIMIT else "no")


def test_stages_send_the_messages_of_the_table() -> None:
    """With m micro-batches; ZeRO-3 with resharding gathers a little less, as the last block is gathered once."""
    m = 16
    weights = 2 * 6_738_415_616
    formulas = re.findall(r"^\| ZeRO-(\d).*\| ([^|]*) \|$", TEXT, re.MULTILINE)
    for (stage, formula), more in zip(formulas, ("", "", "", "", "--no-reshard-after-forward"), strict=True):
        strategy = {number: name for name, number in ZERO_STAGES.items()}[int(stage)]
        config = config_of(f"--data-parallel-sharding-strategy {strategy} {more}")
        terms = [re.fullmatch(r"(\d?)(m?)([BW])", term) for term in formula.split(" + ")]
        size = {"B": 2 * weights, "W": weights}
        expected = sum(int(t[1] or 1) * (m if t[2] else 1) * size[t[3]] for t in terms if t) * (RANKS - 1) / RANKS
        assert all(terms)
        assert sum(data_parallel_traffic(config, RANKS).values()) == pytest.approx(expected, rel=0.02), formula
