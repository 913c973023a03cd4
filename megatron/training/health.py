"""What a step did to every layer: gradients, updates, activations, logits, experts; the same on every layout."""

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
"""Columns of what is summed for each layer: squares of the gradient, of the weight (after the step and before) and of
its change; zeros and elements of the gradient; squares and elements of the layer's output. Outputs that all
tensor-parallel ranks have count on each, which their mean does not show; parameters count once."""


@dataclass(frozen=True)
class HealthRecord:
    """One step's numbers by quantity and layer: ``embedding``, ``layers.0``..., ``head``.

    Attributes:
        iteration: number of the step.
        consumed_samples: samples of all steps so far.
        consumed_tokens: tokens of all steps so far.
        layers: ``grad-norm`` (before clipping), ``zeros-share`` (of the gradient's elements), ``params-norm`` (after
            the step), ``update-ratio`` (norm of the step's change over that of the weights before it),
            ``activation-rms`` (of the layer's output), ``attention-logit`` (the largest), and with experts
            ``expert-load`` (tokens of the busiest expert over the mean of all).
        totals: over all layers, by the names under which they are kept.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    layers: Mapping[str, Mapping[str, float]]
    totals: Mapping[str, float]

    def values(self) -> dict[str, object]:
        """The record as ``health/<quantity>/<layer>``; totals under Megatron-LM's names where it has one."""
        named = {f"health/{kind}/{layer}": x for kind, layers in self.layers.items() for layer, x in layers.items()}
        place = {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
        }
        return {**place, **self.totals, **named}

    def line(self) -> str:
        """The layers that stand out, for the console."""
        norms = self.layers["grad-norm"]
        low = min(norms, key=lambda layer: norms[layer])
        update = exponent(self.totals["health/update-ratio/total"])
        return (
            f"health at {self.iteration}: gradient {plain(norms[low])} {low} to {self._most('grad-norm', plain)}"
            f" | update {update}, most {self._most('update-ratio', exponent)}"
            f" | activations {self._most('activation-rms', plain)}"
            f" | attention logit {self._most('attention-logit', plain)}"
            + (f" | busiest expert {self._most('expert-load', plain)}" if "expert-load" in self.layers else "")
        )

    def _most(self, quantity: str, written: Callable[[float], str]) -> str:
        """``4.1e-3 layers.7``: the largest number and its layer; a NaN counts as larger than any."""
        values = self.layers[quantity]
        layer = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
        return f"{written(values[layer])} {layer}"


