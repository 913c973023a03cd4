"""Perplexity of a trained model on a text, and accuracy on LAMBADA: ``python tasks/evaluate/perplexity.py --load RUN``.

A text is read in windows that move by a stride (Radford et al. 2019, GPT-2): the first window scores all its tokens but
the first, each later one the tokens that no window before it has scored, with the rest of the window as context.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if this checkout is not installed

from megatron.checkpoint.durable_files import publish_file
from megatron.checkpoint.errors import CheckpointError
from megatron.config.errors import UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.plugins import load_plugins
from megatron.config.text import echo
from megatron.data.chat import numbered_lines
from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import BadDocumentError, parse_record, text_of
from megatron.inference.text import InferenceError
from tools.lib.locations import add_model_flags, source_options

if TYPE_CHECKING:
    from megatron.inference.scoring import ComputingModel

TIMEOUT = timedelta(minutes=10)

Request = tuple[list[int], int]
"""Token IDs, and how many of the last ones are scored."""

WIKITEXT2 = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("s '", "s'"),
        (" @([-,.])@ ", r"\1"),  # in numbers and compounds
        *((rf" ([{sign}]) ", r"\1 ") for sign in ":;.!?,"),
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    )
)
"""Replacements that turn the tokenised text of WikiText-2 into plain text, in this order."""


def detokenize_wikitext2(text: str) -> str:
    """Return plain text for the tokenised text of WikiText-2 or WikiText-103."""
    for pattern, replacement in WIKITEXT2:
        text = pattern.sub(replacement, text)
    return text


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        description="Measure the perplexity of a trained model on a text, or its accuracy on LAMBADA. Under torchrun "
        "the model is split, and windows are divided over the replicas that the other processes hold.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    add_model_flags(model)
    model.add_argument("--tokenizer-model", type=Path, metavar="DIR", help="folder of another tokenizer")
    for kind in ("tensor", "pipeline"):
        model.add_argument(f"--{kind}-model-parallel-size", type=int, default=1, metavar="N", help=f"{kind} ranks (1)")
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="a text, or .jsonl with the field text in each line"
    )
    text.add_argument(
        "--task",
        choices=("perplexity", "lambada"),
        default="perplexity",
        help="perplexity of all tokens, or of the last word of each line and how many are predicted (perplexity)",
    )
    text.add_argument(
        "--detokenize",
        choices=("wikitext2",),
        help="turn tokenised text into plain text first; words and bytes are those of the original",
    )
    text.add_argument("--seq-length", type=int, metavar="N", help="tokens of a window (the model's positions)")
    text.add_argument("--stride", type=int, metavar="N", help="tokens by which windows move (half a window)")
    text.add_argument("--micro-batch-size", type=int, default=8, metavar="N", help="windows computed at once (8)")
    text.add_argument("--output", type=Path, metavar="FILE", help="also write the results as JSON")
    return parser


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: the field ``text`` of each line of a .jsonl, else the whole file."""
    place = f"{path}"
    try:
        if path.suffix == ".jsonl":
            texts = []
            for number, line in numbered_lines(path):
                place = f"{path}:{number}"
                if isinstance(line, BadDocumentError):
                    raise line
                texts.append(text_of(parse_record(line, path), "text"))
        else:
            texts = [path.read_text(encoding="utf-8")]
    except BadDocumentError as error:
        seen = f"--data {place}{error.seen}"
        raise InferenceError(seen, "one JSON object with the field text per line") from error
    except DataError as error:
        raise InferenceError(f"--data {error.seen}") from error
    except (OSError, UnicodeError) as error:
        raise InferenceError(f"--data {path} cannot be read: {error}") from error
    if not any(text.strip() for text in texts):
        raise InferenceError(f"--data {path} holds no text")
    return texts


