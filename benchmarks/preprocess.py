"""Speed of preprocessing beside that of the libraries it stands on, on the same text, with the same number of threads.

    python -m benchmarks.preprocess                                    # 200 MB of generated text, a small BPE
    python -m benchmarks.preprocess --tokenizer-model DIR --megabytes 1000
    python -m benchmarks.preprocess --input texts.jsonl                # the texts of a file instead of generated ones

Each measurement is a process of its own, so that no cache is warm but those of the disk; they alternate. Ours is the
command as a person types it, from the start of Python to token files on the disk: finding out which engine may be
used, reading, JSON, writing. The others encode texts that lie in memory already, and do nothing else: their start, and
the time to read their tokenizer, are not counted. "After its start" leaves out what the command takes for one document.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.record import keep, options, processor, table, timed, versions
from megatron.data.preprocess.workers import available_cores

ROOT = Path(__file__).parents[1]
TITLE = "# Speed of preprocessing"
LOOP_BYTES, BATCH_BYTES = 3_000_000, 15_000_000  # of the texts, for the slow ones
VOWELS = ("a", "e", "i", "o", "u", "ea", "ou")
SYLLABLES = [a + b + c for a in "bcdfghklmnprstvw" for b in VOWELS for c in ("", "n", "r", "s")]
ENDINGS = (", ", ". ", "; ", ": ", "? ", "! ", ' "', '" ', " (", ") ", " - ", ".\n\n", "\n")


# --- text ---


def word(rank: int) -> str:
    """Return the spelling of the word of a rank: frequent words are short, as in a language."""
    spelled, rank = "", rank + 1
    while rank:
        rank, syllable = divmod(rank, len(SYLLABLES))
        spelled += SYLLABLES[syllable * 171 % len(SYLLABLES)]
    return spelled


def documents(seed: int) -> Iterator[str]:
    """Texts without end, with as many new words as English has.

    Ranks follow a Pareto distribution (exponent 0.55, scale 20): the most frequent word is 3 % of the text, and n words
    hold about n^0.55 different ones (Heaps' law), which caches must live with. To this come numbers, capitals, marks,
    random strings, and characters beyond ASCII.
    """
    draw = np.random.default_rng(seed)
    known: dict[int, str] = {}
    while True:
        count = int(np.exp(draw.normal(5.8, 1.0)))
        ranks = (20 * draw.pareto(0.55, count)).astype(np.uint64).tolist()
        kinds = draw.random(count).tolist()
        yield "".join(_written(rank, kind, known) for rank, kind in zip(ranks, kinds))


def _written(rank: int, kind: float, known: dict[int, str]) -> str:
    """Return a word and its separator; ``kind`` in [0, 1) selects among rarer forms."""
    rank %= 1 << 40
    if kind < 0.02:
        return f"{rank % 10 ** (1 + int(kind * 400))} "
    if kind < 0.022:
        return f"https://{word(rank)}.org/{rank * 2654435761 % (1 << 48):x} "
    if kind < 0.03:
        return "".join(chr(0x4E00 + (rank * step) % 2000) for step in (1, 7, 13)) + " "
    spelled = known.get(rank)
    if spelled is None:
        spelled = word(rank)
        if rank < 1 << 20:
            known[rank] = spelled
    if kind < 0.17:
        return spelled + ENDINGS[int(kind * 10_000) % len(ENDINGS)]
    if kind < 0.25:
        return spelled.capitalize() + " "
    return spelled + " "


def write_corpus(path: Path, megabytes: float, source: Path | None) -> int:
    """Write a JSONL file with so much text; return the UTF-8 bytes of its texts."""
    texts = documents(1) if source is None else iter(texts_of(source, megabytes * 1e6)[0])
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            if size >= megabytes * 1e6:
                break
            record = {"text": text, "url": f"https://example.org/{number}", "id": number}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            size += len(text.encode())
    return size


def train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE of 32,000 entries."""
    from megatron.data.preprocess.corpus import TextDocument
    from tools.lib.tokenizer_training import save_tokenizer, train_bpe

    texts = [TextDocument((text,), (Path(), 0), 0) for text in islice(documents(2), 5000)]
    save_tokenizer(train_bpe(texts, 32_000).files, folder)


# --- contestants: each runs in a new process and returns seconds and bytes ---


def texts_of(corpus: Path, limit: float = float("inf")) -> tuple[list[str], int]:
    """Return the first texts, up to ``limit`` bytes, and their bytes."""
    texts: list[str] = []
    size = 0
    with open(corpus, "rb") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1].encode())
            if size >= limit:
                break
    return texts, size


def gigatoken_alone(corpus: Path, model: Path, threads: int) -> tuple[float, int]:
    """gigatoken's own batch, all texts at once."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    import gigatoken

    tokenizer = gigatoken.Tokenizer(model)
    texts, size = texts_of(corpus)
    return timed(lambda: tokenizer.encode_batch(texts, parallel=threads > 1)), size


def hf_loop(corpus: Path, model: Path, threads: int) -> tuple[float, int]:
    """Encode with ``tokenizers``, one document at a time, as most scripts do."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    texts, size = texts_of(corpus, LOOP_BYTES)
    started = time.perf_counter()
    for text in texts:
        tokenizer.encode(text).ids  # noqa: B018 (making the list is what costs)
    return time.perf_counter() - started, size


