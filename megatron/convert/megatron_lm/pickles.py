"""Read pickled files without running what is in them: those of ``torch.save`` and of torch.distributed.checkpoint.

A pickle is a program for a stack machine, which names functions and classes, and calls them. The machine here builds
values and calls nothing: tensors become `StoredTensor`, a place in the file; other classes become `Record`, which holds
values; names outside the list are refused. Its limits are below: time and memory are at most proportional to the size
of the file, and so is what is built from a value later.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import ITEM_BYTES, MAX_DIMS, row_major_strides, to_dims
from megatron.config.files import MAX_DEPTH, open_regular
from megatron.config.text import clipped, format_bytes

PICKLE_BYTES = 1 << 26
"""Limit for a pickle, and for the list of contents of a file, which are read at about 2 MB/s. A table of tensors has
about 300 bytes for each part of a tensor."""

STEPS_OF_BYTE, SPARE_STEPS = 0.6, 10_000
"""Steps of the machine for each byte of a pickle that it has read, and more; real pickles have 0.45. A step takes about
a microsecond, and a byte at most 70 bytes of memory."""

NUMBERS_OF_STEP = 1024
"""Numbers among the keys of a dict that a search in it meets in about the time of a step."""

VALUES_OF_BYTE = 4
"""Values in the result for each byte of a pickle; what occurs in several places counts in each. Real ones have 1."""

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

NAMES = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.\w+|pathlib\.\w+|_?io\.BytesIO|datetime\.\w+|(collections\.)?OrderedDict"
    r"|deepspeed\.(runtime|utils)\.[\w.]+"
    r"|megatron\.(core|training|legacy)\.[\w.]+|transformer_engine\.[\w.]+"
    r"|torch\.distributed\.checkpoint\.(metadata|filesystem|planner|storage)\.\w+"
    r"|torch\.(device|Size|Tensor|nn\.parameter\.Parameter|serialization\._get_layout)|torch\.storage\.\w+Storage"
    r"|torch\._utils\._rebuild_(tensor_v[23]|parameter)|torch\._tensor\._rebuild_from_type_v2"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.(multiarray|numeric)\.\w+|random\.[\w.]+)"
    r"|_codecs\.encode|(builtins|__builtin__)\.(getattr|set|frozenset|complex|slice)"
)
"""Classes and functions that a pickle may name. Of all but those in `_Machine.construct` the arguments and the state
are kept."""

SCALARS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i", "U8": "<B", "BOOL": "<?"}
"""Formats of the types that numbers of a run are stored with."""


class Record:
    """An object of a class that is not executed, with what the pickle gives it."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name = name  # of the class, with its module
        self.args = args  # of its constructor
        self.state: Any = None


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


class _UnreadableError(Exception):
    """A pickle has what is not read: the message is a sentence without its subject."""


