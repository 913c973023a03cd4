"""Communication sites of the library: found in its source, watched and broken while it runs.

A site is a call of a raw collective, or of one end of a channel, of ``megatron.distributed.comm`` outside that file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Channel, Group, Pending

ROOT = Path(comm.__file__).parents[2]
COMM = str(Path(comm.__file__).relative_to(ROOT))
TENSOR_OPS = ("all_reduce", "all_gather", "reduce_scatter")
OBJECT_OPS = ("all_gather_objects", "gather_objects", "broadcast_object")
CHANNEL_OPS = ("start_send", "start_receive")
ROWS_OP = "start_all_to_all_rows"
EXCHANGE_OP = "start_exchange"
FUSED_OPS = ("all_gather_matmul", "matmul_reduce_scatter")
STARTED_OPS = tuple(f"start_{op}" for op in (*TENSOR_OPS, "all_to_all", "broadcast", "reduce"))
OPS = (*TENSOR_OPS, *STARTED_OPS, ROWS_OP, EXCHANGE_OP, *FUSED_OPS, *OBJECT_OPS, *CHANNEL_OPS)
Operation = Callable[..., Any]


@dataclass(frozen=True, order=True)
class Site:
    """A call of ``op`` in line ``line`` of ``file`` (relative to the repository)."""

    file: str
    line: int
    op: str


@dataclass(frozen=True, order=True)
class Call:
    """A site as it reads: ``function`` around it and ``reduction`` (``max``, or ``sum`` where none is named)."""

    site: Site
    function: str
    reduction: str = "sum"

    def __str__(self) -> str:
        return f"{self.site.file}:{self.site.line}-{self.function}-{self.site.op}"


def calls() -> list[Call]:
    """Every site of the library, by reading its sources; two calls of an operation in a line are one."""
    return [*dict.fromkeys(call for path, tree in _sources() for call in _calls_in(tree, path))]


def strays() -> list[str]:
    """Places where a collective is reached other than by calling ``comm.op``, which no mutation would see.

    That none is taken from torch.distributed itself is a rule of the repository, tested with the others.
    """
    return [f"{path.relative_to(ROOT)}:{line}" for path, tree in _sources() for line in _strays_in(tree)]


def _sources() -> list[tuple[Path, ast.Module]]:
    """Return the files that contain the name of an operation."""
    files = {path: path.read_text() for path in sorted((ROOT / "megatron").rglob("*.py"))}
    named = {path: text for path, text in files.items() if any(op in text for op in OPS)}
    return [(path, ast.parse(text)) for path, text in named.items() if path != Path(comm.__file__)]


def _strays_in(tree: ast.Module) -> Iterator[int]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == comm.__name__ and {a.name for a in node.names} & {*OPS}:
            yield node.lineno
        kept = isinstance(node, ast.Attribute) and node.attr in OPS and id(node) not in called
        if kept and ast.unparse(node.value).endswith("comm"):
            yield node.lineno


def _calls_in(tree: ast.Module, path: Path) -> Iterator[Call]:
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPS):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "comm":
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or f.lineno)]
            innermost = max(around, key=lambda f: f.lineno).name if around else "module"
            named = [k.value.value for k in node.keywords if k.arg == "op" and isinstance(k.value, ast.Constant)]
            site = Site(str(path.relative_to(ROOT)), node.lineno, node.func.attr)
            yield Call(site, innermost, str(named[0]) if named else "sum")


@contextmanager
def watching() -> Iterator[set[Site]]:
    """The sites at which this rank really communicates while the body runs."""
    seen: set[Site] = set()

    def note(site: Site, original: Operation, *arguments: Any, **named: Any) -> Any:
        seen.add(site)
        return original(*arguments, **named)

    with _intercepted(note):
        yield seen


@contextmanager
def broken(target: Site, how: str) -> Iterator[None]:
    """Break one site while the body runs, in one of the ways of :func:`mutations`."""
    before: dict[Any, Tensor] = {}

    def mutate(site: Site, original: Operation, value: Any, road: Any, *rest: Any, **named: Any) -> Any:
        if site != target:
            return original(value, road, *rest, **named)
        if isinstance(road, Channel):
            return _tamper(site.op, original, value, road, Message(MESSAGES[how], before, road))
        if site.op == EXCHANGE_OP:
            came = original(value, road, *rest).wait()
            return Pending(came.copy_(Message(MESSAGES[how], before, came.shape)(came)))
        return (ROWS if site.op == ROWS_OP else MUTATIONS)[how](site.op, original, value, road, *rest, **named)

    with _intercepted(mutate):
        yield


def mutations(op: str) -> list[str]:
    """The ways to break a call of ``op``. Python objects are not summed: sending them can only be left out."""
    if op in (*CHANNEL_OPS, EXCHANGE_OP):
        return list(MESSAGES)
    if op == ROWS_OP:
        return list(ROWS)
    return ["removed"] if op in OBJECT_OPS else list(MUTATIONS)


def _removed(name: str, original: Operation, value: Any, group: Group, *rest: Any, **__: Any) -> Any:
    """Nothing is sent: the local part stands for all, in the shape the caller expects."""
    if name in OBJECT_OPS:
        return value if name == "broadcast_object" else [value] * group.size
    result = value
    if name.endswith("all_gather"):
        result = torch.cat([value] * group.size)
    elif name.endswith("reduce_scatter"):
        result = value.chunk(group.size)[group.rank].clone()
    elif name.endswith("broadcast") and rest[0] != group.rank:
        result = value.zero_()  # not left to what the memory held before, which may be right
    return _as_returned(name, result)


def _doubled(name: str, original: Operation, value: Any, group: Group, *rest: Any, **named: Any) -> Any:
    """The reduction is done twice; before a gather, one that does not belong there."""
    if name.endswith("all_reduce"):
        return original(comm.all_reduce(value, group, *rest, **named), group, *rest, **named)
    return original(comm.all_reduce(value.clone(), group), group, *rest, **named)


def _mis_scaled(name: str, original: Operation, value: Any, group: Group, *rest: Any, **named: Any) -> Any:
    """The result is twice as large, wherever it was written."""
    result = original(value, group, *rest, **named)
    result = result.wait() if isinstance(result, Pending) else result
    return _as_returned(name, result.mul_(2))


def _as_returned(name: str, result: torch.Tensor) -> torch.Tensor | Pending:
    return Pending(result) if name.startswith("start_") else result


MUTATIONS: dict[str, Operation] = {"removed": _removed, "doubled": _doubled, "mis-scaled": _mis_scaled}
"""Of collectives."""


def _rows_kept(
    name: str, original: Operation, x: Tensor, sent: Any, received: Sequence[int] | None, group: Group
) -> Pending:
    """Nothing is sent: this rank's own rows stand for those that would come, as far as there are any."""
    out = x.new_zeros((len(x) if received is None else sum(received), *x.shape[1:]))
    out[: len(x)] = x[: len(out)]
    return Pending(out)


