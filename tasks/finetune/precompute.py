"""Compute what dpo.py and distill.py read of a frozen model, and free its memory for the run.

``precompute.py dpo --output PAIRS.jsonl FLAGS`` writes the pairs with ``ref_chosen_logps`` and ``ref_rejected_logps``;
``precompute.py distill --output FOLDER FLAGS`` the logits of the teacher, for ``--teacher-logits FOLDER``. The flags
are those of the run, which the samples depend on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if this checkout is not installed

import pretrain_gpt
from megatron.arguments.cli import parse
from megatron.checkpoint.durable_files import durable_rename, publish_file
from megatron.checkpoint.errors import CheckpointError
from megatron.config.errors import UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.run import RunConfig, TrainingConfig
from megatron.config.text import echo, shell_word
from megatron.convert.huggingface.config import read_model_values
from megatron.data.build import resolve_epochs
from megatron.data.chat import load_conversations, numbered_lines
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.data.teacher_logits import ARRAYS, INDEX, array_path
from megatron.training.resume_source import stored_config

if TYPE_CHECKING:
    from megatron.training.scoring import FrozenModel

BATCHES_PER_PASS = 16
"""Micro-batches that run through the pipeline at once."""


def write_references(config: RunConfig, model: FrozenModel, output: Path) -> None:
    """Write the pairs with their log-probabilities. Collective."""
    from megatron.distributed.launch import run_on_rank0
    from megatron.training.scoring import score_tokens

    paths = config.data.chat_data_path
    pairs = load_conversations(config.data, "train", config.training.seq_length, pairs=True)
    spans = list(zip(pairs.starts, pairs.stops))
    # Nothing predicts the first id of a sequence, with which an answer to an empty prompt begins.
    requests = [(pairs.ids[start:stop].tolist(), int(pairs.answers[start + 1 : stop].sum())) for start, stop in spans]
    scores = score_tokens(model, requests, config.training.micro_batch_size)
    logps = np.array([sum(of_tokens) for of_tokens, _ in scores]).reshape(-1, 2)

    def write() -> None:
        lines = [dict(numbered_lines(Path(path))) for path in paths]
        out = []
        for (file, line), (chosen, rejected) in zip(pairs.places.tolist(), logps.tolist()):
            record = json.loads(lines[file][line])
            record |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
            out.append(json.dumps(record, ensure_ascii=False) + "\n")
        publish_file(output, "".join(out).encode())

    run_on_rank0(write, model.mesh.world)


def write_teacher(config: RunConfig, model: FrozenModel, output: Path) -> None:
    """Write the logits of the teacher for the samples of all splits. Collective; ranks share the folder."""
    from megatron.distributed.comm import all_gather_objects
    from megatron.distributed.launch import run_on_rank0

    training, world = config.training, model.mesh.world
    dp, prefix, streams = model.mesh.dp_size, config.model.attention_prefix, (0, config.diloco.streams)
    data = build_data(config.data, training, config.model.vocab, dp, prefix=prefix, stream=streams)
    data = replace(data, stream=(0, 1))  # the samples of all replicas
    part = output.with_name(f"{output.name}.part")
    types = {"logits": np.float64 if config.precision.params_dtype == "fp64" else np.float32, "ids": np.int32}

    def create() -> None:
        if output.exists():
            raise DataError(f"--output {output} exists", f"rm -r {shell_word(str(output))}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for split, samples in data.used.items():
            for name in ARRAYS:
                shape = samples, data.seq_length, training.distillation_top_k
                np.lib.format.open_memmap(array_path(part, split, name), "w+", types[name], shape)

    def publish() -> None:
        index = {split: data.digest(split, 0, samples) for split, samples in data.used.items()}
        publish_file(part / INDEX, json.dumps(index).encode())
        durable_rename(part, output)

    run_on_rank0(create, world)
    for split in data.used:
        write_split(training, model, data, split, part)
    all_gather_objects(None, world)  # all ranks have written
    run_on_rank0(publish, world)


def write_split(training: TrainingConfig, model: FrozenModel, data: DataSource, split: str, folder: Path) -> None:
    """Write the logits that this rank computes. Collective."""
    from megatron.training.frozen_models import teacher_logits
    from megatron.training.scoring import record

    mesh, samples, measure = model.mesh, data.used[split], teacher_logits(training.distillation_top_k)
    arrays = {name: np.load(array_path(folder, split, name), mmap_mode="r+") for name in ARRAYS}
    cp = next(iter(model.chunks.values())).context.cp
    rows = (range(data.seq_length),) if cp is None else cp.rows(data.seq_length)
    positions = np.concatenate([np.arange(part.start, part.stop) for part in rows])
    size = BATCHES_PER_PASS * training.micro_batch_size * mesh.dp_size
    for first in range(0, samples, size):
        places = data.rank_places(split, first, min(size, samples - first), mesh.dp_rank, mesh.dp_size)
        batches = [data.micro_batch(split, each, 0, model.device, None if cp is None else rows) for each in places]
        for each, found in zip(places, record(model, batches, measure)):
            for name, array in arrays.items() if mesh.tp.rank == 0 else ():
                array[each.start : each.stop, positions] = found[f"teacher_{name}"][: len(each)].cpu().numpy()
    for array in arrays.values():
        array.flush()


def precompute(config: RunConfig, output: Path) -> None:
    """Build the frozen model, and write what it gives. Collective."""
    from megatron.distributed.launch import destroy_distributed
    from megatron.training.build_model import build_mesh, choose_device, join_distributed
    from megatron.training.frozen_models import frozen_location, open_frozen

    location = frozen_location(config)
    rank, world_size = join_distributed(config)
    mesh = build_mesh(config, rank, world_size)
    model = open_frozen(config, mesh, choose_device(config.training.device), location)
    (write_references if config.training.objective == "dpo" else write_teacher)(config, model, output)
    if rank == 0:
        echo(f"precompute: {output} has the results of {location}", file=sys.stderr)
    destroy_distributed()


def main(argv: Sequence[str]) -> int:
    """Write the output; return the exit status: 2 for invalid flags and data, 1 for other errors."""
    parser = argparse.ArgumentParser("precompute.py", description=__doc__, allow_abbrev=False, add_help=not argv[1:])
    parser.add_argument("kind", choices=("dpo", "distill"), help="the program that reads the output")
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="file, or folder for distill")
    args, flags = parser.parse_known_args(argv)
    launch = Launch()
    try:
        launch = Launch.read(os.environ)
        defaults = Path(__file__).with_name(f"{args.kind}.yaml")
        parsed = parse(["--config", str(defaults), *flags], recall=stored_config, read_model=read_model_values)
        config = pretrain_gpt.with_vocabulary(pretrain_gpt.with_tokenizer(parsed.config))
        precompute(resolve_epochs(config, parsed.world_size), args.output)
    except (UserError, DataError) as error:
        if launch.rank == 0:
            echo(f"precompute: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:
        echo(f"precompute, rank {launch.rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
