"""Memory and speed of a conversion from and to Hugging Face.

    python -m benchmarks.conversion                     # checkpoints of 5 GB
    python -m benchmarks.conversion --size 20GB --repeats 1 --family llama
    python -m benchmarks.conversion --hidden-size 64 --vocab-size 500 --size 1MB      # a quick look

Each conversion is `tools/convert_checkpoint.py` in a process of its own. Its memory is the peak of RssAnon (mapped
files are the system's to drop), with the check against `transformers`. Its speed is compared with a raw copy, a loop
that reads the same bytes from files that are not cached, writes as many and flushes them to disk; copies and
conversions without the check alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from math import prod
from pathlib import Path
from statistics import median

import torch

from benchmarks.record import RESULTS, keep, machine, options, table
from megatron.checkpoint.durable_files import BLOCK, NewFile
from megatron.checkpoint.tensor_file import TensorFileWriter
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.config import build_config_json, model_type_for
from megatron.convert.huggingface.weights import build_on_meta, map_tensors
from megatron.layers.parameters import num_parameters
from tools.convert_checkpoint import parse_size

ROOT = Path(__file__).parents[1]
TITLE = "# Memory and speed of a conversion, from and to Hugging Face"
INTERVAL = 0.005  # seconds between looks at the memory

SHAPES = {
    "gpt2": {"max_position_embeddings": 1024},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "max_position_embeddings": 1024,
    },
}


@dataclass(frozen=True)
class Measured:
    """One conversion.

    Attributes:
        parameters: of the model.
        largest: bytes of the largest tensor in fp32, as a checkpoint holds it.
        read: bytes of the source.
        written: bytes of the result.
        peak: of anonymous memory, in bytes, the check included.
        checked_seconds: that it took with the check.
        seconds: that it took without the check, from the first file that it made.
        copy_seconds: that the raw copies took, in the same order.
    """

    parameters: int
    largest: int
    read: int
    written: int
    peak: int
    checked_seconds: float
    seconds: Sequence[float]
    copy_seconds: Sequence[float]

    @property
    def bound(self) -> int:
        """Largest peak that is allowed."""
        return 2 * self.largest + 10**9

    @property
    def speed_ratio(self) -> float:
        """Speed of the conversion over that of the copy beside it, the median."""
        return median(copy / own for own, copy in zip(self.seconds, self.copy_seconds, strict=True))


def shape(kind: str, hidden: int, entries: int, size: int) -> ModelConfig:
    """Return a model of the family with heads of 32 channels, and layers for a checkpoint of ``size`` bytes."""
    sizes = {"hidden_size": hidden, "num_attention_heads": hidden // 32, "vocab_size": entries}
    one, two = (num_parameters(ModelConfig(**SHAPES[kind], **sizes, num_layers=layers)) for layers in (1, 2))
    layers = max(1, (size // 4 - one) // (two - one) + 1)
    return ModelConfig(**SHAPES[kind], **sizes, num_layers=layers)


def write_model(folder: Path, model: ModelConfig) -> None:
    """Write a bf16 Hugging Face folder with random weights, a block of them again and again."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(build_config_json(model, "bfloat16")))
    found = [
        slot for made in map_tensors(model_type_for(model), model, build_on_meta(model).specs).values() for slot in made
    ]
    entries = [(slot.name, torch.bfloat16, slot.shape) for slot in found]
    block = torch.randn(1_000_003).mul_(0.02).to(torch.bfloat16)  # a prime, so that no two rows are equal
    with TensorFileWriter(folder / "model.safetensors", entries, {"format": "pt"}) as file:
        for slot in found:
            file.write(slot.name, block.repeat(prod(slot.shape) // len(block) + 1)[: prod(slot.shape)].view(slot.shape))


def convert(argv: Sequence[str], target: Path) -> tuple[int, float]:
    """Return the largest anonymous memory in bytes of a run of the converter, and its seconds since ``target`` exists.

    Raises:
        RuntimeError: when it fails.
    """
    command = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started, peak = None, 0
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as child:
            status = Path(f"/proc/{child.pid}/status")
            while child.poll() is None:
                peak = max(peak, _anonymous(status))
                if started is None and target.exists():
                    started = time.perf_counter()
                time.sleep(INTERVAL)
        seconds = time.perf_counter() - (started or time.perf_counter())
        output.seek(0)
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)}: {output.read()}")
    return peak, seconds


