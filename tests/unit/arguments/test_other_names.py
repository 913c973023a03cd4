from __future__ import annotations

import re

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.megatron_flags import foreign_flags
from megatron.config.errors import Problem, UserError
from megatron.config.settings import SPELLINGS
from tests.unit.arguments.test_megatron_flags import NAMES

FLAGS = foreign_flags()
RUN = ["--mock-data", "--vocab-size", "257", "--train-iters", "10"]


def test_they_are_names_of_others_and_lead_to_ours() -> None:
    theirs = [*FLAGS.renamed, *FLAGS.replaced]
    assert len(theirs) == len(set(theirs))
    assert [name for name in theirs if name in SPELLINGS or name in NAMES] == []
    assert set(FLAGS.renamed.values()) <= set(SPELLINGS)
    for name, flag in FLAGS.replaced.items():
        offered = set(re.findall(r"--[\w-]+", " ".join(flag.instead)))
        assert offered <= {*SPELLINGS, name, "--nproc-per-node"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nproc 2", "--nproc: no such flag; it belongs to the launcher"),
        ("--nproc_per_node=2", "--nproc_per_node: no such flag; it belongs to the launcher"),
    ],
)
def test_the_launchers_flags_are_given_to_the_launcher(words: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        parse([*RUN, *words.split()], {})
    assert error.value.problems == (Problem("E001", told, ("torchrun --nproc-per-node 2 pretrain_gpt.py",)),)


def test_the_mode_of_wandb_is_said_by_the_environment() -> None:
    with pytest.raises(UserError, match=r"--wandb-mode: no such flag; [^|]+ fix: WANDB_MODE=offline \|"):
        parse([*RUN, "--wandb-mode", "offline"], {})


@pytest.mark.parametrize(
    "flag",
    [
        "--log-batch-size-to-tensorboard",
        "--no-log-learnig-rate-to-tensorboard",
        "--log-learning-rate-to-tensorboard",
        "--log-loss-scale-to-tensorboard",
        "--log-timers-to-tensorboard",
        "--no-log-loss-scale-to-tensorboard",
    ],
)
def test_what_megatron_asked_for_in_tensorboard_is_there_anyhow(flag: str) -> None:
    (note,) = parse([*RUN, flag], {}).notes
    assert note.startswith(f"ignored: {flag} because console, metrics.jsonl, TensorBoard and Weights & Biases get")


@pytest.mark.parametrize("name", FLAGS.renamed)
def test_the_value_goes_with_the_name(name: str) -> None:
    with pytest.raises(UserError) as error:
        parse([*RUN, name.replace("-", "_").replace("__", "--", 1), "7"], {})
    assert error.value.problems[0].fixes == (f"{FLAGS.renamed[name]} 7",)


@pytest.mark.parametrize("words", [["--data-impl", "mmap"], ["--dataset-impl=infer"]])
def test_values_that_ask_for_what_is_done_anyhow_are_ignored_and_told(words: list[str]) -> None:
    with_it, without = parse([*RUN, *words], {}), parse(RUN, {})
    assert with_it.config == without.config
    assert set(with_it.notes) - set(without.notes) == {
        f"ignored: {' '.join(words).replace('=', ' ')} because token files are always memory-mapped"
    }


def test_a_field_that_another_name_means_is_not_judged_by_its_default() -> None:
    with pytest.raises(UserError) as error:
        parse(["--mock-data", "--vocab-size", "257", "--max-steps", "10"], {})
    assert [problem.code for problem in error.value.problems] == ["E001"]
