"""What is offered to ranks that do not hold whole models; where torchrun has started nodes, in numbers of these."""

from __future__ import annotations

import pytest

from megatron.arguments.cli import parse
from megatron.config.errors import UserError

RUN = ["--mock-data", "--vocab-size", "257", "--train-iters", "10", "--num-layers", "8", "--num-attention-heads", "8"]


def refused(flags: str, nodes: int, ranks: int) -> str:
    """What rank 0 says under torchrun."""
    environ = {"RANK": "0", "WORLD_SIZE": str(nodes * ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    with pytest.raises(UserError) as error:
        parse([*RUN, *flags.split()], environ)
    return str(error.value)


def test_it_says_how_many_nodes_to_use() -> None:
    message = refused("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", nodes=3, ranks=4)
    sentence = "E202 12 ranks are not a multiple of TP x PP = 8: 3 nodes of 4, and whole models need a multiple of 2"
    assert message.splitlines()[0] == sentence
    assert message.splitlines()[1].startswith("  fix: torchrun --nnodes 2 | torchrun --nnodes 4 | --tensor-")


def test_of_one_node_too() -> None:
    message = refused("--pipeline-model-parallel-size 8", nodes=1, ranks=4)
    assert (
        "E202 4 ranks are not a multiple of TP x PP = 8: 1 node of 4, and whole models need a multiple of 2" in message
    )
    assert "fix: torchrun --nnodes 2 | --pipeline-model-parallel-size 4" in message


def test_where_ranks_are_asked_for_by_number_nodes_are_no_matter() -> None:
    message = refused("--pipeline-model-parallel-size 8 --check-config --world-size 12", nodes=1, ranks=4)
    assert "12 ranks are not a multiple of TP x PP = 8\n" in message


def test_a_smaller_axis_cuts_heads_evenly() -> None:
    message = refused("--tensor-model-parallel-size 4 --check-config --world-size 6", nodes=1, ranks=1)
    assert "fix: --tensor-model-parallel-size 2 |" in message
    parse([*RUN, "--tensor-model-parallel-size", "2", "--check-config", "--world-size", "6"], {})
