"""Read Parquet and Arrow files, also those of Hugging Face `datasets`, in batches of rows.

`read_batches` yields the text columns of a file in constant memory, as bytes that a worker turns into rows with
`parse_rows`. `saved_dataset_files` and `hugging_face_files` name the Arrow files of a dataset.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.files import parse_json, read_small
from megatron.config.text import clipped, listed, shell_word
from megatron.data.errors import DataError
from megatron.data.preprocess.remote import InputFile
from megatron.data.tokenizers.base import convert_library_errors

TABLE_SUFFIXES = (".parquet", ".arrow")
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
"""Of Arrow. Bytes are text in UTF-8, which is checked row by row."""

READ_BYTES, READ_ROWS = 1 << 20, 32
"""Of a Parquet column, read at once. A few bytes of a file can stand for any number of rows, each with the longest text
of a page; the row counts and sizes that a file declares are not relied on."""
ROW_BYTES = 8  # of a batch, at least, for each row
ARROW_FILE_MAGIC = b"ARROW1"  # begins a file with random access; the streams that `datasets` writes lack it

TABLES_FIX = "pip install 'megatron-pretrain[tables]'"

Row = dict[str, Any]  # by column: the text in UTF-8 or null of `read_batches`, any value of `read_rows`

Batches = Iterator[tuple[Any, int]]  # record batches, and about how many bytes of the file have been read


class UnreadableTableError(DataError):
    """The rest of a table cannot be read: `seen` is a sentence without its subject."""


def read_batches(
    file: InputFile, keys: Sequence[str], batch_bytes: int, max_row_bytes: int
) -> Iterator[tuple[bytes | None, int]]:
    """Yield batches of about ``batch_bytes`` of text, and how many bytes of the file have been read, approximately.

    Args:
        file: with the suffix of a table.
        keys: columns to read.
        batch_bytes: size of a batch; a longer row makes a larger one.
        max_row_bytes: limit of the text in a row. A longer one yields None.

    Raises:
        UnreadableTableError: if the file is damaged, or a column is missing or not text.
    """
    most = max(1, batch_bytes // ROW_BYTES)
    with _named_errors(file):
        for batch, end in _read_table(file, keys, batch_bytes, texts=True):
            columns = [_checked(batch.column(key)) for key in keys]
            for first in range(0, batch.num_rows, most):
                some = [column.slice(first, most) for column in columns]
                ends = np.sum([*map(_lengths, some)], axis=0).cumsum()
                start = 0
                while start < len(ends):
                    before = int(ends[start - 1]) if start else 0
                    stop = max(start + 1, int(ends.searchsorted(before + batch_bytes, "right")))
                    fits = int(ends[stop - 1]) - before <= max(batch_bytes, max_row_bytes)
                    yield _serialize([each.slice(start, stop - start) for each in some], keys) if fits else None, end
                    start = stop


def read_rows(
    file: InputFile, columns: Sequence[str] | None, batch_bytes: int, max_row_bytes: int
) -> Iterator[tuple[bytes | None, int]]:
    """Yield batches as `read_batches` does, of rows with these ``columns`` of any type; None for all."""
    with _named_errors(file):
        for batch, end in _read_table(file, columns, batch_bytes, texts=False):
            batch.validate(full=True)
            count = max(1, batch_bytes * batch.num_rows // max(batch.nbytes, ROW_BYTES * batch.num_rows, 1))
            for first in range(0, batch.num_rows, count):
                rows = batch.slice(first, count)
                yield None if rows.num_rows == 1 and rows.nbytes > max_row_bytes else _to_stream(rows), end


@contextmanager
def _named_errors(file: InputFile) -> Iterator[None]:
    """Convert the errors of a damaged table to UnreadableTableError."""
    try:  # here, because it takes a while
        import pyarrow as pa  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"pyarrow is needed for {file}", TABLES_FIX) from error
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # of names
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableTableError(f" cannot be read from here on: {clipped(reason)}", "copy the file again") from error


def _read_table(
    file: InputFile, columns: Sequence[str] | None, batch_bytes: int, texts: bool
) -> Iterator[tuple[Any, int]]:
    """Yield the batches of a table."""
    read = _read_parquet if file.suffix.lower() == ".parquet" else _read_arrow
    return read(file, columns, batch_bytes, texts)


def _read_parquet(
    file: InputFile, keys: Sequence[str] | None, batch_bytes: int, texts: bool
) -> Iterator[tuple[Any, int]]:
    from pyarrow import parquet

    with (
        file.open("rb") as stream,
        parquet.ParquetFile(stream, buffer_size=READ_BYTES, pre_buffer=False) as table,
    ):
        _check_columns(table.schema_arrow, keys, texts)
        size, total, done = file.stat().st_size, table.metadata.num_rows, 0
        read, held = [], 0
        for batch in table.iter_batches(READ_ROWS, columns=keys and [*keys], use_threads=False):
            read.append(batch)
            done, held = done + batch.num_rows, held + batch.nbytes
            if held >= batch_bytes:
                yield _join(read), size * min(done, total) // max(1, total)
                read, held = [], 0
        if read:
            yield _join(read), size


def _join(batches: Sequence[Any]) -> Any:
    """Return one batch of all rows; a single one, which may be large, is not copied."""
    import pyarrow as pa

    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _read_arrow(
    file: InputFile, keys: Sequence[str] | None, batch_bytes: int, texts: bool
) -> Iterator[tuple[Any, int]]:
    import pyarrow as pa

    with pa.memory_map(str(file)) if isinstance(file, Path) else pa.PythonFile(file.open("rb")) as source:
        has_footer = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        source.seek(0)
        reader = pa.ipc.open_file(source) if has_footer else pa.ipc.open_stream(source)
        _check_columns(reader.schema, keys, texts)
        keys = keys or reader.schema.names
        count = reader.num_record_batches if has_footer else 0
        for number in range(count):
            yield reader.get_batch(number).select(keys), source.size() * (number + 1) // count
        for batch in () if has_footer else reader:
            yield batch.select(keys), source.tell()


def _check_columns(schema: Any, keys: Sequence[str] | None, texts: bool) -> None:
    """Raise UnreadableTableError if a column is missing, or, where all should be ``texts``, not text."""
    from pyarrow import types

    for key in schema.names if keys is None else keys:
        if key not in schema.names:
            has = listed(schema.names, 8) or "none"
            raise UnreadableTableError(f" has no column '{key}'; its columns: {has}", "--json-keys COLUMN")
        if schema.names.count(key) > 1:
            raise UnreadableTableError(f" has several columns '{key}'", "rename them")
        kind = schema.field(key).type
        if texts and str(kind.value_type if types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise UnreadableTableError(f": '{key}' is {clipped(kind)}, not a string", "--json-keys COLUMN")


def _checked(column: Any) -> Any:
    """Return a column of text as bytes, after a check that all of it lies in its buffers; ArrowInvalid if not.

    The library does not check what it reads from a file of Arrow. Texts may be invalid UTF-8, which is found later.
    """
    import pyarrow as pa

    column.validate()
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, _checked(column.dictionary))
    kinds = {"string": pa.binary(), "large_string": pa.large_binary(), "string_view": pa.binary_view()}
    column = column.view(kinds.get(str(column.type), column.type))
    column.validate(full=True)
    return column


def _lengths(column: Any) -> NDArray[np.int64]:
    """Return the number of bytes of each text."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64)
    if pa.types.is_dictionary(column.type):
        return _lengths(column.dictionary)[column.indices.fill_null(0).to_numpy()] * column.is_valid().to_numpy(False)
    if column.type == pa.binary_view():  # each begins with its length
        views = np.frombuffer(column.buffers()[1], np.int32)[4 * column.offset :: 4][: len(column)]
        return np.where(column.is_valid().to_numpy(False), views, 0).astype(np.int64)
    lengths: NDArray[np.int64] = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return lengths


