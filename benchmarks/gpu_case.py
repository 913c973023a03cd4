"""One model on one GPU: our step, eager and at its best, beside that of `transformers` at its best.

`python -m benchmarks.gpu` runs this for every case, each in a process of its own: memory starts unfragmented, and what
one case does to the process ends with it. Settings are tried one after another, the faster kept; then the winners take
turns. Everything is written down as soon as it is known, so that a case that is cut short still tells what it has.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.arguments import parse
from megatron.config.flops import FlopsPerToken
from megatron.config.hf import config_json
from megatron.config.run import RunConfig
from megatron.optim.schedule import Rates
from megatron.parallel.shard import padded_vocabulary
from megatron.training.graphs import WARM_UP, StepRunner
from megatron.training.metrics import device_name
from megatron.training.setup import build
from megatron.training.throughput import peak_flops

COMMON = "--mock-data --bf16 --train-iters 1000 --eval-iters 0 --clip-grad 1"
RATES, BETAS, EPS, CLIP = Rates(1e-4, 0.1), (0.9, 0.95), 1e-8, 1.0
ROUNDS = 5
"""Turns that the winners take."""

Step = Callable[[], Tensor]
"""Takes one training step and returns its loss, not waited for."""


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        flags: of the model and its samples.
        samples: of a step.
        micro_batches: sizes to try, the most promising first; each divides ``samples``.
        goal: MFU that is aimed at on one H200.
    """

    flags: str
    samples: int
    micro_batches: tuple[int, ...]
    goal: float


_1B = (
    "--preset llama3-8b --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 8192 "
    "--no-untie-embeddings-and-output-weights"
)
_TINY = "--preset llama3-8b --num-layers 2 --hidden-size 32 --num-attention-heads 8 --ffn-hidden-size 64"

CASES = {
    "124M-s1024": Case("--preset gpt2-124m --seq-length 1024", 64, (32, 64), 0.45),
    "1B-s2048": Case(f"{_1B} --seq-length 2048", 16, (4, 8), 0.50),
    "1B-s4096": Case(f"{_1B} --seq-length 4096", 8, (2, 4), 0.50),
    "8B-shape-s8192": Case("--preset llama3-8b --num-layers 8 --seq-length 8192", 4, (1, 2), 0.55),
}
"""GPT-2, the shape of Llama-3.2-1B, and eight layers of Llama-3-8B."""

REHEARSAL = {
    name: Case(f"{shape} --vocab-size 300 --seq-length 32 --max-position-embeddings 32", 4, (2, 4), case.goal)
    for (name, case), shape in zip(
        CASES.items(),
        (_TINY.replace("llama3-8b", "gpt2-124m"), *(f"{_TINY} --num-query-groups 2" for _ in range(3))),
    )
}
"""The same in miniature."""


@dataclass(frozen=True)
class Ours:
    """A setting of ours."""

    micro_batch: int
    more: str = "--kernels torch"

    @property
    def name(self) -> str:
        """For tables."""
        return f"micro-batch {self.micro_batch} {self.more}"

    def changed(self, change: str) -> Ours:
        """With a flag that takes the place of an earlier one of its name."""
        flags = {flag.split()[0]: flag for flag in re.split(r" (?=--)", f"{self.more} {change}")}
        return replace(self, more=" ".join(flags.values()))

    def make(self, case: Case, device: torch.device) -> Step:
        """Build the model; weights are drawn on the device, which is faster."""
        trainer = build(self.config(case, device), 0, 1, fresh=False)
        with torch.no_grad():
            for name, master in trainer.optimizer.masters.items():
                init = trainer.chunk.specs[name].init
                _ = master.fill_(init.value) if init.std is None else master.normal_(std=init.std)
        trainer.optimizer.begin()
        trainer.begin_at(0, 0)
        batches, run = trainer.next_batches(), StepRunner(trainer)
        return lambda: run(batches, RATES).loss

    def config(self, case: Case, device: torch.device) -> RunConfig:
        """As the command line would make it."""
        batch = f"--micro-batch-size {self.micro_batch} --global-batch-size {case.samples}"
        return parse(f"{case.flags} {COMMON} {batch} {self.more} --device {device.type}".split(), {}).config


