"""Token files in an object store on this machine are those on a disk, under faults of store, disk and processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import fsspec.config
import numpy as np
import pytest
import s3fs
from numpy.typing import NDArray

from megatron.checkpoint import object_store
from megatron.config.data_store import CHUNK_BYTES, DataStoreOptions
from megatron.data import token_store
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.known_files import KnownFiles, KnownPair
from megatron.data.prefixes import use_data_store
from tests.kit.processes import ForkedProgram
from tests.unit.checkpoint.s3_server import Request, Store, serving, settings
from tests.unit.data.pairs import write
from tools import inspect_dataset, merge_datasets, preprocess_data

BLOCK = 2 * CHUNK_BYTES
URI = "s3://bucket/data/words"
DOCUMENTS = 60


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Store]]:
    s3fs.S3FileSystem.clear_instance_cache()
    with serving() as both, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setitem(fsspec.config.conf, "s3", settings(both[0]))
        yield both


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of random length, 11 blocks in all."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 90_000, DOCUMENTS)
    return write(tmp_path_factory.mktemp("pair") / "words", (draw.integers(0, 60_000, n).tolist() for n in lengths))


@pytest.fixture
def store(server: tuple[str, Store], pair: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    found = server[1]
    found.objects = {f"bucket/data/words.{end}": pair.with_suffix(f".{end}").read_bytes() for end in ("bin", "idx")}
    found.requests.clear()
    found.fault = lambda request: None
    monkeypatch.setattr(object_store, "FIRST_WAIT", 0.001)
    return found


def opened(folder: Path, max_bytes: int = 1 << 30, block: int = BLOCK) -> IndexedDataset:
    """Open the pair as a new process would, with a cache in ``folder``."""
    options = DataStoreOptions()
    values = {"data_store_cache": str(folder), "data_store_cache_bytes": max_bytes, "data_store_block_bytes": block}
    for name, value in values.items():
        object.__setattr__(options, name, value)
    token_store.token_store(DataStoreOptions())  # forgets the one before
    use_data_store(options, [])
    return IndexedDataset(URI)


def reads(data: IndexedDataset, seed: int = 0, count: int = 40) -> list[NDArray[Any]]:
    """Random pieces of random documents."""
    draw, pieces = np.random.default_rng(seed), []
    for i in draw.integers(0, len(data), count).tolist():
        begin, end = sorted(draw.integers(0, data.lengths[i] + 1, 2).tolist())
        pieces.append(data.get(i, begin, end - begin))
    return pieces


def same(a: IndexedDataset, b: IndexedDataset, seed: int = 0) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(reads(a, seed), reads(b, seed), strict=True))


def gets(store: Store, suffix: str = "bin") -> int:
    return sum(request.kind == "GET" and request.key.endswith(suffix) for request in store.requests)


def one_in(n: int, fault: str, kind: str = "GET") -> Callable[[Request], str | None]:
    """Every ``n``-th request of a kind fails."""
    seen = iter(range(10**9))
    return lambda request: fault if request.kind == kind and next(seen) % n == n - 1 else None


def test_a_prefix_in_a_store_is_the_pair_on_the_disk(store: Store, pair: Path, tmp_path: Path) -> None:
    local, remote = IndexedDataset(pair), opened(tmp_path)
    assert (remote.fingerprint, len(remote), remote.num_tokens) == (local.fingerprint, len(local), local.num_tokens)
    assert np.array_equal(remote.lengths, local.lengths)
    assert np.array_equal(remote.tokens[:], local.tokens)
    assert same(local, remote)
    before = len(store.requests)
    assert same(local, remote, seed=1)
    assert len(store.requests) == before  # all of it is cached
    again = opened(tmp_path)
    assert same(local, again)
    assert again.fingerprint == local.fingerprint
    assert [request.kind for request in store.requests[before:]] == ["List"]


@pytest.mark.parametrize("fault", ["503", "truncated", "reset"])
def test_failing_requests_are_repeated(fault: str, store: Store, pair: Path, tmp_path: Path) -> None:
    store.fault = one_in(3, fault)
    remote = opened(tmp_path)
    assert np.array_equal(remote.tokens[:], IndexedDataset(pair).tokens)


def test_a_store_that_is_gone_is_named_and_the_cache_goes_on(store: Store, pair: Path, tmp_path: Path) -> None:
    local, remote = IndexedDataset(pair), opened(tmp_path)
    cached = remote.tokens[: BLOCK // 2]
    store.fault = lambda request: "503"
    assert np.array_equal(remote.tokens[100:1000], cached[100:1000])
    with pytest.raises(DataError, match=r"s3://bucket/data/words.bin: bytes .* cannot be read: .*\n  fix: start again"):
        remote.tokens[BLOCK : BLOCK + 1]
    store.fault = lambda request: None
    assert same(local, remote)


def test_wrong_bytes_are_caught_by_the_manifest(store: Store, tmp_path: Path) -> None:
    """Of which a block is 16 MiB."""
    prefix, ids = tmp_path / "words", np.random.default_rng(0).integers(0, 60_000, 9_000_000)
    with IndexedDatasetWriter(prefix, "u2", manifest={"counts": {}}) as writer:
        writer.add_documents(ids, np.full(9, 1_000_000))
    store.objects = {f"bucket/data/{file.name}": file.read_bytes() for file in tmp_path.iterdir()}
    local, remote = IndexedDataset(prefix), opened(tmp_path / "a", block=16 << 20)
    assert (gets(store), remote.fingerprint) == (0, local.fingerprint)  # which is recorded, too
    store.fault = lambda request: "corrupt" if gets(store) == 1 else None
    assert np.array_equal(remote.tokens[:], local.tokens)
    assert gets(store) == 3
    store.fault = lambda request: "corrupt" if request.key.endswith(("bin", "idx")) else None
    next(tmp_path.glob("a/*/blocks-*/*")).unlink()
    with pytest.raises(DataError, match=r"another checksum than recorded"):
        remote.tokens[:]
    with pytest.raises(DataError, match=r"words.idx: bytes 0 to .* are not those of its manifest"):
        opened(tmp_path / "b", block=16 << 20)
    store.fault, manifest = lambda request: None, store.objects["bucket/data/words.manifest.json"]
    first = json.loads(manifest)["files"]["bin"]["xxh3"][0].encode()
    store.objects["bucket/data/words.manifest.json"] = manifest.replace(first, b"0" * 16)
    with pytest.raises(DataError, match=r"another checksum than recorded"):
        opened(tmp_path / "c", block=16 << 20).tokens[:10]


def test_wrong_bytes_are_caught_by_what_was_read_before(store: Store, pair: Path, tmp_path: Path) -> None:
    remote = opened(tmp_path, max_bytes=3 * BLOCK)
    first = remote.tokens[:1000]
    assert len(remote.tokens[:]) == remote.num_tokens  # deletes the first block
    store.fault = lambda request: "corrupt"
    with pytest.raises(DataError, match="another checksum than before"):
        remote.tokens[:1000]
    store.fault = one_in(2, "corrupt")
    assert np.array_equal(remote.tokens[:1000], first)


def test_an_object_that_is_replaced_ends_the_run(store: Store, pair: Path, tmp_path: Path) -> None:
    remote = opened(tmp_path)
    first = remote.tokens[:10]
    content = bytearray(store.objects["bucket/data/words.bin"])
    content[BLOCK] ^= 1
    store.objects["bucket/data/words.bin"] = bytes(content)
    with pytest.raises(DataError, match="has been replaced since it was opened"):
        remote.tokens[BLOCK // 2 : BLOCK]
    other = opened(tmp_path)
    assert np.array_equal(other.tokens[:10], first)
    assert np.array_equal(other.tokens[:], np.frombuffer(bytes(content), "<u2"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_block_damaged_on_the_disk_is_read_again(
    damage: str, store: Store, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local, remote = IndexedDataset(pair), opened(tmp_path)
    assert same(local, remote)
    for block in tmp_path.glob("*/blocks-*/*"):
        content = bytearray(block.read_bytes())
        content[1000] ^= 64
        block.write_bytes({"flip": content, "truncate": content[:-1], "empty": b""}[damage])
    assert np.array_equal(remote.tokens[:], local.tokens)
    assert "is damaged and read again" in capsys.readouterr().err


def test_the_cache_is_bounded_and_keeps_what_was_used_last(store: Store, pair: Path, tmp_path: Path) -> None:
    limit = 4 * BLOCK + 4 * 8 * 2
    remote = opened(tmp_path, max_bytes=limit)
    ids = BLOCK // 2
    for number in range(8):
        assert len(remote.tokens[number * ids : number * ids + 1]) == 1
        time.sleep(0.01)
        assert len(remote.tokens[:1]) == 1  # used all the time
        time.sleep(0.01)
        assert sum(block.stat().st_size for block in tmp_path.glob("*/blocks-*/*")) <= limit
    before = gets(store)
    assert len(remote.tokens[:1]) == 1
    assert gets(store) == before
    assert len(remote.tokens[ids : ids + 1]) == 1
    assert gets(store) == before + 1
    assert np.array_equal(remote.tokens[:], IndexedDataset(pair).tokens)


def read_with_small_files(cache: str, expected: str) -> int:
    """Read everything where no file can be larger than half a block, as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    remote = opened(Path(cache))
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK // 2, BLOCK // 2))
    tokens = remote.tokens[:]
    return int(tokens.tobytes() != Path(expected).read_bytes())


