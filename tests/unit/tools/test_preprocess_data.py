"""The preprocessing tool, as a person runs it."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import encode as encode_module
from megatron.data.preprocess.encode import PreprocessOptions
from megatron.data.tokenizers import huggingface
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.engine import EncodeEngine
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerRecord, load_recorded_tokenizer, read_tokenizer_record
from tests.kit.processes import wait_until_gone
from tools import preprocess_data
from tools.preprocess_data import IGNORED_FLAGS, REFUSED_FLAGS, main

ROOT = Path(__file__).parents[3]
TEXTS = ["first", "", "zwölf", "x" * 300]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def command(*flags: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, flags)]


def run(folder: Path, *flags: str) -> int:
    return main(["--output-prefix", str(folder / "out"), "--tokenizer-type", "ByteTokenizer", *flags])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": t, "title": f"t{i}"}) + "\n" for i, t in enumerate(TEXTS)))
    return path


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [[t for i in range(b, e) for t in data[i].tolist()] for b, e in zip(data.documents, data.documents[1:])]


def test_json_lines_to_documents(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--input", str(corpus), "--append-eod", "--log-interval", "2") == 0
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[*t.encode(), 256] if t else [] for t in TEXTS]
    assert read_tokenizer_record(prefix) == TokenizerRecord.of(ByteTokenizer())
    out, err = capsys.readouterr()
    counts, tokens, time, step = out.splitlines()
    assert counts == "files: 1, documents: 4, empty texts: 1, passed over: 0"
    assert tokens == "text bytes: 311, tokens: 314 (uint16), bytes per token: 0.99"
    assert time.endswith("workers: 1, engine: ByteTokenizer")
    assert step == f"for the next step, pretrain_gpt.py: --data-path {tmp_path}/out_text_document"
    assert [line.split(" |")[0] for line in err.splitlines()[1:]] == [f"[{'#' * 24}] 100.0%"]


def test_a_folder_of_sources_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    for name, text in {"b.py": b"\xff\xe9", "a.py": b"import os\n", "c.txt": b"no"}.items():
        (tmp_path / name).write_bytes(text)
    new = tmp_path / "new" / "deep"
    assert run(new, "--input", str(tmp_path), "--suffix", ".py", "--append-eod") == 0
    assert documents(new / "out_text_document") == [[*b"import os\n", 256], [255, 233, 256]]


def test_ids_written_as_text(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("5 70000\n3")
    flags = ["--input", str(tmp_path / "ids.txt"), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    assert main([*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]) == 0
    assert documents(tmp_path / "out_text_document") == [[5, 70000, 3, 99999]]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--input", "bad.jsonl"], 1, "bad.jsonl:1 is not JSON"),
        (["--input", "nothing.jsonl"], 1, "--input nothing.jsonl: there is no such file"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], 1, "c.jsonl:1: NullTokenizer reads ids 0..8"),
        (["--tokenizer-type", "NullTokenizer"], 2, "needs --vocab-size"),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere"], 2, "there is no nowhere"),
    ],
)
def test_a_mistake_is_reported_in_a_sentence_and_leaves_no_files(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{\n")
    assert run(tmp_path, "--input", str(corpus), *flags) == status
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "c.jsonl"]


# --- a tokenizer of Hugging Face ---


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as ids."""
    tokenizer = huggingface.byte_tokenizer()
    folder = tmp_path_factory.mktemp("model")
    for name, content in huggingface.make_tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("not of the tokenizer")
    return folder


def run_model(folder: Path, model: Path, *flags: str) -> int:
    chosen = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    return main(["--output-prefix", str(folder / "out"), *chosen, *flags])


def test_documents_and_the_tokenizer_beside_them(corpus: Path, tmp_path: Path, model: Path) -> None:
    assert run_model(tmp_path, model, "--input", str(corpus), "--append-eod", "--json-keys", "text", "title") == 0
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[*t.encode(), 256] if t else [] for t in TEXTS]
    assert IndexedDataset(prefix).dtype == np.uint16
    for key in ("text", "title"):
        kept = tmp_path / f"out_{key}_document.tokenizer"
        assert {p.name: p.read_bytes() for p in kept.iterdir()} == {
            p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json"
        }
    tokenizer = load_recorded_tokenizer(prefix)
    assert tokenizer is not None
    assert tokenizer.decode(documents(prefix)[2]) == "zwölf<|endoftext|>"


