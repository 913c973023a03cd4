"""The page has what was measured; some cells are measured again; a bug makes each kind of cell red."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.convert.huggingface.config import build_config_json
from megatron.convert.huggingface.convert import convert_to_huggingface
from megatron.convert.huggingface.families import MODEL_FAMILIES
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from tests.cards import layouts, llama_cpp, readers, results, training, twin
from tests.cards.__main__ import main, measure, part_of_array
from tests.cards.card import CARDS
from tests.cards.cell import CardError, largest
from tests.cards.cells import CELLS
from tests.kit.cases import run_on
from tests.kit.pool import Pool
from tests.kit.processes import ROOT
from tests.parity.test_hf_convert import weights_of

CHEAP = ("files", "numbers", "text", "export")
"""Less than a second each, except of long contexts."""


def chosen() -> list[tuple[str, str]]:
    """One card for each of the cheap cells, and one for one of the others, other ones for each commit."""
    number = int(results.git("rev-parse", "HEAD")[:8], 16)
    short = [name for name, card in CARDS.items() if not card.is_long]
    others = [name for name, cell in CELLS.items() if name not in CHEAP and not cell.missing()]
    cells = [*CHEAP, others[number % len(others)]]
    return [(short[(number + 7 * i) % len(short)], cell) for i, cell in enumerate(cells)]


def test_every_family_has_a_card() -> None:
    assert {card.model_type for card in CARDS.values()} == set(MODEL_FAMILIES)
    assert {card.config.num_layers > 0 for card in CARDS.values()} == {True}


def test_the_page_has_what_was_measured() -> None:
    assert results.PAGE.read_text() == results.page(), "python -m tests.cards --write"
    assert {file.stem for file in results.FOLDER.glob("*.json")} <= set(CARDS)
    for card in CARDS:
        for cell, record in results.read(card).items():
            assert {"command", "commit", "date", "seconds"} <= record.keys(), (card, cell)
            assert bool(record.get("failure")) or not CELLS[cell].failure(record["result"]), (card, cell)


def test_a_result_is_stale_once_its_code_has_changed() -> None:
    assert results.changed(results.git("rev-parse", "HEAD"), ("LICENSE",)) is False
    first = results.git("rev-list", "--max-parents=0", "HEAD").splitlines()[0]
    assert results.changed(first, ("megatron",)) in (True, None)  # None: a shallow checkout
    assert results.changed("0" * 40, ("megatron",)) is None


def test_an_array_takes_each_card_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [[*CARDS][number::count] for number, count in (part_of_array(f"{i}/3") for i in range(3))]
    assert sorted(chain(*parts)) == sorted(CARDS)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "3")
    assert part_of_array(None) == (1, 3)


def test_a_stopped_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert main(["llama", "--cells", "files"]) == 0
    record = results.read("llama")["files"]
    assert record["result"]["different"] == 0
    assert "failure" not in record
    assert main(["llama", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()[-len(CELLS) :]
    assert ("llama files" in listed) is results.changed(record["commit"], CELLS["files"].covers)
    assert "llama numbers" in listed


@pytest.mark.parametrize(("card", "cell"), chosen())
def test_a_cell_passes_again(card: str, cell: str, pool: Pool) -> None:
    if CELLS[cell].missing():
        pytest.skip(CELLS[cell].missing())
    found, failure = measure(card, cell, pool)
    assert not failure, found


def one_bit(original: Callable[[Path], dict[str, torch.Tensor]]) -> Callable[[Path], dict[str, torch.Tensor]]:
    """Files that were written with the sign of one tensor changed."""

    def read(folder: Path) -> dict[str, torch.Tensor]:
        held = original(folder)
        last = max(held)
        return held | ({last: -held[last]} if folder.name == "back" else {})

    return read


def other_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks whose norms have another epsilon than those of one process."""
    return lambda pool, case: original(pool, replace(case, model=replace(case.model, norm_epsilon=2e-3)))


def forgetful(original: Callable[..., int]) -> Callable[..., int]:
    """A run that ends, and starts again, with another learning rate than before."""
    return lambda folder, flags, kill_after=0: original(
        folder, flags if kill_after or folder.name == "whole" else flags.replace("0.003", "0.0029"), kill_after
    )


def begins_anew(original: Callable[..., Path]) -> Callable[..., Path]:
    """A killed run whose checkpoints are gone."""

    def trained(folder: Path, flags: str) -> Path:
        if folder.name == "parts":
            rmtree(folder / "saved")
        return original(folder, flags)

    return trained


def slower(self: Any, rates: Any, *rest: Any, **more: Any) -> Any:
    """Update with a rate that is too small."""
    return UPDATE(self, replace(rates, lr=0.9 * rates.lr), *rest, **more)


def other_base(original: Callable[..., Any]) -> Callable[..., Any]:
    """An export with another base of its rotary embeddings."""

    def convert(saved: Any, folder: Path, *rest: Any, **options: Any) -> Any:
        written = original(saved, folder, *rest, **options)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5e3}))
        return written

    return convert