def _misrouted(name: str, original: Operation, *arguments: Any) -> Pending:
    """Every row is taken for its neighbour."""
    return Pending(original(*arguments).wait().roll(1, 0))


ROWS: dict[str, Operation] = {"removed": _rows_kept, "misrouted": _misrouted, "mis-scaled": _mis_scaled}
"""Of exchanges in which ranks send each other different numbers of rows."""

MESSAGES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "removed": lambda x, before: torch.zeros_like(x),
    "stale": lambda x, before: x if before is None else before,
    "mis-scaled": lambda x, before: x * 2,
}
"""Of what goes through a channel or is exchanged, given what went before. A lost or
repeated message would block its receiver, so zeros or the previous message stand for it."""


@dataclass
class Message:
    """Mutation of the messages of a channel; ``before`` is the previous message at this end.

    Exchanges of one shape are a channel.
    """

    change: Callable[[Tensor, Tensor | None], Tensor]
    before: dict[Any, Tensor]
    channel: Any

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` after the change."""
        changed, self.before[self.channel] = self.change(x, self.before.get(self.channel)), x.clone()
        return changed


@dataclass
class Tampered(Pending):
    """A receive whose result is another than what came."""

    message: Callable[[Tensor], Tensor] = field(default=torch.clone)

    def wait(self) -> Tensor:
        """The changed message; changed once."""
        arrived = bool(self.works)
        result = super().wait()
        return result.copy_(self.message(result)) if arrived else result


def _tamper(name: str, original: Operation, value: Tensor, channel: Channel, message: Message) -> Pending:
    if name == "start_send":
        return original(message(value), channel)
    pending = original(value, channel)
    return Tampered(pending.result, pending.works, pending.group, message=message)


@contextmanager
def _intercepted(handler: Operation) -> Iterator[None]:
    """Send everything that is called outside ``comm.py`` on more than one rank through ``handler``."""
    originals = {name: getattr(comm, name) for name in OPS}

    def wrap(name: str, original: Operation) -> Operation:
        def wrapper(value: Any, road: Any, *rest: Any, **named: Any) -> Any:
            way = next(x for x in (road, *rest) if isinstance(x, Group | Channel))
            caller = sys._getframe(1)
            file = caller.f_code.co_filename.removeprefix(f"{ROOT}/")
            alone = isinstance(way, Group) and way.size == 1
            if alone or not file.startswith("megatron/") or file == COMM:
                return original(value, road, *rest, **named)
            return handler(Site(file, caller.f_lineno, name), original, value, road, *rest, **named)

        return wrapper

    for name, original in originals.items():
        setattr(comm, name, wrap(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)
