"""Read pickled files without running what is in them: those of ``torch.save`` and of torch.distributed.checkpoint.

A pickle names functions and classes, and calls them. Here every name stands for a harmless substitute: tensors become
`StoredTensor`, a place in the file; classes that only hold values become `Record`; names outside the list are refused.
Every file gets new substitutes, so a pickle cannot change those of another file.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import ITEM_BYTES, MANIFEST_BYTES, row_major_strides, to_dims
from megatron.config.files import open_regular

DTYPES = {
    "double": "F64",
    "float": "F32",
    "half": "F16",
    "bfloat16": "BF16",
    "long": "I64",
    "int": "I32",
    "short": "I16",
    "char": "I8",
    "byte": "U8",
    "bool": "BOOL",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of types in torch, and in lower case in those of its storages -> in safetensors."""

RECORDS = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.\w+|pathlib\.\w+|_?io\.BytesIO|datetime\.\w+|(collections\.)?OrderedDict"
    r"|megatron\.(core|training|legacy)\.[\w.]+|transformer_engine\.[\w.]+"
    r"|torch\.distributed\.checkpoint\.(metadata|filesystem|planner|storage)\.\w+"
    r"|torch\.(device|Tensor|nn\.parameter\.Parameter|serialization\._get_layout)|torch\.storage\.\w+Storage"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.(multiarray|numeric)\.\w+|random\.[\w.]+)"
)
"""Classes, and functions that return them, of which only the arguments and the state are kept."""

SCALARS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i", "U8": "<B", "BOOL": "<?"}
"""Formats of the types that numbers of a run are stored with."""


class Record:
    """An object of a class that is not executed, with what the pickle gives it."""

    name = ""  # of the class, with its module
    args: tuple[Any, ...] = ()  # of its constructor
    state: Any = None

    def __new__(cls, *args: Any, **keywords: Any) -> Record:
        """Keep the arguments."""
        record = object.__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: str  # name of the type in safetensors
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int  # first byte, from the start of the file
    crc: int | None  # checksum of its bytes; None if it shares them with other tensors

    @property
    def contiguous(self) -> bool:
        """True if its elements are stored in row-major order, without gaps."""
        usual = zip(self.shape, self.strides, row_major_strides(self.shape))
        return all(stride == expected or size == 1 for size, stride, expected in usual)

    def item(self) -> float:
        """Return the only element."""
        with open_regular(self.path) as file:
            file.seek(self.offset)
            (value,) = struct.unpack(SCALARS[self.dtype], file.read(ITEM_BYTES[self.dtype]))
        return float(value)


class _Storage(NamedTuple):
    """The bytes that tensors are views of."""

    dtype: str  # "" if each tensor names its own
    offset: int
    bytes: int
    crc: int


class _Dict(dict[Any, Any]):
    """A dictionary that may have attributes; the state dictionaries of modules do."""


