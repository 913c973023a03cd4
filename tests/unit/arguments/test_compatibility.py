"""What may change between a checkpoint and the run that starts from it."""

from __future__ import annotations

import shlex
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.compatibility import (
    ALLOWED_ROLES,
    CHANGE_ERRORS,
    ConfigComparison,
    compare_configs,
)
from megatron.arguments.sources import to_dict
from megatron.config.option import Role
from megatron.config.run import RESUME_MODES, RunConfig
from megatron.config.settings import SETTINGS

RUN = "--data-path corpus --vocab-size 257 --train-iters 100 --global-batch-size 8 --save ckpt"


@pytest.fixture(autouse=True)
def _there_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("corpus.bin", "corpus.idx", "other.bin", "other.idx"):
        (tmp_path / name).touch()


@cache
def run(flags: str = "", base: str = RUN, ranks: int = 1) -> RunConfig:
    return parse(shlex.split(f"{base} {flags}"), {"RANK": "0", "WORLD_SIZE": str(ranks)}).config


def compared(then: str = "", now: str = "", mode: str = "exact", ranks: int = 1) -> ConfigComparison:
    return compare_configs(to_dict(run(then)), run(now, ranks=ranks), mode)


def codes(comparison: ConfigComparison) -> list[str]:
    return [problem.code for problem in comparison.problems]


def test_every_option_has_one_role() -> None:
    assert all(isinstance(setting.option.role, Role) for setting in SETTINGS.values())
    assert set(ALLOWED_ROLES) == set(RESUME_MODES)
    assert set(CHANGE_ERRORS) == set(Role) - set.intersection(*ALLOWED_ROLES.values())


@pytest.mark.parametrize("mode", RESUME_MODES)
def test_an_unchanged_run_has_nothing_to_tell(mode: str) -> None:
    assert compared("--swiglu", "--swiglu", mode) == ConfigComparison((), (), frozenset())


def test_changes_are_told_by_flag() -> None:
    printed = compared(
        "--tensor-model-parallel-size 1 --overlap-grad-reduce",
        "--tensor-model-parallel-size 4 --no-overlap-grad-reduce --eval-interval 5 --bf16 --recompute-activations",
        ranks=4,
    )
    assert printed.problems == ()
    assert printed.lines == (
        "--tensor-model-parallel-size: checkpoint 1 -> now 4",
        "--overlap-grad-reduce: checkpoint on -> now off",
        "--params-dtype: checkpoint fp32 -> now bf16",
        "--eval-interval: checkpoint not set -> now 5",
        "--recompute-granularity: checkpoint not set -> now selective",
    )


CHANGES = {
    Role.SHAPE: ("--num-layers 3", "--vocab-size 300", "--max-position-embeddings 2048", "--swiglu"),
    Role.FUNCTION: ("--norm-epsilon 1e-6", "--window-size 100", "--activation relu2"),
    Role.DATA: ("--seq-length 512 --max-position-embeddings 1024", "--seed 5", "--split 9,1,0"),
    Role.STATE: ("--optimizer sgd",),
    Role.SCHEDULE: ("--lr 1e-3", "--global-batch-size 16", "--train-iters 200", "--hidden-dropout 0"),
    Role.FREE: ("--micro-batch-size 2", "--on-nonfinite skip", "--eval-iters 3", "--init-method-std 0.01"),
}


@pytest.mark.parametrize("mode", RESUME_MODES)
@pytest.mark.parametrize(("role", "flags"), [(role, flags) for role, all_ in CHANGES.items() for flags in all_])
def test_a_change_is_approved_or_refused_by_its_role(role: Role, flags: str, mode: str) -> None:
    comparison = compared("", flags, mode)
    assert (comparison.problems == ()) == (role in ALLOWED_ROLES[mode])
    assert mode == "weights-only" or comparison.lines[0].startswith(flags.split()[0]) or role is Role.SHAPE


@pytest.mark.parametrize("flags", [flags for all_ in CHANGES.values() for flags in all_])
def test_what_is_offered_undoes_the_change(flags: str) -> None:
    saved = to_dict(run())
    for problem in compare_configs(saved, run(flags), "exact").problems:
        assert problem.code not in codes(compare_configs(saved, run(f"{flags} {problem.fixes[0]}"), "exact"))
        for way_out in problem.fixes[1:]:
            config = run(f"{flags} --load ckpt --save new {way_out}")
            assert codes(compare_configs(saved, config, config.checkpoint.resume_mode)) == []


