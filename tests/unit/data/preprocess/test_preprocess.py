"""Token files of a corpus, against a plain loop that shares no code with the pipeline."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tokenizers

from megatron.data.errors import DataError
from megatron.data.preprocess import encode as encode_module
from megatron.data.preprocess.corpus import MAX_REPORTED, LineBlock, TextDocument
from megatron.data.preprocess.encode import BlockEncoder, PreprocessOptions, output_prefix, write_dataset
from megatron.data.preprocess.files import find_text_files
from megatron.data.preprocess.transforms import FILTER, DocumentTransforms, LoadedStep, Step
from megatron.data.progress import PreprocessTotals
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer
from megatron.data.tokenizers.engine import EncodeEngine
from megatron.data.tokenizers.huggingface import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer, load_recorded_tokenizer
from tests.unit.data.made_tokenizers import apart
from tests.unit.data.pairs import COMPRESS
from tools.lib.tokenizer_training import save_tokenizer, train_bpe

WORDS = [
    "the",
    "of",
    "and",
    "stream",
    "token",
    "naïve",
    "Zürich",
    "東京",
    "ещё",
    "123",
    "4567",
    "it's",
    "<|endoftext|>",
]
WORDS += ["\r\n", "\t", "\n\n", "\U0001f469\u200d\U0001f467", "e\u0301", "é", "\u00a0", ""]
BYTES = TokenizerOptions("ByteTokenizer")


class RecordingListener:
    """A listener that keeps all messages."""

    def __init__(self) -> None:
        self.output: list[str] = []
        self.updates = 0

    def update(self, totals: PreprocessTotals) -> None:
        self.updates += 1

    def message(self, text: str) -> None:
        self.output.append(text)


def run(plan: PreprocessOptions) -> tuple[PreprocessTotals, list[str]]:
    messages = RecordingListener()
    totals, _ = write_dataset(plan, build_tokenizer(plan.tokenizer_options), messages)
    return totals, messages.output


def some_texts(seed: int, count: int) -> list[str]:
    draw = Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.choice((0, 1, 5, 60)))) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE."""
    folder = tmp_path_factory.mktemp("model") / "bpe"
    documents = [TextDocument((text,), (Path(), 0), 0) for text in some_texts(0, 200)]
    save_tokenizer(train_bpe(documents, 400).files, folder)
    return folder


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    return [{"title": a, "text": b} for a, b in zip(some_texts(1, 400), some_texts(2, 400))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]]) -> Path:
    """The records in five files, one of each compression, with blank lines, in two ways to write JSON."""
    folder = tmp_path_factory.mktemp("corpus")
    for part, (suffix, compress) in enumerate({"": bytes, **COMPRESS}.items()):
        lines = [json.dumps(r, ensure_ascii=i % 2 == 0) for i, r in enumerate(records[80 * part : 80 * part + 80])]
        content = "\n".join(lines).replace("\n", "\n \n", part).encode() + b"\n" * (part % 2)
        (folder / f"{part}.jsonl{suffix}").write_bytes(compress(content))
    return folder


def independent(texts: Sequence[str], model: Path) -> tuple[bytes, bytes]:
    """.bin and .idx of the texts, document by document, with an end after every one that is not empty."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # what is spelled out is text
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    ids = [[*one, end] if one else [] for one in ids]
    lengths = [len(one) for one in ids if one]
    starts = [2 * start for start in accumulate(lengths, initial=0)][:-1]
    boundaries = list(accumulate((bool(one) for one in ids), initial=0))
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i{len(starts)}q{len(boundaries)}q", *lengths, *starts, *boundaries)
    return b"".join(struct.pack(f"<{len(one)}H", *one) for one in ids), index


def pair(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_two_workers_without_gigatoken(
    corpus: Path, records: list[dict[str, str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are processes that start once it is known not to be usable."""
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    files = find_text_files([str(corpus)], [".jsonl"], [])
    choice = TokenizerOptions("HuggingFaceTokenizer", str(model))
    plan = PreprocessOptions(files, ("text",), str(tmp_path / "out"), choice, True, workers=2, block_bytes=9000)
    _, message_text = run(plan)
    assert message_text[0].startswith("engine: tokenizers")
    assert pair(output_prefix(plan.prefix, "text")) == independent([record["text"] for record in records], model)


