"""Take a step of a run again, compare it to the bit, and find what is wrong in it: module, sample.

``python tools/replay_step.py RUN_DIR/incidents/step_00000123_spike`` or
``python tools/replay_step.py RUN_DIR --step 123 --bisect --samples``. The run is only read, and may go on meanwhile.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.errors import UserError
from megatron.config.plugins import load_plugins
from megatron.config.run import RunConfig
from megatron.config.text import counted, echo
from megatron.data.document_finder import DocumentFinder
from megatron.data.errors import DataError, ToolParser
from tools.lib.replayed_step import (
    TOLERANCE,
    ReplayTarget,
    compare,
    find_source,
    one_process,
    read_target,
    working_folder,
)

if TYPE_CHECKING:
    from megatron.training.module_trace import ModuleSize, SampleSize, Suspicion
    from megatron.training.replay import Replay, ReplayOptions
    from megatron.training.resume_source import ResumeSource

MOST_ROWS, MOST_SAMPLES = 40, 5
TOKENS_SHOWN = 48


def build_parser() -> ToolParser:
    """Return the command-line parser."""
    parser = ToolParser(
        "replay_step.py",
        description="Take a step of a run again from the checkpoint before it, and compare losses, norms and gradients "
        "with what the run has recorded. Nothing is written into the folders of the run.",
        epilog="Exit status: 0 if all is equal, 1 if something differs, 2 if the step cannot be taken again.",
    )
    parser.add_argument("path", type=Path, metavar="INCIDENT|RUN_DIR", help="folder of an incident, or of a run")
    parser.add_argument("--step", type=int, metavar="N", help="step of the run, counted from 1")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="checkpoints, or one of them, if they have moved; none for the start"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="options to replace, such as data_path=NEW"
    )
    parser.add_argument("--one-process", action="store_true", help="compute on one rank, equal up to rounding")
    parser.add_argument("--bisect", action="store_true", help="measure every module, and name the first out of line")
    parser.add_argument(
        "--against",
        choices=("before", "fp64", "plain"),
        default="before",
        help="what --bisect compares with: the step before, this step in fp64, or with PyTorch's kernels (before)",
    )
    parser.add_argument("--samples", action="store_true", help="compute each sample alone, and name the ones to blame")
    parser.add_argument("--module", metavar="NAME", help="module for --samples and --save instead of the one found")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep inputs and outputs of the module (safetensors)")
    parser.add_argument("--stop-at", metavar="MODULE", help="enter the debugger before this module; with one rank")
    return parser


def main(argv: Sequence[str]) -> int:
    """Replay and report.

    Returns:
        0 if everything is equal, 1 if something differs, 2 if the step cannot be taken again.
    """
    parser = build_parser()
    args = parser.parse(argv)
    args.path = args.path.resolve()
    try:
        target = read_target(args.path, args.step, args.set)
        if args.checkpoint not in (None, "none") and Path(args.checkpoint).exists():
            args.checkpoint = str(Path(args.checkpoint).resolve())
        args.save = None if args.save is None else args.save.resolve()
        folder = working_folder(target)
        if folder is not None:
            os.chdir(folder)
        source = find_source(target, args.checkpoint)
        check_comparable(args, target, source)
        return report(args, target, source)
    except (UserError, DataError) as error:
        return parser.fail(error, 2)


def check_comparable(args: argparse.Namespace, target: ReplayTarget, source: ResumeSource) -> None:
    """Raise DataError, before anything is computed, if the step cannot be taken again, or be compared with anything."""
    if target.config.diloco.diloco_sync_interval is not None:
        raise DataError("the steps of a DiLoCo replica depend on what other replicas sent: they cannot be taken again")
    if target.config.elastic.elastic_replicas is not None:
        raise DataError("a step of an elastic replica sums what all replicas computed: it cannot be taken again alone")
    own, taken = target.own, max((each.last for each in target.logged), default=0)
    iters = target.config.training.train_iters
    if iters is not None and target.step > target.origin.iteration + iters:
        end = target.origin.iteration + iters
        raise DataError(
            f"the run ends with step {end}, and has no step {target.step}", f"--step {min(end, taken) or 1}"
        )
    comparable = target.lines_after(source) and (own is None or own.last == target.step)
    if target.has_numbers or args.bisect or args.samples or args.save or args.stop_at or comparable:
        return
    if own is None:
        logged = f": its last log line is of step {taken}" if 0 < taken < target.step else ""
        fixes = (f"--step {taken}",) if logged else ()
        seen = f"the run has recorded nothing to compare step {target.step} with{logged}"
        raise DataError(seen, *fixes, "--bisect")
    mean = f"the run has logged steps {own.first} to {own.last} by their mean"
    if own.last != target.step:
        raise DataError(f"{mean}: step {target.step} alone cannot be compared", f"--step {own.last}")
    begin = source.paths[0].name if source.paths else "the start"
    raise DataError(f"{mean}, and {begin} is after step {own.first - 1}", "--checkpoint none", "--bisect")


def report(args: argparse.Namespace, target: ReplayTarget, source: ResumeSource) -> int:
    """Take the steps and print what was found; return the exit status.

    Raises:
        UserError: if the checkpoint cannot be resumed.
        DataError: if the data are not those of the run, or the options do not apply.
    """
    load_plugins(target.config.compute.plugin)
    from megatron.training.replay import ReplayOptions, read_only_config  # torch: only for what can be taken

    config, exact = read_only_config(target.config), True
    world_size = target.world_size
    if args.one_process and world_size > 1:
        config, world_size, exact = one_process(config), 1, False
    config, notes = on_this_machine(target, config, world_size)
    exact = exact and not notes
    if args.stop_at and world_size > 1:
        raise DataError("--stop-at needs one rank: a debugger in one of several would stop the others", "--one-process")
    begin = source.paths[0].name if source.paths else "the start of the run"
    where = "this process" if world_size == 1 else f"{world_size} processes of this machine"
    echo(f"step {target.step} of {target.run}, from {begin}, in {where}", flush=True)
    for note in (*([target.sentence] if target.sentence else []), *notes):
        echo(f"note: {note}")
    options = ReplayOptions(target.step, target.threads, modules=args.bisect or args.save, stop_at=args.stop_at)
    found = run(config, world_size, source, options)
    dtype = config.precision.params_dtype
    result = compare(target, found, exact, TOLERANCE[dtype])
    for line in result.lines:
        echo(line)
    if args.bisect or args.samples or args.save:
        investigate(args, target, config, world_size, source, replace(options, stop_at=None), found)
    if not result.compared:
        raise DataError(f"step {target.step} was taken again, and the run has recorded nothing to compare it with")
    if result.first_difference:
        for note in found.notes:
            echo(f"note: {note}")
        echo(f"DIFFERS: first in {result.first_difference}")
        if target.threads is None and config.training.device == "cpu":
            import torch

            here = torch.get_num_threads()
            echo(f"note: the run's number of threads is not recorded, here it is {here}: another one changes bits")
        return 1
    how = "to the bit" if exact else f"within {TOLERANCE[dtype]:g}, the largest error is {result.largest_error:.1e}"
    echo(f"equal {how}: {counted(result.compared, 'number')} compared")
    return 0


def on_this_machine(target: ReplayTarget, config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """Return the configuration on the devices of this machine, and notes on what may change bits."""
    import torch

    record, notes = target.record, list[str]()
    had_gpu = record.get("device", config.training.device) == "cuda"
    if had_gpu and torch.cuda.device_count() < world_size:
        notes.append("the run used GPUs, and this machine has too few: computed on the CPU, equal up to rounding")
        config = replace(
            config,
            training=replace(config.training, device="cpu"),
            parallel=replace(config.parallel, distributed_backend="gloo" if world_size > 1 else None),
        )
    here = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    for name, version in here.items():
        if name in record and record[name] != version and (name == "torch" or not had_gpu):
            notes.append(f"the run used {name} {record[name]}, here it is {version}: equal up to rounding")
    return config, notes


def run(config: RunConfig, world_size: int, source: ResumeSource, options: ReplayOptions) -> Replay:
    """Take the steps on all ranks, and return what rank 0 has."""
    from tools.lib.ranks import run_ranks

    if world_size == 1:
        return replay_rank(config, 0, 1, source.to_json(), options)
    preload = ["megatron.training.replay", "torch._dynamo"]
    return run_ranks(replay_rank, config, world_size, source.to_json(), options, preload=preload)[0]


def replay_rank(config: RunConfig, rank: int, world_size: int, source: list[object], options: ReplayOptions) -> Replay:
    """Take the steps on a rank that has joined the others."""
    from megatron.training.replay import replay
    from megatron.training.resume_source import ResumeSource

    return replay(config, ResumeSource.from_json(source), options, rank, world_size)


def investigate(
    args: argparse.Namespace,
    target: ReplayTarget,
    config: RunConfig,
    world_size: int,
    source: ResumeSource,
    options: ReplayOptions,
    found: Replay,
) -> None:
    """Print the first module and the samples that are out of line, and keep the module's tensors, as asked for."""
    from megatron.training.module_trace import first_out_of_line, suspicious_samples

    name = args.module
    if args.bisect or args.save:
        other, compared = found.modules_before, "the step before"
        if args.bisect and args.against != "before":
            other, compared = run(against(config, args.against), world_size, source, options).modules, args.against
        suspicion = first_out_of_line(found.modules, other)
        if args.bisect:
            print_modules(found.modules, other, compared, suspicion)
        name = name or (suspicion and suspicion.module.name)
    if args.samples:
        name = name or "embedding"
        samples = run(config, world_size, source, replace(options, samples=str(name), modules=False)).samples
        print_samples(target, samples, suspicious_samples(samples), str(name))
    if args.save and name:
        kept = run(config, world_size, source, replace(options, modules=False, keep=(str(name), str(args.save)))).kept
        echo(f"inputs, outputs and gradients of {name}: {kept or args.save}")


