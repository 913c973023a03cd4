"""Merged pairs: the bytes of one preprocessing, incompatible inputs, and the tool."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import MergeInput, check_compatible, check_output, find_prefixes, merge_datasets
from megatron.data.progress import ByteProgress
from megatron.data.tokenizers.huggingface import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.tokenizer import FILES_SUFFIX, RECORD_SUFFIX, TokenizerRecord, read_tokenizer_record
from tests.unit.data.pairs import content, packed, pair, write
from tools.merge_datasets import main
from tools.preprocess_data import main as preprocess

BYTES = TokenizerRecord.of(ByteTokenizer())


def with_record(prefix: Path, record: TokenizerRecord | None = BYTES, files: Sequence[str] = ()) -> str:
    extra_files = {f"{FILES_SUFFIX}/{name}": name.encode() for name in files}
    if record is not None:
        extra_files[RECORD_SUFFIX] = record.to_bytes()
    return str(write(prefix, [[1, 2]], extra_files=extra_files))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    parts=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3), max_size=4), min_size=1, max_size=4
    ),
    code=st.sampled_from([2, 4, 6, 8]),
)
def test_the_merged_pair_has_the_bytes_of_all_documents_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[list[int]]]], code: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for i, documents in enumerate(parts):
        for suffix, data in zip(("bin", "idx"), packed(documents, code)):
            (folder / f"{i}.{suffix}").write_bytes(data)
    found = [MergeInput.of(prefix) for prefix in find_prefixes([str(folder)])]
    check_compatible(found)
    seen: list[int] = []
    merge_datasets(found, str(folder / "all"), seen.append)
    assert pair(folder / "all") == packed([document for documents in parts for document in documents], code)
    assert sum(seen) == sum(part.num_bytes for part in found)


def test_folders_are_read_by_name_and_prefixes_as_they_are_given(tmp_path: Path) -> None:
    for name in ("b", "a", "a.b", "a10", "a2"):
        write(tmp_path / name, [[1]])
    (tmp_path / "a.tokens.json").touch()
    (tmp_path / "cache").mkdir()
    names = [os.path.basename(prefix) for prefix in find_prefixes([str(tmp_path)])]
    assert names == ["a", "a.b", "a10", "a2", "b"]
    assert find_prefixes([f"{tmp_path}/b", f"{tmp_path}/a"]) == [f"{tmp_path}/b", f"{tmp_path}/a"]


def test_a_pair_beside_a_folder_of_its_name_is_a_pair(tmp_path: Path) -> None:
    a = str(write(tmp_path / "a", [[1]]))
    (tmp_path / "a" / "cache").mkdir(parents=True)
    write(tmp_path / "a" / "b", [[1]])
    assert find_prefixes([a]) == [a]
    assert find_prefixes([f"{a}/"]) == [f"{a}/b"]
    check_output([a], [MergeInput.of(a)], f"{a}/all")


def test_traces_of_a_writer_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    (tmp_path / "b.bin.77.part").touch()
    with pytest.raises(DataError, match=r"b\.bin\.77\.part: another process is writing it, or was killed"):
        find_prefixes([str(tmp_path)])


def test_a_pair_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    a = str(write(tmp_path / "a", [[1]]))
    os.symlink(tmp_path, tmp_path / "link")
    for inputs, message in (
        ([a, a], f"{a} is named twice;"),
        ([a, f"{tmp_path}/link"], f"link/a is named twice, also as {a};"),
    ):
        with pytest.raises(DataError, match=message):
            find_prefixes(inputs)


def test_record_and_tokenizer_go_with_the_merged_pair(tmp_path: Path) -> None:
    parts = [MergeInput.of(with_record(tmp_path / name, files=("tokenizer.json", "x.txt"))) for name in "ab"]
    merge_datasets(parts, str(tmp_path / "all"))
    assert (tmp_path / f"all.{RECORD_SUFFIX}").read_bytes() == BYTES.to_bytes()
    assert content(tmp_path / f"all.{FILES_SUFFIX}") == {"tokenizer.json": b"tokenizer.json", "x.txt": b"x.txt"}


def older(record: TokenizerRecord) -> bytes:
    names = ("tokenizer_type", "vocab_size", "eod", "fingerprint")
    return json.dumps({name: getattr(record, name) for name in names}).encode()


def test_an_older_record_goes_with_a_newer_one(tmp_path: Path) -> None:
    parts = [with_record(tmp_path / name) for name in "ab"]
    (tmp_path / f"a.{RECORD_SUFFIX}").write_bytes(older(BYTES))
    found = [MergeInput.of(prefix) for prefix in parts]
    check_compatible(found)
    merge_datasets(found, str(tmp_path / "all"))
    assert (tmp_path / f"all.{RECORD_SUFFIX}").read_bytes() == BYTES.to_bytes()


@pytest.mark.parametrize("first", ["a", "b"])
def test_one_tokenizer_under_other_names_and_with_special_tokens_in_texts(tmp_path: Path, first: str) -> None:
    """The ids mean the same; the record of the whole notes that special tokens of texts are among them."""
    settings: dict[str, dict[str, bool]] = {"a": {}, "b": {}} | {first: {"parse_special_tokens": True}}
    for name, other in (("a", "SentencePieceTokenizer"), ("b", "Llama2Tokenizer")):
        with_record(tmp_path / name, TokenizerRecord(other, 9, 2, "same", None, {"</s>": 2}, settings[name]))
    parts = [MergeInput.of(str(tmp_path / name)) for name in "ab"]
    check_compatible(parts)
    merge_datasets(parts, str(tmp_path / "all"))
    record = read_tokenizer_record(tmp_path / "all")
    assert record == parts["ab".index(first)].record
    assert record is not None
    assert record.parses_special_tokens


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TokenizerRecord.of(NullTokenizer(257)), "tokenizer_type is ByteTokenizer and NullTokenizer"),
        (TokenizerRecord("ByteTokenizer", 257, 0, BYTES.fingerprint), "eod is 256 and 0"),
        (TokenizerRecord("ByteTokenizer", 257, 256, "other"), f"fingerprint is {BYTES.fingerprint} and other"),
        (TokenizerRecord("ByteTokenizer", 257, 256, BYTES.fingerprint, 3, {"<|endoftext|>": 256}), "pad is None and 3"),
        (TokenizerRecord("ByteTokenizer", 257, 256, BYTES.fingerprint, None, {}), "special_ids is .* and {}"),
        (None, r"a\.tokens\.json names the tokenizer of .*a, but .*b has no such record\n  fix: .*cp "),
    ],
)
def test_different_tokenizers_are_refused_by_name(tmp_path: Path, record: TokenizerRecord | None, message: str) -> None:
    parts = [MergeInput.of(with_record(tmp_path / "a")), MergeInput.of(with_record(tmp_path / "b", record))]
    with pytest.raises(DataError, match=message) as error:
        check_compatible(parts)
    assert f"{tmp_path}/a" in str(error.value)
    assert f"{tmp_path}/b" in str(error.value)


# --- where it is written ---


def output_of(folder: Path, output: str) -> None:
    parts = [MergeInput.of(prefix) for prefix in find_prefixes([str(folder)])]
    check_output([str(folder)], parts, output)


def test_an_output_that_would_be_an_input_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    a = str(write(folder / "a", [[1]]))
    os.symlink(folder, tmp_path / "link")
    with pytest.raises(DataError, match=r"lies in .*\n  fix: --output-prefix " + f"{tmp_path}/all$"):
        output_of(folder, f"{folder}/all")
    for output in (a, f"{tmp_path}/link/a"):
        with pytest.raises(DataError, match="is one of the pairs to merge"):
            output_of(folder, output)
    with pytest.raises(DataError, match="lies in"):
        output_of(folder, f"{tmp_path}/link/b")
    with pytest.raises(DataError, match="lies in"):
        output_of(tmp_path / "link", f"{folder}/b")
    with pytest.raises(DataError, match=r"is a folder\n  fix: --output-prefix .*/merged"):
        output_of(folder, f"{tmp_path}/")
    output_of(folder, f"{tmp_path}/new/all")
    output_of(folder, f"{folder}/below/all")


def test_a_record_of_other_ids_goes_with_them(tmp_path: Path) -> None:
    with_record(tmp_path / "all", files=("tokenizer.json",))
    merge_datasets([MergeInput.of(str(write(tmp_path / "a", [[1]])))], str(tmp_path / "all"))
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "all.bin", "all.idx", "all.manifest.json"]


def test_a_disk_that_is_too_small_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = str(write(tmp_path / "a", [[1] * 500]))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2000, 1001, 999))
    with pytest.raises(DataError, match=r"1,040 bytes are needed in .*, which has 999 free"):
        check_output([a], [MergeInput.of(a)], f"{tmp_path}/all")


@pytest.mark.parametrize("change", [lambda p: write(p, [[1]]), lambda p: p.with_suffix(".idx").unlink()])
def test_a_part_that_changes_is_noticed_and_nothing_is_left(tmp_path: Path, change: Callable[[Path], object]) -> None:
    part = MergeInput.of(str(write(tmp_path / "a", [[1, 2], [3]])))
    change(tmp_path / "a")
    with pytest.raises(DataError, match=r"has changed since the merge began|No such file"):
        merge_datasets([part], str(tmp_path / "all"))
    assert not [name for name in os.listdir(tmp_path) if name.startswith("all")]


def test_an_old_pair_stays_when_the_disk_refuses(tmp_path: Path) -> None:
    part = MergeInput.of(str(write(tmp_path / "a", [[1, 2], [3]])))
    old = pair(write(tmp_path / "all", [[9]]))

    def full(num_bytes: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        merge_datasets([part], str(tmp_path / "all"), full)
    assert pair(tmp_path / "all") == old
    assert IndexedDataset(tmp_path / "all").num_tokens == 1


ROOT = Path(__file__).parents[3]


def corpus(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def preprocessed(folder: Path, name: str, *inputs: Path) -> Path:
    """Preprocess files in a folder of their own, and return it."""
    flags = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--output-prefix", str(folder / name / name)]
    (folder / name).mkdir()
    assert preprocess(["--input", *map(str, inputs), *flags]) == 0
    return folder / name


def test_merged_data_match_one_preprocessing_of_all_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["first", "", "zwölf", "x" * 300, "last"]
    texts_of = [corpus(tmp_path, "a", texts[:2]), corpus(tmp_path, "b", texts[2:])]
    inputs = [preprocessed(tmp_path, path.stem, path) for path in texts_of]
    whole = preprocessed(tmp_path, "whole", *texts_of)
    capsys.readouterr()
    assert main(["--input", *map(str, inputs), "--output-prefix", str(tmp_path / "out" / "whole_text_document")]) == 0
    assert content(tmp_path / "out") == content(whole)
    assert capsys.readouterr().out.splitlines() == [
        f"{inputs[0]}/a_text_document: 2 documents, 6 tokens",
        f"{inputs[1]}/b_text_document: 3 documents, 313 tokens",
        "pairs: 2, documents: 5, tokens: 319",
        f"for the next step, pretrain_gpt.py: --data-path {tmp_path}/out/whole_text_document",
    ]


def test_incompatible_inputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [str(write(tmp_path / dtype, [[1]], dtype)) for dtype in ("u2", "i4")]
    assert main(["--input", *inputs, "--output-prefix", str(tmp_path / "all")]) == 1
    assert capsys.readouterr().err.startswith(f"merge_datasets: {inputs[0]} holds uint16, {inputs[1]} int32")
    assert not (tmp_path / "all.bin").exists()


def test_existing_files_are_kept_without_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", str(write(tmp_path / "a", [[1]])), "--output-prefix", str(write(tmp_path / "all", [[2]]))]
    before = content(tmp_path)
    assert main(flags) == 2
    assert "all.bin is there already, and 1 more\n  fix: --overwrite" in capsys.readouterr().err
    assert content(tmp_path) == before
    assert main([*flags, "--overwrite"]) == 0
    assert pair(tmp_path / "all") == pair(tmp_path / "a")
    assert "a: 1 document, 1 token\n" in capsys.readouterr().out


def test_multimodal_data_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", "x", "--output-prefix", "y", "--multimodal"]) == 2
    assert "multimodal data are not supported" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(meter: ByteProgress, num_bytes: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ByteProgress, "add", interrupt)
    a = str(write(tmp_path / "a", [[1]]))
    assert main(["--input", a, "--output-prefix", str(tmp_path / "all")]) == 130
    assert capsys.readouterr().err == f"merge_datasets: stopped by SIGINT before {tmp_path}/all was written\n"
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_killed_it_leaves_no_pair_and_can_be_run_again(tmp_path: Path) -> None:
    a, b = (str(write(tmp_path / name, [[1] * 1000])) for name in "ab")
    script = (
        "import os, signal, sys\n"
        "from tools import merge_datasets\n"
        "merge_datasets.ByteProgress.add = lambda meter, n: os.kill(os.getpid(), signal.SIGKILL)\n"
        "merge_datasets.main(sys.argv[1:])\n"
    )
    flags = ["--input", a, b, "--output-prefix", str(tmp_path / "all")]
    done = subprocess.run([sys.executable, "-c", script, *flags], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="No such file"):
        IndexedDataset(tmp_path / "all")
    assert main(flags) == 0
    written = {f"all.{suffix}" for suffix in ("bin", "idx", "manifest.json")}
    assert {*os.listdir(tmp_path)} == {"a.bin", "a.idx", "b.bin", "b.idx"} | written
    assert pair(tmp_path / "all") == pair(write(tmp_path / "expected", [[1] * 1000] * 2))