@pytest.mark.parametrize(
    ("workers", "engine", "block_bytes"),
    [(1, "hf", 1), (1, "gigatoken", 1 << 20), (2, "gigatoken", 700), (3, "auto", 2000)],
)
def test_the_bytes_match_a_plain_loop(
    corpus: Path,
    records: list[dict[str, str]],
    model: Path,
    tmp_path: Path,
    workers: int,
    engine: str,
    block_bytes: int,
) -> None:
    files = find_text_files([str(corpus)], [".jsonl"], [])
    choice = TokenizerOptions("HuggingFaceTokenizer", str(model))
    plan = PreprocessOptions(
        files, ("text", "title"), str(tmp_path / "out"), choice, True, engine, workers, False, block_bytes
    )
    totals, message_text = run(plan)
    assert message_text[0].startswith("engine: tokenizers" if engine == "hf" else "engine: gigatoken")
    tokens = 0
    for key in plan.keys:
        expected = independent([record[key] for record in records], model)
        assert pair(output_prefix(plan.prefix, key)) == expected
        tokens += len(expected[0]) // 2
    texts = [text for record in records for text in record.values()]
    assert totals == PreprocessTotals(
        stored_bytes=sum(file.stat().st_size for file in files),
        documents=400,
        empty=texts.count(""),
        text_bytes=sum(len(text.encode()) for text in texts),
        tokens=tokens,
        bad=0,
    )
    tokenizer = load_recorded_tokenizer(output_prefix(plan.prefix, "title"))
    assert tokenizer is not None
    assert tokenizer.fingerprint == build_tokenizer(choice).fingerprint