def test_a_tokenizer_of_before_leaves_nothing(corpus: Path, tmp_path: Path, model: Path) -> None:
    (model / huggingface.SPECIAL_TOKENS_MAP).write_text('{"eos_token": "<|endoftext|>"}')
    assert run_model(tmp_path, model, "--input", str(corpus)) == 0
    kept = tmp_path / "out_text_document.tokenizer"
    assert len(list(kept.iterdir())) == 3
    (model / huggingface.SPECIAL_TOKENS_MAP).unlink()
    assert run_model(tmp_path, model, "--input", str(corpus), "--overwrite") == 0
    assert sorted(p.name for p in kept.iterdir()) == [huggingface.TOKENIZER_JSON, huggingface.TOKENIZER_CONFIG]
    assert run(tmp_path, "--input", str(corpus), "--overwrite") == 0
    assert not kept.exists()


def test_existing_files_are_kept_without_overwrite(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--input", str(corpus), "--json-keys", "title") == 0
    before = {p: p.read_bytes() for p in tmp_path.glob("out*")}
    assert run(tmp_path, "--input", str(corpus), "--json-keys", "text", "title") == 2
    printed = (
        f"{tmp_path}/out_title_document.bin is there already, and 4 more\n  fix: --overwrite | another --output-prefix"
    )
    assert printed in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{\n")
    flags = ["--json-keys", "title", "--overwrite"]
    assert run(tmp_path, "--input", str(corpus), str(tmp_path / "bad.jsonl"), *flags) == 1
    assert {p: p.read_bytes() for p in tmp_path.glob("out*")} == before


def test_it_runs_without_torch(tmp_path: Path) -> None:
    """A real process, in which importing torch would fail, reports bad input and exits with 1."""
    (tmp_path / "bad.jsonl").write_text("{\n")
    program = (
        "import runpy, sys\nsys.modules['torch'] = None\nrunpy.run_module('tools.preprocess_data', {}, '__main__')"
    )
    flags = ["--input", tmp_path / "bad.jsonl", "--output-prefix", tmp_path / "o", "--tokenizer-type", "ByteTokenizer"]
    words = [sys.executable, "-c", program, *map(str, flags)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bad.jsonl:1 is not JSON" in done.stderr
    assert "Traceback" not in done.stderr


# --- Megatron-LM's flags ---


def test_flags_without_effect_are_taken_and_stated(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for flag, (has_value, _) in IGNORED_FLAGS.items() for word in ([flag, "3"] if has_value else [flag])]
    assert run(tmp_path, "--input", str(corpus), *flags) == 0
    printed = capsys.readouterr().err
    assert all(f"{flag} has no effect: " in printed for flag in IGNORED_FLAGS)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--trust-remote-code", REFUSED_FLAGS["--trust-remote-code"]),
        ("--max-documents=5", REFUSED_FLAGS["--max-documents"]),
        ("--workers=0", "--workers is 0, must be at least 1"),
    ],
)
def test_unsupported_flags_are_refused_by_name(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, "--input", str(corpus), flag)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"preprocess_data: {flag.split('=')[0]}")
    assert message in err


# --- processes: how the command ends ---


def start(folder: Path, corpus: Path) -> subprocess.Popen[str]:
    """The command with two workers and work for half a minute."""
    flags = ["--input", corpus, "--output-prefix", folder / "out", "--workers", "2", "--log-interval", "1"]
    words = command(*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "10")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, **pipes, text=True, env=ENVIRONMENT, start_new_session=True)


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "c.jsonl"
    path.write_text((json.dumps({"text": "1 2 3 4 5 6 7 8 " * 1000}) + "\n") * 4000)
    return path


