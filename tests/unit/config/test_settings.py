from __future__ import annotations

import pytest

from megatron.config.settings import replace_by_flags


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("min_lr 1 is above lr 0", "--min-lr 1 is above lr 0"),
        ("seed -1: must be at least 0", "--seed -1: must be at least 0"),
        ("both train_iters and train_samples say it", "both --train-iters and --train-samples say it"),
        ("keep_every without keep_last, because", "--keep-every without --keep-last, because"),
        ("a gelu_tanh of no option", "a gelu_tanh of no option"),
        ("runs/min_lr and min_lr.idx and --set model.hidden_size=3", None),
        ("--min-lr, a min_lr-like word and min_lr/x", None),
        ("'min_lr seq_length' in lr_factors", "'min_lr seq_length' in --lr-factors"),
        ("the checkpoint's min_lr and WSD's seq_length", "the checkpoint's --min-lr and WSD's --seq-length"),
        ("the split of the data, to save and load it", None),
    ],
)
def test_names_of_fields_are_told_as_flags_and_nothing_else_is(sentence: str, told: str | None) -> None:
    assert replace_by_flags(sentence) == (sentence if told is None else told)
