"""Digest the samples of Megatron-LM's own dataset classes: ``python their_data.py SETTINGS.json RESULTS.json``.

It runs in an environment with megatron-core, and imports nothing of this package. Each setting has Megatron-LM's flags
and the documents of its token files; what the flags mean is read here as in Megatron-LM's pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers import MegatronTokenizer

ENDLESS = 4
"""Seconds of CPU after which a loop is taken for endless."""


def options(flags: str) -> argparse.Namespace:
    """Parse the flags of Megatron-LM that choose samples."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("data-path", "train-data-path", "valid-data-path", "test-data-path"):
        parser.add_argument(f"--{name}", nargs="*")
    for name in ("seq-length", "seed", "train-iters", "global-batch-size", "eval-iters", "eval-interval", "eod-id"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("reset-position-ids", "reset-attention-mask", "eod-mask-loss"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--split")
    return parser.parse_known_args(flags.split())[0]


def build(args: argparse.Namespace, cache: str) -> list[Any]:
    """Return its datasets of the three splits."""
    blend = get_blend_from_list(args.data_path)
    paths = (args.train_data_path, args.valid_data_path, args.test_data_path)
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=args.eod_id)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=None if blend else [get_blend_from_list(path) for path in paths],
        split=(args.split or "969, 30, 1") if blend else None,
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )
    evaluations = args.train_iters // (args.eval_interval or 1000) + 1
    batches = (args.train_iters, evaluations * args.eval_iters, args.eval_iters)
    sizes = [n * args.global_batch_size for n in batches]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def digest(sample: dict[str, Any]) -> str:
    """Return the digest of a sample: tokens, labels, loss mask, positions and attention mask."""
    parts = [sample[name].numpy() for name in ("tokens", "labels", "loss_mask", "position_ids")]
    parts.append(np.packbits(sample["attention_mask"].numpy()[0]))
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8).hexdigest()


def write_files(prefix: str, documents: list[list[int]], dtype: str) -> str:
    """Write token files by its builder; return a digest of both."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)] * bool(document))
    builder.finalize(f"{prefix}.idx")
    content = Path(f"{prefix}.bin").read_bytes() + Path(f"{prefix}.idx").read_bytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_samples(setting: dict[str, Any], files: list[str], path: Path) -> None:
    """Write the digests of all samples by split, or why there are none."""
    spent = int(sum(os.times()[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + ENDLESS, spent + ENDLESS))
    torch.distributed.init_process_group("gloo", f"file://{path}.store", rank=0, world_size=1)
    try:
        datasets = build(options(setting["flags"]), str(path.parent))
    except Exception as error:
        path.write_text(json.dumps({"files": files, "refused": f"{type(error).__name__}: {str(error)[:200]}"}))
        return
    named = zip(("train", "valid", "test"), datasets, strict=True)
    samples = {name: [digest(data[i]) for i in range(len(data))] for name, data in named if data is not None}
    path.write_text(json.dumps({"files": files, "samples": samples}))


def answer(setting: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of all samples by split, or why there are none; an endless loop is killed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        files = [write_files(name, *corpus) for name, corpus in setting["corpora"].items()]
        path = Path(folder) / "answer.json"
        child = multiprocessing.get_context("fork").Process(target=write_samples, args=(setting, files, path))
        child.start()
        child.join()
        os.chdir("/")
        if child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return {"files": files, "refused": "an endless loop"}
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main() -> None:
    """Answer all settings."""
    questions, answers = map(Path, sys.argv[1:])
    warnings.simplefilter("ignore")
    logging.disable()
    answers.write_text(json.dumps([answer(setting) for setting in json.loads(questions.read_text())]))


if __name__ == "__main__":
    main()
