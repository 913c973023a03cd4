"""Read Parquet and Arrow files, also those of Hugging Face `datasets`, in batches of rows.

`read_batches` yields the text columns of a file in constant memory, as bytes that a worker turns into rows with
`parse_rows`. `saved_dataset_files` and `hugging_face_files` name the Arrow files of a dataset.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config.files import parse_json, read_small
from megatron.config.text import shell_word
from megatron.data.errors import DataError

TABLE_SUFFIXES = (".parquet", ".arrow")
TEXT_TYPES = ("string", "large_string", "string_view", "null")  # of Arrow
READ_BYTES = 1 << 20  # of a Parquet column, read at once
ARROW_FILE_MAGIC = b"ARROW1"  # begins a file with random access; the streams that `datasets` writes lack it

TABLES_FIX = "pip install 'megatron-pretrain[tables]'"

Row = dict[str, bytes | None]  # the text of each column in UTF-8, or null


class UnreadableTableError(DataError):
    """The rest of a table cannot be read: `seen` is a sentence without its subject."""


def read_batches(file: Path, keys: Sequence[str], batch_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield batches of about ``batch_bytes`` of text, and how many bytes of the file have been read, approximately.

    Args:
        file: with the suffix of a table.
        keys: columns to read.
        batch_bytes: size of a batch; a longer row makes a larger one.

    Raises:
        UnreadableTableError: if the file is damaged, or a column is missing or not text.
    """
    try:  # here, because it takes a while
        import pyarrow as pa  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"pyarrow is needed for {file}", TABLES_FIX) from error
    read = _read_parquet if file.suffix.lower() == ".parquet" else _read_arrow
    try:
        for batch, end in read(file, keys, batch_bytes):
            rows = max(1, batch.num_rows * batch_bytes // max(1, batch.nbytes))
            for start in range(0, batch.num_rows, rows):
                yield _serialize(batch.slice(start, rows), keys), end
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0]
        raise UnreadableTableError(f" cannot be read from here on: {reason}", "copy the file again") from error


def _read_parquet(file: Path, keys: Sequence[str], batch_bytes: int) -> Iterator[tuple[Any, int]]:
    from pyarrow import parquet

    with parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False) as table:
        _check_columns(table.schema_arrow, keys)
        size, total, done = file.stat().st_size, table.metadata.num_rows, 0
        for index in range(table.num_row_groups):
            group = table.metadata.row_group(index)
            rows = max(1, group.num_rows * batch_bytes // max(1, group.total_byte_size))
            for batch in table.iter_batches(rows, [index], keys):
                done += batch.num_rows
                yield batch, size * done // total


def _read_arrow(file: Path, keys: Sequence[str], batch_bytes: int) -> Iterator[tuple[Any, int]]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        has_footer = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        source.seek(0)
        reader = pa.ipc.open_file(source) if has_footer else pa.ipc.open_stream(source)
        _check_columns(reader.schema, keys)
        count = reader.num_record_batches if has_footer else 0
        for number in range(count):
            yield reader.get_batch(number).select(keys), source.size() * (number + 1) // count
        for batch in () if has_footer else reader:
            yield batch.select(keys), source.tell()


def _check_columns(schema: Any, keys: Sequence[str]) -> None:
    from pyarrow import types

    for key in keys:
        if key not in schema.names:
            has = ", ".join(schema.names[:8]) or "none"
            raise UnreadableTableError(f" has no column '{key}'; its columns: {has}", "--json-keys COLUMN")
        if schema.names.count(key) > 1:
            raise UnreadableTableError(f" has several columns '{key}'", "rename them")
        kind = schema.field(key).type
        if str(kind.value_type if types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise UnreadableTableError(f": '{key}' is {kind}, not a string", "--json-keys COLUMN")


def _serialize(batch: Any, keys: Sequence[str]) -> bytes:
    """Return an Arrow stream of the columns; bytes instead of strings, which may be invalid UTF-8."""
    import pyarrow as pa

    columns = [batch.column(key) for key in keys]
    texts = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in columns]
    rows = pa.record_batch([text.cast(pa.large_binary()) for text in texts], list(keys))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def parse_rows(content: bytes) -> list[Row]:
    """Return the rows of a batch of `read_batches`."""
    from pyarrow import ipc

    rows: list[Row] = ipc.open_stream(content).read_all().to_pylist() if content else []
    return rows


def saved_dataset_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a dataset written by `save_to_disk`, in their order; none for another folder.

    The folder may hold more Arrow files, the cache of `Dataset.map`.

    Raises:
        DataError: if the folder holds several splits.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _names(folder / "dataset_dict.json", lambda content: content["splits"])
        if len(splits) > 1:
            fixes = [f"--input {shell_word(str(folder / split))}" for split in splits]
            raise DataError(f"{folder} holds the splits {', '.join(splits)}", *fixes)
        folder = folder.joinpath(*splits)
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return []
    files = _names(folder / "state.json", lambda content: [file["filename"] for file in content["_data_files"]])
    return [folder / name for name in files]


def _names(file: Path, read: Callable[[Any], list[str]]) -> list[str]:
    """Return the names that a JSON file of `datasets` holds, none of which leads to another folder."""
    try:
        names = read(parse_json(read_small(file)))
        if names == [Path(name).name for name in names] and ".." not in names:
            return names
        reason = "it names files of other folders"
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error)
    raise DataError(f"{file} is not a file of a dataset: {reason}", f"--exclude {shlex.quote(file.parent.name)}")


def hugging_face_files(name: str) -> list[Path]:
    """Return the Arrow files of a split of ``hf:NAME[:CONFIG][:SPLIT]``, after a download if they are not in the cache.

    NAME is what `datasets.load_dataset` takes: a name on the hub or a local folder. ``HF_TOKEN``, ``HF_HOME`` and
    ``HF_HUB_OFFLINE`` apply.

    Raises:
        DataError: if the dataset cannot be loaded, or the split has to be chosen.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"datasets is needed for --input {name}", TABLES_FIX) from error
    path, *parts = name.removeprefix("hf:").split(":")
    try:
        if len(parts) == 1 and parts[0] not in datasets.get_dataset_config_names(path):
            parts.insert(0, "")
        config, split = [*parts, "", ""][:2]
        splits = datasets.load_dataset(path, config or None, keep_in_memory=False)
    except Exception as error:  # many classes: of the hub, the network, the disk and the formats
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"--input {name}: loading the dataset failed: {first[0]}",
            f"where there is a network: hf download {path} --repo-type dataset --local-dir DIR, then --input DIR",
            "HF_TOKEN=... for a gated dataset",
        ) from error
    split = split or (next(iter(splits)) if len(splits) == 1 else "")
    if split not in splits:
        fixes = [f"--input {shell_word(':'.join(filter(None, ('hf', path, config, each))))}" for each in splits]
        raise DataError(f"--input {name}: the dataset has the splits {', '.join(splits)}", *fixes)
    return [Path(file["filename"]) for file in splits[split].cache_files]
