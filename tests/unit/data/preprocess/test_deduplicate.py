"""Duplicates of a corpus, against brute force, datatrove and the formula of the S-curve."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import combinations, count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.preprocess import deduplicate as deduplicate_module
from megatron.data.preprocess.deduplicate import (
    KEYED,
    Deduplication,
    DeduplicationOptions,
    equal_keys,
    find_roots,
    join,
    merge_runs,
)
from megatron.data.preprocess.drop_list import DropList
from megatron.data.preprocess.encode import RunState
from megatron.data.preprocess.minhash import MinHash, MinHashOptions, normalize, shingles
from megatron.data.progress import PreprocessTotals
from tools.deduplicate import main
from tools.preprocess_data import main as preprocess

ROOT = Path(__file__).parents[4]

Pairs = set[tuple[int, int]]


def letters(number: int) -> str:
    """A word of letters: numbers all count as 0."""
    return "".join(chr(97 + int(digit, 20)) for digit in np.base_repr(number, 20))


def edited(draw: Random, words: Sequence[str], share: float) -> list[str]:
    """The words with about this share of them replaced."""
    return [word if draw.random() > share else letters(draw.randrange(10**6)) for word in words]


def corpus(documents: int, seed: int = 1) -> list[str]:
    """Texts of which a third repeat or edit an earlier one."""
    draw = Random(seed)
    texts: list[str] = []
    for _ in range(documents):
        words = [letters(draw.randrange(3000)) for _ in range(draw.choice([2, 4, 30, 80]))]
        if texts and draw.random() < 0.4:
            words = edited(draw, draw.choice(texts).split(" "), draw.choice([0.0, 0.02, 0.05, 0.15]))
        texts.append(" ".join(words))
    return texts


def documentation() -> list[str]:
    """Paragraphs in the prose and the code of this project, with marks, numbers and other scripts, and edited ones."""
    draw = Random(2)
    pages = (ROOT / "docs" / f"{name}.md" for name in ("architecture", "checkpoints", "corruption", "data"))
    files = [*pages, *sorted((ROOT / "megatron/data").glob("*.py"))[:4]]
    texts = [text for file in files for text in file.read_text().split("\n\n") if text.strip()]
    texts += ["Zürich, «naïve» café: 3.14 – déjà vu?! 7", "ещё раз: ёлка и ёж, 12,5 км…", "e\u0301 é x² ½ ١٢٣ a b"]
    return texts + [" ".join(edited(draw, text.split(" "), 0.03)) for text in texts]


# --- signatures ---


def pairs_of(groups: Sequence[list[int]]) -> Pairs:
    return {pair for group in groups for pair in combinations(sorted(group), 2)}


def own_pairs(texts: Sequence[str], options: MinHashOptions) -> list[Pairs]:
    """Pairs of documents with an equal key, for every band."""
    minhash = MinHash(options)
    keys = [minhash.band_keys(text) for text in texts]
    bands: list[Pairs] = []
    for band in range(options.bands):
        groups: dict[int, list[int]] = {}
        for document, key in enumerate(keys):
            if key[band]:
                groups.setdefault(key[band], []).append(document)
        bands.append(pairs_of([*groups.values()]))
    return bands


def datatrove_pairs(texts: Sequence[str], options: MinHashOptions, folder: Path) -> list[Pairs]:
    """The same, from the files that datatrove's pipeline writes: each pair is a link of a chain of equal documents."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    config = MinhashConfig(options.ngram, options.bands, options.rows, options.seed)
    # a language whose tokenizer can be made without spaCy
    sign = MinhashDedupSignature(str(folder / "signatures"), config, language="chr_Cher")
    sign.word_tokenizer = SimpleNamespace(word_tokenize=str.split)
    sign.run((Document(text, str(number)) for number, text in enumerate(texts)), 0, 1)
    bands = []
    for band in range(options.bands):
        MinhashDedupBuckets(str(folder / "signatures"), str(folder / "pairs"), config=config).run(
            None, band, options.bands
        )
        links = np.fromfile(folder / "pairs" / f"{band:05d}_00.dups", "<u4").reshape(-1, 4)[:, [1, 3]].tolist()
        groups: list[list[int]] = []
        for before, after in links:
            if groups and groups[-1][-1] == before:
                groups[-1].append(after)
            else:
                groups.append([before, after])
        bands.append(pairs_of(groups))
    return bands


