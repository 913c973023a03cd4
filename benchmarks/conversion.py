"""Memory of a conversion from and to Hugging Face beside the model's largest tensor.

    python -m benchmarks.conversion            # models of 0.5 and 0.7 billion parameters
    python -m benchmarks.conversion --hidden-size 256 --num-layers 2 --vocab-size 4000      # a quick look

Each conversion is `tools/convert_checkpoint.py` in a process of its own, with the check against `transformers`. What is
reported is the peak of its anonymous memory (RssAnon; mapped files are the system's to drop) above that of the same
conversion of a tiny model, which is what Python, torch and transformers take.
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
from math import prod
from pathlib import Path

import torch

from benchmarks.record import keep, versions
from megatron.checkpoint.tensor_file import TensorFileWriter
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.config import build_config_json, model_type_for
from megatron.convert.huggingface.weights import build_on_meta, map_tensors
from megatron.layers.parameters import num_parameters

ROOT = Path(__file__).parents[1]
TITLE = "# Memory of a conversion, from and to Hugging Face"
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
        model: bytes of all tensors in fp32.
        baseline: peak of anonymous memory of the same conversion of a tiny model, bytes.
        peak: the same of this conversion.
        seconds: it took, the check included.
    """

    parameters: int
    largest: int
    model: int
    baseline: int
    peak: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Memory above the baseline, in largest tensors."""
        return (self.peak - self.baseline) / self.largest


def shape(kind: str, hidden: int, layers: int, entries: int) -> ModelConfig:
    """Return a model of the family, with heads of 32 channels."""
    sizes = {"hidden_size": hidden, "num_attention_heads": hidden // 32, "num_layers": layers, "vocab_size": entries}
    return ModelConfig(**SHAPES[kind], **sizes)


def write_model(folder: Path, model: ModelConfig) -> None:
    """Write a bf16 Hugging Face folder with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(build_config_json(model, "bfloat16")))
    found = [slot for made in map_tensors(model_type_for(model), build_on_meta(model).specs).values() for slot in made]
    entries = [(slot.name, torch.bfloat16, slot.shape) for slot in found]
    with TensorFileWriter(folder / "model.safetensors", entries, {"format": "pt"}) as file:
        for slot in found:
            file.write(slot.name, torch.randn(slot.shape).mul_(0.02).to(torch.bfloat16))


def peak_of(argv: Sequence[str]) -> tuple[int, float]:
    """Largest anonymous memory in bytes of a run of the converter, and its seconds.

    Raises:
        RuntimeError: when it fails.
    """
    command = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        status = Path(f"/proc/{child.pid}/status")
        while child.poll() is None:
            peak = max(peak, _anonymous(status))
            time.sleep(INTERVAL)
        output = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)}: {output}")
    return peak, time.perf_counter() - started


def _anonymous(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return max((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), default=0)


def both_ways(folder: Path, model: ModelConfig) -> dict[str, tuple[int, float]]:
    """Peak and seconds of the conversions of one model, there and back."""
    write_model(folder / "hf", model)
    there = peak_of(["--load-hf", f"{folder}/hf", "--save", f"{folder}/save"])
    shutil.rmtree(folder / "hf")
    back = peak_of(["--load", f"{folder}/save", "--save-hf", f"{folder}/back"])
    return {"from Hugging Face": there, "to Hugging Face": back}


def measure(kind: str, args: argparse.Namespace) -> dict[str, Measured]:
    """Both conversions of one family, each with its baseline."""
    model, tiny = shape(kind, args.hidden_size, args.num_layers, args.vocab_size), shape(kind, 32, 1, 1000)
    sizes = [4 * prod(spec.shape) for spec in build_on_meta(model).specs.values()]
    found = []
    for converted in (tiny, model):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found.append(both_ways(Path(folder), converted))
    small, large = found
    return {
        f"{kind}, {way}": Measured(num_parameters(model), max(sizes), sum(sizes), small[way][0], *large[way])
        for way in large
    }


def describe(measured: dict[str, Measured]) -> list[str]:
    """Return a table of the measurements, in MB."""
    columns = ("conversion", "model, fp32", "largest tensor", "peak above baseline", "ratio", "baseline", "seconds")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, m in measured.items():
        sizes = (m.model, m.largest, m.peak - m.baseline, m.baseline)
        model, largest, peak, baseline = (f"{size / 1e6:,.0f}" for size in sizes)
        lines.append(f"| {name} | {model} | {largest} | {peak} | {m.ratio:.2f} | {baseline} | {m.seconds:.0f} |")
    return lines


def write(measured: dict[str, Measured]) -> None:
    """Keep the result."""
    measured_with = versions("torch", "transformers")
    content = {"measured": {name: asdict(m) for name, m in measured.items()}, "versions": measured_with}
    measured_on = ", ".join(f"{name} {number}" for name, number in measured_with.items())
    note = f"Sizes in MB. One process, one thread, bf16 on the side of Hugging Face, with the check; {measured_on}."
    keep("conversion", content, "\n".join([TITLE, "", *describe(measured), "", note]))


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(SHAPES), action="append", help="(both)")
    parser.add_argument("--hidden-size", type=int, default=1536, help="a multiple of 32")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--folder", default=None, help="where to put some GB for a while (the system's choice)")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args(argv)
    measured: dict[str, Measured] = {}
    for kind in args.family or SHAPES:
        measured |= measure(kind, args)
    print("\n".join(describe(measured)))
    if args.write:
        write(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