def hf_batched(corpus: Path, model: Path, threads: int) -> tuple[float, int]:
    """Encode with ``tokenizers``, a thousand documents at once on all threads."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    texts, size = texts_of(corpus, BATCH_BYTES)
    started = time.perf_counter()
    for first in range(0, len(texts), 1000):
        for one in tokenizer.encode_batch_fast(texts[first : first + 1000]):
            one.ids  # noqa: B018
    return time.perf_counter() - started, size


def ours(corpus: Path, model: Path, threads: int) -> tuple[float, int]:
    """Run the command from start to end."""
    size = texts_of(corpus)[1]
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        flags = ["--input", corpus, "--output-prefix", f"{folder}/out", "--tokenizer-type", "HuggingFaceTokenizer"]
        flags += ["--tokenizer-model", model, "--workers", threads, "--append-eod"]
        return seconds_of(str(ROOT / "tools" / "preprocess_data.py"), *map(str, flags)), size


def seconds_of(*arguments: str) -> float:
    """Return the seconds that Python takes with these arguments, with modules compiled by an earlier start."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/compiled-{os.getuid()}"}
    command, environ = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(ROOT)} | compiled
    return timed(lambda: subprocess.run(command, check=True, capture_output=True, env=environ))


OURS, ALONE, BATCHED, LOOP = "ours, end to end", "gigatoken alone", "HF batched", "HF document by document"
CONTESTANTS: dict[str, Callable[[Path, Path, int], tuple[float, int]]] = {
    OURS: ours,
    ALONE: gigatoken_alone,
    BATCHED: hf_batched,
    LOOP: hf_loop,
}


def in_new_process(name: str, corpus: Path, model: Path, threads: int) -> tuple[float, int]:
    """Seconds and bytes of a contestant."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(CONTESTANTS[name], (corpus, model, threads))


# --- measuring ---


def one_round(corpus: Path, tiny: Path, model: Path, threads: int) -> dict[str, float]:
    """Every figure once: MB/s of the contestants, seconds of what does not grow with the text, and the ratios."""
    seconds, speed = {}, {}
    for name in CONTESTANTS:
        seconds[name], size = in_new_process(name, corpus, model, threads)
        speed[f"{name}, MB/s"] = size / 1e6 / seconds[name]
        if name == OURS:
            start, _ = in_new_process(OURS, tiny, model, threads)
            speed[f"{OURS}, after its start, MB/s"] = size / 1e6 / max(1e-9, seconds[name] - start)
    mine, steady = speed[f"{OURS}, MB/s"], speed[f"{OURS}, after its start, MB/s"]
    return speed | {
        f"ours / {ALONE}": mine / speed[f"{ALONE}, MB/s"],
        f"ours after its start / {ALONE}": steady / speed[f"{ALONE}, MB/s"],
        f"ours / {BATCHED}": mine / speed[f"{BATCHED}, MB/s"],
        f"ours / {LOOP}": mine / speed[f"{LOOP}, MB/s"],
        "start and end of the command, seconds": start,
        "--help, seconds": seconds_of(str(ROOT / "tools" / "preprocess_data.py"), "--help"),
        "python -c pass, seconds": seconds_of("-c", "pass"),
    }


def describe(rounds: Sequence[dict[str, float]]) -> list[str]:
    """Return a table with the median and range of the rounds."""
    rows = []
    for name in rounds[0]:
        found = sorted(one[name] for one in rounds)
        digits = 2 if found[-1] < 10 else 0
        middle, low, high = (f"{x:,.{digits}f}" for x in (statistics.median(found), found[0], found[-1]))
        rows.append([name, middle, f"{low} to {high}"])
    return table(("", "median", "range"), rows)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write if asked to."""
    parser = options(__doc__, rounds=None)
    parser.add_argument("--megabytes", type=float, default=200, help="of text (200)")
    parser.add_argument("--input", type=Path, help="JSONL file to use (default: generated text)")
    parser.add_argument(
        "--tokenizer-model", type=Path, help="folder with a tokenizer.json (a BPE of 32,000 entries is made)"
    )
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="workers, and threads of the libraries (all cores)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken (5)")
    parser.add_argument("--folder", help="where to put some GB for a while (the system's choice)")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        corpus, tiny, model = Path(folder, "corpus.jsonl"), Path(folder, "tiny.jsonl"), args.tokenizer_model
        size = write_corpus(corpus, args.megabytes, args.input)
        write_corpus(tiny, 0.001, args.input)
        if model is None:
            model = Path(folder, "model")
            train_tokenizer(model)
        rounds = [one_round(corpus, tiny, model, args.threads) for _ in range(args.rounds)]
    setting = {
        "text": f"{size / 1e6:.0f} MB of {'generated text' if args.input is None else args.input.name}",
        "tokenizer": "a BPE of 32,000 entries" if args.tokenizer_model is None else args.tokenizer_model.name,
        "threads": str(args.threads),
        "rounds": str(args.rounds),
        "load before": f"{load:.1f}",
        "machine": processor(),
        "date": time.strftime("%Y-%m-%d"),
    }
    measured_with = versions("gigatoken", "tokenizers")
    note = ", ".join(f"{name}: {value}" for name, value in (setting | measured_with).items())
    lines = [*describe(rounds), "", f"{note}."]
    print("\n".join(lines))
    if args.write:
        content = {"rounds": rounds, "setting": setting, "versions": measured_with}
        keep("preprocess", content, "\n".join([TITLE, *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
