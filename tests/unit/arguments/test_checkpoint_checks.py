"""What is refused of folders of checkpoints, on folders that are made here; the words are in the golden file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.cli import parse
from megatron.checkpoint import object_store
from megatron.checkpoint.object_store import RemotePath
from megatron.config.errors import Problem, UserError

RUN = "--mock-data --vocab-size 257 --train-iters 100"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("ckpt/iter_0000100", "other"):
        (tmp_path / folder).mkdir(parents=True)


def told(flags: str) -> list[Problem]:
    try:
        parse(shlex.split(f"{RUN} {flags}"), {})
    except UserError as error:
        return list(error.problems)
    return []


def notes(flags: str) -> tuple[str, ...]:
    return parse(shlex.split(f"{RUN} {flags}"), {}).notes


@pytest.mark.parametrize(
    "flags",
    [
        "--save new/and/deep",
        "--save ckpt --load ckpt --save-interval 10 --keep-last 2 --keep-every 100",
        "--save new --load new",  # the first start of a command that is started again and again
        "--save new --load ./new",
        "--save new --load ckpt --resume-mode weights-only",
        "--save new --load ckpt --finetune",
        "--save ckpt --resume-mode new-schedule",
        "--save ckpt --override-opt_param-scheduler --load ckpt",
        "--save new --load ckpt/iter_0000100",
        "--save new --load ckpt/iter_0000100 --ckpt-step 100",
        "--load ckpt --ckpt-step 0",
        "--load other --resume-mode new-schedule",
        "--save new --local-save /disk/{node}/a --local-save-interval 10",
        "--save ckpt --load gone",  # where the run once began; it goes on from its own
        "--save ckpt --lr-warmup-samples 200",  # which depends on where the run is: judged when that is known
        "--load ckpt/iter_0000100 --lr-warmup-samples 200",
        "--exit-duration-in-mins 0.5",
        "--exit-duration-in-mins 230",
    ],
)
def test_what_goes_together_is_accepted(flags: str) -> None:
    assert told(flags) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--local-save here --local-save-interval 5", "--local-save needs --save"),
        ("--save new --local-save here", "--local-save needs --local-save-interval"),
        ("--save new --local-save ./new --local-save-interval 5", "--local-save ./new is the --save folder"),
        ("--save new --local-save 'a/{host}' --local-save-interval 5", "{host} is not a placeholder"),
        ("--save new --local-save '' --local-save-interval 5", "--local-save '' is empty"),
    ],
)
def test_the_second_place_needs_a_first_one(flags: str, words: str) -> None:
    (problem,) = told(flags)
    assert problem.code == "E804"
    assert words in problem.sentence
    assert problem.fixes


def test_steps_that_only_the_nodes_would_have_are_told() -> None:
    local = "--save new --local-save here --local-save-interval 5"
    assert any(note.startswith("--local-save without --save-interval") for note in notes(local))
    assert not any("--local-save" in note for note in notes(f"{local} --save-interval 100"))


@pytest.mark.parametrize("flags", ["", "--save other", "--save new --load other"])
def test_a_schedule_is_judged_from_the_start_where_there_is_nothing_to_go_on_from(flags: str) -> None:
    assert [p.code for p in told(f"{flags} --lr-warmup-samples 200")] == ["E403"]


def test_a_folder_that_cannot_be_written_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "other" and real(path, mode))
    (problem,) = told("--save other/deep/er")
    assert (problem.code, problem.sentence) == ("E802", "--save other/deep/er: other is not writable")
    assert told("--save ckpt") == []


def test_checkpoints_of_megatron_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("100")
    assert [p.code for p in told("--load ckpt")] == ["E801"]
    (problem,) = told("--load ckpt --save ckpt")
    assert (problem.code, problem.fixes) == ("E802", ("--save ckpt-new",))


def test_a_misspelt_folder_is_offered() -> None:
    assert told("--load ckpts")[0].fixes == ("--load ckpt",)
    assert told("--load nothing/like/this")[0].fixes == ("drop --load",)


def test_a_checkpoint_and_a_step_that_is_not_its() -> None:
    (problem,) = told("--load ckpt/iter_0000100 --ckpt-step 200")
    assert (problem.code, problem.fixes) == ("E803", ("--load ckpt", "--set checkpoint.ckpt_step=null"))


def test_a_new_run_from_one_of_the_old_ones_checkpoints() -> None:
    (problem,) = told("--load ckpt/iter_0000100 --save ckpt --finetune")
    assert problem.fixes[0] == "--load ckpt/iter_0000100 --save ckpt-new"
    assert told(f"--finetune {problem.fixes[0]}") == []


def test_links_are_followed_to_see_whether_it_is_one_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    assert [p.code for p in told("--load link --save ckpt --finetune")] == ["E803"]


def test_a_run_that_would_save_only_at_its_end_is_told() -> None:
    assert notes("--save ckpt") == (
        "--save without --save-interval: checkpoints are written only when the run ends or is stopped",
    )
    assert notes("--save ckpt --save-interval 10") == ()


def test_a_folder_about_which_something_unreadable_was_said_is_not_looked_at() -> None:
    assert [p.code for p in told("--load a b --save c d --finetune")] == ["E002", "E002"]


@pytest.mark.parametrize(
    ("flags", "code", "sentence", "fix"),
    [
        ("--save zz://b/run", "E802", "--save zz://b/run: zz:// is not a known kind of store", "pip install"),
        (
            "--load gs://b/run",
            "E801",
            "--load gs://b/run needs a library that is not installed: gcsfs",
            "pip install gcsfs",
        ),
        ("--save s3://", "E802", "--save s3:// has no bucket", "--save s3://BUCKET/RUN"),
        ("--save memory://r/iter_0000100", "E802", "--save memory://r/iter_0000100 is one", "--save memory://r"),
        (
            "--save memory://r --nproc 2",
            "E802",
            "--save memory://r: 2 ranks do not share memory",
            "--save A_FOLDER",
        ),
        (
            "--load memory://r/iter_5 --ckpt-step 6",
            "E803",
            "--load memory://r/iter_5 and --ckpt-step 6",
            "--load memory://r",
        ),
        (
            "--save memory://r --load memory://r --resume-mode weights-only",
            "E803",
            "weights-only starts",
            "--load memory",
        ),
        (
            "--save memory://r --local-save s3://b/x --local-save-interval 5",
            "E804",
            "--local-save s3://b/x is in an object store",
            "--save s3://b/x",
        ),
    ],
)
def test_places_in_object_stores(
    flags: str, code: str, sentence: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "find_spec", lambda name: None if name == "gcsfs" else name)
    flags, _, ranks = flags.partition(" --nproc ")
    with pytest.raises(UserError) as caught:
        parse(shlex.split(f"{RUN} {flags}"), {"WORLD_SIZE": ranks or "1", "RANK": "0"})
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.sentence.startswith(sentence)
    assert problem.fixes[0].startswith(fix)


def test_what_an_object_store_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RemotePath("memory://checks/run")
    assert told(f"--save {place} --load {place} --save-interval 10") == []
    assert not holds_checkpoints(str(place))
    (place / "iter_0000100" / "COMPLETE").write_bytes(b"")
    assert holds_checkpoints(str(place))
    assert holds_checkpoints(f"{place}/iter_0000100")

    def silent(path: RemotePath) -> list[RemotePath]:
        with object_store.translate_errors(path):
            raise TimeoutError

    monkeypatch.setattr(RemotePath, "folders", silent)
    assert holds_checkpoints("memory://another")  # it may; whoever opens it says what is wrong


def test_a_missing_library_is_told_once() -> None:
    """Not also as a checkpoint that cannot be looked for."""
    lost = Problem("E811", "checkpoints cannot be looked for")

    def recall(options: object) -> None:
        raise UserError([lost])

    for flags, codes in (("--save zz://b/run", ["E802"]), ("--save new --micro-batch-size 0", ["E811", "E600"])):
        with pytest.raises(UserError) as refused:
            parse(shlex.split(f"{RUN} {flags}"), {}, recall)
        assert [problem.code for problem in refused.value.problems] == codes


@pytest.mark.parametrize(("interval", "told"), [(5, False), (10, True), (20, True), (15, False)])
def test_local_saves_at_the_steps_of_durable_ones(interval: int, told: bool) -> None:
    message = notes(f"--save new --save-interval 10 --local-save /disk/a --local-save-interval {interval}")
    assert any("do not reduce the steps lost" in note for note in message) == told
