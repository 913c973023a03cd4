"""What is remarked on a mixture of experts."""

from __future__ import annotations

import shlex

import pytest

from megatron.arguments.cli import parse

RUN = "--mock-data --train-iters 1 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --disable-bias-linear"
BALANCED = "--moe-aux-loss-coeff 0.01"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"--moe-router-topk 2 {BALANCED}", []),
        (f"--moe-router-topk 1 --moe-router-pre-softmax {BALANCED}", []),
        (f"--moe-router-topk 1 {BALANCED}", ["every weight is 1"]),
        ("--moe-router-topk 2", ["no balancing loss"]),
        (f"--moe-router-load-balancing-type none {BALANCED}", ["no balancing loss"]),
        (f"--moe-router-load-balancing-type aux_loss {BALANCED}", ["depends on the micro-batches"]),
    ],
)
def test_remarks(flags: str, said: list[str]) -> None:
    words = "every weight is 1", "no balancing loss", "depends on the micro-batches"
    notes = parse(shlex.split(f"{RUN} --vocab-size 257 --num-experts 4 {flags}"), {}).notes
    assert [word for word in words if any(word in note for note in notes)] == said


@pytest.mark.parametrize("flags", ["", "--moe-router-load-balancing-type none", BALANCED])
def test_what_is_offered_balances(flags: str) -> None:
    run = f"{RUN} --vocab-size 257 --num-experts 4 {flags}"
    notes = parse(shlex.split(run), {}).notes
    offered = [note.partition("(")[2].partition(")")[0] for note in notes if "no balancing loss" in note]
    assert len(offered) == (flags != BALANCED)
    message = parse(shlex.split(f"{run} {' '.join(offered)}"), {}).notes
    assert not [note for note in message if "no balancing loss" in note]