def test_a_full_disk_is_noted_and_data_are_read_without_it(
    server: tuple[str, Store], store: Store, pair: Path, tmp_path: Path
) -> None:
    arguments = server[0], str(tmp_path / "cache"), str(pair.with_suffix(".bin"))
    with ForkedProgram(in_process, "read_with_small_files", *arguments, output=tmp_path / "out") as program:
        assert program.wait(60) == 0, program.output
    assert program.output.count("blocks cannot be kept in") == 1
    assert "make room on that disk" in program.output
    assert not list(tmp_path.glob("cache/*/blocks-*/*"))


def in_process(name: str, address: str, *arguments: str) -> int:
    """Call a function of this module in a new process that reads from ``address``."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    fsspec.config.conf["s3"] = settings(address)
    object_store.FIRST_WAIT = 0.001
    return int(globals()[name](*arguments))


def read_all(cache: str, expected: str) -> int:
    """Read everything in a random order of blocks."""
    remote = opened(Path(cache))
    ids = BLOCK // 2
    for number in np.random.default_rng(os.getpid()).permutation(-(-len(remote.tokens) // ids)).tolist():
        assert len(remote.tokens[number * ids : number * ids + 10])
    return int(remote.tokens[:].tobytes() != Path(expected).read_bytes())


def test_ranks_of_a_machine_fetch_each_block_once(
    server: tuple[str, Store], store: Store, pair: Path, tmp_path: Path
) -> None:
    store.fault = lambda request: "slow" if request.key.endswith("bin") and request.number % 3 == 0 else None
    arguments = server[0], str(tmp_path / "cache"), str(pair.with_suffix(".bin"))
    ranks = [ForkedProgram(in_process, "read_all", *arguments, output=tmp_path / f"{i}.out") for i in range(3)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0], [rank.output for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert gets(store) == -(-pair.with_suffix(".bin").stat().st_size // BLOCK)
    assert gets(store, "idx") == 1


@pytest.mark.slow
def test_a_process_killed_while_it_writes_a_block_leaves_nothing_that_is_read(
    server: tuple[str, Store], store: Store, pair: Path, tmp_path: Path
) -> None:
    """Killed again and again: at a request, which another process awaits, and with half a block in the file."""
    arguments = server[0], str(tmp_path / "cache"), str(pair.with_suffix(".bin"))
    for number in range(1, 8, 3):
        stuck = len(store.requests) + 4 + number
        store.fault = lambda request, stuck=stuck: "slow" if request.number >= stuck else None  # type: ignore[misc]
        with ForkedProgram(in_process, "read_all", *arguments, output=tmp_path / "out") as program:
            while len(store.requests) <= stuck and program.poll() is None:
                time.sleep(0.01)
            program.send_signal(signal.SIGKILL)
    parts = list(tmp_path.glob("cache/*/blocks-*/*.part"))
    assert parts
    parts[0].write_bytes(b"half a block")
    store.fault = lambda request: None
    assert np.array_equal(opened(tmp_path / "cache").tokens[:], IndexedDataset(pair).tokens)
    assert not list(tmp_path.glob("cache/*/blocks-*/*.part"))


def test_missing_objects_are_named(store: Store, tmp_path: Path) -> None:
    del store.objects["bucket/data/words.idx"]
    with pytest.raises(DataError, match=r"s3://bucket/data/words.idx: there is no such object"):
        opened(tmp_path)
    store.fault = lambda request: "403"
    with pytest.raises(DataError, match=r"s3://bucket/data: the folder cannot be listed: access denied"):
        opened(tmp_path)


def test_pairs_in_a_store_are_inspected_and_merged(store: Store, pair: Path, tmp_path: Path) -> None:
    """As files are; a dataset has a manifest, origins and a tokenizer."""
    text, made = tmp_path / "text.jsonl", tmp_path / "made"
    text.write_text('{"text": "one two"}\n{"text": "three"}\n')
    flags = f"--input {text} --output-prefix {made / 'words'} --tokenizer-type ByteTokenizer --append-eod"
    assert preprocess_data.main(flags.split()) == 0
    prefix = next(made.glob("*.bin")).with_suffix("")
    store.objects |= {f"bucket/data/{file.name}": file.read_bytes() for file in made.iterdir() if file.is_file()}
    uri = f"s3://bucket/data/{prefix.name}"
    opened(tmp_path / "cache")
    found, expected = StringIO(), StringIO()
    for name, output in ((uri, found), (str(prefix), expected)):
        with redirect_stdout(output):
            assert inspect_dataset.main([name, "--verify", "--samples", "2", "--json"]) == 0
    assert found.getvalue().replace(uri, str(prefix)) == expected.getvalue()
    for name, output in ((uri, tmp_path / "a"), (str(prefix), tmp_path / "b")):
        with redirect_stdout(StringIO()):
            assert merge_datasets.main(["--input", name, "--output-prefix", str(output)]) == 0
    for suffix in ("bin", "idx", "origins", "manifest.json"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes(), suffix
    store.fault = lambda request: "corrupt" if request.key.endswith(".bin") else None
    opened(tmp_path / "other")
    with redirect_stderr(StringIO()) as printed:
        assert merge_datasets.main(["--input", uri, "--output-prefix", str(tmp_path / "c")]) == 1
    assert "the checksum is wrong" in printed.getvalue()


def test_a_pair_that_was_checked_is_not_read_again_until_it_changes(pair: Path, tmp_path: Path) -> None:
    copy = tmp_path / "words"
    for end in ("bin", "idx"):
        shutil.copy(pair.with_suffix(f".{end}"), copy.with_suffix(f".{end}"))
    known = KnownFiles(tmp_path / "known")
    first = IndexedDataset(copy, known_files=known)
    assert (known.read(str(copy)), len(first.fingerprint)) == (None, 16)
    assert known.read(str(copy)) == (first.fingerprint, first.num_tokens)
    known.write(str(copy), KnownPair("0" * 16, first.num_tokens))
    assert IndexedDataset(copy, known_files=known).fingerprint == "0" * 16  # not computed again
    index = copy.with_suffix(".idx")
    times, content = index.stat(), bytearray(index.read_bytes())
    content[40] ^= 1
    with open(index, "r+b") as file:
        file.write(content)
    os.utime(index, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=r"words.idx: pointer of sequence"):
        IndexedDataset(copy, known_files=known)