@pytest.mark.parametrize(
    ("then", "now", "fixes"),
    [
        ("--lr 2e-4", "--lr 3e-4", "--lr 0.0002"),
        ("--set train_samples=800", "--train-iters 200", "--set training.train_samples=800"),
        ("--lr-warmup-fraction 0.1", "--lr-warmup-iters 3", "--set optimizer.lr_warmup_fraction=0.1"),
        ("--lr-warmup-fraction 0.1", "", "--lr-warmup-fraction 0.1"),
        ("", "--lr-decay-iters 90", "--set optimizer.lr_decay_iters=null"),
        ("", "--disable-bias-linear", "--set model.add_bias_linear=True"),
        ("--rampup-batch-size 2 2 40", "", "--rampup-batch-size 2 2 40"),
    ],
)
def test_the_checkpoints_values_can_be_pasted(then: str, now: str, fixes: str) -> None:
    (problem,) = compared(then, now).problems
    assert problem.fixes[0] == fixes


def test_all_changes_of_a_kind_are_one_problem() -> None:
    (problem,) = compared("", "--lr 3e-4 --clip-grad 2").problems
    assert problem.sentence == (
        "the batch, the length or the schedule is not the checkpoint's: "
        "--lr: checkpoint 0.0001 -> now 0.0003; --clip-grad: checkpoint 1 -> now 2"
    )


@pytest.mark.parametrize(
    ("flags", "own", "schedule", "anew"),
    [
        ("", True, "", "--load ckpt --save ckpt-new "),  # of two starts with one folder, the second finds the first
        ("--load ckpt", True, "", "--load ckpt --save ckpt-new "),
        ("--load elsewhere", True, "--load ckpt ", "--load ckpt --save ckpt-new "),
        ("--load elsewhere", False, "", ""),
    ],
)
def test_a_resume_mode_is_offered_with_what_it_is_about(flags: str, own: bool, schedule: str, anew: str) -> None:
    comparison = compare_configs(to_dict(run()), run(f"{flags} --optimizer sgd --lr 1"), "exact", own=own)
    assert [problem.fixes[1] for problem in comparison.problems] == [
        f"{anew}--resume-mode weights-only",
        f"{schedule}--resume-mode new-schedule",
    ]


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        ("", "--lr-decay-iters 100", True),  # which is the whole run
        ("", "--lr-decay-samples 800 --train-iters 300", True),  # the schedule as it was, then the minimum
        ("", "--train-iters 300", False),
        ("--lr-decay-style constant", "--lr-decay-style constant --train-iters 300", True),
        ("--lr-decay-style constant --lr-warmup-fraction 0.1",) * 2 + (True,),
        (
            "--lr-decay-style constant --lr-warmup-fraction 0.1",
            "--lr-decay-style constant --lr-warmup-fraction 0.1 --train-iters 300",
            False,
        ),
        ("--lr-warmup-iters 10", "--lr-warmup-samples 80", True),
        ("--lr-decay-style constant", "--lr-decay-style constant --set train_samples=4000", True),
        (
            "--lr-decay-style constant --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
            "--lr-decay-style constant --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 "
            "--train-iters 200",
            False,
        ),
    ],
)  # fmt: skip
def test_a_length_may_change_where_no_schedule_depends_on_it(then: str, now: str, same: bool) -> None:
    assert (compared(then, now).problems == ()) is same


def test_the_length_of_a_run_that_changed_its_batch_is_what_it_was_from_there() -> None:
    """50 steps of 4 samples, then 50 of 8: 600 samples, not the 800 that 100 steps of 8 would have."""
    saved, begin = to_dict(run()), (50, 200)
    assert codes(compare_configs(saved, run("--lr-decay-samples 600"), "exact", begin=begin)) == []
    assert codes(compare_configs(saved, run("--lr-decay-samples 800"), "exact", begin=begin)) == ["E825"]
    assert codes(compare_configs(saved, run(), "exact", begin=begin)) == []


def test_a_longer_context_is_a_new_run_of_the_same_weights() -> None:
    rope = "--position-embedding-type rope"
    now = "--position-embedding-type yarn --yarn-original-max-position-embeddings 1024 --rotary-base 1e6 --seq-length 8"
    assert codes(compared(rope, now, "weights-only")) == []
    assert set(codes(compared(rope, now))) == {"E822", "E823"}
    assert codes(compared("", rope, "weights-only")) == ["E821"]
    assert codes(compared(rope, f"{rope} --max-position-embeddings 2048")) == []


@pytest.mark.parametrize(("text", "same"), [("969,30,1", True), ("969, 30 , 1", True), ("969,30,0", False)])
def test_splits_are_compared_by_their_weights(text: str, same: bool) -> None:
    assert (codes(compared("", f"--split '{text}'")) == []) is same
    assert codes(compared("--split 9,1,0", "--split 9,1")) == []