def workers_of(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def wait_for_work(process: subprocess.Popen[str]) -> list[int]:
    """Its workers, once they have written something."""
    assert process.stderr is not None
    for line in process.stderr:
        if "%" in line:
            return workers_of(process.pid)
    raise AssertionError("the command ended too soon")


def test_a_signal_to_all_its_processes_ends_it_with_a_sentence(long_corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path, long_corpus)
    workers = wait_for_work(process)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGTERM)  # as timeout(1) and scancel do
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err.splitlines()[-1] == f"preprocess_data: stopped by SIGTERM before {tmp_path}/out was written"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    wait_until_gone(workers)


def test_a_signal_that_a_library_swallows_is_not_lost(
    corpus: Path, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Rust code does that calls Python, and takes what is raised there for a failure of its own."""
    choose = encode_module.choose_engine

    def swallowing(tokenizer: Tokenizer, sample: Sequence[str], choice: str) -> EncodeEngine:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        return choose(tokenizer, sample, "hf")

    monkeypatch.setattr(encode_module, "choose_engine", swallowing)
    assert run_model(tmp_path, model, "--input", str(corpus)) == 143
    assert "stopped by SIGTERM before" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


@pytest.mark.slow  # starts the command four times
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_ends_the_command_at_any_time(long_corpus: Path, tmp_path: Path, workers: str) -> None:
    tokenizer = huggingface.byte_tokenizer()
    (tmp_path / "model").mkdir()
    for name, content in huggingface.make_tokenizer_files(tokenizer).items():
        (tmp_path / "model" / name).write_bytes(content)
    for number in range(8):  # work for many seconds
        os.link(long_corpus, tmp_path / f"{number}.jsonl")
    flags = ["--input", tmp_path, "--suffix", ".jsonl", "--output-prefix", tmp_path / "data" / "out"]
    flags += ["--workers", workers, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "model"]
    for seconds in (0.8, 1.2):
        process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
        time.sleep(seconds)
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode in (143, -signal.SIGTERM)
        assert not list((tmp_path / "data").glob("*"))


def test_after_a_kill_nothing_looks_complete_and_the_next_run_cleans_up(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers that are in a long document end within two seconds."""
    texts, data = tmp_path / "texts", tmp_path / "data"
    texts.mkdir()
    (texts / "a.jsonl").write_text('{"text": "1 2 3"}\n')
    (texts / "b.jsonl").write_text(json.dumps({"text": "1 " * 20_000_000}))
    process = start(data, texts)
    workers = wait_for_work(process)
    process.kill()
    wait_until_gone(workers, seconds=2)
    process.communicate(timeout=20)
    assert {path.suffix for path in data.iterdir()} == {".part"}
    assert run(data, "--input", str(corpus)) == 0
    assert "left by a run that was killed" in capsys.readouterr().err
    assert {path.name for path in data.iterdir()} == {
        f"out_text_document.{end}" for end in ("bin", "idx", "manifest.json", "origins", "tokens.json")
    }


def standard_input(content: bytes) -> None:
    """Put a pipe with this content in the place of file 0."""
    receive, send = os.pipe()
    os.dup2(receive, 0)
    os.close(receive)

    def feed() -> None:
        with suppress(BrokenPipeError), open(send, "wb") as pipe:
            pipe.write(content)

    threading.Thread(target=feed, daemon=True).start()


def test_standard_input_is_read_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "SAVE_SECONDS", 0)
    monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=3000))
    lines = [json.dumps({"text": str(number) * 500}).encode() + b"\n" for number in range(10, 40)]
    (tmp_path / "c.jsonl").write_bytes(b"".join(lines))
    assert run(tmp_path / "file", "--input", str(tmp_path / "c.jsonl")) == 0
    flags = ["--input", "-"]
    before = os.dup(0)
    try:
        with monkeypatch.context() as patch:
            add = encode_module.RunState.add

            def stop_after(state: encode_module.RunState, block: object) -> None:
                add(state, block)  # type: ignore[arg-type]
                if state.blocks == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

            patch.setattr(encode_module.RunState, "add", stop_after)
            standard_input(b"".join(lines))
            assert run(tmp_path / "pipe", *flags) == 143
        err = capsys.readouterr().err
        assert "the same command continues after the documents" in err
        assert {path.suffix for path in (tmp_path / "pipe").iterdir()} == {".part"}
        standard_input(b"".join(lines[:-1] + lines[:1]))
        assert run(tmp_path / "pipe", *flags) == 1
        assert "an interrupted run had other --input\n  fix: the same command" in capsys.readouterr().err
        standard_input(b"".join(lines))
        assert run(tmp_path / "pipe", *flags) == 0
        assert "continuing an interrupted run after " in capsys.readouterr().err
    finally:
        os.dup2(before, 0)
        os.close(before)
    results = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("file", "pipe")]
    origins = [result.pop("out_text_document.origins") for result in results]
    manifests = [json.loads(result.pop("out_text_document.manifest.json")) for result in results]
    assert results[0] == results[1]
    assert origins[1] == origins[0].replace(str(tmp_path / "c.jsonl").encode(), b"-")
    assert manifests[1]["inputs"] == [manifests[0]["inputs"][0] | {"file": "-"}]