@dataclass(frozen=True)
class Theirs:
    """A setting of `transformers`.

    Attributes:
        micro_batch: samples.
        weights: ``bf16``, updated as such; or ``fp32``, under autocast.
        compiled: by torch.compile, the whole model.
    """

    micro_batch: int
    weights: str = "bf16"
    compiled: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"micro-batch {self.micro_batch}, {self.weights} weights, {'compiled' if self.compiled else 'eager'}"

    def make(self, case: Case, device: torch.device) -> Step:
        """The usual loop around the model, with fused AdamW, SDPA and the fused activation."""
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # takes seconds
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def causal(*args: Any, **options: Any) -> Any:
            return sdpa_attention_forward(*args[:4], None, **options | {"is_causal": True})

        # Inside torch.compile `sdpa` itself would be given a mask, equal to causal, which no flash kernel takes.
        AttentionInterface.register("causal_sdpa", causal)
        ours = Ours(self.micro_batch).config(case, device)
        vocabulary = padded_vocabulary(ours.model.vocab, ours.model.make_vocab_size_divisible_by, 1)
        values = config_json(ours.model) | {"vocab_size": vocabulary, "use_cache": False}
        if values["model_type"] == "gpt2":
            values["activation_function"] = "gelu_pytorch_tanh"
        dtype = torch.bfloat16 if self.weights == "bf16" else torch.float32
        with torch.device(device):
            config = AutoConfig.for_model(**{k: v for k, v in values.items() if k != "torch_dtype"})
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="causal_sdpa").train()
        tokens = torch.randint(0, ours.model.vocab, (case.samples, ours.training.seq_length + 1), device=device)
        parts = [part.contiguous() for part in tokens.split(self.micro_batch)]
        return self._step(model.to(device), parts, device)

    def _step(self, model: nn.Module, parts: Sequence[Tensor], device: torch.device) -> Step:
        options = {"lr": float(RATES.lr), "betas": BETAS, "eps": EPS, "weight_decay": RATES.weight_decay}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
        call = torch.compile(model, dynamic=False) if self.compiled else model
        inputs = [part[:, :-1].contiguous() for part in parts]
        labels = [part[:, 1:].contiguous() for part in parts]

        def step() -> Tensor:
            total = torch.zeros((), device=device)
            for tokens, label in zip(inputs, labels):
                with torch.autocast(device.type, torch.bfloat16, enabled=self.weights == "fp32"):
                    loss = call(input_ids=tokens, labels=label, shift_labels=label).loss / len(parts)
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        return step


Setting = Ours | Theirs


@dataclass
class Result:
    """What became of a setting.

    Attributes:
        name: of the setting.
        seconds: of a step; empty where it failed.
        peak_bytes: most memory that was allocated at once.
        loss: after the warm-up.
        error: why it failed.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float | None = None
    error: str | None = None

    @property
    def median(self) -> float:
        """Of a step; infinite where the setting failed."""
        return statistics.median(self.seconds) if self.seconds else float("inf")


class Bench:
    """Measures the settings of one case within its time, and keeps the file of results up to date."""

    def __init__(self, name: str, case: Case, device: torch.device, seconds: float, out: Path) -> None:
        self.case, self.device, self.out = case, device, out
        self.deadline = time.monotonic() + seconds
        config = Ours(case.micro_batches[0]).config(case, device)
        self.told: dict[str, object] = {
            "case": name,
            "device": device_name(device),
            "peak_flops": peak_flops(device_name(device), "bf16"),
            "flops_per_token": FlopsPerToken.from_config(config).full,
            "tokens": case.samples * config.training.seq_length,
            "parameters": config.model.num_parameters(),
            "goal": case.goal,
            "trials": [],
            "notes": [],
        }
        self.results: dict[Setting, Result] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def note(self, text: str) -> None:
        """For whoever reads the results."""
        self.keep(notes=[*self.told["notes"], text])

    def keep(self, **values: object) -> None:
        """Write down what is known."""
        self.told |= values
        self.out.write_text(json.dumps(self.told, indent=1) + "\n")

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed(self, step: Step, steps: int) -> float:
        """Seconds per step."""
        self.sync()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.sync()
        return (time.perf_counter() - start) / steps

    def attempt(self, setting: Setting) -> Result:
        """Try a setting; one that fails, as by running out of memory, is told and ends nothing."""
        if setting in self.results:
            return self.results[setting]
        result = Result(setting.name)
        try:
            self._measure(setting, result)
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            result = Result(setting.name, error=f"{type(error).__name__}: {first[:200]}")
        if isinstance(setting, Theirs) and setting.compiled:
            torch._dynamo.reset()  # it holds the model
        self.free()
        self.results[setting] = result
        ours = "ours" if isinstance(setting, Ours) else "transformers"
        self.keep(trials=[*self.told["trials"], {"whose": ours} | asdict(result)])
        print(f"  {ours:12} {result.name:70} {result.error or f'{1e3 * result.median:.1f} ms'}", flush=True)
        return result

    def _measure(self, setting: Setting, result: Result) -> None:
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()  # now: a recorded step's activations show only while it is eager
        step = setting.make(self.case, self.device)
        for _ in range(WARM_UP + 1):  # compiles, and records where something is recorded
            loss = step()
        result.loss = loss.item()
        once = self.timed(step, 1)
        result.seconds = [once, *(self.timed(step, 1) for _ in range(2 if once > 0.5 else 4))]
        result.peak_bytes = torch.cuda.max_memory_allocated() - before if cuda else 0

    def fastest(self, settings: Sequence[Setting], cost: float) -> Setting:
        """The fastest of some settings; those for which no ``cost`` seconds are left are passed over."""
        for number, setting in enumerate(settings):
            if number and self.left < cost:
                self.note(f"no time for {setting.name}")
                continue
            self.attempt(setting)
        tried = [setting for setting in settings if setting in self.results]
        return min(tried, key=lambda setting: self.results[setting].median)


def improved(bench: Bench, start: Ours, changes: Sequence[str]) -> Ours:
    """``start`` with each change that makes it faster, one after another."""
    best = start
    for change in changes:
        best = bench.fastest([best, best.changed(change)], cost=20)
    return best


def take_turns(bench: Bench, settings: Mapping[str, Setting]) -> None:
    """The winners in turns, so that a change of the GPU's clock meets all of them; then a profile of each."""
    steps = {name: setting.make(bench.case, bench.device) for name, setting in settings.items()}
    for step in chain.from_iterable([step] * (WARM_UP + 1) for step in steps.values()):
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            seconds[name].append(bench.timed(step, max(1, min(10, int(0.3 / bench.results[settings[name]].median)))))
    bench.keep(
        final={
            name: {"setting": settings[name].name, "seconds": s, "peak_bytes": bench.results[settings[name]].peak_bytes}
            for name, s in seconds.items()
        }
    )
    if bench.left > 15:
        bench.keep(profiles={name: profile(bench, step) for name, step in steps.items()})


