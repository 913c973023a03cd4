"""Count the bytes, matrix products and attention calls of PyTorch code from the shapes of its tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNEL = {"_unsafe_view", "detach", "lift_fresh", "record_stream", "set_", "resize_", "_local_scalar_dense"}
"""Operations, beside views and allocations, that launch nothing or only copy to the host."""

OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_", "masked_fill_"}
"""In-place operations that do not read what they write."""

INDEXED = {"embedding", "index_select", "index", "gather", "nll_loss_forward"}
INDEXED_WRITES = {"index_add_", "index_add", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_"}
"""Operations that touch only the chosen rows of their first tensor."""

UPDATED = {"_adam": ("param", "grad", "exp_avg", "exp_avg_sq"), "_accumulate_products": ("target_EOI",)}
"""Arguments that Triton kernels read and overwrite, unless they have an argument BETA that is 0."""

MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1, "_addmm_activation": 1}
MATMULS |= {"_scaled_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0}
"""Matrix products, and the position of their first factor."""

GROUPED = {"_multiply_rows": ("x_RK", "y_RN"), "_accumulate_products": ("x_RI", "dy_RO")}
"""Triton kernels of grouped products, and two arguments with the same rows, all of whose columns are multiplied."""


def num_bytes(t: Tensor) -> int:
    """Return the bytes of the memory that a tensor covers; expanded dimensions count once."""
    elements = t.element_size()
    for size, stride in zip(t.shape, t.stride()):
        elements *= size if stride else 1
    return elements


class Traffic(TorchDispatchMode):
    """Count the bytes that kernels read and write, the matrix products and the attention calls.

    An operation moves its distinct inputs and outputs once. Views and allocations move nothing. Matrix products and
    attention are kept apart, by shape, since their arithmetic limits them. Triton kernels do not pass through dispatch:
    their arguments are counted.
    """

    def __init__(self, tables: set[torch.Size], device_type: str = "cuda") -> None:
        """Count on one kind of device; of ``tables``, shapes of embeddings, Triton kernels touch only chosen rows."""
        super().__init__()
        self.tables, self.device_type = tables, device_type
        # Bytes outside matrix products and attention.
        self.by_op: Counter[str] = Counter()
        # By FLOPs, bytes and dtype.
        self.matmuls: Counter[tuple[int, int, str]] = Counter()
        # By direction, batch x heads, length and head dimension.
        self.attention: Counter[tuple[str, int, int, int]] = Counter()

    @property
    def bytes(self) -> int:
        """Return all bytes outside matrix products and attention."""
        return sum(self.by_op.values())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled while this mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.is_view or name in NO_KERNEL or "empty" in name:
            return out
        reads, writes = self.operands(func._schema, name, args, kwargs, out)
        moved = sum(reads.values()) + sum(writes.values())
        if not moved:
            return out
        if name in MATMULS:
            a, b = args[MATMULS[name] : MATMULS[name] + 2]
            self.matmuls[2 * a.numel() * b.shape[-1], moved, str(a.dtype).removeprefix("torch.")] += 1
        elif "attention" in name or "attn" in name:
            direction = "backward" if "backward" in name else "forward"
            *batch, heads, length, width = args[1 if direction == "backward" else 0].shape
            if "scaled_dot" not in name:
                heads, length = length, heads
            self.attention[direction, math.prod(batch) * heads, length, width] += 1
        else:
            self.by_op[f"aten {name}"] += moved
        return out

    def operands(
        self, schema: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[dict[Any, int], dict[Any, int]]:
        """Return the bytes of the distinct tensors that an operation reads and writes."""
        reads: dict[Any, int] = {}
        writes: dict[Any, int] = {}
        given = {argument.name: (argument, value) for argument, value in zip(schema.arguments, args)}
        given |= {a.name: (a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs}
        for argument, value in given.values():
            written = argument.alias_info is not None and argument.alias_info.is_write
            if name.startswith("_fused_adam") and argument.name == "grads":
                written = kwargs.get("grad_scale") is not None
            for t in self.tensors(value):
                if written:
                    writes[key(t)] = num_bytes(t)
                if not (written and (argument.kwarg_only or name in OVERWRITES)):
                    reads[key(t)] = num_bytes(t)
        for t in self.tensors(out):
            writes[key(t)] = num_bytes(t)
        if name in INDEXED:
            reads[key(args[0])] = sum(num_bytes(t) for t in self.tensors(out)[:1])
        if name in INDEXED_WRITES:
            rows = num_bytes(args[3] if "add" in name else args[2])
            reads[key(args[0])], writes[key(args[0])] = rows, rows
        return reads, writes

    def tensors(self, value: Any) -> list[Tensor]:
        """Return the tensors on the device in nested lists."""
        return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.device.type == self.device_type]

    def inductor_kernel(self, kernel: Any, args: Sequence[Any]) -> None:
        """Count a launch of a Triton kernel of Inductor, whose arguments are named by what they are for."""
        named = {n: t for n, t in zip(kernel.triton_meta["signature"], args) if isinstance(t, Tensor)}
        indexed = any(t.dtype == torch.int64 for t in named.values())
        moved = 0
        for argument, t in named.items():
            size = num_bytes(t)
            if indexed and t.shape in self.tables:
                others = [num_bytes(o) for o in named.values() if o.shape not in self.tables]
                size = min(size, max(others, default=size))
            moved += size * (2 if argument.startswith("in_out_ptr") else 1)
        self.by_op[f"triton {kernel.fn.__name__}"] += moved

    def triton_kernel(self, kernel: Any, args: Sequence[Any]) -> None:
        """Count a launch of another Triton kernel: each of its distinct tensors once, those in ``UPDATED`` twice."""
        name, named = kernel.__name__, dict(zip(kernel.arg_names, args))
        updated = UPDATED.get(name, ()) if named.get("BETA", True) else ()
        tensors = [
            *{key(t): t for t in self.tensors(args)}.values(),
            *(named[each] for each in updated if each in named),
        ]
        moved = sum(map(num_bytes, tensors))
        if name in GROUPED:
            x, y = (named[each] for each in GROUPED[name])
            self.matmuls[2 * x.numel() * y.shape[1], moved, str(x.dtype).removeprefix("torch.")] += 1
        else:
            self.by_op[f"triton {name}"] += moved

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count everything inside."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from triton.runtime.jit import JITFunction

        def counted(run: Any, count: Any) -> Any:
            def launch(kernel: Any, *args: Any, **options: Any) -> Any:
                count(kernel, args)
                return run(kernel, *args, **options)

            return launch

        inductor = patch.object(CachingAutotuner, "run", counted(CachingAutotuner.run, self.inductor_kernel))
        with inductor, patch.object(JITFunction, "run", counted(JITFunction.run, self.triton_kernel)), self:
            yield


def key(t: Tensor) -> tuple[Any, ...]:
    """Return a key that is unique to the memory of a tensor."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype
