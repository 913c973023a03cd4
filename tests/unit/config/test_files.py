"""Files of unknown origin: pipes, devices, sparse files, deep and expanding texts, links to elsewhere."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from megatron.arguments.sources import read_yaml
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.tensor_file import TensorFile
from megatron.config.errors import Problem, UserError
from megatron.config.files import (
    MAX_DEPTH,
    YAML_BYTES,
    describe_outside_links,
    parse_json,
    parse_yaml,
    read_small,
)
from megatron.convert.huggingface.config import read_config
from megatron.convert.huggingface.weights import open_weights
from megatron.convert.tokenizer_files import find_tokenizer_files
from megatron.data.errors import DataError
from megatron.data.index_cache import ABOUT, IndexCache
from megatron.data.tokenizers.base import read_tokenizer_file
from megatron.data.tokenizers.tokenizer import read_tokenizer_record
from megatron.distributed.comm import Group
from megatron.pipeline.actions import PipelineSchedule, ScheduleError
from megatron.training.loggers.run_folder import read_history
from megatron.training.stop import StopRequest


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """End a test that waits for the other end of a pipe."""

    def fail(*_: object) -> None:
        raise TimeoutError("waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lr: 1\nlr: 2", "line 1 begins a block that has lr twice"),
        ("a: 1\nmodel:\n  - {x: 1, y: 2, x: 3}", "line 3 begins a block that has x twice"),
        ("n: 1" + ":59" * 300_000, "line 1 has a number of more than 400 digits"),
        ("n: 1" + ":59" * 300_000 + ".5", "line 1 has a number of more than 400 digits"),
        ("n: 0x" + "f" * 401, "line 1 has a number of more than 400 digits"),
        ("n: 1" + ":59" * 120 + ".5e", None),
        ("n: [" + "1," * 200_000 + "]", "more than 10,000 values"),
        ("".join(f"k{n}: 1\n" for n in range(90_000)), "more than 10,000 values"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("? [1, [2]]\n: 1", "unhashable"),
    ],
    ids=range(10),
)
def test_yaml_takes_neither_long_nor_the_last_of_two(text: str, reason: str | None) -> None:
    if reason is None:
        assert parse_yaml(text.encode())
        return
    with pytest.raises(ValueError, match=reason):
        parse_yaml(text.encode())


def test_a_message_is_short_however_long_the_names_and_the_list_are() -> None:
    name = "x" * 10**6
    for error in (CheckpointError(name), DataError(name), UserError([Problem("E005", name)])):
        assert len(str(error)) < 11_000
    many = str(UserError([Problem("E005", f"option {n}") for n in range(10_000)]))
    assert "and 9,900 more" in many
    assert len(many) < 5_000


def test_a_small_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    assert read_small(tmp_path / "x", 7) == read_small(str(tmp_path / "link")) == b"content"
    (tmp_path / "empty").touch()
    assert read_small(tmp_path / "empty", 0) == b""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "Not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "Not a regular file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: (path.touch(), os.truncate(path, 2**33)), "Larger than 16.00 MiB"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_other_files_are_refused_at_once(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(OSError, match=reason) as caught:
        read_small(tmp_path / "x")
    assert (caught.value.strerror, caught.value.filename) == (reason, str(tmp_path / "x"))


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**33)


def options(path: Path) -> None:
    found = read_yaml(str(path))
    assert isinstance(found, Problem)
    raise UserError([found])


def profile_notes(path: Path) -> None:
    requests, printed = StopRequest(Group(), torch.device("cpu"), run_dir=str(path.parent)), io.StringIO()
    try:
        with redirect_stderr(printed):
            requests.poll()
    finally:
        requests.restore()
    raise DataError(printed.getvalue())


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "--config": ("x.yaml", options),
    "config.json": ("config.json", lambda path: read_config(path.parent)),
    "index of weights": ("model.safetensors.index.json", lambda path: open_weights(path.parent)),
    "weights": ("model.safetensors", lambda path: TensorFile(path)),
    "tokenizer": ("tokenizer.json", read_tokenizer_file),
    "record": ("x.tokens.json", lambda path: read_tokenizer_record(path.parent / "x")),
    "schedule": ("x.csv", PipelineSchedule.load),
    "PROFILE": ("PROFILE", profile_notes),
}


@pytest.mark.parametrize("make", [as_pipe, as_sparse])
@pytest.mark.parametrize("name", READERS)
def test_every_reader_of_small_files_refuses_pipes_and_large_files(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    file, read = READERS[name]
    make(tmp_path / file)
    began = time.monotonic()
    with pytest.raises((UserError, DataError, CheckpointError, ScheduleError)) as caught:
        read(tmp_path / file)
    assert time.monotonic() - began < 5
    if name != "weights":  # which may be large
        expected = "Not a regular file" if make is as_pipe else "Larger than "
        assert expected in str(caught.value)


@pytest.mark.parametrize("make", [as_pipe, as_sparse])
def test_a_cache_with_a_pipe_is_not_used(tmp_path: Path, make: Callable[[Path], None]) -> None:
    IndexCache(tmp_path).tables("x", {}, dict)
    (entry,) = tmp_path.glob("x-*/")
    (entry / ABOUT).unlink()
    make(entry / ABOUT)
    cache = IndexCache(tmp_path)
    assert cache.tables("x", {}, dict) == {}
    assert "tables are built in memory" in cache.notes[0]


def test_a_large_file_is_not_carried_into_checkpoints(tmp_path: Path) -> None:
    as_sparse(tmp_path / "chat_template.jinja")
    with pytest.raises(CheckpointError, match=r"holds files larger than 256\.00 MiB: .*chat_template\.jinja"):
        find_tokenizer_files(tmp_path)


def test_a_long_line_of_metrics_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    line = {"iteration": 1, "lm loss": 2.0, "consumed-tokens": 8, "consumed-samples": 1, "batch-size": 1}
    with file.open("wb") as stream:
        stream.truncate(100 << 20)
        stream.seek(100 << 20)
        stream.write(b"\n" + json.dumps(line).encode() + b"\n")
    tracemalloc.start()
    try:
        history = read_history(file)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert (history.unreadable, [point.loss for point in history.train]) == ([1], [2.0])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '{"a":' * 40 + "1" + "}" * 40]
)
@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_deep_texts_are_refused(parse: Callable[[bytes], object], text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(text.encode())


def test_texts_are_parsed() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert parse_json(json.dumps(value)) == parse_yaml(json.dumps(value).encode()) == value
    assert parse_yaml(b"a: 1\nb: [x, y]\nc:\n  d: 1.5e+3\n") == {"a": 1, "b": ["x", "y"], "c": {"d": 1500.0}}


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, r"line 2 has the alias \*a0; write out what it stands for"),
        ("a: &x 1\nb: *x", r"line 2 has the alias \*x"),
        ("base: &b {a: 1}\nc: {<<: *b}", r"line 2 has the alias \*b"),
        ("a: 2020-99-99", "month must be in"),
        ("a: " + "9" * 5000, "more than 400 digits"),
        ("a: [", "while parsing"),
        ("? [1]\n: 2", "unhashable"),
        ("a: \x00", "special characters"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("#" * YAML_BYTES + "\n", "larger than 1.00 MiB"),
    ],
)
def test_yaml_without_surprises(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_yaml(text.encode())
    assert "\n" not in str(caught.value)


def test_yaml_in_another_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="not a UTF-8 text file"):
        parse_yaml(b"a: \xff")


def test_links_that_stay_inside_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").touch()
    (folder / "link").symlink_to("a")
    (folder / "sub" / "up").symlink_to("../a")
    (tmp_path / "other name").symlink_to("model")
    inside = [folder / "a", folder / "link", folder / "sub" / "up", tmp_path / "other name" / "link"]
    assert describe_outside_links(folder, inside) == describe_outside_links(tmp_path / "other name", inside) == ""


def test_links_that_lead_outside_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "model2").touch()  # its name begins as the folder's
    for name, target in (("a", "../model2"), ("b", "/etc/passwd"), ("c", "../missing"), ("d", "..")):
        (folder / name).symlink_to(target)
        assert describe_outside_links(folder, [folder / name]) == (
            f"links lead out of {folder}: {folder / name} -> {target}"
        )


def test_blobs_of_the_hub_are_inside(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--o--n" / "snapshots" / "01", tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "config.json").symlink_to("../../blobs/ab")
    assert describe_outside_links(snapshot, [snapshot / "config.json"]) == ""
    (snapshot / "x").symlink_to("../../refs/main")
    assert "x -> ../../refs/main" in describe_outside_links(snapshot, [snapshot / "x"])
    elsewhere = tmp_path / "folder" / "sub"  # no cache: the same names do not make one
    elsewhere.mkdir(parents=True)
    (elsewhere / "y").symlink_to("../../models--o--n/blobs/ab")
    assert describe_outside_links(elsewhere, [elsewhere / "y"])