def profile(bench: Bench, step: Step) -> str:
    """The longest kernels of one step."""
    cuda, activity = bench.device.type == "cuda", torch.profiler.ProfilerActivity
    bench.sync()
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * cuda]) as recorded:
        step()
        bench.sync()
    order = f"self_{'device' if cuda else 'cpu'}_time_total"
    return recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)


def run(bench: Bench) -> None:
    """Everything about a case, what matters most first, as time may run out."""
    cuda, sizes, winners = bench.device.type == "cuda", bench.case.micro_batches, dict[str, Setting]()

    def crown(**settings: Setting) -> None:
        winners.update(settings)
        bench.keep(winners={name: bench.results[setting].name for name, setting in winners.items()})

    def compile_theirs(weights: str, cost: float) -> None:
        if cuda:
            rival = replace(usual, compiled=True, weights=weights)
            crown(transformers=bench.fastest([winners["transformers"], rival], cost))

    eager = bench.fastest([Ours(size) for size in sizes], cost=20)
    usual = bench.fastest([Theirs(size) for size in sizes], cost=20)
    crown(best=eager, transformers=usual, eager=eager)
    best = improved(bench, eager, ["--kernels auto", *["--cuda-graph step"] * cuda])
    crown(best=best)
    compile_theirs("bf16", cost=45)
    chunks = [f"--cross-entropy-chunk-size {tokens}" for tokens in (4096, 16384)]
    best = improved(bench, best, [*chunks, *["--kernels auto attention=torch"] * cuda])
    crown(best=best)
    compile_theirs("fp32", cost=60)
    if eager == best:
        del winners["eager"]
    if bench.left < 20:
        bench.note("no time for turns")
        return
    room = 0.85 * torch.cuda.mem_get_info()[0] if cuda else float("inf")
    while sum(bench.results[w].peak_bytes for w in winners.values()) > room and len(winners) > 1:
        bench.note(f"{winners.popitem()[0]} took no part in the turns: not all fit into the memory together")
    try:
        take_turns(bench, winners)
    except Exception as error:
        bench.note(f"the turns ended: {type(error).__name__}: {str(error)[:200]}")


def main(argv: Sequence[str]) -> int:
    """Measure one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--rehearse", action="store_true", help="in miniature, on whatever there is")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    case = (REHEARSAL if args.rehearse else CASES)[args.case]
    run(Bench(args.case, case, device, args.seconds, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