def test_plain_files_among_lines_keep_their_place(tmp_path: Path) -> None:
    contents = {
        "a.txt": b"A",
        "b.jsonl": b'{"text": "B"}\n{"text": "C"}',
        "c.txt.gz": gzip.compress(b"D"),
        "d.txt": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = find_text_files([str(tmp_path / "d.txt"), str(tmp_path)], [".jsonl", ".txt"], ["d.txt"])
    totals, _ = run(PreprocessOptions(files, ("text",), str(tmp_path / "out"), BYTES))
    assert pair(str(tmp_path / "out_text_document"))[0].decode("utf-16-le") == "ABCD"
    assert (totals.documents, totals.empty) == (5, 1)


# --- bad documents ---

BAD = {
    "not JSON": b'{"text": "cut',
    "no object": b'["text"]',
    "no such key": b'{"txt": "a"}',
    "no string": b'{"text": 7, "title": "t"}',
    "a bad title": b'{"text": "a", "title": null}',
    "half a pair": b'{"text": "\\ud83d", "title": "t"}',
    "NUL": b'{"text": "a\\u0000", "title": "t"}',
    "not UTF-8": b'{"text": "caf\xe9", "title": "t"}',
}


def write_bad(folder: Path) -> Path:
    """Good lines, and between them each of the bad ones; then a file without an end and one without a document."""
    good = b'{"text": "good", "title": "t"}\n'
    (folder / "a.jsonl").write_bytes(good + b"".join(line + b"\n" + good for line in BAD.values()))
    lines = b"".join(b'{"text": "%d", "title": "t"}\n' % (i * i) for i in range(3000))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    (folder / "c.jsonl").write_bytes(b"\n\n")
    return folder


@pytest.mark.parametrize(("workers", "block_bytes"), [(1, 50), (2, 300)])
def test_bad_documents_are_passed_over_under_all_keys_named_and_counted(
    tmp_path: Path, workers: int, block_bytes: int
) -> None:
    folder = write_bad(tmp_path)
    files = find_text_files([str(folder)], [".jsonl"], [])
    plan = PreprocessOptions(
        files, ("text", "title"), str(tmp_path / "out"), BYTES, False, "auto", workers, True, block_bytes
    )
    totals, message_text = run(plan)
    printed = [sentence.removeprefix("passed over: ") for sentence in message_text[1:]]
    assert [sentence.split(" ")[0].rstrip(":") for sentence in printed[:8]] == [
        f"{files[0]}:{n}" for n in range(2, 18, 2)
    ]
    assert printed[8] == f"{files[1]}:3001 ends in the middle of a .gz stream"
    assert printed[9] == f"{files[2]} has no documents"
    assert len(printed) == totals.bad == 10
    assert totals.documents == 9 + 3000
    texts = "good" * 9 + "".join(str(i * i) for i in range(3000))
    assert pair(f"{plan.prefix}_text_document")[0].decode("utf-16-le") == texts
    assert pair(f"{plan.prefix}_title_document")[0].decode("utf-16-le") == "t" * 3009


def test_the_first_bad_document_ends_the_run(tmp_path: Path) -> None:
    folder = write_bad(tmp_path)
    files = find_text_files([str(folder)], [".jsonl"], [])
    plan = PreprocessOptions(files, ("text",), str(tmp_path / "out"), BYTES, workers=2, block_bytes=50)
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON.*\n  fix: .* \| --on-bad-line skip"):
        run(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "c.jsonl"]


def test_many_bad_documents_are_reported_twenty_times(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"{\n" * 1000 + b'{"text": "a"}\n')
    plan = PreprocessOptions(
        [tmp_path / "x.jsonl"], ("text",), str(tmp_path / "out"), BYTES, skip_bad=True, block_bytes=20
    )
    totals, message_text = run(plan)
    assert (totals.bad, totals.documents) == (1000, 1)
    assert len(message_text) == 1 + MAX_REPORTED + 1
    assert message_text[-2].startswith(f"passed over: {tmp_path}/x.jsonl:20 is not JSON")
    assert message_text[-1] == "passed over: further ones are only counted"


@pytest.mark.parametrize(
    ("files", "skip", "message"),
    [
        ({"a.jsonl": b""}, False, r"a\.jsonl has no documents"),
        ({"a.txt": b"", "b.txt": b""}, False, r"no document of the input has text: 2 are empty"),
        ({"a.jsonl": b"{\n"}, True, r"no document of the input has text: 0 are empty"),
        ({"a.txt": b"PK\3\4\0"}, False, r"a\.txt is not text: byte 4 is NUL"),
        ({"a.txt.gz": b"PK"}, False, r"a\.txt\.gz is not valid \.gz from here on|ends in the middle"),
    ],
)
def test_an_input_without_text_leaves_nothing(
    tmp_path: Path, files: dict[str, bytes], skip: bool, message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    plan = PreprocessOptions(
        [tmp_path / name for name in files], ("text",), str(tmp_path / "out"), BYTES, skip_bad=skip
    )
    with pytest.raises(DataError, match=message):
        run(plan)
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_keys_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a")
    with pytest.raises(DataError, match="a key is given twice: text, text"):
        run(PreprocessOptions([tmp_path / "a.txt"], ("text", "text"), str(tmp_path / "out"), BYTES))
    with pytest.raises(DataError, match="plain text without the keys text, url"):
        run(PreprocessOptions([tmp_path / "a.txt"], ("text", "url"), str(tmp_path / "out"), BYTES))
    with pytest.raises(DataError, match=r"--json-keys a/b: .* cannot contain '/'"):
        run(PreprocessOptions([], ("a/b",), str(tmp_path / "out"), BYTES))


def test_no_output_changes_if_one_key_cannot_be_written(tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    plan = PreprocessOptions([corpus], ("title", "text"), str(tmp_path / "out"), BYTES)
    corpus.write_bytes(b'{"title": "a", "text": "b"}\n')
    run(plan)
    (tmp_path / "out_text_document.tokens.json").unlink()
    (tmp_path / "out_text_document.tokens.json").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.glob("out*") if path.is_file()}
    corpus.write_bytes(b'{"title": "new", "text": "new"}\n')
    with pytest.raises(DataError, match="is a folder, but a file must be written there"):
        run(plan)
    assert {path: path.read_bytes() for path in before} == before
    assert all(path in before or path.is_dir() or path.suffix == ".part" for path in tmp_path.glob("out*"))


def test_texts_for_the_proof_are_looked_for_at_the_beginning_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"other": "%s"}\n' % (b"x" * 80) * 12 + b'{"text": "late"}\n')
    assert encode_module.read_sample([tmp_path / "a.jsonl"], ["text"]) == ["late"]
    monkeypatch.setattr(encode_module, "SAMPLE_SEARCH_BYTES", 1000)
    assert encode_module.read_sample([tmp_path / "a.jsonl"], ["text"]) == []

    (tmp_path / "b.jsonl").write_bytes((b'{"text": "%s"}\n' % (b"x" * 80)) * 100 + b'{"text": "late"}\n')
    transforms = DocumentTransforms([], ["text"])
    step = LoadedStep(Step(FILTER, "m:f"), "", True, None, lambda text: (text if text == "late" else None, "m:f"))
    transforms.steps, checks = [step], list[int]()
    sample = partial(encode_module.read_sample, [tmp_path / "b.jsonl"], ["text"], transforms=transforms)
    assert sample(check=lambda: checks.append(1)) == []
    assert 10 <= len(checks) <= 12
    monkeypatch.setattr(encode_module, "SAMPLE_SEARCH_BYTES", 100_000)
    assert sample() == ["late"]


def test_an_input_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(b'{"text": "a"}\n')

    def grow() -> None:
        with corpus.open("ab") as file:
            file.write(b'{"text": "more"}\n')

    plan = PreprocessOptions([corpus], ("text",), str(tmp_path / "out"), BYTES)
    with pytest.raises(DataError, match=r"a\.jsonl was changed while it was read"):
        write_dataset(plan, build_tokenizer(BYTES), RecordingListener(), grow)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_error_of_a_check_after_the_last_block_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a")

    class Ended(BaseException):
        pass

    def end_at(last: int) -> Callable[[], None]:
        calls = iter(range(9))

        def check() -> None:
            if next(calls) == last:
                raise Ended

        return check

    for last in (0, 1):
        plan = PreprocessOptions([tmp_path / "a.txt"], ("text",), str(tmp_path / "out"), BYTES)
        with pytest.raises(Ended):
            write_dataset(plan, build_tokenizer(BYTES), RecordingListener(), end_at(last))
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_sample_is_the_beginning_of_the_readable_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{\n{"text": "first"}\n\n{"text": "second", "b": "x"}\n')
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"y" * (2 << 20))
    files = sorted(tmp_path.iterdir())
    first, second, third = encode_module.read_sample(files, ["text"])
    assert (first, second) == ("first", "second")
    assert third == "y" * (encode_module.SAMPLE_BYTES - len("firstsecond"))


BYTE_TOKENIZER = ByteTokenizer()
OPTIONS = PreprocessOptions((), ("text",), "", BYTES)
FILE = Path("x.jsonl")


def block_of(*records: object) -> LineBlock:
    content = "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records).encode()
    return LineBlock(FILE, content, len(content), first=True, last=True)


def encoder(tokenizer: Tokenizer = BYTE_TOKENIZER, engine: EncodeEngine | None = None) -> BlockEncoder:
    return BlockEncoder(OPTIONS, tokenizer, engine or EncodeEngine("numpy", "", tokenizer.encode_batch))


def test_documents_that_the_tokenizer_refuses_count_as_bad() -> None:
    null = NullTokenizer(10)
    block = block_of({"text": "1 2"}, {"text": "x"}, "not JSON\n", {"text": "12"}, {"text": "9"})
    done = encoder(tokenizer=null)(block)
    assert apart(done.columns[0]) == [[1, 2], [9]]
    assert [bad.line for bad in done.described] == [2, 3, 4]
    assert "NullTokenizer reads ids 0..9 separated by spaces, not 'x'" in str(done.described[0].of(0))


@pytest.mark.parametrize("wrong", [-1, 257])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(wrong: int) -> None:
    def encode(texts: Sequence[str | bytes]) -> EncodedBatch:
        return EncodedBatch(np.full(len(texts), wrong), np.ones(len(texts), np.int64))

    with pytest.raises(DataError, match="but its vocab_size is 257"):
        encoder(engine=EncodeEngine("numpy", "", encode))(block_of({"text": "a"}))


def test_an_engine_that_differs_is_found() -> None:
    """One wrong id in a hundred, somewhere in every text."""

    def encode(texts: Sequence[str | bytes]) -> EncodedBatch:
        ids, lengths = BYTE_TOKENIZER.encode_batch(texts)
        ids[::100] ^= 1
        return EncodedBatch(ids, lengths)

    block = block_of("{\n", {"text": "a" * 9000}, {"text": "b" * 9000})
    done = encoder(engine=EncodeEngine("gigatoken 0", "", encode))(block)
    assert done.differs is not None
    message = str(done.differs.of(5))
    assert message.startswith(("x.jsonl:7: gigatoken 0 and numpy give different ids", "x.jsonl:8: gigatoken 0"))
    assert message.endswith("fix: --engine hf")
    assert encoder(engine=EncodeEngine("gigatoken 0", "", BYTE_TOKENIZER.encode_batch))(block).differs is None


def test_blocks_are_checked_in_different_places() -> None:
    pieces: list[str] = []

    def encode(texts: Sequence[str | bytes]) -> EncodedBatch:
        pieces.extend(text for text in texts if isinstance(text, str))
        return BYTE_TOKENIZER.encode_batch(texts)

    encode_block = encoder(engine=EncodeEngine("gigatoken 0", "", encode))
    for number in range(100, 130):
        encode_block(block_of(*({"text": f"{document}: {number}"} for document in range(8))))
    assert len(pieces) == 30
    assert {piece[0] for piece in pieces} == set("01234567")
