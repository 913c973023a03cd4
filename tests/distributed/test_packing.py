"""Packed samples and fill-in-the-middle in other layouts and after a resume: the losses of one rank without an end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
from tests.distributed.resume import run_rank
from tests.kit.pool import Pool
from tests.kit.runs import column, start, tiny_run
from tests.unit.data.made_tokenizers import record

LONG = pytest.mark.slow
LAYOUTS = {
    "dp2": "--micro-batch-size 2",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2 --cp-comm-type p2p",
}
FIM = "--fim-data --fim-rate 0.7 --fim-prefix-token 26 --fim-suffix-token 27 --fim-middle-token 28 --seq-length 24"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of decimal numbers, which NullTokenizer encodes, in a blend of two sources."""
    folder, random = tmp_path_factory.mktemp("corpora"), np.random.default_rng(2)
    for name in ("wiki", "code"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for length in random.integers(1, 14, 60):
                writer.add_document([*random.integers(0, 26, length).tolist(), 30])
        record(folder / name, build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=31)))
    data = f"--set data.mock_data=false --data-path 0.7 {folder}/wiki 0.3 {folder}/code --split 1"
    masks = "--packing best-fit --reset-attention-mask --reset-position-ids"
    return f"{data} {masks} --fp64 --position-embedding-type rope --max-position-embeddings 24"


@pytest.mark.parametrize("fim", ["", pytest.param(FIM, marks=LONG)], ids=["plain", "fim"])
@pytest.mark.parametrize("layout", ["dp2", *(pytest.param(name, marks=LONG) for name in ("tp2-sp", "pp2", "cp2"))])
def test_layouts_read_the_samples_of_one_rank(pool: Pool, flags: str, tmp_path: Path, layout: str, fim: str) -> None:
    alone = start(tiny_run(tmp_path / "alone", f"{flags} {fim}"))
    outcomes = pool.run(2, run_rank, tiny_run(tmp_path / "run", f"{flags} {fim} {LAYOUTS[layout]}", 2))
    assert [outcome.status for outcome in (alone, *outcomes)] == [0, 0, 0]
    for name in ("samples-digest", "iteration"):
        assert column(tmp_path / "run", name) == column(tmp_path / "alone", name)
    assert column(tmp_path / "run", "lm loss") == pytest.approx(column(tmp_path / "alone", "lm loss"), rel=1e-10)
    assert column(tmp_path / "run", "grad-norm") == pytest.approx(column(tmp_path / "alone", "grad-norm"), rel=1e-9)


@pytest.mark.parametrize("fim", ["", FIM], ids=["plain", "fim"])
def test_a_run_continues_to_the_bit(flags: str, tmp_path: Path, fim: str) -> None:
    options = f"{flags} {fim} --eval-iters 0"
    assert start(tiny_run(tmp_path / "whole", options)).status == 0
    saved = f"{options} --save {tmp_path / 'saved'} --save-interval 2"
    assert start(tiny_run(tmp_path / "part", f"{saved} --exit-interval 4")).status == 0
    assert start(tiny_run(tmp_path / "part", f"{saved} --load {tmp_path / 'saved'}")).status == 0
    assert column(tmp_path / "part", "lm loss") == column(tmp_path / "whole", "lm loss")
    assert column(tmp_path / "part", "samples-digest") == column(tmp_path / "whole", "samples-digest")