@pytest.fixture
def hash_of_datatrove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let datatrove hash with xxhash 4, which takes bytes only."""
    name = "datatrove.utils.hashes.xxhash.xxhash64"
    monkeypatch.setattr(name, lambda text: xxhash.xxh64_intdigest(text.encode()))


@pytest.mark.usefixtures("hash_of_datatrove")
@pytest.mark.parametrize(
    "options", [MinHashOptions(), MinHashOptions(ngram=3, bands=5, rows=3, seed=7)], ids=["default", "other"]
)
def test_every_band_has_the_pairs_of_datatrove(tmp_path: Path, options: MinHashOptions) -> None:
    """Of texts without the symbols, such as € and →, that are letters of words there and separators here."""
    from datatrove.utils.text import simplify_text

    documents = documentation()
    texts = [text for text in documents if simplify_text(text).split() == normalize(text)]
    assert len(texts) > 0.97 * len(documents)
    found = own_pairs(texts, options)
    assert found == datatrove_pairs(texts, options, tmp_path)
    assert min(map(len, found)) > 100


def jaccard(left: str, right: str, ngram: int) -> float:
    sets = []
    for text in (left, right):
        words = text.lower().split()
        sets.append({tuple(words[first : first + ngram]) for first in range(len(words) - ngram + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize(("bands", "rows", "share"), [(14, 8, 0.03), (4, 3, 0.15), (20, 2, 0.3)])
def test_the_recall_is_that_of_the_formula(bands: int, rows: int, share: float) -> None:
    """The number of pairs found lies within four standard deviations of its expectation by exact similarities."""
    draw, options = Random(bands), MinHashOptions(ngram=2, bands=bands, rows=rows)
    minhash = MinHash(options)
    expected = variance = found = 0.0
    for _ in range(400):
        words = [letters(draw.randrange(10**6)) for _ in range(40)]
        left, right = " ".join(words), " ".join(edited(draw, words, share * 2 * draw.random()))
        probability = 1 - (1 - jaccard(left, right, 2) ** rows) ** bands
        expected, variance = expected + probability, variance + probability * (1 - probability)
        found += any(a == b for a, b in zip(minhash.band_keys(left), minhash.band_keys(right)))
    assert 40 < expected < 390
    assert abs(found - expected) < 4 * variance**0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's  3.14,\n e\u0301TÉ – 1,000!", "it s 0 ete 0"),
        ("東京は、大きい", "東 京 は 大 き い"),
        ("\t ... \n", ""),
    ],
)
def test_words(text: str, words: str) -> None:
    assert normalize(text) == words.split()
    assert len(shingles(words.split(), 2)) == max(0, len(words.split()) - 1)


# --- clusters ---


def brute_force(texts: Sequence[str], options: MinHashOptions | None) -> list[int]:
    """Numbers, from 1 on, of the documents that are connected with an earlier one, by comparison of all pairs."""
    minhash = MinHash(options) if options else None
    keys = [minhash.band_keys(text) if minhash else [] for text in texts]
    cluster = [*range(len(texts))]
    for a, b in combinations(range(len(texts)), 2):
        same = texts[a].split() == texts[b].split() or any(x == y != 0 for x, y in zip(keys[a], keys[b]))
        if same and cluster[a] != cluster[b]:
            low, high = sorted((cluster[a], cluster[b]))
            cluster = [low if each == high else each for each in cluster]
    return [number + 1 for number, first in enumerate(cluster) if number != first]


def write_lines(file: Path, texts: Sequence[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def deduplicate(options: DeduplicationOptions) -> dict[str, object]:
    return Deduplication(options, lambda _: None).run(lambda _: None, lambda: None)


def listed(folder: Path, *files: Path) -> list[list[int]]:
    drop = DropList.open(folder)
    return [drop.rows(str(file), file.stat().st_size).tolist() for file in files]


@pytest.mark.parametrize("options", [None, MinHashOptions(ngram=3, bands=6, rows=3)], ids=["exact", "minhash"])
def test_the_list_has_all_but_the_first_of_each_cluster(tmp_path: Path, options: MinHashOptions | None) -> None:
    texts = corpus(150)
    file = write_lines(tmp_path / "a.jsonl", texts)
    expected = brute_force(texts, options)
    for name, memory in (("large", 1 << 20), ("small", 1 << 10)):
        report = deduplicate(
            DeduplicationOptions([file], ("text",), tmp_path / name, options, memory=memory, block_bytes=3000)
        )
        assert listed(tmp_path / name, file) == [expected]
        exact = len(texts) - len({" ".join(text.split()) for text in texts})
        assert (report["dropped"], report["exact duplicates"]) == (len(expected), exact)
        sizes = report["clusters by size"]
        assert isinstance(sizes, dict)
        assert sum((size - 1) * number for size, number in sizes.items()) == len(expected) > 20
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["drop.json", "drop.rows"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60), cut=st.integers(1, 60))
def test_joined_pairs_are_connected_components(pairs: list[tuple[int, int]], cut: int) -> None:
    expected = [*range(31)]
    for a, b in pairs:
        low, high = sorted((expected[a], expected[b]))
        expected = [low if each == high else each for each in expected]
    parents = np.arange(31, dtype=np.uint64)
    for part in (pairs[:cut], pairs[cut:]):
        join(parents, *np.array(part, np.uint64).reshape(-1, 2).T)
    assert find_roots(parents, np.arange(31, dtype=np.uint64)).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    runs=st.lists(st.lists(st.integers(1, 6), max_size=12), min_size=1, max_size=5),
    records=st.integers(1, 20),
)
def test_merged_runs_give_each_key_its_first_document(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[int]], records: int
) -> None:
    folder, document = tmp_path_factory.mktemp("runs"), count()
    numbered = [sorted((key, next(document)) for key in keys) for keys in runs]
    for number, run in enumerate(numbered):
        np.array(run, KEYED).tofile(folder / str(number))
    chunks = [*merge_runs([folder / str(number) for number in range(len(runs))], records)]
    everything = sorted(pair for run in numbered for pair in run)
    merged = [tuple(record) for chunk in chunks for record in chunk.tolist()]
    assert sorted(merged) == everything
    assert [key for key, _ in merged] == [key for key, _ in everything]
    first: dict[int, int] = {}
    expected = [(first[key], each) for key, each in everything if first.setdefault(key, each) != each]
    assert sorted(tuple(pair) for part in equal_keys(chunks) for pair in part.tolist()) == sorted(expected)


def test_the_memory_of_merging_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A tenth of the keys of 200,000 documents repeat one key, which no partition by keys would divide."""
    peaks = []
    for documents in (20_000, 200_000):
        draw = np.random.default_rng(1)
        paths = []
        for first in range(0, documents, 20_000):
            run = np.zeros(20_000, KEYED)
            run["key"] = np.sort(np.where(draw.random(20_000) < 0.1, 7, draw.integers(1, 1 << 60, 20_000)))
            run["document"] = np.arange(first, first + 20_000)
            paths.append(tmp_path / str(first))
            run.tofile(paths[-1])
        tracemalloc.start()
        pairs = sum(map(len, equal_keys(merge_runs(paths, 4000))))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert pairs > documents * 0.09
    assert peaks[1] < 1.2 * peaks[0] < 1 << 20


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
from tools.deduplicate import main
status = main(sys.argv[1:])
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


