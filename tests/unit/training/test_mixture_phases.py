"""Phases that read mixtures: where each begins, killed anywhere, and made longer."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.errors import UserError
from megatron.config.phases import Phase
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training.start import read_start
from tests.kit.runs import FLAGS as ALL_FLAGS
from tests.kit.runs import (
    Outcome,
    before_step,
    checkpoint,
    differences,
    kill,
    start,
    steps,
    tiny_phases,
    tiny_run,
)

FLAGS = "--position-embedding-type rope --set data.mock_data=false --vocab-size 500 --save-interval 2"
FLAGS_OF_RUNS = ALL_FLAGS.replace("--train-iters 6", "")
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


KILLED = [(6,), pytest.param((1, 3, 6, 7), marks=pytest.mark.slow)]
"""Steps after which a run is killed: in the third phase; in the first three, and before the last one."""


@pytest.mark.parametrize("killed", KILLED)
def test_phases_on_one_mixture_continue_its_sources(tmp_path: Path, killed: tuple[int, ...]) -> None:
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
    for step in killed:
        assert start(run("parts"), before_step(step + 1, kill)).status is None
    assert start(run("parts")).status == 0
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert differences(tmp_path / "parts/saved/iter_0000009", tmp_path / "whole/saved/iter_0000009") == []
    _, state = checkpoint(tmp_path / "whole/saved/iter_0000009")
    assert state["data"]["sources"] == {"web": 216, "code": 72}


def test_a_run_made_longer_reads_no_source_too_often(tmp_path: Path) -> None:
    """Of code, with 80 tokens, 6 steps read 48; half of what follows is code: the end of step 12 is 1.8 epochs."""
    run, flags = tmp_path / "run", mixture(tmp_path, ", max_epochs: 1.8")
    flags = f"{flags} --save {run}/saved"
    assert start(tiny_run(run, flags)).status == 0
    for iterations, status in ((13, 2), (12, 0)):
        longer = f"{flags} --train-iters {iterations} --resume-mode new-schedule"
        with nullcontext() if status == 0 else pytest.raises(UserError, match=r"code 2\.00 times"):
            read_start(shlex.split(f"{ALL_FLAGS} {longer}"))
            assert "both, longer" in "\n".join(read_start(shlex.split(f"{ALL_FLAGS} {longer} --check-config")).data)
        outcome = start(tiny_run(run, longer))
        assert outcome.status == status
        assert ("the run reads code 2.00 times (160 tokens of 80)" in outcome.err) == (status == 2)
    _, state = checkpoint(run / "saved/iter_0000012")
    assert state["data"]["sources"]["code"] == 144


def test_check_config_says_what_phases_will_skip(tmp_path: Path) -> None:
    """The second phase reads the data of the first, which has 8 samples and skips 1 before them."""
    data = f"{FLAGS} --split 1 --data-path {tmp_path}/web"
    mixture(tmp_path)
    phases = [{**PHASES[0], "skip_samples": ["2:3"]}, {**PHASES[1], "skip_samples": ["9:11", "15:16"]}]
    plan = tiny_phases(tmp_path, phases, data)
    flags = f"{FLAGS_OF_RUNS} {data} --save {tmp_path}/saved --phases {tmp_path}/phases.yaml --check-config"
    planned = read_start(shlex.split(flags)).phases
    (note,) = (line for line in planned[1].data if "skips" in line)
    assert "skips 4 of the first 20 training samples, 3 of them ahead" in note
    assert " ".join(note.split()) in " ".join(start(plan).out.split())
    tiny_phases(tmp_path, [phases[0], {**PHASES[1], "skip_samples": ["8:11"]}], data)
    with pytest.raises(UserError, match=r"phase p2: the samples 8:9 to skip have been consumed: this start .* at 9"):
        read_start(shlex.split(flags.replace("/saved", "/another")))
