"""What is remarked on where data-parallel ranks cut the optimizer's state."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron.arguments.cli import parse
from megatron.config.errors import UserError

RUN = "--mock-data --train-iters 100 --num-layers 8 --hidden-size 256 --num-attention-heads 4 --optimizer muon"


def notes(flags: str, ranks: int, vocabulary: str = "--vocab-size 257") -> tuple[str, ...]:
    """What is said of Muon."""
    environ = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    message = parse(shlex.split(f"{RUN} {vocabulary} --global-batch-size {ranks} {flags}"), environ).notes
    return tuple(note for note in message if "muon" in note)


def test_nothing_is_said_where_matrices_are_dealt_out_evenly() -> None:
    assert notes("", 4) == ()
    assert notes("--use-distributed-optimizer", 4) == notes("--use-distributed-optimizer", 16) == ()
    unknown = notes("--use-distributed-optimizer", 64, "--tokenizer-type ByteTokenizer")
    assert unknown == (), "the size of the vocabulary is known when the tokenizer is"


@pytest.mark.parametrize("ranks", [32, 64])
def test_few_matrices_on_many_ranks(ranks: int) -> None:
    """Eight blocks of 12 h^2 elements, the largest matrices of 4 h^2: there must be room for one on every rank."""
    (note,) = notes("--use-distributed-optimizer", ranks)
    printed = re.search(r"are ([\d.]+) times as large", note)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(ranks * 4 / (8 * 12), abs=0.06)
    assert notes(f"--use-distributed-optimizer --num-distributed-optimizer-instances {ranks // 4}", ranks) == ()


def test_cut_gradients_need_large_buckets() -> None:
    (note,) = notes("--data-parallel-sharding-strategy optim_grads", 4)
    assert "compare --data-parallel-sharding-strategy optim" in note


def test_cut_gradients_are_sent_for_every_microbatch() -> None:
    """Three micro-batches, all in fp32: three reduce-scatters and a gather, where ZeRO-1 has one of each."""
    flags = "--mock-data --train-iters 1 --vocab-size 256 --num-layers 8 --hidden-size 256 --num-attention-heads 4"
    cut = "--data-parallel-sharding-strategy optim_grads --global-batch-size"
    environ = {"RANK": "0", "WORLD_SIZE": "4"}
    (note,) = (n for n in parse(shlex.split(f"{flags} {cut} 12"), environ).notes if "optim_grads" in n)
    assert "each of 3 micro-batches" in note
    ours, theirs = (float(number) for number in re.findall(r"([\d.]+) MiB", note))
    assert ours / theirs == pytest.approx((3 + 1) / 2, rel=1e-3)
    assert not [n for n in parse(shlex.split(f"{flags} {cut} 4"), environ).notes if "optim_grads" in n]


@pytest.mark.parametrize(("ranks", "instances", "told"), [(1, 1, True), (4, 1, False), (4, 2, False), (4, 4, True)])
def test_nothing_is_cut_where_each_instance_is_one_rank(ranks: int, instances: int, told: bool) -> None:
    flags = f"{RUN} --vocab-size 257 --global-batch-size {ranks} --use-distributed-optimizer"
    environ = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    message = parse(shlex.split(f"{flags} --num-distributed-optimizer-instances {instances}"), environ).notes
    assert any("shards nothing" in note for note in message) == told


@pytest.mark.parametrize(("instances", "offered"), [(3, ["2"]), (8, ["2"])])
def test_instances_that_are_offered_cut_something(instances: int, offered: list[str]) -> None:
    flags = f"{RUN} --vocab-size 257 --global-batch-size 4 --use-distributed-optimizer"
    with pytest.raises(UserError) as refused:
        parse(
            shlex.split(f"{flags} --num-distributed-optimizer-instances {instances}"), {"RANK": "0", "WORLD_SIZE": "4"}
        )
    (problem,) = refused.value.problems
    assert [fix.split()[-1] for fix in problem.fixes] == offered
