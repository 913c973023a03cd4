"""Compare a checkpoint's options with the run that starts from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.compatibility import (
    ALLOWED_ROLES,
    CHANGE_ERRORS,
    ConfigComparison,
    compare_configs,
    readable_config,
)
from megatron.arguments.sources import from_dict, to_dict
from megatron.config.checkpoint import RESUME_MODES
from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from tests.unit.arguments import command

RUN = "--data-path corpus --vocab-size 257 --train-iters 100 --global-batch-size 8 --save ckpt"


@pytest.fixture(autouse=True)
def _there_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("corpus.bin", "corpus.idx", "other.bin", "other.idx"):
        (tmp_path / name).touch()


@cache
def run(flags: str = "", ranks: int = 1) -> RunConfig:
    return command.run(flags, ranks, RUN).config


def compared(then: str = "", now: str = "", mode: str = "exact", ranks: int = 1) -> ConfigComparison:
    return compare_configs(to_dict(run(then)), run(now, ranks=ranks), mode, world_size=ranks)


def codes(comparison: ConfigComparison) -> list[str]:
    return [problem.code for problem in comparison.problems]


def test_every_option_has_one_role() -> None:
    assert all(isinstance(setting.option.role, Role) for setting in SETTINGS.values())
    assert set(ALLOWED_ROLES) == set(RESUME_MODES)
    assert set(CHANGE_ERRORS) == set(Role) - set.intersection(*ALLOWED_ROLES.values())
    for mode in RESUME_MODES:
        assert compared("--swiglu", "--swiglu", mode) == ConfigComparison((), (), frozenset())


def test_changes_are_reported_by_flag() -> None:
    printed = compared(
        "--tensor-model-parallel-size 1 --overlap-grad-reduce",
        "--tensor-model-parallel-size 4 --no-overlap-grad-reduce --eval-interval 5 --bf16 --recompute-activations"
        " --keep-every 8",  # of a start, reported neither with an effect nor without
        ranks=4,
    )
    assert printed.problems == ()
    assert printed.lines == (
        "--tensor-model-parallel-size: checkpoint 1 -> now 4",
        "--overlap-grad-reduce: checkpoint on -> now off",
        "--params-dtype: checkpoint fp32 -> now bf16",
        "--eval-interval: checkpoint 1000 -> now 5",
        "--recompute-granularity: checkpoint not set -> now selective",
    )


CHANGES = {
    Role.SHAPE: ("--num-layers 3", "--vocab-size 300", "--max-position-embeddings 2048", "--swiglu"),
    Role.FUNCTION: ("--norm-epsilon 1e-6", "--activation relu2"),
    Role.DATA: ("--seq-length 512 --max-position-embeddings 1024", "--seed 5", "--split 9,1,0"),
    Role.STATE: ("--optimizer sgd",),
    Role.SCHEDULE: ("--lr 1e-3", "--global-batch-size 16", "--train-iters 200", "--hidden-dropout 0"),
    Role.FREE: ("--micro-batch-size 2", "--on-nonfinite skip", "--eval-iters 3"),
}


@pytest.mark.parametrize(("role", "flags"), [(role, flags) for role, all_ in CHANGES.items() for flags in all_])
def test_a_change_is_allowed_by_its_role_or_its_fixes_undo_it(role: Role, flags: str) -> None:
    for mode in RESUME_MODES:
        comparison = compared("", flags, mode)
        assert (comparison.problems == ()) == (role in ALLOWED_ROLES[mode])
        assert mode == "weights-only" or comparison.lines[0].startswith(flags.split()[0]) or role is Role.SHAPE
    saved = to_dict(run())
    for problem in compare_configs(saved, run(flags), "exact").problems:
        assert problem.code not in codes(compare_configs(saved, run(f"{flags} {problem.fixes[0]}"), "exact"))
        for mode_fix in problem.fixes[1:]:
            config = run(f"{flags} --load ckpt --save new {mode_fix}")
            assert codes(compare_configs(saved, config, config.checkpoint.resume_mode)) == []


GENERATED = "--set data.data_path=null --mock-data"
WHOLE = "--set data.data_path=null --train-data-path other --valid-data-path corpus"


@pytest.mark.parametrize(
    ("then", "now", "fix"),
    [
        ("--lr 2e-4", "--lr 3e-4", "--lr 0.0002"),
        ("--set train_samples=800", "--train-iters 200", "--set training.train_samples=800"),
        ("--lr-warmup-fraction 0.1", "--lr-warmup-iters 3", "--set optimizer.lr_warmup_fraction=0.1"),
        ("--lr-warmup-fraction 0.1", "", "--lr-warmup-fraction 0.1"),
        ("", "--lr-decay-iters 90", "--set optimizer.lr_decay_iters=null"),
        ("", "--disable-bias-linear", "--set model.add_bias_linear=True"),
        ("--rampup-batch-size 2 2 40", "", "--rampup-batch-size 2 2 40"),
        ("--data-path 1 corpus 2 other", GENERATED, "--set data.data_path=1,corpus,2,other"),
        (WHOLE, GENERATED, "--set data.train_data_path=other --set data.valid_data_path=corpus"),
        (GENERATED, "", "--set data.mock_data=True"),
    ],
)
def test_the_first_fix_restores_the_value(then: str, now: str, fix: str) -> None:
    (problem,) = compared(then, now).problems
    assert problem.fixes[0] == fix
    two = compared(then, f"{now} --clip-grad 2 --adam-eps 1").problems
    assert len(two) == len({p.code for p in two}), "one problem for all changes of a kind"


@pytest.mark.parametrize(
    ("flags", "own", "schedule", "anew"),
    [
        ("", True, "", "--load ckpt --save ckpt-new "),  # of two starts with one folder, the second finds the first
        ("--load elsewhere", True, "--load ckpt ", "--load ckpt --save ckpt-new "),
        ("--load elsewhere", False, "", ""),
    ],
)
def test_a_resume_mode_is_suggested_with_its_folders(flags: str, own: bool, schedule: str, anew: str) -> None:
    comparison = compare_configs(to_dict(run()), run(f"{flags} --optimizer sgd --lr 1"), "exact", own=own)
    assert [problem.fixes[1] for problem in comparison.problems] == [
        f"{anew}--resume-mode weights-only",
        f"{schedule}--resume-mode new-schedule",
    ]


def test_a_suggested_fix_is_valid_with_the_ranks_of_now() -> None:
    (problem,) = compared("--micro-batch-size 8", "--micro-batch-size 8 --global-batch-size 32", ranks=4).problems
    assert problem.fixes == ("--global-batch-size 8 --micro-batch-size 2", "--resume-mode new-schedule")
    run("--micro-batch-size 8 --global-batch-size 8 --micro-batch-size 2", ranks=4)
    (problem,) = compared("--micro-batch-size 8", "--micro-batch-size 8 --global-batch-size 24", ranks=3).problems
    assert problem.fixes[0] == "--global-batch-size 8 --pad-global-batch"


INCREASING = "--lr-decay-style constant --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
CONSTANT = "--lr-decay-style constant"


@pytest.mark.parametrize(
    ("then", "now", "code"),
    [
        ("", "--lr-decay-iters 100", ""),  # the whole run
        ("", "--lr-decay-samples 800 --train-iters 300", ""),  # the schedule as it was, then the minimum
        ("", "--train-iters 300", "E825"),
        (CONSTANT, f"{CONSTANT} --train-iters 300", ""),
        (CONSTANT, f"{CONSTANT} --set train_samples=4000", ""),
        (f"{CONSTANT} --lr-warmup-fraction 0.1", f"{CONSTANT} --lr-warmup-fraction 0.1 --train-iters 300", "E825"),
        ("--lr-warmup-iters 10", "--lr-warmup-samples 80", ""),
        (INCREASING, f"{INCREASING} --train-iters 200", "E825"),
        # splits, by their weights; contents of files are compared elsewhere
        ("", "--split '969, 30 , 1'", ""),
        ("", "--split 969,30,0", "E823"),
        ("--split 8,1,1", "--split '0.8,0.1,0.1'", ""),
        ("--split 8,1,1", "--split '800, 100, 100'", ""),
        ("--split 8,1,2", "--split '8.,1,1'", "E823"),
        ("--split 1,0,0", WHOLE, ""),
        (WHOLE, "--data-path 0.3 corpus 0.7 other", ""),
        # ends of documents matter where an option uses them
        ("--eod-id 5", "", ""),
        ("--reset-attention-mask --eod-id 5", "--reset-attention-mask", "E823"),
        ("--reset-attention-mask", "", "E823"),
        ("--eod-mask-loss --eod-id 5", "--eod-mask-loss --eod-id 5 --tokenizer-type ByteTokenizer", ""),
        # rotary positions
        ("--position-embedding-type rope", "--position-embedding-type rope --max-position-embeddings 2048", ""),
        ("", "--moe-router-topk 1", ""),
        ("", "--add-qkv-bias", ""),
    ],
)
def test_changes_that_depend_on_other_options(then: str, now: str, code: str) -> None:
    assert codes(compared(then, now)) == [code] * bool(code)


def test_a_longer_context_is_a_new_run_of_the_same_weights() -> None:
    rope = "--position-embedding-type rope"
    now = "--position-embedding-type yarn --yarn-original-max-position-embeddings 1024 --rotary-base 1e6 --seq-length 8"
    assert codes(compared(rope, now, "weights-only")) == []
    assert set(codes(compared(rope, now))) == {"E822", "E823"}
    assert codes(compared("", rope, "weights-only")) == ["E821"]


def test_the_weights_of_a_model_do_without_its_further_predictions() -> None:
    rope = "--position-embedding-type rope"
    heads = f"{rope} --mtp-num-layers 2"
    assert codes(compared(heads, rope, "weights-only")) == []
    assert codes(compared(heads, rope)) == ["E822"]
    assert codes(compared(rope, heads, "weights-only")) == ["E821"]


def test_a_changed_batch_size_keeps_the_length_of_the_run() -> None:
    """50 steps of 4 samples, then 50 of 8: 600 samples, not the 800 that 100 steps of 8 would have."""
    saved, begin = to_dict(run()), (50, 200)
    assert codes(compare_configs(saved, run("--lr-decay-samples 600"), "exact", begin=begin)) == []
    assert codes(compare_configs(saved, run("--lr-decay-samples 800"), "exact", begin=begin)) == ["E825"]
    assert codes(compare_configs(saved, run(), "exact", begin=begin)) == []


def test_options_of_another_version() -> None:
    saved: dict[str, Any] = to_dict(run())
    del saved["training"]["cross_entropy_chunk_size"], saved["model"]["kv_channels"], saved["checkpoint"]
    saved["training"]["num_helpers"] = 8
    saved["novelties"] = {"depth": [1, 2]}
    saved["optimizer"] |= {"lr_decay_style": "stairs", "lr_decay_iters": "for ever"}
    comparison = compare_configs(saved, run("--clip-grad 2"), "exact")
    assert comparison.lines == (
        "the checkpoint has options unknown to this version: training.num_helpers 8, novelties.depth [1, 2]",
        "--lr-decay-style: checkpoint stairs -> now linear",
        "--lr-decay-iters: checkpoint 'for ever' -> now not set",
        "--clip-grad: checkpoint 1 -> now 2",
    )
    (problem,) = comparison.problems
    assert problem.fixes == ("--clip-grad 1", "--resume-mode new-schedule")
    saved["model"]["memory_slots"] = 8
    for mode in RESUME_MODES:
        assert "E822" in codes(compare_configs(saved, run(), mode))


def test_no_value_of_a_checkpoint_raises() -> None:
    now = run()
    for name, setting in SETTINGS.items():
        for value, mode in (({"a": 1}, "exact"), ("x", "exact"), (None, "weights-only")):
            saved: dict[str, Any] = to_dict(now)
            saved[setting.group][name] = value
            comparison = compare_configs(saved, now, mode)
            assert comparison.problems == () or setting.option.role not in ALLOWED_ROLES[mode]


def test_a_field_is_found_in_the_group_that_it_was_in() -> None:
    """A checkpoint and a file of a version in which tasks were options of training."""
    tasks = {"evaluate_tasks": ["hellaswag"], "evaluate_tasks_interval": 5}
    saved: dict[str, Any] = to_dict(run())
    del saved["evaluation"]
    saved["training"] |= tasks
    assert compare_configs(saved, run(), "exact").changed == {"evaluate_tasks", "evaluate_tasks_interval"}
    assert readable_config(saved).evaluation.evaluate_tasks == ("hellaswag",)
    assert from_dict({"training": tasks}).evaluation.evaluate_tasks_interval == 5


def test_a_single_value_of_an_option_that_became_a_list_is_the_same() -> None:
    experts = "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.5"
    saved: dict[str, Any] = to_dict(run(experts))
    saved["model"] |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
    assert compare_configs(saved, run(experts), "exact").lines == ()
    assert compare_configs(saved, run(experts.replace("0.5", "0.25")), "exact").changed == {"moe_aux_loss_coeff"}
    model = readable_config(saved).model
    assert (model.moe_router_load_balancing_type, model.moe_aux_loss_coeff) == (("aux_loss",), (0.5,))
    assert from_dict({"model": {"moe_aux_loss_coeff": 0.5}}).model.moe_aux_loss_coeff == (0.5,)