class _Name(Record):
    """A name of `NAMES`, which the machine never looks up."""

    __slots__ = ()


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(
        self, content: bytes, path: Path, storage: Callable[[str], tuple[int, int, int]] | None = None
    ) -> None:
        """Read a pickle in ``path``; ``storage`` returns place and checksum of a storage there, by its key."""
        self._content, self._path, self._storage = content, path, storage
        self._stack: list[Any] = []
        self._marks: list[int] = []  # lengths of the stack where collections begin
        self._kept: dict[int, Any] = {}  # what the pickle refers to again
        self._namespaces: dict[int, dict[str, Any]] = {}  # by identity
        self._steps = 0
        self._most_steps = float(SPARE_STEPS)

    def run(self) -> Any:
        """Return the value that the pickle builds."""
        push = self._stack.append
        for opcode, argument, place in pickletools.genops(self._content):
            if opcode.name in LITERALS:
                push(argument)
            elif opcode.name in STEPS:
                STEPS[opcode.name](self, argument)
            else:
                raise _UnreadableError(f"has the opcode {opcode.name}, which is not read")
            self._most_steps = SPARE_STEPS + (place or 0) * STEPS_OF_BYTE
            self._spend(1)
        value = self._stack.pop()
        _check_size(value, SPARE_STEPS + len(self._content) * VALUES_OF_BYTE)
        return value

    def _spend(self, steps: int) -> None:
        """Count steps; raise _UnreadableError if they are more than a file of this size needs."""
        self._steps += steps
        if self._steps > self._most_steps:
            raise _UnreadableError("has more opcodes than a file of its size needs")

    def push(self, value: object) -> None:
        """Put a value onto the stack."""
        self._stack.append(value)

    def mark(self) -> None:
        """Begin a collection."""
        self._marks.append(len(self._stack))

    def take(self, count: int | None = None) -> list[Any]:
        """Remove values from the stack: ``count``, or those since the last mark."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise _UnreadableError("takes more values than it has")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def append(self, items: list[Any]) -> None:
        """Add items to the list on the stack."""
        self._expect(list).extend(items)

    def insert(self, items: Sequence[Any]) -> None:
        """Add keys and values to the dict on the stack."""
        found = self._expect(dict)
        found.update(zip(self._keys(items[::2], len(found)), items[1::2], strict=True))

    def collect(self) -> None:
        """Put a dict of the keys and values since the last mark onto the stack."""
        items = self.take()
        self.push({})
        self.insert(items)

    def add(self, items: list[Any]) -> None:
        """Add members to the set on the stack."""
        found = self._expect(set)
        found.update(self._keys(items, len(found)))

    def freeze(self) -> None:
        """Put a set of the values since the last mark onto the stack."""
        items = self.take()
        self.push(set())
        self.add(items)

    def _keys(self, items: Sequence[Any], held: int) -> Sequence[Any]:
        """Return keys of a dict or members of a set, which has ``held``, if they are hashed in constant time.

        The time for the hash of nested tuples has no bound. Numbers can be chosen so that a search meets all others:
        steps are counted for that. Hashes of texts cannot be foreseen.
        """
        numbers = 0
        for item in items:
            number = isinstance(item, float) or (isinstance(item, int) and -(2**63) <= item < 2**64)
            texts = type(item) is tuple and len(item) <= MAX_DIMS and all(isinstance(each, str) for each in item)
            if not (number or texts or isinstance(item, KEYS)):
                raise _UnreadableError(f"has a {type(item).__name__} as a key, which is a text, a number or a record")
            numbers += number
        self._spend(numbers * (held + numbers) // NUMBERS_OF_STEP)
        return items

    def _expect(self, kind: type) -> Any:
        found = self._stack[-1]
        if not isinstance(found, kind):
            raise _UnreadableError(f"takes a {type(found).__name__} for a {kind.__name__}")
        return found

    def keep(self, number: int | None) -> None:
        """Remember the value on the stack by a number, by default the next."""
        self._kept[len(self._kept) if number is None else number] = self._stack[-1]

    def recall(self, number: int) -> None:
        """Put the value of that number onto the stack."""
        self._stack.append(self._kept[number])

    def find(self, module: Any, name: Any) -> None:
        """Put what stands for a name onto the stack."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise _UnreadableError("names something by what is no text")
        full = f"{module}.{name}"
        dtype = full.removeprefix("torch.").removesuffix("Storage").lower()
        if full.startswith("torch.") and dtype in DTYPES:
            self.push(DTYPES[dtype])
        elif NAMES.fullmatch(full):
            self.push(_Name(full))
        else:
            raise _UnreadableError(f"names {clipped(full)}, which is not read")

    def construct(self, function: Any, args: Any) -> None:
        """Put onto the stack what stands for the object that a function or class would return."""
        if not isinstance(function, _Name) or not isinstance(args, tuple):
            raise _UnreadableError("calls what is no name")
        match function.name:
            case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor_v3":
                self.push(self._tensor(*args))
            case "torch._tensor._rebuild_from_type_v2":
                self.push(self._tensor(*args[2]))
            case "torch._utils._rebuild_parameter":
                self.push(args[0])
            case "torch.Size":
                self.push(to_dims(*args))
            case "argparse.Namespace":
                attributes: dict[str, Any] = {}
                self._namespaces[id(attributes)] = attributes
                self.push(attributes)
            case "collections.OrderedDict":
                self.push({})
            case "builtins.set" | "builtins.frozenset" | "__builtin__.set" | "__builtin__.frozenset":
                members = args[0] if args else []
                self._spend(len(members))
                self.push({*self._keys(members, 0)})
            case name:
                self.push(Record(name, args))

    def give_state(self) -> None:
        """Give the object on the stack its attributes. A dict has some only if it is a namespace."""
        state, found = self._stack.pop(), self._stack[-1]
        if isinstance(found, Record):
            found.state = state
        elif id(found) in self._namespaces and isinstance(state, dict):
            self._spend(len(state))
            found.update(zip(self._keys([*state], len(found)), state.values()))

    def open_storage(self, key: Any) -> None:
        """Put a storage onto the stack."""
        if self._storage is None or not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage":
            raise _UnreadableError("refers to an object outside of the file")
        if not isinstance(key[2], str):
            raise _UnreadableError("has a storage whose key is no text")
        dtype = key[1] if isinstance(key[1], str) else ""
        self.push(_Storage(dtype, *self._storage(key[2])))

    def _tensor(
        self, storage: Any, first: Any, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, *rest: Any
    ) -> StoredTensor:
        """Return a tensor, inside its storage."""
        if not isinstance(storage, _Storage):
            raise _UnreadableError("has a tensor without a storage")
        dtype = str(storage.dtype or (rest[0] if isinstance(rest[0], str) else ""))
        (first,), shape, strides = to_dims((first,)), to_dims(shape), to_dims(strides)
        last = first + sum((n - 1) * stride for n, stride in zip(shape, strides))
        if len(shape) != len(strides) or (prod(shape) and (last + 1) * ITEM_BYTES[dtype] > storage.bytes):
            raise _UnreadableError(f"has a tensor {list(shape)} that is larger than its storage")
        alone = prod(shape) * ITEM_BYTES[dtype] == storage.bytes
        offset = storage.offset + first * ITEM_BYTES[dtype]
        return StoredTensor(self._path, dtype, shape, strides, offset, storage.crc if alone else None)


