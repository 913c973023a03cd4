"""A model with its gradient buckets and optimizer in one process, for unit and parity tests."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.model import ModelConfig
from megatron.config.multi_token import LATER_MASK, LATER_WEIGHTS
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.data.later_tokens import later_tokens
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.sharding import ShardSpec
from megatron.inference.generate import SamplingParams, generate
from megatron.kernels.registry import Kernels
from megatron.layers.activation_offload import ActivationOffload
from megatron.layers.context import BuildContext
from megatron.model.gpt import GPTChunk, build_gpt
from megatron.optimizer.build import build_grad_buffer, build_optimizer
from megatron.optimizer.distributed_optimizer import DistributedOptimizer, UpdateHook, UpdateResult
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.parameter_store import ParameterStore
from megatron.training.components.average import AverageWeights
from megatron.training.components.spikes import SpikeGuard

TINY = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=101,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=16,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.2,  # wide enough for attention and activations to be far from linear
)


def tiny(**changes: Any) -> ModelConfig:
    """``TINY`` with other switches."""
    return replace(TINY, **changes)


def mesh_of(rank: int, world_size: int, **sizes: Any) -> Mesh:
    """The mesh of a rank, with sizes of a `ParallelConfig`."""
    return Mesh(Layout.from_config(ParallelConfig(**sizes), world_size), rank)


def one_rank_mesh() -> Mesh:
    """The mesh of a process that is alone."""
    return mesh_of(0, 1)


def text_on_ranks(rank: int, ranks: int, config: ModelConfig) -> list[list[int]]:
    """Text of a model whose heads are on several ranks."""
    mesh = mesh_of(rank, ranks, tensor_model_parallel_size=ranks)
    context = BuildContext(mesh, GradAccumulator(), torch.float64)
    return generate(build_gpt(config, TrainingConfig(), context), [[5, 6, 7], [1]], 8, SamplingParams(0.0))


def random_batch(config: ModelConfig, samples: int = 2, length: int = 16, seed: int = 0, **changes: Any) -> MicroBatch:
    """Random tokens and labels, about a fifth of the labels masked; ``changes`` replaces fields.

    With the later tokens that the model predicts, in a batch of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab, (samples, length + 1), generator=generator)
    mask = (torch.rand(samples, length, generator=generator) > 0.2).float()
    batch = replace(MicroBatch(ids[:, :-1], ids[:, 1:], mask, torch.arange(samples) + 100 * seed, seed), **changes)
    if not config.mtp_num_layers:
        return batch
    documents = None if batch.documents is None else batch.documents.numpy()
    later = later_tokens(batch.labels.numpy(), batch.loss_mask.numpy(), documents, config.mtp_num_layers)
    extra = {name: torch.from_numpy(column) for name, column in later.items()}
    extra[LATER_WEIGHTS] = batch.loss_mask.double().sum() / extra[LATER_MASK].double().sum((0, 1))
    return replace(batch, extra=extra)


def grad_buffer_of(
    specs: Mapping[str, ShardSpec],
    dtypes: torch.dtype | Mapping[str, torch.dtype],
    config: ParallelConfig,
    grad_accumulator: GradAccumulator | None = None,
    uncut: Collection[str] = (),
) -> GradBuffer:
    """The gradients of one rank."""
    of_each = dict.fromkeys(specs, dtypes) if isinstance(dtypes, torch.dtype) else dtypes
    accumulator, device = grad_accumulator or GradAccumulator(), torch.device("cpu")
    return build_grad_buffer(specs, of_each, one_rank_mesh(), accumulator, device, config, uncut)


class Gradients(GradTarget):
    """Gradients as tensors by name, for layers without buffers; those in ``stale`` are overwritten first."""

    def __init__(self, tensors: Mapping[str, Tensor], stale: Iterable[str] = ()) -> None:
        self.tensors, self.stale = tensors, set(stale)
        self.contributions: list[str] = []

    def claim(self, name: str) -> tuple[Tensor, bool]:
        first = name in self.stale
        self.stale.discard(name)
        return self.tensors[name], first

    def contributed(self, name: str) -> None:
        self.contributions.append(name)


@dataclass
class Solo:
    """Everything a step needs. Gradients are in ``buckets.grads``, by name."""

    chunk: GPTChunk
    grad_accumulator: GradAccumulator
    buckets: GradBuffer
    optimizer: DistributedOptimizer
    hooks: Sequence[UpdateHook] = ()

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        dtype: torch.dtype = torch.float64,
        training: TrainingConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        bucket_size: int = 20_000,
        kernels: Kernels | None = None,
        offload: ActivationOffload | None = None,
    ) -> Solo:
        """A freshly initialised model in training mode; small buckets, so that there are several."""
        mesh, grad_accumulator = one_rank_mesh(), GradAccumulator()
        chunk = build_gpt(
            config,
            training or TrainingConfig(),
            BuildContext(mesh, grad_accumulator, dtype, kernels=kernels or Kernels(), offload=offload),
        )
        params = chunk.params
        dtypes = {name: p.dtype for name, p in params.items()}
        parallel = ParallelConfig(ddp_bucket_size=bucket_size)
        buckets = grad_buffer_of(chunk.specs, dtypes, parallel, grad_accumulator)
        weights = ParameterStore(params, buckets, parallel)
        if offload is not None:
            offload.leave_out(buffer.whole for buffer in weights.buffers)
        chunk.train()
        rules = optimizer or OptimizerConfig()
        built = build_optimizer(weights, chunk.specs, buckets, mesh, rules)
        hooks: list[UpdateHook] = []
        if rules.skip_spikes is not None:
            hooks.append(SpikeGuard(rules.skip_spikes, rules.spike_window, "cpu"))
        hooks += [] if rules.ema_decay is None else [AverageWeights(built, rules.ema_decay)]
        return cls(chunk, grad_accumulator, buckets, built, hooks)

    @property
    def average(self) -> dict[str, Tensor]:
        """Moving average of the main parameters by name; empty without one."""
        return {n: x for hook in self.hooks if isinstance(hook, AverageWeights) for n, x in hook.average.items()}

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model compute with the moving average of its weights inside."""
        return next(hook.in_model() for hook in self.hooks if isinstance(hook, AverageWeights))

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Parameters by global name."""
        return dict(self.chunk.named_parameters())

    def backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients of the mean loss over all unmasked labels; returns that loss."""
        self.buckets.start_step(len(batches))
        tokens = sum(batch.loss_mask.sum() for batch in batches)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss, aux = self.chunk(None, batch)
            ((loss + aux) / tokens).backward()
            total += loss.detach()
        self.buckets.finish()
        return total / tokens

    def step(
        self, batches: Sequence[MicroBatch], lr: float = 1e-3, weight_decay: float = 0.1
    ) -> tuple[Tensor, UpdateResult]:
        """One training step: ``(loss, outcome)``."""
        loss = self.backward(batches)
        self.optimizer.reduce_gradients()
        return loss, self.optimizer.update(Rates(lr, weight_decay), torch.ones(()), loss, hooks=self.hooks)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all gradients."""
        return {name: grad.clone() for name, grad in self.buckets.grads.items()}


class Allocations(TorchDispatchMode):
    """Sees every tensor that operations make while it is active.

    Attributes:
        largest: bytes of the largest one.
        peak: the most bytes of them that existed at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in given:  # a view, or in place
                continue
            self.largest = max(self.largest, storage.nbytes())
            self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, self._existing)
        return out

    @property
    def _existing(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())

    @property
    def alive(self) -> int:
        """Bytes of those that something still holds."""
        gc.collect()  # frames of checkpointed regions hold one another
        return self._existing
