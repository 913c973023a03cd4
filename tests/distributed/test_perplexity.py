"""Perplexity does not depend on the layout of the ranks that measure it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.evaluate.perplexity import main
from tests.distributed.test_generate import run_tool
from tests.kit.checkpoints import save_model
from tests.kit.pool import Pool
from tests.kit.solo import Solo, tiny

TEXT = "Four windows, and a part of a fifth, of 16 tokens each: so ranks have unequal work.\n"
LAYOUTS = {
    "dp3": (3, 1, 1),
    "tp2": (2, 2, 1),
    "pp2": (2, 1, 2),
    "tp2-pp2": (4, 2, 2),
}


ALL = [pytest.param(task, [*LAYOUTS], marks=pytest.mark.slow) for task in ("perplexity", "lambada")]


@pytest.mark.parametrize(("task", "names"), [("perplexity", ["pp2"]), ("lambada", ["tp2"]), *ALL])
def test_measurements_of_a_layout_match_one_process(pool: Pool, tmp_path: Path, task: str, names: list[str]) -> None:
    chunk = Solo.build(tiny(vocab_size=257, num_layers=4, position_embedding_type="rope")).chunk
    save_model(chunk, tmp_path / "save", params_dtype="fp64")
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": TEXT[: 30 + 7 * i].rstrip()}) + "\n" for i in range(6)))
    flags = f"--load {tmp_path}/save --data {data} --task {task} --micro-batch-size 2 --device cpu --output"
    assert main([*flags.split(), str(tmp_path / "one.json")]) == 0
    expected = json.loads((tmp_path / "one.json").read_text())
    for name in names:
        ranks, tp, pp = LAYOUTS[name]
        layout = f"{tmp_path}/{name}.json --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
        done = pool.run(ranks, run_tool, [*flags.split(), *layout.split()], main)
        assert [status for status, *_ in done] == [0] * ranks
        assert [bool(out) for _, out, _ in done] == [True] + [False] * (ranks - 1)
        assert json.loads((tmp_path / f"{name}.json").read_text()) == pytest.approx(expected, rel=1e-10)


def test_a_layout_that_does_not_fit_is_refused(pool: Pool, tmp_path: Path) -> None:
    save_model(Solo.build(tiny(vocab_size=257), torch.float32).chunk, tmp_path / "save")
    (tmp_path / "text.txt").write_text(TEXT)
    flags = f"--load {tmp_path}/save --data {tmp_path}/text.txt --device cpu --pipeline-model-parallel-size 4"
    first, second = pool.run(2, run_tool, flags.split(), main)
    assert first[0] == second[0] == 2
    assert "2 ranks are not a multiple of TP x PP x CP = 4" in first[2]
