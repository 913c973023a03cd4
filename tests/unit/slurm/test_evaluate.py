"""``slurm/evaluate.sh`` takes the configuration of any run that the recipes start."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.sources import to_yaml
from megatron.config.errors import UserError
from tests.unit.slurm.recipes import TRAINING, Started
from tests.unit.slurm.test_recipes import SMALL_NODES


@pytest.mark.parametrize("recipe", TRAINING)
def test_save_and_layout_flags_of_a_run_do_not_stop_its_evaluation(recipe: str, tmp_path: Path) -> None:
    nodes = str(SMALL_NODES[recipe])
    config = Started.by(recipe, SMALL="1", RUN=str(tmp_path), SLURM_JOB_NUM_NODES=nodes).config()
    assert config.checkpoint.keep_last
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    evaluation = Started.by("evaluate", SMALL="1", RUN=str(tmp_path), SLURM_JOB_NUM_NODES="1")
    with pytest.raises(UserError) as refused:
        parse([*evaluation.flags, "--check-config", "--world-size", str(evaluation.world_size)], environ={})
    assert [problem.code for problem in refused.value.problems] == ["E312"], "nothing but that there is no checkpoint"
