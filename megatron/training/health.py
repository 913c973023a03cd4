"""Per-layer health metrics of a step: gradients, updates, activations, attention logits and expert load.

The metrics are the same in every parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.layers.attention import CoreAttention
from megatron.layers.attention_logits import largest_logit
from megatron.layers.router import Router, Routing
from megatron.parallel import comm
from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.ownership import Share, slots
from megatron.training.console import exponent, plain
from megatron.training.metrics import StepMetrics
from megatron.training.setup import Trainer

EMBEDDING, HEAD = "embedding", "head"
COLUMNS = 8
GRADIENT, ZEROS, ELEMENTS, WEIGHT, BEFORE, CHANGE, OUTPUT, OUTPUTS = range(COLUMNS)
"""Columns of the per-layer sums: squares, zeros and elements of the gradient; squares of the weight after the step,
before it, and of its change; squares and elements of the layer's output. An output that is replicated over
tensor-parallel ranks is counted on each of them, which leaves the mean unchanged; parameters are counted once."""


@dataclass(frozen=True)
class HealthRecord:
    """Metrics of one step by quantity and layer: ``embedding``, ``layers.0``..., ``head``.

    Quantities are ``grad-norm`` (before clipping), ``zeros-share`` (of the gradient's elements), ``params-norm`` (after
    the step), ``update-ratio`` (norm of the update over the norm of the weights before it), ``activation-rms`` (of the
    layer's output), ``attention-logit`` (the largest) and, with experts, ``expert-load`` (tokens of the busiest expert
    over the mean of all experts).
    """

    iteration: int
    consumed_samples: int  # of the whole run so far
    consumed_tokens: int  # of the whole run so far
    layers: Mapping[str, Mapping[str, float]]  # by quantity and layer
    totals: Mapping[str, float]  # over all layers, by metric name

    def values(self) -> dict[str, object]:
        """Return metrics named ``health/<quantity>/<layer>``, and totals by Megatron-LM's names where it has them."""
        named = {f"health/{kind}/{layer}": x for kind, layers in self.layers.items() for layer, x in layers.items()}
        progress = {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
        }
        return {**progress, **self.totals, **named}

    def line(self) -> str:
        """Return the extreme values and their layers, for the console."""
        norms = self.layers["grad-norm"]
        low = min(norms, key=lambda layer: norms[layer])
        update = exponent(self.totals["health/update-ratio/total"])
        return (
            f"health at {self.iteration}: gradient {plain(norms[low])} {low} to {self._maximum('grad-norm', plain)}"
            f" | update {update}, most {self._maximum('update-ratio', exponent)}"
            f" | activations {self._maximum('activation-rms', plain)}"
            f" | attention logit {self._maximum('attention-logit', plain)}"
            + (f" | busiest expert {self._maximum('expert-load', plain)}" if "expert-load" in self.layers else "")
        )

    def _maximum(self, quantity: str, formatted: Callable[[float], str]) -> str:
        """Return the largest value and its layer, such as ``4.1e-3 layers.7``; NaN counts as the largest."""
        values = self.layers[quantity]
        layer = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
        return f"{formatted(values[layer])} {layer}"


