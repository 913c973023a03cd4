"""A changed token changes the positions that may see it, and not a bit of any other, on every rank.

A label trains the tokens that its position sees, and the gradients of all others are zero to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.context_parallel import rows_between
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels import block_attention
from megatron.kernels.attention_mask import Ranges
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.distributed.grid import DOCUMENTS, RECOMPUTE, STATES
from tests.kit.cases import GLOBAL_BATCH, MODEL, SEQ_LENGTH, Case, batches_of, global_batch
from tests.kit.pool import Pool
from tests.unit.kernels.test_attention_mask import visible
from tools.lib.verify_parallel import RankTrace, join_traces, trace_step

PATTERNS = ("global", "local:5", "chunked:7", "dilated:3:2", "local:3+first:2", "prefix:4")
RECURRENCES: dict[str, dict[str, Any]] = {name: {"token_mixers": (name,), **STATES[name]} for name in STATES}
"""Models of a recurrence, whose tokens see what those of attention see by the pattern ``global``."""
MODELS = {pattern: {"num_query_groups": 2, "attention_pattern": pattern} for pattern in PATTERNS} | RECURRENCES
"""Models of one block, by attention pattern or by the name of a recurrent mixer."""
CHANGED = (0, 2, 9, 17, 23)
"""Positions of the tokens."""
DIVIDED = {name: Case(documents=DOCUMENTS[name]) for name in ("one", "attention", "patterns")}
"""Samples of one and of several documents."""

Changes = dict[tuple[str, str, int], set[tuple[int, int]]]
"""By pattern, kind of documents and changed token: samples and positions at which the model's output is another."""


def context(size: int, kind: str = "p2p", **more: Any) -> ParallelConfig:
    sizes = (2, size // 2) if kind == "a2a+p2p" else ()
    return ParallelConfig(
        context_parallel_size=size, cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes, **more
    )


WHOLE = TrainingConfig(micro_batch_size=GLOBAL_BATCH)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[ParallelConfig, TrainingConfig]] = {
    "one rank": (ParallelConfig(), WHOLE),
    "tp2, attention recomputed": (
        ParallelConfig(tensor_model_parallel_size=2),
        replace(WHOLE, **RECOMPUTE["core_attn"]),
    ),
    "tp2, sequence, all recomputed": (ParallelConfig(**SP), replace(WHOLE, recompute_granularity="full")),
    "p2p on 3": (context(3), WHOLE),
    "p2p on 4": (context(4), WHOLE),
    "p2p on 2, tp2, sequence": (context(2, **SP), WHOLE),
    "all_gather on 3": (context(3, "all_gather"), WHOLE),
    "a2a on 2": (context(2, "a2a"), WHOLE),
    "a2a+p2p on 4": (context(4, "a2a+p2p"), WHOLE),
}
SHORT = ("one rank", "p2p on 4")
"""Layouts of gradients; CI computes those of recurrences alone."""
COVERED = ("p2p on 3", "p2p on 2, tp2, sequence", "tp2, attention recomputed", "p2p on 4", "a2a on 2")
"""Layouts of outputs that are slow: others have their sizes and ways."""


def held(trainer: Trainer) -> Ranges:
    """Positions of this rank's tokens."""
    return (range(SEQ_LENGTH),) if trainer.reader.cp is None else trainer.reader.cp.rows(SEQ_LENGTH)


def rows_of(trainer: Trainer) -> Tensor:
    """Positions of this rank's rows of the last hidden state."""
    rows = held(trainer)
    if trainer.config.parallel.sequence_parallel:
        share = sum(map(len, rows)) // trainer.mesh.tp.size
        rows = rows_between(rows, trainer.mesh.tp.rank * share, (trainer.mesh.tp.rank + 1) * share)
    return torch.tensor([i for part in rows for i in part])


def slow_decay(trainer: Trainer) -> None:
    """Let the states of recurrences last, so that the first token changes more than what rounding hides at the end."""
    with torch.no_grad():
        for name, parameter in trainer.chunks[0].params.items():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)