KEYS = (str, bytes, Record, type(None))
CONTAINERS = (dict, list, tuple, set, frozenset, Record, _Name)

LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
"""Opcodes of values that follow them."""

_Step = Callable[[_Machine, Any], None]
STEPS: Mapping[str, _Step] = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.keep),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.mark(),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.take())),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "LIST": lambda machine, _: machine.push(machine.take()),
    "APPEND": lambda machine, _: machine.append(machine.take(1)),
    "APPENDS": lambda machine, _: machine.append(machine.take()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "DICT": lambda machine, _: machine.collect(),
    "SETITEM": lambda machine, _: machine.insert(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.insert(machine.take()),
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "ADDITEMS": lambda machine, _: machine.add(machine.take()),
    "FROZENSET": lambda machine, _: machine.freeze(),
    "GLOBAL": lambda machine, names: machine.find(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.find(*machine.take(2)),
    "REDUCE": lambda machine, _: machine.construct(*machine.take(2)),
    "NEWOBJ": lambda machine, _: machine.construct(*machine.take(2)),
    "NEWOBJ_EX": lambda machine, _: machine.construct(*machine.take(3)[:2]),
    "BUILD": lambda machine, _: machine.give_state(),
    "BINPERSID": lambda machine, _: machine.open_storage(*machine.take(1)),
}
"""Actions of the opcodes that torch.save writes. Other opcodes serve older classes and recursive tuples."""


def _check_size(value: Any, most: int) -> None:
    """Raise _UnreadableError if a value has more than ``most`` values inside, or is nested too deeply.

    What occurs in several places counts in each, as whoever prints, copies or compares the value meets it.
    """
    known: dict[int, tuple[int, int]] = {}  # values and depth

    def measure(value: Any, above: int) -> tuple[int, int]:
        count, depth = known.get(id(value), (0, 0))
        if not count and above <= MAX_DEPTH:
            parts = [value.args, value.state] if isinstance(value, Record) else list(value)
            parts += value.values() if type(value) is dict else ()
            count = 1 + len(parts)
            for part in parts:
                if type(part) in CONTAINERS:
                    inner, below = measure(part, above + 1)
                    count, depth = count + inner, max(depth, below + 1)
            known[id(value)] = count, depth
        if count > most:
            raise _UnreadableError("repeats its values more often than a file of its size does")
        if above + depth > MAX_DEPTH:
            raise _UnreadableError(f"is nested more than {MAX_DEPTH} deep")
        return count, depth

    if type(value) in CONTAINERS:
        measure(value, 0)


class _Window:
    """A part of a file, as a file from which only little is read at once."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move as `io.IOBase.seek`."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read as `io.RawIOBase.read`."""
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > PICKLE_BYTES:
            raise _UnreadableError(f"has a part of more than {format_bytes(PICKLE_BYTES)} that is no tensor")
        self._file.seek(self._start + self._at)
        content = self._file.read(size)
        self._at += len(content)
        return content


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
            return read(file, path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except _UnreadableError as error:
        raise DamagedCheckpointError(f"{path} {error}") from error
    except zipfile.BadZipFile as error:
        raise DamagedCheckpointError(
            f"{path} is truncated, or was not written by torch.save: {clipped(error)}"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{path} is damaged: {clipped(repr(error))}") from error


def _read_pickle(file: BinaryIO, path: Path) -> Any:
    size = file.seek(0, io.SEEK_END)
    if size > PICKLE_BYTES:
        raise _UnreadableError("is too large for a table of tensors")
    file.seek(0)
    return _Machine(file.read(size), path).run()


def _read_zip(file: BinaryIO, path: Path, start: int, length: int | None) -> Any:
    size = file.seek(0, io.SEEK_END) - start if length is None else length
    with zipfile.ZipFile(_Window(file, start, size)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in entries.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise _UnreadableError(f"has compressed contents ({clipped(info.filename)})")
        if "byteorder" in entries and archive.read(entries["byteorder"]).strip() != b"little":
            raise _UnreadableError("was written by a big-endian machine")
        if "data.pkl" not in entries or entries["data.pkl"].file_size > PICKLE_BYTES:
            raise _UnreadableError("was not written by torch.save")
        content = archive.read(entries["data.pkl"])

    def storage(key: str) -> tuple[int, int, int]:
        info = entries[f"data/{key}"]
        file.seek(start + info.header_offset + 26)  # the lengths of name and extra field in the local header
        name, extra = struct.unpack("<HH", file.read(4))
        first: int = info.header_offset + 30 + name + extra
        if first + info.file_size > size:
            raise _UnreadableError("is truncated")
        return start + first, info.file_size, info.CRC

    return _Machine(content, path, storage).run()
