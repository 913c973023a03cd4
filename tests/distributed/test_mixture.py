"""Runs on a mixture: the same samples and losses of sources in every layout, and after every resume."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.training.build import build_trainer
from megatron.training.components.source_losses import SOURCE_LOSS
from tests.kit.pool import Pool
from tests.kit.runs import before_step, kill, records, start, steps, tiny_run
from tests.unit.data.pairs import write

MIXTURE = """
sources: {{web: {folder}/web, code: [{folder}/code, {folder}/more], tiny: {folder}/tiny}}
stages:
  - {{name: warm-up, share: 20%, mix: {{web: 3, tiny: 2}}}}
  - {{name: main, tokens: 72, mix: {{web: 1, code: {{tokens: 24}}}}}}
  - {{name: anneal, mix: {{code: 2, tiny: 1}}}}
"""
"""Of 24 samples of 8 tokens, stages begin at sample 5 and at 14: within the steps of 4 samples."""

FLAGS = "--fp64 --no-mock-data --train-iters 6 --log-loss-per-source"

LAYOUTS = {
    "tp2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "dp2, micro-batches of 2": "--micro-batch-size 2",
    "dp2, padded": "--micro-batch-size 3 --pad-global-batch --data-parallel-sharding-strategy optim_grads_params",
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    for number, (name, documents) in enumerate({"web": 30, "code": 9, "more": 5, "tiny": 2}.items()):
        texts = [[(7 * i + 3 * k + number) % 31 for k in range(1 + i % 6)] for i in range(documents)]
        write(folder / name, texts)
    (folder / "mixture.yaml").write_text(MIXTURE.format(folder=folder))
    return folder / "mixture.yaml"


Lines = list[dict[str, float]]


def source_losses(folder: Path) -> Lines:
    return [{n: x for n, x in line.items() if n.startswith(SOURCE_LOSS)} for line in records(folder)]


def run(rank: int, world_size: int, flags: str, folder: Path) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
    outcome = start(tiny_run(folder, flags, world_size), rank=rank, world_size=world_size)
    assert outcome.status == 0, outcome.err
    return outcome.samples


@pytest.fixture(scope="module")
def alone(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(0, 1, f"--data-mixture {mixture} {FLAGS}", folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_reads_the_same_and_logs_the_same_losses(
    pool: Pool, mixture: Path, alone: tuple[Path, dict[int, Any]], tmp_path: Path, name: str
) -> None:
    ranks = pool.run(2, run, f"--data-mixture {mixture} {FLAGS} {LAYOUTS[name]}", tmp_path)
    folder, samples = alone
    if "cp" not in name:  # whole samples
        assert {s: {pair for rank in ranks for pair in rank[s]} for s in samples} == {
            s: set(pairs) for s, pairs in samples.items()
        }
    got, expected = source_losses(tmp_path), source_losses(folder)
    assert [line.keys() for line in got] == [line.keys() for line in expected]
    for line, other in zip(got, expected):
        assert line == pytest.approx(other, rel=1e-10)


def test_losses_are_those_of_the_samples_of_each_source(mixture: Path, alone: tuple[Path, dict[int, Any]]) -> None:
    """Micro-batches of one sample: their summed losses, by the files that the samples are read from."""
    trainer = build_trainer(tiny_run(Path("unused"), f"--data-mixture {mixture} {FLAGS}"), 0, 1)
    (chunk,) = trainer.chunks.values()
    found: defaultdict[str, list[float]] = defaultdict(list)

    def see(module: nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        spans = trainer.data.datasets["train"].spans(int(inputs[1].sample_ids))
        (source,) = {{"more": "code"}.get(name := Path(span.source).name, name) for span in spans}
        found[source].append(output[0].item() / 8)

    chunk.register_forward_hook(see)
    trainer.compute(trainer.next_batches(), None)
    expected = {f"{SOURCE_LOSS}{source}": sum(losses) / len(losses) for source, losses in found.items()}
    assert source_losses(alone[0])[0] == pytest.approx(expected, rel=1e-12)
    assert {source: len(losses) for source, losses in found.items()} == {"web": 3, "tiny": 1}
    dataset, samples = trainer.data.datasets["train"], alone[1]
    for step, line in enumerate(records(alone[0]), 1):  # each covers its own step
        losses = [line[f"{SOURCE_LOSS}{dataset.source_of(i)}"] for i, _ in samples[step]]
        assert sum(losses) / 4 == pytest.approx(line["lm loss"], rel=1e-12)


def test_a_run_that_is_killed_anywhere_continues_exactly(
    mixture: Path, alone: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    config = tiny_run(tmp_path, f"--data-mixture {mixture} {FLAGS} --save {tmp_path}/save --save-interval 1")
    read: dict[int, Any] = {}
    for step in (2, 3, 5):
        read |= start(config, before_step(step, kill)).samples
    outcome = start(config)
    assert outcome.status == 0, outcome.err
    folder, samples = alone
    assert read | outcome.samples == samples
    assert steps(tmp_path) == steps(folder)


def test_a_longer_run_keeps_its_samples_and_continues_the_last_stage(
    mixture: Path, alone: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    flags = f"--data-mixture {mixture} {FLAGS} --save {tmp_path}/save"
    first = run(0, 1, flags, tmp_path)
    assert first == alone[1]
    outcome = start(tiny_run(tmp_path, f"{flags} --train-iters 9 --resume-mode new-schedule"))
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.samples) == [7, 8, 9]
    assert "keep the order that was planned; 12 further samples follow" in outcome.out
    names = {name.removeprefix(SOURCE_LOSS) for line in source_losses(tmp_path)[6:] for name in line}
    assert names == {"code", "tiny"}


def test_another_mixture_is_refused_with_what_differs(mixture: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mixture.yaml"
    copy.write_text(mixture.read_text())
    flags = f"--data-mixture {copy} {FLAGS} --save {tmp_path}/save"
    run(0, 1, f"{flags} --exit-interval 4", tmp_path)
    for old, new, difference in [
        ("tokens: 24", "tokens: 32", "stage main: code tokens 24 -> tokens 32"),
        ("share: 20%", "share: 25%", "stage warm-up: 20% of the run -> 25% of the run"),
        ("name: anneal", "name: end", "stages: warm-up, main, anneal -> warm-up, main, end"),
    ]:
        copy.write_text(mixture.read_text().replace(old, new))
        outcome = start(tiny_run(tmp_path, flags))
        assert outcome.status != 0
        assert "E815" in outcome.err
        assert difference in outcome.err