def against(config: RunConfig, kind: str) -> RunConfig:
    """Return the configuration to compare with: in fp64, or with PyTorch's kernels."""
    from megatron.config.compute import ComputeConfig

    compute = replace(ComputeConfig(), plugin=config.compute.plugin, deterministic=config.compute.deterministic)
    if kind == "plain":
        return replace(config, compute=compute)
    return replace(config, compute=compute, precision=replace(config.precision, params_dtype="fp64"))


def print_modules(
    sizes: Sequence[ModuleSize], before: Sequence[ModuleSize], compared: str, suspicion: Suspicion | None
) -> None:
    """Print the table of modules, all in execution order, shortened around the one that is out of line."""
    earlier = {(size.name, size.backward): size for size in before}
    at = next((i for i, size in enumerate(sizes) if suspicion and size is suspicion.module), 0)
    first = max(0, min(at - MOST_ROWS // 2, len(sizes) - MOST_ROWS))
    echo(f"{'':2}{'module':<44}{'':<9}{'RMS':>12}{'largest':>12}{compared:>17}")
    for i, size in enumerate(sizes[first : first + MOST_ROWS], first):
        known = earlier.get((size.name, size.backward))
        mark, then = "> " if suspicion and i == at else "  ", "" if known is None else f"{known.rms:.4g}"
        kind = "gradient" if size.backward else "output"
        echo(f"{mark}{size.name:<44}{kind:<9}{size.rms:>12.4g}{size.largest:>12.4g}{then:>17}")
    if len(sizes) > MOST_ROWS:
        echo(f"  {len(sizes) - MOST_ROWS} further rows are not shown")
    if suspicion is None:
        echo("no module is out of line")
        return
    what = "the gradient of the output" if suspicion.module.backward else "the output"
    echo(f"first out of line: {what} of {suspicion.module.name}, {suspicion.why}")


def print_samples(
    target: ReplayTarget, samples: Sequence[SampleSize], found: Sequence[SampleSize], module: str
) -> None:
    """Print the samples that are out of line, with their texts."""
    echo(f"each of {counted(len(samples), 'sample')} computed alone, measured at {module}:")
    documents = {each.get("sample"): each.get("documents", []) for each in target.record.get("samples", ())}
    if any(sample.sample not in documents for sample in found[:MOST_SAMPLES]):
        documents |= read_documents(target, [sample.sample for sample in found[:MOST_SAMPLES]])
    for sample in found[:MOST_SAMPLES]:
        numbers = f"loss {sample.loss:.5g}, largest output {sample.output:.4g}, gradient RMS {sample.gradient:.4g}"
        where = f"micro-batch {sample.micro_batch} of rank {sample.rank}"
        echo(f"> sample {sample.sample}, {where}: {numbers}" + ("" if sample.finite else ", not finite"))
        for part in documents.get(sample.sample, []):
            row = "" if part.get("row") is None else f":{part['row']}"
            place = "" if part.get("file") is None else f", {part['file']}{row}"
            shown = part["text"] if part.get("text") is not None else f"ids {part['ids']}"
            echo(f"    {part['source']} document {part['document']}{place}: {shown!r}")
    if len(found) > MOST_SAMPLES:
        echo(f"  {counted(len(found) - MOST_SAMPLES, 'further sample')} out of line")
    finite = [sample.loss for sample in samples if math.isfinite(sample.loss)]
    if not found:
        echo(f"  no sample is out of line: losses from {min(finite):.5g} to {max(finite):.5g}")


def read_documents(target: ReplayTarget, numbers: Sequence[int]) -> dict[int, list[dict[str, object]]]:
    """Return the documents of samples of the run; none for generated samples, or if the data cannot be opened."""
    from dataclasses import asdict

    from tools.lib.run_samples import RunSamples

    try:
        train = RunSamples.of_folder(target.run).at(target.step).source.datasets["train"]
    except (DataError, OSError):
        return {}
    finder = DocumentFinder(TOKENS_SHOWN)
    return {n: [asdict(finder.part(span)) for span in train.spans(n) if span.tokens] for n in numbers}


if __name__ == "__main__":
    for ending in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(ending, signal.SIG_DFL)  # exit quietly on Ctrl-C and when the reader of a pipe closes it
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