@dataclass
class Vitals:
    """Observes one step with forward hooks. Created by :func:`watch_next_step`, finished by :meth:`report`."""

    trainer: Trainer
    rows: dict[str, int]  # row of each layer in the tensors below
    before: dict[str, Tensor]  # main parameters before the step, in host memory
    sums: Tensor  # fp64 [layers, 8], of this rank
    logits: Tensor  # fp64 [layers], largest attention logit on this rank
    chosen: Tensor  # fp64 [layers, experts], tokens of this rank routed to each expert
    _seen: dict[tuple[str, int], MicroBatch] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _chunk_batch: MicroBatch = field(init=False)

    def begin(self) -> None:
        """Register forward hooks on the embedding, the blocks, the attention cores and the routers."""
        for chunk in self.trainer.chunks.values():
            self._handles.append(chunk.register_forward_pre_hook(self._set_chunk_batch))
        for name, module in (named for chunk in self.trainer.chunks.values() for named in chunk.named_modules()):
            if isinstance(module, CoreAttention):
                self._handles.append(module.register_forward_hook(self._attention_hook(layer_of(name))))
            elif isinstance(module, Router):
                self._handles.append(module.register_forward_hook(self._router_hook(layer_of(name))))
            elif name in self.rows:
                self._handles.append(module.register_forward_hook(self._output_hook(name)))

    def _attention_hook(self, layer: str) -> Any:
        def hook(module: CoreAttention, inputs: tuple[Any, ...], output: Tensor) -> None:
            q_SBND, k_SBGD, _, context = inputs
            if self._is_first_forward(f"attention of {layer}", context.batch):
                row = self.rows[layer]
                logit = largest_logit(q_SBND, k_SBGD, module.config.window_size, context.batch.documents)
                self.logits[row] = torch.maximum(self.logits[row], logit)

        return hook

    def _router_hook(self, layer: str) -> Any:
        def hook(module: Router, inputs: tuple[Any, ...], output: Routing) -> None:
            x_SBH, batch = inputs
            if self._is_first_forward(f"router of {layer}", batch):
                counts_T = counting(batch).repeat(x_SBH.shape[0]) > 0
                chosen = output.experts[counts_T].flatten()
                self.chosen[self.rows[layer]] += torch.bincount(chosen, minlength=self.chosen.shape[1])

        return hook

    def _output_hook(self, layer: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if layer == EMBEDDING:  # never recomputed
                x_SBH, batch = output, self._chunk_batch
            else:
                x_SBH, batch = output[0], inputs[1].batch
                if not self._is_first_forward(layer, batch):
                    return
            counts_B = counting(batch)
            counted_SBH = x_SBH.detach().where(counts_B.view(1, -1, 1) > 0, 0.0)
            self.sums[self.rows[layer], OUTPUT] += square_sum(counted_SBH)
            self.sums[self.rows[layer], OUTPUTS] += counts_B.sum() * (x_SBH.numel() // x_SBH.shape[1])

        return hook

    def _set_chunk_batch(self, chunk: Any, inputs: tuple[Any, ...]) -> None:
        """Keep the micro-batch for the embedding's hook; the embedding receives only its tokens."""
        self._chunk_batch = inputs[1]

    def _is_first_forward(self, what: str, batch: MicroBatch) -> bool:
        """Return False if the forward pass recomputes activations of the micro-batch."""
        key = what, id(batch)
        if key in self._seen:
            return False
        self._seen[key] = batch  # keep it alive, so that its id is not reused
        return True

    @torch.no_grad()
    def report(self, metrics: StepMetrics) -> HealthRecord:
        """Remove the hooks and return the record of the step. Collective over all ranks.

        Call it after the trainer's iteration and samples have been advanced.

        Args:
            metrics: results of the step.

        """
        while self._handles:
            self._handles.pop().remove()
        trainer = self.trainer
        world = trainer.mesh.world
        for name, share in trainer.buckets.counted().items():
            self.sums[self.rows[layer_of(name)]] += self._parameter_sums(name, share)
        sums, chosen = comm.all_reduce(torch.cat([self.sums, self.chosen], 1), world).tensor_split([COLUMNS], 1)
        finite_or_inf = self.logits.where(~self.logits.isnan(), torch.inf)  # a maximum over ranks may drop a NaN
        logits = comm.all_reduce(finite_or_inf, world, op="max")
        layers, totals = summarize(list(self.rows), sums, logits, metrics)
        if chosen.numel():
            busiest = (chosen.amax(1) / chosen.mean(1))[1:-1].tolist()
            layers["expert-load"] = dict(zip([*self.rows][1:-1], busiest))
        tokens = trainer.consumed_samples * trainer.config.training.seq_length
        return HealthRecord(trainer.iteration, trainer.consumed_samples, tokens, layers, totals)

    def _parameter_sums(self, name: str, share: Share) -> Tensor:
        """Return the columns of the parameter's elements that this rank counts, fp64 ``[8]``."""
        trainer = self.trainer
        spec = trainer.specs[name]
        out = torch.zeros_like(self.sums[0])
        first = share.start - trainer.buckets.shares[name].start
        held = trainer.buckets.grads[name], trainer.optimizer.masters[name], self.before[name].to(trainer.device)
        counted = [x.view(-1)[first : first + share.numel] for x in held]
        for slot in slots(spec, share, spec.owned):
            gradient, after, before = (slot.of(x) for x in counted)
            out[GRADIENT] += square_sum(gradient)
            out[ZEROS] += gradient.numel() - torch.count_nonzero(gradient)
            out[ELEMENTS] += gradient.numel()
            out[WEIGHT] += square_sum(after)
            out[BEFORE] += square_sum(before)
            out[CHANGE] += square_sum(after - before)
        return out


def watch(trainer: Trainer) -> Vitals:
    """Observe the next step. Copies the weights to host memory, which is the only wait for the device."""
    model = trainer.config.model
    rows = [EMBEDDING, *(f"layers.{i}" for i in range(model.num_layers)), HEAD]
    before = {name: master.detach().to("cpu", copy=True) for name, master in trainer.optimizer.masters.items()}
    sums = torch.zeros(len(rows), COLUMNS, dtype=torch.float64, device=trainer.device)
    chosen = sums.new_zeros(len(rows), model.num_experts or 0)
    logits = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=trainer.device)
    monitor = Vitals(trainer, {name: row for row, name in enumerate(rows)}, before, sums, logits, chosen)
    monitor.begin()
    return monitor


def counting(batch: MicroBatch) -> Tensor:
    """Return fp64 ``[B]``: 1 for samples with an unmasked label, 0 for samples that pad the batch."""
    return (batch.loss_mask.sum(1) > 0).double()


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module: ``layers.3`` for ``layers.3.mlp.linear_fc1.weight``."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return EMBEDDING if first == EMBEDDING else HEAD


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in fp64: rows are summed in at least fp32, then in fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).double().square().sum()