@pytest.mark.slow
def test_the_memory_of_the_tool_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Ten times the documents, in 700 MiB of address space, most of it libraries, take at most 20 % more memory."""
    peaks = []
    for documents in (12_000, 120_000):
        file = write_lines(tmp_path / f"{documents}.jsonl", corpus(documents))
        flags = [
            "--input",
            str(file),
            "--output",
            str(tmp_path / f"list{documents}"),
            "--workers",
            "1",
            "--memory",
            "1",
        ]
        command = [sys.executable, "-c", LIMITED, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] < 1.2 * peaks[0] < 200, peaks


@pytest.mark.slow
def test_the_recipe_on_datatrove_keeps_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of each cluster; its tokenizer, spaCy, is replaced by white space."""
    from datatrove.pipeline.dedup import minhash

    monkeypatch.setattr(minhash, "load_word_tokenizer", lambda _: SimpleNamespace(word_tokenize=str.split))
    recipe = importlib.import_module("examples.datatrove_pipeline")
    draw = Random(4)
    texts = [" ".join(letters(draw.randrange(10**6)) for _ in range(60)) for _ in range(30)]
    texts += [text.capitalize() + "!" for text in texts[:12]]
    files = [write_lines(tmp_path / "raw" / f"{number}.jsonl", texts[number::2]) for number in range(2)]
    flags = f"--output {tmp_path}/clean --tasks 2 --workers 1 --bands 3 --quality none"
    assert recipe.main(["--input", str(tmp_path / "raw"), *flags.split()]) == 0
    kept = []
    for file in (tmp_path / "clean/text").iterdir():
        kept += [json.loads(line)["text"] for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert sorted(" ".join(normalize(text)) for text in kept) == sorted(" ".join(normalize(t)) for t in texts[:30])
    options = DeduplicationOptions(files, ("text",), tmp_path / "list", MinHashOptions(bands=3))
    assert deduplicate(options)["dropped"] == len(texts) - len(kept)


# --- the tool, and preprocessing without the documents of the list ---

FILES = {
    "a.jsonl": slice(0, 60),
    "b.jsonl.gz": slice(60, 100),
    "c.parquet": slice(100, 140),
    "d.txt": 140,
    "e.txt": 141,
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A corpus of every kind of file; a text file equals a line, and one line is bad."""
    import pyarrow
    from pyarrow import parquet

    texts = [*corpus(140), "another text", ""]
    texts[141] = texts[20]
    found = {name: tmp_path / "in" / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt", "e.txt")}
    write_lines(found["a.jsonl"], texts[:60])
    lines = found["a.jsonl"].read_text().splitlines()
    found["a.jsonl"].write_text("\n".join([*lines[:5], "", '{"text": 1}', *lines[5:]]))  # without a line end
    write_lines(found["b.jsonl.gz"], texts[60:100])
    parquet.write_table(pyarrow.table({"text": texts[100:140]}), found["c.parquet"])
    found["d.txt"].write_text(texts[140])
    found["e.txt"].write_text(texts[141])
    return found


def rows_of(files: dict[str, Path]) -> list[tuple[str, int, str]]:
    """The name, the row and the text of every document, in order."""
    import pyarrow.parquet

    found: list[tuple[str, int, str]] = []
    for name, file in files.items():
        if name.endswith(".txt"):
            found.append((name, 0, file.read_text()))
        elif name.endswith(".parquet"):
            column = pyarrow.parquet.read_table(file)["text"].to_pylist()
            found += [(name, row, text) for row, text in enumerate(column, 1)]
        else:
            content = gzip.decompress(file.read_bytes()) if name.endswith(".gz") else file.read_bytes()
            for row, line in enumerate(content.split(b"\n"), 1):
                if line and isinstance(text := json.loads(line)["text"], str):
                    found.append((name, row, text))
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
def test_preprocessing_leaves_out_the_listed_documents(
    tmp_path: Path, files: dict[str, Path], workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = rows_of(files)
    expected = brute_force([text for *_, text in documents], MinHashOptions())
    common = ["--input", *map(str, files.values()), "--on-bad-line", "skip", "--workers", workers]
    assert main([*common, "--output", str(tmp_path / "list")]) == 0
    places = [(name, row) for name, file in files.items() for row in listed(tmp_path / "list", file)[0]]
    assert places == [documents[number - 1][:2] for number in expected]
    assert ("e.txt", 0) in places
    capsys.readouterr()
    to_bytes = ["--tokenizer-type", "ByteTokenizer", "--output-prefix"]
    assert preprocess([*common, "--drop", str(tmp_path / "list"), *to_bytes, str(tmp_path / "dropped")]) == 0
    assert f"passed over: 1\ndropped: {len(expected)} by drop list" in capsys.readouterr().out
    kept = [text for number, (*_, text) in enumerate(documents, 1) if number not in expected]
    plain = write_lines(tmp_path / "kept.jsonl", kept)
    assert preprocess(["--input", str(plain), *to_bytes, str(tmp_path / "kept")]) == 0
    for suffix in ("bin", "idx"):
        dropped = (tmp_path / f"dropped_text_document.{suffix}").read_bytes()
        assert dropped == (tmp_path / f"kept_text_document.{suffix}").read_bytes()


def test_shards_leave_out_the_listed_documents_too(tmp_path: Path) -> None:
    """Also where a shard begins inside a file."""
    files = [write_lines(tmp_path / name, corpus(300, seed)) for seed, name in enumerate(("a.jsonl", "b.jsonl"))]
    inputs = ["--input", *map(str, files)]
    assert main([*inputs, "--output", str(tmp_path / "list"), "--method", "exact"]) == 0
    flags = [*inputs, "--drop", str(tmp_path / "list"), "--tokenizer-type", "ByteTokenizer", "--output-prefix"]
    assert preprocess([*flags, str(tmp_path / "whole")]) == 0
    whole = (tmp_path / "whole_text_document.bin").read_bytes()
    shards = b""
    for number in range(3):
        assert preprocess([*flags, str(tmp_path / str(number)), "--shard", f"{number}/3"]) == 0
        shards += (tmp_path / f"{number}_text_document.bin").read_bytes()
    assert shards == whole
    assert sum(map(len, listed(tmp_path / "list", *files))) > 50


def test_a_list_of_other_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "a.jsonl", corpus(20))
    other = write_lines(tmp_path / "b.jsonl", corpus(20))
    assert main(["--input", str(file), "--output", str(tmp_path / "list")]) == 0
    flags = ["--tokenizer-type", "ByteTokenizer", "--output-prefix", str(tmp_path / "out"), "--drop"]
    assert preprocess(["--input", str(other), *flags, str(tmp_path / "list")]) == 1
    assert "b.jsonl is not in the drop list" in capsys.readouterr().err
    file.write_text(file.read_text() + '{"text": "one more"}\n')
    assert preprocess(["--input", str(file), *flags, str(tmp_path / "list")]) == 1
    assert "when the drop list" in capsys.readouterr().err
    assert preprocess(["--input", str(file), *flags, str(tmp_path / "nothing")]) == 1
    assert "is not a complete drop list\n  fix: python tools/deduplicate.py" in capsys.readouterr().err
    assert not [*tmp_path.glob("out*")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "exact", "--bands", "3"], "--bands applies only to MinHash\n  fix: --method minhash"),
        (["--rows", "0"], "0 is not a whole number of at least 1"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--input", str(write_lines(tmp_path / "a.jsonl", ["x"])), "--output", str(tmp_path / "list"), *flags]
    try:
        status = main(command)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


# --- interruption ---


def killed_at(work: Callable[[], object], last: int | None) -> int:
    """Work in a process that gets SIGKILL at change ``last`` of the disk; return the number of changes it made."""
    receive, send = os.pipe()
    process = os.fork()
    if process == 0:
        changes = count()

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                if next(changes) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call

        for name in ("fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
            os.write(send, next(changes).to_bytes(4, "big"))
        finally:
            os._exit(0)
    os.close(send)
    os.waitpid(process, 0)
    with open(receive, "rb") as result:
        return int.from_bytes(result.read(), "big")


def test_every_kill_is_continued_to_the_same_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicate_module, "RUN_SECONDS", 0)
    minhash = MinHashOptions(bands=2, rows=3)
    files = [write_lines(tmp_path / f"{number}.jsonl", corpus(30, number)) for number in range(2)]

    def options(name: str) -> DeduplicationOptions:
        return DeduplicationOptions(files, ("text",), tmp_path / name, minhash, block_bytes=4000)

    changes = killed_at(lambda: deduplicate(options("whole")), None)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert changes > 20
    for last in range(0, changes, 3):
        folder = tmp_path / str(last)
        assert killed_at(lambda last=last: deduplicate(options(str(last))), last) == 0
        if not (folder / "drop.json").exists():
            deduplicate(options(str(last)))
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert found == whole, last
        shutil.rmtree(folder)


def test_an_interrupted_command_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicate_module, "RUN_SECONDS", 0)
    file = write_lines(tmp_path / "a.jsonl", corpus(60))
    options = DeduplicationOptions([file], ("text",), tmp_path / "list", block_bytes=4000)
    blocks = count()

    def interrupt() -> None:
        if next(blocks) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Deduplication(options, lambda _: None).run(lambda _: None, interrupt)
    with pytest.raises(DataError, match="interrupted command had other --method, --ngram, --bands, --rows or --seed"):
        Deduplication(replace(options, minhash=MinHashOptions(bands=3)), lambda _: None)
    messages: list[str] = []
    continued = Deduplication(options, messages.append)
    assert "continuing an interrupted command after" in messages[0]
    with pytest.raises(DataError, match="changed while it was read"):
        continued.run(lambda _: os.utime(file, (1, 1)), lambda: None)


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    """A second command on the same folder is refused while the first one works there, and after it."""
    file = write_lines(tmp_path / "a.jsonl", corpus(60))
    options = DeduplicationOptions([file], ("text",), tmp_path / "list", block_bytes=4000)
    refused = []

    def second() -> None:
        with pytest.raises(DataError, match="another process is writing it"):
            Deduplication(options, lambda _: None)
        refused.append(1)

    deduplicate(replace(options, folder=tmp_path / "alone"))
    Deduplication(options, lambda _: None).run(lambda _: None, second)
    assert len(refused) > 3
    assert listed(tmp_path / "list", file) == listed(tmp_path / "alone", file)
    with pytest.raises(DataError, match="holds a list already"):
        Deduplication(options, lambda _: None)


def test_lists_and_states_of_many_files_are_read(tmp_path: Path) -> None:
    """More than the 16 MiB of a small file, here of spaces."""
    file = write_lines(tmp_path / "a.jsonl", corpus(20))
    options = DeduplicationOptions([file], ("text",), tmp_path / "list", minhash=None)

    saved = tmp_path / "list" / "work.part" / "state.json"

    def interrupt() -> None:
        if saved.exists():
            raise KeyboardInterrupt

    def pad(path: Path) -> None:
        path.write_bytes(path.read_bytes() + b" " * (17 << 20))

    with pytest.raises(KeyboardInterrupt):
        Deduplication(options, lambda _: None).run(lambda _: None, interrupt)
    pad(saved)
    deduplicate(options)
    found = listed(tmp_path / "list", file)
    pad(tmp_path / "list" / "drop.json")
    assert listed(tmp_path / "list", file) == found
    state = RunState({"--input": "a"}, [], PreprocessTotals())
    (tmp_path / "state").write_text(json.dumps(asdict(state)))
    pad(tmp_path / "state")
    loaded = RunState.load(tmp_path / "state")
    assert loaded is not None
    assert loaded.settings == state.settings