OFTEN_SAVED = """
import sys
from functools import partial
from megatron.data.preprocess import encode
from tools import preprocess_data as tool
encode.SAVE_SECONDS = 0.02
tool.PreprocessOptions = partial(tool.PreprocessOptions, block_bytes=200_000)
sys.exit(tool.main(sys.argv[1:]))
"""


@pytest.mark.slow  # starts the command until 20 were killed
def test_twenty_kills_give_the_same_bytes(tmp_path: Path) -> None:
    draw = Random(time.time_ns())
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        text = "".join(json.dumps({"text": f"{draw.getrandbits(20_000):x}"}) + "\n" for _ in range(4000)).encode()
        (tmp_path / name).write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
    flags = ["--input", str(tmp_path), "--suffix", ".jsonl", "--log-interval", "1", "--append-eod"]
    assert run(tmp_path / "whole", *flags) == 0
    flags += ["--output-prefix", str(tmp_path / "killed" / "out"), "--tokenizer-type", "ByteTokenizer"]
    words = [sys.executable, "-c", OFTEN_SAVED, *flags, "--workers", "2"]
    for kills in range(21):
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)
        if kills < 20:
            assert process.stderr is not None
            for line in process.stderr:
                if "%" in line:
                    time.sleep(draw.random() / 20)
                    break
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if kills < 20 else 0)
    results = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "killed")]
    assert results[0] == results[1]


def test_a_full_disk_ends_it_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.txt").write_text("x" * 1_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        assert run(tmp_path, "--input", str(tmp_path / "c.txt")) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"preprocess_data: {tmp_path}/out cannot be written: File too large",
        "  fix: make room on that disk | another --output-prefix",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]


# --- memory and time ---

MEASURED = """
import sys
from tools.preprocess_data import main
main(sys.argv[1:])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def peak_memory(folder: Path, corpus: Path, workers: int) -> int:
    """Bytes at most in the main process."""
    flags = ["--input", corpus, "--output-prefix", folder / "out", "--tokenizer-type", "ByteTokenizer"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, flags), "--workers", str(workers)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow  # 100 MB of text; test_workers.py has what is taken ahead, test_corpus.py what is held of a file
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    draw = Random(0)
    lines = b"".join(json.dumps({"text": f"{draw.getrandbits(4000):x}"}).encode() + b"\n" for _ in range(20_000))
    peaks = []
    for times in (1, 4):  # 20 MB, 80 MB
        corpus = tmp_path / f"{times}.jsonl.gz"
        corpus.write_bytes(gzip.compress(lines, 1) * times)
        peaks.append(peak_memory(tmp_path, corpus, workers=2))
    assert peaks[1] < peaks[0] + 25_000_000


def test_a_line_of_many_megabytes(tmp_path: Path) -> None:
    text = "0123456789" * 1_000_000
    with (tmp_path / "c.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": t}) + "\n" for t in ("before", text, "after"))
    assert run(tmp_path, "--input", str(tmp_path / "c.jsonl"), "--workers", "2") == 0
    data = IndexedDataset(tmp_path / "out_text_document")
    assert data.lengths.tolist() == [6, len(text), 5]
    assert data[1][-10:].tobytes().decode("utf-16-le") == text[:10]