def hidden(trainer: Trainer, batch: MicroBatch) -> Tensor:
    """Return the hidden states after the final norm, ``[S, B, H]``."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        seen.append(output[1].detach())

    norm = trainer.chunks[0].final_layernorm
    assert norm is not None
    with norm.register_forward_hook(keep):
        trainer.chunks[0](None, batch)
    return seen[0]


def perturbed(
    rank: int,
    world_size: int,
    parallel: ParallelConfig,
    training: TrainingConfig,
    models: Mapping[str, Mapping[str, Any]] = MODELS,
) -> Changes:
    """Change tokens one by one, with each model, in samples of one and of several documents."""
    found: Changes = {}
    for pattern, documents in product(models, DIVIDED):
        if pattern in RECURRENCES and documents == "patterns":  # which they do not have
            continue
        model = replace(MODEL, num_layers=1, **models[pattern])
        case = replace(DIVIDED[documents], model=model, parallel=parallel, training=training)
        trainer = build_trainer(case.config(), rank, world_size)
        trainer.chunks[0].train()
        slow_decay(trainer)
        (batch,) = batches_of(trainer, case, 0)
        mine = torch.tensor([i for part in held(trainer) for i in part])
        with patch.object(block_attention, "BLOCK", 8):
            before = hidden(trainer, batch)
            for position in CHANGED:
                tokens = (batch.tokens + (mine == position)) % MODEL.vocab
                rows, samples = (before != hidden(trainer, replace(batch, tokens=tokens))).any(-1).nonzero().T
                places = rows_of(trainer)[rows]
                found[pattern, documents, position] = {*zip(samples.tolist(), places.tolist())}
    return found


def expected(pattern: str, documents: str, position: int) -> set[tuple[int, int]]:
    rule = AttentionPattern.parse("global" if pattern in RECURRENCES else pattern)
    whole = global_batch(DIVIDED[documents], 0)
    ids = (torch.zeros_like(whole.tokens) if whole.documents is None else whole.documents).tolist()
    seen = set()
    for sample, query in product(range(len(ids)), range(SEQ_LENGTH)):
        first = ids[sample].index(ids[sample][query]) if documents == "patterns" else 0
        same = ids[sample][query] == ids[sample][position]
        if query == position or (same and visible(rule, query - first, position - first)):
            seen.add((sample, query))
    return seen


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in COVERED else ()) for n in LAYOUTS])
def test_a_token_changes_only_positions_that_see_it(pool: Pool, name: str) -> None:
    parallel, training = LAYOUTS[name]
    ranks = pool.run(parallel.model_ranks, perturbed, parallel, training)
    for what in ranks[0]:
        assert set().union(*(rank[what] for rank in ranks)) == expected(*what), what


ENDS = ((7, 16), (12,), (3, 4, 20), ())
"""Of the documents of each sample, before the end of it."""
COUNTED = (0, 5, 7, 12, 16, 23)
"""Positions whose labels count, one after the other."""


def of_unique_tokens(counted: int, changed: bool) -> MicroBatch:
    """Samples in which no token occurs twice and one label counts in each.

    If ``changed``, the documents of the other labels have other tokens.
    """
    ids = torch.randperm(MODEL.vocab, generator=torch.Generator().manual_seed(0))
    tokens = ids[: GLOBAL_BATCH * SEQ_LENGTH].view(GLOBAL_BATCH, SEQ_LENGTH)
    labels, positions = tokens.roll(1, 1), torch.arange(SEQ_LENGTH)
    documents = torch.stack([torch.bucketize(positions, torch.tensor(ends), right=True) for ends in ENDS])
    if changed:
        others = documents != documents[:, counted, None]
        tokens = tokens.masked_scatter(others, tokens[others].roll(1))
    mask = (positions == counted).float().repeat(GLOBAL_BATCH, 1)
    return MicroBatch(tokens, labels, mask, torch.arange(GLOBAL_BATCH), documents=documents)


def gradients(
    rank: int, world_size: int, mixer: str, parallel: ParallelConfig, training: TrainingConfig
) -> list[RankTrace]:
    """Steps that change no weight, for each counted label, with the tokens as they are and with others."""
    model = replace(MODEL, num_layers=1, untie_embeddings_and_output_weights=True, **MODELS[mixer])
    case = Case(model, parallel, training=training, optimizer=OptimizerConfig("sgd", clip_grad=0.0))
    trainer, traces = build_trainer(case.config(), rank, world_size), []
    slow_decay(trainer)
    for counted, changed in product(COUNTED, (False, True)):
        batches = batches_of(trainer, case, 0, of_unique_tokens(counted, changed))
        traces.append(trace_step(trainer, train_step(trainer, batches, Rates(0.0, 0.0))))
    return traces


@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        pytest.param(mixer, name, marks=() if name in SHORT and mixer in RECURRENCES else pytest.mark.slow)
        for mixer in ("global", *RECURRENCES)
        for name in LAYOUTS
    ],
)
def test_a_label_trains_the_tokens_that_it_sees(pool: Pool, mixer: str, name: str) -> None:
    parallel, training = LAYOUTS[name]
    ranks = pool.run(parallel.model_ranks, gradients, mixer, parallel, training)
    steps = iter([join_traces(step).grads["embedding.word_embeddings.weight"] for step in zip(*ranks)])
    for counted in COUNTED:
        found, again, batch = next(steps), next(steps), of_unique_tokens(counted, changed=False)
        assert batch.documents is not None
        seen = (batch.documents == batch.documents[:, counted, None]) & (torch.arange(SEQ_LENGTH) <= counted)
        assert (found != 0).any(1).nonzero().flatten().tolist() == sorted(batch.tokens[seen].tolist()), counted
        assert found.equal(again), counted
