"""Let Megatron-LM run without a GPU: functions without effect for ``torch.cuda``, and Adam in the form it expects.

``replace_cuda`` and ``replace_optimizer`` change PyTorch and Megatron-LM at run time; nothing of the code of
Megatron-LM is changed. They run in an environment of its own, and import nothing of this package. The first must run
before Megatron-LM is imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
import typing
from collections import defaultdict
from typing import Any
from unittest import mock

import torch

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NO_VCS_VERSION": "1"}
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)

RNG_STATE = torch.zeros(16, dtype=torch.uint8)


class Stream(contextlib.nullcontext[Any]):
    """A stream or an event, both without effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)

    def record_event(self, *args: Any) -> Stream:
        """Return an event."""
        return Stream()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0


def on_cpu(function: Any) -> Any:
    """Put what a function makes on the device "cuda" on the CPU."""

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and "cpu" not in str(kwargs["device"]):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return made


def replace_cuda() -> None:
    """Let a program for GPUs run without one."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function
    nothing = "set_device synchronize empty_cache set_stream manual_seed manual_seed_all set_rng_state"
    for name in nothing.split():
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, Stream)
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: Stream())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    torch.cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: RNG_STATE.clone()
    torch.cuda._lazy_init = torch.cuda.nvtx = mock.MagicMock()
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=1, total_memory=1 << 34, name="CPU"
    )
    for name in FACTORIES.split():
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = on_cpu_to(torch.Tensor.to)
    torch.Tensor.type = cuda_type(torch.Tensor.type)
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.distributed.all_to_all_single = with_lists(torch.distributed.all_to_all_single)
    torch.distributed.all_gather = gathered_unevenly
    torch.distributed.reduce_scatter = summed_unevenly


FACTORIES = "empty zeros ones full rand randn tensor arange empty_like zeros_like ones_like full_like eye"


def on_cpu_to(function: Any) -> Any:
    """Leave a tensor that is sent to a GPU where it is."""

    def sent(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str | torch.device) and "cuda" in str(args[0]):
            args = ("cpu", *args[1:])
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(self, *args, **kwargs)

    return sent


def with_lists(function: Any) -> Any:
    """Pass numbers of rows as lists; on a GPU, Megatron-LM has them on the host by then."""

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        sizes = {
            name: value.tolist()
            for name, value in kwargs.items()
            if name.endswith("split_sizes") and torch.is_tensor(value)
        }
        return function(*args, **kwargs | sizes)

    return exchanged


def gathered_unevenly(outputs: Any, own: Any, group: Any = None, async_op: bool = False) -> None:
    """Gather tensors of several sizes, which gloo does not: each rank broadcasts its own."""
    for rank, output in enumerate(outputs):
        if rank == torch.distributed.get_rank(group):
            output.copy_(own)
        torch.distributed.broadcast(output, group=group, group_src=rank)


def summed_unevenly(output: Any, parts: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    """Sum tensors over the ranks, which each receive one, of a size of its own."""
    whole = torch.cat(list(parts))
    torch.distributed.all_reduce(whole, group=group)
    output.copy_(whole.split([len(part) for part in parts])[torch.distributed.get_rank(group)])


def cuda_type(function: Any) -> Any:
    """Report the type of a tensor as on a GPU, which the optimizers compare."""

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self
        return function(self).replace("torch.", "torch.cuda.", 1)

    return type_


class FusedAdam(torch.optim.AdamW):
    """Adam of PyTorch in the form that Megatron-LM expects: the number of steps belongs to the group."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **options: Any) -> None:
        super().__init__(params, foreach=False, **options)

    def __setstate__(self, state: Any) -> None:
        torch.optim.Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            group |= {name: value for name, value in self.defaults.items() if name not in group}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if self.state[parameter]:
                    self.state[parameter]["step"] = torch.tensor(group["step"] - 1.0)
        super().step()
        for state in self.state.values():
            state.pop("step", None)


def replace_optimizer() -> None:
    """Give the optimizer of Megatron-LM an Adam without a kernel for GPUs, and its random numbers no GPU."""
    from megatron.core import optimizer
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda *args, **kwargs: None
    optimizer.Adam = optimizer.distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER, optimizer.distrib_optimizer.HAVE_APEX_OR_TE = False, True
