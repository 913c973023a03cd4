"""Sample orders of random settings, here and by Megatron-LM's own dataset classes, sample by sample.

``MEGATRON_CORE_PYTHON`` names the Python of an environment with megatron-core. ``python -m
tests.megatron_core.sample_orders [FIRST END]`` compares random settings (0 to 599), and writes lines of
tests/golden/megatron_moves.txt.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.distributed.micro_batch import MicroBatch
from tests.megatron_core.moves import record
from tests.unit.data import pairs

PROGRAM = Path(__file__).with_name("their_data.py")
EOD = 96
MODEL = f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size {EOD + 1} --eod-id {EOD} --lr 1e-3"
MASKS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
SPLITS = ("8,1,1", "949,50,1", "1,1,1", "90,10,0", "100,0,0", "98.5,1,.5", "1", "0.5,0.25,0.25", "70,30", "3,0,1")
TRAINING_ALONE = ("100,0,0", "1", "3,0,1")
FILES_MISSING = "token files differ from those of its builder"

Setting = dict[str, Any]
"""Flags, and under ``corpora`` by name the documents and the type of their ids."""


@dataclass
class Comparison:
    """What became of the settings."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    """Samples that are equal."""
    findings: list[str] = field(default_factory=list)
    """A line for each setting that is different, or refused on one side."""

    def describe(self) -> str:
        """Describe it in a line."""
        names = ("equal", "refused by both", "refused there alone", "refused here alone", "different")
        parts = [f"{self.counts[name]} {name}" for name in names]
        return f"{sum(self.counts.values())} settings, {self.samples:,} samples: {', '.join(parts)}"


def random_setting(seed: int) -> Setting:
    """Return flags and documents that depend on ``seed`` alone."""
    draw = random.Random(seed)
    names = [f"corpus{i}" for i in range(draw.randint(1, 4))]
    corpora = {name: random_corpus(draw) for name in names}
    flags = [MODEL, f"--seq-length {draw.choice([4, 8, 13, 32, 64])} --max-position-embeddings 64"]
    flags += [f"--seed {draw.choice([0, 1, 1234, draw.randrange(2**31)])}"]
    flags += [f"--train-iters {draw.randint(1, 60)} --global-batch-size {draw.randint(1, 8)}"]
    evaluations = f"--eval-iters {draw.randint(0, 3)} --eval-interval {draw.randint(3, 70)}"
    flags += [flag for flag in MASKS if draw.random() < 0.4]
    if draw.random() < 0.7:
        flags += [f"--data-path {blend(draw, names)}"]
        split = draw.choice([None, *SPLITS])
        flags += [f"--split {split}"] * (split is not None)
        if split in TRAINING_ALONE:
            evaluations = "--eval-iters 0"
    else:
        for split in ("train", "valid", "test"):
            flags += [f"--{split}-data-path {blend(draw, draw.sample(names, draw.randint(1, len(names))))}"]
    return {"flags": " ".join([*flags, evaluations]), "corpora": corpora}


def random_corpus(draw: random.Random) -> tuple[list[list[int]], str]:
    """Return documents, some of them empty, and the type of their ids."""
    longest = draw.choice([3, 10, 40, 300])
    lengths = [draw.randint(draw.choice([0, 1, 1]), longest) for _ in range(draw.randint(1, 80))]
    return [[draw.randrange(EOD + 1) for _ in range(n)] for n in lengths], draw.choice(["uint16", "int32"])


def blend(draw: random.Random, names: list[str]) -> str:
    """Return prefixes, with weights or without."""
    if draw.random() < 0.35:
        return " ".join(names)
    weights = [draw.choice([str(draw.randint(1, 9)), f"{draw.random() + 1e-3:.4f}", "1"]) for _ in names]
    return " ".join(f"{weight} {name}" for weight, name in zip(weights, names, strict=True))


def digest(batch: MicroBatch) -> Iterator[str]:
    """Yield the digest of each sample of a micro-batch, as their_data.py computes it."""
    rows, length = batch.tokens.shape
    places = np.broadcast_to(np.arange(length), (rows, length))
    positions = places if batch.positions is None else batch.positions.numpy()
    documents = np.zeros_like(places) if batch.documents is None else batch.documents.numpy()
    for row in range(rows):
        later = np.triu(np.ones((length, length), dtype=bool), 1)
        hidden = later | (documents[row][:, None] != documents[row])
        parts = [column[row].numpy() for column in (batch.tokens, batch.labels, batch.loss_mask)]
        parts += [positions[row], np.packbits(hidden)]
        yield hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8).hexdigest()


def answer(setting: Setting, folder: Path) -> dict[str, Any]:
    """Return what their_data.py returns, computed here; files are written to ``folder``."""
    folder.mkdir()
    with chdir(folder):
        for name, (documents, dtype) in setting["corpora"].items():
            pairs.write(Path(name), documents, dtype)
        files = [b"".join(pairs.pair(Path(name))) for name in setting["corpora"]]
        found: dict[str, Any] = {"files": [hashlib.blake2b(content, digest_size=8).hexdigest() for content in files]}
        try:
            config = parse(setting["flags"].split(), {}).config
            source = build_data(config.data, config.training, config.model.vocab, 1)
        except (DataError, UserError) as error:
            return found | {"refused": str(error)}
        found["samples"] = {split: [*read(source, split)] for split in source.datasets}
        found["segments"] = {split: len(counts) for split, counts in source.segments.items()}
        return found


def read(source: DataSource, split: str) -> Iterator[str]:
    """Yield the digests of all samples of a split."""
    count = len(source.datasets[split])
    for first in range(0, count, 64):
        yield from digest(source.micro_batch(split, range(first, min(first + 64, count)), 0))


def compare(settings: list[Setting], folder: Path) -> Comparison:
    """Compare both programs in settings; raise CalledProcessError if Megatron-LM's fails."""
    questions, answers = folder / "settings.json", folder / "answers.json"
    questions.write_text(json.dumps(settings))
    command = [os.environ["MEGATRON_CORE_PYTHON"], str(PROGRAM), str(questions), str(answers)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    result = Comparison()
    for number, (setting, theirs) in enumerate(zip(settings, json.loads(answers.read_text()), strict=True)):
        ours = answer(setting, folder / str(number))
        kind, why = judge(ours, theirs)
        result.counts[kind] += 1
        if kind == "equal":
            result.samples += sum(map(len, ours["samples"].values()))
        elif kind != "refused by both":
            result.findings.append(f"{kind}: {why}: {setting['flags']}")
    return result


def judge(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of a comparison, and the reason."""
    if ours["files"] != theirs["files"]:
        return "different", FILES_MISSING
    refusals = [side.get("refused") for side in (ours, theirs)]
    if all(refusals):
        return "refused by both", ""
    if refusals[0]:
        return "refused here alone", refusals[0]
    if refusals[1]:
        return "refused there alone", refusals[1]
    for split, samples in ours["samples"].items():
        expected = theirs["samples"][split]
        # a run beyond the end of a blend without weights continues in a segment of its own
        seen = samples[: len(expected)] if ours["segments"][split] > 1 else samples
        if seen != expected:
            places = [i for i, pair in enumerate(zip(seen, expected)) if pair[0] != pair[1]]
            return "different", f"{split}, {len(places)} of {len(seen)} and {len(expected)} samples"
    return "equal", ""


def main() -> None:
    """Compare, and write a line for each hundred."""
    first, end = map(int, sys.argv[1:] or (0, 600))
    for begin in range(first, end, 100):
        seeds = range(begin, min(begin + 100, end))
        with tempfile.TemporaryDirectory() as folder:
            found = compare([random_setting(seed) for seed in seeds], Path(folder))
        print(found.describe(), *found.findings, sep="\n", flush=True)
        record(f"sample orders {seeds.start} to {seeds.stop - 1}", found.describe())


if __name__ == "__main__":
    main()