@pytest.mark.parametrize("text", ["80,10,10", "8,1,1.0", "0.8,0.1,0.1", "8.,1,1", "800, 100, 100"])
def test_weights_of_a_split_are_shares(text: str) -> None:
    assert codes(compared("--split 8,1,1", f"--split '{text}'")) == []
    assert codes(compared("--split 8,1,2", f"--split '{text}'")) == ["E823"]


@pytest.mark.parametrize("then", ["--split '969, 30, 1'", ""])
@pytest.mark.parametrize("now", ["--split 969,30,1", ""])
def test_a_split_that_is_not_said_is_the_default(then: str, now: str) -> None:
    assert compared(then, now).problems == ()


WHOLE = "--set data.data_path=null --train-data-path other --valid-data-path corpus"


def test_files_are_compared_by_their_content_and_not_by_their_names() -> None:
    assert codes(compared("--split 1,0,0", WHOLE)) == []
    assert codes(compared(WHOLE, "--data-path 0.3 corpus 0.7 other")) == []
    printed = compared("", f"{WHOLE} --multiple-validation-sets --data-cache-path cache")
    assert printed.lines == (
        "--data-path: checkpoint corpus -> now not set",
        "--train-data-path: checkpoint not set -> now other",
        "--valid-data-path: checkpoint not set -> now corpus",
        "--multiple-validation-sets: checkpoint off -> now on",
    )


GENERATED = "--set data.data_path=null --mock-data"


@pytest.mark.parametrize(
    ("then", "now", "fixes"),
    [
        ("--data-path 1 corpus 2 other", GENERATED, "--set data.data_path=1,corpus,2,other"),
        (WHOLE, GENERATED, "--set data.train_data_path=other --set data.valid_data_path=corpus"),
        (GENERATED, "", "--set data.mock_data=True"),
    ],
)
def test_generated_tokens_are_no_files(then: str, now: str, fixes: str) -> None:
    (problem,) = compared(then, now).problems
    assert (problem.code, problem.fixes[0]) == ("E823", fixes)


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        ("--eod-id 5", "", True),
        ("--reset-attention-mask --eod-id 5", "--reset-attention-mask", False),
        ("--reset-attention-mask", "", False),
        ("--eod-mask-loss --eod-id 5", "--eod-mask-loss --eod-id 5 --tokenizer-type ByteTokenizer", True),
    ],
)
def test_where_documents_end_matters_where_something_is_done_there(then: str, now: str, same: bool) -> None:
    assert (codes(compared(then, now)) == []) is same


def test_what_another_version_wrote() -> None:
    saved: dict[str, Any] = to_dict(run())
    del saved["training"]["cross_entropy_chunk_size"], saved["model"]["kv_channels"], saved["checkpoint"]
    saved["training"]["num_helpers"] = 8
    saved["novelties"] = {"depth": [1, 2]}
    saved["optimizer"]["lr_decay_style"] = "stairs"
    comparison = compare_configs(saved, run("--clip-grad 2"), "exact")
    assert comparison.lines == (
        "the checkpoint has options unknown to this version: training.num_helpers 8, novelties.depth [1, 2]",
        "--lr-decay-style: checkpoint stairs -> now linear",
        "--clip-grad: checkpoint 1 -> now 2",
    )
    (problem,) = comparison.problems
    assert problem.fixes == ("--clip-grad 1", "--resume-mode new-schedule")


@pytest.mark.parametrize("mode", RESUME_MODES)
def test_a_model_with_unknown_options_is_refused(mode: str) -> None:
    saved: dict[str, Any] = to_dict(run())
    saved["model"]["memory_slots"] = 8
    (problem,) = compare_configs(saved, run(), mode).problems
    sentence = "the checkpoint's model has options unknown to this version: model.memory_slots 8"
    assert (problem.code, problem.sentence, problem.fixes) == ("E822", sentence, ("update this program",))


def test_a_length_that_cannot_be_read_is_not_taken_for_the_same() -> None:
    saved: dict[str, Any] = to_dict(run())
    saved["optimizer"]["lr_decay_iters"] = "for ever"
    (problem,) = compare_configs(saved, run(), "exact").problems
    assert problem.sentence.endswith(": --lr-decay-iters: checkpoint 'for ever' -> now not set")
    assert problem.fixes == ("--resume-mode new-schedule",)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_no_value_is_too_strange(name: str) -> None:
    for value, mode in product(({"a": 1}, "x", None), ("exact", "weights-only")):
        saved: dict[str, Any] = to_dict(run())
        saved[SETTINGS[name].group][name] = value
        comparison = compare_configs(saved, run(), mode)
        assert comparison.problems == () or SETTINGS[name].option.role not in ALLOWED_ROLES[mode]