def summarize(
    rows: list[str], sums: Tensor, logits: Tensor, metrics: StepMetrics
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return per-layer and total metrics from sums over all ranks. Waits for the device.

    Args:
        rows: layer of each row of ``sums`` and ``logits``.
        sums: fp64 ``[layers, 8]``.
        logits: fp64 ``[layers]``.
        metrics: results of the step. The gradient buffers may still contain the loss scale and the clipping factor; the
            ratio to the step's gradient norm removes this common factor.

    """
    whole = sums.sum(0)
    buffer_norm = whole[GRADIENT].sqrt()
    usable = buffer_norm.isfinite() & (buffer_norm > 0)
    factor = torch.where(usable, metrics.grad_norm / buffer_norm, 1.0 / metrics.loss_scale)
    table = torch.cat([sums, whole.unsqueeze(0)])
    norms = (table[:, GRADIENT].sqrt() * factor).tolist()
    changes = (table[:, CHANGE] / table[:, BEFORE]).sqrt().tolist()
    layers = {
        "grad-norm": dict(zip(rows, norms)),
        "zeros-share": dict(zip(rows, (sums[:, ZEROS] / sums[:, ELEMENTS]).tolist())),
        "params-norm": dict(zip(rows, sums[:, WEIGHT].sqrt().tolist())),
        "update-ratio": dict(zip(rows, changes)),
        "activation-rms": dict(zip(rows[:-1], (sums[:, OUTPUT] / sums[:, OUTPUTS]).sqrt().tolist())),
        "attention-logit": dict(zip(rows[1:-1], logits[1:-1].tolist())),
    }
    totals = {
        "health/grad-norm/total": norms[-1],
        "health/update-ratio/total": changes[-1],
        "params-norm": whole[WEIGHT].sqrt().item(),
        "num-zeros": whole[ZEROS].item(),
        "max_attention_logit": logits.max().item(),
    }
    return layers, totals