@dataclass
class Vitals:
    """Looks on while one step runs; made by :func:`watch`, ended by :meth:`report`.

    Attributes:
        rows: of the layers in what follows.
        before: the masters before the step, in the memory of the host.
        sums: fp64 ``[layers, 8]``, this rank's share of what is summed.
        logits: fp64 ``[layers]``, the largest attention logit on this rank.
        chosen: fp64 ``[layers, experts]``, how many of this rank's tokens chose each expert.
    """

    trainer: Trainer
    rows: dict[str, int]
    before: dict[str, Tensor]
    sums: Tensor
    logits: Tensor
    chosen: Tensor
    _seen: dict[tuple[str, int], MicroBatch] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _begun: MicroBatch = field(init=False)

    def begin(self) -> None:
        """Put hooks on the embedding, the blocks, the cores of attention and the routers."""
        for chunk in self.trainer.chunks.values():
            self._handles.append(chunk.register_forward_pre_hook(self._begin_chunk))
        for name, module in (named for chunk in self.trainer.chunks.values() for named in chunk.named_modules()):
            if isinstance(module, CoreAttention):
                self._handles.append(module.register_forward_hook(self._attended(layer_of(name))))
            elif isinstance(module, Router):
                self._handles.append(module.register_forward_hook(self._routed(layer_of(name))))
            elif name in self.rows:
                self._handles.append(module.register_forward_hook(self._put_out(name)))

    def _attended(self, layer: str) -> Any:
        def note(module: CoreAttention, inputs: tuple[Any, ...], output: Tensor) -> None:
            q_SBND, k_SBGD, _, scene = inputs
            if self._is_new(f"attention of {layer}", scene.batch):
                row, window = self.rows[layer], module.config.window_size
                logit = largest_logit(q_SBND, k_SBGD, window, scene.batch.documents)
                self.logits[row] = torch.maximum(self.logits[row], logit)

        return note

    def _routed(self, layer: str) -> Any:
        def note(module: Router, inputs: tuple[Any, ...], output: Routing) -> None:
            x_SBH, batch = inputs
            if self._is_new(f"router of {layer}", batch):
                counts_T = counting(batch).repeat(x_SBH.shape[0]) > 0
                chosen, experts = output.experts[counts_T].flatten(), self.chosen.shape[1]
                self.chosen[self.rows[layer]] += torch.bincount(chosen, minlength=experts)

        return note

    def _put_out(self, layer: str) -> Any:
        def note(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if layer == EMBEDDING or self._is_new(layer, inputs[1].batch):  # embeddings are never recomputed
                x_SBH, batch = (output, self._begun) if layer == EMBEDDING else (output[0], inputs[1].batch)
                counts_B = counting(batch)
                counted_SBH = x_SBH.detach().where(counts_B.view(1, -1, 1) > 0, 0.0)
                self.sums[self.rows[layer], OUTPUT] += square_sum(counted_SBH)
                self.sums[self.rows[layer], OUTPUTS] += counts_B.sum() * (x_SBH.numel() // x_SBH.shape[1])

        return note

    def _begin_chunk(self, chunk: Any, inputs: tuple[Any, ...]) -> None:
        """Note which micro-batch the embedding is about to see: it is told the tokens alone."""
        self._begun = inputs[1]

    def _is_new(self, what: str, batch: MicroBatch) -> bool:
        """Whether this is the first forward of a micro-batch, not one that recomputes activations."""
        key = what, id(batch)
        if key in self._seen:
            return False
        self._seen[key] = batch  # kept, so that no other gets its id
        return True

    @torch.no_grad()
    def report(self, metrics: StepMetrics) -> HealthRecord:
        """What the step did, once the trainer's counters say so; collective over all ranks.

        Args:
            metrics: what the step returned.

        """
        while self._handles:
            self._handles.pop().remove()
        t = self.trainer
        for name, share in t.buckets.counted().items():
            self.sums[self.rows[layer_of(name)]] += self._of_parameter(name, share)
        sums, chosen = comm.all_reduce(torch.cat([self.sums, self.chosen], 1), t.mesh.world).tensor_split([COLUMNS], 1)
        shown = self.logits.where(~self.logits.isnan(), torch.inf)  # a maximum over ranks may pass over a NaN
        logits = comm.all_reduce(shown, t.mesh.world, op="max")
        place = t.iteration, t.consumed_samples, t.consumed_samples * t.config.training.seq_length
        layers, totals = summarize(list(self.rows), sums, logits, metrics)
        if chosen.numel():
            busiest = (chosen.amax(1) / chosen.mean(1))[1:-1].tolist()
            layers["expert-load"] = dict(zip([*self.rows][1:-1], busiest))
        return HealthRecord(*place, layers, totals)

    def _of_parameter(self, name: str, share: Share) -> Tensor:
        """The columns of the elements that this rank counts, fp64 ``[8]``."""
        t, out, spec = self.trainer, torch.zeros_like(self.sums[0]), self.trainer.specs[name]
        first = share.start - t.buckets.shares[name].start
        held = t.buckets.grads[name], t.optimizer.masters[name], self.before[name].to(t.device)
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
    """Watch the next step. Copies the weights to the memory of the host; nothing else waits for the device."""
    t = trainer
    rows = [EMBEDDING, *(f"layers.{i}" for i in range(t.config.model.num_layers)), HEAD]
    before = {name: master.detach().to("cpu", copy=True) for name, master in t.optimizer.masters.items()}
    sums = torch.zeros(len(rows), COLUMNS, dtype=torch.float64, device=t.device)
    chosen = sums.new_zeros(len(rows), t.config.model.num_experts or 0)
    logits = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=t.device)
    vitals = Vitals(t, {name: row for row, name in enumerate(rows)}, before, sums, logits, chosen)
    vitals.begin()
    return vitals


def counting(batch: MicroBatch) -> Tensor:
    """Fp64 ``[b]``, 1 for samples that have a label that counts, 0 for those that pad a batch: nothing counts these."""
    return (batch.loss_mask.sum(1) > 0).double()


def layer_of(name: str) -> str:
    """Which layer a parameter or module belongs to: ``layers.3`` for ``layers.3.mlp.linear_fc1.weight``."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return EMBEDDING if first == EMBEDDING else HEAD


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares, fp64: rows in at least fp32, their sum in fp64, so that no digits are lost over many elements."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).double().square().sum()


def summarize(
    rows: list[str], sums: Tensor, logits: Tensor, metrics: StepMetrics
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The quantities of every layer and of all, from sums over all ranks; waits for the device.

    Clipping and the loss scale have left one factor in all gradients; the norm from before them says which.
    """
    whole = sums.sum(0)
    left = whole[GRADIENT].sqrt()
    factor = torch.where(left.isfinite() & (left > 0), metrics.grad_norm / left, 1.0 / metrics.loss_scale)
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
