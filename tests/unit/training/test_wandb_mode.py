from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.loggers.wandb import check_wandb_mode, open_failure_message, wandb_disabled

KEPT = "; j keeps the rows and sends them when this run is resumed from a checkpoint"


def test_a_mode_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="WANDB_MODE=foo is unknown: the modes are online, offline, disabled"):
        check_wandb_mode({"WANDB_MODE": "foo"})
    for variables in ({}, {"WANDB_MODE": ""}, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "dryrun"}):
        check_wandb_mode(variables)


def test_it_is_off_where_it_is_disabled() -> None:
    assert wandb_disabled({"WANDB_MODE": "disabled"})
    assert not wandb_disabled({"WANDB_MODE": "offline"})
    assert not wandb_disabled({})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No", name="x"), "it needs a package that is not installed (x): pip install wandb"),
        (
            RuntimeError("No API key configured. Use `wandb login` to log in."),
            "no user is logged in: wandb login, or WANDB_MODE=offline",
        ),
        (TimeoutError("It took\n  too long."), "It took too long: WANDB_MODE=offline writes to this disk"),
        (TimeoutError(), "it raised TimeoutError: WANDB_MODE=offline writes to this disk"),
    ],
)
def test_what_kept_the_client_from_opening_comes_with_what_mends_it(error: Exception, told: str) -> None:
    assert open_failure_message(error, Path("j")) == told + KEPT