class _Unpickler(pickle._Unpickler):
    """Builds objects of substitutes only.

    It is the one in Python: the one in C allocates as much memory as a pickle asks for, before it reads on.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # also allocates first

    def __init__(
        self, file: BinaryIO, path: Path, storage: Callable[[str], tuple[int, int, int]] | None = None
    ) -> None:
        """Read from ``file``; ``storage`` returns place and checksum of a storage in ``path``, by its key."""
        super().__init__(file)
        self._path, self._storage = path, storage

    def find_class(self, module: str, name: str) -> Any:
        """Return the substitute for a name; UnpicklingError if there is none."""
        full = f"{module}.{name}"
        if module == "torch" and (name in DTYPES or name.removesuffix("Storage").lower() in DTYPES):
            return DTYPES[name.removesuffix("Storage").lower()]
        if full in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return lambda *args: self._tensor(*args)
        if full == "torch._utils._rebuild_parameter":
            return lambda tensor, *rest: tensor
        if full == "torch._tensor._rebuild_from_type_v2":
            return lambda rebuild, kind, args, *rest: self._tensor(*args)
        if full == "torch.Size":
            return tuple
        if full == "collections.OrderedDict":
            return type("OrderedDict", (_Dict,), {})
        if full in ("_codecs.encode", "builtins.getattr", "__builtin__.getattr"):  # the bytes of arrays; enumerations
            return type("Call", (Record,), {"name": full})
        if module in ("builtins", "__builtin__") and name in ("set", "frozenset", "complex", "slice"):
            return {"set": set, "frozenset": frozenset, "complex": complex, "slice": slice}[name]
        if RECORDS.fullmatch(full):
            return type("Record", (Record,), {"name": full})
        raise pickle.UnpicklingError(f"names {full}, which is not read")

    def persistent_load(self, key: Any) -> _Storage:
        """Return a storage."""
        if self._storage is None or not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage":
            raise pickle.UnpicklingError("refers to an object outside of the file")
        dtype = key[1] if isinstance(key[1], str) else ""
        return _Storage(dtype, *self._storage(str(key[2])))

    def _tensor(
        self, storage: Any, first: Any, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, *rest: Any
    ) -> StoredTensor:
        """Return a tensor, inside its storage."""
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("has a tensor without a storage")
        dtype = storage.dtype or str(rest[0])
        (first,), shape, strides = to_dims((first,)), to_dims(shape), to_dims(strides)
        last = first + sum((n - 1) * stride for n, stride in zip(shape, strides))
        if len(shape) != len(strides) or (prod(shape) and (last + 1) * ITEM_BYTES[dtype] > storage.bytes):
            raise pickle.UnpicklingError(f"has a tensor {list(shape)} that is larger than its storage")
        alone = prod(shape) * ITEM_BYTES[dtype] == storage.bytes
        offset = storage.offset + first * ITEM_BYTES[dtype]
        return StoredTensor(self._path, dtype, shape, strides, offset, storage.crc if alone else None)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move as `io.IOBase.seek`."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as `io.RawIOBase.readinto`."""
        self._file.seek(self._start + self._at)
        content = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Return the object that ``torch.save`` wrote, of dicts, lists, numbers, texts, `Record` and `StoredTensor`.

    Args:
        path: the file.
        start: first byte of what was saved.
        length: its bytes; None for the rest of the file.

    Raises:
        DamagedCheckpointError: if the file cannot be read, or names what is not read.
    """
    return _read(path, partial(_read_zip, start=start, length=length))


def read_pickle_file(path: Path) -> Any:
    """Return the object that ``pickle.dump`` wrote, as `read_torch_file` does."""
    return _read(path, _read_pickle)


def _read(path: Path, read: Callable[[BinaryIO, Path], Any]) -> Any:
    try:
        with open_regular(path) as file:
            return plain(read(file, path))
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(f"{path} {error}") from error
    except zipfile.BadZipFile as error:
        raise DamagedCheckpointError(f"{path} is truncated, or was not written by torch.save: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error


def _read_pickle(file: BinaryIO, path: Path) -> Any:
    size = file.seek(0, io.SEEK_END)
    if size > MANIFEST_BYTES:
        raise pickle.UnpicklingError("is too large for a table of tensors")
    file.seek(0)
    return _Unpickler(io.BytesIO(file.read(size)), path).load()


def _read_zip(file: BinaryIO, path: Path, start: int, length: int | None) -> Any:
    size = file.seek(0, io.SEEK_END) - start if length is None else length
    with zipfile.ZipFile(io.BufferedReader(_Window(file, start, size))) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in entries.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise pickle.UnpicklingError(f"has compressed contents ({info.filename})")
        if "byteorder" in entries and archive.read(entries["byteorder"]).strip() != b"little":
            raise pickle.UnpicklingError("was written by a big-endian machine")
        if "data.pkl" not in entries or entries["data.pkl"].file_size > MANIFEST_BYTES:
            raise pickle.UnpicklingError("was not written by torch.save")
        content = archive.read(entries["data.pkl"])

    def storage(key: str) -> tuple[int, int, int]:
        info = entries[f"data/{key}"]
        file.seek(start + info.header_offset + 26)  # the lengths of name and extra field in the local header
        name, extra = struct.unpack("<HH", file.read(4))
        first: int = info.header_offset + 30 + name + extra
        if first + info.file_size > size:
            raise pickle.UnpicklingError("is truncated")
        return start + first, info.file_size, info.CRC

    return _Unpickler(io.BytesIO(content), path, storage).load()


def plain(value: Any) -> Any:
    """Return a value with plain dicts, lists and tuples; the attributes of a namespace are a dict.

    Raises:
        RecursionError: if it is nested in itself.
    """
    known: dict[int, Any] = {}  # an object may occur in many places

    def convert(value: Any) -> Any:
        if isinstance(value, Record) and value.name == "argparse.Namespace":
            value = value.state if isinstance(value.state, dict) else {}
        if isinstance(value, StoredTensor | _Storage) or not isinstance(value, dict | list | tuple):
            return value
        if id(value) not in known:
            if isinstance(value, dict):
                known[id(value)] = {key: convert(item) for key, item in dict.items(value)}
            else:
                known[id(value)] = (list if isinstance(value, list) else tuple)(map(convert, value))
        return known[id(value)]

    return convert(value)