def _anonymous(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return max((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), default=0)


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, and drop them from the cache of the system."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in found:
        with FileIO(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def copy(sources: Sequence[Path], target: Path, written: int) -> float:
    """Read all sources and write ``written`` bytes; return the seconds."""
    started = time.perf_counter()
    per_read = written / sum(path.stat().st_size for path in sources)
    block, due = memoryview(bytearray(BLOCK)), 0.0
    with NewFile(target) as out:
        for path in sources:
            with FileIO(path) as file:
                while count := file.readinto(block):
                    due += count * per_read
                    while due > 0:
                        out.write(block[: min(BLOCK, round(due) or 1)])
                        due -= min(BLOCK, round(due) or 1)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def measure_one(model: ModelConfig, source: Path, target: Path, argv: list[str], repeats: int) -> Measured:
    """Measure one direction; the result stays at ``target``."""
    started = target.with_name(f"{target.name}.tmp") if "--save-hf" in argv else target
    seconds, copies = [], []
    for _ in range(repeats):
        files_in(source)
        seconds.append(convert([*argv, "--no-check"], started)[1])
        written = sum(path.stat().st_size for path in files_in(target))
        shutil.rmtree(target)
        copies.append(copy(files_in(source), target.with_name("copied"), written))
    peak, checked_seconds = convert(argv, started)
    largest = max(4 * prod(spec.shape) for spec in build_on_meta(model).specs.values())
    read = sum(path.stat().st_size for path in files_in(source))
    return Measured(num_parameters(model), largest, read, written, peak, checked_seconds, seconds, copies)


def measure(kind: str, args: argparse.Namespace) -> dict[str, Measured]:
    """Measure both conversions of one family."""
    model = shape(kind, args.hidden_size, args.vocab_size, args.size)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        hf, save, back = folder / "hf", folder / "save", folder / "back"
        write_model(hf, model)
        there = measure_one(model, hf, save, ["--load-hf", f"{hf}", "--save", f"{save}"], args.repeats)
        shutil.rmtree(hf)
        again = measure_one(model, save, back, ["--load", f"{save}", "--save-hf", f"{back}"], args.repeats)
    return {f"{kind}, from Hugging Face": there, f"{kind}, to Hugging Face": again}


COLUMNS = (
    *("conversion", "read", "written", "largest tensor", "peak RssAnon", "2 x largest + 1 GB"),
    *("MB/s read and written", "of a raw copy", "ratio", "seconds with the check"),
)


def describe(measured: dict[str, Measured]) -> list[str]:
    """Return a table of the measurements, sizes in MB."""
    rows = []
    for name, m in measured.items():
        sizes = (f"{size / 1e6:,.0f}" for size in (m.read, m.written, m.largest, m.peak, m.bound))
        speeds = (f"{(m.read + m.written) / 1e6 / median(seconds):,.0f}" for seconds in (m.seconds, m.copy_seconds))
        rows.append([name, *sizes, *speeds, f"{m.speed_ratio:.2f}", f"{m.checked_seconds:.0f}"])
    return table(COLUMNS, rows)


def write(measured: dict[str, Measured], load: float) -> None:
    """Keep the result, after those of other sizes; ``load`` is that of the machine before the start."""
    page = RESULTS / "conversion.json"
    kept = json.loads(page.read_text())["measured"] if page.exists() else {}
    sized = {f"{name}, {4 * m.parameters / 1e9:.0f} GB": m for name, m in measured.items()}
    found = {name: Measured(**values) for name, values in kept.items()} | sized
    where = machine("torch", "transformers") | {"load": f"load {load:.0f} before the start"}
    content = {"measured": {name: asdict(m) for name, m in found.items()}, "machine": where}
    note = (
        f"Sizes in MB. One process, two files at a time, bf16 on the side of Hugging Face; {', '.join(where.values())}."
    )
    keep("conversion", content, "\n".join([TITLE, *describe(found), "", note]))


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write if asked to."""
    parser = options(__doc__, rounds=3)
    parser.add_argument("--family", choices=tuple(SHAPES), action="append", help="(both)")
    parser.add_argument("--size", type=parse_size, default=parse_size("5GB"), help="of the checkpoint (5GB)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="a multiple of 32")
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--folder", default=None, help="where to put 2.5 times the size (the system's choice)")
    args = parser.parse_args(argv)
    measured: dict[str, Measured] = {}
    load = os.getloadavg()[1]
    for kind in args.family or SHAPES:
        measured |= measure(kind, args)
    print("\n".join(describe(measured)))
    if args.write:
        write(measured, load)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
