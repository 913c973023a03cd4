"""Find the tensors that hold a device's memory after an error, and the modules that they belong to.

Nothing is recorded while a run computes. Tensors with a Python object are found by the garbage collector, and those
that autograd has saved in C++ by a walk through the graph: it begins at all tensors with a gradient function and at
the edges that the pipeline keeps. A node belongs to the module whose parameter it reads; one without parameters, such
as an activation, to the parent of the module that consumes its output.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import SavedTensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge

from megatron.training.trainer import Trainer

KEPT, OTHER = "kept for backward", "other tensors"
"""Parts of memory beside those of the state of a run."""


@dataclass(frozen=True)
class LiveTensor:
    """Memory of one storage, and the largest tensor in it."""

    size: int  # bytes of the storage
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: str  # of the state, `KEPT` or `OTHER`
    owner: str  # module, parameter or variable; empty if unknown


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames that an error has passed, the one that raised it last."""
    found, at = list[FrameType](), error.__traceback__
    while isinstance(at, TracebackType):
        found.append(at.tb_frame)
        at = at.tb_next
    return found


def trainer_of(frames: Iterable[FrameType]) -> Trainer | None:
    """Return the trainer that is a variable of one of the frames."""
    values = (value for frame in frames for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, Trainer)), None)


class ModuleNames:
    """Global names of the modules of a run."""

    def __init__(self, trainer: Trainer | None) -> None:
        """Collect the names; without a trainer there are none."""
        chunks = [] if trainer is None else [*trainer.chunks.values()]
        self._modules = {id(module): name for chunk in chunks for name, module in chunk.named_modules() if name}
        params = {} if trainer is None else trainer.params
        self._params = {id(param): name.rpartition(".")[0] for name, param in params.items()}

    def of_node(self, node: Any) -> str:
        """Return the name of the module whose parameter a node of the autograd graph reads; empty for none."""
        for source, _ in node.next_functions:
            if (variable := getattr(source, "variable", None)) is not None and id(variable) in self._params:
                return self._params[id(variable)]
        return ""

    def of_frames(self, frames: Iterable[FrameType]) -> str:
        """Return the innermost module whose method, or backward, is among the frames; empty for none."""
        found = ""
        for frame in frames:
            for value in (frame.f_locals.get("self"), frame.f_locals.get("ctx")):
                if isinstance(value, nn.Module):
                    found = self._modules.get(id(value), found)
                elif isinstance(value, FunctionCtx):
                    with suppress(RuntimeError):  # in forward it has no edges yet
                        found = self.of_node(value) or found
        return found


def live_tensors(
    device: torch.device,
    frames: Iterable[FrameType],
    names: ModuleNames,
    state: Mapping[str, Mapping[str, Tensor]],
) -> list[LiveTensor]:
    """Return the memory that tensors hold on a device, the largest first.

    Args:
        device: of the memory.
        frames: whose variables name tensors; the innermost last.
        names: of modules.
        state: tensors of the run's state by part and owner; memory that two share counts for the first.
    """
    objects = [each for each in gc.get_objects() if issubclass(type(each), Tensor | GradientEdge)]
    of_state = ((part, owner, tensor) for part, owners in state.items() for owner, tensor in owners.items())
    kept = ((KEPT, owner, tensor) for owner, tensor in _saved_tensors(objects, names))
    variables = (
        (OTHER, f"{name} in {frame.f_code.co_qualname}", value)
        for frame in reversed([*frames])
        for name, value in frame.f_locals.items()
    )
    found = dict[int, LiveTensor]()
    for part, owner, tensor in (*of_state, *kept, *variables, *((OTHER, "", each) for each in objects)):
        if not issubclass(type(tensor), Tensor) or tensor.device.type != device.type:
            continue
        with suppress(RuntimeError, NotImplementedError):  # a tensor without storage
            storage = tensor.untyped_storage()
            if storage.nbytes():
                live = LiveTensor(storage.nbytes(), tuple(tensor.shape), tensor.dtype, part, owner)
                found.setdefault(storage._cdata, live)
    return sorted(found.values(), key=lambda live: -live.size)


def _saved_tensors(objects: Iterable[Any], names: ModuleNames) -> Iterator[tuple[str, Tensor]]:
    """Yield what the graphs of autograd keep, with the names of its modules and operations."""
    starts = [each.node if issubclass(type(each), GradientEdge) else each.grad_fn for each in objects]
    waiting = [(node, "") for node in starts if node is not None]
    seen, searched = set[int](), set[int]()  # nodes, and objects that hooks hold
    nodes = list[Any]()  # alive, so that their addresses are not used again
    while waiting:
        node, consumer = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        nodes.append(node)
        own = names.of_node(node)
        module = own or consumer
        operation = re.sub(r"(Function)?Backward\d*$", "", type(node).__name__.lstrip("_"))
        for saved in _raw_saved(node):
            for tensor in _held(saved, searched):
                yield f"{module} ({operation})" if module else operation, tensor
        parent = own.rpartition(".")[0] if own else consumer
        waiting += [(source, parent) for source, _ in node.next_functions if source is not None]


def _raw_saved(node: Any) -> Iterator[Any]:
    """Yield what a node has saved, without calling hooks, which would compute or copy it again."""
    for name in dir(node):
        if name.startswith("_raw_saved"):
            with suppress(RuntimeError):  # freed: backward has passed
                saved = getattr(node, name)
                yield from saved if isinstance(saved, tuple | list) else [saved]


def _held(saved: Any, searched: set[int]) -> Iterator[Tensor]:
    """Yield the tensor that is saved or, in its place, those that hooks hold, such as the inputs of a recomputation.

    The latter are found in the packed object and in the closure of the hook, without objects that were ``searched``.
    """
    waiting: list[Any] = [saved]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            yield each
        elif issubclass(type(each), SavedTensor):
            waiting += [each.data, each.unpack_hook]
        elif id(each) not in searched and not isinstance(each, type | ModuleType | nn.Module):
            searched.add(id(each))
            waiting += (each.__closure__ or ()) if isinstance(each, FunctionType) else gc.get_referents(each)