def _serialize(columns: Sequence[Any], keys: Sequence[str]) -> bytes:
    """Return an Arrow stream of columns of `_checked`."""
    import pyarrow as pa

    texts = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in columns]
    return _to_stream(pa.record_batch([text.cast(pa.large_binary()) for text in texts], list(keys)))


def _to_stream(rows: Any) -> bytes:
    """Return an Arrow stream of a record batch."""
    import pyarrow as pa

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
    fix = f"where there is a network: hf download {path} --repo-type dataset --local-dir DIR, then --input DIR"
    failure = f"--input {name}: loading the dataset failed"
    with convert_library_errors(DataError, failure, fix, "HF_TOKEN=... for a gated dataset"):
        if len(parts) == 1 and parts[0] not in datasets.get_dataset_config_names(path):
            parts.insert(0, "")
        config, split = [*parts, "", ""][:2]
        splits = datasets.load_dataset(path, config or None, keep_in_memory=False)
    split = split or (next(iter(splits)) if len(splits) == 1 else "")
    if split not in splits:
        fixes = [f"--input {shell_word(':'.join(filter(None, ('hf', path, config, each))))}" for each in splits]
        raise DataError(f"--input {name}: the dataset has the splits {', '.join(splits)}", *fixes)
    return [Path(file["filename"]) for file in splits[split].cache_files]