UPDATE = DistributedOptimizer.update
FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "files": lambda: patch.object(twin, "weights_of", one_bit(weights_of)),
    "numbers": lambda: patch.object(DistributedOptimizer, "update", slower),
    "text": lambda: patch.object(twin, "generate", lambda *a: [[0] * twin.NEW] * twin.PROMPTS),
    "curve": lambda: patch.object(DistributedOptimizer, "update", slower),
    "resume": lambda: patch.object(training, "run", forgetful(training.run)),
    "layouts": lambda: patch.object(layouts, "run_on", other_model(run_on)),
    "bytes": lambda: patch.object(layouts, "rank_state_bytes", lambda *a: {"weights": 1}),
    "export": lambda: patch.object(readers, "logits_of", lambda twins, tokens: torch.zeros(())),
    "llama.cpp": lambda: patch.object(llama_cpp, "convert_to_huggingface", other_base(convert_to_huggingface)),
}


@pytest.mark.slow
def test_a_run_that_learns_nothing_is_red(pool: Pool) -> None:
    with patch.object(training, "FLAGS", training.FLAGS.replace("0.003", "1e-9")):
        assert "the loss falls from" in measure("llama", "curve", pool)[1]


@pytest.mark.slow
def test_a_run_that_begins_anew_is_red(pool: Pool) -> None:
    with patch.object(training, "trained", begins_anew(training.trained)):
        assert "steps again is 50" in measure("llama", "resume", pool)[1]


def test_nan_and_missing_measures_are_red() -> None:
    assert math.isnan(largest([0.0, math.nan, 1.0])), "max would return 1"
    assert CELLS["files"].failure({}) == "different was not measured"
    assert CELLS["numbers"].failure(dict.fromkeys(CELLS["numbers"].bounds, math.nan))
    assert not CELLS["layouts"].failure({"TP x PP": 0.0, "CP x ZeRO-3": 0.0}), "models without experts have no EP"


def test_every_kind_of_cell_has_a_fault() -> None:
    assert FAULTS.keys() == CELLS.keys()


@pytest.mark.parametrize("cell", [c if c in CHEAP else pytest.param(c, marks=pytest.mark.slow) for c in FAULTS])
def test_a_fault_makes_a_cell_red(cell: str, pool: Pool) -> None:
    if CELLS[cell].missing():
        pytest.skip(CELLS[cell].missing())
    with FAULTS[cell]():
        assert measure("llama", cell, pool)[1]


@pytest.mark.slow
@pytest.mark.skipif(bool(llama_cpp.missing()), reason=llama_cpp.missing())
def test_a_fault_is_seen_where_llama_cpp_computes_otherwise(pool: Pool) -> None:
    with FAULTS["llama.cpp"]():
        assert "two files" in measure("mistral-window-long", "llama.cpp", pool)[1]


RIGHT = torch.tensor([[1.0, 2.0, 4.0]])
OTHER = torch.tensor([[1.0, 3.0, 2.0]])


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (RIGHT.log_softmax(-1), "KeyError", ""),
        (OTHER, OTHER, ""),
        ("KeyError", "KeyError", ""),
        (OTHER, RIGHT, "two files is"),
        (OTHER, OTHER + torch.tensor([0, 0, 1e-6]), "two files is"),
        (OTHER * torch.nan, OTHER * torch.nan, "two files is nan"),
        (OTHER, "KeyError", "computes otherwise"),
        ("KeyError", RIGHT, "only our file is refused"),
        ("KeyError", "ValueError", "only our file is refused"),
    ],
)
def test_what_llama_cpp_does_with_one_file_alone_is_red(
    ours: torch.Tensor | str, theirs: torch.Tensor | str, verdict: str
) -> None:
    try:
        failure = CELLS["llama.cpp"].failure(llama_cpp.compared(ours, theirs, RIGHT, "logits") | {"ours": 0.0})
    except CardError as error:
        failure = str(error)
    assert verdict in failure
    assert bool(verdict) == bool(failure)


def test_exports_have_what_llama_cpp_requires() -> None:
    cards = (CARDS[name] for name in ("gpt2", "dots1", "granitemoehybrid"))
    gpt2, dots1, granite = (build_config_json(card.config, kind=card.model_type) for card in cards)
    assert gpt2["n_ctx"] == gpt2["n_positions"]
    assert dots1["scoring_func"] == "sigmoid"
    assert {*granite["layer_types"]} == {"mamba", "attention"}


def test_the_row_of_readme_has_what_was_measured() -> None:
    records = [results.read(card) for card in CARDS]
    agree = sum(all("failure" not in record for record in cells.values()) for cells in records)
    worst = max(cells["numbers"]["result"]["gradients"] for cells in records)
    families = len({card.model_type for card in CARDS.values()})
    read = sum("words" not in cells["llama.cpp"]["result"] for cells in records)
    (row,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "`python -m tests.cards`" in line)
    assert f"models of {families} families against `transformers` in fp64" in row
    curve = max(cells["curve"]["result"]["beside"] for cells in records)
    found = (
        f"{agree} of {len(CARDS)} agree; largest relative error of a gradient {worst:.1e}, of 100 losses {curve:.1e}"
    )
    assert f"| {found}; llama.cpp agrees on {read} of {len(CARDS)} exports |" in row
