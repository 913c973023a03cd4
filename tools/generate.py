"""Generate text with a trained model: ``python tools/generate.py --load CHECKPOINTS --prompt "Once upon a time"``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

if __name__ == "__main__":  # until main has a handler of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.checkpoint.errors import CheckpointError
from megatron.config.errors import UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.plugins import load_plugins
from megatron.config.text import echo
from megatron.inference.text import InferenceError
from tools.lib.locations import add_model_flags, source_options

if TYPE_CHECKING:
    from megatron.evaluation.load import PretrainedModel
    from megatron.inference.generate import SamplingParams
    from megatron.model.gpt import GPTChunk

NEW_TOKENS = 128
TIMEOUT = timedelta(minutes=10)


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        description="Continue prompts with a trained model. Under torchrun it is split among all processes.",
        epilog="Without --prompt and --prompts the prompt is read from standard input. An empty prompt starts a "
        "document. The text is written to standard output, the speed to standard error.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    add_model_flags(model)
    model.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="N", help="must equal the number of processes, its default"
    )
    model.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute a prompt alike whatever is beside it in the batch, as a run with that option does; on CPUs",
    )
    text = parser.add_argument_group("text")
    source = text.add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="texts to continue")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="file with one prompt per line")
    new_tokens = f"tokens to generate ({NEW_TOKENS}, or fewer if the positions run out)"
    text.add_argument("--max-new-tokens", type=int, metavar="N", help=new_tokens)
    text.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts computed at once (8)")
    text.add_argument("--no-stream", action="store_true", help="print each continuation when it is complete")
    choice = parser.add_argument_group("sampling")
    how = choice.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="always choose the most probable token")
    how.add_argument("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (1.0)")
    choice.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    choice.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most probable tokens with total probability P"
    )
    choice.add_argument("--seed", type=int, default=1234, metavar="N", help="random seed (1234)")
    return parser


def read_prompts(args: argparse.Namespace, launch: Launch) -> list[str]:
    """Return the prompts."""
    source = f"--prompts {args.prompts}" if args.prompts else "standard input"
    try:
        if args.prompt is None and args.prompts is None:
            if launch.world_size > 1:
                seen = f"{launch.world_size} processes cannot read one standard input"
                raise InferenceError(seen, '--prompt "Once upon a time"', "--prompts FILE")
            if sys.stdin.isatty():
                echo("generate: reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
            return [sys.stdin.buffer.read().decode().removesuffix("\n")]
        texts: list[str] = args.prompt or args.prompts.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for text in texts:
            text.encode()  # arguments may contain bytes that are not UTF-8
    except OSError as error:
        raise InferenceError(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        what = "a prompt" if args.prompt or args.prompts else "standard input"
        raise InferenceError(f"{what} is not text in UTF-8: {error}") from error
    return texts


class SpeedCounter:
    """Count tokens and measure time from construction on."""

    def __init__(self) -> None:
        self._start, self._first, self._tokens = time.monotonic(), 0.0, 0

    def token(self) -> None:
        """Count one token."""
        self._tokens += 1
        if self._tokens == 1:
            self._first = time.monotonic() - self._start

    def __str__(self) -> str:
        seconds = time.monotonic() - self._start
        rate = self._tokens / max(seconds, 1e-9)
        return f"{self._tokens:,} tokens in {seconds:.2f} s, {rate:,.1f} tokens/s; the first after {self._first:.2f} s"


def generate_texts(args: argparse.Namespace, texts: Sequence[str], launch: Launch) -> None:
    """Load the model and print continuations of the texts on rank 0."""
    from megatron.distributed.launch import destroy_distributed
    from megatron.evaluation.load import check_tensor_parallel_size, open_pretrained
    from megatron.inference.generate import check_prompts, generate
    from megatron.inference.text import ContinuationPrinter

    sampling = make_sampling(args)
    model = open_pretrained(args.load, source_options(args))
    for note in model.source.notes if launch.rank == 0 else ():
        echo(f"generate: {note}", file=sys.stderr)
    prompts = [model.encode(text) for text in texts]
    new_tokens, positions = args.max_new_tokens, model.model.max_position_embeddings
    if new_tokens is None:
        fits = NEW_TOKENS if positions is None else positions - max(map(len, prompts))
        new_tokens = max(1, min(NEW_TOKENS, fits))
    check_prompts(model.model, prompts, new_tokens)
    check_tensor_parallel_size(model.model, args.tensor_model_parallel_size or launch.world_size, launch.world_size)
    chunk = build_model(args, model, launch)
    out = sys.stdout if launch.rank == 0 else StringIO()
    printer = ContinuationPrinter(out, model.codec, texts, prompts, model.stop_ids, not args.no_stream)
    speed = SpeedCounter()

    def on_token(prompt: int, token: int, last: bool) -> None:
        speed.token()
        printer.token(prompt, token, last)

    generate(chunk, prompts, new_tokens, sampling, model.stop_ids, on_token, args.batch_size)
    if launch.rank == 0:
        echo(f"generate: {speed}", file=sys.stderr)
    destroy_distributed()


def make_sampling(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling settings."""
    from megatron.inference.generate import SamplingParams

    if args.batch_size < 1:
        raise InferenceError(f"--batch-size {args.batch_size}: must be at least 1", "--batch-size 8")
    sampling = SamplingParams(0.0 if args.greedy else args.temperature, args.top_k, args.top_p, args.seed)
    if sampling.greedy and (args.top_k is not None or args.top_p is not None):
        seen = "--top-k and --top-p have no effect if the most probable token is always chosen"
        raise InferenceError(seen, "drop --top-k and --top-p", "drop --greedy")
    return sampling


def build_model(args: argparse.Namespace, model: PretrainedModel, launch: Launch) -> GPTChunk:
    """Build the model on this rank. Collective."""
    from megatron.config.parallel import ParallelConfig
    from megatron.distributed.launch import init_distributed
    from megatron.distributed.layout import Layout
    from megatron.distributed.mesh import Mesh
    from megatron.training.build_model import choose_device

    device = choose_device(args.device)
    init_distributed(None, TIMEOUT, device)
    tp = launch.world_size
    layout = Layout.from_config(ParallelConfig(tensor_model_parallel_size=tp), tp)
    mesh = Mesh(layout, launch.rank, TIMEOUT, max(1, tp // model.model.kv_groups))
    return model.build(mesh, args.params_dtype, device, args.batch_invariant)


def main(argv: Sequence[str]) -> int:
    """Generate the texts.

    Returns:
        The exit status: 1 if the model cannot be loaded or the output pipe is closed, 2 for invalid flags and prompts,
        130 after Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    launch = Launch()
    try:
        launch = Launch.read(os.environ)
        load_plugins(args.plugin or ())
        generate_texts(args, read_prompts(args, launch), launch)
    except (InferenceError, UserError) as error:  # the same on every rank
        if launch.local_rank == 0:
            echo(f"generate: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe
        sys.stdout = StringIO()
        return 1
    except (CheckpointError, OSError) as error:
        where = f"generate, rank {launch.rank}" if launch.world_size > 1 else "generate"
        echo(f"{where}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_process(main(sys.argv[1:]))