def create_output_folder(output: Path) -> None:
    """Create the folder of the results; raise InferenceError if they cannot be written there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InferenceError(f"--output {output} cannot be written: {error.strerror}") from error
    if output.is_dir():
        raise InferenceError(f"--output {output} is a folder", f"--output {output}/results.json")


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[Request]:
    """Yield windows of up to ``length`` tokens, and how many of the last ones each scores."""
    scored = 1  # nothing comes before the first token
    for start in range(0, len(tokens), stride):
        stop = min(start + length, len(tokens))
        if stop > scored:
            yield list(tokens[start:stop]), stop - scored
        scored = stop
        if stop == len(tokens):
            return


@dataclass(frozen=True)
class Evaluation:
    """A model with its tokenizer, and how texts are read."""

    model: ComputingModel
    tokenizer: Any  # of transformers
    length: int  # tokens of a window
    stride: int
    batch_size: int

    def perplexity(self, texts: Sequence[str], originals: Sequence[str]) -> dict[str, float]:
        """Return the perplexity by token, word and byte; words and bytes are those of ``originals``. Collective."""
        from megatron.inference.scoring import log_likelihoods

        requests = [r for text in texts for r in windows(self.tokenizer.encode(text), self.length, self.stride)]
        tokens = sum(count for _, count in requests)
        if not tokens:
            raise InferenceError("the text has fewer than 2 tokens, so none can be predicted")
        loss = -math.fsum(log_prob for log_prob, _ in log_likelihoods(self.model, requests, self.batch_size))
        words = sum(len(text.split()) for text in originals)
        size = sum(len(text.encode()) for text in originals)
        return {
            "tokens": tokens,
            "words": words,
            "bytes": size,
            "loss": loss / tokens,
            "token perplexity": perplexity(loss / tokens),
            "word perplexity": perplexity(loss / words),
            "byte perplexity": perplexity(loss / size),
            "bits per byte": loss / size / math.log(2),
        }

    def lambada(self, texts: Sequence[str]) -> dict[str, float]:
        """Return the accuracy in predicting the last word of each text, and its perplexity. Collective.

        A word is predicted if each of its tokens is the most likely one after those before it.
        """
        from megatron.inference.scoring import log_likelihoods

        requests = []
        for number, text in enumerate(texts, start=1):
            context, _, word = text.rstrip().rpartition(" ")
            tokens, before = self.tokenizer.encode(f"{context} {word}"), self.tokenizer.encode(context)
            count = len(tokens) - len(before)
            if not context or not 0 < count < self.length:
                seen = f"text {number} has no last word after others that a window of {self.length} tokens holds"
                raise InferenceError(seen, "one passage of at least two words per line")
            requests.append((tokens[-self.length :], count))
        scores = log_likelihoods(self.model, requests, self.batch_size)
        return {
            "passages": len(texts),
            "accuracy": sum(predicted for _, predicted in scores) / len(scores),
            "word perplexity": perplexity(-math.fsum(log_prob for log_prob, _ in scores) / len(scores)),
        }


def perplexity(loss: float) -> float:
    """Return the exponential of a loss; infinity where it is too large."""
    return math.exp(loss) if loss < 700 else math.inf


def evaluate(args: argparse.Namespace, launch: Launch) -> dict[str, float]:
    """Load the model and measure it; collective."""
    from megatron.config.parallel import ParallelConfig
    from megatron.evaluation.load import open_pretrained

    originals = read_texts(args.data)
    if args.output is not None:
        create_output_folder(args.output)
    texts = [detokenize_wikitext2(text) if args.detokenize else text for text in originals]
    pretrained = open_pretrained(args.load, source_options(args))
    for note in pretrained.source.notes if launch.rank == 0 else ():
        echo(f"perplexity: {note}", file=sys.stderr)
    tokenizer = pretrained.load_tokenizer(args.tokenizer_model)
    positions = pretrained.model.max_position_embeddings
    length = args.seq_length or positions or 1024
    stride = args.stride or length // 2
    check_windows(length, stride, positions)
    if args.micro_batch_size < 1:
        raise InferenceError(f"--micro-batch-size {args.micro_batch_size}: must be at least 1", "--micro-batch-size 8")
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    )
    model = pretrained.build_frozen(parallel, args.params_dtype, args.device, TIMEOUT)
    evaluation = Evaluation(model, tokenizer, length, stride, args.micro_batch_size)
    return evaluation.lambada(texts) if args.task == "lambada" else evaluation.perplexity(texts, originals)


def check_windows(length: int, stride: int, positions: int | None) -> None:
    """Raise InferenceError unless windows of this length and stride fit the model and score every token."""
    if length < 2 or (positions is not None and length > positions):
        most = "" if positions is None else f" and at most {positions}, the model's positions"
        raise InferenceError(f"--seq-length {length}: must be at least 2{most}", "drop --seq-length")
    if not 0 < stride < length:
        seen = (
            f"--stride {stride}: must be at least 1 and below the {length} tokens of a window, whose first is context"
        )
        raise InferenceError(seen, f"--stride {max(1, length // 2)}")


def main(argv: Sequence[str]) -> int:
    """Measure and print.

    Returns:
        The exit status: 1 if the model cannot be loaded or the results cannot be written, 2 for invalid flags and data.
    """
    from megatron.distributed.launch import destroy_distributed

    args = build_parser().parse_args(argv)
    launch = Launch()
    try:
        launch = Launch.read(os.environ)
        load_plugins(args.plugin or ())
        results = evaluate(args, launch)
        if launch.rank == 0:
            for name, value in results.items():
                echo(f"{name:<17}{value:>14,}" if isinstance(value, int) else f"{name:<17}{value:>14.6g}")
            if args.output is not None:
                publish_file(args.output, (json.dumps(results, indent=2) + "\n").encode())
        destroy_distributed()
    except (InferenceError, UserError) as error:  # the same on every rank
        if launch.local_rank == 0:
            echo(f"perplexity: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:
        where = f"perplexity, rank {launch.rank}" if launch.world_size > 1 else "perplexity"
        echo(f"{where}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
