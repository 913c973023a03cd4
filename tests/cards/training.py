"""Cells that train a small model on a text of this repository: the curve, and a killed run that resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megatron.arguments.sources import to_dict
from megatron.config.run import RunConfig
from tests.cards.card import Card
from tests.cards.cell import CardError, Cell, Measures, largest
from tests.cards.twin import Twins, relative
from tests.kit.pool import Pool
from tests.kit.runs import checkpoint, records, run_in_process, steps
from tests.kit.solo import random_batch
from tests.parity.test_hf import CLIP, torch_adamw
from tools.preprocess_data import main as preprocess

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "LICENSE"
"""Its bytes are the tokens; it does not change."""

LENGTH, STEPS, KILLED, RATE, FALL = 64, 100, 50, 3e-3, 0.75
LONG = "--seq-length 256 --micro-batch-size 1 --global-batch-size 2"
"""As many tokens in samples that are longer than the windows of long contexts."""
FLAGS = (
    f"--split 100,0,0 --seq-length {LENGTH} --micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS} "
    f"--lr {RATE} --lr-warmup-iters 10 --log-interval 1 --device cpu --num-workers 0 --save-interval {KILLED}"
)


def flags_of(card: Card, folder: Path) -> str:
    """Write the model's options and the tokens to a folder; return the flags of a run."""
    positions = max(card.config.max_position_embeddings or 0, LENGTH)
    samples = f" {LONG}" if card.is_long else ""
    model = replace(card.config, vocab_size=257, max_position_embeddings=positions)
    options = to_dict(RunConfig(model=model))["model"]
    if model.hybrid_layer_pattern is not None:
        del options["num_layers"]  # it follows from the pattern
    (folder / "model.yaml").write_text(json.dumps({"model": options}))  # JSON is YAML
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in TEXT.read_text().split("\n\n"))
    )
    argv = ["--input", str(folder / "text.jsonl"), "--append-eod", "--output-prefix", str(folder / "text")]
    if preprocess([*argv, "--tokenizer-type", "ByteTokenizer"]):
        raise CardError("the text could not be preprocessed")
    return f"--config {folder}/model.yaml --data-path {folder}/text_text_document {FLAGS}{samples}"


def run(folder: Path, flags: str, kill_after: int = 0) -> int:
    """Train in a process of its own; return its exit status."""
    saved = folder / "saved"
    whole = saved / f"iter_{KILLED:07d}" / "COMPLETE"
    return run_in_process(folder, f"--save {saved}", kill_after, whole.exists, base=flags)


def trained(folder: Path, flags: str) -> Path:
    """A whole run."""
    if run(folder, flags):
        raise CardError(f"the run failed: {(folder.with_name(folder.name + '.output')).read_text()[-300:]}")
    return folder


def curve(card: Card, folder: Path, pool: Pool) -> Measures:
    """The loss of the first and of the last step, and the largest difference from the losses of `transformers`.

    Raises:
        CardError: the loss does not fall.
    """
    found = steps(trained(folder / "run", flags_of(card, folder)))
    losses = [found[step]["lm loss"] for step in sorted(found)]
    first, last = losses[0], sum(losses[-10:]) / 10
    if last > FALL * first:
        raise CardError(f"the loss falls from {first:.2f} to {last:.2f} only")
    return {"steps": len(losses), "first": first, "last": last, "beside": beside_transformers(card, folder)}


def beside_transformers(card: Card, folder: Path) -> float:
    """The largest relative difference of a loss, where both models take as many steps on the text in fp64."""
    twins = Twins.build(card, folder)
    config, rules = twins.ours.chunk.config, twins.ours.optimizer.config
    samples, length = (1, 256) if card.is_long else (6, card.length)
    ids = torch.tensor([*TEXT.read_bytes()]) % config.vocab
    reference, differences = torch_adamw(twins.theirs, rules), []
    for step in range(STEPS):
        starts = [(step * samples + i) * length % (len(ids) - length - 1) for i in range(samples)]
        rows = torch.stack([ids[start : start + length + 1] for start in starts])
        batch = random_batch(config, samples, length, step, tokens=rows[:, :-1], labels=rows[:, 1:])
        _, expected = twins.their_loss(batch)
        nn.utils.clip_grad_norm_(twins.theirs.parameters(), CLIP)
        for group in reference.param_groups:
            group["lr"] = RATE
        reference.step()
        loss, _ = twins.ours.step([batch], RATE)
        differences.append(relative(loss, expected))
    return largest(differences)


def resume(card: Card, folder: Path, pool: Pool) -> Measures:
    """Weights, moments, losses and other numbers of a run that was killed and resumed, against one that was not."""
    flags = flags_of(card, folder)
    whole, parts = trained(folder / "whole", flags), folder / "parts"
    status = run(parts, flags, kill_after=KILLED)
    if status != -9:
        raise CardError(f"the run was not killed: status {status}")
    trained(parts, flags)
    (a, numbers), (b, others) = (checkpoint(of / "saved" / f"iter_{STEPS:07d}") for of in (whole, parts))
    if a.keys() != b.keys():
        raise CardError(f"one has no {sorted(a.keys() ^ b.keys())[0]}")
    own = {name for name in numbers.keys() | others.keys() if numbers.get(name) != others.get(name)}
    one, other = steps(whole), steps(parts)
    losses = largest(abs(one[step]["lm loss"] - other[step]["lm loss"]) for step in one)
    differences = [(a[name].double() - b[name].double()).abs().max().item() for name in a if a[name].numel()]
    # a run that begins anew has the same numbers as one that resumes, and takes steps again
    again = len(records(parts)) - STEPS
    found: Measures = {"tensors": len(a), "state": largest(differences), "losses": losses, "other numbers": len(own)}
    return found | {"steps again": again}


COVERED = (
    *("megatron/training", "megatron/optimizer", "megatron/model", "megatron/layers", "megatron/data"),
    *("megatron/kernels", "megatron/distributed", "megatron/pipeline", "megatron/checkpoint"),
    *("tests/cards/card.py", "tests/cards/training.py", "LICENSE"),
)
CELLS = {
    "curve": Cell(
        curve,
        f"{STEPS} steps in fp64 on the bytes of LICENSE beside `transformers` with torch's AdamW: largest relative "
        f"difference of a loss. A run of as many in fp32 ends at most at {FALL} of its first loss",
        {"beside": 1e-8},
        (*COVERED, "tests/cards/twin.py", "tests/parity/families.py", "tests/parity/hybrids.py"),
    ),
    "resume": Cell(
        resume,
        f"such a run killed with SIGKILL at step {KILLED} and resumed, against one that was not: difference of "
        "weights and moments, of the losses; how many other numbers differ, and how many steps were taken again",
        {"state": 0, "losses": 0, "other numbers": 0, "steps again": 0},
        COVERED,
    ),
}
