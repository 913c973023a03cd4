"""Phases that read mixtures: where each begins, killed anywhere, and made longer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.phases import Phase
from megatron.data.indexed_writer import IndexedDatasetWriter
from tests.kit.runs import (
    Outcome,
    before_step,
    checkpoint,
    differences,
    kill,
    start,
    steps,
    tiny_phases,
)

FLAGS = "--position-embedding-type rope --set data.mock_data=false --vocab-size 500 --save-interval 2"
WEB, CODE = range(400), range(400, 480)


def mixture(folder: Path, code: str = "") -> str:
    """Write two sources whose tokens are all different, and a mixture of two stages; return its flags."""
    for name, tokens in (("web", WEB), ("code", CODE)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for first in range(tokens.start, tokens.stop, 10):
                writer.add_document([*range(first, first + 10)])
    text = f"""
sources: {{web: {{path: {folder}/web}}, code: {{path: {folder}/code{code}}}}}
stages:
- {{name: pure, share: 50%, mix: {{web: 1}}}}
- {{name: both, mix: {{web: 1, code: 1}}}}
"""
    (folder / "mix.yaml").write_text(text)
    return f"{FLAGS} --data-mixture {folder}/mix.yaml"


PHASES: list[dict[str, Any]] = [
    {"name": f"p{number}", "tokens": tokens, "clip_grad": 1 / number}
    for number, tokens in ((1, 64), (2, 64), (3, 96), (4, 64))
]
"""8, 8, 12 and 8 samples of 8 tokens; 2, 2, 3 and 2 steps."""


def tokens_of(outcome: Outcome, first: int, last: int) -> list[int]:
    """The tokens that steps have read."""
    return [token for step in range(first, last + 1) for _, row in outcome.samples[step] for token in row]


def test_phases_on_one_mixture_continue_its_sources(tmp_path: Path) -> None:
    """Each takes all stages, so a quarter of its samples is code, and reads tokens that those before have not read."""
    flags = mixture(tmp_path)

    def run(name: str) -> list[Phase]:
        return tiny_phases(tmp_path / name, PHASES, flags)

    whole = start(run("whole"))
    assert (whole.status, whole.err) == (0, "")
    assert whole.out.count("takes the stages pure, both of") == 3
    for first, last, samples in ((1, 2, 8), (3, 4, 8), (5, 7, 12), (8, 9, 8)):
        read = tokens_of(whole, first, last)
        assert set(read[: 4 * samples]) <= set(WEB)
        assert sum(token in CODE for token in read) == 8 * samples // 4
    assert set(Counter(tokens_of(whole, 1, 9)).values()) == {1}
    for step in (1, 3, 6, 7):  # in the first three phases, and before the last one
        assert start(run("parts"), before_step(step + 1, kill)).status is None
    assert start(run("parts")).status == 0
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert differences(tmp_path / "parts/saved/iter_0000009", tmp_path / "whole/saved/iter_0000009") == []
    _, state = checkpoint(tmp_path / "whole/saved/iter_0000009")
    assert state["data"]["sources"] == {"web": 216, "code": 72}
